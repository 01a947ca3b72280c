//! Skiff's benchmark: components in a loop first, then the built server over TLS.
//!
//! Prints one result per line, with its ratio to a baseline of the same run, and all results as JSON on
//! the last line. It does not judge the results: see README.md for how to read them.

mod admission;
mod client;
mod custom_resources;
mod disk;
mod fairness;
mod load;
mod micro;
mod objects;
mod pods;
mod rbac;
mod report;
mod rollout;
mod schedule;
mod server;
mod services;
mod watch;
mod wire;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::report::Report;

/// Benchmark skiff.
#[derive(Parser)]
struct Flags {
    /// Run every benchmark with small sizes, as a smoke test
    #[arg(long)]
    quick: bool,
    /// Run only the rollout of a large Deployment
    #[arg(long)]
    only_rollout: bool,
    /// Run only Services in the kernel; requires root, and nftables for comparison
    #[arg(long)]
    only_services: bool,
    /// Run only pods on a real node, with the embedded runtime and with containerd; requires root,
    /// containerd and busybox
    #[arg(long)]
    only_pods: bool,
    /// Run only custom resources
    #[arg(long)]
    only_kinds: bool,
    /// Run only admission webhooks and policies
    #[arg(long)]
    only_admission: bool,
    /// Run only fairness: writes during a flood of lists
    #[arg(long)]
    only_fairness: bool,
    /// The skiff binary to measure [default: the one in the directory of this binary]
    #[arg(long, env = "SKIFF_BIN")]
    skiff: Option<PathBuf>,
    /// Directory for data; its disk is part of the measurement [default: the temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Output of an earlier run to compare with
    #[arg(long)]
    compare: Option<PathBuf>,
}

struct BenchmarkPlan {
    authorization_checks: usize,
    micro: micro::Iterations,
    entries: usize,
    wire: wire::Sizes,
    schedule: schedule::Sizes,
    rollout: rollout::Sizes,
    custom_resources: usize,
    pods: pods::Sizes,
    admission_creates: usize,
}

const FULL: BenchmarkPlan = BenchmarkPlan {
    authorization_checks: 500_000,
    micro: micro::Iterations { min_batch_time: Duration::from_millis(20), batch_count: 15 },
    entries: 20_000,
    wire: wire::Sizes {
        starts: 5,
        pods: 20_000,
        config_maps: 4_000,
        watchers: 1_000,
        watch_writes: (50, 200),
        rounds: 5,
        round: Duration::from_millis(700),
    },
    schedule: schedule::Sizes { nodes: &[100, 1_000, 5_000], pods: 10_000, complex: (5_000, 4_000) },
    rollout: rollout::Sizes { nodes: 500, pods: 5_000 },
    custom_resources: 1_000,
    pods: pods::Sizes { sequential: 20, parallel: 50, many: 100, commands: 20 },
    admission_creates: 2_000,
};

const SMOKE: BenchmarkPlan = BenchmarkPlan {
    authorization_checks: 2_000,
    micro: micro::Iterations { min_batch_time: Duration::from_millis(1), batch_count: 3 },
    entries: 300,
    wire: wire::Sizes {
        starts: 1,
        pods: 300,
        config_maps: 40,
        watchers: 20,
        watch_writes: (3, 8),
        rounds: 1,
        round: Duration::from_millis(50),
    },
    schedule: schedule::Sizes { nodes: &[5], pods: 20, complex: (10, 10) },
    rollout: rollout::Sizes { nodes: 3, pods: 20 },
    custom_resources: 10,
    pods: pods::Sizes { sequential: 2, parallel: 3, many: 5, commands: 2 },
    admission_creates: 20,
};

fn main() -> Result<()> {
    let flags = Flags::parse();
    let plan = if flags.quick { SMOKE } else { FULL };
    if flags.only_services {
        if services::run_in_netns()? {
            let mut report = Report::default();
            services::run(&mut report, if flags.quick { &[10] } else { &[10, 1_000, 10_000] })?;
            println!("{}", report.json(json!({"load": load_average()})));
        }
        return Ok(());
    }
    if flags.only_pods && !services::run_in_netns()? {
        return Ok(());
    }
    let binary = flags.skiff.map_or_else(server::built_binary, Ok)?;
    ensure!(binary.is_file(), "no skiff at {}: build it, or set --skiff", binary.display());
    let dir = flags.dir.unwrap_or_else(std::env::temp_dir);
    let mut report = match flags.compare {
        Some(path) => {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            Report::with_earlier_run(&text)
                .with_context(|| format!("{} is not the output of a benchmark run", path.display()))?
        }
        None => Report::default(),
    };
    raise_open_file_limit(plan.wire.watchers as u64 + 512)?;
    let before = load_average();
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        if flags.only_rollout {
            return rollout::run(&mut report, &dir, plan.rollout).await;
        }
        if flags.only_kinds {
            return custom_resources::run(&mut report, &binary, &dir, plan.custom_resources).await;
        }
        if flags.only_pods {
            return pods::run(&mut report, &binary, &dir, plan.pods).await;
        }
        if flags.only_admission {
            return admission::run(&mut report, &binary, &dir, plan.admission_creates).await;
        }
        if flags.only_fairness {
            return wire::run_fairness(&mut report, &binary, &dir, plan.wire).await;
        }
        // Runs first, while the heap is not fragmented: reused memory would hide the growth that is
        // measured.
        rbac::run(&mut report, plan.authorization_checks)?;
        micro::run(&mut report, plan.micro, plan.entries)?;
        let scratch = tempfile::Builder::new().prefix("skiff-bench-").tempdir_in(&dir)?;
        disk::run(&mut report, scratch.path(), plan.wire.round, plan.wire.rounds, plan.entries).await?;
        drop(scratch);
        wire::run(&mut report, &binary, &dir, plan.wire).await?;
        custom_resources::run(&mut report, &binary, &dir, plan.custom_resources).await?;
        admission::run(&mut report, &binary, &dir, plan.admission_creates).await?;
        schedule::run(&mut report, &binary, &dir, &plan.schedule).await?;
        rollout::run(&mut report, &dir, plan.rollout).await
    })?;
    let about = json!({
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "load": [before, load_average()],
        "quick": flags.quick,
        "skiff": binary.display().to_string(),
    });
    println!("{}", report.json(about));
    Ok(())
}

/// Each watcher is a connection in this process and in the server, which inherits the limit.
fn raise_open_file_limit(need: u64) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= need) {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(need), maximum: limit.maximum })
        .with_context(|| format!("{need} open files are not allowed: raise the limit (ulimit -Hn)"))
}

/// The load average of the last minute. At the start it shows other work on this machine, at the end it
/// includes the benchmark.
fn load_average() -> Value {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse::<f64>().ok()).into()
}

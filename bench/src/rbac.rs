//! RBAC authorization: the latency of one decision, and the memory of all roles and bindings.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use apiserver::bench_support::{BenchAuthorizer, BenchUser};
use serde_json::{Value, json};

use crate::report::{Report, Unit, quantile};

const ROLE_COUNT: usize = 1_000;
const BINDING_COUNT: usize = 5_000;
const NAMESPACE_COUNT: usize = 100;
const GROUP_COUNT: usize = 200;
/// One of this many roles and bindings is cluster-scoped.
const CLUSTER_SCOPED_EVERY: usize = 10;
const RESOURCES: [&str; 6] = ["pods", "services", "configmaps", "secrets", "endpoints", "events"];

pub fn run(report: &mut Report, decisions: usize) -> Result<()> {
    // Warm-up: loads the code and initializes statics, so that they are not measured.
    drop(BenchAuthorizer::from_objects((0..20).map(role).chain((0..20).map(binding))));
    let before = rss_mb()?;
    let access =
        BenchAuthorizer::from_objects((0..ROLE_COUNT).map(role).chain((0..BINDING_COUNT).map(binding)));
    let after = rss_mb()?;
    report.add("memory/rbac-1000-roles-5000-bindings", Unit::Megabytes, (after - before).max(0.001));

    let mut times = Vec::with_capacity(decisions);
    let mut allowed = [0; 4];
    for i in 0..decisions {
        let check = AccessCheck::nth(i);
        let started = Instant::now();
        let decision = black_box(check.is_allowed(&access));
        times.push(started.elapsed().as_nanos() as f64);
        ensure!(
            decision == check.expected,
            "binding {}: unexpected decision for check {}",
            check.binding,
            i % 4
        );
        allowed[i % 4] += usize::from(decision);
    }
    ensure!(
        allowed[3] == 0 && allowed[..3].iter().all(|count| *count > 0),
        "unexpected numbers of allowed requests: {allowed:?}"
    );
    report.add("rbac/decide/p50", Unit::Nanos, quantile(&mut times, 0.5));
    report.add("rbac/decide/p99", Unit::Nanos, quantile(&mut times, 0.99));
    Ok(())
}

/// A request by a subject of one of the bindings, and the expected decision.
struct AccessCheck {
    binding: usize,
    user: BenchUser,
    verb: &'static str,
    resource: String,
    namespace: String,
    expected: bool,
}

impl AccessCheck {
    /// Cycles through requests that are allowed to a user, to a group and cluster-wide, and one that is
    /// denied.
    fn nth(i: usize) -> AccessCheck {
        let scope = i % 4;
        // The stride is coprime to the number of bindings, so that every binding is visited.
        let n = i.wrapping_mul(7_919) % BINDING_COUNT;
        let binding = if scope == 2 {
            n - n % CLUSTER_SCOPED_EVERY
        } else {
            n - n % CLUSTER_SCOPED_EVERY + 1 + n % (CLUSTER_SCOPED_EVERY - 1)
        };
        let name = if scope == 1 { "other-user".to_owned() } else { format!("user-{binding}") };
        let mut groups: Vec<String> = vec!["system:authenticated".into()];
        if scope == 1 {
            groups.push(format!("group-{}", binding % GROUP_COUNT));
        }
        let role = role_of(binding);
        let resource = format!("{}-{role}", RESOURCES[i % 5]);
        let namespace = match scope {
            2 => format!("ns-{}", i % NAMESPACE_COUNT),
            _ => namespace(binding),
        };
        let verb = if scope == 3 { "delete" } else { "get" };
        AccessCheck {
            binding,
            user: BenchUser::new(name, groups),
            verb,
            resource,
            namespace,
            expected: scope != 3,
        }
    }

    fn is_allowed(&self, access: &BenchAuthorizer) -> bool {
        access.allows(&self.user, self.verb, &self.resource, (&self.namespace, "an-object"))
    }
}

fn is_cluster_scoped(i: usize) -> bool {
    i.is_multiple_of(CLUSTER_SCOPED_EVERY)
}

fn namespace(i: usize) -> String {
    format!("ns-{}", i % NAMESPACE_COUNT)
}

/// The role of a binding. It has the same scope as the binding, and the same namespace if any.
fn role_of(binding: usize) -> usize {
    binding % ROLE_COUNT
}

fn role(i: usize) -> Value {
    let rule = |kind: &&str| {
        json!({"apiGroups": [""], "resources": [format!("{kind}-{i}"), format!("{kind}-{i}/status")],
        "verbs": ["get", "list", "watch", "create"]})
    };
    let rules: Vec<Value> = RESOURCES[..5].iter().map(rule).collect();
    let metadata = json!({"name": format!("role-{i}"), "namespace": if is_cluster_scoped(i) { String::new() } else { namespace(i) }});
    json!({"kind": if is_cluster_scoped(i) { "ClusterRole" } else { "Role" }, "metadata": metadata, "rules": rules})
}

fn binding(i: usize) -> Value {
    let cluster = is_cluster_scoped(i);
    let subject = |kind: &str, name: String| json!({"kind": kind, "name": name, "apiGroup": "rbac.authorization.k8s.io"});
    let mut subjects =
        vec![subject("User", format!("user-{i}")), subject("Group", format!("group-{}", i % GROUP_COUNT))];
    if i % 500 == 1 {
        subjects.push(subject("Group", "system:authenticated".into()));
    }
    json!({
        "kind": if cluster { "ClusterRoleBinding" } else { "RoleBinding" },
        "metadata": {"name": format!("binding-{i}"), "namespace": if cluster { String::new() } else { namespace(i) }},
        "subjects": subjects,
        "roleRef": {"kind": if cluster { "ClusterRole" } else { "Role" }, "name": format!("role-{}", role_of(i))},
    })
}

/// Resident memory of this process in MB.
fn rss_mb() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.context("no VmRSS in /proc")? * 1024.0 / 1e6)
}

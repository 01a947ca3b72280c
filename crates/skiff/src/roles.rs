//! Components that run separately from the API server, with a kubeconfig: `skiff controller-manager`,
//! `skiff scheduler`, `skiff proxy`, `skiff simulate`.

use std::fmt::Write as _;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use client::remote::Remote;
use client::{Client, Kubeconfig};
use controllers::service_balancer::nodes::NodeBalancer;
use jiff::Timestamp;
use reconcile::cloud::{Cloud, CloudHandle};
use reconcile::{Clock, Ctx, Election, Settings, Signers};
use serde_json::json;
use tokio::sync::watch;

use crate::flags::{ControllerManagerFlags, ProxyFlags, SchedulerFlags, SigningFlags, SimulateFlags};
use crate::running;
use crate::secure_serving;
use crate::server::shutdown_signal;
use crate::services;
use crate::threads::runtime_builder;

pub const CONTROLLER_MANAGER: &str = "kube-controller-manager";
pub const SCHEDULER: &str = "kube-scheduler";
/// Upstream's ports for health and metrics.
const CONTROLLER_MANAGER_PORT: u16 = 10257;
const SCHEDULER_PORT: u16 = 10259;

pub fn controller_manager(flags: &ControllerManagerFlags) -> anyhow::Result<()> {
    let enabled = controllers::EnabledControllers::parse(&flags.controllers)?;
    let settings = settings(flags)?;
    run_component(&flags.kubeconfig, CONTROLLER_MANAGER, async |ctx| {
        // By default, pods get the CA that this process verifies the API server with.
        let root_ca = if settings.root_ca.is_empty() { &ctx.settings.root_ca } else { &settings.root_ca };
        let settings = Settings { root_ca: root_ca.clone(), ..settings };
        let ctx = ctx.with_settings(settings);
        let component_config = json!({
            "kind": "KubeControllerManagerConfiguration",
            "apiVersion": "kubecontrollermanager.config.k8s.io/v1alpha1",
            "Generic": {
                "Controllers": flags.controllers,
                "LeaderElection": {"leaderElect": flags.leader_elect, "resourceName": CONTROLLER_MANAGER},
            },
            "KubeCloudShared": {"ClusterCIDR": flags.cluster_cidr.join(",")},
        });
        let config = ("kubecontrollermanager.config.k8s.io", component_config);
        secure_serving::start(&flags.monitor, CONTROLLER_MANAGER_PORT, &ctx, config).await?;
        let is_leader = register_leader_metric(&ctx, CONTROLLER_MANAGER);
        if !flags.leader_elect {
            controllers::run(ctx, enabled).await;
            return Ok(());
        }
        let election = Election {
            client: ctx.client.clone(),
            clock: ctx.clock.clone(),
            lease: CONTROLLER_MANAGER,
            identity: format!("{}_{}", hostname(), std::process::id()),
        };
        let shutdown = ctx.shutdown.clone();
        let work = async {
            is_leader.store(true, Ordering::Relaxed);
            controllers::run(ctx.clone(), enabled).await;
        };
        let lost = reconcile::lead(&election, shutdown, work).await;
        // Work in flight must not write after the lease is lost, so the process exits, as in upstream.
        anyhow::ensure!(!lost, "lost the lease {CONTROLLER_MANAGER}");
        Ok(())
    })
}

pub fn scheduler(flags: &SchedulerFlags) -> anyhow::Result<()> {
    let config = scheduler_config(flags.config.as_deref())?;
    let use_leader_election = flags.leader_elect.unwrap_or(config.leader_election.leader_elect);
    run_component(&flags.kubeconfig, SCHEDULER, async |ctx| {
        let config_fields = json!({
            "kind": "KubeSchedulerConfiguration",
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "percentageOfNodesToScore": config.percentage_of_nodes_to_score,
            "podInitialBackoffSeconds": config.pod_initial_backoff_seconds,
            "podMaxBackoffSeconds": config.pod_max_backoff_seconds,
            "leaderElection": {"leaderElect": use_leader_election, "resourceName": SCHEDULER},
            "profiles": config.profiles.iter().map(|profile| json!({"schedulerName": profile.scheduler_name}))
                .collect::<Vec<_>>(),
        });
        let config_group = ("kubescheduler.config.k8s.io", config_fields);
        secure_serving::start(&flags.monitor, SCHEDULER_PORT, &ctx, config_group).await?;
        let is_leader = register_leader_metric(&ctx, SCHEDULER);
        if !use_leader_election {
            return Ok(scheduler::run::run(ctx, config, &[]).await?);
        }
        let election = Election {
            client: ctx.client.clone(),
            clock: ctx.clock.clone(),
            lease: SCHEDULER,
            identity: format!("{}_{}", hostname(), std::process::id()),
        };
        let mut result = Ok(());
        let work = async {
            is_leader.store(true, Ordering::Relaxed);
            result = scheduler::run::run(ctx.clone(), config, &[]).await;
        };
        let lost = reconcile::lead(&election, ctx.shutdown.clone(), work).await;
        anyhow::ensure!(!lost, "lost the lease {SCHEDULER}");
        Ok(result?)
    })
}

/// Registers upstream's metric for whether this instance is the leader.
fn register_leader_metric(ctx: &Ctx, name: &'static str) -> Arc<AtomicBool> {
    let is_leader = Arc::new(AtomicBool::new(false));
    let leader_status = is_leader.clone();
    ctx.metrics.register_writer(move |out| {
        let (family, value) =
            ("leader_election_master_status", u8::from(leader_status.load(Ordering::Relaxed)));
        let _ = writeln!(out, "# TYPE {family} gauge\n{family}{{name=\"{name}\"}} {value}");
    });
    is_leader
}

/// The controllers' settings from the flags.
fn settings(flags: &ControllerManagerFlags) -> anyhow::Result<Settings> {
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let keys = flags.service_account_private_key_file.as_deref().map(pki::token::Keys::load).transpose()?;
    let nodes = flags.servicelb.then(|| NodeBalancer::with_pool(&flags.servicelb_pool)).transpose()?;
    Ok(Settings {
        root_ca: flags.root_ca_file.as_ref().map(read).transpose()?.unwrap_or_default(),
        cluster_cidrs: flags.cluster_cidr.clone(),
        service_cidrs: flags.service_cluster_ip_range.clone(),
        signers: signers(&flags.signing)?,
        account_tokens: keys.map(Arc::new),
        local_storage: flags.default_local_storage_path.clone().unwrap_or_default(),
        cloud: CloudHandle(nodes.map(|nodes| Arc::new(nodes) as Arc<dyn Cloud>)),
        node_monitor: flags.silence.settings(),
    })
}

/// The CA of each signer: its own, or the common one.
fn signers(flags: &SigningFlags) -> anyhow::Result<Signers> {
    let all = (&flags.cluster_signing_cert_file, &flags.cluster_signing_key_file);
    let rows = [
        (
            "kube-apiserver-client",
            &flags.cluster_signing_kube_apiserver_client_cert_file,
            &flags.cluster_signing_kube_apiserver_client_key_file,
        ),
        (
            "kube-apiserver-client-kubelet",
            &flags.cluster_signing_kubelet_client_cert_file,
            &flags.cluster_signing_kubelet_client_key_file,
        ),
        (
            "kubelet-serving",
            &flags.cluster_signing_kubelet_serving_cert_file,
            &flags.cluster_signing_kubelet_serving_key_file,
        ),
        (
            "legacy-unknown",
            &flags.cluster_signing_legacy_unknown_cert_file,
            &flags.cluster_signing_legacy_unknown_key_file,
        ),
    ];
    let mut signers = Signers::default();
    for (name, certificate, key) in rows {
        let files = certificate.as_ref().zip(key.as_ref()).or(all.0.as_ref().zip(all.1.as_ref()));
        if let Some((certificate, key)) = files {
            let authority = pki::Authority::load(certificate, key, Timestamp::now())?;
            signers.0.insert(format!("kubernetes.io/{name}"), Arc::new(authority));
        }
    }
    Ok(signers)
}

/// The scheduler's configuration: from a file, or the default.
pub fn scheduler_config(path: Option<&Path>) -> anyhow::Result<scheduler::config::Config> {
    let Some(path) = path else { return Ok(scheduler::config::Config::with_defaults()) };
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    scheduler::config::Config::read(&text).with_context(|| path.display().to_string())
}

pub fn proxy(flags: &ProxyFlags) -> anyhow::Result<()> {
    if flags.cleanup {
        return services::remove_rules();
    }
    let node = flags.node_name.clone().unwrap_or_else(|| hostname().to_lowercase());
    let config = services::proxy_config(node, &flags.cluster_cidr, &flags.service_cidr)?;
    let config = proxy::Config { policies: flags.network_policy, ..config };
    run_component(&flags.kubeconfig, services::PROXY_AGENT, async |ctx| {
        running::register(services::PROXY_AGENT, None);
        proxy::enable_forwarding(&config.pods);
        proxy::run(ctx, config, Arc::new(proxy::NetlinkFirewall::default())).await;
        Ok(())
    })
}

pub fn simulate(flags: &SimulateFlags) -> anyhow::Result<()> {
    let config = simulate::Config { nodes: flags.nodes, events: flags.events };
    run_component(&flags.kubeconfig, "simulate", async |ctx| {
        simulate::run(ctx, config).await;
        Ok(())
    })
}

/// Runs one component against the API server of a kubeconfig until SIGTERM or SIGINT.
fn run_component<Work: Future<Output = anyhow::Result<()>>>(
    kubeconfig: &Path,
    agent: &'static str,
    role: impl FnOnce(Ctx) -> Work,
) -> anyhow::Result<()> {
    let config = Kubeconfig::read(kubeconfig)?;
    let settings =
        Settings { root_ca: String::from_utf8_lossy(&config.ca_pem).into_owned(), ..Settings::default() };
    runtime_builder().build()?.block_on(async {
        let remote = Remote::new(&config).with_context(|| format!("cannot use {}", kubeconfig.display()))?;
        let (stop, shutdown) = watch::channel(false);
        let ctx = Ctx::new(Client::new(Arc::new(remote), agent), Clock::default(), shutdown)
            .with_settings(settings);
        tokio::spawn(async move {
            shutdown_signal().await;
            stop.send_replace(true);
        });
        role(ctx).await
    })
}

pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

//! Every control loop of the controller manager, each a pure `plan` and a thin loop that applies it.
//!
//! A controller is a module, with its judgement in `plan.rs` and its reading and writing in the file beside
//! it, and a row in [`CONTROLLERS`]. Controllers meet only through the API. Read a small one first, then
//! [`run`].

mod account_tokens;
mod attach_detach;
mod autoscaler;
mod backends;
mod batches;
mod bootstrap_tokens;
mod cluster_roles;
mod cronjob;
mod daemonset;
mod deployment;
mod device_taints;
mod disruption;
mod disruption_condition;
mod endpoint_slices;
mod endpoints;
mod ephemeral_volumes;
mod garbage;
mod hash;
mod history;
mod job;
pub mod local_storage;
mod mirroring;
mod namespace;
mod node;
mod node_ipam;
mod node_lifecycle;
mod ownership;
mod percent;
mod pod;
mod pod_garbage;
mod policy_types;
mod protection;
mod quota;
mod replicaset;
mod replicationcontroller;
mod resource_claims;
#[cfg(test)]
mod rig;
mod root_ca;
mod routes;
mod scale;
mod selector;
mod service_accounts;
pub mod service_balancer;
mod service_cidrs;
mod signing_requests;
mod statefulset;
mod taint_eviction;
mod template;
mod ttl;
mod ttl_after_finished;
mod volume_binder;
mod volume_expand;

use std::time::Duration;

use futures_util::future::BoxFuture;
use reconcile::Ctx;
use tokio::task::JoinSet;

/// One control loop.
pub struct Loop {
    /// Upstream's name, as `--controllers` takes it.
    pub name: &'static str,
    /// Works until the context's shutdown.
    pub run: fn(Ctx) -> BoxFuture<'static, ()>,
}

/// All control loops, by name.
pub const CONTROLLERS: &[Loop] = &[
    Loop { name: "bootstrap-signer-controller", run: |ctx| Box::pin(bootstrap_tokens::sign(ctx)) },
    Loop {
        name: "certificatesigningrequest-approving-controller",
        run: |ctx| Box::pin(signing_requests::approve(ctx)),
    },
    Loop {
        name: "certificatesigningrequest-cleaner-controller",
        run: |ctx| Box::pin(signing_requests::clean(ctx)),
    },
    Loop {
        name: "certificatesigningrequest-signing-controller",
        run: |ctx| Box::pin(signing_requests::sign(ctx)),
    },
    Loop { name: "clusterrole-aggregation-controller", run: |ctx| Box::pin(cluster_roles::run(ctx)) },
    Loop { name: "cronjob-controller", run: |ctx| Box::pin(cronjob::run(ctx)) },
    Loop { name: "daemonset-controller", run: |ctx| Box::pin(daemonset::run(ctx)) },
    Loop { name: "deployment-controller", run: |ctx| Box::pin(deployment::run(ctx)) },
    Loop { name: "device-taint-eviction-controller", run: |ctx| Box::pin(device_taints::run(ctx)) },
    Loop { name: "disruption-controller", run: |ctx| Box::pin(disruption::run(ctx)) },
    Loop { name: "endpoints-controller", run: |ctx| Box::pin(endpoints::run(ctx)) },
    Loop { name: "endpointslice-controller", run: |ctx| Box::pin(endpoint_slices::run(ctx)) },
    Loop { name: "endpointslice-mirroring-controller", run: |ctx| Box::pin(mirroring::run(ctx)) },
    Loop { name: "ephemeral-volume-controller", run: |ctx| Box::pin(ephemeral_volumes::run(ctx)) },
    Loop { name: "garbage-collector-controller", run: |ctx| Box::pin(garbage::run(ctx)) },
    Loop { name: "horizontal-pod-autoscaler-controller", run: |ctx| Box::pin(autoscaler::run(ctx)) },
    Loop { name: "job-controller", run: |ctx| Box::pin(job::run(ctx)) },
    Loop {
        name: "legacy-serviceaccount-token-cleaner-controller",
        run: |ctx| Box::pin(account_tokens::clean(ctx)),
    },
    Loop { name: "local-storage-controller", run: |ctx| Box::pin(local_storage::run(ctx)) },
    Loop { name: "namespace-controller", run: |ctx| Box::pin(namespace::run(ctx)) },
    Loop { name: "node-ipam-controller", run: |ctx| Box::pin(node_ipam::run(ctx)) },
    Loop { name: "node-lifecycle-controller", run: |ctx| Box::pin(node_lifecycle::run(ctx)) },
    Loop { name: "node-route-controller", run: |ctx| Box::pin(routes::run(ctx)) },
    Loop { name: "persistentvolume-attach-detach-controller", run: |ctx| Box::pin(attach_detach::run(ctx)) },
    Loop { name: "persistentvolume-binder-controller", run: |ctx| Box::pin(volume_binder::run(ctx)) },
    Loop { name: "persistentvolume-expander-controller", run: |ctx| Box::pin(volume_expand::run(ctx)) },
    Loop { name: "persistentvolume-protection-controller", run: |ctx| Box::pin(protection::volumes(ctx)) },
    Loop {
        name: "persistentvolumeclaim-protection-controller",
        run: |ctx| Box::pin(protection::claims(ctx)),
    },
    Loop { name: "pod-garbage-collector-controller", run: |ctx| Box::pin(pod_garbage::run(ctx)) },
    Loop { name: "replicaset-controller", run: |ctx| Box::pin(replicaset::run(ctx)) },
    Loop { name: "replicationcontroller-controller", run: |ctx| Box::pin(replicationcontroller::run(ctx)) },
    Loop { name: "resourceclaim-controller", run: |ctx| Box::pin(resource_claims::run(ctx)) },
    Loop { name: "resourcequota-controller", run: |ctx| Box::pin(quota::run(ctx)) },
    Loop { name: "root-ca-certificate-publisher-controller", run: |ctx| Box::pin(root_ca::run(ctx)) },
    Loop { name: "service-cidr-controller", run: |ctx| Box::pin(service_cidrs::run(ctx)) },
    Loop { name: "service-lb-controller", run: |ctx| Box::pin(service_balancer::run(ctx)) },
    Loop { name: "serviceaccount-controller", run: |ctx| Box::pin(service_accounts::run(ctx)) },
    Loop { name: "serviceaccount-token-controller", run: |ctx| Box::pin(account_tokens::fill(ctx)) },
    Loop { name: "statefulset-controller", run: |ctx| Box::pin(statefulset::run(ctx)) },
    Loop { name: "taint-eviction-controller", run: |ctx| Box::pin(taint_eviction::run(ctx)) },
    Loop { name: "token-cleaner-controller", run: |ctx| Box::pin(bootstrap_tokens::clean(ctx)) },
    Loop { name: "ttl-after-finished-controller", run: |ctx| Box::pin(ttl_after_finished::run(ctx)) },
    Loop { name: "ttl-controller", run: |ctx| Box::pin(ttl::run(ctx)) },
    Loop { name: "validatingadmissionpolicy-status-controller", run: |ctx| Box::pin(policy_types::run(ctx)) },
    Loop {
        name: "volumeattributesclass-protection-controller",
        run: |ctx| Box::pin(protection::attributes_classes(ctx)),
    },
];

/// Which control loops run: upstream's `--controllers`, where `*` is all and `-name` is all but.
#[derive(Clone, Debug)]
pub struct Chosen(Vec<String>);

/// A name in `--controllers` that is none.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{0:?} is not in the list of known controllers")]
pub struct Unknown(String);

impl Chosen {
    pub fn parse(names: &[String]) -> Result<Chosen, Unknown> {
        for name in names {
            let known = CONTROLLERS.iter().any(|row| row.name == name.trim_start_matches('-'));
            if name != "*" && !known {
                return Err(Unknown(name.clone()));
            }
        }
        Ok(Chosen(if names.is_empty() { vec!["*".into()] } else { names.to_vec() }))
    }

    fn has(&self, name: &str) -> bool {
        let listed = |wanted: &str| self.0.iter().any(|entry| entry == wanted);
        !listed(&format!("-{name}")) && (listed(name) || listed("*"))
    }
}

/// Runs the chosen control loops until the context's shutdown.
pub async fn run(ctx: Ctx, chosen: Chosen) {
    let mut loops = JoinSet::new();
    for row in CONTROLLERS.iter().filter(|row| chosen.has(row.name)) {
        loops.spawn(keep(row, ctx.clone()));
    }
    loops.join_all().await;
}

/// Runs one control loop, and runs it anew if a defect of ours has ended it: the others must not suffer.
async fn keep(row: &Loop, ctx: Ctx) {
    loop {
        // On a task of its own, which a panic ends and nothing else.
        let mut work = JoinSet::new();
        work.spawn((row.run)(ctx.named(row.name)));
        match work.join_next().await {
            Some(Err(error)) if error.is_panic() && !*ctx.shutdown.borrow() => {
                tracing::error!(controller = row.name, %error, "a control loop has panicked, starting it again");
                tokio::time::sleep(AFTER_PANIC).await;
            }
            _ => return,
        }
    }
}

/// How long a control loop that has panicked stays down.
const AFTER_PANIC: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(CONTROLLERS.is_sorted_by(|a, b| a.name < b.name));
    }
}

//! The controllers of the kube-controller-manager, each a pure `plan` and a controller that applies it.
//!
//! A controller is a module with its decisions in `plan.rs`, its I/O in the parent file, and an entry in
//! [`CONTROLLERS`]. Controllers interact only through the API. Start reading with a small one such as `ttl`,
//! then [`run`].

mod account_tokens;
mod attach_detach;
mod autoscaler;
mod backends;
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
mod root_ca;
mod routes;
mod scale;
mod selector;
mod service_accounts;
pub mod service_balancer;
mod service_cidrs;
mod signing_requests;
mod slow_start;
mod statefulset;
mod taint_eviction;
mod template;
#[cfg(test)]
mod test_cluster;
mod ttl;
mod ttl_after_finished;
mod volume_binder;
mod volume_expand;

use std::time::Duration;

use futures_util::future::BoxFuture;
use reconcile::Ctx;
use tokio::task::JoinSet;

/// A controller.
pub struct ControllerDescriptor {
    /// Upstream's name, as used in `--controllers`.
    pub name: &'static str,
    /// Runs until the context's shutdown.
    pub run: fn(Ctx) -> BoxFuture<'static, ()>,
}

/// All controllers, sorted by name.
pub const CONTROLLERS: &[ControllerDescriptor] = &[
    ControllerDescriptor {
        name: "bootstrap-signer-controller",
        run: |ctx| Box::pin(bootstrap_tokens::sign(ctx)),
    },
    ControllerDescriptor {
        name: "certificatesigningrequest-approving-controller",
        run: |ctx| Box::pin(signing_requests::run_approval(ctx)),
    },
    ControllerDescriptor {
        name: "certificatesigningrequest-cleaner-controller",
        run: |ctx| Box::pin(signing_requests::run_cleanup(ctx)),
    },
    ControllerDescriptor {
        name: "certificatesigningrequest-signing-controller",
        run: |ctx| Box::pin(signing_requests::run_signing(ctx)),
    },
    ControllerDescriptor {
        name: "clusterrole-aggregation-controller",
        run: |ctx| Box::pin(cluster_roles::run(ctx)),
    },
    ControllerDescriptor { name: "cronjob-controller", run: |ctx| Box::pin(cronjob::run(ctx)) },
    ControllerDescriptor { name: "daemonset-controller", run: |ctx| Box::pin(daemonset::run(ctx)) },
    ControllerDescriptor { name: "deployment-controller", run: |ctx| Box::pin(deployment::run(ctx)) },
    ControllerDescriptor {
        name: "device-taint-eviction-controller",
        run: |ctx| Box::pin(device_taints::run(ctx)),
    },
    ControllerDescriptor { name: "disruption-controller", run: |ctx| Box::pin(disruption::run(ctx)) },
    ControllerDescriptor { name: "endpoints-controller", run: |ctx| Box::pin(endpoints::run(ctx)) },
    ControllerDescriptor { name: "endpointslice-controller", run: |ctx| Box::pin(endpoint_slices::run(ctx)) },
    ControllerDescriptor {
        name: "endpointslice-mirroring-controller",
        run: |ctx| Box::pin(mirroring::run(ctx)),
    },
    ControllerDescriptor {
        name: "ephemeral-volume-controller",
        run: |ctx| Box::pin(ephemeral_volumes::run(ctx)),
    },
    ControllerDescriptor { name: "garbage-collector-controller", run: |ctx| Box::pin(garbage::run(ctx)) },
    ControllerDescriptor {
        name: "horizontal-pod-autoscaler-controller",
        run: |ctx| Box::pin(autoscaler::run(ctx)),
    },
    ControllerDescriptor { name: "job-controller", run: |ctx| Box::pin(job::run(ctx)) },
    ControllerDescriptor {
        name: "legacy-serviceaccount-token-cleaner-controller",
        run: |ctx| Box::pin(account_tokens::clean(ctx)),
    },
    ControllerDescriptor { name: "local-storage-controller", run: |ctx| Box::pin(local_storage::run(ctx)) },
    ControllerDescriptor { name: "namespace-controller", run: |ctx| Box::pin(namespace::run(ctx)) },
    ControllerDescriptor { name: "node-ipam-controller", run: |ctx| Box::pin(node_ipam::run(ctx)) },
    ControllerDescriptor { name: "node-lifecycle-controller", run: |ctx| Box::pin(node_lifecycle::run(ctx)) },
    ControllerDescriptor { name: "node-route-controller", run: |ctx| Box::pin(routes::run(ctx)) },
    ControllerDescriptor {
        name: "persistentvolume-attach-detach-controller",
        run: |ctx| Box::pin(attach_detach::run(ctx)),
    },
    ControllerDescriptor {
        name: "persistentvolume-binder-controller",
        run: |ctx| Box::pin(volume_binder::run(ctx)),
    },
    ControllerDescriptor {
        name: "persistentvolume-expander-controller",
        run: |ctx| Box::pin(volume_expand::run(ctx)),
    },
    ControllerDescriptor {
        name: "persistentvolume-protection-controller",
        run: |ctx| Box::pin(protection::protect_volumes(ctx)),
    },
    ControllerDescriptor {
        name: "persistentvolumeclaim-protection-controller",
        run: |ctx| Box::pin(protection::protect_claims(ctx)),
    },
    ControllerDescriptor {
        name: "pod-garbage-collector-controller",
        run: |ctx| Box::pin(pod_garbage::run(ctx)),
    },
    ControllerDescriptor { name: "replicaset-controller", run: |ctx| Box::pin(replicaset::run(ctx)) },
    ControllerDescriptor {
        name: "replicationcontroller-controller",
        run: |ctx| Box::pin(replicationcontroller::run(ctx)),
    },
    ControllerDescriptor { name: "resourceclaim-controller", run: |ctx| Box::pin(resource_claims::run(ctx)) },
    ControllerDescriptor { name: "resourcequota-controller", run: |ctx| Box::pin(quota::run(ctx)) },
    ControllerDescriptor {
        name: "root-ca-certificate-publisher-controller",
        run: |ctx| Box::pin(root_ca::run(ctx)),
    },
    ControllerDescriptor { name: "service-cidr-controller", run: |ctx| Box::pin(service_cidrs::run(ctx)) },
    ControllerDescriptor { name: "service-lb-controller", run: |ctx| Box::pin(service_balancer::run(ctx)) },
    ControllerDescriptor {
        name: "serviceaccount-controller",
        run: |ctx| Box::pin(service_accounts::run(ctx)),
    },
    ControllerDescriptor {
        name: "serviceaccount-token-controller",
        run: |ctx| Box::pin(account_tokens::fill(ctx)),
    },
    ControllerDescriptor { name: "statefulset-controller", run: |ctx| Box::pin(statefulset::run(ctx)) },
    ControllerDescriptor { name: "taint-eviction-controller", run: |ctx| Box::pin(taint_eviction::run(ctx)) },
    ControllerDescriptor {
        name: "token-cleaner-controller",
        run: |ctx| Box::pin(bootstrap_tokens::clean(ctx)),
    },
    ControllerDescriptor {
        name: "ttl-after-finished-controller",
        run: |ctx| Box::pin(ttl_after_finished::run(ctx)),
    },
    ControllerDescriptor { name: "ttl-controller", run: |ctx| Box::pin(ttl::run(ctx)) },
    ControllerDescriptor {
        name: "validatingadmissionpolicy-status-controller",
        run: |ctx| Box::pin(policy_types::run(ctx)),
    },
    ControllerDescriptor {
        name: "volumeattributesclass-protection-controller",
        run: |ctx| Box::pin(protection::protect_attributes_classes(ctx)),
    },
];

/// The enabled controllers. Syntax of upstream's `--controllers`: `*` enables all, `-name` disables one.
#[derive(Clone, Debug)]
pub struct EnabledControllers(Vec<String>);

/// An unknown name in `--controllers`.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{0:?} is not in the list of known controllers")]
pub struct UnknownController(String);

impl EnabledControllers {
    pub fn parse(names: &[String]) -> Result<EnabledControllers, UnknownController> {
        for name in names {
            let known = CONTROLLERS.iter().any(|descriptor| descriptor.name == name.trim_start_matches('-'));
            if name != "*" && !known {
                return Err(UnknownController(name.clone()));
            }
        }
        Ok(EnabledControllers(if names.is_empty() { vec!["*".into()] } else { names.to_vec() }))
    }

    fn is_enabled(&self, name: &str) -> bool {
        let contains = |entry_name: &str| self.0.iter().any(|entry| entry == entry_name);
        !contains(&format!("-{name}")) && (contains(name) || contains("*"))
    }
}

/// Runs the enabled controllers until the context's shutdown.
pub async fn run(ctx: Ctx, enabled: EnabledControllers) {
    let mut tasks = JoinSet::new();
    for descriptor in CONTROLLERS.iter().filter(|descriptor| enabled.is_enabled(descriptor.name)) {
        tasks.spawn(run_with_restart(descriptor, ctx.clone()));
    }
    tasks.join_all().await;
}

/// Runs a controller and restarts it after a panic, so that the other controllers are not affected.
async fn run_with_restart(descriptor: &ControllerDescriptor, ctx: Ctx) {
    loop {
        // A separate task contains the panic.
        let mut work = JoinSet::new();
        work.spawn((descriptor.run)(ctx.for_controller(descriptor.name)));
        match work.join_next().await {
            Some(Err(error)) if error.is_panic() && !*ctx.shutdown.borrow() => {
                tracing::error!(controller = descriptor.name, %error, "controller panicked, restarting");
                tokio::time::sleep(PANIC_RESTART_DELAY).await;
            }
            _ => return,
        }
    }
}

/// The delay before a controller is restarted after a panic.
const PANIC_RESTART_DELAY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(CONTROLLERS.is_sorted_by(|a, b| a.name < b.name));
    }
}

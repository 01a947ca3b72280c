//! Updates the routes when the cluster changes, and the status of Ingresses.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeCondition, Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use parking_lot::RwLock;
use reconcile::{Cache, Client, Ctx, Key, Object as _, Patch};
use serde_json::json;
use tokio::sync::{Notify, watch};

use crate::view::{self, Plan, View};
use crate::{RELAY_ANNOTATION, Shared};

/// Changes within this time are processed together. Far below the second within which a deleted
/// Ingress must be gone.
const BATCH_DELAY: Duration = Duration::from_millis(20);
/// The delay before a failed status update is retried.
const STATUS_RETRY: Duration = Duration::from_secs(5);

/// The configuration of the Ingress controller.
pub struct Config {
    /// A client with permission to update the status of Ingresses.
    pub client: Client,
    /// The address of this node, which may change.
    pub address: watch::Receiver<Option<IpAddr>>,
    /// Opens connections to pods.
    pub dial: stream::Dialer,
}

/// The Services and Secrets that the current plan refers to. Only their changes trigger an update.
#[derive(Default)]
struct Dependencies {
    services: BTreeSet<Key>,
    secrets: BTreeSet<Key>,
}

struct CacheView(Ctx);

impl View for CacheView {
    fn ingresses(&self) -> Vec<Arc<Ingress>> {
        self.0.caches.ingresses().all()
    }

    fn classes(&self) -> Vec<Arc<IngressClass>> {
        self.0.caches.ingress_classes().all()
    }

    fn service(&self, key: &Key) -> Option<Arc<Service>> {
        self.0.caches.services().get(key)
    }

    fn slices(&self, service: &Key) -> Vec<Arc<EndpointSlice>> {
        self.0.caches.endpoint_slices().indexed("service", &service.to_string())
    }

    fn secret(&self, key: &Key) -> Option<Arc<Secret>> {
        self.0.caches.tls_secrets().get(key)
    }
}

/// Keeps the routes in sync with the cluster until shutdown.
pub(crate) async fn run(ctx: Ctx, config: Config, shared: Arc<Shared>) {
    let changed = Arc::new(Notify::new());
    let dependencies: Arc<RwLock<Dependencies>> = Arc::default();
    let caches = &ctx.caches;
    notify_on_change(caches.ingresses(), &changed, |_| true);
    notify_on_change(caches.ingress_classes(), &changed, |_| true);
    let notify = changed.clone();
    caches.nodes().listen(move |change| {
        if change.before.and_then(relay_ip) != change.after.and_then(relay_ip) {
            notify.notify_one();
        }
    });
    let known = dependencies.clone();
    notify_on_change(caches.services(), &changed, move |service| {
        known.read().services.contains(&service.key())
    });
    let known = dependencies.clone();
    notify_on_change(caches.endpoint_slices(), &changed, move |slice| {
        let service = slice.label("kubernetes.io/service-name");
        service.is_some_and(|name| known.read().services.contains(&Key::new(slice.namespace(), name)))
    });
    let known = dependencies.clone();
    notify_on_change(caches.tls_secrets(), &changed, move |secret| {
        known.read().secrets.contains(&secret.key())
    });
    ctx.caches.wait_for_sync().await;
    let cache_view = CacheView(ctx.clone());
    let mut shutdown = ctx.shutdown.clone();
    let mut address = config.address.clone();
    loop {
        let mut plan = view::build_plan(&cache_view);
        let latest = Dependencies {
            services: std::mem::take(&mut plan.services),
            secrets: std::mem::take(&mut plan.secrets),
        };
        // Changes of newly referenced objects before this point did not trigger a notification, so
        // the plan is built again.
        let has_new = {
            let mut dependencies = dependencies.write();
            let known = &mut *dependencies;
            let has_new =
                !latest.services.is_subset(&known.services) || !latest.secrets.is_subset(&known.secrets);
            *known = latest;
            has_new
        };
        if has_new {
            plan = view::build_plan(&cache_view);
        }
        let ingresses = apply_plan(&shared, plan);
        let updated = update_statuses(&ctx, &config, &ingresses).await;
        let retry = async {
            match updated {
                true => std::future::pending().await,
                false => tokio::time::sleep(STATUS_RETRY).await,
            }
        };
        tokio::select! {
            () = changed.notified() => {}
            Ok(()) = address.changed() => {}
            () = retry => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
        tokio::time::sleep(BATCH_DELAY).await;
    }
}

fn notify_on_change<T: reconcile::Object>(
    cache: &Arc<Cache<T>>,
    changed: &Arc<Notify>,
    predicate: impl Fn(&T) -> bool + Send + Sync + 'static,
) {
    let changed = changed.clone();
    cache.listen(move |change| {
        if predicate(change.latest()) {
            changed.notify_one();
        }
    });
}

/// Applies a plan. Returns the Ingresses that it serves.
fn apply_plan(shared: &Shared, plan: Plan) -> Vec<Arc<Ingress>> {
    shared.certificates.replace(&plan.certificates);
    let backend_addrs: HashSet<_> = plan.table.backend_addrs().collect();
    *shared.table.write() = Arc::new(plan.table);
    shared.pool.retain(&backend_addrs);
    plan.ingresses
}

/// Updates `status.loadBalancer` of the Ingresses. Returns whether all updates succeeded.
async fn update_statuses(ctx: &Ctx, config: &Config, ingresses: &[Arc<Ingress>]) -> bool {
    let Some(address) = *config.address.borrow() else { return true };
    let relay_ips: Vec<String> = ctx.caches.nodes().all().iter().filter_map(relay_ip).collect();
    let mut succeeded = true;
    for ingress in ingresses {
        let status = ingress.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let current = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
        let current: Vec<String> = current.iter().filter_map(|one| one.ip.clone()).collect();
        let desired = desired_addresses(&current, address, &relay_ips, |ip| is_ingress_node(ctx, ip));
        if current == desired {
            continue;
        }
        let desired: Vec<_> = desired.iter().map(|ip| json!({"ip": ip})).collect();
        let patch = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": desired}}}));
        match config.client.patch_status::<Ingress>(&ingress.key(), &patch).await {
            Err(error) if !error.is_not_found() => {
                tracing::warn!(%error, ingress = %ingress.key(), "failed to update ingress status, will retry");
                succeeded = false;
            }
            _ => {}
        }
    }
    succeeded
}

/// The address of this node, those of other nodes that serve the Ingress, and those of relaying
/// nodes.
fn desired_addresses(
    current: &[String],
    own: IpAddr,
    relay_ips: &[String],
    is_serving: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut desired: Vec<String> =
        current.iter().filter(|ip| relay_ips.contains(ip) || is_serving(ip)).cloned().collect();
    for ip in [own.to_string()].iter().chain(relay_ips) {
        if !desired.contains(ip) {
            desired.push(ip.clone());
        }
    }
    desired
}

/// Whether a node with this address may serve Ingresses itself. Relaying nodes are excluded;
/// [`relay_ip`] decides about them.
fn is_ingress_node(ctx: &Ctx, ip: &str) -> bool {
    ctx.caches.nodes().all().iter().any(|node| {
        let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        node.annotation(RELAY_ANNOTATION).is_none()
            && addresses.into_iter().flatten().any(|address| address.address == ip)
    })
}

/// The address of a ready node that relays Ingress connections.
fn relay_ip(node: &Arc<Node>) -> Option<String> {
    let status = node.status.as_ref()?;
    let ready = |known: &NodeCondition| known.type_ == "Ready" && known.status == "True";
    let is_ready_relay =
        status.conditions.iter().flatten().any(ready) && node.annotation(RELAY_ANNOTATION) == Some("true");
    let internal = |address: &&NodeAddress| address.type_ == "InternalIP";
    let address = status.addresses.iter().flatten().find(internal);
    address.filter(|_| is_ready_relay).map(|address| address.address.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_drops_addresses_of_deleted_nodes() {
        let check = |current: &[&str], expected: &[&str]| {
            let current: Vec<String> = current.iter().map(|ip| (*ip).to_owned()).collect();
            let own = "192.0.2.1".parse().unwrap();
            let relay_ips = ["192.0.2.3".to_owned()];
            assert_eq!(
                desired_addresses(&current, own, &[], |ip| ip == "192.0.2.1" || ip == "192.0.2.2"),
                expected
            );
            let with_relay =
                desired_addresses(&current, own, &relay_ips, |ip| ip == "192.0.2.1" || ip == "192.0.2.2");
            assert_eq!(with_relay, [expected, &["192.0.2.3"]].concat());
        };
        check(&[], &["192.0.2.1"]);
        check(&["192.0.2.1"], &["192.0.2.1"]);
        check(&["192.0.2.2"], &["192.0.2.2", "192.0.2.1"]);
        check(&["192.0.2.9"], &["192.0.2.1"]);
    }
}

//! Following the cluster, and telling where Ingresses are served.

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

/// What comes together is worked out together; far below the second in which what is deleted must be gone.
const BATCH_DELAY: Duration = Duration::from_millis(20);
/// How long to wait until telling again what could not be told.
const STATUS_RETRY: Duration = Duration::from_secs(5);

/// How this is set up.
pub struct Config {
    /// Who may write the status of Ingresses.
    pub client: Client,
    /// Where this node is reached, which may change.
    pub address: watch::Receiver<Option<IpAddr>>,
    /// How pods are reached.
    pub dial: stream::Dialer,
}

/// What the plan of the moment depends on.
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

/// Keeps the table as the cluster is until told to stop.
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
        // What changed between looking and saying what matters was not heard.
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

/// Puts a plan in the place of the one before; gives back what is served by it.
fn apply_plan(shared: &Shared, plan: Plan) -> Vec<Arc<Ingress>> {
    shared.certificates.replace(&plan.certificates);
    let backend_addrs: HashSet<_> = plan.table.backend_addrs().collect();
    *shared.table.write() = Arc::new(plan.table);
    shared.pool.retain(&backend_addrs);
    plan.ingresses
}

/// Tells in the status of Ingresses where they are served. Whether that went well.
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
                tracing::warn!(%error, ingress = %ingress.key(), "cannot tell where an Ingress is served");
                succeeded = false;
            }
            _ => {}
        }
    }
    succeeded
}

/// Ours, those of other nodes that serve it too, and those of nodes that pass requests on.
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

/// Whether a node has this address and may serve Ingresses itself; what is known of those that only pass on is known
/// better.
fn is_ingress_node(ctx: &Ctx, ip: &str) -> bool {
    ctx.caches.nodes().all().iter().any(|node| {
        let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        node.annotation(RELAY_ANNOTATION).is_none()
            && addresses.into_iter().flatten().any(|address| address.address == ip)
    })
}

/// Where a node is reached that is well and passes on what comes for Ingresses.
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

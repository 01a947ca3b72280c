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
use crate::{RELAYS, Shared};

/// What comes together is worked out together; far below the second in which what is deleted must be gone.
const GATHER: Duration = Duration::from_millis(20);
/// How long to wait until telling again what could not be told.
const PAUSE: Duration = Duration::from_secs(5);

/// How this is set up.
pub struct Config {
    /// Who may write the status of Ingresses.
    pub client: Client,
    /// Where this node is reached, which may change.
    pub address: watch::Receiver<Option<IpAddr>>,
    /// How pods are reached.
    pub dial: stream::Dial,
}

/// What the plan of the moment depends on.
#[derive(Default)]
struct Interest {
    services: BTreeSet<Key>,
    secrets: BTreeSet<Key>,
}

struct Seen(Ctx);

impl View for Seen {
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
pub(crate) async fn follow(ctx: Ctx, config: Config, shared: Arc<Shared>) {
    let changed = Arc::new(Notify::new());
    let interest: Arc<RwLock<Interest>> = Arc::default();
    let caches = &ctx.caches;
    wake_on(caches.ingresses(), &changed, |_| true);
    wake_on(caches.ingress_classes(), &changed, |_| true);
    let wake = changed.clone();
    caches.nodes().listen(move |change| {
        if change.before.and_then(relay_of) != change.after.and_then(relay_of) {
            wake.notify_one();
        }
    });
    let known = interest.clone();
    wake_on(caches.services(), &changed, move |service| known.read().services.contains(&service.key()));
    let known = interest.clone();
    wake_on(caches.endpoint_slices(), &changed, move |slice| {
        let service = slice.label("kubernetes.io/service-name");
        service.is_some_and(|name| known.read().services.contains(&Key::new(slice.namespace(), name)))
    });
    let known = interest.clone();
    wake_on(caches.tls_secrets(), &changed, move |secret| known.read().secrets.contains(&secret.key()));
    ctx.caches.filled().await;
    let seen = Seen(ctx.clone());
    let mut shutdown = ctx.shutdown.clone();
    let mut address = config.address.clone();
    loop {
        let mut plan = view::plan(&seen);
        let now = Interest {
            services: std::mem::take(&mut plan.services),
            secrets: std::mem::take(&mut plan.secrets),
        };
        // What changed between looking and saying what matters was not heard.
        let widened = {
            let mut interest = interest.write();
            let known = &mut *interest;
            let widened = !now.services.is_subset(&known.services) || !now.secrets.is_subset(&known.secrets);
            *known = now;
            widened
        };
        if widened {
            plan = view::plan(&seen);
        }
        let ingresses = put(&shared, plan);
        let told = tell(&ctx, &config, &ingresses).await;
        let again = async {
            match told {
                true => std::future::pending().await,
                false => tokio::time::sleep(PAUSE).await,
            }
        };
        tokio::select! {
            () = changed.notified() => {}
            Ok(()) = address.changed() => {}
            () = again => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
        tokio::time::sleep(GATHER).await;
    }
}

fn wake_on<T: reconcile::Object>(
    cache: &Arc<Cache<T>>,
    changed: &Arc<Notify>,
    concerns: impl Fn(&T) -> bool + Send + Sync + 'static,
) {
    let changed = changed.clone();
    cache.listen(move |change| {
        if concerns(change.newest()) {
            changed.notify_one();
        }
    });
}

/// Puts a plan in the place of the one before; gives back what is served by it.
fn put(shared: &Shared, plan: Plan) -> Vec<Arc<Ingress>> {
    shared.certificates.replace(&plan.certificates);
    let places: HashSet<_> = plan.table.places().collect();
    *shared.table.write() = Arc::new(plan.table);
    shared.pool.only(&places);
    plan.ingresses
}

/// Tells in the status of Ingresses where they are served. Whether that went well.
async fn tell(ctx: &Ctx, config: &Config, ingresses: &[Arc<Ingress>]) -> bool {
    let Some(address) = *config.address.borrow() else { return true };
    let relays: Vec<String> = ctx.caches.nodes().all().iter().filter_map(relay_of).collect();
    let mut well = true;
    for ingress in ingresses {
        let status = ingress.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let told = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
        let told: Vec<String> = told.iter().filter_map(|one| one.ip.clone()).collect();
        let wanted = wanted(&told, address, &relays, |ip| serves(ctx, ip));
        if told == wanted {
            continue;
        }
        let wanted: Vec<_> = wanted.iter().map(|ip| json!({"ip": ip})).collect();
        let patch = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": wanted}}}));
        match config.client.patch_status::<Ingress>(&ingress.key(), &patch).await {
            Err(error) if !error.is_not_found() => {
                tracing::warn!(%error, ingress = %ingress.key(), "cannot tell where an Ingress is served");
                well = false;
            }
            _ => {}
        }
    }
    well
}

/// Ours, those of other nodes that serve it too, and those of nodes that pass requests on.
fn wanted(told: &[String], own: IpAddr, relays: &[String], serves: impl Fn(&str) -> bool) -> Vec<String> {
    let mut wanted: Vec<String> =
        told.iter().filter(|ip| relays.contains(ip) || serves(ip)).cloned().collect();
    for ip in [own.to_string()].iter().chain(relays) {
        if !wanted.contains(ip) {
            wanted.push(ip.clone());
        }
    }
    wanted
}

/// Whether a node has this address and may serve Ingresses itself; what is known of those that only pass on is known
/// better.
fn serves(ctx: &Ctx, ip: &str) -> bool {
    ctx.caches.nodes().all().iter().any(|node| {
        let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        node.annotation(RELAYS).is_none()
            && addresses.into_iter().flatten().any(|address| address.address == ip)
    })
}

/// Where a node is reached that is well and passes on what comes for Ingresses.
fn relay_of(node: &Arc<Node>) -> Option<String> {
    let status = node.status.as_ref()?;
    let ready = |known: &NodeCondition| known.type_ == "Ready" && known.status == "True";
    let well = status.conditions.iter().flatten().any(ready) && node.annotation(RELAYS) == Some("true");
    let internal = |address: &&NodeAddress| address.type_ == "InternalIP";
    let address = status.addresses.iter().flatten().find(internal);
    address.filter(|_| well).map(|address| address.address.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_nodes_that_are_gone_are_not_told() {
        let check = |told: &[&str], expected: &[&str]| {
            let told: Vec<String> = told.iter().map(|ip| (*ip).to_owned()).collect();
            let own = "192.0.2.1".parse().unwrap();
            let relays = ["192.0.2.3".to_owned()];
            assert_eq!(wanted(&told, own, &[], |ip| ip == "192.0.2.1" || ip == "192.0.2.2"), expected);
            let with_relay = wanted(&told, own, &relays, |ip| ip == "192.0.2.1" || ip == "192.0.2.2");
            assert_eq!(with_relay, [expected, &["192.0.2.3"]].concat());
        };
        check(&[], &["192.0.2.1"]);
        check(&["192.0.2.1"], &["192.0.2.1"]);
        check(&["192.0.2.2"], &["192.0.2.2", "192.0.2.1"]);
        check(&["192.0.2.9"], &["192.0.2.1"]);
    }
}

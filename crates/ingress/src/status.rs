//! Following the cluster, and telling where Ingresses are served.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};
use parking_lot::RwLock;
use reconcile::{Cache, Client, Ctx, Key, Object as _, Patch};
use serde_json::json;
use tokio::sync::Notify;

use crate::Shared;
use crate::view::{self, Plan, View};

/// What comes together is worked out together; far below the second in which what is deleted must be gone.
const GATHER: Duration = Duration::from_millis(20);
/// How long to wait until telling again what could not be told.
const PAUSE: Duration = Duration::from_secs(5);

/// How this is set up.
pub struct Config {
    /// Who may write the status of Ingresses.
    pub client: Client,
    /// Where this node is reached.
    pub address: Option<IpAddr>,
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
    let addresses: HashSet<_> = plan.table.addresses().collect();
    *shared.table.write() = Arc::new(plan.table);
    shared.pool.only(&addresses);
    plan.ingresses
}

/// Tells in the status of Ingresses where they are served. Whether that went well.
async fn tell(ctx: &Ctx, config: &Config, ingresses: &[Arc<Ingress>]) -> bool {
    let Some(address) = config.address else { return true };
    let mut well = true;
    for ingress in ingresses {
        let status = ingress.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let told = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
        let told: Vec<String> = told.iter().filter_map(|one| one.ip.clone()).collect();
        let wanted = wanted(&told, address, |ip| is_node(ctx, ip));
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

/// Ours, and those of other nodes that serve it too.
fn wanted(told: &[String], own: IpAddr, is_node: impl Fn(&str) -> bool) -> Vec<String> {
    let mut wanted: Vec<String> = told.iter().filter(|ip| is_node(ip)).cloned().collect();
    let own = own.to_string();
    if !wanted.contains(&own) {
        wanted.push(own);
    }
    wanted
}

fn is_node(ctx: &Ctx, ip: &str) -> bool {
    ctx.caches.nodes().all().iter().any(|node| {
        let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        addresses.into_iter().flatten().any(|address| address.address == ip)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_nodes_that_are_gone_are_not_told() {
        let check = |told: &[&str], expected: &[&str]| {
            let told: Vec<String> = told.iter().map(|ip| (*ip).to_owned()).collect();
            let own = "192.0.2.1".parse().unwrap();
            assert_eq!(wanted(&told, own, |ip| ip == "192.0.2.1" || ip == "192.0.2.2"), expected);
        };
        check(&[], &["192.0.2.1"]);
        check(&["192.0.2.1"], &["192.0.2.1"]);
        check(&["192.0.2.2"], &["192.0.2.2", "192.0.2.1"]);
        check(&["192.0.2.9"], &["192.0.2.1"]);
    }
}

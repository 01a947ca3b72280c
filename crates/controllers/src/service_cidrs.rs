//! Says when networks of Services can be used, and keeps them from going while their addresses are.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use api::networking::ip::Cidr;
use jiff::Timestamp;
use k8s_openapi::api::networking::v1::{IPAddress, ServiceCIDR};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object};

const FINALIZER: &str = "networking.k8s.io/service-cidr-finalizer";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const ALLOCATOR: &str = "ipallocator.k8s.io";
/// How long a network that nobody needs is kept, for those who have not heard yet that it goes.
const GRACE: Duration = Duration::from_secs(10);

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.acting_as("service-cidrs-controller"),
        events: ctx.events.from("service-cidrs-controller"),
        ..ctx
    };
    let controller = Controller::new("service_cidrs", &ctx);
    // What happens to one network may matter to others that lie in it or around it.
    let all = ctx.caches.service_cidrs().clone();
    controller.on(ctx.caches.service_cidrs(), move |changed: &Changed<'_, ServiceCIDR>, enqueue| {
        enqueue(changed.newest().key());
        all.all().iter().filter(|cidr| cidr.is_deleting()).for_each(|cidr| enqueue(cidr.key()));
    });
    let all = ctx.caches.service_cidrs().clone();
    controller.on(ctx.caches.ip_addresses(), move |changed: &Changed<'_, IPAddress>, enqueue| {
        if changed.after.is_none() {
            all.all().iter().filter(|cidr| cidr.is_deleting()).for_each(|cidr| enqueue(cidr.key()));
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, 5, reconcile).await
}

#[derive(Debug, PartialEq)]
enum Action {
    Hold,
    Ready,
    StillUsed,
    Wait(Timestamp),
    LetGo,
}

fn plan(
    cidr: &ServiceCIDR,
    all: &[Arc<ServiceCIDR>],
    addresses: &[Arc<IPAddress>],
    now: Timestamp,
) -> Action {
    let held = cidr.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER);
    let Some(deleted) = &cidr.metadata.deletion_timestamp else {
        return if held { Action::Ready } else { Action::Hold };
    };
    if is_needed(cidr, all, addresses) {
        return Action::StillUsed;
    }
    let end = deleted.0.checked_add(GRACE).unwrap_or(now);
    if end > now { Action::Wait(end) } else { Action::LetGo }
}

fn networks(cidr: &ServiceCIDR) -> impl Iterator<Item = Cidr> + '_ {
    cidr.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten()).filter_map(|text| Cidr::parse(text))
}

/// Some address of a Service lies in this network and in no other.
fn is_needed(cidr: &ServiceCIDR, all: &[Arc<ServiceCIDR>], addresses: &[Arc<IPAddress>]) -> bool {
    let others: Vec<Cidr> =
        all.iter().filter(|other| other.uid() != cidr.uid()).flat_map(|other| networks(other)).collect();
    let used = addresses.iter().filter(|address| address.label(MANAGED_BY) == Some(ALLOCATOR));
    let used = used.filter_map(|address| address.name().parse::<IpAddr>().ok());
    let mut own = used.filter(|ip| networks(cidr).any(|network| network.contains(*ip)));
    own.any(|ip| !others.iter().any(|network| network.contains(ip)))
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(cidr) = ctx.caches.service_cidrs().get(key) else { return Ok(Next::Forget) };
    let now = ctx.clock.now();
    let (all, addresses) = (ctx.caches.service_cidrs().all(), ctx.caches.ip_addresses().all());
    match plan(&cidr, &all, &addresses, now) {
        Action::Hold => {
            let mut held = (*cidr).clone();
            held.metadata.finalizers.get_or_insert_default().push(FINALIZER.into());
            ctx.replace(&held).await?;
        }
        Action::Ready => {
            let told = tell(ctx, &cidr, "True", "", "Kubernetes Service CIDR is ready", now).await;
            if let Err(error) = told {
                let message = "The ServiceCIDR Status can not be set to Ready=True";
                ctx.events.warning(&*cidr, "KubernetesServiceCIDRError", message);
                return Err(error);
            }
        }
        Action::StillUsed => {
            let message = "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR";
            tell(ctx, &cidr, "False", "Terminating", message, now).await?;
        }
        Action::Wait(end) => return Ok(Next::At(end)),
        Action::LetGo => {
            let mut free = (*cidr).clone();
            if let Some(finalizers) = &mut free.metadata.finalizers {
                let before = finalizers.len();
                finalizers.retain(|finalizer| finalizer != FINALIZER);
                if finalizers.len() < before {
                    match ctx.replace(&free).await {
                        Err(error) if !error.is_not_found() => return Err(error),
                        _ => {}
                    }
                }
            }
        }
    }
    Ok(Next::Change)
}

async fn tell(
    ctx: &Ctx,
    cidr: &ServiceCIDR,
    status: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Result<(), Error> {
    let mut cidr = cidr.clone();
    let conditions = cidr.status.get_or_insert_default().conditions.get_or_insert_default();
    if conditions.iter().any(|known| known.type_ == "Ready" && known.status == status) {
        return Ok(());
    }
    conditions.retain(|known| known.type_ != "Ready");
    conditions.push(Condition {
        type_: "Ready".into(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
        last_transition_time: Time(now),
        observed_generation: None,
    });
    ctx.replace_status(&cidr).await.map(drop)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn networks_go_when_their_addresses_are_gone_or_elsewhere() {
        let cidr = |name: &str, cidr: &str, deleted: bool, held: bool| {
            let mut value = json!({"metadata": {"name": name, "uid": name}, "spec": {"cidrs": [cidr]}});
            if deleted {
                value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            if held {
                value["metadata"]["finalizers"] = json!([FINALIZER]);
            }
            Arc::new(serde_json::from_value::<ServiceCIDR>(value).expect("a network"))
        };
        let address = |ip: &str| {
            let value = json!({"metadata": {"name": ip, "labels": {MANAGED_BY: ALLOCATOR}}});
            vec![Arc::new(serde_json::from_value::<IPAddress>(value).expect("an address"))]
        };
        let now: Timestamp = "2026-01-01T00:00:05Z".parse().expect("a time");
        let later: Timestamp = "2026-01-01T00:00:10Z".parse().expect("a time");
        let going = cidr("a", "10.1.0.0/24", true, true);
        let around = cidr("b", "10.0.0.0/8", false, true);
        assert_eq!(plan(&cidr("a", "10.1.0.0/24", false, false), &[], &[], now), Action::Hold);
        assert_eq!(plan(&cidr("a", "10.1.0.0/24", false, true), &[], &[], now), Action::Ready);
        assert_eq!(plan(&going, std::slice::from_ref(&going), &address("10.1.0.7"), now), Action::StillUsed);
        assert_eq!(
            plan(&going, std::slice::from_ref(&going), &address("10.2.0.7"), now),
            Action::Wait(later)
        );
        assert_eq!(plan(&going, &[going.clone(), around], &address("10.1.0.7"), later), Action::LetGo);
    }
}

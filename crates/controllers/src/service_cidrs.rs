//! ServiceCIDR controller: sets the `Ready` condition, and keeps a ServiceCIDR from being deleted while its
//! addresses are in use.
//!
//! Upstream: `pkg/controller/servicecidrs`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use api::networking::ip::Cidr;
use jiff::Timestamp;
use k8s_openapi::api::networking::v1::{IPAddress, ServiceCIDR};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction};

const FINALIZER: &str = "networking.k8s.io/service-cidr-finalizer";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
const ALLOCATOR: &str = "ipallocator.k8s.io";
/// How long an unused ServiceCIDR is kept, so that all API servers notice its deletion and stop allocating
/// from it.
const DELETION_GRACE_PERIOD: Duration = Duration::from_secs(10);

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.impersonate("service-cidrs-controller"),
        events: ctx.events.from("service-cidrs-controller"),
        ..ctx
    };
    let controller = Controller::new("service_cidrs", &ctx);
    // A change may affect other ServiceCIDRs that overlap with this one.
    let all = ctx.caches.service_cidrs().clone();
    controller.on(ctx.caches.service_cidrs(), move |changed: &ObjectUpdate<'_, ServiceCIDR>, enqueue| {
        enqueue(changed.latest().key());
        all.all().iter().filter(|cidr| cidr.is_deleting()).for_each(|cidr| enqueue(cidr.key()));
    });
    let all = ctx.caches.service_cidrs().clone();
    controller.on(ctx.caches.ip_addresses(), move |changed: &ObjectUpdate<'_, IPAddress>, enqueue| {
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
    AddFinalizer,
    SetReady,
    InUse,
    Wait(Timestamp),
    RemoveFinalizer,
}

fn plan(
    cidr: &ServiceCIDR,
    all: &[Arc<ServiceCIDR>],
    addresses: &[Arc<IPAddress>],
    now: Timestamp,
) -> Action {
    let has_finalizer = cidr.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER);
    let Some(deleted) = &cidr.metadata.deletion_timestamp else {
        return if has_finalizer { Action::SetReady } else { Action::AddFinalizer };
    };
    if is_needed(cidr, all, addresses) {
        return Action::InUse;
    }
    let end = deleted.0.checked_add(DELETION_GRACE_PERIOD).unwrap_or(now);
    if end > now { Action::Wait(end) } else { Action::RemoveFinalizer }
}

fn networks(cidr: &ServiceCIDR) -> impl Iterator<Item = Cidr> + '_ {
    cidr.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten()).filter_map(|text| Cidr::parse(text))
}

/// Whether some Service address is in this ServiceCIDR and in no other one.
fn is_needed(cidr: &ServiceCIDR, all: &[Arc<ServiceCIDR>], addresses: &[Arc<IPAddress>]) -> bool {
    let others: Vec<Cidr> =
        all.iter().filter(|other| other.uid() != cidr.uid()).flat_map(|other| networks(other)).collect();
    let used = addresses.iter().filter(|address| address.label(MANAGED_BY) == Some(ALLOCATOR));
    let used = used.filter_map(|address| address.name().parse::<IpAddr>().ok());
    let mut own = used.filter(|ip| networks(cidr).any(|network| network.contains(*ip)));
    own.any(|ip| !others.iter().any(|network| network.contains(ip)))
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(cidr) = ctx.caches.service_cidrs().get(key) else { return Ok(ReconcileAction::Forget) };
    let now = ctx.clock.now();
    let (all, addresses) = (ctx.caches.service_cidrs().all(), ctx.caches.ip_addresses().all());
    match plan(&cidr, &all, &addresses, now) {
        Action::AddFinalizer => {
            let mut with_finalizer = (*cidr).clone();
            with_finalizer.metadata.finalizers.get_or_insert_default().push(FINALIZER.into());
            ctx.replace(&with_finalizer).await?;
        }
        Action::SetReady => {
            let result =
                update_ready_condition(ctx, &cidr, "True", "", "Kubernetes Service CIDR is ready", now).await;
            if let Err(error) = result {
                let message = "The ServiceCIDR Status can not be set to Ready=True";
                ctx.events.warning(&*cidr, "KubernetesServiceCIDRError", message);
                return Err(error);
            }
        }
        Action::InUse => {
            let message = "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR";
            update_ready_condition(ctx, &cidr, "False", "Terminating", message, now).await?;
        }
        Action::Wait(end) => return Ok(ReconcileAction::RequeueAt(end)),
        Action::RemoveFinalizer => {
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
    Ok(ReconcileAction::AwaitChange)
}

async fn update_ready_condition(
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
    fn cidr_is_released_when_no_address_needs_it() {
        let cidr = |name: &str, cidr: &str, deleted: bool, has_finalizer: bool| {
            let mut value = json!({"metadata": {"name": name, "uid": name}, "spec": {"cidrs": [cidr]}});
            if deleted {
                value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            if has_finalizer {
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
        let deleting = cidr("a", "10.1.0.0/24", true, true);
        let containing = cidr("b", "10.0.0.0/8", false, true);
        assert_eq!(plan(&cidr("a", "10.1.0.0/24", false, false), &[], &[], now), Action::AddFinalizer);
        assert_eq!(plan(&cidr("a", "10.1.0.0/24", false, true), &[], &[], now), Action::SetReady);
        assert_eq!(
            plan(&deleting, std::slice::from_ref(&deleting), &address("10.1.0.7"), now),
            Action::InUse
        );
        assert_eq!(
            plan(&deleting, std::slice::from_ref(&deleting), &address("10.2.0.7"), now),
            Action::Wait(later)
        );
        assert_eq!(
            plan(&deleting, &[deleting.clone(), containing], &address("10.1.0.7"), later),
            Action::RemoveFinalizer
        );
    }
}

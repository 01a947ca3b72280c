//! Helpers shared by the Endpoints and EndpointSlice controllers: which pods are backends of a Service.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use parking_lot::Mutex;
use reconcile::{Cache, Key, Object, ObjectUpdate};

use crate::pod;

/// The annotation with the time of the change that led to this state, for programming latency metrics.
pub const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// The label of endpoints whose Service has no cluster IP.
pub const HEADLESS: &str = "service.kubernetes.io/headless";

/// The spec of a Service, if it selects its pods by labels.
pub fn spec_with_selector(service: &Service) -> Option<&ServiceSpec> {
    let spec = service.spec.as_ref()?;
    let external = spec.type_.as_deref() == Some("ExternalName");
    (!external && spec.selector.is_some()).then_some(spec)
}

pub fn matches_selector<'a>(service: &Service, label: impl Fn(&str) -> Option<&'a str>) -> bool {
    spec_with_selector(service)
        .and_then(|spec| spec.selector.as_ref())
        .is_some_and(|selector| selector.iter().all(|(name, value)| label(name) == Some(value)))
}

/// A reference to a pod as endpoints contain it (`targetRef`).
pub fn reference(pod: &Pod) -> ObjectReference {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    ObjectReference {
        kind: Some("Pod".into()),
        namespace: some(pod.namespace()),
        name: some(pod.name()),
        uid: some(pod.uid()),
        ..ObjectReference::default()
    }
}

/// Returns a handler that enqueues the Services of a pod, before and after a relevant change.
pub fn services_of(
    services: &Arc<Cache<Service>>,
) -> impl Fn(&ObjectUpdate<'_, Pod>, &mut dyn FnMut(Key)) + Send + Sync + use<> {
    let services = services.clone();
    move |changed, enqueue| {
        if let (Some(before), Some(after)) = (changed.before, changed.after)
            && endpoint_fields(before) == endpoint_fields(after)
        {
            return;
        }
        for service in services.in_namespace(changed.latest().namespace()) {
            let states = [changed.before, changed.after];
            if states.into_iter().flatten().any(|pod| matches_selector(&service, |name| pod.label(name))) {
                enqueue(service.key());
            }
        }
    }
}

/// The fields of a pod that appear in its endpoints.
fn endpoint_fields(pod: &Pod) -> impl PartialEq + '_ {
    let spec = pod.spec.as_ref();
    (
        &pod.metadata.labels,
        pod.is_deleting(),
        pod::is_ready(pod),
        pod::is_terminal(pod),
        pod::node(pod),
        pod.status.as_ref().and_then(|status| status.pod_ips.as_ref()),
        spec.and_then(|spec| spec.hostname.as_ref()),
        spec.and_then(|spec| spec.subdomain.as_ref()),
    )
}

/// Whether a pod has an IP and belongs into the endpoints of its Service.
pub fn should_be_endpoint(pod: &Pod, with_terminating: bool) -> bool {
    let has_ip = pod.status.as_ref().is_some_and(|status| {
        status.pod_ip.as_ref().is_some_and(|ip| !ip.is_empty())
            || status.pod_ips.as_ref().is_some_and(|ips| !ips.is_empty())
    });
    !pod::is_terminal(pod) && has_ip && (with_terminating || !pod.is_deleting())
}

/// The pod's IPs of one family in canonical form.
pub fn addresses(pod: &Pod, v6: bool) -> Vec<String> {
    let ips = pod.status.as_ref().and_then(|status| status.pod_ips.as_deref()).unwrap_or_default();
    let parsed = ips.iter().filter_map(|ip| ip.ip.parse::<std::net::IpAddr>().ok());
    parsed.filter(|ip| ip.is_ipv6() == v6).map(|ip| ip.to_string()).collect()
}

/// The pod's port that a Service port targets.
pub fn find_pod_port(pod: &Pod, port: &ServicePort) -> Option<i32> {
    let name = match &port.target_port {
        Some(IntOrString::Int(number)) => return Some(*number),
        Some(IntOrString::String(name)) => name,
        None => return Some(port.port),
    };
    let spec = pod.spec.as_ref()?;
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|container| container.ports.iter().flatten());
    let protocol = |protocol: &Option<String>| protocol.clone().unwrap_or_else(|| "TCP".into());
    ports
        .filter(|found| found.name.as_ref() == Some(name))
        .find(|found| protocol(&found.protocol) == protocol(&port.protocol))
        .map(|found| found.container_port)
}

/// The pod's hostname below the domain of its headless Service.
pub fn hostname<'a>(pod: &'a Pod, service: &Service) -> Option<&'a String> {
    let spec = pod.spec.as_ref()?;
    let below = spec.subdomain.as_deref() == Some(service.name()) && pod.namespace() == service.namespace();
    spec.hostname.as_ref().filter(|name| below && !name.is_empty())
}

/// Whether a Service has a cluster IP.
pub fn has_address(spec: &ServiceSpec) -> bool {
    !matches!(spec.cluster_ip.as_deref(), None | Some("" | "None"))
}

/// Tracks when each Service and its pods last changed (upstream's `TriggerTimeTracker`).
#[derive(Default)]
pub struct TriggerTimeTracker(Mutex<HashMap<Key, ServiceTriggerTimes>>);

#[derive(Default)]
struct ServiceTriggerTimes {
    service: Option<Timestamp>,
    pods: HashMap<String, Timestamp>,
}

impl TriggerTimeTracker {
    /// The time of the earliest change since the last call, which becomes the trigger time annotation.
    pub fn trigger_time(&self, service: &Service, pods: &[Arc<Pod>]) -> Option<Timestamp> {
        let created = service.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let mut known = self.0.lock();
        let before = known.remove(&service.key());
        let mut first: Option<Timestamp> = None;
        let mut note = |time: Timestamp, before: Option<Timestamp>| {
            if before.is_none_or(|before| time > before) {
                first = Some(first.map_or(time, |first| first.min(time)));
            }
        };
        let mut seen = ServiceTriggerTimes { service: created, ..ServiceTriggerTimes::default() };
        for pod in pods {
            let ready = pod::condition(pod, "Ready").and_then(|ready| ready.last_transition_time.as_ref());
            let Some(time) = ready.map(|time| time.0) else { continue };
            note(time, before.as_ref().and_then(|before| before.pods.get(pod.name()).copied()));
            seen.pods.insert(pod.name().to_owned(), time);
        }
        if let Some(created) = created {
            note(created, before.as_ref().and_then(|before| before.service));
        }
        known.insert(service.key(), seen);
        if before.is_none() { created } else { first }
    }

    pub fn forget(&self, service: &Key) {
        self.0.lock().remove(service);
    }
}

/// Sets or removes the trigger time annotation.
pub fn set_trigger_annotation(
    annotations: &mut Option<std::collections::BTreeMap<String, String>>,
    at: Option<Timestamp>,
) {
    match at {
        Some(at) => drop(annotations.get_or_insert_default().insert(TRIGGER_TIME.into(), at.to_string())),
        None => drop(annotations.as_mut().and_then(|annotations| annotations.remove(TRIGGER_TIME))),
    }
}

//! Availability of remote API servers: checked when the APIService, its Service or its
//! EndpointSlices change, and every 30 seconds, because network failures cause no event.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use api::Status;
use api::json::JsonExt as _;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::discovery::RemoteDiscovery;
use super::{ApiService, ServiceBackend, proxy};
use crate::admission::Cluster as _;
use crate::cache::wait_for_shutdown;
use crate::endpoints;
use crate::object::Object;
use crate::request::Target;
use crate::server::Server;
use crate::subresource::set_condition;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

/// Time between checks of an available server.
const RESYNC_INTERVAL: Duration = Duration::from_secs(30);
/// First retry of an unavailable server; doubles with each failure up to `RESYNC_INTERVAL`.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(250);
/// Timeout of discovery requests to a remote server.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The last check of a server.
struct ProbeState {
    fingerprint: u64,
    next_check: Instant,
    delay: Duration,
}

/// Status, reason and message of the `Available` condition.
#[derive(Debug, PartialEq)]
struct AvailableCondition {
    status: &'static str,
    reason: &'static str,
    message: String,
}

fn unavailable(reason: &'static str, message: String) -> AvailableCondition {
    AvailableCondition { status: "False", reason, message }
}

/// Updates the `Available` condition of remote APIServices and caches their discovery documents.
pub async fn run_controller(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let shard = |group, plural| {
        let row = api::resource_table::find_resource(group, "v1", plural).expect("it is in the table");
        server.shard(row).subscribe()
    };
    let mut services = shard("", "services");
    let mut slices = shard("discovery.k8s.io", "endpointslices");
    let mut own = server.aggregator.shard.subscribe();
    let mut probe_states: HashMap<String, ProbeState> = HashMap::new();
    loop {
        let remote_services = server.aggregator.remote_services();
        probe_states.retain(|name, _| remote_services.iter().any(|entry| entry.name == *name));
        server.aggregator.discovery_cache.write().retain(|name, _| probe_states.contains_key(name));
        let pending: Vec<_> = remote_services
            .into_iter()
            .filter_map(|entry| {
                let (service, slices) = service_and_slices(&server, entry.remote.as_ref()?);
                let fingerprint = fingerprint(&entry, service.as_deref(), &slices);
                let known = probe_states.get(&entry.name);
                let expired = known.is_none_or(|known| {
                    known.fingerprint != fingerprint || known.next_check <= Instant::now()
                });
                expired.then_some((entry, service, slices, fingerprint))
            })
            .collect();
        let checks = pending.into_iter().map(|(entry, service, slices, fingerprint)| {
            let server = &server;
            async move {
                let available = check_availability(server, &entry, service.as_deref(), &slices).await;
                (entry.name.clone(), fingerprint, available)
            }
        });
        for (name, fingerprint, available) in futures_util::future::join_all(checks).await {
            let before = probe_states
                .get(&name)
                .filter(|known| known.fingerprint == fingerprint)
                .map(|known| known.delay);
            let delay = match (available, before) {
                (true, _) => RESYNC_INTERVAL,
                (false, Some(delay)) if delay < RESYNC_INTERVAL => (delay * 2).min(RESYNC_INTERVAL),
                (false, _) => MIN_RETRY_DELAY,
            };
            probe_states.insert(name, ProbeState { fingerprint, next_check: Instant::now() + delay, delay });
        }
        let next = probe_states.values().map(|state| state.next_check).min();
        let timer = async {
            match next {
                Some(next) => tokio::time::sleep_until(next).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = own.changed() => if changed.is_err() { return },
            // Without remote APIServices, Services and EndpointSlices do not matter.
            _ = services.changed(), if next.is_some() => {}
            _ = slices.changed(), if next.is_some() => {}
            () = timer => {}
            () = wait_for_shutdown(&mut shutdown) => return,
        }
    }
}

/// The Service and its EndpointSlices.
fn service_and_slices(server: &Server, remote: &ServiceBackend) -> (Option<Arc<Object>>, Vec<Arc<Object>>) {
    let service = server.get("", "services", &remote.namespace, &remote.service);
    let mut slices = server.list("discovery.k8s.io", "endpointslices", &remote.namespace);
    slices.retain(|slice| slice.label("kubernetes.io/service-name") == Some(&remote.service));
    (service, slices)
}

/// A hash of everything known that a check depends on; a change triggers a check.
fn fingerprint(entry: &ApiService, service: Option<&Object>, slices: &[Arc<Object>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Some(remote) = &entry.remote {
        (&remote.namespace, &remote.service, remote.port, remote.insecure_skip_tls_verify, &remote.ca_bundle)
            .hash(&mut hasher);
    }
    service.map(|service| service.revision).hash(&mut hasher);
    for slice in slices {
        (&slice.key, slice.revision).hash(&mut hasher);
    }
    hasher.finish()
}

/// Checks a server once and updates the condition; returns whether it is available.
async fn check_availability(
    server: &Server,
    entry: &ApiService,
    service: Option<&Object>,
    slices: &[Arc<Object>],
) -> bool {
    let Some(remote) = &entry.remote else { return false };
    let slices: Vec<Value> = slices.iter().map(|slice| slice.value()).collect();
    let found = match check_endpoints(remote, service.map(Object::value).as_ref(), &slices) {
        Err(condition) => condition,
        Ok(()) => match discover(server, entry, remote).await {
            Err(reason) => unavailable("FailedDiscoveryCheck", reason),
            Ok(()) => AvailableCondition {
                status: "True",
                reason: "Passed",
                message: "all checks passed".to_owned(),
            },
        },
    };
    if let Err(status) = update_condition(server, entry, &found).await {
        tracing::warn!(
            apiservice = entry.name,
            error = status.message,
            "cannot update the Available condition of an APIService"
        );
    }
    found.status == "True"
}

/// The checks that need no request to the server.
fn check_endpoints(
    remote: &ServiceBackend,
    service: Option<&Value>,
    slices: &[Value],
) -> Result<(), AvailableCondition> {
    let ServiceBackend { namespace, service: name, port, .. } = remote;
    let Some(service) = service else {
        let message = format!("service/{name} in {namespace:?} is not present");
        return Err(unavailable("ServiceNotFound", message));
    };
    let spec = service.at("spec");
    if spec.text("type") != "ClusterIP" {
        return Ok(());
    }
    let found = spec.items("ports").iter().find(|found| found.int("port") == Some((*port).into()));
    let Some(found) = found else {
        let message = format!("service/{name} in {namespace:?} is not listening on port {port}");
        return Err(unavailable("ServicePortError", message));
    };
    if slices.is_empty() {
        let message = format!("cannot find endpointslices for service/{name} in {namespace:?}");
        return Err(unavailable("EndpointsNotFound", message));
    }
    let named = found.text("name");
    let open = |slice: &Value| {
        let ready = |endpoint: &Value| endpoint.at("conditions").at("ready").as_bool() != Some(false);
        slice.items("endpoints").iter().any(ready)
            && slice.items("ports").iter().any(|port| port.text("name") == named && port.has("port"))
    };
    if !slices.iter().any(open) {
        let message = format!(
            "endpointslices for service/{name} in {namespace:?} have no addresses with port name {named:?}"
        );
        return Err(unavailable("MissingEndpoints", message));
    }
    Ok(())
}

/// Fetches the resource list of the group and version, which also proves that the server responds.
async fn discover(server: &Server, entry: &ApiService, remote: &ServiceBackend) -> Result<(), String> {
    let address = endpoints::resolve(server, &remote.namespace, &remote.service, remote.port)?;
    let path = entry.path();
    let url = format!("https://{}{path}", crate::webhook_client::host_port(&address.0, address.1));
    let failed = |reason: String| format!("failing or missing response from {url}: {reason}");
    let response = tokio::time::timeout(DISCOVERY_TIMEOUT, proxy::get(server, remote, &address, &path)).await;
    let list = match response {
        Err(_) => {
            let reason = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
            return Err(failed(format!("Get {url:?}: {reason}")));
        }
        Ok(Err(reason)) => return Err(failed(format!("Get {url:?}: {reason}"))),
        Ok(Ok((status, _))) if !(200..300).contains(&status) => {
            return Err(failed(format!("bad status from {url}: {status}")));
        }
        Ok(Ok((_, body))) => body,
    };
    let before = server.aggregator.discovery_cache.read().get(&entry.name).cloned();
    let discovery = RemoteDiscovery::fetch(server, entry, remote, &address, &list, before.as_deref());
    // The other discovery documents are optional: a failure to fetch them does not make the server
    // unavailable.
    if let Ok(discovery) = tokio::time::timeout(DISCOVERY_TIMEOUT, discovery).await {
        server.aggregator.discovery_cache.write().insert(entry.name.clone(), Arc::new(discovery));
    }
    Ok(())
}

async fn update_condition(
    server: &Server,
    entry: &ApiService,
    found: &AvailableCondition,
) -> Result<(), Status> {
    let row = api::resource_table::find_resource("apiregistration.k8s.io", "v1", "apiservices")
        .expect("it is in the table");
    let name = entry.name.clone();
    let target = Target { name, subresource: "status".into(), ..Target::collection(row, "") };
    let options = WriteOptions::internal(Timestamp::now());
    let change = |before: &Value| {
        let mut after = before.clone();
        let condition = json!({
            "type": "Available", "status": found.status, "reason": found.reason, "message": found.message,
        });
        set_condition(&mut after, condition, &options.timestamp());
        Ok(ObjectChange { value: after, managed_fields_set: true, retry_on_conflict: true })
    };
    match server.update_object(&target, &options, change).await {
        // Deleted in the meantime.
        Err(status) if status.code == 404 => Ok(()),
        done => done.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;

    #[track_caller]
    fn check(service: Value, slices: Value, expected: &str) {
        let remote = ServiceBackend {
            namespace: "n".into(),
            service: "s".into(),
            port: 443,
            available: false,
            insecure_skip_tls_verify: false,
            ca_bundle: String::new(),
            tls: OnceLock::new(),
        };
        let service = Some(&service).filter(|service| !service.is_null());
        let found = check_endpoints(&remote, service, slices.as_array().unwrap());
        let found = found.map_or_else(
            |condition| format!("{}: {}", condition.reason, condition.message),
            |()| "ok".into(),
        );
        assert_eq!(found, expected);
    }

    #[test]
    fn checks_service_and_endpoints_before_discovery() {
        let service =
            |port: u16| json!({"spec": {"type": "ClusterIP", "ports": [{"name": "a", "port": port}]}});
        let slice = |ready: bool, name: &str| json!([{"endpoints": [{"addresses": ["192.0.2.1"], "conditions": {"ready": ready}}], "ports": [{"name": name, "port": 8443}]}]);
        check(Value::Null, json!([]), "ServiceNotFound: service/s in \"n\" is not present");
        check(service(80), json!([]), "ServicePortError: service/s in \"n\" is not listening on port 443");
        check(
            service(443),
            json!([]),
            "EndpointsNotFound: cannot find endpointslices for service/s in \"n\"",
        );
        let none =
            "MissingEndpoints: endpointslices for service/s in \"n\" have no addresses with port name \"a\"";
        check(service(443), slice(false, "a"), none);
        check(service(443), slice(true, "b"), none);
        check(service(443), slice(true, "a"), "ok");
        check(json!({"spec": {"type": "ExternalName"}}), json!([]), "ok");
    }
}

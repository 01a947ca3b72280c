//! Whether the servers behind APIServices are there: looked at when anything about them changes, and every
//! half minute, since networks break without telling.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use api::Status;
use api::json::Json as _;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::offer::Offer;
use super::{Entry, Remote, proxy};
use crate::admission::Cluster as _;
use crate::cache::stopped;
use crate::endpoints;
use crate::object::Object;
use crate::request::Target;
use crate::server::Server;
use crate::subresource::set_condition;
use crate::update::Change;
use crate::write::WriteOptions;

/// How often a server that is there is looked at.
const EVERY: Duration = Duration::from_secs(30);
/// How soon one that is not is looked at again, twice as late each time.
const RETRY: Duration = Duration::from_millis(250);
/// How long a server may take to say what it has.
const PATIENCE: Duration = Duration::from_secs(5);

/// When a server was looked at, and what about it was known then.
struct Looked {
    print: u64,
    due: Instant,
    wait: Duration,
}

/// What is said about a server.
#[derive(Debug, PartialEq)]
struct Finding {
    status: &'static str,
    reason: &'static str,
    message: String,
}

fn missing(reason: &'static str, message: String) -> Finding {
    Finding { status: "False", reason, message }
}

/// Looks after the conditions of APIServices with a server behind them, and learns what it offers.
pub async fn keep(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let shard = |group, plural| {
        let row = api::table::find(group, "v1", plural).expect("it is in the table");
        server.shard(row).subscribe()
    };
    let mut services = shard("", "services");
    let mut slices = shard("discovery.k8s.io", "endpointslices");
    let mut own = server.aggregator.shard.subscribe();
    let mut looked: HashMap<String, Looked> = HashMap::new();
    loop {
        let remotes = server.aggregator.remotes();
        looked.retain(|name, _| remotes.iter().any(|entry| entry.name == *name));
        server.aggregator.offers.write().retain(|name, _| looked.contains_key(name));
        let due: Vec<_> = remotes
            .into_iter()
            .filter_map(|entry| {
                let (service, slices) = surroundings(&server, entry.remote.as_ref()?);
                let print = print(&entry, service.as_deref(), &slices);
                let known = looked.get(&entry.name);
                let due = known.is_none_or(|known| known.print != print || known.due <= Instant::now());
                due.then_some((entry, service, slices, print))
            })
            .collect();
        let looks = due.into_iter().map(|(entry, service, slices, print)| {
            let server = &server;
            async move {
                let good = look(server, &entry, service.as_deref(), &slices).await;
                (entry.name.clone(), print, good)
            }
        });
        for (name, print, good) in futures_util::future::join_all(looks).await {
            let before = looked.get(&name).filter(|known| known.print == print).map(|known| known.wait);
            let wait = match (good, before) {
                (true, _) => EVERY,
                (false, Some(wait)) if wait < EVERY => (wait * 2).min(EVERY),
                (false, _) => RETRY,
            };
            looked.insert(name, Looked { print, due: Instant::now() + wait, wait });
        }
        let next = looked.values().map(|looked| looked.due).min();
        let timer = async {
            match next {
                Some(next) => tokio::time::sleep_until(next).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = own.changed() => if changed.is_err() { return },
            // Nobody cares for these while there is nobody to look at.
            _ = services.changed(), if next.is_some() => {}
            _ = slices.changed(), if next.is_some() => {}
            () = timer => {}
            () = stopped(&mut shutdown) => return,
        }
    }
}

/// The Service, and its slices.
fn surroundings(server: &Server, remote: &Remote) -> (Option<Arc<Object>>, Vec<Arc<Object>>) {
    let service = server.get("", "services", &remote.namespace, &remote.service);
    let mut slices = server.list("discovery.k8s.io", "endpointslices", &remote.namespace);
    slices.retain(|slice| slice.label("kubernetes.io/service-name") == Some(&remote.service));
    (service, slices)
}

/// Stands for all that a look depends on, as far as we hear of it.
fn print(entry: &Entry, service: Option<&Object>, slices: &[Arc<Object>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Some(remote) = &entry.remote {
        (&remote.namespace, &remote.service, remote.port, remote.unverified, &remote.bundle)
            .hash(&mut hasher);
    }
    service.map(|service| service.revision).hash(&mut hasher);
    for slice in slices {
        (&slice.key, slice.revision).hash(&mut hasher);
    }
    hasher.finish()
}

/// Looks once and writes down what was found; whether the server is there.
async fn look(server: &Server, entry: &Entry, service: Option<&Object>, slices: &[Arc<Object>]) -> bool {
    let Some(remote) = &entry.remote else { return false };
    let slices: Vec<Value> = slices.iter().map(|slice| slice.value()).collect();
    let found = match assess(remote, service.map(Object::value).as_ref(), &slices) {
        Err(finding) => finding,
        Ok(()) => match discover(server, entry, remote).await {
            Err(why) => missing("FailedDiscoveryCheck", why),
            Ok(()) => Finding { status: "True", reason: "Passed", message: "all checks passed".to_owned() },
        },
    };
    if let Err(status) = tell(server, entry, &found).await {
        tracing::warn!(
            apiservice = entry.name,
            error = status.message,
            "cannot say whether a server is there"
        );
    }
    found.status == "True"
}

/// What can be said without asking the server.
fn assess(remote: &Remote, service: Option<&Value>, slices: &[Value]) -> Result<(), Finding> {
    let Remote { namespace, service: name, port, .. } = remote;
    let Some(service) = service else {
        let message = format!("service/{name} in {namespace:?} is not present");
        return Err(missing("ServiceNotFound", message));
    };
    let spec = service.at("spec");
    if spec.text("type") != "ClusterIP" {
        return Ok(());
    }
    let found = spec.items("ports").iter().find(|found| found.int("port") == Some((*port).into()));
    let Some(found) = found else {
        let message = format!("service/{name} in {namespace:?} is not listening on port {port}");
        return Err(missing("ServicePortError", message));
    };
    if slices.is_empty() {
        let message = format!("cannot find endpointslices for service/{name} in {namespace:?}");
        return Err(missing("EndpointsNotFound", message));
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
        return Err(missing("MissingEndpoints", message));
    }
    Ok(())
}

/// Asks the server what it has, which is as good as asking how it is.
async fn discover(server: &Server, entry: &Entry, remote: &Remote) -> Result<(), String> {
    let place = endpoints::resolve(server, &remote.namespace, &remote.service, remote.port)?;
    let path = entry.path();
    let url = format!("https://{}{path}", crate::callout::shown(&place.0, place.1));
    let failed = |why: String| format!("failing or missing response from {url}: {why}");
    let asked = tokio::time::timeout(PATIENCE, proxy::get(server, remote, &place, &path)).await;
    let list = match asked {
        Err(_) => {
            let why = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
            return Err(failed(format!("Get {url:?}: {why}")));
        }
        Ok(Err(why)) => return Err(failed(format!("Get {url:?}: {why}"))),
        Ok(Ok((status, _))) if !(200..300).contains(&status) => {
            return Err(failed(format!("bad status from {url}: {status}")));
        }
        Ok(Ok((_, body))) => body,
    };
    let before = server.aggregator.offers.read().get(&entry.name).cloned();
    let offer = Offer::learn(server, entry, remote, &place, &list, before.as_deref());
    // What it offers is worth having, yet no condition of its being there.
    if let Ok(offer) = tokio::time::timeout(PATIENCE, offer).await {
        server.aggregator.offers.write().insert(entry.name.clone(), Arc::new(offer));
    }
    Ok(())
}

async fn tell(server: &Server, entry: &Entry, found: &Finding) -> Result<(), Status> {
    let row = api::table::find("apiregistration.k8s.io", "v1", "apiservices").expect("it is in the table");
    let name = entry.name.clone();
    let target = Target { name, subresource: "status".into(), ..Target::collection(row, "") };
    let options = WriteOptions::internal(Timestamp::now());
    let change = |before: &Value| {
        let mut after = before.clone();
        let condition = json!({
            "type": "Available", "status": found.status, "reason": found.reason, "message": found.message,
        });
        set_condition(&mut after, condition, &options.timestamp());
        Ok(Change { value: after, tracked: true, again: true })
    };
    match server.change(&target, &options, change).await {
        // Gone meanwhile.
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
        let remote = Remote {
            namespace: "n".into(),
            service: "s".into(),
            port: 443,
            available: false,
            unverified: false,
            bundle: String::new(),
            tls: OnceLock::new(),
        };
        let service = Some(&service).filter(|service| !service.is_null());
        let found = assess(&remote, service, slices.as_array().unwrap());
        let found =
            found.map_or_else(|finding| format!("{}: {}", finding.reason, finding.message), |()| "ok".into());
        assert_eq!(found, expected);
    }

    #[test]
    fn what_is_known_without_asking() {
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

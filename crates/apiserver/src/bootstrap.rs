//! The objects every cluster has: system namespaces, priority classes, the `kubernetes` Service
//! with its endpoints, and the authentication ConfigMap.

use std::net::IpAddr;
use std::sync::Arc;

use api::json::JsonExt as _;
use api::{Resource, Status};
use futures_util::future::select_all;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::authentication;
use crate::cache::{Event, EventBatch, wait_for_shutdown};
use crate::options::ResourceVersionMatch;
use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

/// The address of this server, and the Service networks.
pub struct ClusterNetworkConfig {
    /// `None` on a machine without a network; the Service then has no endpoints.
    pub address: watch::Receiver<Option<IpAddr>>,
    pub port: u16,
    /// The ClusterIP of the `kubernetes` Service: the first address of the Service network.
    pub service_ip: IpAddr,
    pub service_cidrs: Vec<String>,
}

const NAMESPACES: &[&str] = &["default", "kube-system", "kube-public", "kube-node-lease"];

/// Creates missing objects. Of existing ones only the conditions of the ServiceCIDR, and the ports
/// and endpoints of the `kubernetes` Service, are updated.
pub async fn ensure_default_objects(server: &Server, cluster: &ClusterNetworkConfig) -> Result<(), Status> {
    for name in NAMESPACES {
        ensure(server, row("", "namespaces"), "", name, json!({})).await?;
    }
    for (name, value, description) in crate::admission::SYSTEM_CLASSES {
        let class = json!({"value": value, "description": description});
        ensure(server, row("scheduling.k8s.io", "priorityclasses"), "", name, class).await?;
    }
    // As upstream: the date since which the use of legacy service account tokens is tracked.
    let date = Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date();
    let since = json!({"data": {"since": date.to_string()}});
    let tracking = "kube-apiserver-legacy-service-account-token-tracking";
    ensure(server, row("", "configmaps"), "kube-system", tracking, since).await?;
    let cidrs = json!({"spec": {"cidrs": cluster.service_cidrs}});
    ensure(server, row("networking.k8s.io", "servicecidrs"), "", "kubernetes", cidrs).await?;
    ready_service_cidr(server).await?;
    let service = json!({
        "metadata": {"labels": {"component": "apiserver", "provider": "kubernetes"}},
        "spec": {
            "type": "ClusterIP", "clusterIP": cluster.service_ip.to_string(), "ipFamilyPolicy": "SingleStack",
            "sessionAffinity": "None",
            "ports": [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": cluster.port}],
        },
    });
    ensure_fields(server, row("", "services"), service, &["/spec/ports"]).await?;
    crate::services::repair(server, Timestamp::now()).await;
    publish_endpoints(server, cluster).await
}

fn row(group: &str, plural: &str) -> &'static Resource {
    api::resource_table::find_resource(group, "v1", plural)
        .expect("the kinds of default objects are in the table")
}

/// Creates an object unless one of that name exists.
pub async fn ensure(
    server: &Server,
    resource: &'static Resource,
    namespace: &str,
    name: &str,
    mut value: Value,
) -> Result<(), Status> {
    let collection = Target::collection(resource, namespace);
    let target = Target { name: name.to_owned(), ..collection.clone() };
    if server.current(&target).await?.is_some() {
        return Ok(());
    }
    crate::codec::set_type_meta(&mut value, resource.group, resource.version, resource.kind);
    value.object_mut("metadata").insert("name".into(), name.into());
    let options = WriteOptions::internal(Timestamp::now());
    match server.create_object(&collection, value, &options, None).await {
        Err(status) if status.reason == "AlreadyExists" => Ok(()),
        other => other.map(drop),
    }
}

async fn ready_service_cidr(server: &Server) -> Result<(), Status> {
    let collection = Target::collection(row("networking.k8s.io", "servicecidrs"), "");
    let target = Target { name: "kubernetes".into(), subresource: "status".into(), ..collection };
    let options = WriteOptions::internal(Timestamp::now());
    let now = options.timestamp();
    let ready = |before: &Value| {
        let mut after = before.clone();
        if before.path("status.conditions").as_array().is_none_or(Vec::is_empty) {
            after["status"] = json!({"conditions": [{
                "type": "Ready", "status": "True", "reason": "", "message": "Kubernetes default Service CIDR is ready",
                "lastTransitionTime": now,
            }]});
        }
        Ok(ObjectChange::replace(after))
    };
    server.update_object(&target, &options, ready).await.map(drop)
}

/// Endpoints and EndpointSlice of the `kubernetes` Service, with the address of this server.
async fn publish_endpoints(server: &Server, cluster: &ClusterNetworkConfig) -> Result<(), Status> {
    let Some(ip) = *cluster.address.borrow() else { return Ok(()) };
    let address = ip.to_string();
    let endpoints = json!({
        "metadata": {"labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}},
        "subsets": [{
            "addresses": [{"ip": address}],
            "ports": [{"name": "https", "port": cluster.port, "protocol": "TCP"}],
        }],
    });
    ensure_fields(server, row("", "endpoints"), endpoints, &["/subsets"]).await?;
    let slices = row("discovery.k8s.io", "endpointslices");
    let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
    let target = Target { name: KUBERNETES.into(), ..Target::collection(slices, "default") };
    if let Some(old) = server.current(&target).await?
        && old.value().text("addressType") != family
    {
        // `addressType` is immutable, so the slice is replaced.
        server.remove(&old).await?;
        server.wait_until_fresh(ResourceVersionMatch::MostRecent).await?;
    }
    let slice = json!({
        "metadata": {"labels": {"kubernetes.io/service-name": KUBERNETES}},
        "addressType": family,
        "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
        "ports": [{"name": "https", "port": cluster.port, "protocol": "TCP"}],
    });
    ensure_fields(server, slices, slice, &["/endpoints", "/ports"]).await
}

/// The name of the Service, its Endpoints and its EndpointSlice, in `default`.
const KUBERNETES: &str = "kubernetes";

/// Creates an object, or updates these fields of the existing one.
async fn ensure_fields(
    server: &Server,
    resource: &'static Resource,
    value: Value,
    fields: &[&str],
) -> Result<(), Status> {
    ensure(server, resource, "default", KUBERNETES, value.clone()).await?;
    let target = Target { name: KUBERNETES.into(), ..Target::collection(resource, "default") };
    let options = WriteOptions::internal(Timestamp::now());
    let change = |before: &Value| {
        let mut after = before.clone();
        for field in fields {
            let (parent, name) = field.rsplit_once('/').unwrap_or(("", field));
            if let (Some(parent), Some(new)) = (after.pointer_mut(parent), value.pointer(field)) {
                parent.set(name, new.clone());
            }
        }
        crate::create::defaulted(resource, after).map(ObjectChange::replace)
    };
    server.update_object(&target, &options, change).await.map(drop)
}

/// Restores default objects that are deleted, and publishes the address of this server when it
/// changes. Sleeps until there is an event of one of these kinds or the address changes.
pub async fn run_default_objects_controller(
    server: Arc<Server>,
    cluster: ClusterNetworkConfig,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut address = cluster.address.clone();
    let mut address_changed = false;
    let kinds = [
        row("", "configmaps"),
        row("", "services"),
        row("", "endpoints"),
        row("discovery.k8s.io", "endpointslices"),
    ];
    let shards = kinds.map(|kind| server.shard(kind));
    let mut changes = shards.each_ref().map(|shard| shard.subscribe());
    let mut positions = shards.each_ref().map(|_| None);
    loop {
        let mut restore = PendingRestore {
            default_objects: std::mem::take(&mut address_changed),
            authentication_config: false,
        };
        for (position, shard) in positions.iter_mut().zip(&shards) {
            match position.map(|position| shard.events_from(position, usize::MAX)) {
                Some(EventBatch::Events(events)) => {
                    *position = position.map(|position| position + events.len() as u64);
                    events.iter().for_each(|event| restore.record(event));
                }
                // The first pass, or the ring has dropped events: check everything.
                None | Some(EventBatch::TooOld) => {
                    *position = Some(shard.position_after(u64::MAX).unwrap_or(0));
                    restore = PendingRestore { default_objects: true, authentication_config: true };
                }
            }
        }
        if restore.authentication_config
            && let Err(status) = authentication::publish(&server).await
        {
            tracing::warn!(error = status.message, "cannot publish extension-apiserver-authentication");
        }
        if restore.default_objects
            && let Err(status) = ensure_default_objects(&server, &cluster).await
        {
            tracing::warn!(error = status.message, "cannot restore default objects");
        }
        tokio::select! {
            _ = select_all(changes.each_mut().map(|changes| Box::pin(changes.changed()))) => {}
            Ok(()) = address.changed() => address_changed = true,
            () = wait_for_shutdown(&mut shutdown) => return,
        }
    }
}

/// What the events since the last pass require.
#[derive(Default)]
struct PendingRestore {
    default_objects: bool,
    authentication_config: bool,
}

impl PendingRestore {
    fn record(&mut self, event: &Event) {
        let namespaced_name = (event.object.namespace(), event.object.name());
        self.authentication_config |= namespaced_name == (authentication::NAMESPACE, authentication::NAME);
        self.default_objects |= event.deleted && namespaced_name == ("default", KUBERNETES);
    }
}

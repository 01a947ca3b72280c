//! API aggregation: an APIService names the Service that serves a group and version.
//!
//! Requests for such a group and version are proxied with the user in headers (`proxy`). The
//! discovery and OpenAPI documents of those servers are merged into ours (`discovery`). Their
//! availability is checked on every relevant change and every 30 seconds (`availability`). Groups
//! that this server serves itself have APIServices, too, which it creates and deletes
//! (`registration`). Upstream: kube-aggregator.

mod availability;
mod discovery;
mod proxy;
mod registration;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use api::json::JsonExt as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::RwLock;
use rustls::ClientConfig;
use serde_json::Value;

use crate::cache::{Cache, IncrementalView, Shard, View};
use crate::object::Object;
use discovery::RemoteDiscovery;

pub use availability::run_controller as keep_available;
pub use proxy::proxy_request;
pub use registration::run_controller as keep_registered;

/// All APIServices, and the discovery documents of remote servers.
pub struct Aggregator {
    services: IncrementalView<ServiceIndex, 1>,
    shard: Arc<Shard>,
    /// Discovery of remote servers by APIService name, as of the last check.
    discovery_cache: RwLock<HashMap<String, Arc<RemoteDiscovery>>>,
    /// The proxy client certificate.
    pub client_certificate: Option<Arc<pki::ClientCertificate>>,
}

/// One APIService.
pub struct ApiService {
    pub name: String,
    pub group: String,
    pub version: String,
    pub group_priority: i64,
    pub version_priority: i64,
    /// The label `kube-aggregator.kubernetes.io/automanaged`.
    pub managed: String,
    /// `None`: this server serves the group itself.
    pub remote: Option<ServiceBackend>,
}

/// The remote server of an APIService.
pub struct ServiceBackend {
    pub namespace: String,
    pub service: String,
    pub port: u16,
    pub available: bool,
    insecure_skip_tls_verify: bool,
    ca_bundle: String,
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
}

#[derive(Default)]
struct ServiceIndex {
    by_name: BTreeMap<String, Arc<ApiService>>,
    /// APIServices with a remote server, by group and version.
    remote: HashMap<String, HashMap<String, Arc<ApiService>>>,
}

impl View for ServiceIndex {
    fn apply(&mut self, _: usize, object: &Object, deleted: bool) {
        if let Some(old) = self.by_name.remove(object.name())
            && let Some(versions) = self.remote.get_mut(&old.group)
        {
            versions.remove(&old.version);
            if versions.is_empty() {
                self.remote.remove(&old.group);
            }
        }
        if deleted {
            return;
        }
        let api_service = Arc::new(ApiService::new(object));
        if api_service.remote.is_some() {
            let versions = self.remote.entry(api_service.group.clone()).or_default();
            versions.insert(api_service.version.clone(), api_service.clone());
        }
        self.by_name.insert(api_service.name.clone(), api_service);
    }
}

impl ApiService {
    fn new(object: &Object) -> ApiService {
        let value = object.value();
        let spec = value.at("spec");
        let service = spec.at("service");
        let conditions = value.at("status").items("conditions").iter();
        let available =
            |condition: &Value| condition.text("type") == "Available" && condition.text("status") == "True";
        let remote = service.is_object().then(|| ServiceBackend {
            namespace: service.text("namespace").to_owned(),
            service: service.text("name").to_owned(),
            port: service.int("port").and_then(|port| u16::try_from(port).ok()).unwrap_or(443),
            available: conditions.clone().any(available),
            insecure_skip_tls_verify: spec.flag("insecureSkipTLSVerify"),
            ca_bundle: spec.text("caBundle").to_owned(),
            tls: OnceLock::new(),
        });
        ApiService {
            name: object.name().to_owned(),
            group: spec.text("group").to_owned(),
            version: spec.text("version").to_owned(),
            group_priority: spec.int("groupPriorityMinimum").unwrap_or(0),
            version_priority: spec.int("versionPriority").unwrap_or(0),
            managed: object.label(registration::AUTO_MANAGED_LABEL).unwrap_or("").to_owned(),
            remote,
        }
    }

    /// The API path of the group and version.
    pub fn path(&self) -> String {
        match self.group.as_str() {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        }
    }
}

impl ServiceBackend {
    /// The name that the server certificate must have.
    pub fn server_name(&self) -> String {
        format!("{}.{}.svc", self.service, self.namespace)
    }

    fn tls(
        &self,
        client_certificate: Option<&Arc<pki::ClientCertificate>>,
    ) -> Result<Arc<ClientConfig>, String> {
        let tls_config = self.tls.get_or_init(|| {
            let roots = match (self.insecure_skip_tls_verify, self.ca_bundle.as_str()) {
                (true, _) => None,
                (false, bundle) => {
                    let pem = STANDARD.decode(bundle).ok().and_then(|pem| String::from_utf8(pem).ok());
                    let pem = pem.ok_or("unable to load root certificates")?;
                    let pem = Some(pem.as_str()).filter(|pem| !pem.is_empty());
                    let roots = crate::https::root_certificates(&self.server_name(), pem);
                    Some(roots.map_err(|error| error.to_string())?)
                }
            };
            pki::client_tls_config(roots, client_certificate.cloned()).map_err(|error| error.to_string())
        });
        tls_config.clone()
    }
}

impl Aggregator {
    pub fn new(cache: &Cache) -> Aggregator {
        let row = api::resource_table::find_resource("apiregistration.k8s.io", "v1", "apiservices");
        let row = row.expect("APIServices are in the table");
        let shard = cache.shard(&crate::registry::prefix(row));
        Aggregator {
            services: IncrementalView::new([shard.clone()]),
            shard,
            discovery_cache: RwLock::default(),
            client_certificate: None,
        }
    }

    /// The APIService of a remote server for the path, if any.
    pub fn find_remote(&self, path: &str) -> Option<Arc<ApiService>> {
        let rest = path.strip_prefix("/apis/")?;
        let services = self.services.current();
        if services.remote.is_empty() {
            return None;
        }
        let mut parts = rest.split('/').filter(|part| !part.is_empty());
        let (group, version) = (parts.next()?, parts.next()?);
        services.remote.get(group)?.get(version).cloned()
    }

    fn all(&self) -> Vec<Arc<ApiService>> {
        self.services.current().by_name.values().cloned().collect()
    }

    /// The APIServices with a remote server.
    fn remote_services(&self) -> Vec<Arc<ApiService>> {
        let services = self.services.current();
        let mut all: Vec<Arc<ApiService>> =
            services.remote.values().flat_map(HashMap::values).cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

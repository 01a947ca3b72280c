//! Other API servers behind this one: an APIService says who answers for a group and version.
//!
//! Requests for a group and version that a Service answers are handed on with the user's name in headers
//! (`proxy`), what those servers offer is listed with what we do (`offer`), and whether they are there is
//! looked at when anything about them changes and every half minute (`available`). What this server answers
//! itself has APIServices too, which it makes and removes (`register`).

mod available;
mod offer;
mod proxy;
mod register;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use api::json::Json as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::RwLock;
use rustls::ClientConfig;
use serde_json::Value;

use crate::cache::{Cache, Followed, Shard, View};
use crate::object::Object;
use offer::Offer;

pub use available::keep as keep_available;
pub use proxy::answer;
pub use register::keep as keep_registered;

/// All APIServices, and what is known of the servers behind them.
pub struct Aggregator {
    services: Followed<Services, 1>,
    shard: Arc<Shard>,
    /// What servers offer, by the name of the APIService, as of the last look.
    offers: RwLock<HashMap<String, Arc<Offer>>>,
    /// Who we are to them.
    pub showing: Option<Arc<pki::Showing>>,
}

/// One APIService.
pub struct Entry {
    pub name: String,
    pub group: String,
    pub version: String,
    pub group_priority: i64,
    pub version_priority: i64,
    /// The label that says who looks after it.
    pub managed: String,
    /// `None`: this server answers.
    pub remote: Option<Remote>,
}

/// The server behind an APIService.
pub struct Remote {
    pub namespace: String,
    pub service: String,
    pub port: u16,
    pub available: bool,
    unverified: bool,
    bundle: String,
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
}

#[derive(Default)]
struct Services {
    by_name: BTreeMap<String, Arc<Entry>>,
    /// Those with a server behind them, by group and version.
    remote: HashMap<String, HashMap<String, Arc<Entry>>>,
}

impl View for Services {
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
        let entry = Arc::new(Entry::new(object));
        if entry.remote.is_some() {
            let versions = self.remote.entry(entry.group.clone()).or_default();
            versions.insert(entry.version.clone(), entry.clone());
        }
        self.by_name.insert(entry.name.clone(), entry);
    }
}

impl Entry {
    fn new(object: &Object) -> Entry {
        let value = object.value();
        let spec = value.at("spec");
        let service = spec.at("service");
        let conditions = value.at("status").items("conditions").iter();
        let available =
            |condition: &Value| condition.text("type") == "Available" && condition.text("status") == "True";
        let remote = service.is_object().then(|| Remote {
            namespace: service.text("namespace").to_owned(),
            service: service.text("name").to_owned(),
            port: service.int("port").and_then(|port| u16::try_from(port).ok()).unwrap_or(443),
            available: conditions.clone().any(available),
            unverified: spec.flag("insecureSkipTLSVerify"),
            bundle: spec.text("caBundle").to_owned(),
            tls: OnceLock::new(),
        });
        Entry {
            name: object.name().to_owned(),
            group: spec.text("group").to_owned(),
            version: spec.text("version").to_owned(),
            group_priority: spec.int("groupPriorityMinimum").unwrap_or(0),
            version_priority: spec.int("versionPriority").unwrap_or(0),
            managed: object.label(register::MANAGED).unwrap_or("").to_owned(),
            remote,
        }
    }

    /// Where its group and version are found.
    pub fn path(&self) -> String {
        match self.group.as_str() {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        }
    }
}

impl Remote {
    /// The name its certificate must have.
    pub fn server_name(&self) -> String {
        format!("{}.{}.svc", self.service, self.namespace)
    }

    fn tls(&self, showing: Option<&Arc<pki::Showing>>) -> Result<Arc<ClientConfig>, String> {
        let made = self.tls.get_or_init(|| {
            let roots = match (self.unverified, self.bundle.as_str()) {
                (true, _) => None,
                (false, bundle) => {
                    let pem = STANDARD.decode(bundle).ok().and_then(|pem| String::from_utf8(pem).ok());
                    let pem = pem.ok_or("unable to load root certificates")?;
                    let pem = Some(pem.as_str()).filter(|pem| !pem.is_empty());
                    let roots = crate::https::roots(&self.server_name(), pem);
                    Some(roots.map_err(|error| error.to_string())?)
                }
            };
            pki::dialing_config(roots, showing.cloned()).map_err(|error| error.to_string())
        });
        made.clone()
    }
}

impl Aggregator {
    pub fn new(cache: &Cache) -> Aggregator {
        let row = api::table::find("apiregistration.k8s.io", "v1", "apiservices");
        let row = row.expect("APIServices are in the table");
        let shard = cache.shard(&crate::registry::prefix(row));
        Aggregator {
            services: Followed::new([shard.clone()]),
            shard,
            offers: RwLock::default(),
            showing: None,
        }
    }

    /// Whoever else answers for a path.
    pub fn serves(&self, path: &str) -> Option<Arc<Entry>> {
        let rest = path.strip_prefix("/apis/")?;
        let services = self.services.look();
        if services.remote.is_empty() {
            return None;
        }
        let mut parts = rest.split('/').filter(|part| !part.is_empty());
        let (group, version) = (parts.next()?, parts.next()?);
        services.remote.get(group)?.get(version).cloned()
    }

    /// Every APIService.
    fn all(&self) -> Vec<Arc<Entry>> {
        self.services.look().by_name.values().cloned().collect()
    }

    /// Those with a server behind them.
    fn remotes(&self) -> Vec<Arc<Entry>> {
        let services = self.services.look();
        let mut all: Vec<Arc<Entry>> = services.remote.values().flat_map(HashMap::values).cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

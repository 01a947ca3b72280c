//! Builds the route table and the list of certificates from the Ingresses in the cluster.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use k8s_openapi::api::networking::v1::{Ingress, IngressBackend, IngressClass, ServiceBackendPort};
use reconcile::{Key, Object as _};

use crate::table::{Backend, BackendProtocol, PathType, RouteTable, Rule};
use crate::{CONTROLLER, DEFAULT_CLASS_ANNOTATION};

/// The annotation that selected the class before the IngressClass resource existed.
const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";

/// The annotation of an Ingress that redirects HTTP to HTTPS: `"true"`.
const SSL_REDIRECT_ANNOTATION: &str = "skiff.dev/ssl-redirect";
/// The `appProtocol` values of Service ports whose pods expect something other than plain HTTP/1.1.
/// The values without prefix, except for `https`, are conventions of other Ingress controllers.
const APP_PROTOCOLS: [(&str, BackendProtocol); 7] = [
    ("https", BackendProtocol { tls: true, http2: false }),
    ("kubernetes.io/wss", BackendProtocol { tls: true, http2: false }),
    ("kubernetes.io/h2c", BackendProtocol { tls: false, http2: true }),
    ("h2c", BackendProtocol { tls: false, http2: true }),
    ("http2", BackendProtocol { tls: false, http2: true }),
    ("grpc", BackendProtocol { tls: false, http2: true }),
    ("grpcs", BackendProtocol { tls: true, http2: true }),
];

/// Read access to the cluster.
pub trait View {
    fn ingresses(&self) -> Vec<Arc<Ingress>>;
    fn classes(&self) -> Vec<Arc<IngressClass>>;
    fn service(&self, key: &Key) -> Option<Arc<Service>>;
    fn slices(&self, service: &Key) -> Vec<Arc<EndpointSlice>>;
    /// A Secret of type `kubernetes.io/tls`.
    fn secret(&self, key: &Key) -> Option<Arc<Secret>>;
}

/// The state to serve.
#[derive(Default)]
pub struct Plan {
    pub table: RouteTable,
    /// Host names, including `*.domain`, with the Secrets of their certificates. Older Ingresses
    /// first.
    pub certificates: Vec<(String, Arc<Secret>)>,
    /// The Ingresses that are served.
    pub ingresses: Vec<Arc<Ingress>>,
    /// All objects that the plan refers to, including missing ones.
    pub services: BTreeSet<Key>,
    pub secrets: BTreeSet<Key>,
}

/// Builds the plan from the current state of the cluster.
pub fn build_plan(view: &dyn View) -> Plan {
    let mut plan = Plan { ingresses: served_ingresses(view), ..Plan::default() };
    let mut backends: HashMap<(Key, String, bool), Arc<Backend>> = HashMap::new();
    let (mut rules, mut defaults) = (Vec::new(), Vec::new());
    for ingress in plan.ingresses.clone() {
        let Some(spec) = &ingress.spec else { continue };
        let annotations = ingress.metadata.annotations.as_ref();
        let redirect =
            annotations.and_then(|all| all.get(SSL_REDIRECT_ANNOTATION)).is_some_and(|value| value == "true");
        let mut resolve = |backend: Option<&IngressBackend>| {
            let (key, port) = match backend.and_then(|backend| backend.service.as_ref()) {
                Some(service) => {
                    (Key::new(ingress.namespace(), &service.name), service.port.clone().unwrap_or_default())
                }
                // A resource backend. They are not supported, so it has no addresses.
                None => {
                    return Arc::new(Backend::new(
                        format!("resource backend of {}", ingress.key()),
                        Vec::new(),
                    ));
                }
            };
            plan.services.insert(key.clone());
            let name = port.name.clone().unwrap_or_else(|| port.number.unwrap_or_default().to_string());
            let build_backend = || {
                let found = view.service(&key).map(|service| resolve_service_port(view, &service, &port));
                let (addresses, protocol) = found.unwrap_or_default();
                let mut backend = Backend::new(format!("{key}:{name}"), addresses);
                (backend.protocol, backend.redirect) = (protocol, redirect);
                Arc::new(backend)
            };
            backends.entry((key.clone(), name.clone(), redirect)).or_insert_with(build_backend).clone()
        };
        let mut hosts = BTreeSet::new();
        for rule in spec.rules.iter().flatten() {
            let host = rule.host.clone().unwrap_or_default().to_ascii_lowercase();
            hosts.insert(host.clone());
            for path in rule.http.iter().flat_map(|http| &http.paths) {
                let exact = path.path_type == "Exact";
                rules.push(Rule {
                    host: host.clone(),
                    path: path.path.clone().filter(|path| !path.is_empty()).unwrap_or_else(|| "/".to_owned()),
                    path_type: if exact { PathType::Exact } else { PathType::Prefix },
                    backend: resolve(Some(&path.backend)),
                });
            }
        }
        if spec.default_backend.is_some() {
            let backend = resolve(spec.default_backend.as_ref());
            let target_hosts = if hosts.is_empty() { BTreeSet::from([String::new()]) } else { hosts.clone() };
            defaults.extend(target_hosts.into_iter().map(|host| (host, backend.clone())));
        }
        for tls in spec.tls.iter().flatten() {
            let Some(name) = tls.secret_name.as_deref().filter(|name| !name.is_empty()) else { continue };
            let key = Key::new(ingress.namespace(), name);
            plan.secrets.insert(key.clone());
            let Some(secret) = view.secret(&key) else { continue };
            let named: Vec<String> = match tls.hosts.as_ref().filter(|hosts| !hosts.is_empty()) {
                Some(named) => named.iter().map(|host| host.to_ascii_lowercase()).collect(),
                None => hosts.iter().cloned().collect(),
            };
            plan.certificates.extend(named.into_iter().map(|host| (host, secret.clone())));
        }
    }
    plan.table = RouteTable::new(rules, defaults);
    plan
}

/// The Ingresses of the served classes, oldest first.
fn served_ingresses(view: &dyn View) -> Vec<Arc<Ingress>> {
    let has_own_controller = |class: &IngressClass| {
        class.spec.as_ref().and_then(|spec| spec.controller.as_deref()) == Some(CONTROLLER)
    };
    let is_default = |class: &IngressClass| {
        let annotations = class.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(DEFAULT_CLASS_ANNOTATION)).is_some_and(|value| value == "true")
    };
    let classes = view.classes();
    let mut served: Vec<Arc<Ingress>> = view.ingresses();
    served.retain(|ingress| {
        let named = ingress.spec.as_ref().and_then(|spec| spec.ingress_class_name.as_deref());
        let annotated = ingress.metadata.annotations.as_ref().and_then(|all| all.get(CLASS_ANNOTATION));
        if ingress.metadata.deletion_timestamp.is_some() {
            return false;
        }
        match named.or(annotated.map(String::as_str)) {
            Some(name) => classes.iter().any(|class| class.name() == name && has_own_controller(class)),
            None => classes.iter().any(|class| is_default(class) && has_own_controller(class)),
        }
    });
    served.sort_by_key(|ingress| {
        (ingress.metadata.creation_timestamp.as_ref().map(|time| time.0), ingress.key())
    });
    served
}

/// The addresses behind a Service port and their protocol: ready endpoints, or serving ones if none
/// is ready.
fn resolve_service_port(
    view: &dyn View,
    service: &Service,
    backend_port: &ServiceBackendPort,
) -> (Vec<SocketAddr>, BackendProtocol) {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
    let port = ports.iter().find(|port| match &backend_port.name {
        Some(name) => port.name.as_deref() == Some(name),
        None => Some(port.port) == backend_port.number,
    });
    let Some(port) = port else { return Default::default() };
    let app_protocol = port.app_protocol.as_deref().unwrap_or_default();
    let known = APP_PROTOCOLS.iter().find(|(name, _)| app_protocol.eq_ignore_ascii_case(name));
    let protocol = known.map(|(_, protocol)| *protocol).unwrap_or_default();
    let (mut ready, mut serving) = (BTreeSet::new(), BTreeSet::new());
    for slice in view.slices(&service.key()) {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        let found = slice.ports.iter().flatten().find(|one| name(&one.name) == name(&port.name));
        let Some(number) = found.and_then(|one| u16::try_from(one.port?).ok()) else { continue };
        for endpoint in slice.endpoints.iter().flatten() {
            let parsed = endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok());
            let all = parsed.map(|ip| SocketAddr::new(ip, number));
            match endpoint_state(endpoint) {
                (true, _) => ready.extend(all),
                (false, true) => serving.extend(all),
                _ => {}
            }
        }
    }
    ((if ready.is_empty() { serving } else { ready }).into_iter().collect(), protocol)
}

/// Whether an endpoint is ready, and whether it is serving.
fn endpoint_state(endpoint: &Endpoint) -> (bool, bool) {
    let Some(conditions) = &endpoint.conditions else { return (true, true) };
    let ready = conditions.ready.unwrap_or(true);
    (ready, conditions.serving.unwrap_or(ready))
}

#[cfg(test)]
mod tests;

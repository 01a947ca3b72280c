//! Builds the environment of a container from the pod spec, the objects it refers to, and Services.
//! Does no I/O: objects come from [`Sources`].

mod file;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    ConfigMap, Container, EnvVarSource, FileKeySelector, ObjectFieldSelector, Pod, ResourceFieldSelector,
    Secret, Service,
};
use reconcile::Object as _;
use schema::quantity::Quantity;

use crate::volumes::sub_path;

/// Access to objects that environment variables refer to.
pub trait Sources {
    fn config_map(&self, namespace: &str, name: &str) -> Option<Arc<ConfigMap>>;
    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>>;
    /// The Services of a namespace, and `default/kubernetes`.
    fn services(&self, namespace: &str) -> Vec<Arc<Service>>;
    /// The node's allocatable amount of a resource: the value of a limit that the container does
    /// not set.
    fn allocatable(&self, resource: &str) -> Option<Quantity>;
}

/// Why the environment cannot be built, in upstream's words.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct EnvError(pub String);

/// Maps a volume name of the pod to its host path.
pub type Volumes<'a> = dyn Fn(&str) -> Option<&'a Path> + 'a;

/// The addresses that are known only when the pod starts.
pub struct Addresses<'a> {
    pub host_ips: &'a [String],
    pub pod_ips: &'a [String],
}

/// The environment variables of a container in order. Later values replace earlier ones.
pub fn environment(
    pod: &Pod,
    container: &Container,
    sources: &dyn Sources,
    addresses: &Addresses<'_>,
    volumes: &Volumes<'_>,
) -> Result<Vec<(String, String)>, EnvError> {
    let mut result: Vec<(String, String)> = Vec::new();
    let mut services = BTreeMap::new();
    for service in sources.services(pod.namespace()) {
        let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links).unwrap_or(true);
        let master = service.namespace() == "default" && service.name() == "kubernetes";
        if master || links && service.namespace() == pod.namespace() {
            services.extend(service_variables(&service));
        }
    }
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        let mut put = |name: &str, value: String| set_variable(&mut result, format!("{prefix}{name}"), value);
        if let Some(reference) = &source.config_map_ref {
            let name = reference.name.as_str();
            match sources.config_map(pod.namespace(), name) {
                Some(map) => map.data.iter().flatten().for_each(|(key, value)| put(key, value.clone())),
                None if reference.optional == Some(true) => {}
                None => return Err(EnvError(format!("configmap {name:?} not found"))),
            }
        }
        if let Some(reference) = &source.secret_ref {
            let name = reference.name.as_str();
            match sources.secret(pod.namespace(), name) {
                Some(secret) => {
                    for (key, value) in secret.data.iter().flatten() {
                        put(key, String::from_utf8_lossy(&value.0).into_owned());
                    }
                }
                None if reference.optional == Some(true) => {}
                None => return Err(EnvError(format!("secret {name:?} not found"))),
            }
        }
    }
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (Some(text), _) if !text.is_empty() => {
                let known = |name: &str| {
                    let own =
                        result.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.clone());
                    own.or_else(|| services.get(name).cloned())
                };
                Some(expand(text, &known))
            }
            (_, Some(EnvVarSource { file_key_ref: Some(reference), .. })) => {
                value_from_file(reference, volumes)?
            }
            (_, Some(from)) => value_from(pod, container, from, sources, addresses)?,
            _ => Some(String::new()),
        };
        if let Some(value) = value {
            set_variable(&mut result, variable.name.clone(), value);
        }
    }
    // Variables of the pod override the generated Service variables.
    let own: Vec<String> = result.iter().map(|(name, _)| name.clone()).collect();
    let service_env = services.into_iter().filter(|(name, _)| !own.contains(name));
    Ok(result.into_iter().chain(service_env).collect())
}

fn set_variable(list: &mut Vec<(String, String)>, name: String, value: String) {
    list.retain(|(known, _)| *known != name);
    list.push((name, value));
}

fn value_from(
    pod: &Pod,
    container: &Container,
    from: &EnvVarSource,
    sources: &dyn Sources,
    addresses: &Addresses<'_>,
) -> Result<Option<String>, EnvError> {
    let namespace = pod.namespace();
    if let Some(field) = &from.field_ref {
        return field_value(pod, field, addresses).map(Some);
    }
    if let Some(resource) = &from.resource_field_ref {
        return resource_value(pod, container, resource, sources).map(Some);
    }
    if let Some(reference) = &from.config_map_key_ref {
        let (name, key) = (reference.name.as_str(), &reference.key);
        let optional = reference.optional == Some(true);
        return match sources.config_map(namespace, name) {
            None if optional => Ok(None),
            None => Err(EnvError(format!("configmap {name:?} not found"))),
            Some(map) => match map.data.as_ref().and_then(|data| data.get(key)) {
                Some(value) => Ok(Some(value.clone())),
                None if optional => Ok(None),
                None => Err(EnvError(format!("couldn't find key {key} in ConfigMap {namespace}/{name}"))),
            },
        };
    }
    if let Some(reference) = &from.secret_key_ref {
        let (name, key) = (reference.name.as_str(), &reference.key);
        let optional = reference.optional == Some(true);
        return match sources.secret(namespace, name) {
            None if optional => Ok(None),
            None => Err(EnvError(format!("secret {name:?} not found"))),
            Some(secret) => match secret.data.as_ref().and_then(|data| data.get(key)) {
                Some(value) => Ok(Some(String::from_utf8_lossy(&value.0).into_owned())),
                None if optional => Ok(None),
                None => Err(EnvError(format!("couldn't find key {key} in Secret {namespace}/{name}"))),
            },
        };
    }
    Ok(None)
}

/// The value of a variable in a file that an earlier container has written to a volume.
fn value_from_file(reference: &FileKeySelector, volumes: &Volumes<'_>) -> Result<Option<String>, EnvError> {
    let FileKeySelector { key, path, volume_name, optional } = reference;
    let volume_dir = volumes(volume_name).ok_or_else(|| {
        EnvError(format!("cannot find the volume {volume_name:?} referenced by FileKeyRef"))
    })?;
    let source_file = sub_path::open_file(volume_dir, path).map_err(|error| error.to_string());
    let found = source_file
        .and_then(|source_file| file::find_variable(&mut std::io::BufReader::new(source_file), key));
    let found = found.map_err(|why| {
        tracing::warn!(path, %why, "failed to read variables from an environment file");
        EnvError("couldn't parse env file".to_owned())
    })?;
    match found.filter(|value| !value.is_empty()) {
        None if *optional != Some(true) => {
            let at = volume_dir.join(path.trim_start_matches('/'));
            Err(EnvError(format!("environment variable key {key:?} not found in file {at:?}")))
        }
        found => Ok(found),
    }
}

/// The value of a pod field (downward API).
pub fn field_value(
    pod: &Pod,
    field: &ObjectFieldSelector,
    addresses: &Addresses<'_>,
) -> Result<String, EnvError> {
    let path = field.field_path.as_str();
    let spec = pod.spec.as_ref();
    let listed = |map: &Option<BTreeMap<String, String>>| {
        let lines = map.iter().flatten().map(|(name, value)| format!("{name}={value:?}"));
        lines.collect::<Vec<_>>().join("\n")
    };
    if let Some((map, name)) = path.strip_suffix("']").and_then(|rest| rest.split_once("['")) {
        let found = match map {
            "metadata.labels" => pod.label(name),
            "metadata.annotations" => pod.annotation(name),
            _ => return Err(EnvError(format!("unsupported fieldPath: {path}"))),
        };
        return Ok(found.unwrap_or_default().to_owned());
    }
    Ok(match path {
        "metadata.name" => pod.name().to_owned(),
        "metadata.namespace" => pod.namespace().to_owned(),
        "metadata.uid" => pod.uid().to_owned(),
        "metadata.labels" => listed(&pod.metadata.labels),
        "metadata.annotations" => listed(&pod.metadata.annotations),
        "spec.nodeName" => spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        "spec.serviceAccountName" => {
            spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default()
        }
        "status.hostIP" => addresses.host_ips.first().cloned().unwrap_or_default(),
        "status.hostIPs" => addresses.host_ips.join(","),
        "status.podIP" => addresses.pod_ips.first().cloned().unwrap_or_default(),
        "status.podIPs" => addresses.pod_ips.join(","),
        _ => return Err(EnvError(format!("unsupported fieldPath: {path}"))),
    })
}

/// The request or limit of a container in units of the divisor, rounded up.
pub fn resource_value(
    pod: &Pod,
    container: &Container,
    selector: &ResourceFieldSelector,
    sources: &dyn Sources,
) -> Result<String, EnvError> {
    let name = selector.container_name.as_deref().unwrap_or(&container.name);
    let spec = pod.spec.as_ref();
    let all = spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let found = all.into_iter().find(|container| container.name == name);
    let container = found.ok_or_else(|| EnvError(format!("container {name} not found")))?;
    let (kind, resource) = selector
        .resource
        .split_once('.')
        .ok_or_else(|| EnvError(format!("unsupported container resource : {}", selector.resource)))?;
    let resources = container.resources.as_ref();
    let values = match kind {
        "limits" => resources.and_then(|resources| resources.limits.as_ref()),
        _ => resources.and_then(|resources| resources.requests.as_ref()),
    };
    let specified =
        values.and_then(|values| values.get(resource)).and_then(|amount| Quantity::parse(&amount.0).ok());
    // A missing limit defaults to the node's allocatable amount, a missing request to zero.
    let amount = specified.or_else(|| (kind == "limits").then(|| sources.allocatable(resource)).flatten());
    let divisor = selector.divisor.as_ref().and_then(|divisor| Quantity::parse(&divisor.0).ok());
    let divisor = divisor.filter(|divisor| divisor.is_positive());
    let (amount, divisor) = match (amount, divisor) {
        (None, _) => return Ok("0".to_owned()),
        (Some(amount), Some(divisor)) => (i128::from(amount.milli()), i128::from(divisor.milli())),
        (Some(amount), None) => (i128::from(amount.milli()), 1000),
    };
    Ok(((amount + divisor - 1) / divisor.max(1)).to_string())
}

/// Expands `$(NAME)`. `$$` becomes a dollar sign, and references to unknown variables stay
/// unchanged.
pub fn expand(text: &str, known: &dyn Fn(&str) -> Option<String>) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        result += &rest[..at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            result.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
            match known(name) {
                Some(value) => result += &value,
                None => result += &format!("$({name})"),
            }
            rest = after;
        } else {
            result.push('$');
        }
    }
    result + rest
}

/// The environment variables for a Service, including docker links.
fn service_variables(service: &Service) -> Vec<(String, String)> {
    let Some(spec) = &service.spec else { return Vec::new() };
    let ip = spec.cluster_ip.as_deref().unwrap_or_default();
    if ip.is_empty() || ip == "None" {
        return Vec::new();
    }
    let name = service.name().to_uppercase().replace('-', "_");
    let ports = spec.ports.clone().unwrap_or_default();
    let Some(first) = ports.first() else { return Vec::new() };
    let host = if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() };
    let protocol = |port: &k8s_openapi::api::core::v1::ServicePort| {
        port.protocol.clone().unwrap_or("TCP".into()).to_lowercase()
    };
    let url =
        |port: &k8s_openapi::api::core::v1::ServicePort| format!("{}://{host}:{}", protocol(port), port.port);
    let mut list = vec![
        (format!("{name}_SERVICE_HOST"), ip.to_owned()),
        (format!("{name}_SERVICE_PORT"), first.port.to_string()),
    ];
    for port in &ports {
        if let Some(port_name) = port.name.as_deref().filter(|port_name| !port_name.is_empty()) {
            let port_name = port_name.to_uppercase().replace('-', "_");
            list.push((format!("{name}_SERVICE_PORT_{port_name}"), port.port.to_string()));
        }
    }
    list.push((format!("{name}_PORT"), url(first)));
    for port in &ports {
        let prefix = format!("{name}_PORT_{}_{}", port.port, protocol(port).to_uppercase());
        list.push((prefix.clone(), url(port)));
        list.push((format!("{prefix}_PROTO"), protocol(port)));
        list.push((format!("{prefix}_PORT"), port.port.to_string()));
        list.push((format!("{prefix}_ADDR"), ip.to_owned()));
    }
    list
}

#[cfg(test)]
mod tests;

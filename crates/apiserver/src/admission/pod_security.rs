//! PodSecurity: enforces the Pod Security Standards that the labels of the namespace select.
//!
//! Pods are rejected. Workloads with a pod template only get a warning, because their pods are
//! checked anyway. Audit annotations go to the request's `WarningRecorder`.

mod checks;
mod policy;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use api::field::quote;
use api::json::JsonExt as _;
use api::{ErrorList, Path, Status};
use serde::Deserialize;
use serde_json::Value;

use super::{Cluster, Operation, Request};
use checks::{Pod, Violation, run_checks};
use policy::{Level, LevelVersion, MODES, PREFIX, Policy, Version};

/// As upstream: limits for checking the existing pods of a namespace whose policy changes.
const NAMESPACE_MAX_PODS_TO_CHECK: usize = 3000;
const NAMESPACE_POD_CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// The plugin's configuration: default policy and exemptions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    defaults: Policy,
    exempt: Exemptions,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Exemptions {
    usernames: Vec<String>,
    namespaces: Vec<String>,
    runtime_classes: Vec<String>,
}

/// `PodSecurityConfiguration` as in the file.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct File {
    api_version: String,
    kind: String,
    defaults: BTreeMap<String, String>,
    exemptions: Exemptions,
}

/// Group, resource and path of the pod template of each workload kind.
const POD_TEMPLATE_PATHS: &[(&str, &str, &str)] = &[
    ("", "podtemplates", "template"),
    ("", "replicationcontrollers", "spec.template"),
    ("apps", "daemonsets", "spec.template"),
    ("apps", "deployments", "spec.template"),
    ("apps", "replicasets", "spec.template"),
    ("apps", "statefulsets", "spec.template"),
    ("batch", "cronjobs", "spec.jobTemplate.spec.template"),
    ("batch", "jobs", "spec.template"),
];

/// Subresources of pods that do not change anything the checks look at.
const IGNORED_POD_SUBRESOURCES: &[&str] =
    &["exec", "attach", "binding", "eviction", "log", "portforward", "proxy", "status"];

pub fn validate(request: &Request<'_>, object: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if request.operation == Operation::Delete {
        return Ok(());
    }
    match (request.row.group, request.row.plural) {
        ("", "namespaces") if request.subresource.is_empty() => validate_namespace(request, object, cluster),
        ("", "pods") if !IGNORED_POD_SUBRESOURCES.contains(&request.subresource) => {
            validate_pod(request, object, cluster)
        }
        (group, plural) if request.subresource.is_empty() => {
            if let Some((.., path)) = POD_TEMPLATE_PATHS.iter().find(|row| (row.0, row.1) == (group, plural))
            {
                validate_pod_template(request, object.path(path), cluster);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn validate_pod(request: &Request<'_>, pod: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let settings = &cluster.settings().pod_security;
    if settings.is_exempt(request) {
        return Ok(());
    }
    let mut errors = ErrorList::default();
    let Some(policy) = settings.policy_of(request.namespace, cluster, &mut errors) else {
        return Err(Status::internal(format!("failed to lookup namespace {}", quote(request.namespace))));
    };
    if errors.is_empty() && policy.is_privileged() {
        request.annotate(format!("{PREFIX}enforce-policy"), "privileged:latest");
        return Ok(());
    }
    if request.old.is_some_and(|old| !needs_evaluation(pod, old)) {
        return Ok(());
    }
    let pod = Pod { metadata: pod.at("metadata"), spec: pod.at("spec") };
    evaluate_pod(request, settings, (policy, &errors), &pod, true)
}

/// Workloads are never rejected, only warned about and audited.
fn validate_pod_template(request: &Request<'_>, template: &Value, cluster: &dyn Cluster) {
    let settings = &cluster.settings().pod_security;
    if template.is_null() || settings.is_exempt(request) {
        return;
    }
    let mut errors = ErrorList::default();
    let Some(policy) = settings.policy_of(request.namespace, cluster, &mut errors) else { return };
    let is_privileged = policy.warn.level == Level::Privileged && policy.audit.level == Level::Privileged;
    if errors.is_empty() && is_privileged {
        return;
    }
    let pod = Pod { metadata: template.at("metadata"), spec: template.at("spec") };
    // Only the enforce mode returns an error.
    let _ = evaluate_pod(request, settings, (policy, &errors), &pod, false);
}

fn evaluate_pod(
    request: &Request<'_>,
    settings: &Settings,
    (policy, errors): (Policy, &ErrorList),
    pod: &Pod<'_>,
    enforce: bool,
) -> Result<(), Status> {
    let class = pod.spec.text("runtimeClassName");
    if settings.exempt.runtime_classes.iter().any(|exempt| exempt == class) {
        request.annotate(format!("{PREFIX}exempt"), "runtimeClass");
        return Ok(());
    }
    if !errors.is_empty() {
        request.annotate(format!("{PREFIX}error"), format!("Failed to parse policy: {errors}"));
    }
    let detail = |mode: LevelVersion, verb: &str| {
        let found = run_checks(mode, pod);
        let level = quote(&mode.to_string());
        (!found.is_empty()).then(|| format!("{verb} PodSecurity {level}: {}", details(&found)))
    };
    let mut enforce_violation = None;
    if enforce {
        request.annotate(format!("{PREFIX}enforce-policy"), policy.enforce.to_string());
        enforce_violation = detail(policy.enforce, "violates");
    }
    if let Some(text) = detail(policy.audit, "would violate") {
        request.annotate(format!("{PREFIX}audit-violations"), text);
    }
    if let Some(reason) = enforce_violation {
        return Err(request.forbidden(reason));
    }
    if let Some(text) = detail(policy.warn, "would violate") {
        request.warn(text);
    }
    Ok(())
}

fn details(found: &[Violation]) -> String {
    let one = |violation: &Violation| format!("{} ({})", violation.reason, violation.detail);
    found.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Of the mutable fields of a pod only images and new ephemeral containers matter.
fn needs_evaluation(pod: &Value, old: &Value) -> bool {
    let (spec, old) = (pod.at("spec"), old.at("spec"));
    let image = |container: &Value| container.text("image").to_owned();
    let same = |list: &str| spec.items(list).iter().map(image).eq(old.items(list).iter().map(image));
    let known = |container: &Value| {
        let mut before = old.items("ephemeralContainers").iter();
        let before = before.find(|other| other.text("name") == container.text("name"));
        before.is_some_and(|before| before.text("image") == container.text("image"))
    };
    !same("containers") || !same("initContainers") || !spec.items("ephemeralContainers").iter().all(known)
}

/// Validates the labels of a namespace. Enforcing a stricter level warns about existing pods that
/// violate it.
fn validate_namespace(request: &Request<'_>, namespace: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let settings = &cluster.settings().pod_security;
    let read = |namespace: &Value| {
        let labels = namespace.path("metadata.labels");
        let mut errors = ErrorList::default();
        let policy = settings.defaults.with_namespace_labels(|name| labels.at(name).as_str(), &mut errors);
        (policy, errors)
    };
    let (policy, errors) = read(namespace);
    let before = request.old.map(read);
    let known = before.as_ref().is_some_and(|(_, before)| before.to_string() == errors.to_string());
    if !errors.is_empty() && !known {
        return Err(Status::invalid("", "Namespace", &request.name, &errors));
    }
    let new = policy.enforce;
    if let Some((Policy { enforce: old, .. }, _)) = before
        && (new == old
            || new.level == Level::Privileged
            || new.version == old.version && new.level <= old.level)
    {
        return Ok(());
    }
    if settings.exempt.namespaces.contains(&request.name) {
        if !policy.is_privileged() && !policy.same_as(&settings.defaults) {
            request.warn(ignored_policy_warning(namespace, &policy));
        }
    } else if before.is_some() {
        let pods = cluster.list("", "pods", &request.name).into_iter().map(|pod| pod.value());
        for warning in settings.evaluate_pods_in_namespace(&request.name, new, pods.collect()) {
            request.warn(warning);
        }
    }
    Ok(())
}

/// The warning for labels that have no effect because the namespace is exempt.
fn ignored_policy_warning(namespace: &Value, policy: &Policy) -> String {
    let labels = namespace.path("metadata.labels");
    let has_label =
        |mode: &str| labels.has(&format!("{PREFIX}{mode}")) || labels.has(&format!("{PREFIX}{mode}-version"));
    let modes = MODES.iter().zip(policy.modes());
    let strict = modes.filter(|(name, mode)| mode.level != Level::Privileged && has_label(name));
    let strict: Vec<String> = strict.map(|(name, mode)| format!("{name}={mode}")).collect();
    format!(
        "namespace {} is exempt from Pod Security, and the policy ({}) will be ignored",
        quote(namespace.at("metadata").text("name")),
        strict.join(", ")
    )
}

impl Settings {
    /// Parses and validates a `PodSecurityConfiguration`.
    pub fn read(value: &Value) -> Result<Settings, String> {
        let file = File::deserialize(value).map_err(|error| error.to_string())?;
        let known =
            ["pod-security.admission.config.k8s.io/v1", "pod-security.admission.config.k8s.io/v1beta1"];
        if !known.contains(&file.api_version.as_str()) || file.kind != "PodSecurityConfiguration" {
            return Err(format!(
                "expected a PodSecurityConfiguration of {}, got {} of {}",
                known[0],
                quote(&file.kind),
                quote(&file.api_version)
            ));
        }
        let mut errors = ErrorList::default();
        let mut defaults = Policy::default();
        let modes = [&mut defaults.enforce, &mut defaults.audit, &mut defaults.warn];
        for (name, mode) in MODES.iter().zip(modes) {
            let path = |field: &str| Path::new("defaults").child(field);
            let version = format!("{name}-version");
            if let Some(text) = file.defaults.get(*name).filter(|text| !text.is_empty()) {
                match Level::parse(text) {
                    Ok(level) => mode.level = level,
                    Err(reason) => errors.invalid(&path(name), text.as_str(), reason),
                }
            }
            if let Some(text) = file.defaults.get(&version).filter(|text| !text.is_empty()) {
                match Version::parse(text) {
                    Ok(parsed) => mode.version = parsed,
                    Err(reason) => errors.invalid(&path(&version), text.as_str(), reason),
                }
            }
        }
        for field in file.defaults.keys() {
            if !MODES.contains(&field.strip_suffix("-version").unwrap_or(field)) {
                errors.forbidden(&Path::new("defaults").child(field), "unknown field");
            }
        }
        file.exemptions.check(&mut errors);
        if errors.is_empty() {
            Ok(Settings { defaults, exempt: file.exemptions })
        } else {
            Err(errors.to_string())
        }
    }

    fn is_exempt(&self, request: &Request<'_>) -> bool {
        let user = request.user.map_or("", |user| user.name.as_str());
        let reason = if self.exempt.namespaces.iter().any(|name| name == request.namespace) {
            "namespace"
        } else if self.exempt.usernames.iter().any(|name| name == user) {
            "user"
        } else {
            return false;
        };
        request.annotate(format!("{PREFIX}exempt"), reason);
        true
    }

    /// `None` if the namespace does not exist.
    fn policy_of(&self, namespace: &str, cluster: &dyn Cluster, errors: &mut ErrorList) -> Option<Policy> {
        let namespace = cluster.get("", "namespaces", "", namespace)?;
        Some(self.defaults.with_namespace_labels(|name| namespace.label(name), errors))
    }

    /// Warnings for the existing pods of a namespace that violate a new enforce level.
    fn evaluate_pods_in_namespace(
        &self,
        namespace: &str,
        level: LevelVersion,
        pods: Vec<Value>,
    ) -> Vec<String> {
        let started = Instant::now();
        let pods = self.prioritize_pods(pods);
        // The set of violated checks -> first pod by name, number of pods.
        let mut pods_by_reasons: BTreeMap<String, (&str, usize)> = BTreeMap::new();
        let mut checked = 0;
        for pod in pods.iter().take(NAMESPACE_MAX_PODS_TO_CHECK) {
            if started.elapsed() > NAMESPACE_POD_CHECK_TIMEOUT {
                break;
            }
            checked += 1;
            let found = run_checks(level, &Pod { metadata: pod.at("metadata"), spec: pod.at("spec") });
            if found.is_empty() {
                continue;
            }
            let reasons = found.iter().map(|violation| violation.reason).collect::<Vec<_>>().join(", ");
            let name = pod.at("metadata").text("name");
            let entry = pods_by_reasons.entry(reasons).or_insert((name, 0));
            entry.0 = entry.0.min(name);
            entry.1 += 1;
        }
        let mut warnings = Vec::new();
        if checked < pods.len() {
            warnings.push(format!(
                "new PodSecurity enforce level only checked against the first {checked} of {} existing pods",
                pods.len()
            ));
        }
        if !pods_by_reasons.is_empty() {
            warnings.push(format!(
                "existing pods in namespace {} violate the new PodSecurity enforce level {}",
                quote(namespace),
                quote(&level.to_string())
            ));
        }
        let mut pod_warnings: Vec<String> = pods_by_reasons
            .into_iter()
            .map(|(reasons, (name, count))| match count {
                1 => format!("{name}: {reasons}"),
                2 => format!("{name} (and 1 other pod): {reasons}"),
                _ => format!("{name} (and {} other pods): {reasons}", count - 1),
            })
            .collect();
        pod_warnings.sort();
        warnings.extend(pod_warnings);
        warnings
    }

    /// One pod of each controller first, because its other pods most likely have the same
    /// violations.
    fn prioritize_pods(&self, mut pods: Vec<Value>) -> Vec<Value> {
        pods.retain(|pod| {
            let class = pod.at("spec").text("runtimeClassName");
            !self.exempt.runtime_classes.iter().any(|exempt| exempt == class)
        });
        let mut seen = HashSet::new();
        let is_duplicate = |pod: &Value| {
            let owners = pod.at("metadata").items("ownerReferences").iter();
            let controller = owners.into_iter().find(|owner| owner.flag("controller"));
            controller.is_some_and(|owner| !seen.insert(owner.text("uid").to_owned()))
        };
        let (others, mut first): (Vec<Value>, Vec<Value>) = pods.into_iter().partition(is_duplicate);
        first.extend(others);
        first
    }
}

impl Exemptions {
    fn check(&self, errors: &mut ErrorList) {
        let namespace = |name: &str| api::names::dns1123_label(name);
        let class = |name: &str| api::names::dns1123_subdomain(name);
        let user = |name: &str| match name {
            "" => vec!["username must not be empty".to_owned()],
            _ => Vec::new(),
        };
        check_exemptions("namespaces", &self.namespaces, namespace, errors);
        check_exemptions("runtimeClasses", &self.runtime_classes, class, errors);
        check_exemptions("usernames", &self.usernames, user, errors);
    }
}

fn check_exemptions(
    field: &str,
    names: &[String],
    rule: impl Fn(&str) -> Vec<String>,
    errors: &mut ErrorList,
) {
    for (i, name) in names.iter().enumerate() {
        let path = Path::new("exemptions").child(field).index(i);
        let wrong = rule(name);
        if !wrong.is_empty() {
            errors.invalid(&path, name.as_str(), &wrong.join(", "));
        } else if names[..i].contains(name) {
            errors.duplicate(&path, name.as_str());
        }
    }
}

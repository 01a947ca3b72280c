//! Validates requests, limits and claims of containers and pods.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::rules::{is_sidecar, validate_label, validate_name};
use crate::core::resources::{self as amounts, is_huge_page, is_native};
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;
use crate::names;
use crate::quantity::Quantity;

/// The quantities of a resource list.
pub(crate) fn list<'a>(resources: &'a Value, field: &str) -> BTreeMap<&'a str, Quantity> {
    let entries = resources.at(field).as_object();
    entries
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.as_str(), Quantity::from_value(value)?)))
        .collect()
}

pub(super) fn validate_container_resources(
    e: &mut ErrorList,
    resources: &Value,
    path: &Path,
    claims: &BTreeSet<&str>,
) {
    validate_requirements(e, resources, path, claims, amounts::validate_container_resource_name);
}

/// Validates the overhead with the rules of limits.
pub(super) fn validate_overhead(e: &mut ErrorList, spec: &Value, path: &Path) {
    let mut wrapped = serde_json::Map::new();
    wrapped.insert("limits".to_owned(), spec.at("overhead").clone());
    validate_container_resources(e, &Value::Object(wrapped), path, &BTreeSet::new());
}

/// Validates pod-level resources.
pub(super) fn validate_pod_resources(e: &mut ErrorList, spec: &Value, path: &Path, claims: &BTreeSet<&str>) {
    let resources = spec.at("resources");
    if resources.is_null() {
        return;
    }
    if spec.at("os").text("name") == "windows" {
        return e.forbidden(path, "may not be set for a windows pod");
    }
    if resources.has("claims") {
        e.forbidden(&path.child("claims"), "claims may not be set for Resources at pod-level");
    }
    validate_requirements(e, resources, path, claims, validate_pod_resource_name);
    validate_pod_level_resources(e, spec, path);
}

type NameValidator = fn(&str, &Path, &mut ErrorList);

fn validate_requirements(
    e: &mut ErrorList,
    resources: &Value,
    path: &Path,
    claims: &BTreeSet<&str>,
    name_rule: NameValidator,
) {
    let (limits, requests) = (list(resources, "limits"), list(resources, "requests"));
    let (limits_at, requests_at) = (path.child("limits"), path.child("requests"));
    let amount_rules = |e: &mut ErrorList, list: &str, name: &str, at: &Path| {
        name_rule(name, at, e);
        amounts::validate_quantity(name, resources.at(list).at(name), at, e);
    };
    let huge_rule = |e: &mut ErrorList, name: &str, value: &Quantity, at: &Path| {
        if is_huge_page(name) && !is_page_multiple(name, value) {
            let message = format!("{value} is not positive integer multiple of {name}");
            e.invalid(at, value.to_string(), &message);
        }
    };
    for (name, value) in &limits {
        let at = limits_at.key(name);
        amount_rules(e, "limits", name, &at);
        huge_rule(e, name, value, &at);
    }
    for (name, value) in &requests {
        let at = requests_at.key(name);
        amount_rules(e, "requests", name, &at);
        match limits.get(name) {
            Some(limit) if value != limit && !may_overcommit(name) => {
                let message = format!("must be equal to {name} limit of {limit}");
                e.invalid(&requests_at, value.to_string(), &message);
            }
            Some(limit) if value > limit => {
                let message = format!("must be less than or equal to {name} limit of {limit}");
                e.invalid(&requests_at, value.to_string(), &message);
            }
            None if !may_overcommit(name) => {
                e.required(&limits_at, "Limit must be set for non overcommitable resources");
            }
            _ => {}
        }
        huge_rule(e, name, value, &at);
    }
    let mut names = limits.keys().chain(requests.keys());
    if names.clone().any(|name| is_huge_page(name)) && !names.any(|name| ["cpu", "memory"].contains(name)) {
        e.forbidden(path, "HugePages require cpu or memory");
    }
    claim_names(e, resources.items("claims"), &path.child("claims"), claims);
}

fn claim_names(e: &mut ErrorList, used: &[Value], path: &Path, known: &BTreeSet<&str>) {
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for (i, claim) in used.iter().enumerate() {
        let (name, request) = (claim.text("name"), claim.text("request"));
        let at = path.index(i);
        if name.is_empty() {
            e.required(&at, "");
            continue;
        }
        if seen.contains(name) {
            e.duplicate(&at, name);
        } else {
            let mut key = name.to_owned();
            if !request.is_empty() {
                validate_label(e, &at.child("request"), request);
                key = format!("{name}/{request}");
            }
            if seen.contains(&key) {
                e.duplicate(&at, key.as_str());
            } else if request.is_empty() {
                let prefix = format!("{name}/");
                for _ in seen.range(prefix.clone()..).take_while(|key| key.starts_with(&prefix)) {
                    e.duplicate(&at, name);
                }
            }
            seen.insert(key);
        }
        if !known.contains(name) {
            let known: Vec<&str> = known.iter().copied().collect();
            let tail = if known.is_empty() {
                " which is empty".to_owned()
            } else {
                format!(": {}", known.join(", "))
            };
            let message =
                format!("Not found: \"{name}\": must be one of the names in pod.spec.resourceClaims{tail}");
            e.push(ErrorType::NotFound, &at, message);
        }
    }
}

/// Validates the resource claims of a pod.
pub(super) fn validate_pod_claims(e: &mut ErrorList, spec: &Value, meta: Option<&Value>, path: &Path) {
    let mirror =
        meta.is_some_and(|meta| super::rules::annotation(meta, super::rules::MIRROR_ANNOTATION).is_some());
    let mut seen = BTreeSet::new();
    for (i, claim) in spec.items("resourceClaims").iter().enumerate() {
        if mirror {
            e.forbidden(&Path::root(), "static pods do not support resource claims");
            continue;
        }
        let at = path.index(i);
        match claim.text("name") {
            "" => e.required(&at.child("name"), ""),
            name if !seen.insert(name) => e.duplicate(&at.child("name"), name),
            name => validate_label(e, &at.child("name"), name),
        }
        let rendered = || super::internal::format_compact("PodResourceClaim", claim);
        match (claim.has("resourceClaimName"), claim.has("resourceClaimTemplateName")) {
            (true, true) => super::rules::invalid_as(
                e,
                &at,
                &rendered(),
                "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified",
            ),
            (false, false) => super::rules::invalid_as(
                e,
                &at,
                &rendered(),
                "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`",
            ),
            _ => {}
        }
        for field in ["resourceClaimName", "resourceClaimTemplateName"] {
            if let Some(name) = claim.at(field).as_str() {
                validate_name(e, &at.child(field), name, names::dns1123_subdomain);
            }
        }
    }
}

/// Validates that the containers' total fits into the pod-level resources.
fn validate_pod_level_resources(e: &mut ErrorList, spec: &Value, path: &Path) {
    let resources = spec.at("resources");
    let (requests, limits) = (list(resources, "requests"), list(resources, "limits"));
    for (name, sum) in aggregate(spec, "requests") {
        if let Some(own) = requests.get(name)
            && sum > *own
        {
            let message = format!("must be greater than or equal to aggregate container requests of {sum}");
            e.invalid(&path.child("requests").key(name), own.to_string(), &message);
        }
    }
    for (name, sum) in aggregate(spec, "limits") {
        if let Some(own) = limits.get(name)
            && is_huge_page(name)
            && sum > *own
        {
            let message = format!("must be greater than or equal to aggregate container limits of {sum}");
            e.invalid(&path.child("limits").key(name), own.to_string(), &message);
        }
    }
    for (i, container) in spec.items("containers").iter().enumerate() {
        for (name, limit) in list(container.at("resources"), "limits") {
            if let Some(own) = limits.get(name)
                && limit > *own
            {
                let at = path.child("containers").index(i).key(name).child("limits");
                e.invalid(
                    &at,
                    limit.to_string(),
                    &format!("must be less than or equal to pod limits of {own}"),
                );
            }
        }
    }
}

/// The total of all containers: the sum of those that run together, or the need of an init container
/// with the sidecars started before it if that is larger.
pub(crate) fn aggregate<'a>(spec: &'a Value, field: &str) -> BTreeMap<&'a str, Quantity> {
    let mut total: BTreeMap<&str, Quantity> = BTreeMap::new();
    for container in spec.items("containers") {
        add(&mut total, &list(container.at("resources"), field));
    }
    let mut sidecars: BTreeMap<&str, Quantity> = BTreeMap::new();
    let mut highest: BTreeMap<&str, Quantity> = BTreeMap::new();
    for container in spec.items("initContainers") {
        let mut need = list(container.at("resources"), field);
        if is_sidecar(container) {
            add(&mut total, &need);
            add(&mut sidecars, &need);
        }
        // The maximum already includes resources that this container does not request.
        for (name, value) in &mut need {
            let running = sidecars.get(name).copied();
            *value = match running {
                Some(running) if is_sidecar(container) => running,
                Some(running) => *value + running,
                None => *value,
            };
        }
        max_into(&mut highest, need);
    }
    max_into(&mut total, highest);
    total
}

fn add<'a>(total: &mut BTreeMap<&'a str, Quantity>, more: &BTreeMap<&'a str, Quantity>) {
    for (name, value) in more {
        let sum = total.get(name).map_or(*value, |old| *old + *value);
        total.insert(name, sum);
    }
}

fn max_into<'a>(maximum: &mut BTreeMap<&'a str, Quantity>, values: BTreeMap<&'a str, Quantity>) {
    for (name, value) in values {
        if maximum.get(name).is_none_or(|mark| *mark < value) {
            maximum.insert(name, value);
        }
    }
}

fn validate_pod_resource_name(name: &str, path: &Path, e: &mut ErrorList) {
    let before = e.0.len();
    amounts::validate_resource_name(name, path, e);
    if e.0.len() == before && !["cpu", "memory"].contains(&name) && !is_huge_page(name) {
        e.not_supported(path, name, &["cpu", "hugepages-", "memory"]);
    }
}

fn is_page_multiple(name: &str, value: &Quantity) -> bool {
    let size: Option<Quantity> = name.strip_prefix("hugepages-").and_then(|size| Quantity::parse(size).ok());
    size.is_some_and(|size| size.is_positive() && size.is_whole() && value.value() % size.value() == 0)
}

fn may_overcommit(name: &str) -> bool {
    is_native(name) && !is_huge_page(name)
}

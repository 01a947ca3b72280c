//! Discovery of remote API servers, merged into ours: legacy and aggregated discovery, OpenAPI v2
//! and v3.

use std::collections::BTreeSet;
use std::sync::Arc;

use api::json::JsonExt as _;
use serde_json::{Map, Value, json};

use super::registration::group_priority;
use super::{Aggregator, ApiService, ServiceBackend, proxy};
use crate::server::Server;

/// The discovery documents of one APIService.
#[derive(Debug, Default)]
pub struct RemoteDiscovery {
    /// The resources in the form of aggregated discovery.
    resources: Vec<Value>,
    /// Paths of its OpenAPI v3 documents, as in the index.
    v3: Map<String, Value>,
    /// The relevant part of its OpenAPI v2 document.
    v2: Value,
}

impl RemoteDiscovery {
    /// Fetches everything beyond the resource list. Documents that cannot be fetched are left
    /// empty.
    pub async fn fetch(
        server: &Server,
        entry: &ApiService,
        remote: &ServiceBackend,
        address: &(String, u16),
        list: &[u8],
        before: Option<&RemoteDiscovery>,
    ) -> RemoteDiscovery {
        let list: Value = serde_json::from_slice(list).unwrap_or_default();
        let get = async |path: &str| match proxy::get(server, remote, address, path).await {
            Ok((200, body)) => serde_json::from_slice(&body).unwrap_or_default(),
            _ => Value::Null,
        };
        let index = get("/openapi/v3").await;
        let own = entry.path();
        let own = own.trim_start_matches('/');
        let group = format!("apis/{}", entry.group);
        let v3: Map<String, Value> = index
            .entries("paths")
            .filter(|(name, _)| *name == own || *name == group)
            .map(|(name, address)| (name.to_owned(), address.clone()))
            .collect();
        let resources = resources(&list, &entry.group, &entry.version);
        // OpenAPI v2 documents are large. Fetch again only if resources or the hashes of the v3
        // documents changed.
        let v2 = match before {
            Some(before) if before.v3 == v3 && before.resources == resources => before.v2.clone(),
            _ => filter_openapi_v2(&get("/openapi/v2").await, &entry.path()),
        };
        RemoteDiscovery { resources, v3, v2 }
    }
}

/// Converts an APIResourceList to the form of aggregated discovery.
fn resources(list: &Value, group: &str, version: &str) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::new();
    for item in list.items("resources") {
        let or = |field: &str, default: &str| match item.text(field) {
            "" => default.to_owned(),
            text => text.to_owned(),
        };
        let kind = json!({"group": or("group", group), "version": or("version", version), "kind": item.text("kind")});
        let scope = if item.flag("namespaced") { "Namespaced" } else { "Cluster" };
        let (name, subresource) = item.text("name").split_once('/').unwrap_or((item.text("name"), ""));
        let known = out.iter().position(|known| known.text("resource") == name);
        let at = known.unwrap_or_else(|| {
            out.push(json!({"resource": name, "scope": scope}));
            out.len() - 1
        });
        let verbs = item.at("verbs").clone();
        if subresource.is_empty() {
            out[at].set("responseKind", kind);
            out[at].set("singularResource", item.text("singularName"));
            out[at].set("verbs", verbs);
            for field in ["shortNames", "categories"] {
                if !item.items(field).is_empty() {
                    out[at].set(field, item.at(field).clone());
                }
            }
        } else {
            let sub = json!({"subresource": subresource, "responseKind": kind, "verbs": verbs});
            let mut subs = out[at].items("subresources").to_vec();
            subs.push(sub);
            out[at].set("subresources", subs);
        }
    }
    out
}

/// The paths below `prefix` of an OpenAPI v2 document, with the definitions they reference.
fn filter_openapi_v2(document: &Value, prefix: &str) -> Value {
    let below =
        |path: &str| path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let paths: Map<String, Value> = document
        .entries("paths")
        .filter(|(path, _)| below(path))
        .map(|(path, item)| (path.to_owned(), item.clone()))
        .collect();
    let mut definitions = Map::new();
    let mut pending = BTreeSet::new();
    paths.values().for_each(|item| collect_references(item, &mut pending));
    while let Some(name) = pending.pop_first() {
        if let Some(definition) = document.at("definitions").get(&name)
            && !definitions.contains_key(&name)
        {
            collect_references(definition, &mut pending);
            definitions.insert(name, definition.clone());
        }
    }
    json!({"paths": paths, "definitions": definitions})
}

fn collect_references(value: &Value, out: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            let name = fields.get("$ref").and_then(Value::as_str);
            out.extend(name.and_then(|name| name.strip_prefix("#/definitions/")).map(str::to_owned));
            fields.values().for_each(|value| collect_references(value, out));
        }
        Value::Array(items) => items.iter().for_each(|value| collect_references(value, out)),
        _ => {}
    }
}

impl Aggregator {
    /// Remote groups by priority, then name; each with its versions by priority.
    fn groups(&self) -> Vec<(i64, String, Vec<Arc<ApiService>>)> {
        let mut groups: Vec<(i64, String, Vec<Arc<ApiService>>)> = Vec::new();
        for entry in self.remote_services() {
            match groups.iter_mut().find(|(_, group, _)| *group == entry.group) {
                Some((priority, _, entries)) => {
                    *priority = entry.group_priority.max(*priority);
                    entries.push(entry);
                }
                None => groups.push((entry.group_priority, entry.group.clone(), vec![entry])),
            }
        }
        for (_, _, entries) in &mut groups {
            entries.sort_by(|a, b| {
                let versions = || api::names::compare_versions(&b.version, &a.version);
                b.version_priority.cmp(&a.version_priority).then_with(versions)
            });
        }
        groups.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        groups
    }

    /// Merges remote groups into local ones. `name` returns the name of a group; `merge` adds
    /// versions to a local group, or creates one from null.
    fn add_groups(
        &self,
        local: &mut Vec<Value>,
        name: impl Fn(&Value) -> &str,
        merge: impl Fn(Value, &str, &[Arc<ApiService>]) -> Value,
    ) {
        for (priority, group, entries) in self.groups() {
            if let Some(known) = local.iter_mut().find(|known| name(known) == group) {
                *known = merge(known.take(), &group, &entries);
                continue;
            }
            // The first group is apiregistration.k8s.io, which always stays first.
            let is_lower_priority = |known: &Value| {
                (group_priority(name(known)), std::cmp::Reverse(name(known)))
                    < (priority, std::cmp::Reverse(&group))
            };
            let at = local.iter().skip(1).position(is_lower_priority).map_or(local.len(), |at| at + 1);
            local.insert(at, merge(Value::Null, &group, &entries));
        }
    }

    /// Adds remote groups to the APIGroupList of `/apis`.
    pub fn add_to_groups(&self, local: &mut Vec<Value>) {
        self.add_groups(local, |group| group.text("name"), merge_group);
    }

    /// Adds remote versions to the APIGroup of `/apis/<group>`, which is `None` if it is not local.
    pub fn group(&self, name: &str, local: Option<Value>) -> Option<Value> {
        match self.groups().into_iter().find(|(_, group, _)| group == name) {
            Some((_, group, entries)) => Some(merge_group(local.unwrap_or_default(), &group, &entries)),
            None => local,
        }
    }

    /// Adds remote groups to aggregated discovery.
    pub fn add_to_aggregated(&self, local: &mut Vec<Value>) {
        let discovery_cache = self.discovery_cache.read();
        let merge = |group: Value, name: &str, entries: &[Arc<ApiService>]| {
            let mut versions = group.items("versions").to_vec();
            for entry in entries {
                versions.retain(|version| version.text("version") != entry.version);
                let available = entry.remote.as_ref().is_some_and(|remote| remote.available);
                let mut version = json!({"version": entry.version, "freshness": if available { "Current" } else { "Stale" }});
                if let Some(discovery) = discovery_cache.get(&entry.name) {
                    version.set("resources", discovery.resources.clone());
                }
                versions.push(version);
            }
            json!({"metadata": {"name": name}, "versions": versions})
        };
        self.add_groups(local, |group| group.at("metadata").text("name"), merge);
    }

    /// Adds remote documents to the OpenAPI v3 index.
    pub fn add_to_v3_index(&self, index: &mut Value) {
        for discovery in self.discovery_cache.read().values() {
            index.object_mut("paths").extend(discovery.v3.clone());
        }
    }

    /// The APIService whose server has the OpenAPI v3 document.
    pub fn find_openapi_v3(&self, name: &str) -> Option<Arc<ApiService>> {
        let group = name.strip_prefix("apis/")?;
        let discovery_cache = self.discovery_cache.read();
        self.remote_services().into_iter().find(|entry| {
            let offered =
                discovery_cache.get(&entry.name).is_some_and(|discovery| discovery.v3.contains_key(name));
            offered && (group == entry.group || group == format!("{}/{}", entry.group, entry.version))
        })
    }

    /// Adds remote paths and definitions to the OpenAPI v2 document; local ones take precedence.
    pub fn add_to_v2(&self, document: &mut Value) {
        for discovery in self.discovery_cache.read().values() {
            for part in ["paths", "definitions"] {
                let local = document.object_mut(part);
                for (name, item) in discovery.v2.entries(part) {
                    local.entry(name).or_insert_with(|| item.clone());
                }
            }
        }
    }
}

fn merge_group(local: Value, name: &str, entries: &[Arc<ApiService>]) -> Value {
    let mut versions = local.items("versions").to_vec();
    for entry in entries {
        versions.retain(|version| version.text("version") != entry.version);
        let group_version = format!("{name}/{}", entry.version);
        versions.push(json!({"groupVersion": group_version, "version": entry.version}));
    }
    let mut group = match local {
        Value::Object(_) => local,
        _ => json!({"name": name}),
    };
    group.set("preferredVersion", versions.first().cloned().unwrap_or_default());
    group.set("versions", versions);
    group
}

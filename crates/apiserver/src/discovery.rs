//! Discovery documents: `/api`, `/apis` and below, aggregated or per group and version.

use api::{Resource, Status};
use base64::Engine as _;
use http::{Response, StatusCode, header};
use serde_json::{Value, json};
use sha2::Digest as _;

use crate::body::Body;
use crate::negotiate::{Format, MediaType, OutputKind, negotiate};
use crate::render::encode_response;
use crate::server::{Call, Server, method_not_allowed};

pub fn handle(server: &Server, call: &Call, segments: &[String]) -> Result<Response<Body>, Status> {
    if !matches!(call.method.as_str(), "GET" | "HEAD") {
        return Err(method_not_allowed());
    }
    let registry = server.registry.rows();
    let registry = registry.as_slice();
    let parts: Vec<&str> = segments.iter().map(String::as_str).collect();
    if let (["api"] | ["apis"], Some(version)) = (parts.as_slice(), negotiate_aggregated_version(call)) {
        let mut list = aggregated_list(registry, parts[0] == "api", version);
        if let ("apis", Some(groups)) = (parts[0], list["items"].as_array_mut()) {
            server.aggregator.add_to_aggregated(groups);
        }
        return Ok(aggregated_response(list, version, call));
    }
    let value = match parts.as_slice() {
        ["api"] => json!({
            "kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": call.header(header::HOST)}],
        }),
        ["apis"] => {
            let groups = groups(registry).into_iter().filter(|group| !group.is_empty());
            let mut groups: Vec<Value> = groups.map(|group| group_of(registry, group)).collect();
            server.aggregator.add_to_groups(&mut groups);
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        }
        ["api", version] => resources(registry, "", version)?,
        ["apis", group] if !group.is_empty() => {
            let local_group = groups(registry).contains(group).then(|| group_of(registry, group));
            let mut value = server.aggregator.group(group, local_group).ok_or_else(Status::unknown_path)?;
            value["kind"] = json!("APIGroup");
            value["apiVersion"] = json!("v1");
            value
        }
        ["apis", group, version] if !group.is_empty() => resources(registry, group, version)?,
        _ => return Err(Status::unknown_path()),
    };
    Ok(encode_response(StatusCode::OK, &negotiate(&call.headers, &call.query)?, value))
}

/// The served groups in upstream's order, core first.
fn groups(rows: &[&'static Resource]) -> Vec<&'static str> {
    let mut groups: Vec<&'static str> = rows.iter().map(|row| row.group).collect();
    groups.sort_unstable();
    groups.dedup();
    groups.sort_by_key(|group| {
        (GROUP_ORDER.iter().position(|known| known == group).unwrap_or(usize::MAX), *group)
    });
    groups
}

/// The order in which upstream lists its groups. kubectl resolves short names by it.
const GROUP_ORDER: &[&str] = &[
    "",
    "apiregistration.k8s.io",
    "apps",
    "events.k8s.io",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "autoscaling",
    "batch",
    "certificates.k8s.io",
    "networking.k8s.io",
    "policy",
    "rbac.authorization.k8s.io",
    "storage.k8s.io",
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "scheduling.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
    "discovery.k8s.io",
    "resource.k8s.io",
    "flowcontrol.apiserver.k8s.io",
];

/// A group's versions, the preferred one first: the order of the table, or by version priority for
/// groups of custom resources only.
fn versions(rows: &[&'static Resource], group: &str) -> Vec<&'static str> {
    let mut versions: Vec<&'static str> = Vec::new();
    let mut custom = true;
    for row in rows.iter().filter(|row| row.group == group) {
        custom &= row.custom.is_some();
        if !versions.contains(&row.version) {
            versions.push(row.version);
        }
    }
    if custom {
        versions.sort_by(|a, b| api::names::compare_versions(b, a));
    }
    versions
}

fn group_of(registry: &[&'static Resource], group: &str) -> Value {
    let entry = |version: &&str| json!({"groupVersion": format!("{group}/{version}"), "version": version});
    let versions: Vec<Value> = versions(registry, group).iter().map(entry).collect();
    json!({"name": group, "preferredVersion": versions.first(), "versions": versions})
}

fn rows_of(rows: &[&'static Resource], group: &str, version: &str) -> Vec<&'static Resource> {
    let mut rows: Vec<&'static Resource> =
        rows.iter().copied().filter(|row| row.group == group && row.version == version).collect();
    rows.sort_by_key(|row| row.plural);
    rows
}

fn resources(registry: &[&'static Resource], group: &str, version: &str) -> Result<Value, Status> {
    let rows = rows_of(registry, group, version);
    if rows.is_empty() {
        return Err(Status::unknown_path());
    }
    let mut list = Vec::new();
    for row in rows {
        let mut entry = json!({
            "name": row.plural, "singularName": row.singular(), "namespaced": row.namespaced,
            "kind": row.kind, "verbs": row.verb_names(),
        });
        if !row.short_names.is_empty() {
            entry["shortNames"] = json!(row.short_names);
        }
        if !row.categories.is_empty() {
            entry["categories"] = json!(row.categories);
        }
        if row.storage != api::resource_table::Storage::None {
            entry["storageVersionHash"] = json!(storage_version_hash(row));
        }
        list.push(entry);
        for sub in row.subresources {
            let mut entry = json!({
                "name": format!("{}/{}", row.plural, sub.name), "singularName": "", "namespaced": row.namespaced,
                "kind": if sub.kind.is_empty() { row.kind } else { sub.kind }, "verbs": sub.verbs,
            });
            if let Some((group, version)) = sub.group_version {
                entry["group"] = json!(group);
                entry["version"] = json!(version);
            }
            list.push(entry);
        }
    }
    let group_version = crate::codec::api_version(group, version);
    let mut value = json!({"kind": "APIResourceList", "groupVersion": group_version, "resources": list});
    // Clients of Kubernetes 1.1 expected no version here for the core group.
    if !group.is_empty() {
        value["apiVersion"] = json!("v1");
    }
    Ok(value)
}

/// Upstream's `StorageVersionHash` (SHA-256 of group, storage version and kind): clients see when
/// the storage version of a kind changes.
fn storage_version_hash(row: &'static Resource) -> String {
    let stored = crate::registry::stored_as(row);
    let definition = stored.custom.map(|crd| crd.definition());
    let version = definition.as_ref().map_or(stored.version, |definition| definition.storage_version());
    let name = format!("{}/{version}/{}", stored.group, stored.kind);
    let digest = sha2::Sha256::digest(name.as_bytes());
    base64::engine::general_purpose::STANDARD.encode(&digest[..8])
}

/// The version of aggregated discovery that the client prefers, if it accepts any.
fn negotiate_aggregated_version(call: &Call) -> Option<&'static str> {
    let accept = call.header(header::ACCEPT);
    accept.split(',').find_map(|clause| {
        let parts: Vec<&str> = clause.split(';').map(str::trim).collect();
        let is_aggregated =
            parts.contains(&"as=APIGroupDiscoveryList") && parts.contains(&"g=apidiscovery.k8s.io");
        // Discovery documents are not encoded as protobuf here. Clients that prefer protobuf accept
        // JSON next.
        match parts.first() {
            Some(&("application/json" | "*/*")) if is_aggregated => ["v2", "v2beta1"]
                .into_iter()
                .find(|version| parts.iter().any(|part| part.strip_prefix("v=") == Some(version))),
            _ => None,
        }
    })
}

fn aggregated_response(list: Value, version: &str, call: &Call) -> Response<Body> {
    let etag = format!("\"{:X}\"", sha2::Sha256::digest(list.to_string()));
    let format = Format { media: MediaType::Json, output_kind: OutputKind::Object, ..call.format };
    let mut response = if call.header(header::IF_NONE_MATCH) == etag {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        encode_response(StatusCode::OK, &format, list)
    };
    let media = format!("application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList");
    let header_values = [
        (header::CONTENT_TYPE, media.as_str()),
        (header::ETAG, &etag),
        (header::VARY, "Accept"),
        (header::CACHE_CONTROL, "public"),
    ];
    for (name, text) in header_values {
        if let Ok(value) = text.parse() {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

fn aggregated_list(registry: &[&'static Resource], core: bool, version: &str) -> Value {
    let groups = groups(registry).into_iter().filter(|group| group.is_empty() == core);
    let items: Vec<Value> = groups.map(|group| aggregated_group(registry, group)).collect();
    json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": format!("apidiscovery.k8s.io/{version}"),
        "metadata": {}, "items": items,
    })
}

fn aggregated_group(registry: &[&'static Resource], group: &'static str) -> Value {
    let versions: Vec<Value> = versions(registry, group)
        .into_iter()
        .map(|version| {
            let resources: Vec<Value> =
                rows_of(registry, group, version).into_iter().map(aggregated_resource).collect();
            json!({"version": version, "freshness": "Current", "resources": resources})
        })
        .collect();
    let metadata = if group.is_empty() { json!({}) } else { json!({"name": group}) };
    json!({"metadata": metadata, "versions": versions})
}

fn aggregated_resource(row: &'static Resource) -> Value {
    let kind =
        |group: &str, version: &str, kind: &str| json!({"group": group, "version": version, "kind": kind});
    let mut entry = json!({
        "resource": row.plural, "responseKind": kind("", "", row.kind),
        "scope": if row.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": row.singular(), "verbs": row.verb_names(),
    });
    if !row.short_names.is_empty() {
        entry["shortNames"] = json!(row.short_names);
    }
    if !row.categories.is_empty() {
        entry["categories"] = json!(row.categories);
    }
    let subresources: Vec<Value> = row
        .subresources
        .iter()
        .map(|sub| {
            let (group, version) = sub.group_version.unwrap_or(("", ""));
            let name = if sub.kind.is_empty() { row.kind } else { sub.kind };
            json!({"subresource": sub.name, "responseKind": kind(group, version, name), "verbs": sub.verbs})
        })
        .collect();
    if !subresources.is_empty() {
        entry["subresources"] = json!(subresources);
    }
    entry
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn storage_version_hashes_match_upstream() {
        let hash = |group, version, plural| {
            storage_version_hash(api::resource_table::find_resource(group, version, plural).unwrap())
        };
        assert_eq!(hash("", "v1", "pods"), "xPOwRZ+Yhw8=");
        assert_eq!(hash("", "v1", "configmaps"), "qFsyl6wFWjQ=");
        assert_eq!(hash("apps", "v1", "deployments"), "8aSe+NMegvE=");
    }

    #[test]
    fn discovery_documents_follow_struct_field_order() {
        let rows = crate::registry::Registry::new(&[]).unwrap().rows();
        let check = |value: Value, start: &str| {
            let text = serde_json::to_string(&crate::render::OrderedJson::object(&value)).unwrap();
            assert!(text.starts_with(start), "{text:.500}");
        };
        check(
            resources(&rows, "", "v1").unwrap(),
            r#"{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"bindings","singularName":"binding","namespaced":true,"kind":"Binding","verbs":["create"]},"#,
        );
        check(
            resources(&rows, "apps", "v1").unwrap(),
            r#"{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"apps/v1","resources":[{"name":"controllerrevisions","#,
        );
        let groups = json!([group_of(&rows, "apps")]);
        check(
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}),
            r#"{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}],"preferredVersion":{"groupVersion":"apps/v1","version":"v1"}}]}"#,
        );
        for version in ["v2", "v2beta1"] {
            let start = r#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/VERSION","metadata":{},"items":[{"metadata":{},"versions":[{"version":"v1","resources":[{"resource":"bindings","responseKind":{"group":"","version":"","kind":"Binding"},"scope":"Namespaced","singularResource":"binding","verbs":["create"]},"#;
            check(aggregated_list(&rows, true, version), &start.replace("VERSION", version));
        }
    }

    /// Compares with upstream's discovery document: the resources of every version that is served
    /// here, and the order of groups.
    #[test]
    fn groups_and_resources_match_upstream() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/reference/kubernetes-1.36/discovery.json");
        let Ok(text) = std::fs::read_to_string(path) else { return eprintln!("skipped: no {path}") };
        let reference: Value = serde_json::from_str(&text).unwrap();
        let served = aggregated_list(&crate::registry::Registry::new(&[]).unwrap().rows(), false, "v2");
        let names = |list: &Value| -> Vec<String> {
            let items = list["items"].as_array().unwrap().iter();
            items.map(|item| item["metadata"]["name"].as_str().unwrap_or_default().to_owned()).collect()
        };
        let mut expected = names(&reference);
        expected.retain(|name| names(&served).contains(name));
        assert_eq!(names(&served), expected);
        // Keyed by group, version and resource.
        let flat = |list: &Value| {
            let mut flat: BTreeMap<String, Value> = BTreeMap::new();
            for item in list["items"].as_array().unwrap() {
                for version in item["versions"].as_array().unwrap() {
                    for resource in version["resources"].as_array().unwrap() {
                        let name = [&item["metadata"]["name"], &version["version"], &resource["resource"]];
                        flat.insert(
                            name.map(|part| part.as_str().unwrap_or_default()).join("/"),
                            resource.clone(),
                        );
                    }
                }
            }
            flat
        };
        let reference = flat(&reference);
        for (name, resource) in flat(&served) {
            assert_eq!(Some(&resource), reference.get(&name), "{name}");
        }
        for name in reference.keys().filter(|name| name.contains("/v1/")) {
            assert!(flat(&served).contains_key(name), "{name} is missing");
        }
    }
}

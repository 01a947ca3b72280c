//! The default roles and bindings, created and reconciled at start.
//!
//! Missing rules and subjects are added, and additional ones are retained, unless the object's
//! auto-update annotation is false.

use api::Status;
use api::json::JsonExt as _;
use jiff::Timestamp;
use serde_json::{Value, json};
use store::Revision;

use super::row;
use super::rule::{PolicyRule, missing};
use crate::codec::set_type_meta;
use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::{WriteOptions, WriteResult};

pub const DEFAULT_POLICY: &str = include_str!("defaults.txt");
const AUTO_UPDATE_ANNOTATION: &str = "rbac.authorization.kubernetes.io/autoupdate";
const AGGREGATE_LABEL_PREFIX: &str = "rbac.authorization.k8s.io/aggregate-to-";

/// The rules of a default ClusterRole.
pub fn default_rules(name: &str) -> Vec<PolicyRule> {
    let is =
        |object: &&Value| object.text("kind") == "ClusterRole" && object.at("metadata").text("name") == name;
    objects(DEFAULT_POLICY).iter().find(is).map(PolicyRule::all_of).unwrap_or_default()
}

/// Creates missing objects and updates existing ones, then waits until authorization sees them.
pub async fn ensure_defaults(server: &Server) -> Result<(), Status> {
    // Concurrently, so that the store can commit them as one batch.
    let all = objects(DEFAULT_POLICY).into_iter().map(|desired| ensure(server, desired));
    let revisions = futures_util::future::try_join_all(all).await?;
    let latest_revision = revisions.into_iter().max().unwrap_or(0);
    server.cache.wait_until_fresh(latest_revision).await.map_err(Status::internal)
}

/// Ensures one object and returns its revision.
async fn ensure(server: &Server, desired: Value) -> Result<Revision, Status> {
    let metadata = desired.at("metadata");
    let resource = row(match desired.text("kind") {
        "ClusterRole" => "clusterroles",
        "Role" => "roles",
        "ClusterRoleBinding" => "clusterrolebindings",
        _ => "rolebindings",
    });
    let collection = Target::collection(resource, metadata.text("namespace"));
    let target = Target { name: metadata.text("name").to_owned(), ..collection.clone() };
    let options = WriteOptions::internal(Timestamp::now());
    if let Some(object) = server.current(&target).await? {
        let found = object.value();
        if found.at("metadata").at("annotations").text(AUTO_UPDATE_ANNOTATION) == "false" {
            return Ok(object.revision);
        }
        if found.at("roleRef") == desired.at("roleRef") {
            let update = |before: &Value| Ok(ObjectChange::replace(add_missing(before, &desired)));
            return server
                .update_object(&target, &options, update)
                .await
                .map(|(result, _)| revision(&result));
        }
        // The roleRef of a binding is immutable: delete and create it.
        server.remove(&object).await?;
    }
    match server.create_object(&collection, desired, &options, None).await {
        Err(status) if status.reason == "AlreadyExists" => Ok(0),
        other => other.map(|(result, _)| revision(&result)),
    }
}

fn revision(result: &WriteResult) -> Revision {
    match result {
        WriteResult::Stored(object) => object.revision,
        WriteResult::DryRun(_) => 0,
    }
}

/// `found` plus everything of `desired` that it lacks.
fn add_missing(found: &Value, desired: &Value) -> Value {
    let mut after = found.clone();
    for field in ["annotations", "labels"] {
        for (name, value) in desired.at("metadata").entries(field) {
            let metadata = after.object_mut("metadata");
            let map = metadata.entry(field).or_insert_with(|| json!({}));
            if !map.has(name) {
                map.set(name, value.clone());
            }
        }
    }
    let to_add = missing(&PolicyRule::all_of(found), &PolicyRule::all_of(desired));
    extend(&mut after, "rules", to_add.iter().map(PolicyRule::to_value));
    let subjects = desired.items("subjects").iter();
    let to_add = subjects.filter(|subject| !found.items("subjects").contains(subject));
    extend(&mut after, "subjects", to_add.cloned());
    if !desired.has("aggregationRule") {
        if let Some(fields) = after.as_object_mut() {
            fields.remove("aggregationRule");
        }
        return after;
    }
    const SELECTORS: &str = "clusterRoleSelectors";
    let existing = found.at("aggregationRule").items(SELECTORS);
    let selectors = desired.at("aggregationRule").items(SELECTORS).iter();
    let to_add: Vec<Value> = selectors.filter(|selector| !existing.contains(selector)).cloned().collect();
    if !to_add.is_empty() {
        let all: Vec<Value> = existing.iter().cloned().chain(to_add).collect();
        after.set("aggregationRule", json!({SELECTORS: all}));
    }
    after
}

fn extend(value: &mut Value, list: &str, more: impl Iterator<Item = Value>) {
    let all: Vec<Value> = value.items(list).iter().cloned().chain(more).collect();
    if all.len() > value.items(list).len() {
        value.set(list, all);
    }
}

/// Parses the policy table; `defaults.txt` documents the format.
pub fn objects(table: &str) -> Vec<Value> {
    let mut objects: Vec<Value> = Vec::new();
    for line in table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match (line.strip_prefix("  "), objects.last_mut()) {
            (Some(line), Some(object)) if object.has("roleRef") => push(object, "subjects", subject(line)),
            (Some(line), Some(object)) => push(object, "rules", rule(line).to_value()),
            _ => objects.push(parse_object_line(line)),
        }
    }
    objects
}

fn push(object: &mut Value, list: &str, item: Value) {
    extend(object, list, std::iter::once(item));
}

fn parse_object_line(line: &str) -> Value {
    let mut words = line.split(' ');
    let kind = words.next().unwrap_or_default();
    let namespace = if kind.starts_with("Cluster") { None } else { words.next() };
    let name = words.next().unwrap_or_default();
    let mut object = json!({"metadata": {
        "name": name,
        "annotations": {AUTO_UPDATE_ANNOTATION: "true"},
        "labels": {"kubernetes.io/bootstrapping": "rbac-defaults"},
    }});
    set_type_meta(&mut object, super::GROUP, "v1", kind);
    let metadata = object.object_mut("metadata");
    if let Some(namespace) = namespace {
        metadata.insert("namespace".into(), namespace.into());
    }
    let mut role = name;
    let mut aggregation_label = None;
    for word in words {
        match word.split_once(':') {
            Some(("into", other)) => {
                metadata["labels"].set(&format!("{AGGREGATE_LABEL_PREFIX}{other}"), "true")
            }
            Some(("from", other)) => aggregation_label = Some(format!("{AGGREGATE_LABEL_PREFIX}{other}")),
            Some(("of", other)) => role = other,
            _ => {}
        }
    }
    if let Some(label) = aggregation_label {
        let selector = json!({"matchLabels": {label: "true"}});
        object.set("aggregationRule", json!({"clusterRoleSelectors": [selector]}));
    }
    if let Some(kind) = kind.strip_suffix("Binding") {
        object.set("roleRef", json!({"apiGroup": super::GROUP, "kind": kind, "name": role}));
    }
    object
}

fn rule(line: &str) -> PolicyRule {
    let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
    let (verbs, what) = line.split_once(": ").unwrap_or((line, ""));
    let verbs = match verbs {
        "READ" => words("get list watch"),
        "WRITE" => words("create delete deletecollection patch update"),
        "READ+WRITE" => words("create delete deletecollection get list patch update watch"),
        other => words(other),
    };
    let Some((resources, groups)) = what.split_once(" @ ") else {
        return PolicyRule { verbs, urls: words(what), ..PolicyRule::default() };
    };
    let (groups, names) = match groups.split_once(" = ") {
        Some((groups, names)) => (groups, words(names)),
        None => (groups, Vec::new()),
    };
    let group = |word: &str| if word == "core" { String::new() } else { word.to_owned() };
    PolicyRule {
        verbs,
        resources: words(resources),
        groups: groups.split(',').map(group).collect(),
        names,
        ..PolicyRule::default()
    }
}

fn subject(line: &str) -> Value {
    let (kind, name) = line.split_once(' ').unwrap_or((line, ""));
    match (kind, name.split_once('/')) {
        ("ServiceAccount", Some((namespace, name))) => {
            json!({"kind": kind, "namespace": namespace, "name": name})
        }
        _ => json!({"apiGroup": super::GROUP, "kind": kind, "name": name}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_policy_matches_upstream_counts() {
        let objects = objects(DEFAULT_POLICY);
        let count = |kind: &str| objects.iter().filter(|object| object.text("kind") == kind).count();
        let counts = ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"].map(count);
        expect_test::expect!["[69, 50, 7, 7]"].assert_eq(&format!("{counts:?}"));
        for object in &objects {
            for rule in PolicyRule::all_of(object) {
                let resources = !rule.groups.is_empty() && !rule.resources.is_empty();
                assert!(!rule.verbs.is_empty() && resources == rule.urls.is_empty(), "{object}");
            }
            let bound = object.at("roleRef").text("name");
            let kind = object.at("roleRef").text("kind");
            let role = |other: &Value| {
                other.text("kind") == kind
                    && other.at("metadata").text("name") == bound
                    && other.at("metadata").at("namespace") == object.at("metadata").at("namespace")
            };
            assert!(bound.is_empty() || objects.iter().any(role), "{object} references an unknown role");
        }
    }

    #[test]
    fn missing_rules_are_added_and_others_retained() {
        let desired = objects("ClusterRole a into:b\n  get list: pods @ core\n  get: /x\n").remove(0);
        let found = json!({
            "metadata": {"name": "a", "labels": {"own": "1"}, "annotations": {AUTO_UPDATE_ANNOTATION: "yes"}},
            "rules": [{"verbs": ["get", "delete"], "apiGroups": [""], "resources": ["pods"]}],
        });
        let after = add_missing(&found, &desired);
        expect_test::expect![[r#"{"metadata":{"annotations":{"rbac.authorization.kubernetes.io/autoupdate":"yes"},"labels":{"kubernetes.io/bootstrapping":"rbac-defaults","own":"1","rbac.authorization.k8s.io/aggregate-to-b":"true"},"name":"a"},"rules":[{"apiGroups":[""],"resources":["pods"],"verbs":["get","delete"]},{"apiGroups":[""],"resources":["pods"],"verbs":["list"]},{"nonResourceURLs":["/x"],"verbs":["get"]}]}"#]].assert_eq(&after.to_string());
        assert_eq!(add_missing(&after, &desired), after);
        assert_eq!(add_missing(&desired, &desired), desired);
    }
}

//! The default FlowSchemas and PriorityLevelConfigurations, and their reconciliation.
//!
//! Two of each are mandatory: changes to them are reverted. The others are suggested: they follow
//! the server's version while their auto-update annotation is true. Deleted objects are created
//! again. Upstream: `flowcontrol/bootstrap` and `flowcontrol/ensurer`.

use api::json::JsonExt as _;
use api::{Resource, Status};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

pub const GROUP: &str = "flowcontrol.apiserver.k8s.io";
const AUTO_UPDATE_ANNOTATION: &str = "apf.kubernetes.io/autoupdate-spec";
const FIELD_MANAGER: &str = "api-priority-and-fairness-config-producer-v1";
const MANDATORY_NAMES: [&str; 2] = ["exempt", "catch-all"];

/// Name, shares and lendable percent; number of queues and hand size.
type DefaultLevel = (&'static str, u64, u64, Option<(u64, u64)>);
const DEFAULT_LEVELS: [DefaultLevel; 7] = [
    ("catch-all", 5, 0, None),
    ("system", 30, 33, Some((64, 6))),
    ("node-high", 40, 25, Some((64, 6))),
    ("leader-election", 10, 0, Some((16, 4))),
    ("workload-high", 40, 50, Some((128, 6))),
    ("workload-low", 100, 90, Some((128, 6))),
    ("global-default", 20, 50, Some((128, 6))),
];
const QUEUE_LENGTH_LIMIT: u64 = 50;

struct DefaultFlowSchema {
    name: &'static str,
    level: &'static str,
    precedence: u64,
    /// The type of the flow distinguisher.
    distinguisher: &'static str,
    /// `Group name`, `User name`, `ServiceAccount namespace/name`.
    subjects: &'static [&'static str],
    scope: RuleScope,
}

enum RuleScope {
    Everything,
    NonResourcePaths(&'static [&'static str]),
    /// Verbs, group, resources, and whether the rule has cluster scope.
    Resources(&'static [(&'static [&'static str], &'static str, &'static [&'static str], bool)]),
}

const ALL_USERS: &[&str] = &["Group system:unauthenticated", "Group system:authenticated"];

const DEFAULT_SCHEMAS: [DefaultFlowSchema; 11] = [
    DefaultFlowSchema {
        name: "exempt",
        level: "exempt",
        precedence: 1,
        distinguisher: "",
        subjects: &["Group system:masters"],
        scope: RuleScope::Everything,
    },
    DefaultFlowSchema {
        name: "probes",
        level: "exempt",
        precedence: 2,
        distinguisher: "",
        subjects: ALL_USERS,
        scope: RuleScope::NonResourcePaths(&["/healthz", "/readyz", "/livez"]),
    },
    DefaultFlowSchema {
        name: "system-leader-election",
        level: "leader-election",
        precedence: 100,
        distinguisher: "ByUser",
        subjects: &[
            "User system:kube-controller-manager",
            "User system:kube-scheduler",
            "ServiceAccount kube-system/*",
        ],
        scope: RuleScope::Resources(&[(
            &["get", "create", "update"],
            "coordination.k8s.io",
            &["leases"],
            false,
        )]),
    },
    DefaultFlowSchema {
        name: "system-node-high",
        level: "node-high",
        precedence: 400,
        distinguisher: "ByUser",
        subjects: &["Group system:nodes"],
        scope: RuleScope::Resources(&[
            (&["*"], "", &["nodes", "nodes/status"], true),
            (&["*"], "coordination.k8s.io", &["leases"], false),
        ]),
    },
    DefaultFlowSchema {
        name: "system-nodes",
        level: "system",
        precedence: 500,
        distinguisher: "ByUser",
        subjects: &["Group system:nodes"],
        scope: RuleScope::Everything,
    },
    DefaultFlowSchema {
        name: "kube-controller-manager",
        level: "workload-high",
        precedence: 800,
        distinguisher: "ByNamespace",
        subjects: &["User system:kube-controller-manager"],
        scope: RuleScope::Everything,
    },
    DefaultFlowSchema {
        name: "kube-scheduler",
        level: "workload-high",
        precedence: 800,
        distinguisher: "ByNamespace",
        subjects: &["User system:kube-scheduler"],
        scope: RuleScope::Everything,
    },
    DefaultFlowSchema {
        name: "kube-system-service-accounts",
        level: "workload-high",
        precedence: 900,
        distinguisher: "ByNamespace",
        subjects: &["ServiceAccount kube-system/*"],
        scope: RuleScope::Everything,
    },
    DefaultFlowSchema {
        name: "service-accounts",
        level: "workload-low",
        precedence: 9000,
        distinguisher: "ByUser",
        subjects: &["Group system:serviceaccounts"],
        scope: RuleScope::Everything,
    },
    DefaultFlowSchema {
        name: "global-default",
        level: "global-default",
        precedence: 9900,
        distinguisher: "ByUser",
        subjects: ALL_USERS,
        scope: RuleScope::Everything,
    },
    DefaultFlowSchema {
        name: "catch-all",
        level: "catch-all",
        precedence: 10000,
        distinguisher: "ByUser",
        subjects: ALL_USERS,
        scope: RuleScope::Everything,
    },
];

fn object(kind: &str, name: &str, spec: Value) -> Value {
    let mut object =
        json!({"metadata": {"name": name, "annotations": {AUTO_UPDATE_ANNOTATION: "true"}}, "spec": spec});
    crate::codec::set_type_meta(&mut object, GROUP, "v1", kind);
    object
}

/// The default PriorityLevelConfigurations, exempt first.
pub fn levels() -> Vec<Value> {
    let own = json!({"nominalConcurrencyShares": 0, "lendablePercent": 0});
    let exempt = object("PriorityLevelConfiguration", "exempt", json!({"type": "Exempt", "exempt": own}));
    let limited = DEFAULT_LEVELS.map(|(name, shares, lendable, queues)| {
        let response = match queues {
            None => json!({"type": "Reject"}),
            Some((queues, hand)) => json!({"type": "Queue", "queuing": {
                "queues": queues, "handSize": hand, "queueLengthLimit": QUEUE_LENGTH_LIMIT,
            }}),
        };
        let limited = json!({
            "nominalConcurrencyShares": shares, "lendablePercent": lendable, "limitResponse": response,
        });
        object("PriorityLevelConfiguration", name, json!({"type": "Limited", "limited": limited}))
    });
    std::iter::once(exempt).chain(limited).collect()
}

/// The default FlowSchemas, by precedence.
pub fn schemas() -> Vec<Value> {
    DEFAULT_SCHEMAS.iter().map(DefaultFlowSchema::value).collect()
}

impl DefaultFlowSchema {
    fn value(&self) -> Value {
        let subjects: Vec<Value> = self.subjects.iter().map(|text| subject(text)).collect();
        let resource = |verbs: &[&str], group: &str, resources: &[&str], cluster: bool| {
            let mut rule =
                json!({"verbs": verbs, "apiGroups": [group], "resources": resources, "namespaces": ["*"]});
            if cluster {
                rule.set("clusterScope", true);
            }
            rule
        };
        let mut rule = json!({"subjects": subjects});
        match self.scope {
            RuleScope::Everything => {
                rule.set("resourceRules", vec![resource(&["*"], "*", &["*"], true)]);
                rule.set("nonResourceRules", json!([{"verbs": ["*"], "nonResourceURLs": ["*"]}]));
            }
            RuleScope::NonResourcePaths(paths) => {
                rule.set("nonResourceRules", json!([{"verbs": ["get"], "nonResourceURLs": paths}]));
            }
            RuleScope::Resources(rules) => {
                let rules =
                    rules.iter().map(|(verbs, group, names, all)| resource(verbs, group, names, *all));
                rule.set("resourceRules", rules.collect::<Vec<_>>());
            }
        }
        let mut spec = json!({
            "priorityLevelConfiguration": {"name": self.level},
            "matchingPrecedence": self.precedence,
            "rules": [rule],
        });
        if !self.distinguisher.is_empty() {
            spec.set("distinguisherMethod", json!({"type": self.distinguisher}));
        }
        object("FlowSchema", self.name, spec)
    }
}

fn subject(text: &str) -> Value {
    let (kind, name) = text.split_once(' ').unwrap_or((text, ""));
    match (kind, name.split_once('/')) {
        ("ServiceAccount", Some((namespace, name))) => {
            json!({"kind": kind, "serviceAccount": {"name": name, "namespace": namespace}})
        }
        ("User", _) => json!({"kind": kind, "user": {"name": name}}),
        _ => json!({"kind": kind, "group": {"name": name}}),
    }
}

pub fn row(plural: &str) -> &'static Resource {
    api::resource_table::find_resource(GROUP, "v1", plural)
        .expect("flow control resources are in the resource table")
}

/// Creates missing objects, updates those that differ and deletes obsolete defaults that still
/// auto-update. `found` are the existing objects.
pub async fn ensure(server: &Server, plural: &str, desired: &[Value], found: &[Value]) -> Result<(), Status> {
    let collection = Target::collection(row(plural), "");
    let options = WriteOptions { manager: FIELD_MANAGER.into(), ..WriteOptions::internal(Timestamp::now()) };
    let name = |object: &Value| object.at("metadata").text("name").to_owned();
    let ensure_one = |desired: Value| {
        let (collection, options) = (&collection, &options);
        let target = Target { name: name(&desired), ..collection.clone() };
        async move {
            let done = match found.iter().find(|found| name(found) == target.name) {
                None => server.create_object(collection, desired, options, None).await.map(drop),
                Some(found) if updated_object(found, &desired).is_none() => Ok(()),
                Some(_) => {
                    let change = |before: &Value| {
                        let after = updated_object(before, &desired).unwrap_or_else(|| before.clone());
                        crate::create::defaulted(collection.resource, after).map(ObjectChange::replace)
                    };
                    server.update_object(&target, options, change).await.map(drop)
                }
            };
            match done {
                // A concurrent writer was faster. The next cache event reconciles the object again.
                Err(status) if matches!(status.code, 404 | 409) => Ok(()),
                spec_differs => spec_differs,
            }
        }
    };
    futures_util::future::try_join_all(desired.iter().cloned().map(ensure_one)).await?;
    for old in found {
        let is_unused = !desired.iter().any(|desired| name(desired) == name(old));
        if is_unused && auto_update(old) == Some(true) {
            let target = Target { name: name(old), ..collection.clone() };
            if let Some(object) = server.current(&target).await? {
                server.remove(&object).await?;
            }
        }
    }
    Ok(())
}

/// The value of the auto-update annotation; `None` if it is missing or not a boolean.
fn auto_update(object: &Value) -> Option<bool> {
    match object.at("metadata").at("annotations").text(AUTO_UPDATE_ANNOTATION) {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// The updated object; `None` if it needs no update.
fn updated_object(found: &Value, desired: &Value) -> Option<Value> {
    let metadata = found.at("metadata");
    let name = metadata.text("name");
    let mandatory = MANDATORY_NAMES.contains(&name);
    // Without an annotation, generation 1 means that no user has changed the spec.
    let follows_server = mandatory || auto_update(found).unwrap_or(metadata.int("generation") == Some(1));
    let mut spec = desired.at("spec").clone();
    if name == "exempt" && found.at("spec").has("exempt") {
        // Administrators own the shares and lendable percent of the exempt level.
        for field in ["nominalConcurrencyShares", "lendablePercent"] {
            let own = found.at("spec").at("exempt").at(field).clone();
            spec.object_mut("exempt").insert(field.into(), own);
        }
    }
    let spec_differs = follows_server && !api::meta::semantic_equal(&spec, found.at("spec"));
    let annotate = auto_update(found) != Some(follows_server);
    if !spec_differs && !annotate {
        return None;
    }
    let mut after = found.clone();
    if spec_differs {
        after.set("spec", spec);
    }
    if annotate {
        let metadata = after.object_mut("metadata");
        let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
        annotations.set(AUTO_UPDATE_ANNOTATION, follows_server.to_string());
    }
    Some(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(change: impl Fn(&mut Value), expected: Option<&str>) {
        let desired =
            schemas().into_iter().find(|schema| schema.path("metadata.name") == "global-default").unwrap();
        let mut found = desired.clone();
        found["metadata"].set("generation", 2);
        change(&mut found);
        let after = updated_object(&found, &desired);
        let summary = after.as_ref().map(|after| {
            let annotation = after["metadata"]["annotations"].text(AUTO_UPDATE_ANNOTATION).to_owned();
            format!("{annotation} {}", after["spec"].int("matchingPrecedence").unwrap_or(0))
        });
        assert_eq!(summary.as_deref(), expected);
        if let Some(after) = after {
            assert_eq!(updated_object(&after, &desired), None, "a second update changes nothing");
        }
    }

    #[test]
    fn suggested_objects_update_while_annotated() {
        let annotate = |object: &mut Value, text: &str| {
            object["metadata"]["annotations"].set(AUTO_UPDATE_ANNOTATION, text)
        };
        check(|_| {}, None);
        check(|object| object["spec"].set("matchingPrecedence", 7), Some("true 9900"));
        check(
            |object| {
                annotate(object, "false");
                object["spec"].set("matchingPrecedence", 7);
            },
            None,
        );
        // A changed object without the annotation belongs to the user.
        check(
            |object| {
                annotate(object, "what?");
                object["spec"].set("matchingPrecedence", 7);
            },
            Some("false 7"),
        );
        check(
            |object| {
                annotate(object, "");
                object["metadata"].set("generation", 1);
                object["spec"].set("matchingPrecedence", 7);
            },
            Some("true 9900"),
        );
    }

    #[test]
    fn mandatory_objects_always_update() {
        let desired = levels().remove(0);
        let mut found = desired.clone();
        found["metadata"]["annotations"].set(AUTO_UPDATE_ANNOTATION, "false");
        found["spec"]["exempt"].set("lendablePercent", 50);
        let after = updated_object(&found, &desired).unwrap();
        assert_eq!(after["metadata"]["annotations"].text(AUTO_UPDATE_ANNOTATION), "true");
        assert_eq!(after["spec"]["exempt"]["lendablePercent"], 50);
        assert_eq!(updated_object(&after, &desired), None);
    }
}

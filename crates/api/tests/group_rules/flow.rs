use expect_test::expect;
use serde_json::{Value, json};

use super::{check, check_status, check_valid, with_value};

fn schema() -> Value {
    json!({
        "metadata": {"name": "robots"},
        "spec": {
            "priorityLevelConfiguration": {"name": "workload-low"},
            "matchingPrecedence": 1000,
            "distinguisherMethod": {"type": "ByUser"},
            "rules": [{
                "subjects": [{"kind": "ServiceAccount", "serviceAccount": {"name": "*", "namespace": "shop"}}],
                "resourceRules": [{"verbs": ["get"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"]}],
                "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["/healthz", "/logs/*"]}],
            }],
        },
    })
}

fn level() -> Value {
    json!({
        "metadata": {"name": "robots"},
        "spec": {"type": "Limited", "limited": {
            "nominalConcurrencyShares": 10,
            "lendablePercent": 0,
            "limitResponse": {"type": "Queue", "queuing": {"queues": 64, "handSize": 6, "queueLengthLimit": 50}},
        }},
    })
}

#[test]
fn validates_flow_schemas() {
    check_valid("FlowSchema", schema());
    let nothing =
        json!({"spec": {"matchingPrecedence": 1, "distinguisherMethod": {"type": "ByName"}, "rules": [{}]}});
    check(
        "FlowSchema",
        nothing,
        expect![[r#"
        spec.matchingPrecedence: Invalid value: 1: only the schema named 'exempt' may have matchingPrecedence 1
        spec.distinguisherMethod.type: Unsupported value: {"Type":"ByName"}: supported values: "ByNamespace", "ByUser"
        spec.priorityLevelConfiguration.name: Required value: must reference a priority level
        spec.rules[0].subjects: Required value: subjects must contain at least one value
        spec.rules[0]: Required value: at least one of resourceRules and nonResourceRules has to be non-empty
    "#]],
    );
    let rules = json!([{
        "subjects": [
            {"kind": "User", "group": {"name": "g"}},
            {"kind": "ServiceAccount", "serviceAccount": {"name": "A"}},
            {"kind": "Robot"},
        ],
        "resourceRules": [
            {"verbs": ["get", "*"], "apiGroups": ["*", ""], "resources": ["pods", "*"], "namespaces": ["A"]},
            {"verbs": ["fetch"]},
        ],
        "nonResourceRules": [
            {"verbs": ["*"], "nonResourceURLs": ["", "x", "/a b", "/a//b", "/a*", "/*/b"]},
            {"verbs": ["*"], "nonResourceURLs": ["*", "/x"]},
        ],
    }]);
    let spec = with_value(schema(), "/spec/rules", rules);
    check(
        "FlowSchema",
        with_value(spec, "/spec/matchingPrecedence", json!(10001)),
        expect![[r#"
        spec.matchingPrecedence: Invalid value: 10001: must not be greater than 10000
        spec.rules[0].subjects[0].user: Required value: user is required when subject kind is 'User'
        spec.rules[0].subjects[0].group: Forbidden: group is forbidden when subject kind is not 'Group'
        spec.rules[0].subjects[1].serviceAccount.name: Invalid value: "A": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        spec.rules[0].subjects[1].serviceAccount.namespace: Required value: must specify namespace for service account
        spec.rules[0].subjects[2].kind: Unsupported value: "Robot": supported values: "Group", "ServiceAccount", "User"
        spec.rules[0].resourceRules[0].verbs: Invalid value: ["get","*"]: if '*' is present, must not specify other verbs
        spec.rules[0].resourceRules[0].apiGroups: Invalid value: ["*",""]: if '*' is present, must not specify other api groups
        spec.rules[0].resourceRules[0].resources: Invalid value: ["pods","*"]: if '*' is present, must not specify other resources
        spec.rules[0].resourceRules[0].namespaces[0]: Invalid value: "A": each member of this list must be '*' or a DNS-1123 label; a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
        spec.rules[0].resourceRules[1].verbs: Unsupported value: ["fetch"]: supported values: "create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"
        spec.rules[0].resourceRules[1].apiGroups: Required value: resource rules must supply at least one api group
        spec.rules[0].resourceRules[1].resources: Required value: resource rules must supply at least one resource
        spec.rules[0].resourceRules[1].namespaces: Required value: resource rules that are not cluster scoped must supply at least one namespace
        spec.rules[0].nonResourceRules[0].nonResourceURLs[0]: Invalid value: "": must not be empty
        spec.rules[0].nonResourceRules[0].nonResourceURLs[1]: Invalid value: "x": must start with slash
        spec.rules[0].nonResourceRules[0].nonResourceURLs[2]: Invalid value: "/a b": must not contain white-space
        spec.rules[0].nonResourceRules[0].nonResourceURLs[3]: Invalid value: "/a//b": must not contain double slash
        spec.rules[0].nonResourceRules[0].nonResourceURLs[4]: Invalid value: "/a*": wildcard can only do suffix matching
        spec.rules[0].nonResourceRules[0].nonResourceURLs[5]: Invalid value: "/*/b": wildcard can only do suffix matching
        spec.rules[0].nonResourceRules[1].nonResourceURLs: Invalid value: ["*","/x"]: if '*' is present, must not specify other non-resource URLs
    "#]],
    );
}

#[test]
fn mandatory_flow_schemas_have_fixed_specs() {
    check(
        "FlowSchema",
        with_value(schema(), "/metadata/name", json!("catch-all")),
        expect![[r#"
        spec: Invalid value: {"distinguisherMethod":{"type":"ByUser"},"matchingPrecedence":1000,"priorityLevelConfiguration":{"name":"workload-low"},"rules":[{"nonResourceRules":[{"nonResourceURLs":["/healthz","/logs/*"],"verbs":["*"]}],"resourceRules":[{"apiGroups":["*"],"namespaces":["*"],"resources":["*"],"verbs":["get"]}],"subjects":[{"kind":"ServiceAccount","serviceAccount":{"name":"*","namespace":"shop"}}]}]}: spec of 'catch-all' must equal the fixed value
    "#]],
    );
    check_valid(
        "FlowSchema",
        json!({
            "metadata": {"name": "exempt"},
            "spec": {
                "priorityLevelConfiguration": {"name": "exempt"},
                "matchingPrecedence": 1,
                "rules": [{
                    "subjects": [{"kind": "Group", "group": {"name": "system:masters"}}],
                    "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": true}],
                    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                }],
            },
        }),
    );
}

#[test]
fn validates_priority_levels() {
    let kind = "PriorityLevelConfiguration";
    check_valid(kind, level());
    check(
        kind,
        json!({"spec": {}}),
        expect![[r#"
        spec.type: Required value
    "#]],
    );
    check(
        kind,
        with_value(level(), "/spec/type", json!("Exempt")),
        expect![[r#"
        spec.type: Invalid value: "Exempt": must be 'Exempt' if and only if `name` is 'exempt'
        spec.limited: Forbidden: must be nil if the type is not Limited
    "#]],
    );
    check(
        kind,
        with_value(level(), "/spec/exempt", json!({})),
        expect![[r#"
        spec.exempt: Forbidden: must be nil if the type is Limited
    "#]],
    );
    let queuing = json!({"queues": 10, "handSize": 20, "queueLengthLimit": 0});
    check(
        kind,
        with_value(level(), "/spec/limited/limitResponse/queuing", queuing),
        expect![[r#"
        spec.limited.limitResponse.queuing.queueLengthLimit: Invalid value: 0: must be positive
        spec.limited.limitResponse.queuing.handSize: Invalid value: 20: should not be greater than queues (10)
    "#]],
    );
    let queuing = json!({"queues": 10_000_000, "handSize": 3, "queueLengthLimit": 1});
    check(
        kind,
        with_value(level(), "/spec/limited/limitResponse/queuing", queuing),
        expect![[r#"
        spec.limited.limitResponse.queuing.handSize: Invalid value: 3: required entropy bits of deckSize 10000000 and handSize 3 should not be greater than 60
    "#]],
    );
    check(
        kind,
        with_value(level(), "/spec/limited/limitResponse/type", json!("Reject")),
        expect![[r#"
        spec.limited.limitResponse.queuing: Forbidden: must be nil if limited.limitResponse.type is not Limited
    "#]],
    );
    let limited = json!({"nominalConcurrencyShares": -1, "lendablePercent": 101, "borrowingLimitPercent": -1, "limitResponse": {"type": "Wait"}});
    check(
        kind,
        with_value(level(), "/spec/limited", limited),
        expect![[r#"
        spec.limited.nominalConcurrencyShares: Invalid value: -1: must be a non-negative integer
        spec.limited.limitResponse.type: Unsupported value: "Wait": supported values: "Queue", "Reject"
        spec.limited.lendablePercent: Invalid value: 101: must be between 0 and 100, inclusive
        spec.limited.borrowingLimitPercent: Invalid value: -1: if specified, must be a non-negative integer
    "#]],
    );
    let exempt = json!({"metadata": {"name": "exempt"}, "spec": {"type": "Exempt", "exempt": {"lendablePercent": 50}}});
    check_valid(kind, exempt);
    check_status(
        kind,
        json!({"status": {"conditions": [{"type": "A"}, {"type": "A"}, {}]}}),
        expect![[r#"
        status.conditions[1].type: Duplicate value: "A"
        status.conditions[2].type: Required value
    "#]],
    );
}

#[test]
fn validates_api_services() {
    let service = json!({
        "metadata": {"name": "v1.metrics.example.com"},
        "spec": {
            "group": "metrics.example.com",
            "version": "v1",
            "groupPriorityMinimum": 100,
            "versionPriority": 10,
            "service": {"name": "metrics", "namespace": "kube-system", "port": 443},
        },
    });
    check_valid("APIService", service.clone());
    check(
        "APIService",
        json!({"metadata": {"name": "x"}, "spec": {"caBundle": "eHl6", "insecureSkipTLSVerify": true}}),
        expect![[r#"
        metadata.name: Invalid value: "x": must be `spec.version+"."+spec.group`: "."
        spec.group: Required value: only v1 may have an empty group and it better be legacy kube
        spec.version: Invalid value: "": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.groupPriorityMinimum: Invalid value: 0: must be positive and less than 20000
        spec.versionPriority: Invalid value: 0: must be positive and less than 1000
        spec.caBundle: Invalid value: "3 bytes": local APIServices may not have a caBundle
        spec.insecureSkipTLSVerify: Invalid value: true: local APIServices may not have insecureSkipTLSVerify
    "#]],
    );
    let bad = with_value(service, "/spec/service", json!({"port": 0}));
    let bad = with_value(bad, "/spec/caBundle", json!("eHl6"));
    check(
        "APIService",
        with_value(bad, "/spec/insecureSkipTLSVerify", json!(true)),
        expect![[r#"
        spec.service.namespace: Required value
        spec.service.name: Required value
        spec.service.port: Invalid value: 0: port is not valid: must be between 1 and 65535, inclusive
        spec.insecureSkipTLSVerify: Invalid value: true: may not be true if caBundle is present
    "#]],
    );
    check_status(
        "APIService",
        json!({"status": {"conditions": [{"type": "Available", "status": "Yes"}]}}),
        expect![[r#"
        status.conditions[0].status: Unsupported value: "Yes": supported values: "True", "False", "Unknown"
    "#]],
    );
}

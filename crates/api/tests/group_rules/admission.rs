use expect_test::expect;
use serde_json::{Value, json};

use super::{check, check_status, check_valid, with_value};

fn webhooks() -> Value {
    json!({
        "metadata": {"name": "guard"},
        "webhooks": [{
            "name": "guard.example.com",
            "rules": [{"operations": ["CREATE"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["pods"], "scope": "*"}],
            "clientConfig": {"service": {"name": "guard", "namespace": "shop", "path": "/check", "port": 443}},
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "timeoutSeconds": 10,
            "failurePolicy": "Fail",
            "matchPolicy": "Equivalent",
            "namespaceSelector": {},
            "objectSelector": {},
        }],
    })
}

fn policy() -> Value {
    json!({
        "metadata": {"name": "few-replicas"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "matchPolicy": "Equivalent",
                "namespaceSelector": {},
                "objectSelector": {},
                "resourceRules": [{"operations": ["CREATE"], "apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["deployments"]}],
            },
            "validations": [{"expression": "object.spec.replicas <= 5"}],
        },
    })
}

#[test]
fn validates_webhook_configurations() {
    check_valid("ValidatingWebhookConfiguration", webhooks());
    check_valid(
        "MutatingWebhookConfiguration",
        with_value(webhooks(), "/webhooks/0/reinvocationPolicy", json!("Never")),
    );
    check(
        "MutatingWebhookConfiguration",
        json!({"webhooks": [{}]}),
        expect![[r#"
        webhooks[0].name: Required value
        webhooks[0].sideEffects: Required value: must specify one of None, NoneOnDryRun
        webhooks[0].clientConfig: Required value: exactly one of url or service is required
        webhooks[0].admissionReviewVersions: Required value: must specify one of v1, v1beta1
    "#]],
    );
    let hook = json!({
        "name": "guard",
        "rules": [
            {"operations": ["*", "READ"], "apiGroups": ["", "*"], "apiVersions": ["*", ""], "resources": ["*", "pods", "pods/*", "pods/log", "*/scale", "x/scale"], "scope": "World"},
            {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["*/*", ""]},
        ],
        "clientConfig": {"url": "http://user@/x?y=1#z"},
        "sideEffects": "Some",
        "admissionReviewVersions": ["v2", "v2", "V3"],
        "timeoutSeconds": 31,
        "failurePolicy": "Maybe",
        "matchPolicy": "Fuzzy",
        "reinvocationPolicy": "Always",
        "matchConditions": [{"name": "a", "expression": " "}, {"name": "a", "expression": "true"}, {"expression": "true"}],
    });
    check(
        "MutatingWebhookConfiguration",
        json!({"webhooks": [hook.clone(), hook]}),
        expect![[r#"
        webhooks[0].name: Invalid value: "guard": should be a domain with at least three segments separated by dots
        webhooks[0].rules[0].operations: Invalid value: ["*","READ"]: if '*' is present, must not specify other operations
        webhooks[0].rules[0].operations[1]: Unsupported value: "READ": supported values: "*", "CONNECT", "CREATE", "DELETE", "UPDATE"
        webhooks[0].rules[0].apiGroups: Invalid value: ["","*"]: if '*' is present, must not specify other API groups
        webhooks[0].rules[0].apiVersions: Invalid value: ["*",""]: if '*' is present, must not specify other API versions
        webhooks[0].rules[0].apiVersions[1]: Required value
        webhooks[0].rules[0].resources[3]: Invalid value: "pods/log": if 'pods/*' is present, must not specify pods/log
        webhooks[0].rules[0].resources[5]: Invalid value: "x/scale": if '*/scale' is present, must not specify x/scale
        webhooks[0].rules[0].resources: Invalid value: ["*","pods","pods/*","pods/log","*/scale","x/scale"]: if '*' is present, must not specify other resources without subresources
        webhooks[0].rules[0].scope: Unsupported value: "World": supported values: "*", "Cluster", "Namespaced"
        webhooks[0].rules[1].resources[1]: Required value
        webhooks[0].rules[1].resources: Invalid value: ["*/*",""]: if '*/*' is present, must not specify other resources
        webhooks[0].failurePolicy: Unsupported value: "Maybe": supported values: "Fail", "Ignore"
        webhooks[0].matchPolicy: Unsupported value: "Fuzzy": supported values: "Equivalent", "Exact"
        webhooks[0].sideEffects: Unsupported value: "Some": supported values: "None", "NoneOnDryRun"
        webhooks[0].timeoutSeconds: Invalid value: 31: the timeout value must be between 1 and 30 seconds
        webhooks[0].reinvocationPolicy: Unsupported value: "Always": supported values: "IfNeeded", "Never"
        webhooks[0].clientConfig.url: Invalid value: "http": 'https' is the only allowed URL scheme; desired format: https://host[/path]
        webhooks[0].clientConfig.url: Invalid value: "": host must be specified; desired format: https://host[/path]
        webhooks[0].clientConfig.url: Invalid value: "user": user information is not permitted in the URL
        webhooks[0].clientConfig.url: Invalid value: "z": fragments are not permitted in the URL
        webhooks[0].clientConfig.url: Invalid value: "y=1": query parameters are not permitted in the URL
        webhooks[0].matchConditions[0].expression: Required value
        webhooks[0].matchConditions[1].name: Duplicate value: "a"
        webhooks[0].matchConditions[2].name: Required value
        webhooks[0].admissionReviewVersions[1]: Invalid value: "v2": duplicate version
        webhooks[0].admissionReviewVersions[2]: Invalid value: "V3": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        webhooks[0].admissionReviewVersions: Invalid value: ["v2","v2","V3"]: must include at least one of v1, v1beta1
        webhooks[1].name: Invalid value: "guard": should be a domain with at least three segments separated by dots
        webhooks[1].rules[0].operations: Invalid value: ["*","READ"]: if '*' is present, must not specify other operations
        webhooks[1].rules[0].operations[1]: Unsupported value: "READ": supported values: "*", "CONNECT", "CREATE", "DELETE", "UPDATE"
        webhooks[1].rules[0].apiGroups: Invalid value: ["","*"]: if '*' is present, must not specify other API groups
        webhooks[1].rules[0].apiVersions: Invalid value: ["*",""]: if '*' is present, must not specify other API versions
        webhooks[1].rules[0].apiVersions[1]: Required value
        webhooks[1].rules[0].resources[3]: Invalid value: "pods/log": if 'pods/*' is present, must not specify pods/log
        webhooks[1].rules[0].resources[5]: Invalid value: "x/scale": if '*/scale' is present, must not specify x/scale
        webhooks[1].rules[0].resources: Invalid value: ["*","pods","pods/*","pods/log","*/scale","x/scale"]: if '*' is present, must not specify other resources without subresources
        webhooks[1].rules[0].scope: Unsupported value: "World": supported values: "*", "Cluster", "Namespaced"
        webhooks[1].rules[1].resources[1]: Required value
        webhooks[1].rules[1].resources: Invalid value: ["*/*",""]: if '*/*' is present, must not specify other resources
        webhooks[1].failurePolicy: Unsupported value: "Maybe": supported values: "Fail", "Ignore"
        webhooks[1].matchPolicy: Unsupported value: "Fuzzy": supported values: "Equivalent", "Exact"
        webhooks[1].sideEffects: Unsupported value: "Some": supported values: "None", "NoneOnDryRun"
        webhooks[1].timeoutSeconds: Invalid value: 31: the timeout value must be between 1 and 30 seconds
        webhooks[1].reinvocationPolicy: Unsupported value: "Always": supported values: "IfNeeded", "Never"
        webhooks[1].clientConfig.url: Invalid value: "http": 'https' is the only allowed URL scheme; desired format: https://host[/path]
        webhooks[1].clientConfig.url: Invalid value: "": host must be specified; desired format: https://host[/path]
        webhooks[1].clientConfig.url: Invalid value: "user": user information is not permitted in the URL
        webhooks[1].clientConfig.url: Invalid value: "z": fragments are not permitted in the URL
        webhooks[1].clientConfig.url: Invalid value: "y=1": query parameters are not permitted in the URL
        webhooks[1].matchConditions[0].expression: Required value
        webhooks[1].matchConditions[1].name: Duplicate value: "a"
        webhooks[1].matchConditions[2].name: Required value
        webhooks[1].admissionReviewVersions[1]: Invalid value: "v2": duplicate version
        webhooks[1].admissionReviewVersions[2]: Invalid value: "V3": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        webhooks[1].admissionReviewVersions: Invalid value: ["v2","v2","V3"]: must include at least one of v1, v1beta1
        webhooks[1].name: Duplicate value: "guard"
    "#]],
    );
}

#[test]
fn validates_service_path() {
    for (path, expected) in [
        ("", expect![[r#""#]]),
        (
            "//",
            expect![[r#"
            webhooks[0].clientConfig.service.path: Invalid value: "//": segment[0] may not be empty
        "#]],
        ),
        (
            "x",
            expect![[r#"
            webhooks[0].clientConfig.service.path: Invalid value: "x": must start with a '/'
            webhooks[0].clientConfig.service.path: Invalid value: "x": segment[0] may not be empty
        "#]],
        ),
        (
            "/a//B/",
            expect![[r#"
            webhooks[0].clientConfig.service.path: Invalid value: "/a//B/": segment[1] may not be empty
            webhooks[0].clientConfig.service.path: Invalid value: "/a//B/": segment[2]: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        "#]],
        ),
        (
            "é",
            expect![[r#"
            webhooks[0].clientConfig.service.path: Invalid value: "é": must start with a '/'
            webhooks[0].clientConfig.service.path: Invalid value: "é": segment[0] may not be empty
        "#]],
        ),
    ] {
        let obj = with_value(webhooks(), "/webhooks/0/clientConfig/service/path", json!(path));
        check("ValidatingWebhookConfiguration", obj, expected);
    }
    let nothing = with_value(webhooks(), "/webhooks/0/clientConfig", json!({"service": {"port": 70000}}));
    check(
        "ValidatingWebhookConfiguration",
        nothing,
        expect![[r#"
        webhooks[0].clientConfig.service.name: Required value
        webhooks[0].clientConfig.service.namespace: Required value
        webhooks[0].clientConfig.service.port: Invalid value: 70000: port is not valid: must be between 1 and 65535, inclusive
    "#]],
    );
}

#[test]
fn validates_validating_policies() {
    let kind = "ValidatingAdmissionPolicy";
    check_valid(kind, policy());
    check(
        kind,
        json!({"spec": {"paramKind": {}, "matchConstraints": {}}}),
        expect![[r#"
        spec.failurePolicy: Required value
        spec.paramKind.apiVersion: Required value
        spec.paramKind.kind: Required value
        spec.matchConstraints.matchPolicy: Required value
        spec.matchConstraints.namespaceSelector: Required value
        spec.matchConstraints.objectSelector: Required value
        spec.matchConstraints.resourceRules: Required value
        spec.validations: Required value: validations or auditAnnotations must contain at least one item
        spec.auditAnnotations: Required value: validations or auditAnnotations must contain at least one item
    "#]],
    );
    let spec = json!({
        "failurePolicy": "Shrug",
        "paramKind": {"apiVersion": "A/1", "kind": "B_C"},
        "matchConstraints": {"matchPolicy": "Exact", "namespaceSelector": {}, "objectSelector": {}, "resourceRules": [
            {"operations": ["DELETE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "resourceNames": ["a/b", "c", "c"]},
        ]},
        "variables": [{"name": "for", "expression": "1"}, {"name": "ok"}],
        "validations": [{"message": "a\nb", "reason": "Because"}, {"expression": "true", "message": " ", "messageExpression": " "}],
        "auditAnnotations": [{"key": "a b", "valueExpression": "'x'"}, {"key": "k"}, {"key": "k", "valueExpression": "'x'"}],
    });
    check(
        kind,
        json!({"metadata": {"name": "p"}, "spec": spec}),
        expect![[r#"
        spec.failurePolicy: Unsupported value: "Shrug": supported values: "Fail", "Ignore"
        spec.paramKind.apiVersion: Invalid value: "A": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        spec.paramKind.apiVersion: Invalid value: "1": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.paramKind.kind: Invalid value: "B_C": may have mixed case, but should otherwise match: a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.matchConstraints.resourceRules[0].resourceNames[0]: Invalid value: "a/b": may not contain '/'
        spec.matchConstraints.resourceRules[0].resourceNames[2]: Duplicate value: "c"
        spec.variables[0].name: Invalid value: "for": must be a valid CEL identifier
        spec.variables[1].expression: Required value: expression is not specified
        spec.validations[0].expression: Required value: expression is not specified
        spec.validations[0].message: Invalid value: "a\nb": must not contain line breaks
        spec.validations[0].reason: Unsupported value: "Because": supported values: "Forbidden", "Invalid", "RequestEntityTooLarge"
        spec.validations[1].messageExpression: Invalid value: " ": must be non-empty if specified
        spec.validations[1].message: Invalid value: " ": must be non-empty if specified
        spec.auditAnnotations[0].key: Invalid value: "p/a b": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
        spec.auditAnnotations[1].valueExpression: Required value: valueExpression is not specified
        spec.auditAnnotations[2].key: Duplicate value: "k"
    "#]],
    );
    let status = json!({"typeChecking": {"expressionWarnings": [{}]}, "conditions": [{"type": "A", "status": "True"}]});
    check_status(
        kind,
        json!({"status": status}),
        expect![[r#"
        status.typeChecking.expressionWarnings[0].warning: Required value
        status.typeChecking.expressionWarnings[0].fieldRef: Required value
        status.conditions[0].lastTransitionTime: Required value
        status.conditions[0].reason: Required value
    "#]],
    );
}

#[test]
fn validates_policy_bindings() {
    let kind = "ValidatingAdmissionPolicyBinding";
    check_valid(kind, json!({"spec": {"policyName": "p", "validationActions": ["Deny", "Audit"]}}));
    check(
        kind,
        json!({"spec": {}}),
        expect![[r#"
        spec.policyName: Required value
        spec.validationActions: Required value: at least one validation action is required
    "#]],
    );
    let spec = json!({
        "policyName": "P",
        "paramRef": {"name": "a", "selector": {}, "parameterNotFoundAction": "Ask"},
        "validationActions": ["Deny", "Warn", "Warn", "Scold"],
    });
    check(
        kind,
        json!({"spec": spec}),
        expect![[r#"
        spec.policyName: Invalid value: "P": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
        spec.paramRef.name: Forbidden: name and selector are mutually exclusive
        spec.paramRef.selector: Forbidden: name and selector are mutually exclusive
        spec.paramRef.parameterNotFoundAction: Unsupported value: "Ask": supported values: "Deny", "Allow"
        spec.validationActions[2]: Duplicate value: "Warn"
        spec.validationActions[3]: Unsupported value: "Scold": supported values: "Audit", "Deny", "Warn"
        spec.validationActions: Invalid value: ["Deny","Warn","Warn","Scold"]: must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)
    "#]],
    );
    let matching = json!({"matchPolicy": "Exact", "namespaceSelector": {}, "objectSelector": {}, "resourceRules": [
        {"operations": ["DELETE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]},
    ]});
    let spec = json!({"policyName": "p", "paramRef": {}, "matchResources": matching});
    check(
        "MutatingAdmissionPolicyBinding",
        json!({"spec": spec}),
        expect![[r#"
        spec.paramRef: Required value: one of name or selector must be specified
        spec.paramRef.parameterNotFoundAction: Required value
        spec.matchResources.resourceRules.operations: Unsupported value: "DELETE": supported values: "*", "CONNECT", "CREATE", "UPDATE"
    "#]],
    );
}

#[test]
fn validates_mutating_policies() {
    let kind = "MutatingAdmissionPolicy";
    let policy = with_value(policy(), "/spec/validations", Value::Null);
    let policy = with_value(policy, "/spec/reinvocationPolicy", json!("Never"));
    let mutations = json!([{"patchType": "JSONPatch", "jsonPatch": {"expression": "[JSONPatch{op: 'remove', path: '/x'}]"}}]);
    check_valid(kind, with_value(policy.clone(), "/spec/mutations", mutations));
    check(
        kind,
        with_value(policy.clone(), "/spec/reinvocationPolicy", json!("Often")),
        expect![[r#"
        spec.mutations: Required value: mutations must contain at least one item
        spec.reinvocationPolicy: Unsupported value: "Often": supported values: "IfNeeded", "Never"
    "#]],
    );
    let mutations = json!([
        {},
        {"patchType": "Diff"},
        {"patchType": "JSONPatch", "applyConfiguration": {"expression": "x"}},
        {"patchType": "ApplyConfiguration", "applyConfiguration": {}, "jsonPatch": {}},
    ]);
    let policy = with_value(policy, "/spec/matchConstraints/resourceRules/0/operations", json!(["DELETE"]));
    check(
        kind,
        with_value(policy, "/spec/mutations", mutations),
        expect![[r#"
        spec.matchConstraints.resourceRules.operations: Unsupported value: "DELETE": supported values: "*", "CONNECT", "CREATE", "UPDATE"
        spec.mutations[0].patchType: Required value
        spec.mutations[1].patchType: Unsupported value: "Diff": supported values: "ApplyConfiguration", "JSONPatch"
        spec.mutations[2].jsonPatch: Required value: must be specified when patchType is JSONPatch
        spec.mutations[2].applyConfiguration: Invalid value: "{applyConfiguration}": must not be specified when patchType is JSONPatch
        spec.mutations[3].applyConfiguration.expression: Required value
        spec.mutations[3].jsonPatch: Invalid value: "{jsonPatch}": must not be specified when patchType is ApplyConfiguration
    "#]],
    );
}

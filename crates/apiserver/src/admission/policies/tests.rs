//! Requests against an in-process server with admission policies.

use std::sync::Arc;

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use crate::access::User;
use crate::tests::TestServer;
use crate::warning_recorder::WarningRecorder;

const GROUP: &str = "/apis/admissionregistration.k8s.io/v1";
const CONFIG_MAPS: &str = "POST /api/v1/namespaces/default/configmaps?dryRun=All";

struct PolicyTest {
    test_server: TestServer,
}

impl PolicyTest {
    async fn start() -> PolicyTest {
        PolicyTest { test_server: TestServer::start().await }
    }

    /// Replaces the policy and its binding.
    async fn set(&self, kind: &str, spec: Value, binding: Value) -> Result<(), String> {
        let plural = format!("{kind}admissionpolicies").to_lowercase();
        let bindings = format!("{kind}admissionpolicybindings").to_lowercase();
        self.test_server.send(&format!("DELETE {GROUP}/{plural}/p"), json!({})).await;
        self.test_server.send(&format!("DELETE {GROUP}/{bindings}/b"), json!({})).await;
        let mut whole = json!({
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]}
            ]},
        });
        merge(&mut whole, &spec);
        let policy = json!({"metadata": {"name": "p"}, "spec": whole});
        let (code, answer) = self.test_server.send(&format!("POST {GROUP}/{plural}"), policy).await;
        if code != 201 {
            return Err(answer["message"].as_str().unwrap_or_default().to_owned());
        }
        let mut whole = json!({"policyName": "p"});
        if kind == "Validating" {
            whole["validationActions"] = json!(["Deny"]);
        }
        merge(&mut whole, &binding);
        let binding = json!({"metadata": {"name": "b"}, "spec": whole});
        let (code, answer) = self.test_server.send(&format!("POST {GROUP}/{bindings}"), binding).await;
        assert_eq!(code, 201, "{answer}");
        self.wait_for_cache().await;
        Ok(())
    }

    async fn wait_for_cache(&self) {
        self.test_server
            .server
            .wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent)
            .await
            .unwrap();
    }

    async fn send(&self, request: &str, body: Value) -> ((u16, Value), Arc<WarningRecorder>) {
        self.test_server.call_with_recorder(alice(), request, "application/json", &body.to_string()).await
    }

    /// Status code and message.
    async fn create_summary(&self, object: Value) -> String {
        let ((code, answer), recorder) = self.send(CONFIG_MAPS, object).await;
        let mut lines = vec![format!("{code} {}", answer["message"].as_str().unwrap_or_default())];
        if code >= 400 {
            lines[0] += &format!(" ({})", answer["reason"].as_str().unwrap_or_default());
        }
        lines.extend(recorder.warnings().into_iter().map(|warning| format!("warning: {warning}")));
        let audit_annotations = recorder
            .annotations()
            .into_iter()
            .filter(|(key, _)| key.contains("policy") || key.starts_with("p/"));
        lines.extend(audit_annotations.map(|(key, value)| format!("{key}: {value}")));
        lines.join("\n")
    }

    /// Creates a ConfigMap with a validating policy.
    async fn check(&self, spec: Value, binding: Value, object: Value, expected: Expect) {
        let found = match self.set("Validating", spec, binding).await {
            Ok(()) => self.create_summary(object).await,
            Err(message) => message,
        };
        expected.assert_eq(&found);
    }

    /// Data and labels of a ConfigMap after a mutating policy.
    async fn mutate(&self, spec: Value, object: Value, expected: Expect) {
        let mut whole = json!({"reinvocationPolicy": "Never"});
        merge(&mut whole, &spec);
        let found = match self.set("Mutating", whole, json!({})).await {
            Err(message) => message,
            Ok(()) => {
                let ((code, answer), _) = self.send(CONFIG_MAPS, object).await;
                match code {
                    201 => format!("data {} labels {}", answer["data"], answer["metadata"]["labels"]),
                    code => format!(
                        "{code} {} {}",
                        answer["reason"],
                        answer["message"].as_str().unwrap_or_default()
                    ),
                }
            }
        };
        expected.assert_eq(&found);
    }
}

fn merge(into: &mut Value, from: &Value) {
    for (key, value) in from.as_object().expect("specs are objects") {
        into[key] = value.clone();
    }
}

fn alice() -> User {
    User { name: "alice".into(), groups: vec!["system:masters".into()], ..User::default() }
}

fn config_map(name: &str) -> Value {
    json!({"metadata": {"name": name}, "data": {"a": "b"}})
}

fn validations(validations: Value) -> Value {
    json!({"validations": validations})
}

#[tokio::test(flavor = "multi_thread")]
async fn validating_policies_deny_warn_and_audit() {
    let test = PolicyTest::start().await;
    let none = || json!({});
    test.check(
        validations(json!([{"expression": "object.metadata.name != 'x'"}])),
        none(),
        config_map("y"),
        expect!["201 "],
    )
    .await;
    test.check(
        validations(json!([{"expression": "object.metadata.name != 'x'"}])), none(), config_map("x"),
        expect!["422 configmaps \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: failed expression: object.metadata.name != 'x' (Invalid)"],
    ).await;
    test.check(
        validations(json!([{"expression": "false", "message": "never", "reason": "Forbidden"}])), none(), config_map("x"),
        expect!["403 configmaps \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: never (Forbidden)"],
    ).await;
    test.check(
        validations(json!([{"expression": "false", "messageExpression": "'no ' + object.metadata.name + ' for ' + request.userInfo.username"}])),
        json!({"validationActions": ["Warn", "Audit"]}), config_map("x"),
        expect![[r#"
            201 
            warning: Validation failed for ValidatingAdmissionPolicy 'p' with binding 'b': no x for alice
            validation.policy.admission.k8s.io/validation_failure: [{"binding":"b","expressionIndex":0,"message":"no x for alice","policy":"p","validationActions":["Warn","Audit"]}]"#]],
    ).await;
    test.check(
        validations(json!([{"expression": "object.spec.x == 1"}])), none(), config_map("x"),
        expect!["422 configmaps \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: expression 'object.spec.x == 1' resulted in error: no such key: spec (Invalid)"],
    ).await;
    let mut fail_open = validations(json!([{"expression": "object.spec.x == 1"}]));
    fail_open["failurePolicy"] = json!("Ignore");
    test.check(fail_open, none(), config_map("x"), expect!["201 "]).await;
    test.check(
        json!({"validations": [{"expression": "variables.twice == 'xx'", "messageExpression": "variables.twice"}],
            "variables": [{"name": "name", "expression": "object.metadata.name"}, {"name": "twice", "expression": "string(variables.name) + string(variables.name)"}]}),
        none(), config_map("y"),
        expect!["422 configmaps \"y\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: yy (Invalid)"],
    ).await;
    test.check(
        json!({"validations": [{"expression": "false"}], "matchConditions": [{"name": "c", "expression": "object.metadata.name == 'z'"}]}),
        none(), config_map("y"), expect!["201 "],
    ).await;
    test.check(
        json!({"auditAnnotations": [{"key": "who", "valueExpression": "'made by ' + request.userInfo.username"}, {"key": "not", "valueExpression": "null"}]}),
        none(), config_map("y"), expect![[r#"
            201 
            p/who: made by alice"#]],
    ).await;
    test.check(
        validations(json!([{"expression": "namespaceObject.metadata.name == 'default' && authorizer.requestResource.check('create').allowed()"}])),
        none(), config_map("y"), expect!["201 "],
    ).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bindings_select_resources_and_params() {
    let test = PolicyTest::start().await;
    let deny = validations(json!([{"expression": "false", "message": "no"}]));
    let other_namespace = json!({"matchResources": {"namespaceSelector": {"matchLabels": {"nope": "x"}}}});
    test.check(deny.clone(), other_namespace, config_map("x"), expect!["201 "]).await;
    let excluded = json!({"matchResources": {"excludeResourceRules": [
        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*"], "resources": ["*"], "resourceNames": ["x"]}
    ]}});
    test.check(deny, excluded, config_map("x"), expect!["201 "]).await;
    let limits = json!({"paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "validations": [{"expression": "params != null && object.metadata.name.size() <= int(params.data.max)", "messageExpression": "'at most ' + string(params.data.max)"}]});
    let by_name = json!({"paramRef": {"name": "limits", "parameterNotFoundAction": "Deny"}});
    test.check(
        limits.clone(), by_name.clone(), config_map("x"),
        expect!["422 configmaps \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction (Invalid)"],
    ).await;
    let allow_missing = json!({"paramRef": {"name": "limits", "parameterNotFoundAction": "Allow"}});
    test.check(limits.clone(), allow_missing, config_map("x"), expect!["201 "]).await;
    let mut param = config_map("limits");
    param["data"] = json!({"max": "2"});
    param["metadata"]["labels"] = json!({"limits": "yes"});
    let (code, answer) = test.test_server.send("POST /api/v1/namespaces/default/configmaps", param).await;
    assert_eq!(code, 201, "{answer}");
    test.check(limits.clone(), by_name, config_map("xy"), expect!["201 "]).await;
    let selected = json!({"paramRef": {"selector": {"matchLabels": {"limits": "yes"}}, "parameterNotFoundAction": "Deny"}});
    test.check(
        limits, selected, config_map("xyz"),
        expect!["422 configmaps \"xyz\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: at most 2 (Invalid)"],
    ).await;
    let unknown = json!({"paramKind": {"apiVersion": "example.com/v1", "kind": "Limit"}, "validations": [{"expression": "true"}]});
    test.check(
        unknown, json!({"paramRef": {"name": "x", "parameterNotFoundAction": "Deny"}}), config_map("x"),
        expect!["422 configmaps \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: failed to configure binding: failed to find resource referenced by paramKind: 'example.com/v1, Kind=Limit' (Invalid)"],
    ).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_policies_with_invalid_expressions() {
    let test = PolicyTest::start().await;
    let none = || json!({});
    test.check(validations(json!([{"expression": "objekt.x"}])), none(), none(), expect![[r#"
        ValidatingAdmissionPolicy.admissionregistration.k8s.io "p" is invalid: spec.validations[0].expression: Invalid value: "objekt.x": compilation failed: ERROR: <input>:1:1: undeclared reference to 'objekt' (in container '')
         | objekt.x
         | ^"#]]).await;
    test.check(
        validations(json!([{"expression": "1"}, {"expression": "params.x == 1"}])), none(), none(),
        expect![[r#"
            ValidatingAdmissionPolicy.admissionregistration.k8s.io "p" is invalid: [spec.validations[0].expression: Invalid value: "1": must evaluate to bool but got int, spec.validations[1].expression: Invalid value: "params.x == 1": compilation failed: ERROR: <input>:1:1: undeclared reference to 'params' (in container '')
             | params.x == 1
             | ^]"#]],
    ).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mutating_policies_change_objects() {
    let test = PolicyTest::start().await;
    let apply = |expression: &str| json!({"mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}]});
    let patch = |expression: &str| json!({"mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}]});
    test.mutate(
        apply("Object{data: {'c': object.metadata.name}, metadata: Object.metadata{labels: {'l': 'v'}}}"),
        config_map("x"),
        expect![[r#"data {"a":"b","c":"x"} labels {"l":"v"}"#]],
    )
    .await;
    test.mutate(
        patch("[JSONPatch{op: 'test', path: '/data/a', value: 'b'}, JSONPatch{op: 'add', path: '/data/' + jsonpatch.escapeKey('x.y'), value: 'z'}]"),
        config_map("x"), expect![[r#"data {"a":"b","x.y":"z"} labels null"#]],
    ).await;
    test.mutate(
        patch("[JSONPatch{op: 'test', path: '/data/a', value: 'other'}, JSONPatch{op: 'remove', path: '/data/a'}]"),
        config_map("x"), expect![[r#"data {"a":"b"} labels null"#]],
    ).await;
    test.mutate(
        patch("[JSONPatch{op: 'remove', path: '/data/none'}]"), config_map("x"),
        expect![[r#"403 "Invalid" policy 'p' with binding 'b' denied request: JSON Patch: error in remove for path: '/data/none': Unable to remove nonexistent key: none: missing value"#]],
    ).await;
    test.mutate(
        apply("Object{metadata: Object.spec{labels: {'l': 'v'}}}"), config_map("x"),
        expect![[r#"403 "Invalid" policy 'p' with binding 'b' denied request: type mismatch: unexpected type name "Object.spec", expected "Object.metadata", which matches field name path from root Object type"#]],
    ).await;
    test.mutate(
        apply("1"), config_map("x"),
        expect![[r#"MutatingAdmissionPolicy.admissionregistration.k8s.io "p" is invalid: spec.mutations[0].applyConfiguration.expression: Invalid value: "1": must evaluate to Object but got int"#]],
    ).await;
    let mut twice = apply("Object{data: {'n': string(object.data.?n.orValue('')) + 'x'}}");
    twice["reinvocationPolicy"] = json!("IfNeeded");
    test.mutate(twice, config_map("x"), expect![[r#"data {"a":"b","n":"xx"} labels null"#]]).await;
}

#[tokio::test]
async fn counts_policy_results() {
    let test = PolicyTest::start().await;
    let spec = json!({"validations": [
        {"expression": "object.data.a == 'x'"}, {"expression": "object.data.missing == 'x'"},
    ]});
    test.set("Validating", spec, json!({"validationActions": ["Deny", "Audit"]})).await.unwrap();
    test.create_summary(json!({"metadata": {"name": "c"}, "data": {"a": "y"}})).await;
    let spec =
        json!({"failurePolicy": "Ignore", "validations": [{"expression": "object.data.missing == 'x'"}]});
    test.set("Validating", spec, json!({})).await.unwrap();
    test.create_summary(json!({"metadata": {"name": "c"}})).await;
    let mut out = String::new();
    test.test_server.server.policies.print(&mut out);
    let name = "apiserver_validating_admission_policy_check_total";
    let counted: Vec<&str> = out.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect();
    let labels = "policy=\"p\",policy_binding=\"b\"} 1";
    assert_eq!(
        counted,
        [
            format!("{name}{{enforcement_action=\"allow\",error_type=\"invalid_error\",{labels}"),
            format!("{name}{{enforcement_action=\"audit\",error_type=\"invalid_error\",{labels}"),
            format!("{name}{{enforcement_action=\"audit\",error_type=\"no_error\",{labels}"),
            format!("{name}{{enforcement_action=\"deny\",error_type=\"invalid_error\",{labels}"),
            format!("{name}{{enforcement_action=\"deny\",error_type=\"no_error\",{labels}"),
        ]
    );
    assert!(out.contains("apiserver_validating_admission_policy_check_duration_seconds_count"));
}

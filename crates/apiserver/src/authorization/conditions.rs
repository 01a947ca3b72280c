//! Match conditions of authorization webhooks.

use std::sync::LazyLock;

use cel::{Budget, Decl, Env, Program, Type, Variables};
use serde_json::{Value, json};

/// The variable `request`: the spec of a SubjectAccessReview.
static REQUEST: LazyLock<Decl> = LazyLock::new(|| {
    let (text, string_array) =
        (json!({"type": "string"}), json!({"type": "array", "items": {"type": "string"}}));
    let requirement =
        json!({"type": "object", "properties": {"key": text, "operator": text, "values": string_array}});
    let selector = json!({"type": "object", "properties": {
        "rawSelector": text, "requirements": {"type": "array", "items": requirement},
    }});
    let resource = json!({"type": "object", "properties": {
        "namespace": text, "verb": text, "group": text, "version": text, "resource": text, "subresource": text,
        "name": text, "fieldSelector": selector, "labelSelector": selector,
    }});
    let schema = json!({"type": "object", "properties": {
        "resourceAttributes": resource,
        "nonResourceAttributes": {"type": "object", "properties": {"path": text, "verb": text}},
        "user": text, "groups": string_array, "uid": text,
        "extra": {"type": "object", "additionalProperties": string_array},
    }});
    let decl = Decl::from_schema(&schema, false).expect("an object has a declaration");
    decl.with_type_name("kubernetes.SubjectAccessReviewSpec")
});

static ENV: LazyLock<Env> = LazyLock::new(|| Env::new().variable("request", REQUEST.clone()));

/// Compiles a match condition.
pub fn compile(expression: &str) -> Result<Program, String> {
    let program = ENV.compile(expression).map_err(|errors| format!("compilation failed: {errors}"))?;
    match program.output() {
        Type::Bool => Ok(program),
        _ => Err("must evaluate to bool".to_owned()),
    }
}

/// Whether all conditions hold. One that is false decides, whatever errors the others have.
pub fn conditions_match(conditions: &[Program], spec: &Value) -> Result<bool, String> {
    let mut budget = Budget::new(cel::MATCH_CONDITIONS_BUDGET);
    let mut evaluation_error = None;
    for program in conditions {
        let variables = Variables::new().with("request", cel::Value::from_declared(spec, &REQUEST));
        match program.run(&variables, &mut budget) {
            Ok(value) if value.as_bool() == Some(false) => return Ok(false),
            Ok(_) => {}
            Err(failure) => {
                evaluation_error =
                    Some(format!("expression '{}' resulted in error: {failure}", program.source()));
            }
        }
    }
    evaluation_error.map_or(Ok(true), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(expressions: &[&str], expected: Result<bool, &str>) {
        let conditions: Vec<Program> = expressions.iter().map(|text| compile(text).unwrap()).collect();
        let spec = json!({
            "user": "jo", "groups": ["a"], "resourceAttributes": {"verb": "get", "resource": "pods", "namespace": "n"},
        });
        assert_eq!(conditions_match(&conditions, &spec), expected.map_err(str::to_owned));
    }

    #[test]
    fn conditions() {
        check(&[], Ok(true));
        check(&["request.user == 'jo'", "'a' in request.groups"], Ok(true));
        check(
            &["has(request.resourceAttributes) && request.resourceAttributes.namespace == 'kube-system'"],
            Ok(false),
        );
        let missing = "request.nonResourceAttributes.path == '/x'";
        check(&[missing, "false"], Ok(false));
        check(
            &[missing],
            Err(
                "expression 'request.nonResourceAttributes.path == '/x'' resulted in error: no such key: nonResourceAttributes",
            ),
        );
        assert!(
            compile("request.nothing")
                .unwrap_err()
                .starts_with("compilation failed: ERROR: <input>:1:8: undefined field 'nothing'")
        );
        assert_eq!(compile("request.user").unwrap_err(), "must evaluate to bool");
    }
}

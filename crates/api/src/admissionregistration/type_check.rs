//! Type checks the expressions of a ValidatingAdmissionPolicy against the schemas of the matched types.
//! Evaluation is untyped, so the results are only warnings in the policy's status.
//!
//! Upstream: `apiserver/pkg/admission/plugin/policy/validating/typechecking.go`.

use std::collections::{BTreeMap, BTreeSet};

use cel::{Decl, Type};
use serde_json::Value;

use super::expressions::{self, CompositionEnv, OptionalVariables};
use crate::json::JsonExt;

/// The maximum number of types that a policy is checked against, as upstream.
const MAX_TYPES: usize = 10;

/// A kind that is not built in, as described by its API server.
#[derive(Clone, Debug, Default)]
pub struct CustomKind {
    pub group: String,
    pub version: String,
    pub plural: String,
    pub kind: String,
    /// The OpenAPI schema with all references resolved.
    pub schema: Value,
}

/// The API versions, such as `example.com/v1`, of the policy's kinds that are not built in.
pub fn custom_versions(policy: &Value) -> BTreeSet<String> {
    let spec = policy.at("spec");
    let mut versions = BTreeSet::new();
    let mut add = |group: &str, version: &str| {
        let built_in =
            crate::resource_table::RESOURCES.iter().any(|row| row.group == group && row.version == version);
        if !group.is_empty() && !built_in {
            versions.insert(format!("{group}/{version}"));
        }
    };
    for rule in spec.at("matchConstraints").items("resourceRules").iter().filter(|rule| !has_wildcard(rule)) {
        for group in rule.items("apiGroups").iter().filter_map(Value::as_str) {
            rule.items("apiVersions")
                .iter()
                .filter_map(Value::as_str)
                .for_each(|version| add(group, version));
        }
    }
    if let Some((group, version)) = spec.at("paramKind").text("apiVersion").split_once('/') {
        add(group, version);
    }
    versions
}

/// Rules with a wildcard group or version are not type checked.
fn has_wildcard(rule: &Value) -> bool {
    ["apiGroups", "apiVersions"].iter().any(|field| rule.items(field).iter().any(|name| name == "*"))
}

/// Returns the paths of expressions with their warnings. `custom` are the kinds of [`custom_versions`].
pub fn warnings(policy: &Value, custom: &[CustomKind]) -> Vec<(String, String)> {
    let spec = policy.at("spec");
    let types = matched_types(spec, custom);
    let param_kind = spec.at("paramKind");
    let (group, version) = match param_kind.text("apiVersion").split_once('/') {
        Some(parts) => parts,
        None => ("", param_kind.text("apiVersion")),
    };
    let is_params = |kind: &&CustomKind| {
        kind.group == group && kind.version == version && kind.kind == param_kind.text("kind")
    };
    let params = builtin_decl(group, version, param_kind.text("kind"))
        .or_else(|| custom.iter().find(is_params)?.decl())
        .unwrap_or_else(|| Type::Dyn.into());
    let optional_variables =
        OptionalVariables { params: spec.has("paramKind"), authorizer: true, patches: false };
    let mut found = Vec::new();
    for (i, validation) in spec.items("validations").iter().enumerate() {
        for field in ["expression", "messageExpression"] {
            let expression = validation.text(field);
            let type_errors: Vec<String> = types
                .iter()
                .filter(|_| !expression.is_empty())
                .filter_map(|(name, decl)| {
                    let env = expressions::env_with_types(optional_variables, decl.clone(), params.clone());
                    let mut composition_env = CompositionEnv::default();
                    for variable in spec.items("variables") {
                        // An error in a variable is reported by the expressions that use the variable.
                        let _ = composition_env.add(&env, variable.text("name"), variable.text("expression"));
                    }
                    let error = expressions::compile(&composition_env.env(&env), expression, &[]).err()?;
                    Some(format!("{name}: {error}\n"))
                })
                .collect();
            if !type_errors.is_empty() {
                found.push((format!("spec.validations[{i}].{field}"), type_errors.join("\n")));
            }
        }
    }
    found
}

/// The types that the policy's rules name explicitly, sorted.
fn matched_types(spec: &Value, custom: &[CustomKind]) -> BTreeMap<String, Decl> {
    let mut types = BTreeMap::new();
    for rule in spec.at("matchConstraints").items("resourceRules").iter().filter(|rule| !has_wildcard(rule)) {
        let named =
            |field: &str, name: &str| rule.items(field).iter().any(|item| item.as_str() == Some(name));
        let mut add =
            |group: &str, version: &str, plural: &str, kind: &str, decl: &dyn Fn() -> Option<Decl>| {
                let is_matched =
                    named("apiGroups", group) && named("apiVersions", version) && named("resources", plural);
                if is_matched
                    && types.len() < MAX_TYPES
                    && let Some(decl) = decl()
                {
                    types.insert(format!("{group}/{version}, Kind={kind}"), decl);
                }
            };
        for row in crate::resource_table::RESOURCES {
            let (group, version, kind) = (row.group, row.version, row.kind);
            add(group, version, row.plural, kind, &|| builtin_decl(group, version, kind));
        }
        for kind in custom {
            add(&kind.group, &kind.version, &kind.plural, &kind.kind, &|| kind.decl());
        }
    }
    types
}

impl CustomKind {
    fn decl(&self) -> Option<Decl> {
        Some(Decl::from_schema(&self.schema, true)?.with_type_name(&self.kind))
    }
}

fn builtin_decl(group: &str, version: &str, kind: &str) -> Option<Decl> {
    let table = schema::kubernetes();
    let ty = table.type_by_kind(group, version, kind)?;
    Some(Decl::from_table(table, ty).with_type_name(kind))
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(expression: &str, expected: Expect) {
        let policy = json!({"spec": {
            "matchConstraints": {"resourceRules": [
                {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments", "*"]}
            ]},
            "variables": [{"name": "replicas", "expression": "object.spec.replicas"}],
            "validations": [{"expression": expression}],
        }});
        let found: Vec<String> = warnings(&policy, &[])
            .into_iter()
            .map(|(field, warning)| format!("{field}\n{warning}"))
            .collect();
        expected.assert_eq(&found.join("\n"));
    }

    #[test]
    fn checks_expressions_for_custom_resources() {
        let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"n": {"type": "integer"}}}}});
        let kind = |kind: &str, plural: &str| CustomKind {
            group: "x.io".into(),
            version: "v1".into(),
            plural: plural.into(),
            kind: kind.into(),
            schema: schema.clone(),
        };
        let policy = json!({"spec": {
            "paramKind": {"apiVersion": "x.io/v1", "kind": "Limit"},
            "matchConstraints": {"resourceRules": [
                {"apiGroups": ["x.io", "apps"], "apiVersions": ["v1"], "resources": ["things"]},
                {"apiGroups": ["*"], "apiVersions": ["v2"], "resources": ["things"]},
            ]},
            "validations": [{"expression": "object.spec.n > params.spec.n"}, {"expression": "object.spec.m > 1"}],
        }});
        assert_eq!(custom_versions(&policy), BTreeSet::from(["x.io/v1".to_owned()]));
        let found = warnings(&policy, &[kind("Thing", "things"), kind("Limit", "limits")]);
        assert_eq!(found.len(), 1);
        assert!(found[0].1.starts_with("x.io/v1, Kind=Thing: compilation failed: "), "{found:?}");
    }

    #[test]
    fn reports_type_errors_in_expressions() {
        check("object.spec.replicas > 1 && variables.replicas < 5", expect![""]);
        check(
            "object.spec.replicas > '1'",
            expect![[r#"
            spec.validations[0].expression
            apps/v1, Kind=Deployment: compilation failed: ERROR: <input>:1:22: found no matching overload for '_>_' applied to '(int, string)'
             | object.spec.replicas > '1'
             | .....................^
        "#]],
        );
        check(
            "variables.replicas == 'x'",
            expect![[r#"
            spec.validations[0].expression
            apps/v1, Kind=Deployment: compilation failed: ERROR: <input>:1:20: found no matching overload for '_==_' applied to '(int, string)'
             | variables.replicas == 'x'
             | ...................^
        "#]],
        );
    }
}

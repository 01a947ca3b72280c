//! What is odd about a validating policy's expressions, given the types of the objects they are about. They are
//! evaluated without types, so this is advice, for the policy's status.

use std::collections::BTreeMap;

use cel::{Decl, Type};
use serde_json::Value;

use super::expressions::{self, Composed, Names};
use crate::json::Json;

/// A policy's rules may name many types; so many are looked at.
const MOST_TYPES: usize = 10;

/// Whether the policy names kinds that are not built in, whose definitions are needed to know their types.
pub fn wants_definitions(policy: &Value) -> bool {
    let built_in = |group: &str| crate::table::RESOURCES.iter().any(|row| row.group == group);
    let rules = policy.at("spec").at("matchConstraints").items("resourceRules").iter();
    let mut groups = rules.flat_map(|rule| rule.items("apiGroups")).filter_map(Value::as_str);
    groups.any(|group| group != "*" && !built_in(group))
}

/// The paths of expressions, each with what is odd about it. `definitions` are CustomResourceDefinitions.
pub fn warnings(policy: &Value, definitions: &[Value]) -> Vec<(String, String)> {
    let spec = policy.at("spec");
    let types = types(spec, definitions);
    let param_kind = spec.at("paramKind");
    let (group, version) = match param_kind.text("apiVersion").split_once('/') {
        Some(parts) => parts,
        None => ("", param_kind.text("apiVersion")),
    };
    let params = decl(group, version, param_kind.text("kind")).unwrap_or_else(|| Type::Dyn.into());
    let names = Names { params: spec.has("paramKind"), authorizer: true, patches: false };
    let mut found = Vec::new();
    for (i, validation) in spec.items("validations").iter().enumerate() {
        for field in ["expression", "messageExpression"] {
            let expression = validation.text(field);
            let odd: Vec<String> = types
                .iter()
                .filter(|_| !expression.is_empty())
                .filter_map(|(name, decl)| {
                    let env = expressions::env_of(names, decl.clone(), params.clone());
                    let mut composed = Composed::default();
                    for variable in spec.items("variables") {
                        // What is wrong with a variable shows where it is used.
                        let _ = composed.add(&env, variable.text("name"), variable.text("expression"));
                    }
                    let error = expressions::compile(&composed.env(&env), expression, &[]).err()?;
                    Some(format!("{name}: {error}\n"))
                })
                .collect();
            if !odd.is_empty() {
                found.push((format!("spec.validations[{i}].{field}"), odd.join("\n")));
            }
        }
    }
    found
}

/// The types of the kinds that the policy's rules name one by one, in order.
fn types(spec: &Value, definitions: &[Value]) -> BTreeMap<String, Decl> {
    let mut types = BTreeMap::new();
    for rule in spec.at("matchConstraints").items("resourceRules") {
        let named =
            |field: &str, name: &str| rule.items(field).iter().any(|item| item.as_str() == Some(name));
        // A rule about everything is about nothing in particular.
        if ["apiGroups", "apiVersions"].iter().any(|field| named(field, "*")) {
            continue;
        }
        let mut add =
            |group: &str, version: &str, plural: &str, kind: &str, decl: &dyn Fn() -> Option<Decl>| {
                let wanted =
                    named("apiGroups", group) && named("apiVersions", version) && named("resources", plural);
                if wanted
                    && types.len() < MOST_TYPES
                    && let Some(decl) = decl()
                {
                    types.insert(format!("{group}/{version}, Kind={kind}"), decl);
                }
            };
        for row in crate::table::RESOURCES {
            let (group, version, kind) = (row.group, row.version, row.kind);
            add(group, version, row.plural, kind, &|| decl(group, version, kind));
        }
        for definition in definitions.iter().map(|definition| definition.at("spec")) {
            let (plural, kind) = (definition.at("names").text("plural"), definition.at("names").text("kind"));
            for version in definition.items("versions") {
                let schema = version.at("schema").at("openAPIV3Schema");
                let decl = || Some(Decl::from_schema(schema, true)?.named(kind));
                add(definition.text("group"), version.text("name"), plural, kind, &decl);
            }
        }
    }
    types
}

fn decl(group: &str, version: &str, kind: &str) -> Option<Decl> {
    let table = schema::kubernetes();
    let ty = table.kind(group, version, kind)?;
    Some(Decl::from_table(table, ty).named(kind))
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
    fn custom_kinds_have_types_too() {
        let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"n": {"type": "integer"}}}}});
        let definition = json!({"spec": {"group": "x.io", "names": {"plural": "things", "kind": "Thing"},
            "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]}});
        let policy = json!({"spec": {
            "matchConstraints": {"resourceRules": [{"apiGroups": ["x.io"], "apiVersions": ["v1"], "resources": ["things"]}]},
            "validations": [{"expression": "object.spec.n > 1"}, {"expression": "object.spec.m > 1"}],
        }});
        assert!(wants_definitions(&policy));
        let found = warnings(&policy, &[definition]);
        assert_eq!(found.len(), 1);
        assert!(found[0].1.starts_with("x.io/v1, Kind=Thing: compilation failed: "), "{found:?}");
    }

    #[test]
    fn expressions_are_compared_with_types() {
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

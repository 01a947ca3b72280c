//! What is odd about a validating policy's expressions, given the types of the objects they are about. They are
//! evaluated without types, so this is advice, for the policy's status.

use std::collections::BTreeSet;

use cel::{Decl, Type};
use serde_json::Value;

use super::expressions::{self, Composed, Names};
use crate::json::Json;

/// A policy's rules may name many types; so many are looked at.
const MOST_TYPES: usize = 10;

/// The paths of expressions, each with what is odd about it.
pub fn warnings(policy: &Value) -> Vec<(String, String)> {
    let spec = policy.at("spec");
    let types: Vec<(String, Decl)> = kinds(spec)
        .into_iter()
        .filter_map(|(group, version, kind)| {
            let name = format!("{group}/{version}, Kind={kind}");
            Some((name, decl(&group, &version, &kind)?))
        })
        .collect();
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

/// The kinds that the policy's rules name one by one, in order.
fn kinds(spec: &Value) -> BTreeSet<(String, String, String)> {
    let mut kinds = BTreeSet::new();
    for rule in spec.at("matchConstraints").items("resourceRules") {
        let named =
            |field: &str, name: &str| rule.items(field).iter().any(|item| item.as_str() == Some(name));
        // A rule about everything is about nothing in particular.
        if ["apiGroups", "apiVersions"].iter().any(|field| named(field, "*")) {
            continue;
        }
        for row in crate::table::RESOURCES {
            let wanted = named("apiGroups", row.group)
                && named("apiVersions", row.version)
                && named("resources", row.plural);
            if wanted && kinds.len() < MOST_TYPES {
                kinds.insert((row.group.to_owned(), row.version.to_owned(), row.kind.to_owned()));
            }
        }
    }
    kinds
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
        let found: Vec<String> =
            warnings(&policy).into_iter().map(|(field, warning)| format!("{field}\n{warning}")).collect();
        expected.assert_eq(&found.join("\n"));
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

//! Compiles the CEL rules of a schema and checks their estimated cost.

use serde_json::Value;

use super::internal_format;
use crate::custom::validation_rules::{compile, schema_decl};
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;

/// The maximum estimated cost of a rule.
const MAX_RULE_COST: u64 = 10_000_000;
/// The maximum estimated cost of all rules of a schema.
const MAX_TOTAL_COST: u64 = 100_000_000;
/// The number of the most expensive rules that are reported.
const MAX_REPORTED_RULES: usize = 4;

/// Checks the CEL expressions of a schema that has no other errors.
pub(super) fn validate_expressions(schema: &Value, path: &Path, errors: &mut ErrorList) {
    let mut validator = CostValidator { total: 0, expensive: Vec::new(), errors };
    validator.validate_schema(
        schema,
        path,
        CostContext { root: true, max_count: Some(1), uncorrelatable_path: None },
    );
    let CostValidator { total, mut expensive, errors } = validator;
    if total <= MAX_TOTAL_COST {
        return;
    }
    expensive.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
    for (_, path) in expensive.iter().take(MAX_REPORTED_RULES) {
        let reason =
            "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema";
        errors.forbidden(path, reason);
    }
    let what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema";
    errors.forbidden(path, &cost_error_message(what, total, MAX_TOTAL_COST));
}

/// The properties of the current position in the schema that cost and validity of rules depend on.
#[derive(Clone, Copy)]
struct CostContext<'p> {
    root: bool,
    /// The maximum number of times the value can occur in an object; `None` if unbounded.
    max_count: Option<u64>,
    /// The path of the enclosing list whose items cannot be correlated with old items.
    uncorrelatable_path: Option<&'p Path>,
}

struct CostValidator<'e> {
    total: u64,
    expensive: Vec<(u64, Path)>,
    errors: &'e mut ErrorList,
}

impl CostValidator<'_> {
    fn validate_schema(&mut self, schema: &Value, path: &Path, context: CostContext<'_>) {
        let child_context = |multiplier: Option<u64>| {
            let max_count = context.max_count.zip(multiplier).map(|(a, b)| a.saturating_mul(b));
            CostContext { root: false, max_count, ..context }
        };
        let additional = schema.at("additionalProperties");
        if additional.is_object() {
            let max_count = schema.int("maxProperties").map(|max| u64::try_from(max).unwrap_or(0));
            self.validate_schema(additional, &path.child("additionalProperties"), child_context(max_count));
        }
        for (name, property) in schema.entries("properties") {
            self.validate_schema(property, &path.child("properties").key(name), child_context(Some(1)));
        }
        if schema.at("items").is_object() {
            let max_count = schema.int("maxItems").map(|max| u64::try_from(max).unwrap_or(0));
            let mut context = child_context(max_count);
            if schema.text("x-kubernetes-list-type") != "map" {
                context.uncorrelatable_path = Some(path);
            }
            self.validate_schema(schema.at("items"), &path.child("items"), context);
        }
        if !schema.items("x-kubernetes-validations").is_empty() {
            self.validate_rules(schema, &path.child("x-kubernetes-validations"), context);
        }
    }

    fn validate_rules(&mut self, schema: &Value, path: &Path, context: CostContext<'_>) {
        let Some(decl) = schema_decl(schema, context.root) else {
            self.errors.internal(
                path,
                "internal error: failed to construct type information for x-kubernetes-validations rules: unable to convert structural schema to CEL declarations",
            );
            return;
        };
        let max_count = context.max_count.unwrap_or_else(|| decl.max_items_in_request());
        let sources = schema.items("x-kubernetes-validations");
        for (i, (rule, source)) in compile(schema, &decl).iter().zip(sources).enumerate() {
            let at = path.index(i);
            match &rule.program {
                Ok(program) => {
                    let cost = program.estimate().max.saturating_mul(max_count);
                    self.add_cost("estimated rule cost", cost, at.child("rule"));
                }
                Err(reason) => self.invalid(&at.child("rule"), source, reason),
            }
            match &rule.message_program {
                Some(Ok(program)) => {
                    let cost = program.estimate().max;
                    self.add_cost("estimated messageExpression cost", cost, at.child("messageExpression"));
                }
                Some(Err(reason)) => self.invalid(&at.child("messageExpression"), source, reason),
                None => {}
            }
            if rule.uses_old_self {
                if let Some(within) = context.uncorrelatable_path {
                    let reason = format!(
                        "oldSelf cannot be used on the uncorrelatable portion of the schema within {within}"
                    );
                    self.errors.invalid(&at.child("rule"), source.text("rule"), &reason);
                }
            } else if let Some(optional) = source.at("optionalOldSelf").as_bool() {
                let reason = "may not be set if oldSelf is not used in rule";
                self.errors.invalid(&at.child("optionalOldSelf"), optional, reason);
            }
        }
    }

    fn add_cost(&mut self, what: &str, cost: u64, path: Path) {
        if cost > MAX_RULE_COST {
            self.errors.forbidden(&path, &cost_error_message(what, cost, MAX_RULE_COST));
        }
        self.total = self.total.saturating_add(cost);
        if cost >= MAX_TOTAL_COST / 100 {
            self.expensive.push((cost, path));
        }
    }

    /// Reports an error with the rule in its internal form.
    fn invalid(&mut self, path: &Path, rule: &Value, reason: &str) {
        // Go's `encoding/json` escapes these HTML characters.
        let rendered = internal_format::format_rule(rule)
            .replace('&', "\\u0026")
            .replace('<', "\\u003c")
            .replace('>', "\\u003e");
        let message = format!("Invalid value: {rendered}: {reason}");
        self.errors.push(ErrorType::Invalid, path, message);
    }
}

fn cost_error_message(what: &str, cost: u64, limit: u64) -> String {
    let factor = cost as f64 / limit as f64;
    let factor = match factor {
        factor if factor > 100.0 => "more than 100x".to_owned(),
        // More digits, so that a small excess is not printed as a factor of 1.0.
        factor if factor < 1.5 => format!("{factor:.6}x"),
        factor => format!("{factor:.1}x"),
    };
    format!(
        "{what} exceeds budget by factor of {factor} (try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)"
    )
}

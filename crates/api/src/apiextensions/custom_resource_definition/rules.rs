//! The expressions of CEL rules: whether they compile, and whether what they can cost is bearable.

use serde_json::Value;

use super::inner;
use crate::custom::rules::{compile, declared};
use crate::field::{Errors, Path, Reason};
use crate::json::Json;

/// What one rule may cost at most, by estimate.
const RULE_LIMIT: u64 = 10_000_000;
/// What all rules of a schema may cost together.
const SCHEMA_LIMIT: u64 = 100_000_000;
/// How many of the most expensive rules are named.
const NAMED: usize = 4;

/// Checks the expressions of a schema that is otherwise sound.
pub(super) fn expressions(schema: &Value, path: &Path, errors: &mut Errors) {
    let mut judge = Judge { total: 0, expensive: Vec::new(), errors };
    judge.schema(schema, path, Place { root: true, times: Some(1), uncorrelatable: None });
    let Judge { total, mut expensive, errors } = judge;
    if total <= SCHEMA_LIMIT {
        return;
    }
    expensive.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
    for (_, path) in expensive.iter().take(NAMED) {
        let why = "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema";
        errors.forbidden(path, why);
    }
    let what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema";
    errors.forbidden(path, &too_expensive(what, total, SCHEMA_LIMIT));
}

/// Where a schema stands, as far as its rules depend on it.
#[derive(Clone, Copy)]
struct Place<'p> {
    root: bool,
    /// How often the value can be there; `None` if nothing limits it.
    times: Option<u64>,
    /// The list around it whose items cannot be told apart.
    uncorrelatable: Option<&'p Path>,
}

struct Judge<'e> {
    total: u64,
    expensive: Vec<(u64, Path)>,
    errors: &'e mut Errors,
}

impl Judge<'_> {
    fn schema(&mut self, schema: &Value, path: &Path, place: Place<'_>) {
        let inside = |schema_times: Option<u64>| {
            let times = place.times.zip(schema_times).map(|(a, b)| a.saturating_mul(b));
            Place { root: false, times, ..place }
        };
        let additional = schema.at("additionalProperties");
        if additional.is_object() {
            let times = schema.int("maxProperties").map(|max| u64::try_from(max).unwrap_or(0));
            self.schema(additional, &path.at("additionalProperties"), inside(times));
        }
        for (name, property) in schema.entries("properties") {
            self.schema(property, &path.at("properties").key(name), inside(Some(1)));
        }
        if schema.at("items").is_object() {
            let times = schema.int("maxItems").map(|max| u64::try_from(max).unwrap_or(0));
            let mut place = inside(times);
            if schema.text("x-kubernetes-list-type") != "map" {
                place.uncorrelatable = Some(path);
            }
            self.schema(schema.at("items"), &path.at("items"), place);
        }
        if !schema.items("x-kubernetes-validations").is_empty() {
            self.rules(schema, &path.at("x-kubernetes-validations"), place);
        }
    }

    fn rules(&mut self, schema: &Value, path: &Path, place: Place<'_>) {
        let Some(decl) = declared(schema, place.root) else {
            self.errors.internal(
                path,
                "internal error: failed to construct type information for x-kubernetes-validations rules: unable to convert structural schema to CEL declarations",
            );
            return;
        };
        let times = place.times.unwrap_or_else(|| decl.most_in_a_request());
        let sources = schema.items("x-kubernetes-validations");
        for (i, (rule, source)) in compile(schema, &decl).iter().zip(sources).enumerate() {
            let at = path.index(i);
            match &rule.program {
                Ok(program) => {
                    let cost = program.estimate().max.saturating_mul(times);
                    self.cost("estimated rule cost", cost, at.at("rule"));
                }
                Err(why) => self.invalid(&at.at("rule"), source, why),
            }
            match &rule.message_program {
                Some(Ok(program)) => {
                    let cost = program.estimate().max;
                    self.cost("estimated messageExpression cost", cost, at.at("messageExpression"));
                }
                Some(Err(why)) => self.invalid(&at.at("messageExpression"), source, why),
                None => {}
            }
            if rule.uses_old_self {
                if let Some(within) = place.uncorrelatable {
                    let why = format!(
                        "oldSelf cannot be used on the uncorrelatable portion of the schema within {within}"
                    );
                    self.errors.invalid(&at.at("rule"), source.text("rule"), &why);
                }
            } else if let Some(optional) = source.at("optionalOldSelf").as_bool() {
                let why = "may not be set if oldSelf is not used in rule";
                self.errors.invalid(&at.at("optionalOldSelf"), optional, why);
            }
        }
    }

    fn cost(&mut self, what: &str, cost: u64, path: Path) {
        if cost > RULE_LIMIT {
            self.errors.forbidden(&path, &too_expensive(what, cost, RULE_LIMIT));
        }
        self.total = self.total.saturating_add(cost);
        if cost >= SCHEMA_LIMIT / 100 {
            self.expensive.push((cost, path));
        }
    }

    /// The whole rule is shown, as upstream's inner form of it.
    fn invalid(&mut self, path: &Path, rule: &Value, why: &str) {
        // Go's JSON has no signs in it that HTML would take for its own.
        let shown = inner::rule(rule).replace('&', "\\u0026").replace('<', "\\u003c").replace('>', "\\u003e");
        let message = format!("Invalid value: {shown}: {why}");
        self.errors.push(Reason::Invalid, path, message);
    }
}

fn too_expensive(what: &str, cost: u64, limit: u64) -> String {
    let factor = cost as f64 / limit as f64;
    let factor = match factor {
        factor if factor > 100.0 => "more than 100x".to_owned(),
        // So that nothing exceeds by a factor of 1.0.
        factor if factor < 1.5 => format!("{factor:.6}x"),
        factor => format!("{factor:.1}x"),
    };
    format!(
        "{what} exceeds budget by factor of {factor} (try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)"
    )
}

//! Compiles and evaluates the CEL rules of a schema (`x-kubernetes-validations`).

use std::collections::BTreeMap;
use std::sync::Arc;

use cel::{Budget, Decl, Env, EvalError, Program, RUNTIME_BUDGET, Type, Variables};
use serde_json::Value;

use crate::apiextensions::values;
use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt as _;

/// The type name of `self`. It is not part of the API.
const SELF_TYPE: &str = "selfType";
/// Maximum length of the result of a message expression.
const MAX_MESSAGE_BYTES: usize = 5 * 1024;
const OUT_OF_BUDGET: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";

/// The rules of a schema and of its subschemas.
pub struct SchemaRules {
    own_rules: Vec<SchemaRule>,
    /// The CEL declaration of the value; `None` without rules.
    decl: Option<Decl>,
    /// The `type` of the schema.
    kind: String,
    items: Option<Box<SchemaRules>>,
    additional: Option<Box<SchemaRules>>,
    properties: BTreeMap<String, SchemaRules>,
}

/// A compiled rule.
pub struct SchemaRule {
    text: String,
    message: String,
    reason: Option<String>,
    /// The path of errors relative to the value (`fieldPath`).
    field_path: String,
    optional_old_self: bool,
    /// Whether the expression uses `oldSelf`.
    pub uses_old_self: bool,
    /// The compiled rule or the compile error.
    pub program: Result<Program, String>,
    /// The compiled message expression or its compile error.
    pub message_program: Option<Result<Program, String>>,
}

impl std::fmt::Debug for SchemaRules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rules({} and below)", self.own_rules.len())
    }
}

/// The CEL declaration of the values of a schema. `root` marks the custom resource itself, which has
/// metadata.
pub fn schema_decl(schema: &Value, root: bool) -> Option<Decl> {
    let root = root || schema.flag("x-kubernetes-embedded-resource");
    Decl::from_schema(schema, root).map(|decl| decl.with_type_name(SELF_TYPE))
}

/// Compiles the rules of this schema, without those of its subschemas.
pub fn compile(schema: &Value, decl: &Decl) -> Vec<SchemaRule> {
    let env = Env::new().variable("self", decl.clone()).variable("oldSelf", decl.clone());
    let optional = Type::optional(decl.ty.clone());
    let optional_env = Env::new().variable("self", decl.clone()).variable("oldSelf", optional);
    let rules = schema.items("x-kubernetes-validations").iter();
    rules
        .map(|rule| SchemaRule::new(rule, if rule.flag("optionalOldSelf") { &optional_env } else { &env }))
        .collect()
}

impl SchemaRule {
    fn new(rule: &Value, env: &Env) -> SchemaRule {
        let program = match env.compile(rule.text("rule")) {
            Err(errors) => Err(format!("compilation failed: {errors}")),
            Ok(program) if *program.output() != Type::Bool => {
                Err("cel expression must evaluate to a bool".to_owned())
            }
            Ok(program) => Ok(program),
        };
        let expression = rule.text("messageExpression");
        let message_program = (!expression.is_empty()).then(|| match env.compile(expression) {
            Err(errors) => Err(format!("messageExpression compilation failed: {errors}")),
            Ok(program) if *program.output() != Type::String => {
                Err("messageExpression must evaluate to a string".to_owned())
            }
            Ok(program) => Ok(program),
        });
        SchemaRule {
            text: rule.text("rule").trim().to_owned(),
            message: rule.text("message").trim().to_owned(),
            reason: rule.at("reason").as_str().map(str::to_owned),
            field_path: normalize_field_path(rule.text("fieldPath")),
            optional_old_self: rule.flag("optionalOldSelf"),
            uses_old_self: program.as_ref().is_ok_and(|program| program.references_variable("oldSelf")),
            program,
            message_program,
        }
    }

    /// The text for errors about the rule itself.
    fn display_name(&self) -> &str {
        if self.message.is_empty() { &self.text } else { &self.message }
    }
}

/// Formats a field path: `.a['b'].c` becomes `a.b.c`.
fn normalize_field_path(path: &str) -> String {
    let mut out = Path::root();
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(child) = rest.strip_prefix("['") {
            let Some((name, after)) = child.split_once("']") else { break };
            out = out.child(&name.replace("\\'", "'"));
            rest = after;
        } else {
            rest = rest.strip_prefix('.').unwrap_or(rest);
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            if end == 0 {
                break;
            }
            out = out.child(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out.as_str().to_owned()
}

/// The old and new state of a value, and of the nearest enclosing value with a known old state. With
/// ratcheting, rules are not evaluated for unchanged values.
#[derive(Clone, Copy, Default)]
struct OldValue<'v> {
    current: Option<(&'v Value, &'v Value)>,
    parent: Option<(&'v Value, &'v Value)>,
}

impl<'v> OldValue<'v> {
    fn is_unchanged(self) -> bool {
        self.current.or(self.parent).is_some_and(|(old, new)| old == new)
    }

    fn field(self, name: &str) -> OldValue<'v> {
        let Some((old, new)) = self.current else { return self };
        if self.parent.is_none() && matches!(name, "apiVersion" | "kind") {
            return OldValue::default();
        }
        let child = old.is_object().then(|| (old.at(name), new.at(name)));
        OldValue { current: child, parent: self.current }
    }

    fn item(self, schema: &Value, item: &'v Value) -> OldValue<'v> {
        let Some((old, _)) = self.current else { return self };
        let child = values::find_old_item(schema, old, item).map(|old| (old, item));
        OldValue { current: child, parent: self.current }
    }
}

impl SchemaRules {
    /// Compiles the rules of a schema and its subschemas; `None` if there are none.
    pub(super) fn compile_tree(schema: &Value, root: bool) -> Option<SchemaRules> {
        let inner = |name: &str| {
            let child = schema.at(name);
            child.is_object().then(|| SchemaRules::compile_tree(child, false)).flatten().map(Box::new)
        };
        let properties: BTreeMap<String, SchemaRules> = schema
            .entries("properties")
            .filter_map(|(name, property)| {
                Some((name.to_owned(), SchemaRules::compile_tree(property, false)?))
            })
            .collect();
        let (items, additional) = (inner("items"), inner("additionalProperties"));
        let has_own = !schema.items("x-kubernetes-validations").is_empty();
        let decl = if has_own { schema_decl(schema, root) } else { None };
        let own_rules = decl.as_ref().map(|decl| compile(schema, decl)).unwrap_or_default();
        let has_rules =
            !own_rules.is_empty() || items.is_some() || additional.is_some() || !properties.is_empty();
        has_rules.then(|| SchemaRules {
            own_rules,
            decl,
            kind: schema.text("type").to_owned(),
            items,
            additional,
            properties,
        })
    }

    /// Reports the violated rules of an object.
    pub(super) fn check(&self, schema: &Value, value: &Value, old: Option<&Value>, errors: &mut ErrorList) {
        let mut check = RuleValidator { budget: Budget::new(RUNTIME_BUDGET), errors };
        let before = OldValue { current: old.map(|old| (old, value)), parent: None };
        // The error has been reported. It only stops the traversal.
        let _ = check.validate_value(self, schema, value, old, before, &Path::root());
    }
}

/// The cost budget is exhausted, so validation stops.
struct BudgetExhausted;

struct RuleValidator<'e> {
    budget: Budget,
    errors: &'e mut ErrorList,
}

impl RuleValidator<'_> {
    fn validate_value(
        &mut self,
        rules: &SchemaRules,
        schema: &Value,
        value: &Value,
        old: Option<&Value>,
        before: OldValue<'_>,
        path: &Path,
    ) -> Result<(), BudgetExhausted> {
        if value.is_null() {
            return Ok(());
        }
        let old = old.filter(|old| !old.is_null());
        if let Some(decl) = &rules.decl {
            self.validate_own_rules(rules, decl, value, old, before, path)?;
        }
        match value {
            Value::Object(map) => {
                for (name, child) in map {
                    let property = rules.properties.get(name);
                    let (inner, child_schema, at) = match (property, &rules.additional) {
                        (Some(inner), _) => (inner, schema.at("properties").at(name), path.child(name)),
                        (None, Some(inner)) => (&**inner, schema.at("additionalProperties"), path.key(name)),
                        (None, None) => continue,
                    };
                    let old = old.and_then(|old| old.get(name));
                    self.validate_value(inner, child_schema, child, old, before.field(name), &at)?;
                }
            }
            Value::Array(items) => {
                let Some(inner) = &rules.items else { return Ok(()) };
                for (i, item) in items.iter().enumerate() {
                    let old = old.and_then(|old| values::find_old_item(schema, old, item));
                    let before = before.item(schema, item);
                    self.validate_value(inner, schema.at("items"), item, old, before, &path.index(i))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Evaluates the rules of the value itself.
    fn validate_own_rules(
        &mut self,
        rules: &SchemaRules,
        decl: &Decl,
        value: &Value,
        old: Option<&Value>,
        before: OldValue<'_>,
        path: &Path,
    ) -> Result<(), BudgetExhausted> {
        if self.budget.remaining().unwrap_or(0) == 0 {
            self.errors.invalid(path, rules.kind.as_str(), OUT_OF_BUDGET);
            return Err(BudgetExhausted);
        }
        for rule in &rules.own_rules {
            let program = match &rule.program {
                Ok(program) => program,
                Err(reason) => {
                    self.errors.invalid(path, rules.kind.as_str(), &format!("rule compile error: {reason}"));
                    continue;
                }
            };
            if rule.uses_old_self && old.is_none() && !rule.optional_old_self {
                continue;
            }
            let variables = variables(rule, decl, value, old);
            let result = program.run(&variables, &mut self.budget);
            if self.budget.is_exhausted() {
                self.errors.invalid(path, rules.kind.as_str(), OUT_OF_BUDGET);
                return Err(BudgetExhausted);
            }
            let name = rule.display_name();
            match result {
                Ok(result) if result.as_bool() == Some(true) => {}
                Ok(_) => self.report_failure(rules, rule, &variables, value, before, path)?,
                Err(error @ EvalError::CostLimitExceeded) => {
                    let reason = format!(
                        "'{error}': no further validation rules will be run due to call cost exceeds limit for rule: {name}"
                    );
                    self.errors.invalid(path, rules.kind.as_str(), &reason);
                    return Err(BudgetExhausted);
                }
                Err(EvalError::Error(error)) => {
                    let reason = match error.starts_with("no such overload") {
                        true => format!(
                            "'{error}': call arguments did not match a supported operator, function or macro signature for rule: {name}"
                        ),
                        false => format!("{error} evaluating rule: {name}"),
                    };
                    self.errors.invalid(path, rules.kind.as_str(), &reason);
                }
            }
        }
        Ok(())
    }

    fn report_failure<'a>(
        &mut self,
        rules: &SchemaRules,
        rule: &'a SchemaRule,
        variables: &Variables<'a>,
        value: &Value,
        before: OldValue<'_>,
        path: &Path,
    ) -> Result<(), BudgetExhausted> {
        let path = if rule.field_path.is_empty() { path.clone() } else { path.child(&rule.field_path) };
        let is_unchanged = !rule.uses_old_self && before.is_unchanged();
        let custom_message = match &rule.message_program {
            Some(Ok(program)) => self.evaluate_message(program, variables),
            _ => Ok(None),
        };
        let custom_message = match custom_message {
            Ok(custom_message) => custom_message,
            Err(reason) => {
                if !is_unchanged {
                    self.errors.invalid(&path, rules.kind.as_str(), &reason);
                }
                return Err(BudgetExhausted);
            }
        };
        if is_unchanged {
            return Ok(());
        }
        let detail = custom_message.unwrap_or_else(|| match rule.message.as_str() {
            "" => format!("failed rule: {}", rule.text),
            message => message.to_owned(),
        });
        let is_composite = matches!(rules.kind.as_str(), "object" | "array");
        match rule.reason.as_deref() {
            Some("FieldValueForbidden") => self.errors.forbidden(&path, &detail),
            Some("FieldValueRequired") => self.errors.required(&path, &detail),
            Some("FieldValueDuplicate") if is_composite => {
                self.errors.push(ErrorType::Duplicate, &path, "Duplicate value".to_owned())
            }
            Some("FieldValueDuplicate") => self.errors.duplicate(&path, value.clone()),
            _ if is_composite => {
                self.errors.push(ErrorType::Invalid, &path, format!("Invalid value: {detail}"))
            }
            _ => self.errors.invalid(&path, value.clone(), &detail),
        }
        Ok(())
    }

    /// Evaluates a message expression. Returns `None` if the message is unusable. An error stops the
    /// validation.
    fn evaluate_message<'a>(
        &mut self,
        program: &'a Program,
        variables: &Variables<'a>,
    ) -> Result<Option<String>, String> {
        let result = program.run(variables, &mut self.budget);
        if self.budget.is_exhausted() {
            return Err("messageExpression evaluation failed due to running out of cost budget, no further validation rules will be run".to_owned());
        }
        let text = match result {
            Err(EvalError::CostLimitExceeded) => {
                return Err(format!(
                    "no further validation rules will be run due to call cost exceeds limit for messageExpression: {}",
                    crate::field::quote(program.source())
                ));
            }
            Err(EvalError::Error(_)) => return Ok(None),
            Ok(value) => value.as_str().unwrap_or("").trim().to_owned(),
        };
        let is_valid = !text.is_empty() && text.len() <= MAX_MESSAGE_BYTES && !text.contains('\n');
        Ok(is_valid.then_some(text))
    }
}

fn variables<'a>(
    rule: &SchemaRule,
    decl: &'a Decl,
    value: &'a Value,
    old: Option<&'a Value>,
) -> Variables<'a> {
    let to_cel = |json: &'a Value| cel::Value::from_declared(json, decl);
    let mut variables = Variables::new().with("self", to_cel(value));
    if rule.optional_old_self {
        variables.set("oldSelf", cel::Value::Optional(old.map(|old| Arc::new(to_cel(old)))));
    } else if let Some(old) = old {
        variables.set("oldSelf", to_cel(old));
    }
    variables
}

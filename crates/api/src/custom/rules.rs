//! The rules of a schema (`x-kubernetes-validations`), compiled, and what they have against an object.

use std::collections::BTreeMap;
use std::sync::Arc;

use cel::{Budget, Decl, Env, Failure, Program, RUNTIME_BUDGET, Type, Variables};
use serde_json::Value;

use crate::apiextensions::values;
use crate::field::{Errors, Path, Reason};
use crate::json::Json as _;

/// The name of the type of `self`, which nobody is to rely on.
const SELF_TYPE: &str = "selfType";
/// The longest message an expression may make.
const LONGEST_MESSAGE: usize = 5 * 1024;
const OUT_OF_BUDGET: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";

/// The rules of a schema and of the schemas below it that have any.
pub struct Rules {
    own: Vec<Rule>,
    /// How the value looks to its rules; `None` without rules.
    decl: Option<Decl>,
    /// The type as the schema names it.
    kind: String,
    items: Option<Box<Rules>>,
    additional: Option<Box<Rules>>,
    properties: BTreeMap<String, Rules>,
}

/// One rule, compiled.
pub struct Rule {
    text: String,
    message: String,
    reason: Option<String>,
    /// Where the complaint belongs below the value, if not to the value itself.
    field_path: String,
    optional_old_self: bool,
    /// The expression speaks of the state before.
    pub uses_old_self: bool,
    /// The rule itself, or what is wrong with it.
    pub program: Result<Program, String>,
    /// What makes the message, or what is wrong with it.
    pub message_program: Option<Result<Program, String>>,
}

impl std::fmt::Debug for Rules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rules({} and below)", self.own.len())
    }
}

/// The declaration of the values of a schema. `root` is a whole object, which has metadata.
pub fn declared(schema: &Value, root: bool) -> Option<Decl> {
    let root = root || schema.flag("x-kubernetes-embedded-resource");
    Decl::from_schema(schema, root).map(|decl| decl.named(SELF_TYPE))
}

/// Compiles the rules a schema has itself.
pub fn compile(schema: &Value, decl: &Decl) -> Vec<Rule> {
    let env = Env::new().variable("self", decl.clone()).variable("oldSelf", decl.clone());
    let optional = Type::optional(decl.ty.clone());
    let optional_env = Env::new().variable("self", decl.clone()).variable("oldSelf", optional);
    let rules = schema.items("x-kubernetes-validations").iter();
    rules
        .map(|rule| Rule::new(rule, if rule.flag("optionalOldSelf") { &optional_env } else { &env }))
        .collect()
}

impl Rule {
    fn new(rule: &Value, env: &Env) -> Rule {
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
        Rule {
            text: rule.text("rule").trim().to_owned(),
            message: rule.text("message").trim().to_owned(),
            reason: rule.at("reason").as_str().map(str::to_owned),
            field_path: normalized(rule.text("fieldPath")),
            optional_old_self: rule.flag("optionalOldSelf"),
            uses_old_self: program.as_ref().is_ok_and(|program| program.refers_to("oldSelf")),
            program,
            message_program,
        }
    }

    /// How complaints about the rule itself name it.
    fn name(&self) -> &str {
        if self.message.is_empty() { &self.text } else { &self.message }
    }
}

/// `.a['b'].c` as paths are written: `a.b.c`.
fn normalized(path: &str) -> String {
    let mut out = Path::root();
    let mut rest = path;
    while !rest.is_empty() {
        if let Some(inside) = rest.strip_prefix("['") {
            let Some((name, after)) = inside.split_once("']") else { break };
            out = out.at(&name.replace("\\'", "'"));
            rest = after;
        } else {
            rest = rest.strip_prefix('.').unwrap_or(rest);
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            if end == 0 {
                break;
            }
            out = out.at(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out.as_str().to_owned()
}

/// A value, what it was before, and the nearest value around it of which that is known. What has not changed
/// may stay wrong.
#[derive(Clone, Copy, Default)]
struct Before<'v> {
    own: Option<(&'v Value, &'v Value)>,
    around: Option<(&'v Value, &'v Value)>,
}

impl<'v> Before<'v> {
    fn is_unchanged(self) -> bool {
        self.own.or(self.around).is_some_and(|(old, new)| old == new)
    }

    fn field(self, name: &str) -> Before<'v> {
        let Some((old, new)) = self.own else { return self };
        if self.around.is_none() && matches!(name, "apiVersion" | "kind") {
            return Before::default();
        }
        let inside = old.is_object().then(|| (old.at(name), new.at(name)));
        Before { own: inside, around: self.own }
    }

    fn item(self, schema: &Value, item: &'v Value) -> Before<'v> {
        let Some((old, _)) = self.own else { return self };
        let inside = values::counterpart(schema, old, item).map(|old| (old, item));
        Before { own: inside, around: self.own }
    }
}

impl Rules {
    /// Compiles the rules of a schema; `None` if there are none at all.
    pub(super) fn of(schema: &Value, root: bool) -> Option<Rules> {
        let inner = |name: &str| {
            let child = schema.at(name);
            child.is_object().then(|| Rules::of(child, false)).flatten().map(Box::new)
        };
        let properties: BTreeMap<String, Rules> = schema
            .entries("properties")
            .filter_map(|(name, property)| Some((name.to_owned(), Rules::of(property, false)?)))
            .collect();
        let (items, additional) = (inner("items"), inner("additionalProperties"));
        let has_own = !schema.items("x-kubernetes-validations").is_empty();
        let decl = if has_own { declared(schema, root) } else { None };
        let own = decl.as_ref().map(|decl| compile(schema, decl)).unwrap_or_default();
        let any = !own.is_empty() || items.is_some() || additional.is_some() || !properties.is_empty();
        any.then(|| Rules { own, decl, kind: schema.text("type").to_owned(), items, additional, properties })
    }

    /// Complains about an object that breaks rules.
    pub(super) fn check(&self, schema: &Value, value: &Value, old: Option<&Value>, errors: &mut Errors) {
        let mut check = Check { budget: Budget::new(RUNTIME_BUDGET), errors };
        let before = Before { own: old.map(|old| (old, value)), around: None };
        // A budget that is used up ends everything.
        let _ = check.value(self, schema, value, old, before, &Path::root());
    }
}

/// Nothing more is to be checked.
struct Spent;

struct Check<'e> {
    budget: Budget,
    errors: &'e mut Errors,
}

impl Check<'_> {
    fn value(
        &mut self,
        rules: &Rules,
        schema: &Value,
        value: &Value,
        old: Option<&Value>,
        before: Before<'_>,
        path: &Path,
    ) -> Result<(), Spent> {
        if value.is_null() {
            return Ok(());
        }
        let old = old.filter(|old| !old.is_null());
        if let Some(decl) = &rules.decl {
            self.own(rules, decl, value, old, before, path)?;
        }
        match value {
            Value::Object(map) => {
                for (name, child) in map {
                    let property = rules.properties.get(name);
                    let (inner, child_schema, at) = match (property, &rules.additional) {
                        (Some(inner), _) => (inner, schema.at("properties").at(name), path.at(name)),
                        (None, Some(inner)) => (&**inner, schema.at("additionalProperties"), path.key(name)),
                        (None, None) => continue,
                    };
                    let old = old.and_then(|old| old.get(name));
                    self.value(inner, child_schema, child, old, before.field(name), &at)?;
                }
            }
            Value::Array(items) => {
                let Some(inner) = &rules.items else { return Ok(()) };
                for (i, item) in items.iter().enumerate() {
                    let old = old.and_then(|old| values::counterpart(schema, old, item));
                    let before = before.item(schema, item);
                    self.value(inner, schema.at("items"), item, old, before, &path.index(i))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The rules of the value itself.
    fn own(
        &mut self,
        rules: &Rules,
        decl: &Decl,
        value: &Value,
        old: Option<&Value>,
        before: Before<'_>,
        path: &Path,
    ) -> Result<(), Spent> {
        if self.budget.remaining().unwrap_or(0) == 0 {
            self.errors.invalid(path, rules.kind.as_str(), OUT_OF_BUDGET);
            return Err(Spent);
        }
        for rule in &rules.own {
            let program = match &rule.program {
                Ok(program) => program,
                Err(why) => {
                    self.errors.invalid(path, rules.kind.as_str(), &format!("rule compile error: {why}"));
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
                return Err(Spent);
            }
            let name = rule.name();
            match result {
                Ok(result) if result.as_bool() == Some(true) => {}
                Ok(_) => self.broken(rules, rule, &variables, value, before, path)?,
                Err(error @ Failure::Cost) => {
                    let why = format!(
                        "'{error}': no further validation rules will be run due to call cost exceeds limit for rule: {name}"
                    );
                    self.errors.invalid(path, rules.kind.as_str(), &why);
                    return Err(Spent);
                }
                Err(Failure::Error(error)) => {
                    let why = match error.starts_with("no such overload") {
                        true => format!(
                            "'{error}': call arguments did not match a supported operator, function or macro signature for rule: {name}"
                        ),
                        false => format!("{error} evaluating rule: {name}"),
                    };
                    self.errors.invalid(path, rules.kind.as_str(), &why);
                }
            }
        }
        Ok(())
    }

    fn broken<'a>(
        &mut self,
        rules: &Rules,
        rule: &'a Rule,
        variables: &Variables<'a>,
        value: &Value,
        before: Before<'_>,
        path: &Path,
    ) -> Result<(), Spent> {
        let path = if rule.field_path.is_empty() { path.clone() } else { path.at(&rule.field_path) };
        let lenient = !rule.uses_old_self && before.is_unchanged();
        let made = match &rule.message_program {
            Some(Ok(program)) => self.message(program, variables),
            _ => Ok(None),
        };
        let made = match made {
            Ok(made) => made,
            Err(why) => {
                if !lenient {
                    self.errors.invalid(&path, rules.kind.as_str(), &why);
                }
                return Err(Spent);
            }
        };
        if lenient {
            return Ok(());
        }
        let detail = made.unwrap_or_else(|| match rule.message.as_str() {
            "" => format!("failed rule: {}", rule.text),
            message => message.to_owned(),
        });
        let whole = matches!(rules.kind.as_str(), "object" | "array");
        match rule.reason.as_deref() {
            Some("FieldValueForbidden") => self.errors.forbidden(&path, &detail),
            Some("FieldValueRequired") => self.errors.required(&path, &detail),
            Some("FieldValueDuplicate") if whole => {
                self.errors.push(Reason::Duplicate, &path, "Duplicate value".to_owned())
            }
            Some("FieldValueDuplicate") => self.errors.duplicate(&path, value.clone()),
            _ if whole => self.errors.push(Reason::Invalid, &path, format!("Invalid value: {detail}")),
            _ => self.errors.invalid(&path, value.clone(), &detail),
        }
        Ok(())
    }

    /// The message an expression makes; `None` if it makes none that can be used. An error ends everything.
    fn message<'a>(
        &mut self,
        program: &'a Program,
        variables: &Variables<'a>,
    ) -> Result<Option<String>, String> {
        let result = program.run(variables, &mut self.budget);
        if self.budget.is_exhausted() {
            return Err("messageExpression evaluation failed due to running out of cost budget, no further validation rules will be run".to_owned());
        }
        let text = match result {
            Err(Failure::Cost) => {
                return Err(format!(
                    "no further validation rules will be run due to call cost exceeds limit for messageExpression: {}",
                    crate::field::quoted(program.source())
                ));
            }
            Err(Failure::Error(_)) => return Ok(None),
            Ok(value) => value.as_str().unwrap_or("").trim().to_owned(),
        };
        let usable = !text.is_empty() && text.len() <= LONGEST_MESSAGE && !text.contains('\n');
        Ok(usable.then_some(text))
    }
}

fn variables<'a>(rule: &Rule, decl: &'a Decl, value: &'a Value, old: Option<&'a Value>) -> Variables<'a> {
    let told = |json: &'a Value| cel::Value::from_declared(json, decl);
    let mut variables = Variables::new().with("self", told(value));
    if rule.optional_old_self {
        variables.set("oldSelf", cel::Value::Optional(old.map(|old| Arc::new(told(old)))));
    } else if let Some(old) = old {
        variables.set("oldSelf", told(old));
    }
    variables
}

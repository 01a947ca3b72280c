//! ValidatingAdmissionPolicy: CEL expressions that validate requests.

use std::collections::HashSet;

use cel::Type;
use serde_json::Value;

use super::expressions::OptionalVariables;
use super::policy::{self, ExpressionContext};
use super::webhook::optional_one_of;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

const MAX_AUDIT_ANNOTATIONS: usize = 20;
const MAX_VALUE_EXPRESSION_BYTES: usize = 5 * 1024;
const REASONS: [&str; 3] = ["Forbidden", "Invalid", "RequestEntityTooLarge"];

pub struct ValidatingAdmissionPolicy;

impl RestStrategy for ValidatingAdmissionPolicy {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let context = policy::validate_common_spec(spec, false, &path, errors);
        let (validations, audits) = (spec.items("validations"), spec.items("auditAnnotations"));
        if validations.is_empty() && audits.is_empty() {
            let detail = "validations or auditAnnotations must contain at least one item";
            errors.required(&path.child("validations"), detail);
            errors.required(&path.child("auditAnnotations"), detail);
        }
        for (i, item) in validations.iter().enumerate() {
            validation(item, &context, &path.child("validations").index(i), errors);
        }
        let path = path.child("auditAnnotations");
        if audits.len() > MAX_AUDIT_ANNOTATIONS {
            let message = format!("must not have more than {MAX_AUDIT_ANNOTATIONS} auditAnnotations");
            errors.invalid(&path, spec.at("auditAnnotations").clone(), &message);
        }
        let policy_name = obj.at("metadata").text("name");
        let mut seen = HashSet::new();
        for (i, item) in audits.iter().enumerate() {
            audit_annotation(item, policy_name, &context, &path.index(i), errors);
            if !seen.insert(item.text("key")) {
                errors.duplicate(&path.index(i).child("key"), item.text("key"));
            }
        }
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        let (status, path) = (new.at("status"), Path::new("status"));
        let warnings = status.at("typeChecking").items("expressionWarnings");
        for (i, warning) in warnings.iter().enumerate() {
            let path = path.child("typeChecking.expressionWarnings").index(i);
            for field in ["warning", "fieldRef"] {
                if warning.text(field).trim().is_empty() {
                    errors.required(&path.child(field), "");
                }
            }
        }
        meta::validate_conditions(status.at("conditions"), &path.child("conditions"), errors);
    }
}

const WITH_AUTHORIZER: OptionalVariables =
    OptionalVariables { params: false, authorizer: true, patches: false };

fn validation(validation: &Value, context: &ExpressionContext, path: &Path, errors: &mut ErrorList) {
    let expression = validation.text("expression");
    if expression.trim().is_empty() {
        errors.required(&path.child("expression"), "expression is not specified");
    } else {
        context.check(WITH_AUTHORIZER, expression, &[Type::Bool], &path.child("expression"), errors);
    }
    for field in ["messageExpression", "message"] {
        let text = validation.text(field);
        if !text.is_empty() && text.trim().is_empty() {
            errors.invalid(&path.child(field), text, "must be non-empty if specified");
        } else if field == "messageExpression" && !text.is_empty() {
            context.check(OptionalVariables::default(), text, &[Type::String], &path.child(field), errors);
        } else if field == "message" && text.trim().contains(['\n', '\r']) {
            errors.invalid(&path.child(field), text, "must not contain line breaks");
        }
    }
    optional_one_of(validation, "reason", &REASONS, path, errors);
}

fn audit_annotation(
    annotation: &Value,
    policy_name: &str,
    context: &ExpressionContext,
    path: &Path,
    errors: &mut ErrorList,
) {
    let key = annotation.text("key");
    if policy_name.is_empty() {
        errors.invalid(&path.child("key"), key, "requires metadata.name be non-empty");
    } else {
        let name = format!("{policy_name}/{key}");
        errors.invalid_each(&path.child("key"), name.as_str(), names::qualified_name(&name));
    }
    let expression = annotation.text("valueExpression").trim();
    if expression.is_empty() {
        errors.required(&path.child("valueExpression"), "valueExpression is not specified");
    } else if expression.len() > MAX_VALUE_EXPRESSION_BYTES {
        let detail = format!("must not exceed {MAX_VALUE_EXPRESSION_BYTES} bytes in length");
        errors.required(&path.child("valueExpression"), &detail);
    } else {
        let allowed_types = [Type::String, Type::Null];
        context.check(WITH_AUTHORIZER, expression, &allowed_types, &path.child("valueExpression"), errors);
    }
}

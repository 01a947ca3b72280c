//! ValidatingAdmissionPolicy: CEL expressions that may refuse a request.

use std::collections::HashSet;

use cel::Type;
use serde_json::Value;

use super::expressions::Names;
use super::policy::{self, Vocabulary};
use super::webhook::known;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::{meta, names};

const MAX_AUDIT_ANNOTATIONS: usize = 20;
const MAX_VALUE_EXPRESSION: usize = 5 * 1024;
const REASONS: [&str; 3] = ["Forbidden", "Invalid", "RequestEntityTooLarge"];

pub struct ValidatingAdmissionPolicy;

impl Kind for ValidatingAdmissionPolicy {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let vocabulary = policy::matching(spec, false, &path, errors);
        let (validations, audits) = (spec.items("validations"), spec.items("auditAnnotations"));
        if validations.is_empty() && audits.is_empty() {
            let why = "validations or auditAnnotations must contain at least one item";
            errors.required(&path.at("validations"), why);
            errors.required(&path.at("auditAnnotations"), why);
        }
        for (i, item) in validations.iter().enumerate() {
            validation(item, &vocabulary, &path.at("validations").index(i), errors);
        }
        let path = path.at("auditAnnotations");
        if audits.len() > MAX_AUDIT_ANNOTATIONS {
            let message = format!("must not have more than {MAX_AUDIT_ANNOTATIONS} auditAnnotations");
            errors.invalid(&path, spec.at("auditAnnotations").clone(), &message);
        }
        let policy_name = obj.at("metadata").text("name");
        let mut seen = HashSet::new();
        for (i, item) in audits.iter().enumerate() {
            audit_annotation(item, policy_name, &vocabulary, &path.index(i), errors);
            if !seen.insert(item.text("key")) {
                errors.duplicate(&path.index(i).at("key"), item.text("key"));
            }
        }
    }

    fn validate_status(&self, new: &Value, _old: &Value, errors: &mut Errors) {
        let (status, path) = (new.at("status"), Path::new("status"));
        let warnings = status.at("typeChecking").items("expressionWarnings");
        for (i, warning) in warnings.iter().enumerate() {
            let path = path.at("typeChecking.expressionWarnings").index(i);
            for field in ["warning", "fieldRef"] {
                if warning.text(field).trim().is_empty() {
                    errors.required(&path.at(field), "");
                }
            }
        }
        meta::conditions(status.at("conditions"), &path.at("conditions"), errors);
    }
}

const WITH_AUTHORIZER: Names = Names { params: false, authorizer: true, patches: false };

fn validation(validation: &Value, vocabulary: &Vocabulary, path: &Path, errors: &mut Errors) {
    let expression = validation.text("expression");
    if expression.trim().is_empty() {
        errors.required(&path.at("expression"), "expression is not specified");
    } else {
        vocabulary.check(WITH_AUTHORIZER, expression, &[Type::Bool], &path.at("expression"), errors);
    }
    for field in ["messageExpression", "message"] {
        let text = validation.text(field);
        if !text.is_empty() && text.trim().is_empty() {
            errors.invalid(&path.at(field), text, "must be non-empty if specified");
        } else if field == "messageExpression" && !text.is_empty() {
            vocabulary.check(Names::default(), text, &[Type::String], &path.at(field), errors);
        } else if field == "message" && text.trim().contains(['\n', '\r']) {
            errors.invalid(&path.at(field), text, "must not contain line breaks");
        }
    }
    known(validation, "reason", &REASONS, path, errors);
}

fn audit_annotation(
    annotation: &Value,
    policy_name: &str,
    vocabulary: &Vocabulary,
    path: &Path,
    errors: &mut Errors,
) {
    let key = annotation.text("key");
    if policy_name.is_empty() {
        errors.invalid(&path.at("key"), key, "requires metadata.name be non-empty");
    } else {
        let name = format!("{policy_name}/{key}");
        errors.invalid_each(&path.at("key"), name.as_str(), names::qualified_name(&name));
    }
    let expression = annotation.text("valueExpression").trim();
    if expression.is_empty() {
        errors.required(&path.at("valueExpression"), "valueExpression is not specified");
    } else if expression.len() > MAX_VALUE_EXPRESSION {
        let why = format!("must not exceed {MAX_VALUE_EXPRESSION} bytes in length");
        errors.required(&path.at("valueExpression"), &why);
    } else {
        let wanted = [Type::String, Type::Null];
        vocabulary.check(WITH_AUTHORIZER, expression, &wanted, &path.at("valueExpression"), errors);
    }
}

//! MutatingAdmissionPolicy: CEL expressions that mutate the objects of requests.

use serde_json::Value;

use super::expressions::{self, OptionalVariables};
use super::policy::{self, ExpressionContext};
use super::webhook::REINVOCATION_POLICIES;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct MutatingAdmissionPolicy;

impl RestStrategy for MutatingAdmissionPolicy {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let context = policy::validate_common_spec(spec, true, &path, errors);
        if spec.items("mutations").is_empty() {
            errors.required(&path.child("mutations"), "mutations must contain at least one item");
        }
        for (i, item) in spec.items("mutations").iter().enumerate() {
            mutation(item, &context, &path.child("mutations").index(i), errors);
        }
        policy::required_one_of(spec, "reinvocationPolicy", &REINVOCATION_POLICIES, &path, errors);
    }
}

fn mutation(mutation: &Value, context: &ExpressionContext, path: &Path, errors: &mut ErrorList) {
    let kind = mutation.text("patchType");
    let (own, other) = match kind {
        "" => return errors.required(&path.child("patchType"), ""),
        "JSONPatch" => ("jsonPatch", "applyConfiguration"),
        "ApplyConfiguration" => ("applyConfiguration", "jsonPatch"),
        _ => {
            return errors.not_supported(
                &path.child("patchType"),
                kind,
                &["ApplyConfiguration", "JSONPatch"],
            );
        }
    };
    if !mutation.has(own) {
        errors.required(&path.child(own), &format!("must be specified when patchType is {kind}"));
    } else if mutation.at(own).text("expression").trim().is_empty() {
        errors.required(&path.child(own).child("expression"), "");
    } else {
        let optional_variables = OptionalVariables { params: false, authorizer: true, patches: true };
        let allowed_types = [expressions::patch_type(mutation)];
        let expression = mutation.at(own).text("expression");
        context.check(
            optional_variables,
            expression,
            &allowed_types,
            &path.child(own).child("expression"),
            errors,
        );
    }
    if mutation.has(other) {
        let message = format!("must not be specified when patchType is {kind}");
        errors.invalid(&path.child(other), format!("{{{other}}}"), &message);
    }
}

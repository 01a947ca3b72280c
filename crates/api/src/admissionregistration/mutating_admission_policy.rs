//! MutatingAdmissionPolicy: CEL expressions that may change a request.

use serde_json::Value;

use super::expressions::{self, Names};
use super::policy::{self, Vocabulary};
use super::webhook::REINVOCATION_POLICIES;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub struct MutatingAdmissionPolicy;

impl Kind for MutatingAdmissionPolicy {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let vocabulary = policy::matching(spec, true, &path, errors);
        if spec.items("mutations").is_empty() {
            errors.required(&path.at("mutations"), "mutations must contain at least one item");
        }
        for (i, item) in spec.items("mutations").iter().enumerate() {
            mutation(item, &vocabulary, &path.at("mutations").index(i), errors);
        }
        policy::required_and_known(spec, "reinvocationPolicy", &REINVOCATION_POLICIES, &path, errors);
    }
}

fn mutation(mutation: &Value, vocabulary: &Vocabulary, path: &Path, errors: &mut Errors) {
    let kind = mutation.text("patchType");
    let (own, other) = match kind {
        "" => return errors.required(&path.at("patchType"), ""),
        "JSONPatch" => ("jsonPatch", "applyConfiguration"),
        "ApplyConfiguration" => ("applyConfiguration", "jsonPatch"),
        _ => {
            return errors.not_supported(&path.at("patchType"), kind, &["ApplyConfiguration", "JSONPatch"]);
        }
    };
    if !mutation.has(own) {
        errors.required(&path.at(own), &format!("must be specified when patchType is {kind}"));
    } else if mutation.at(own).text("expression").trim().is_empty() {
        errors.required(&path.at(own).at("expression"), "");
    } else {
        let names = Names { params: false, authorizer: true, patches: true };
        let wanted = [expressions::patch_type(mutation)];
        let expression = mutation.at(own).text("expression");
        vocabulary.check(names, expression, &wanted, &path.at(own).at("expression"), errors);
    }
    if mutation.has(other) {
        let message = format!("must not be specified when patchType is {kind}");
        errors.invalid(&path.at(other), format!("{{{other}}}"), &message);
    }
}

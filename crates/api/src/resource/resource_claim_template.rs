//! ResourceClaimTemplate: the immutable template of the ResourceClaims of pods.

use serde_json::Value;

use super::claim;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::strategy::RestStrategy;

pub struct ResourceClaimTemplate;

impl RestStrategy for ResourceClaimTemplate {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let metadata = spec.at("metadata");
        meta::validate_annotations(metadata.at("annotations"), &path.child("metadata.annotations"), errors);
        meta::validate_labels(metadata.at("labels"), &path.child("metadata.labels"), errors);
        claim::validate_claim_spec(spec.at("spec"), &path.child("spec"), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        // The spec is immutable, so the only error about a changed spec is that it changed.
        errors.0.retain(|error| !error.path.as_str().starts_with("spec"));
        meta::validate_immutable(new.at("spec"), old.at("spec"), &Path::new("spec"), errors);
    }
}

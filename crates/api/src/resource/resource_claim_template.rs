//! ResourceClaimTemplate: the ResourceClaim each pod gets a copy of. It never changes.

use serde_json::Value;

use super::claim;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta;

pub struct ResourceClaimTemplate;

impl Kind for ResourceClaimTemplate {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let metadata = spec.at("metadata");
        meta::annotations(metadata.at("annotations"), &path.at("metadata.annotations"), errors);
        meta::labels(metadata.at("labels"), &path.at("metadata.labels"), errors);
        claim::spec(spec.at("spec"), &path.at("spec"), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        // The only thing to say about a spec that differs is that it may not.
        errors.0.retain(|complaint| !complaint.path.as_str().starts_with("spec"));
        meta::immutable(new.at("spec"), old.at("spec"), &Path::new("spec"), errors);
    }
}

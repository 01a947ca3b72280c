//! PodTemplate: a template of pods that stands alone.

use serde_json::Value;

use crate::apps::workload::prepare_template;
use crate::core::pod::{validate_pod_template_spec, warnings};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta::same;

pub struct PodTemplate;

impl Kind for PodTemplate {
    fn prepare(&self, new: &mut Value) {
        prepare_template(new, &["template"]);
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        validate_pod_template_spec(obj.at("template"), &Path::new("template"), errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        if old.is_some_and(|old| same(old.at("template"), new.at("template"))) {
            return Vec::new();
        }
        warnings::for_template(new.at("template"), &Path::new("template"))
    }
}

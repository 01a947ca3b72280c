//! PodTemplate: REST strategy and validation.

use serde_json::Value;

use crate::apps::workload::prepare_template;
use crate::core::pod::{validate_pod_template_spec, warnings};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::semantic_equal;
use crate::strategy::RestStrategy;

pub struct PodTemplate;

impl RestStrategy for PodTemplate {
    fn prepare(&self, new: &mut Value) {
        prepare_template(new, &["template"]);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_pod_template_spec(obj.at("template"), &Path::new("template"), errors);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        if old.is_some_and(|old| semantic_equal(old.at("template"), new.at("template"))) {
            return Vec::new();
        }
        warnings::for_template(new.at("template"), &Path::new("template"))
    }
}

//! DeviceClass: REST strategy and validation.

use serde_json::Value;

use super::{MAX_CONFIGS, validate_configuration, validate_list, validate_selectors};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::strategy::RestStrategy;

pub struct DeviceClass;

impl RestStrategy for DeviceClass {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        validate_selectors(spec.items("selectors"), &path.child("selectors"), errors);
        validate_list(
            spec.items("config"),
            MAX_CONFIGS,
            &path.child("config"),
            errors,
            validate_configuration,
        );
        if let Some(name) = spec.at("extendedResourceName").as_str().filter(|name| !is_extended(name)) {
            let path = path.child("extendedResourceName");
            errors.invalid(&path, name, "must be a valid extended resource name");
        }
    }
}

/// Whether this is a valid extended resource name, also with the `requests.` prefix of quotas.
fn is_extended(name: &str) -> bool {
    name.contains('/')
        && !name.contains("kubernetes.io/")
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}

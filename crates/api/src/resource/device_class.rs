//! DeviceClass: what an administrator calls a kind of device, and how to pick one.

use serde_json::Value;

use super::{MAX_CONFIG, configuration, each, selectors};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::names;

pub struct DeviceClass;

impl Kind for DeviceClass {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        selectors(spec.items("selectors"), &path.at("selectors"), errors);
        each(spec.items("config"), MAX_CONFIG, &path.at("config"), errors, configuration);
        if let Some(name) = spec.at("extendedResourceName").as_str().filter(|name| !is_extended(name)) {
            let path = path.at("extendedResourceName");
            errors.invalid(&path, name, "must be a valid extended resource name");
        }
    }
}

/// A resource outside of Kubernetes' own domains that a quota could also name.
fn is_extended(name: &str) -> bool {
    name.contains('/')
        && !name.contains("kubernetes.io/")
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}

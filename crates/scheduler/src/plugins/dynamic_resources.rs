//! DynamicResources: resource claims of a pod must be allocated, or be allocatable, where it runs.

use std::sync::Arc;

use k8s_openapi::api::resource::v1 as resource;
use serde_json::Value;

use crate::framework::{Attempt, Plugin, PostFilter, Rescue, Status};
use crate::state::objects::Objects;

pub const NAME: &str = "DynamicResources";

struct DynamicResources;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    Ok(Plugin::new(NAME).post_filter(Arc::new(DynamicResources)))
}

/// The device class that provides an extended resource.
pub(super) fn class_for<'o>(objects: &'o Objects, name: &str) -> Option<&'o Arc<resource::DeviceClass>> {
    if let Some(class) = name.strip_prefix("deviceclass.resource.kubernetes.io/") {
        return objects.device_classes.get(class);
    }
    let mut named: Vec<_> = objects
        .device_classes
        .values()
        .filter(|class| class.spec.extended_resource_name.as_deref() == Some(name))
        .collect();
    named.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    named.into_iter().next()
}

impl PostFilter for DynamicResources {
    fn post_filter(&self, _: &mut Attempt<'_, '_>) -> Rescue {
        Rescue::Nothing { status: Status::unschedulable("no new claims to deallocate"), clear: false }
    }
}

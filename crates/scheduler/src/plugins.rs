//! Upstream's in-tree plugins, one file each. They are listed in [`crate::framework::registry`].

pub mod balanced_allocation;
pub mod default_binder;
pub mod default_preemption;
pub mod dynamic_resources;
pub mod image_locality;
pub mod inter_pod_affinity;
pub mod node_affinity;
pub mod node_declared_features;
pub mod node_name;
pub mod node_ports;
pub mod node_resources_fit;
pub mod node_unschedulable;
pub mod node_volume_limits;
pub mod pod_topology_spread;
pub mod priority_sort;
pub mod scheduling_gates;
pub mod taint_toleration;
pub mod volume_binding;
pub mod volume_restrictions;
pub mod volume_zone;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Parses the arguments of a plugin; the defaults if there are none.
pub fn parse_args<T: DeserializeOwned + Default>(arguments: &Value) -> Result<T, String> {
    if arguments.is_null() {
        return Ok(T::default());
    }
    serde_json::from_value(arguments.clone()).map_err(|error| error.to_string())
}

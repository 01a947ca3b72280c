//! The list of plugins: a plugin is one file and one row here.

use serde_json::Value;

use super::Plugin;
use crate::plugins::*;

/// How a plugin is made from its arguments in the configuration (`null` without).
pub type Make = fn(&Value) -> Result<Plugin, String>;

/// A plugin that can be named in a configuration.
#[derive(Clone, Copy)]
pub struct Row {
    pub name: &'static str,
    pub make: Make,
    /// The weight of its scores in the default profile.
    pub weight: i64,
    /// Part of the default profile.
    pub default: bool,
}

const fn row(name: &'static str, make: Make) -> Row {
    Row { name, make, weight: 0, default: true }
}

const fn weighing(name: &'static str, weight: i64, make: Make) -> Row {
    Row { name, make, weight, default: true }
}

/// Upstream's plugins, in the order of the default profile.
pub const BUILT_IN: &[Row] = &[
    row(scheduling_gates::NAME, scheduling_gates::make),
    row(priority_sort::NAME, priority_sort::make),
    row(node_unschedulable::NAME, node_unschedulable::make),
    row(node_name::NAME, node_name::make),
    weighing(taint_toleration::NAME, 3, taint_toleration::make),
    weighing(node_affinity::NAME, 2, node_affinity::make),
    row(node_ports::NAME, node_ports::make),
    weighing(node_resources_fit::NAME, 1, node_resources_fit::make),
    row(volume_restrictions::NAME, volume_restrictions::make),
    row(node_volume_limits::NAME, node_volume_limits::make),
    row(volume_binding::NAME, volume_binding::make),
    row(volume_zone::NAME, volume_zone::make),
    weighing(pod_topology_spread::NAME, 2, pod_topology_spread::make),
    weighing(inter_pod_affinity::NAME, 2, inter_pod_affinity::make),
    weighing(dynamic_resources::NAME, 2, dynamic_resources::make),
    row(default_preemption::NAME, default_preemption::make),
    weighing(balanced_allocation::NAME, 1, balanced_allocation::make),
    weighing(image_locality::NAME, 1, image_locality::make),
    row(default_binder::NAME, default_binder::make),
    row(node_declared_features::NAME, node_declared_features::make),
];

//! The registry of plugins. A new plugin needs its own file and an entry here.

use serde_json::Value;

use super::Plugin;
use crate::plugins::*;

/// Creates a plugin from its arguments in the configuration; `null` if there are none.
pub type PluginFactory = fn(&Value) -> Result<Plugin, String>;

/// A plugin that configurations can name.
#[derive(Clone, Copy)]
pub struct RegistryEntry {
    pub name: &'static str,
    pub factory: PluginFactory,
    /// Score weight in the default profile.
    pub weight: i64,
    /// Whether the default profile contains the plugin.
    pub default: bool,
}

const fn entry(name: &'static str, factory: PluginFactory) -> RegistryEntry {
    RegistryEntry { name, factory, weight: 0, default: true }
}

const fn score_entry(name: &'static str, weight: i64, factory: PluginFactory) -> RegistryEntry {
    RegistryEntry { name, factory, weight, default: true }
}

/// Upstream's in-tree plugins, in the order of the default profile.
pub const IN_TREE_PLUGINS: &[RegistryEntry] = &[
    entry(scheduling_gates::NAME, scheduling_gates::make),
    entry(priority_sort::NAME, priority_sort::make),
    entry(node_unschedulable::NAME, node_unschedulable::make),
    entry(node_name::NAME, node_name::make),
    score_entry(taint_toleration::NAME, 3, taint_toleration::make),
    score_entry(node_affinity::NAME, 2, node_affinity::make),
    entry(node_ports::NAME, node_ports::make),
    score_entry(node_resources_fit::NAME, 1, node_resources_fit::make),
    entry(volume_restrictions::NAME, volume_restrictions::make),
    entry(node_volume_limits::NAME, node_volume_limits::make),
    entry(volume_binding::NAME, volume_binding::make),
    entry(volume_zone::NAME, volume_zone::make),
    score_entry(pod_topology_spread::NAME, 2, pod_topology_spread::make),
    score_entry(inter_pod_affinity::NAME, 2, inter_pod_affinity::make),
    score_entry(dynamic_resources::NAME, 2, dynamic_resources::make),
    entry(default_preemption::NAME, default_preemption::make),
    score_entry(balanced_allocation::NAME, 1, balanced_allocation::make),
    score_entry(image_locality::NAME, 1, image_locality::make),
    entry(default_binder::NAME, default_binder::make),
    entry(node_declared_features::NAME, node_declared_features::make),
];

//! The device pools of the cluster, and the devices of each that a node can access.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1 as resource;
use schema::quantity::Quantity;

use super::allocation;
use super::capacity::quantity;
use crate::state::NodeInfo;
use crate::state::objects::Objects;
use crate::state::selection::NodeSelector;

/// Identifies a device: driver, pool and name.
pub type DeviceId = (String, String, String);

/// All pools, and the devices and capacity that are allocated to claims.
pub struct PoolSet<'o> {
    pools: Vec<Pool<'o>>,
    /// Pools with node-local devices, by node name.
    by_node: HashMap<&'o str, BTreeSet<usize>>,
    /// Pools with devices that several nodes may access.
    shared: BTreeSet<usize>,
    /// Devices that are allocated exclusively.
    pub taken: BTreeSet<DeviceId>,
    /// Consumed capacity of devices that allow multiple allocations.
    pub consumed: HashMap<DeviceId, BTreeMap<String, Quantity>>,
}

/// The latest generation of a pool.
pub struct Pool<'o> {
    driver: &'o str,
    name: &'o str,
    slices: Vec<&'o resource::ResourceSlice>,
    /// Why the pool cannot be used: `being updated` or `invalid`.
    invalid_reason: Option<&'static str>,
    /// Remaining values of the shared counters, by counter set and name.
    pub counters: HashMap<(&'o str, &'o str), Quantity>,
}

/// A device that the node can access.
pub struct PoolDevice<'o> {
    pub id: DeviceId,
    pub device: &'o resource::Device,
    pub pool: usize,
    /// The node, for a node-local device.
    pub node: Option<&'o str>,
    /// The nodes that can access the device, if selected by labels.
    pub selector: Option<&'o core::NodeSelector>,
}

/// The devices that a node can access.
pub struct NodeDevices<'o> {
    pub pool_devices: Vec<PoolDevice<'o>>,
    /// Pools that cannot be used, with the reason.
    pub invalid_pools: Vec<(String, &'static str)>,
}

impl<'o> PoolSet<'o> {
    pub fn new(objects: &'o Objects) -> PoolSet<'o> {
        let mut pool_set = PoolSet {
            pools: Vec::new(),
            by_node: HashMap::new(),
            shared: BTreeSet::new(),
            taken: BTreeSet::new(),
            consumed: HashMap::new(),
        };
        pool_set.count_taken(objects);
        let mut pools: BTreeMap<(&str, &str), Vec<&resource::ResourceSlice>> = BTreeMap::new();
        for slice in objects.resource_slices.values().map(Arc::as_ref) {
            let slices = pools.entry((&slice.spec.driver, &slice.spec.pool.name)).or_default();
            let latest_generation = slices.first().map_or(i64::MIN, |first| first.spec.pool.generation);
            match slice.spec.pool.generation {
                generation if generation < latest_generation => continue,
                generation if generation > latest_generation => slices.clear(),
                _ => {}
            }
            slices.push(slice);
        }
        for ((driver, name), mut slices) in pools {
            slices.sort_by_key(|slice| slice.metadata.name.as_deref());
            let mut pool = Pool { driver, name, invalid_reason: None, counters: counters(&slices), slices };
            pool.invalid_reason = pool.check_pool();
            pool_set.subtract_used_counters(&mut pool);
            let index = pool_set.pools.len();
            for slice in &pool.slices {
                match slice.spec.node_name.as_deref() {
                    Some(node) if !node.is_empty() => {
                        pool_set.by_node.entry(node).or_default().insert(index);
                    }
                    _ => {
                        pool_set.shared.insert(index);
                    }
                }
            }
            pool_set.pools.push(pool);
        }
        pool_set
    }

    pub fn pool(&self, index: usize) -> &Pool<'o> {
        &self.pools[index]
    }

    fn count_taken(&mut self, objects: &Objects) {
        let results = objects.resource_claims.values().filter_map(|claim| {
            let devices = allocation(claim)?.devices.as_ref()?;
            devices.results.as_ref()
        });
        for result in results.flatten().filter(|result| result.admin_access != Some(true)) {
            let id = (result.driver.clone(), result.pool.clone(), result.device.clone());
            if result.share_id.is_none() {
                self.taken.insert(id);
                continue;
            }
            let consumed = self.consumed.entry(id).or_default();
            for (name, amount) in result.consumed_capacity.iter().flatten() {
                add(consumed, name, quantity(amount));
            }
        }
    }

    /// Subtracts the counters that allocated devices consume.
    fn subtract_used_counters(&self, pool: &mut Pool<'o>) {
        let devices = pool.slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        for device in devices.filter(|device| device.consumes_counters.is_some()) {
            let id = (pool.driver.to_owned(), pool.name.to_owned(), device.name.clone());
            if !self.taken.contains(&id) && !self.consumed.contains_key(&id) {
                continue;
            }
            for (set, name, amount) in consumed_counters(device) {
                if let Some(left) = pool.counters.get_mut(&(set, name)) {
                    *left = *left - amount;
                }
            }
        }
    }

    /// Returns the devices that a node can access, in the order in which they are tried.
    pub fn devices_for_node(&self, node: &NodeInfo) -> NodeDevices<'o> {
        let mut node_devices = NodeDevices { pool_devices: Vec::new(), invalid_pools: Vec::new() };
        let own = self.by_node.get(&*node.name);
        let indices: BTreeSet<usize> = own.into_iter().flatten().chain(&self.shared).copied().collect();
        // Pools with binding conditions last: other devices need no preparation.
        let (with_binding_conditions, without_binding_conditions): (Vec<usize>, Vec<usize>) =
            indices.into_iter().partition(|index| self.pools[*index].has_binding_conditions());
        for index in without_binding_conditions.into_iter().chain(with_binding_conditions) {
            let pool = &self.pools[index];
            let pool_devices = pool.devices_for_node(index, node);
            match pool.invalid_reason {
                _ if pool_devices.is_empty() => {}
                Some(reason) => {
                    node_devices.invalid_pools.push((format!("{}/{}", pool.driver, pool.name), reason))
                }
                None => node_devices.pool_devices.extend(pool_devices),
            }
        }
        node_devices
    }
}

impl<'o> Pool<'o> {
    fn check_pool(&self) -> Option<&'static str> {
        let expected = self.slices.first().map_or(0, |slice| slice.spec.pool.resource_slice_count);
        if i64::try_from(self.slices.len()) != Ok(expected) {
            return Some("being updated");
        }
        let mut names = BTreeSet::new();
        let devices = || self.slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        let unique = devices().all(|device| names.insert(&device.name));
        let mut used = devices().flat_map(consumed_counters);
        let known = used.all(|(set, name, _)| self.counters.contains_key(&(set, name)));
        (!unique || !known).then_some("invalid")
    }

    /// Whether drivers must prepare some of the devices before a pod is bound.
    fn has_binding_conditions(&self) -> bool {
        let mut devices = self.slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        devices.any(|device| device.binding_conditions.as_ref().is_some_and(|list| !list.is_empty()))
    }

    fn devices_for_node(&self, index: usize, node: &NodeInfo) -> Vec<PoolDevice<'o>> {
        let mut pool_devices = Vec::new();
        for slice in &self.slices {
            let spec = &slice.spec;
            let per_device_node_selection = spec.per_device_node_selection == Some(true);
            let (name, selector) = (spec.node_name.as_deref(), spec.node_selector.as_ref());
            if !per_device_node_selection && !matches_node(node, name, spec.all_nodes, selector) {
                continue;
            }
            for device in spec.devices.iter().flatten() {
                let (name, selector) = match per_device_node_selection {
                    true => (device.node_name.as_deref(), device.node_selector.as_ref()),
                    false => (name, selector),
                };
                if per_device_node_selection && !matches_node(node, name, device.all_nodes, selector) {
                    continue;
                }
                let id = (self.driver.to_owned(), self.name.to_owned(), device.name.clone());
                pool_devices.push(PoolDevice { id, device, pool: index, node: name, selector });
            }
        }
        pool_devices
    }
}

fn counters<'o>(slices: &[&'o resource::ResourceSlice]) -> HashMap<(&'o str, &'o str), Quantity> {
    let sets = slices.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten());
    let named = sets.flat_map(|set| {
        let named = |(name, counter): (&'o String, &'o resource::Counter)| {
            ((set.name.as_str(), name.as_str()), quantity(&counter.value))
        };
        set.counters.iter().map(named)
    });
    named.collect()
}

/// Returns the counters that a device consumes: set, name and amount.
pub fn consumed_counters(device: &resource::Device) -> impl Iterator<Item = (&str, &str, Quantity)> {
    let sets = device.consumes_counters.iter().flatten();
    sets.flat_map(|set| {
        let counters = set.counters.iter();
        counters.map(|(name, counter)| (set.counter_set.as_str(), name.as_str(), quantity(&counter.value)))
    })
}

/// Adds to the amount with this name.
pub fn add(amounts: &mut BTreeMap<String, Quantity>, name: &str, amount: Quantity) {
    match amounts.get_mut(name) {
        Some(sum) => *sum = *sum + amount,
        None => {
            amounts.insert(name.to_owned(), amount);
        }
    }
}

fn matches_node(
    node: &NodeInfo,
    name: Option<&str>,
    all: Option<bool>,
    selector: Option<&core::NodeSelector>,
) -> bool {
    all == Some(true)
        || name == Some(&*node.name)
        || selector.is_some_and(|selector| NodeSelector::new(selector).matches(node))
}

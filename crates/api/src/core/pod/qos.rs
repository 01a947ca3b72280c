//! The QoS class of a pod, which determines the order of eviction.

use std::collections::BTreeMap;

use serde_json::Value;

use super::resources::list;
use crate::json::JsonExt;
use crate::quantity::Quantity;

/// `Guaranteed`, `Burstable` or `BestEffort`, from the requests and limits of CPU and memory.
pub fn qos_class(pod: &Value) -> &'static str {
    let spec = pod.at("spec");
    let pod_resources = spec.at("resources");
    let parts: Vec<&Value> = if pod_resources.is_null() {
        let lists = ["containers", "initContainers"];
        lists.iter().flat_map(|list| spec.items(list)).map(|container| container.at("resources")).collect()
    } else {
        vec![pod_resources]
    };
    let (mut requests, mut limits) = (BTreeMap::new(), BTreeMap::new());
    let mut guaranteed = true;
    for part in parts {
        add_resources(&mut requests, part, "requests");
        // Pod-level resources may have no limits at all; container resources must.
        let limited = add_resources(&mut limits, part, "limits");
        guaranteed &= limited == 2 || (!pod_resources.is_null() && part.entries("limits").next().is_none());
    }
    if requests.is_empty() && limits.is_empty() {
        return "BestEffort";
    }
    if guaranteed && requests == limits { "Guaranteed" } else { "Burstable" }
}

/// Adds the CPU and memory of a list and returns how many of the two are present.
fn add_resources<'a>(total: &mut BTreeMap<&'a str, Quantity>, resources: &'a Value, field: &str) -> usize {
    let mut count = 0;
    for (name, value) in list(resources, field) {
        if ["cpu", "memory"].contains(&name) && value.is_positive() {
            count += 1;
            let sum = total.get(name).map_or(value, |old| *old + value);
            total.insert(name, sum);
        }
    }
    count
}

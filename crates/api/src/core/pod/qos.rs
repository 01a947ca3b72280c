//! The quality of service class of a pod, which decides who is evicted first.

use std::collections::BTreeMap;

use serde_json::Value;

use super::resources::list;
use crate::json::JsonExt;
use crate::quantity::Quantity;

/// `Guaranteed`, `Burstable` or `BestEffort`, from requests and limits of cpu and memory.
pub fn qos_class(pod: &Value) -> &'static str {
    let spec = pod.at("spec");
    let whole = spec.at("resources");
    let parts: Vec<&Value> = if whole.is_null() {
        let lists = ["containers", "initContainers"];
        lists.iter().flat_map(|list| spec.items(list)).map(|container| container.at("resources")).collect()
    } else {
        vec![whole]
    };
    let (mut requests, mut limits) = (BTreeMap::new(), BTreeMap::new());
    let mut guaranteed = true;
    for part in parts {
        add_resources(&mut requests, part, "requests");
        // Resources of the whole pod may leave out limits altogether; containers may not.
        let limited = add_resources(&mut limits, part, "limits");
        guaranteed &= limited == 2 || (!whole.is_null() && part.entries("limits").next().is_none());
    }
    if requests.is_empty() && limits.is_empty() {
        return "BestEffort";
    }
    if guaranteed && requests == limits { "Guaranteed" } else { "Burstable" }
}

/// Adds the cpu and memory of one list and tells how many of the two it had.
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

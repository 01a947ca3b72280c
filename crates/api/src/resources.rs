//! Sums over the containers of a pod.

use std::collections::BTreeMap;

use schema::quantity::Quantity;
use serde_json::Value;

use crate::json::Json as _;

/// Quantities by the names of resources.
pub type ResourceList = BTreeMap<String, Quantity>;

/// The quantities of an object field such as `requests`.
pub fn list(value: &Value, field: &str) -> ResourceList {
    let entries = value.entries(field);
    entries.filter_map(|(name, value)| Some((name.to_owned(), Quantity::read(value)?))).collect()
}

/// Adds what another list has.
pub fn add(sum: &mut ResourceList, more: &ResourceList) {
    for (name, quantity) in more {
        // The first one decides how the sum is printed.
        sum.entry(name.clone()).and_modify(|sum| *sum = *sum + *quantity).or_insert(*quantity);
    }
}

fn raise(list: &mut ResourceList, floor: &ResourceList) {
    for (name, quantity) in floor {
        let old = list.entry(name.clone()).or_insert(*quantity);
        if *quantity > *old {
            *old = *quantity;
        }
    }
}

/// What a pod needs in all of `field` (`requests` or `limits`): the sum of what runs together, or what the
/// greediest init container needs on top of the sidecars started before it. What the pod says for itself
/// counts instead.
pub fn of_pod(spec: &Value, field: &str) -> ResourceList {
    let mut sum = ResourceList::new();
    for container in spec.items("containers") {
        add(&mut sum, &list(container.at("resources"), field));
    }
    let mut sidecars = ResourceList::new();
    let mut starting = ResourceList::new();
    for container in spec.items("initContainers") {
        let mut own = list(container.at("resources"), field);
        if container.text("restartPolicy") == "Always" {
            add(&mut sum, &own);
            add(&mut sidecars, &own);
            raise(&mut starting, &sidecars);
        } else {
            add(&mut own, &sidecars);
            raise(&mut starting, &own);
        }
    }
    raise(&mut sum, &starting);
    for (name, quantity) in list(spec.at("resources"), field) {
        if name == "cpu" || name == "memory" || name.starts_with("hugepages-") {
            sum.insert(name, quantity);
        }
    }
    sum
}

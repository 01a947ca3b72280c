//! Resource totals of pods. Upstream: `component-helpers/resource`.

use std::collections::BTreeMap;

use schema::quantity::Quantity;
use serde_json::Value;

use crate::json::JsonExt as _;

/// Quantities by resource name.
pub type ResourceList = BTreeMap<String, Quantity>;

/// The quantities of an object field such as `requests`.
pub fn resource_list(value: &Value, field: &str) -> ResourceList {
    let entries = value.entries(field);
    entries.filter_map(|(name, value)| Some((name.to_owned(), Quantity::from_value(value)?))).collect()
}

/// Adds the quantities of another list.
pub fn add_resources(sum: &mut ResourceList, other: &ResourceList) {
    for (name, quantity) in other {
        // The first quantity determines the format of the sum.
        sum.entry(name.clone()).and_modify(|sum| *sum = *sum + *quantity).or_insert(*quantity);
    }
}

fn max_into(list: &mut ResourceList, floor: &ResourceList) {
    for (name, quantity) in floor {
        let old = list.entry(name.clone()).or_insert(*quantity);
        if *quantity > *old {
            *old = *quantity;
        }
    }
}

/// The total of a pod's `field` (`requests` or `limits`): the sum of the containers that run together,
/// or the need of an init container with the sidecars started before it if that is larger. Pod-level
/// resources override the total.
pub fn pod_resources(spec: &Value, field: &str) -> ResourceList {
    let mut sum = sum_containers(spec, |container, _| resource_list(container.at("resources"), field));
    sum.extend(pod_level_resources(spec, field));
    sum
}

/// Like [`pod_resources`], but a resize in progress counts with the maximum of desired, allocated and actual
/// resources, for each container and for the pod. Desired resources of an infeasible resize do not count.
pub fn pod_resources_in_use(pod: &Value, field: &str) -> ResourceList {
    let (spec, status) = (pod.at("spec"), pod.at("status"));
    let is_infeasible = status.items("conditions").iter().any(|condition| {
        condition.text("type") == "PodResizePending" && condition.text("reason") == "Infeasible"
    });
    let effective = |spec_resources: &Value, container_status: &Value| {
        let mut highest = ResourceList::new();
        if !is_infeasible || container_status.at("resources").is_null() {
            highest = resource_list(spec_resources, field);
        }
        max_into(&mut highest, &resource_list(container_status.at("resources"), field));
        if field == "requests" && !container_status.at("resources").is_null() {
            max_into(&mut highest, &resource_list(container_status, "allocatedResources"));
        }
        highest
    };
    let mut sum = sum_containers(spec, |container, is_long_running| {
        let statuses =
            ["containerStatuses", "initContainerStatuses"].into_iter().flat_map(|all| status.items(all));
        let container_status = statuses
            .filter(|_| is_long_running)
            .find(|container_status| container_status.text("name") == container.text("name"));
        effective(container.at("resources"), container_status.unwrap_or(&Value::Null))
    });
    let own = effective(spec.at("resources"), status);
    for (name, _) in pod_level_resources(spec, field) {
        let amount = own.get(&name).copied().unwrap_or(Quantity::ZERO);
        sum.insert(name, amount);
    }
    sum
}

/// The total of all containers. `container_resources` gets whether the container runs for the lifetime
/// of the pod.
fn sum_containers(spec: &Value, container_resources: impl Fn(&Value, bool) -> ResourceList) -> ResourceList {
    let mut sum = ResourceList::new();
    for container in spec.items("containers") {
        add_resources(&mut sum, &container_resources(container, true));
    }
    let mut sidecars = ResourceList::new();
    let mut starting = ResourceList::new();
    for container in spec.items("initContainers") {
        let is_long_running = container.text("restartPolicy") == "Always";
        let mut own = container_resources(container, is_long_running);
        if is_long_running {
            add_resources(&mut sum, &own);
            add_resources(&mut sidecars, &own);
            max_into(&mut starting, &sidecars);
        } else {
            add_resources(&mut own, &sidecars);
            max_into(&mut starting, &own);
        }
    }
    max_into(&mut sum, &starting);
    sum
}

/// The pod-level resources of a pod, as far as they are supported at the pod level.
fn pod_level_resources(spec: &Value, field: &str) -> ResourceList {
    let mut own = resource_list(spec.at("resources"), field);
    own.retain(|name, _| name == "cpu" || name == "memory" || name.starts_with("hugepages-"));
    own
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn resize_uses_maximum_of_spec_and_status() {
        let check = |requested_cpu: &str, container_status: Value, reason: &str, expected: &str| {
            let main = json!({"name": "a", "resources": {"requests": {"cpu": requested_cpu}}});
            let init = json!({"name": "i", "resources": {"requests": {"cpu": "1m"}}});
            let side =
                json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "10m"}}});
            let sidecar_status = json!({"name": "s", "resources": {"requests": {"cpu": "30m"}}});
            // For an init container that is not a sidecar, the status does not count.
            let init_container_status = json!({"name": "i", "resources": {"requests": {"cpu": "9"}}});
            let pod = json!({
                "spec": {"containers": [main], "initContainers": [init, side]},
                "status": {
                    "containerStatuses": [container_status], "initContainerStatuses": [init_container_status, sidecar_status],
                    "conditions": [{"type": "PodResizePending", "reason": reason}],
                },
            });
            assert_eq!(
                pod_resources_in_use(&pod, "requests")["cpu"].to_string(),
                expected,
                "{requested_cpu} {reason}"
            );
        };
        let container_with_status = |actual: &str, allocated: &str| json!({"name": "a", "resources": {"requests": {"cpu": actual}}, "allocatedResources": {"cpu": allocated}});
        check("100m", json!({}), "", "130m");
        check("100m", container_with_status("200m", "50m"), "", "230m");
        check("100m", container_with_status("50m", "300m"), "", "330m");
        check("400m", container_with_status("50m", "300m"), "Deferred", "430m");
        check("400m", container_with_status("50m", "300m"), "Infeasible", "330m");
    }

    #[test]
    fn pod_level_resources_override_containers() {
        let check = |status: Value, expected: [&str; 2]| {
            let main = json!({"name": "a", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "9"}}});
            let own = json!({"requests": {"cpu": "2"}, "limits": {"cpu": "3"}});
            let pod = json!({"spec": {"containers": [main], "resources": own}, "status": status});
            let found =
                ["requests", "limits"].map(|field| pod_resources_in_use(&pod, field)["cpu"].to_string());
            assert_eq!(found, expected);
        };
        check(json!({}), ["2", "3"]);
        let given = json!({"requests": {"cpu": "2500m"}, "limits": {"cpu": "4"}});
        check(json!({"resources": given, "allocatedResources": {"cpu": "2700m"}}), ["2700m", "4"]);
    }
}

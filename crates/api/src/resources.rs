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
    let mut sum = of_containers(spec, |container, _| list(container.at("resources"), field));
    sum.extend(for_itself(spec, field));
    sum
}

/// What a pod has of its node in all: the same, but while it is resized the highest of what is wanted, promised and given
/// counts for each container and for the pod itself. What is wanted and can never be had counts for nothing.
pub fn in_use(pod: &Value, field: &str) -> ResourceList {
    let (spec, status) = (pod.at("spec"), pod.at("status"));
    let is_refused = status.items("conditions").iter().any(|condition| {
        condition.text("type") == "PodResizePending" && condition.text("reason") == "Infeasible"
    });
    let highest = |wanted: &Value, told: &Value| {
        let mut highest = ResourceList::new();
        if !is_refused || told.at("resources").is_null() {
            highest = list(wanted, field);
        }
        raise(&mut highest, &list(told.at("resources"), field));
        if field == "requests" && !told.at("resources").is_null() {
            raise(&mut highest, &list(told, "allocatedResources"));
        }
        highest
    };
    let mut sum = of_containers(spec, |container, stays| {
        let told =
            ["containerStatuses", "initContainerStatuses"].into_iter().flat_map(|all| status.items(all));
        let told = told.filter(|_| stays).find(|told| told.text("name") == container.text("name"));
        highest(container.at("resources"), told.unwrap_or(&Value::Null))
    });
    let own = highest(spec.at("resources"), status);
    for (name, _) in for_itself(spec, field) {
        let amount = own.get(&name).copied().unwrap_or(Quantity::ZERO);
        sum.insert(name, amount);
    }
    sum
}

/// The sum over containers of what each of them needs; whether it runs for as long as the pod does is said beside it.
fn of_containers(spec: &Value, need: impl Fn(&Value, bool) -> ResourceList) -> ResourceList {
    let mut sum = ResourceList::new();
    for container in spec.items("containers") {
        add(&mut sum, &need(container, true));
    }
    let mut sidecars = ResourceList::new();
    let mut starting = ResourceList::new();
    for container in spec.items("initContainers") {
        let stays = container.text("restartPolicy") == "Always";
        let mut own = need(container, stays);
        if stays {
            add(&mut sum, &own);
            add(&mut sidecars, &own);
            raise(&mut starting, &sidecars);
        } else {
            add(&mut own, &sidecars);
            raise(&mut starting, &own);
        }
    }
    raise(&mut sum, &starting);
    sum
}

/// What a pod says for itself, of the resources that it can.
fn for_itself(spec: &Value, field: &str) -> ResourceList {
    let mut own = list(spec.at("resources"), field);
    own.retain(|name, _| name == "cpu" || name == "memory" || name.starts_with("hugepages-"));
    own
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_highest_counts_while_a_pod_is_resized() {
        let check = |wanted: &str, told: Value, reason: &str, expected: &str| {
            let main = json!({"name": "a", "resources": {"requests": {"cpu": wanted}}});
            let init = json!({"name": "i", "resources": {"requests": {"cpu": "1m"}}});
            let side =
                json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "10m"}}});
            let grown = json!({"name": "s", "resources": {"requests": {"cpu": "30m"}}});
            // Of one that comes and goes nothing counts but what it wants.
            let gone = json!({"name": "i", "resources": {"requests": {"cpu": "9"}}});
            let pod = json!({
                "spec": {"containers": [main], "initContainers": [init, side]},
                "status": {
                    "containerStatuses": [told], "initContainerStatuses": [gone, grown],
                    "conditions": [{"type": "PodResizePending", "reason": reason}],
                },
            });
            assert_eq!(in_use(&pod, "requests")["cpu"].to_string(), expected, "{wanted} {reason}");
        };
        let told = |given: &str, promised: &str| json!({"name": "a", "resources": {"requests": {"cpu": given}}, "allocatedResources": {"cpu": promised}});
        check("100m", json!({}), "", "130m");
        check("100m", told("200m", "50m"), "", "230m");
        check("100m", told("50m", "300m"), "", "330m");
        check("400m", told("50m", "300m"), "Deferred", "430m");
        check("400m", told("50m", "300m"), "Infeasible", "330m");
    }

    #[test]
    fn what_a_pod_says_for_itself_counts_instead() {
        let check = |status: Value, expected: [&str; 2]| {
            let main = json!({"name": "a", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "9"}}});
            let own = json!({"requests": {"cpu": "2"}, "limits": {"cpu": "3"}});
            let pod = json!({"spec": {"containers": [main], "resources": own}, "status": status});
            let found = ["requests", "limits"].map(|field| in_use(&pod, field)["cpu"].to_string());
            assert_eq!(found, expected);
        };
        check(json!({}), ["2", "3"]);
        let given = json!({"requests": {"cpu": "2500m"}, "limits": {"cpu": "4"}});
        check(json!({"resources": given, "allocatedResources": {"cpu": "2700m"}}), ["2700m", "4"]);
    }
}

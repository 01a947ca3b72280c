//! Parts of a device: how much of its capacity a request takes.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::{Format, Quantity};

type Requests = BTreeMap<String, Text>;

/// What is taken of each capacity of a device, by what is asked and how the device rounds it; `None` where the
/// device has no such capacity or gives no such amount.
pub fn taken(requests: Option<&Requests>, device: &resource::Device) -> Option<BTreeMap<String, Quantity>> {
    let none = BTreeMap::new();
    let capacity = device.capacity.as_ref().unwrap_or(&none);
    if requests.is_some_and(|requests| requests.keys().any(|name| !capacity.contains_key(name))) {
        return None;
    }
    let each = capacity.iter().map(|(name, capacity)| {
        let asked = requests.and_then(|requests| requests.get(name)).map(quantity);
        Some((name.clone(), rounded(asked, capacity)?))
    });
    each.collect()
}

/// An amount as the device gives it, `None` if it does not.
fn rounded(asked: Option<Quantity>, capacity: &resource::DeviceCapacity) -> Option<Quantity> {
    let policy = capacity.request_policy.as_ref();
    let default = policy.and_then(|policy| policy.default.as_ref()).map(quantity);
    let Some(policy) = policy else { return Some(asked.unwrap_or_else(|| quantity(&capacity.value))) };
    let values: Vec<Quantity> = policy.valid_values.iter().flatten().map(quantity).collect();
    let amount = match (asked, &policy.valid_range) {
        (None, _) => default.unwrap_or_else(|| quantity(&capacity.value)),
        (Some(asked), Some(range)) => up(asked, range),
        (Some(asked), None) => values.iter().copied().find(|value| asked <= *value).unwrap_or(asked),
    };
    let given = match &policy.valid_range {
        _ if default == Some(amount) => true,
        Some(range) => {
            let most = range.max.as_ref().map(quantity);
            most.is_none_or(|most| amount <= most) && over_step(amount, range) == Some(0)
        }
        None => values.is_empty() || values.contains(&amount),
    };
    given.then_some(amount)
}

/// The next amount of the range that is enough.
fn up(asked: Quantity, range: &resource::CapacityRequestPolicyRange) -> Quantity {
    let least = quantity(&range.min);
    if asked < least {
        return least;
    }
    match (over_step(asked, range), &range.step) {
        (Some(over), Some(step)) if over != 0 => {
            let more = quantity(step).value().saturating_sub(over);
            Quantity::new(asked.value().saturating_add(more), Format::BinarySI)
        }
        _ => asked,
    }
}

/// How much an amount is beyond the last step; `None` if there are no such steps.
fn over_step(amount: Quantity, range: &resource::CapacityRequestPolicyRange) -> Option<i64> {
    let Some(step) = &range.step else { return Some(0) };
    amount.value().checked_sub(quantity(&range.min).value())?.checked_rem(quantity(step).value())
}

/// The API server has seen to it that it is one.
pub fn quantity(text: &Text) -> Quantity {
    Quantity::parse(&text.0).unwrap_or_else(|_| Quantity::new(0, Format::BinarySI))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(policy: &Value, asked: Option<&str>, expected: Option<&str>) {
        let device = json!({"name": "d", "capacity": {"memory": {"value": "10Gi", "requestPolicy": policy}}});
        let device = serde_json::from_value(device).expect("it is a device");
        let requests = asked.map(|asked| BTreeMap::from([("memory".to_owned(), Text(asked.to_owned()))]));
        let taken = taken(requests.as_ref(), &device).map(|taken| taken["memory"].to_string());
        assert_eq!(taken.as_deref(), expected, "{policy} {asked:?}");
    }

    #[test]
    fn amounts_are_rounded_as_the_device_says() {
        check(&Value::Null, None, Some("10Gi"));
        check(&Value::Null, Some("3Gi"), Some("3Gi"));
        let values = json!({"default": "1Gi", "validValues": ["1Gi", "2Gi", "4Gi"]});
        check(&values, None, Some("1Gi"));
        check(&values, Some("3Gi"), Some("4Gi"));
        check(&values, Some("5Gi"), None);
        let range = json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi", "max": "4Gi"}});
        check(&range, None, Some("1Gi"));
        check(&range, Some("1"), Some("1Gi"));
        check(&range, Some("1500Mi"), Some("2Gi"));
        check(&range, Some("2Gi"), Some("2Gi"));
        check(&range, Some("4097Mi"), None);
        check(&json!({"default": "1Gi", "validRange": {"min": "1Gi"}}), Some("1500Mi"), Some("1500Mi"));
        check(&json!({"default": "1Gi", "validRange": {"min": "1Gi", "step": "0"}}), Some("2Gi"), None);
    }

    #[test]
    fn a_capacity_the_device_has_not_is_never_given() {
        let device: resource::Device = serde_json::from_value(json!({"name": "d"})).expect("it is a device");
        assert_eq!(taken(Some(&BTreeMap::from([("x".to_owned(), Text("1".into()))])), &device), None);
        assert_eq!(taken(None, &device), Some(BTreeMap::new()));
    }
}

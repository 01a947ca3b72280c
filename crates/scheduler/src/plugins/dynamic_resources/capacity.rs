//! Parts of a device: how much of its capacity a request takes.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::{Format, Quantity};

type Requests = BTreeMap<String, Text>;

/// What is taken of each capacity of a device, by what is asked and how the device rounds it; `None` where the
/// device has no such capacity or gives no such amount.
pub fn consumed_capacity(
    requests: Option<&Requests>,
    device: &resource::Device,
) -> Option<BTreeMap<String, Quantity>> {
    let none = BTreeMap::new();
    let capacity = device.capacity.as_ref().unwrap_or(&none);
    if requests.is_some_and(|requests| requests.keys().any(|name| !capacity.contains_key(name))) {
        return None;
    }
    let each = capacity.iter().map(|(name, capacity)| {
        let requested = requests.and_then(|requests| requests.get(name)).map(quantity);
        Some((name.clone(), round_request(requested, capacity)?))
    });
    each.collect()
}

/// An amount as the device gives it, `None` if it does not.
fn round_request(requested: Option<Quantity>, capacity: &resource::DeviceCapacity) -> Option<Quantity> {
    let policy = capacity.request_policy.as_ref();
    let default = policy.and_then(|policy| policy.default.as_ref()).map(quantity);
    let Some(policy) = policy else { return Some(requested.unwrap_or_else(|| quantity(&capacity.value))) };
    let values: Vec<Quantity> = policy.valid_values.iter().flatten().map(quantity).collect();
    let amount = match (requested, &policy.valid_range) {
        (None, _) => default.unwrap_or_else(|| quantity(&capacity.value)),
        (Some(requested), Some(range)) => round_up_to_step(requested, range),
        (Some(requested), None) => {
            values.iter().copied().find(|value| requested <= *value).unwrap_or(requested)
        }
    };
    let given = match &policy.valid_range {
        _ if default == Some(amount) => true,
        Some(range) => {
            let max = range.max.as_ref().map(quantity);
            max.is_none_or(|max| amount <= max) && remainder_of_step(amount, range) == Some(0)
        }
        None => values.is_empty() || values.contains(&amount),
    };
    given.then_some(amount)
}

/// The next amount of the range that is enough.
fn round_up_to_step(requested: Quantity, range: &resource::CapacityRequestPolicyRange) -> Quantity {
    let min = quantity(&range.min);
    if requested < min {
        return min;
    }
    match (remainder_of_step(requested, range), &range.step) {
        (Some(over), Some(step)) if over != 0 => {
            let more = quantity(step).value().saturating_sub(over);
            Quantity::new(requested.value().saturating_add(more), Format::BinarySI)
        }
        _ => requested,
    }
}

/// How much an amount is beyond the last step; `None` if there are no such steps.
fn remainder_of_step(amount: Quantity, range: &resource::CapacityRequestPolicyRange) -> Option<i64> {
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
    fn check(policy: &Value, requested: Option<&str>, expected: Option<&str>) {
        let device = json!({"name": "d", "capacity": {"memory": {"value": "10Gi", "requestPolicy": policy}}});
        let device = serde_json::from_value(device).expect("it is a device");
        let requests =
            requested.map(|requested| BTreeMap::from([("memory".to_owned(), Text(requested.to_owned()))]));
        let taken = consumed_capacity(requests.as_ref(), &device).map(|taken| taken["memory"].to_string());
        assert_eq!(taken.as_deref(), expected, "{policy} {requested:?}");
    }

    #[test]
    fn rounds_requests_by_request_policy() {
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
    fn rejects_requests_for_unknown_capacity() {
        let device: resource::Device = serde_json::from_value(json!({"name": "d"})).expect("it is a device");
        assert_eq!(
            consumed_capacity(Some(&BTreeMap::from([("x".to_owned(), Text("1".into()))])), &device),
            None
        );
        assert_eq!(consumed_capacity(None, &device), Some(BTreeMap::new()));
    }
}

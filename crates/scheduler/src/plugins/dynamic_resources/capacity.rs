//! Consumable capacity: how much of a device's capacity a request consumes.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::{Format, Quantity};

type Requests = BTreeMap<String, Text>;

/// Returns how much of each capacity of a device a request consumes, rounded by the request policy. `None` if
/// the device lacks a requested capacity or the policy does not allow the amount.
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

/// Rounds an amount by the request policy; `None` if the policy does not allow it.
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

/// Rounds up to the next step of the range.
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

/// The remainder of an amount over the last step. `None` if the calculation overflows or the step is 0.
fn remainder_of_step(amount: Quantity, range: &resource::CapacityRequestPolicyRange) -> Option<i64> {
    let Some(step) = &range.step else { return Some(0) };
    amount.value().checked_sub(quantity(&range.min).value())?.checked_rem(quantity(step).value())
}

/// The API server has validated quantities; an invalid one counts as 0.
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

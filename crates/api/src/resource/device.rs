//! Validates a device of a ResourceSlice.

use serde_json::Value;

use super::{
    MAX_ID_BYTES, TAINT_EFFECTS, validate_binding_conditions, validate_label, validate_list,
    validate_qualified_name, validate_unique_list,
};
use crate::core::pod::validate_node_selector;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::quantity::Quantity;
use crate::{meta, names};

const MAX_ATTRIBUTES_AND_CAPACITIES: usize = 32;
const MAX_KEY_BYTES: usize = 63 + 1 + MAX_ID_BYTES;
const MAX_STRING_BYTES: usize = 64;
const MAX_TAINTS: usize = 16;
const MAX_COUNTERS: usize = 32;
const MAX_CONSUMED_SETS: usize = 2;
const MAX_VALID_VALUES: usize = 10;

pub(super) fn validate_device(
    device: &Value,
    old: Option<&Value>,
    per_device_node_selection: bool,
    path: &Path,
    errors: &mut ErrorList,
) {
    validate_label(device.text("name"), &path.child("name"), errors);
    let total = device.entries("attributes").count() + device.entries("capacity").count();
    if total > MAX_ATTRIBUTES_AND_CAPACITIES {
        let message = format!(
            "the total number of attributes and capacities must not exceed {MAX_ATTRIBUTES_AND_CAPACITIES}"
        );
        errors.invalid(path, total, &message);
    }
    for (key, item) in device.entries("attributes") {
        validate_qualified_name(key, &path.child("attributes"), errors);
        validate_attribute(item, &path.child("attributes").key(&truncate_middle(key)), errors);
    }
    let shared = device.flag("allowMultipleAllocations");
    for (key, item) in device.entries("capacity") {
        validate_qualified_name(key, &path.child("capacity"), errors);
        validate_capacity(item, shared, &path.child("capacity").key(&truncate_middle(key)), errors);
    }
    if old.is_none_or(|old| !meta::semantic_equal(old.at("taints"), device.at("taints"))) {
        validate_list(device.items("taints"), MAX_TAINTS, &path.child("taints"), errors, validate_taint);
    }
    let set_name = |item: &Value| item.text("counterSet").to_owned();
    let consumed = device.items("consumesCounters");
    let at = path.child("consumesCounters");
    validate_unique_list(consumed, MAX_CONSUMED_SETS, &at, errors, validate_counter_consumption, set_name);
    validate_node_selection(device, per_device_node_selection, path, errors);
    validate_binding_conditions(device, path, errors);
}

/// Truncates a long key in the middle.
fn truncate_middle(key: &str) -> String {
    if key.len() <= MAX_KEY_BYTES {
        return key.to_owned();
    }
    let remaining = MAX_KEY_BYTES - 3;
    let (head, tail) = (remaining.div_ceil(2), key.len() - remaining / 2);
    let cut = |i: usize| (i..key.len()).find(|i| key.is_char_boundary(*i)).unwrap_or(key.len());
    format!("{}...{}", &key[..cut(head)], &key[cut(tail)..])
}

fn validate_attribute(attribute: &Value, path: &Path, errors: &mut ErrorList) {
    let given = ["bool", "int", "string", "version"].iter().filter(|field| attribute.has(field)).count();
    for field in ["string", "version"] {
        let Some(text) = attribute.at(field).as_str() else { continue };
        if field == "version" && !is_semver(text) {
            let message = "must be a string compatible with semver.org spec 2.0.0";
            errors.invalid(&path.child(field), text, message);
        }
        if text.len() > MAX_STRING_BYTES {
            errors.too_long(&path.child(field), MAX_STRING_BYTES);
        }
    }
    if given != 1 {
        let rendered = if given == 0 { "".into() } else { attribute.clone() };
        errors.invalid(path, rendered, "exactly one value must be specified");
    }
}

fn is_semver(text: &str) -> bool {
    let word = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let digits = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
    let number = |text: &str| digits(text) && (text == "0" || !text.starts_with('0'));
    let (rest, build) = text.split_once('+').map_or((text, None), |(rest, build)| (rest, Some(build)));
    let (core, pre) = rest.split_once('-').map_or((rest, None), |(core, pre)| (core, Some(pre)));
    core.split('.').count() == 3
        && core.split('.').all(number)
        && pre.is_none_or(|pre| pre.split('.').all(|part| word(part) && (!digits(part) || number(part))))
        && build.is_none_or(|build| build.split('.').all(word))
}

fn validate_capacity(capacity: &Value, shared: bool, path: &Path, errors: &mut ErrorList) {
    let (policy, path) = (capacity.at("requestPolicy"), path.child("requestPolicy"));
    if policy.is_null() {
        return;
    }
    if !shared {
        errors.forbidden(&path, "allowMultipleAllocations must be true");
        return;
    }
    let values = policy.items("validValues");
    let (has_values, has_range) = (!values.is_empty(), policy.has("validRange"));
    if has_values && has_range {
        errors.forbidden(
            &path,
            "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time",
        );
        return;
    }
    let field = if has_values { "validValues" } else { "validRange" };
    if !has_values && !has_range {
        return;
    }
    let Some(default) = Quantity::from_value(policy.at("default")) else {
        errors.required(&path.child("default"), &format!("required when {field} is defined"));
        return;
    };
    let Some(capacity_value) = Quantity::from_value(capacity.at("value")) else { return };
    if has_values {
        validate_policy_values(values, default, capacity_value, &path.child(field), errors);
    } else {
        validate_policy_range(policy.at("validRange"), default, capacity_value, &path.child(field), errors);
    }
}

fn validate_policy_values(
    values: &[Value],
    default: Quantity,
    capacity_value: Quantity,
    path: &Path,
    errors: &mut ErrorList,
) {
    let options: Vec<Quantity> = values.iter().filter_map(Quantity::from_value).collect();
    for (i, pair) in options.windows(2).enumerate() {
        if pair[0] > pair[1] {
            let message = "values must be sorted in ascending order";
            errors.invalid(&path.index(i + 1), pair[1].to_string(), message);
        }
    }
    let too_large = |item: &Value, path: &Path, errors: &mut ErrorList| {
        if let Some(option) = Quantity::from_value(item).filter(|option| *option > capacity_value) {
            let message = format!("option is larger than capacity value: {capacity_value}");
            errors.invalid(path, option.to_string(), &message);
        }
    };
    let key = |item: &Value| Quantity::from_value(item).map_or(0, |option| option.value()).to_string();
    validate_unique_list(values, MAX_VALID_VALUES, path, errors, too_large, key);
    if values.len() > MAX_VALID_VALUES || !options.contains(&default) {
        let message = "default value is not valid according to the requestPolicy";
        errors.invalid(path, default.to_string(), message);
    }
}

fn validate_policy_range(
    range: &Value,
    default: Quantity,
    capacity_value: Quantity,
    path: &Path,
    errors: &mut ErrorList,
) {
    let Some(min) = Quantity::from_value(range.at("min")) else {
        errors.required(&path.child("min"), "required when validRange is defined");
        return;
    };
    let (max, step) = (Quantity::from_value(range.at("max")), Quantity::from_value(range.at("step")));
    let mut report = |is_invalid: bool, field: &str, value: Quantity, message: String| {
        if is_invalid {
            errors.invalid(&path.child(field), value.to_string(), &message);
        }
    };
    report(min > capacity_value, "min", min, format!("min is larger than capacity value: {capacity_value}"));
    report(default < min, "min", default, format!("default is less than min: {min}"));
    if let Some(max) = max {
        report(min > max, "max", min, format!("min is larger than max: {max}"));
        report(
            max > capacity_value,
            "max",
            max,
            format!("max is larger than capacity value: {capacity_value}"),
        );
        report(default > max, "max", default, format!("default is more than max: {max}"));
    }
    if let Some(step) = step {
        let first_step = min + step;
        report(
            first_step > capacity_value,
            "step",
            step,
            format!("one step {first_step} is larger than capacity value: {capacity_value}"),
        );
        for value in std::iter::once(default).chain(max) {
            let offset = i128::from(value.value()) - i128::from(min.value());
            // With a step of zero only the minimum is valid.
            let is_off_step =
                offset.checked_rem(i128::from(step.value())).map_or(offset != 0, |rest| rest != 0);
            let message = format!("value is not a multiple of a given step ({step}) from ({min})");
            report(is_off_step, "step", value, message);
        }
    }
}

fn validate_taint(taint: &Value, path: &Path, errors: &mut ErrorList) {
    meta::validate_label_name(taint.text("key"), &path.child("key"), errors);
    let (value, effect) = (taint.text("value"), taint.text("effect"));
    if !value.is_empty() {
        errors.invalid_each(&path.child("value"), value, names::label_value(value));
    }
    if effect.is_empty() {
        errors.required(&path.child("effect"), "");
    } else if !TAINT_EFFECTS.contains(&effect) {
        errors.not_supported(&path.child("effect"), effect, &TAINT_EFFECTS);
    }
}

fn validate_counter_consumption(consumption: &Value, path: &Path, errors: &mut ErrorList) {
    let set = consumption.text("counterSet");
    if set.is_empty() {
        errors.required(&path.child("counterSet"), "");
    } else {
        validate_label(set, &path.child("counterSet"), errors);
    }
    validate_counters(consumption, path, errors);
}

pub(super) fn validate_counters(of: &Value, path: &Path, errors: &mut ErrorList) {
    let path = path.child("counters");
    let count = of.entries("counters").count();
    if count == 0 {
        errors.required(&path, "");
    } else if count > MAX_COUNTERS {
        errors.too_many(&path, count, MAX_COUNTERS);
    } else {
        of.entries("counters").for_each(|(name, _)| validate_label(name, &path, errors));
    }
}

/// Validates the node selection of a device with `perDeviceNodeSelection`.
fn validate_node_selection(
    device: &Value,
    per_device_node_selection: bool,
    path: &Path,
    errors: &mut ErrorList,
) {
    const EXACTLY_ONE_REQUIRED: &str = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
    let fields = ["nodeName", "nodeSelector", "allNodes"];
    if !per_device_node_selection {
        if fields.iter().any(|field| device.has(field)) {
            let message = "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
            errors.invalid(path, Value::Null, message);
        }
        return;
    }
    let mut specified = Vec::new();
    if let Some(name) = device.at("nodeName").as_str() {
        let path = path.child("nodeName");
        if name.is_empty() {
            errors.invalid(&path, name, "must not be empty");
        } else {
            specified.push("`nodeName`");
            errors.invalid_each(&path, name, names::dns1123_subdomain(name));
        }
    }
    if device.has("nodeSelector") {
        specified.push("`nodeSelector`");
        validate_node_selector(errors, device.at("nodeSelector"), &path.child("nodeSelector"));
    }
    match device.at("allNodes") {
        Value::Bool(true) => specified.push("`allNodes`"),
        Value::Bool(false) => {
            errors.invalid(&path.child("allNodes"), false, "must be either unset or set to true");
        }
        _ => {}
    }
    match specified.len() {
        0 => errors.required(path, EXACTLY_ONE_REQUIRED),
        1 => {}
        _ => errors.invalid(path, format!("{{{}}}", specified.join(", ")), EXACTLY_ONE_REQUIRED),
    }
}

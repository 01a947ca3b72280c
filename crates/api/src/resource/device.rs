//! One device of a ResourceSlice.

use serde_json::Value;

use super::{MAX_ID, TAINT_EFFECTS, binding_conditions, each, each_once, label, qualified};
use crate::core::pod::node_selector;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::quantity::Quantity;
use crate::{meta, names};

const MAX_ATTRIBUTES_AND_CAPACITIES: usize = 32;
const MAX_KEY: usize = 63 + 1 + MAX_ID;
const MAX_TEXT: usize = 64;
const MAX_TAINTS: usize = 16;
const MAX_COUNTERS: usize = 32;
const MAX_CONSUMED_SETS: usize = 2;
const MAX_VALID_VALUES: usize = 10;

pub(super) fn device(
    device: &Value,
    old: Option<&Value>,
    picks_nodes: bool,
    path: &Path,
    errors: &mut Errors,
) {
    label(device.text("name"), &path.at("name"), errors);
    let total = device.entries("attributes").count() + device.entries("capacity").count();
    if total > MAX_ATTRIBUTES_AND_CAPACITIES {
        let message = format!(
            "the total number of attributes and capacities must not exceed {MAX_ATTRIBUTES_AND_CAPACITIES}"
        );
        errors.invalid(path, total, &message);
    }
    for (key, item) in device.entries("attributes") {
        qualified(key, &path.at("attributes"), errors);
        attribute(item, &path.at("attributes").key(&shortened(key)), errors);
    }
    let shared = device.flag("allowMultipleAllocations");
    for (key, item) in device.entries("capacity") {
        qualified(key, &path.at("capacity"), errors);
        capacity(item, shared, &path.at("capacity").key(&shortened(key)), errors);
    }
    if old.is_none_or(|old| !meta::same(old.at("taints"), device.at("taints"))) {
        each(device.items("taints"), MAX_TAINTS, &path.at("taints"), errors, taint);
    }
    let set_name = |item: &Value| item.text("counterSet").to_owned();
    let consumed = device.items("consumesCounters");
    let at = path.at("consumesCounters");
    each_once(consumed, MAX_CONSUMED_SETS, &at, errors, consumption, set_name);
    nodes(device, picks_nodes, path, errors);
    binding_conditions(device, path, errors);
}

/// A long key with its middle left out.
fn shortened(key: &str) -> String {
    if key.len() <= MAX_KEY {
        return key.to_owned();
    }
    let remaining = MAX_KEY - 3;
    let (head, tail) = (remaining.div_ceil(2), key.len() - remaining / 2);
    let cut = |i: usize| (i..key.len()).find(|i| key.is_char_boundary(*i)).unwrap_or(key.len());
    format!("{}...{}", &key[..cut(head)], &key[cut(tail)..])
}

fn attribute(attribute: &Value, path: &Path, errors: &mut Errors) {
    let given = ["bool", "int", "string", "version"].iter().filter(|field| attribute.has(field)).count();
    for field in ["string", "version"] {
        let Some(text) = attribute.at(field).as_str() else { continue };
        if field == "version" && !is_semver(text) {
            let message = "must be a string compatible with semver.org spec 2.0.0";
            errors.invalid(&path.at(field), text, message);
        }
        if text.len() > MAX_TEXT {
            errors.too_long(&path.at(field), MAX_TEXT);
        }
    }
    if given != 1 {
        let shown = if given == 0 { "".into() } else { attribute.clone() };
        errors.invalid(path, shown, "exactly one value must be specified");
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

fn capacity(capacity: &Value, shared: bool, path: &Path, errors: &mut Errors) {
    let (policy, path) = (capacity.at("requestPolicy"), path.at("requestPolicy"));
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
    let Some(default) = Quantity::read(policy.at("default")) else {
        errors.required(&path.at("default"), &format!("required when {field} is defined"));
        return;
    };
    let Some(most) = Quantity::read(capacity.at("value")) else { return };
    if has_values {
        valid_values(values, default, most, &path.at(field), errors);
    } else {
        valid_range(policy.at("validRange"), default, most, &path.at(field), errors);
    }
}

fn valid_values(values: &[Value], default: Quantity, most: Quantity, path: &Path, errors: &mut Errors) {
    let options: Vec<Quantity> = values.iter().filter_map(Quantity::read).collect();
    for (i, pair) in options.windows(2).enumerate() {
        if pair[0] > pair[1] {
            let message = "values must be sorted in ascending order";
            errors.invalid(&path.index(i + 1), pair[1].to_string(), message);
        }
    }
    let too_large = |item: &Value, path: &Path, errors: &mut Errors| {
        if let Some(option) = Quantity::read(item).filter(|option| *option > most) {
            let message = format!("option is larger than capacity value: {most}");
            errors.invalid(path, option.to_string(), &message);
        }
    };
    let key = |item: &Value| Quantity::read(item).map_or(0, |option| option.value()).to_string();
    each_once(values, MAX_VALID_VALUES, path, errors, too_large, key);
    if values.len() > MAX_VALID_VALUES || !options.contains(&default) {
        let message = "default value is not valid according to the requestPolicy";
        errors.invalid(path, default.to_string(), message);
    }
}

fn valid_range(range: &Value, default: Quantity, most: Quantity, path: &Path, errors: &mut Errors) {
    let Some(min) = Quantity::read(range.at("min")) else {
        errors.required(&path.at("min"), "required when validRange is defined");
        return;
    };
    let (max, step) = (Quantity::read(range.at("max")), Quantity::read(range.at("step")));
    let mut complain = |wrong: bool, field: &str, value: Quantity, message: String| {
        if wrong {
            errors.invalid(&path.at(field), value.to_string(), &message);
        }
    };
    complain(min > most, "min", min, format!("min is larger than capacity value: {most}"));
    complain(default < min, "min", default, format!("default is less than min: {min}"));
    if let Some(max) = max {
        complain(min > max, "max", min, format!("min is larger than max: {max}"));
        complain(max > most, "max", max, format!("max is larger than capacity value: {most}"));
        complain(default > max, "max", default, format!("default is more than max: {max}"));
    }
    if let Some(step) = step {
        let one = min + step;
        complain(one > most, "step", step, format!("one step {one} is larger than capacity value: {most}"));
        for value in std::iter::once(default).chain(max) {
            let above = i128::from(value.value()) - i128::from(min.value());
            // A step of zero reaches nothing but the start.
            let off = above.checked_rem(i128::from(step.value())).map_or(above != 0, |rest| rest != 0);
            let message = format!("value is not a multiple of a given step ({step}) from ({min})");
            complain(off, "step", value, message);
        }
    }
}

fn taint(taint: &Value, path: &Path, errors: &mut Errors) {
    meta::label_name(taint.text("key"), &path.at("key"), errors);
    let (value, effect) = (taint.text("value"), taint.text("effect"));
    if !value.is_empty() {
        errors.invalid_each(&path.at("value"), value, names::label_value(value));
    }
    if effect.is_empty() {
        errors.required(&path.at("effect"), "");
    } else if !TAINT_EFFECTS.contains(&effect) {
        errors.not_supported(&path.at("effect"), effect, &TAINT_EFFECTS);
    }
}

fn consumption(consumption: &Value, path: &Path, errors: &mut Errors) {
    let set = consumption.text("counterSet");
    if set.is_empty() {
        errors.required(&path.at("counterSet"), "");
    } else {
        label(set, &path.at("counterSet"), errors);
    }
    counters(consumption, path, errors);
}

pub(super) fn counters(of: &Value, path: &Path, errors: &mut Errors) {
    let path = path.at("counters");
    let count = of.entries("counters").count();
    if count == 0 {
        errors.required(&path, "");
    } else if count > MAX_COUNTERS {
        errors.too_many(&path, count, MAX_COUNTERS);
    } else {
        of.entries("counters").for_each(|(name, _)| label(name, &path, errors));
    }
}

/// Where the device is, if that is said device by device.
fn nodes(device: &Value, picks_nodes: bool, path: &Path, errors: &mut Errors) {
    const ONE_OF: &str = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
    let fields = ["nodeName", "nodeSelector", "allNodes"];
    if !picks_nodes {
        if fields.iter().any(|field| device.has(field)) {
            let message = "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
            errors.invalid(path, Value::Null, message);
        }
        return;
    }
    let mut said = Vec::new();
    if let Some(name) = device.at("nodeName").as_str() {
        let path = path.at("nodeName");
        if name.is_empty() {
            errors.invalid(&path, name, "must not be empty");
        } else {
            said.push("`nodeName`");
            errors.invalid_each(&path, name, names::dns1123_subdomain(name));
        }
    }
    if device.has("nodeSelector") {
        said.push("`nodeSelector`");
        node_selector(errors, device.at("nodeSelector"), &path.at("nodeSelector"));
    }
    match device.at("allNodes") {
        Value::Bool(true) => said.push("`allNodes`"),
        Value::Bool(false) => {
            errors.invalid(&path.at("allNodes"), false, "must be either unset or set to true");
        }
        _ => {}
    }
    match said.len() {
        0 => errors.required(path, ONE_OF),
        1 => {}
        _ => errors.invalid(path, format!("{{{}}}", said.join(", ")), ONE_OF),
    }
}

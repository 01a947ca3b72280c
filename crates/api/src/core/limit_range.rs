//! LimitRange: REST strategy and validation.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{resources, rules};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::quantity::Quantity;
use crate::strategy::RestStrategy;

pub struct LimitRange;

impl RestStrategy for LimitRange {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let limits = obj.at("spec").items("limits");
        let repeated = rules::find_duplicates(limits.iter().map(|limit| limit.text("type")));
        for (i, limit) in limits.iter().enumerate() {
            let path = Path::new("spec.limits").index(i);
            let kind = limit.text("type");
            validate_type_name(kind, &path.child("type"), errors);
            if repeated[i] {
                errors.duplicate(&path.child("type"), kind);
            }
            check_limit(limit, &path, errors);
        }
    }
}

fn validate_type_name(kind: &str, path: &Path, errors: &mut ErrorList) {
    let before = errors.0.len();
    rules::validate_name(kind, names::qualified_name, path, errors);
    if errors.0.len() == before
        && !kind.contains('/')
        && !matches!(kind, "Pod" | "Container" | "PersistentVolumeClaim")
    {
        errors.invalid(path, kind, "must be a standard limit type or fully qualified");
    }
}

/// The values of a limit for a resource.
#[derive(Default)]
struct LimitValues {
    min: Option<Quantity>,
    max: Option<Quantity>,
    default: Option<Quantity>,
    default_request: Option<Quantity>,
    ratio: Option<Quantity>,
}

fn check_limit(limit: &Value, path: &Path, errors: &mut ErrorList) {
    let kind = limit.text("type");
    let mut values: BTreeMap<&str, LimitValues> = BTreeMap::new();
    for field in ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"] {
        let path = path.child(field);
        if kind == "Pod" && field.starts_with("default") {
            if limit.entries(field).next().is_some() {
                errors.forbidden(&path, "may not be specified when `type` is 'Pod'");
            }
            continue;
        }
        for (name, value) in limit.entries(field) {
            if matches!(kind, "Pod" | "Container") {
                resources::validate_container_resource_name(name, &path.key(name), errors);
            } else {
                resources::validate_resource_name(name, &path.key(name), errors);
            }
            let resource_values = values.entry(name).or_default();
            let slot = match field {
                "max" => &mut resource_values.max,
                "min" => &mut resource_values.min,
                "default" => &mut resource_values.default,
                "defaultRequest" => &mut resource_values.default_request,
                _ => &mut resource_values.ratio,
            };
            *slot = Quantity::from_value(value);
        }
        let has_storage = |field: &str| limit.at(field).has("storage");
        if field == "defaultRequest"
            && kind == "PersistentVolumeClaim"
            && !has_storage("min")
            && !has_storage("max")
        {
            let detail = "either minimum or maximum storage value is required, but neither was provided";
            errors.required(&path_of_limits(path), detail);
        }
    }
    for (name, values) in &values {
        check_order(name, values, path, errors);
        check_ratio(name, values, path, errors);
        if let (Some(default), Some(request)) = (&values.default, &values.default_request)
            && (!resources::is_native(name) || resources::is_huge_page(name))
            && default != request
        {
            let detail =
                format!("default value {default} must equal to defaultRequest value {request} in {name}");
            errors.invalid(&path.child("defaultRequest").key(name), request.to_string(), &detail);
        }
    }
}

/// Turns `spec.limits[0].defaultRequest` into `spec.limits[0].limits`, a path that only occurs in
/// upstream's message.
fn path_of_limits(path: Path) -> Path {
    let text = path.as_str();
    Path::new(text.rsplit_once('.').map_or(text, |(limit, _)| limit)).child("limits")
}

fn check_order(name: &str, values: &LimitValues, path: &Path, errors: &mut ErrorList) {
    let LimitValues { min, max, default, default_request: request, .. } = values;
    // Each rule: a value that must not exceed another, the field of the error, and the value upstream prints.
    let rules = [
        (min, "min value", max, "max value", "min", min),
        (min, "min value", request, "default request value", "defaultRequest", request),
        (request, "default request value", max, "max value", "defaultRequest", request),
        (request, "default request value", default, "default limit value", "defaultRequest", request),
        (min, "min value", default, "default value", "default", min),
        (default, "default value", max, "max value", "default", max),
    ];
    for (low, low_name, high, high_name, field, shown) in rules {
        if let (Some(low), Some(high), Some(shown)) = (low, high, shown)
            && low > high
        {
            let detail = format!("{low_name} {low} is greater than {high_name} {high}");
            errors.invalid(&path.child(field).key(name), shown.to_string(), &detail);
        }
    }
}

fn check_ratio(name: &str, values: &LimitValues, path: &Path, errors: &mut ErrorList) {
    let Some(ratio) = &values.ratio else { return };
    let path = path.child("maxLimitRequestRatio").key(name);
    if ratio.to_f64() < 1.0 {
        errors.invalid(&path, ratio.to_string(), &format!("ratio {ratio} is less than 1"));
    }
    if let (Some(min), Some(max)) = (&values.min, &values.max) {
        let limit = max.to_f64() / min.to_f64();
        if ratio.to_f64() > limit {
            let detail = format!("ratio {ratio} is greater than max/min = {limit:.6}");
            errors.invalid(&path, ratio.to_string(), &detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::check;

    #[test]
    fn accepts_valid_limit_ranges() {
        check(
            &LimitRange,
            r#"{"spec": {"limits": [{"type": "Container", "default": {"cpu": "200m", "memory": "64Mi"},
                "defaultRequest": {"cpu": "100m", "memory": "64Mi"}, "max": {"cpu": "1"}},
                {"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}}]}}"#,
            &expect![""],
        );
    }

    #[test]
    fn rejects_invalid_limit_ranges() {
        check(
            &LimitRange,
            r#"{"spec": {"limits": [
                {"type": "Container", "min": {"cpu": "2"}, "max": {"cpu": "1"}, "default": {"cpu": "3"},
                 "defaultRequest": {"cpu": "4", "disk": "1"}, "maxLimitRequestRatio": {"cpu": "500m"}},
                {"type": "Container"}, {"type": "Node"},
                {"type": "Pod", "default": {"cpu": "1"}, "min": {"acme.io/gpu": "1"}},
                {"type": "PersistentVolumeClaim"}]}}"#,
            &expect![[r#"
                spec.limits[0].defaultRequest[disk]: Invalid value: "disk": must be a standard resource type or fully qualified
                spec.limits[0].defaultRequest[disk]: Invalid value: "disk": must be a standard resource for containers
                spec.limits[0].min[cpu]: Invalid value: "2": min value 2 is greater than max value 1
                spec.limits[0].defaultRequest[cpu]: Invalid value: "4": default request value 4 is greater than max value 1
                spec.limits[0].defaultRequest[cpu]: Invalid value: "4": default request value 4 is greater than default limit value 3
                spec.limits[0].default[cpu]: Invalid value: "1": default value 3 is greater than max value 1
                spec.limits[0].maxLimitRequestRatio[cpu]: Invalid value: "500m": ratio 500m is less than 1
                spec.limits[1].type: Duplicate value: "Container"
                spec.limits[2].type: Invalid value: "Node": must be a standard limit type or fully qualified
                spec.limits[3].default: Forbidden: may not be specified when `type` is 'Pod'
                spec.limits[4].limits: Required value: either minimum or maximum storage value is required, but neither was provided
            "#]],
        );
    }
}

//! Defaults `ipFamilyPolicy` and `ipFamilies` from the request and the configuration of the cluster.

use serde_json::Value;

use super::{AllocationError, AllocationRanges, Family, set_field};
use crate::core::service::{cluster_ips, needs_cluster_ip, strings};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

/// A PreferDualStack Service with unchanged addresses and families is left as it is, even if the
/// families of the cluster have changed.
pub(super) fn is_unchanged_dual_stack(spec: &Value, old: &Value) -> bool {
    let is_preferred = |spec: &Value| spec.text("ipFamilyPolicy") == "PreferDualStack";
    old.text("type") == spec.text("type")
        && matches!(spec.text("type"), "ClusterIP" | "NodePort" | "LoadBalancer")
        && is_preferred(spec)
        && (is_preferred(old) || !old.has("ipFamilyPolicy"))
        && same(spec, old, "clusterIPs")
        && same(spec, old, "ipFamilies")
}

pub(super) fn set_ip_families(
    spec: &mut Value,
    old: Option<&Value>,
    ranges: &AllocationRanges,
) -> Result<(), AllocationError> {
    if !needs_cluster_ip(spec) {
        return Ok(());
    }
    let headless_without_selector =
        spec.text("clusterIP") == "None" && spec.entries("selector").next().is_none();
    if !spec.has("ipFamilyPolicy") {
        let before = old.map_or("", |old| old.text("ipFamilyPolicy"));
        let policy = match before {
            "" if headless_without_selector => "RequireDualStack",
            "" => "SingleStack",
            before => before,
        };
        set_field(spec, "ipFamilyPolicy", Value::from(policy));
    }
    let mut errors = ErrorList::default();
    cluster_ips::validate_cluster_ips(spec, &mut errors);
    errors_to_result(errors)?;

    let mut errors = ErrorList::default();
    if let Some(old) = old {
        release_secondary(spec, old, &mut errors);
    }
    validate_policy(spec, &mut errors);
    infer_from_addresses(spec, ranges, &mut errors);
    errors_to_result(errors)?;

    let single = spec.text("ipFamilyPolicy") == "SingleStack";
    // A headless Service without a selector has user-managed endpoints, so it may have families that
    // the cluster does not have.
    if !headless_without_selector {
        errors_to_result(check_configured(spec, ranges))?;
    }
    let mut families = read_families(spec);
    if families.is_empty() {
        families.push(ranges.default_family());
    }
    if let [only] = families[..]
        && !single
        && (headless_without_selector || ranges.is_dual_stack())
    {
        families.push(only.other_family());
    }
    write_families(spec, &families);
    Ok(())
}

/// A change to SingleStack releases the second address and family. With any other policy they must stay.
fn release_secondary(spec: &mut Value, old: &Value, errors: &mut ErrorList) {
    let single = spec.text("ipFamilyPolicy") == "SingleStack";
    for (field, what) in [("clusterIPs", "cluster IP"), ("ipFamilies", "IP family")] {
        let count = spec.items(field).len();
        if single {
            if count > 1 && same(spec, old, field) {
                let first = spec.items(field)[..1].to_vec();
                set_field(spec, field, Value::Array(first));
            }
        } else if count > 0 && count < old.items(field).len() {
            let detail = format!("must be 'SingleStack' to release the secondary {what}");
            policy_error(spec, &detail, errors);
        }
    }
}

fn validate_policy(spec: &Value, errors: &mut ErrorList) {
    if spec.text("ipFamilyPolicy") != "SingleStack" {
        return;
    }
    for (field, what) in [("clusterIPs", "cluster IPs"), ("ipFamilies", "IP families")] {
        if spec.items(field).len() == 2 {
            let detail =
                format!("must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified");
            policy_error(spec, &detail, errors);
        }
    }
}

fn infer_from_addresses(spec: &mut Value, ranges: &AllocationRanges, errors: &mut ErrorList) {
    let mut families = read_families(spec);
    for (i, address) in strings(spec, "clusterIPs").into_iter().enumerate() {
        if address == "None" {
            break;
        }
        let family = Family::from_address(address);
        if i < families.len() {
            continue;
        }
        if ranges.families.contains(&family) {
            families.push(family);
        } else {
            let detail = format!("{} is not configured on this cluster", family.as_str());
            let path = Path::new("spec.clusterIPs").index(i);
            errors.invalid(&path, spec.at("clusterIPs").clone(), &detail);
        }
    }
    if !families.is_empty() {
        write_families(spec, &families);
    }
}

fn check_configured(spec: &Value, ranges: &AllocationRanges) -> ErrorList {
    let mut errors = ErrorList::default();
    if spec.text("ipFamilyPolicy") == "RequireDualStack" && !ranges.is_dual_stack() {
        policy_error(spec, "this cluster is not configured for dual-stack services", &mut errors);
    }
    for (i, family) in read_families(spec).into_iter().enumerate() {
        if !ranges.families.contains(&family) {
            let path = Path::new("spec.ipFamilies").index(i);
            errors.invalid(&path, family.as_str(), "not configured on this cluster");
        }
    }
    errors
}

fn read_families(spec: &Value) -> Vec<Family> {
    strings(spec, "ipFamilies").into_iter().map(Family::parse).collect()
}

fn write_families(spec: &mut Value, families: &[Family]) {
    let families: Vec<&str> = families.iter().map(|family| family.as_str()).collect();
    set_field(spec, "ipFamilies", Value::from(families));
}

fn same(spec: &Value, old: &Value, field: &str) -> bool {
    spec.items(field) == old.items(field)
}

fn policy_error(spec: &Value, detail: &str, errors: &mut ErrorList) {
    errors.invalid(&Path::new("spec.ipFamilyPolicy"), spec.at("ipFamilyPolicy").clone(), detail);
}

fn errors_to_result(errors: ErrorList) -> Result<(), AllocationError> {
    if errors.is_empty() { Ok(()) } else { Err(AllocationError::Invalid(errors)) }
}

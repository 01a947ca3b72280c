//! Validates `clusterIP`, `clusterIPs`, `ipFamilies` and `ipFamilyPolicy` together.

use serde_json::Value;

use super::{is_headless, needs_cluster_ip, strings};
use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::networking::ip;

const FAMILIES: &[&str] = &["IPv4", "IPv6"];
const IP_FAMILY_POLICIES: &[&str] = &["PreferDualStack", "RequireDualStack", "SingleStack"];

/// Also called before allocation, which relies on valid input.
pub(super) fn validate_cluster_ips(spec: &Value, errors: &mut ErrorList) {
    // For ExternalName all these fields must be unset, which is validated elsewhere.
    if !needs_cluster_ip(spec) {
        return;
    }
    let ips_path = Path::new("spec.clusterIPs");
    let ips = strings(spec, "clusterIPs");
    let families = strings(spec, "ipFamilies");

    let singular = spec.text("clusterIP");
    match ips.first() {
        None if !singular.is_empty() => errors.required(&ips_path, ""),
        Some(_) if singular.is_empty() => {
            errors.invalid(
                &ips_path,
                spec.at("clusterIPs").clone(),
                "must be empty when `clusterIP` is not specified",
            );
        }
        Some(first) if *first != singular => {
            errors.invalid(&ips_path, spec.at("clusterIPs").clone(), "first value must match `clusterIP`");
        }
        _ => {}
    }

    let families_path = Path::new("spec.ipFamilies");
    let repeated = rules::find_duplicates(families.iter());
    for (i, family) in families.iter().enumerate() {
        if !FAMILIES.contains(family) {
            errors.not_supported(&families_path.index(i), *family, FAMILIES);
        }
        if repeated[i] {
            errors.duplicate(&families_path.index(i), *family);
        }
    }

    if spec.has("ipFamilyPolicy") && !IP_FAMILY_POLICIES.contains(&spec.text("ipFamilyPolicy")) {
        errors.not_supported(
            &Path::new("spec.ipFamilyPolicy"),
            spec.text("ipFamilyPolicy"),
            IP_FAMILY_POLICIES,
        );
    }

    check_addresses(spec, &ips, &families, errors);
}

fn check_addresses(spec: &Value, ips: &[&str], families: &[&str], errors: &mut ErrorList) {
    let path = Path::new("spec.clusterIPs");
    let whole = || spec.at("clusterIPs").clone();
    let before = errors.0.len();
    for (i, address) in ips.iter().enumerate() {
        if i > 0 || *address != "None" {
            rules::validate_name(address, names::ip_any_form, &path.index(i), errors);
        } else if ips.len() > 1 {
            errors.invalid(&path, whole(), "'None' must be the first and only value");
        }
    }
    let any_invalid = errors.0.len() > before;
    if ips.len() > 2 {
        errors.invalid(&path, whole(), "may only hold up to 2 values");
    }
    // The families of invalid addresses are unknown, so do not report errors about them.
    if any_invalid {
        return;
    }
    if ips.len() > 1 {
        let v6 = ips.iter().filter(|address| ip::is_v6(address)).count();
        if v6 == 0 || v6 == ips.len() {
            errors.invalid(&path, whole(), "may specify no more than one IP for each IP family");
        }
    }
    if is_headless(spec) {
        return;
    }
    for (i, (address, family)) in ips.iter().zip(families).enumerate() {
        let is_v6 = ip::is_v6(address);
        if (*family == "IPv4" && is_v6) || (*family == "IPv6" && !is_v6) {
            let detail = format!("expected an {family} value as indicated by `ipFamilies[{i}]`");
            errors.invalid(&path.index(i), *address, &detail);
        }
    }
}

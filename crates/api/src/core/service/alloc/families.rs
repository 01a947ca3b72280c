//! Filling in `ipFamilyPolicy` and `ipFamilies` from what the client said and what the cluster has.

use serde_json::Value;

use super::{Failure, Family, Ranges, set};
use crate::core::service::{cluster_ips, needs_cluster_ip, texts};
use crate::field::{Errors, Path};
use crate::json::Json;

/// A PreferDualStack Service whose addresses and families are as before stays as it is, whatever became
/// of the cluster since.
pub(super) fn is_settled_dual_stack(spec: &Value, old: &Value) -> bool {
    let prefers = |spec: &Value| spec.text("ipFamilyPolicy") == "PreferDualStack";
    old.text("type") == spec.text("type")
        && matches!(spec.text("type"), "ClusterIP" | "NodePort" | "LoadBalancer")
        && prefers(spec)
        && (prefers(old) || !old.has("ipFamilyPolicy"))
        && same(spec, old, "clusterIPs")
        && same(spec, old, "ipFamilies")
}

pub(super) fn fill_in(spec: &mut Value, old: Option<&Value>, ranges: &Ranges) -> Result<(), Failure> {
    if !needs_cluster_ip(spec) {
        return Ok(());
    }
    let free_headless = spec.text("clusterIP") == "None" && spec.entries("selector").next().is_none();
    if !spec.has("ipFamilyPolicy") {
        let before = old.map_or("", |old| old.text("ipFamilyPolicy"));
        let policy = match before {
            "" if free_headless => "RequireDualStack",
            "" => "SingleStack",
            before => before,
        };
        set(spec, "ipFamilyPolicy", Value::from(policy));
    }
    let mut errors = Errors::default();
    cluster_ips::check(spec, &mut errors);
    fail_on(errors)?;

    let mut errors = Errors::default();
    if let Some(old) = old {
        release_second(spec, old, &mut errors);
    }
    policy_fits(spec, &mut errors);
    infer_from_addresses(spec, ranges, &mut errors);
    fail_on(errors)?;

    let single = spec.text("ipFamilyPolicy") == "SingleStack";
    // Nobody knows the endpoints of a headless Service without a selector, so it may claim families the
    // cluster does not have.
    if !free_headless {
        fail_on(configured(spec, ranges))?;
    }
    let mut families = read(spec);
    if families.is_empty() {
        families.push(ranges.default_family());
    }
    if let [only] = families[..]
        && !single
        && (free_headless || ranges.is_dual_stack())
    {
        families.push(only.other());
    }
    write(spec, &families);
    Ok(())
}

/// Going single-stack drops the second address and family; any other policy may not lose them.
fn release_second(spec: &mut Value, old: &Value, errors: &mut Errors) {
    let single = spec.text("ipFamilyPolicy") == "SingleStack";
    for (field, what) in [("clusterIPs", "cluster IP"), ("ipFamilies", "IP family")] {
        let count = spec.items(field).len();
        if single {
            if count > 1 && same(spec, old, field) {
                let first = spec.items(field)[..1].to_vec();
                set(spec, field, Value::Array(first));
            }
        } else if count > 0 && count < old.items(field).len() {
            let detail = format!("must be 'SingleStack' to release the secondary {what}");
            about_policy(spec, &detail, errors);
        }
    }
}

fn policy_fits(spec: &Value, errors: &mut Errors) {
    if spec.text("ipFamilyPolicy") != "SingleStack" {
        return;
    }
    for (field, what) in [("clusterIPs", "cluster IPs"), ("ipFamilies", "IP families")] {
        if spec.items(field).len() == 2 {
            let detail =
                format!("must be 'RequireDualStack' or 'PreferDualStack' when multiple {what} are specified");
            about_policy(spec, &detail, errors);
        }
    }
}

fn infer_from_addresses(spec: &mut Value, ranges: &Ranges, errors: &mut Errors) {
    let mut families = read(spec);
    for (i, address) in texts(spec, "clusterIPs").into_iter().enumerate() {
        if address == "None" {
            break;
        }
        let family = Family::of(address);
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
        write(spec, &families);
    }
}

fn configured(spec: &Value, ranges: &Ranges) -> Errors {
    let mut errors = Errors::default();
    if spec.text("ipFamilyPolicy") == "RequireDualStack" && !ranges.is_dual_stack() {
        about_policy(spec, "this cluster is not configured for dual-stack services", &mut errors);
    }
    for (i, family) in read(spec).into_iter().enumerate() {
        if !ranges.families.contains(&family) {
            let path = Path::new("spec.ipFamilies").index(i);
            errors.invalid(&path, family.as_str(), "not configured on this cluster");
        }
    }
    errors
}

fn read(spec: &Value) -> Vec<Family> {
    texts(spec, "ipFamilies").into_iter().map(Family::read).collect()
}

fn write(spec: &mut Value, families: &[Family]) {
    let families: Vec<&str> = families.iter().map(|family| family.as_str()).collect();
    set(spec, "ipFamilies", Value::from(families));
}

fn same(spec: &Value, old: &Value, field: &str) -> bool {
    spec.items(field) == old.items(field)
}

fn about_policy(spec: &Value, detail: &str, errors: &mut Errors) {
    errors.invalid(&Path::new("spec.ipFamilyPolicy"), spec.at("ipFamilyPolicy").clone(), detail);
}

fn fail_on(errors: Errors) -> Result<(), Failure> {
    if errors.is_empty() { Ok(()) } else { Err(Failure::Invalid(errors)) }
}

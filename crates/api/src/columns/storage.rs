//! The cells of volumes, claims and storage classes.

use serde_json::Value;

use super::text::{annotation, is_deleting, join, or_default, strings};
use crate::json::JsonExt as _;

const MODES: [(&str, &str); 4] = [
    ("ReadWriteOnce", "RWO"),
    ("ReadOnlyMany", "ROX"),
    ("ReadWriteMany", "RWX"),
    ("ReadWriteOncePod", "RWOP"),
];

pub fn phase(obj: &Value) -> String {
    if is_deleting(obj) { "Terminating" } else { obj.at("status").text("phase") }.to_owned()
}

pub fn volume_capacity(volume: &Value) -> String {
    or_default(volume.path("spec.capacity").text("storage").to_owned(), "0")
}

pub fn volume_modes(volume: &Value) -> String {
    render_access_modes(volume.at("spec").items("accessModes"))
}

pub fn volume_claim(volume: &Value) -> String {
    match volume.path("spec.claimRef") {
        Value::Null => String::new(),
        claim => format!("{}/{}", claim.text("namespace"), claim.text("name")),
    }
}

/// The storage class. The legacy annotation takes precedence over the field.
pub fn class(obj: &Value) -> String {
    let annotations = obj.path("metadata.annotations");
    let old = annotations.at("volume.beta.kubernetes.io/storage-class").as_str();
    old.unwrap_or_else(|| obj.at("spec").text("storageClassName")).to_owned()
}

/// Capacity and access modes are printed for bound claims only.
pub fn claim_capacity(claim: &Value) -> String {
    if claim.at("spec").text("volumeName").is_empty() {
        return String::new();
    }
    or_default(claim.path("status.capacity").text("storage").to_owned(), "0")
}

pub fn claim_modes(claim: &Value) -> String {
    if claim.at("spec").text("volumeName").is_empty() {
        return String::new();
    }
    render_access_modes(claim.at("status").items("accessModes"))
}

pub fn class_name(class: &Value) -> String {
    let name = class.at("metadata").text("name");
    let default =
        ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];
    let is_default = default.iter().any(|key| annotation(class, key) == "true");
    if is_default { format!("{name} (default)") } else { name.to_owned() }
}

pub fn driver_modes(driver: &Value) -> String {
    or_default(join(strings(driver.at("spec").items("volumeLifecycleModes"))), "<none>")
}

pub fn driver_token_requests(driver: &Value) -> String {
    match driver.path("spec.tokenRequests").as_array() {
        None => "<unset>".to_owned(),
        Some(requests) => join(requests.iter().map(|request| request.text("audience"))),
    }
}

fn render_access_modes(modes: &[Value]) -> String {
    join(MODES.iter().filter(|(mode, _)| modes.iter().any(|m| m == mode)).map(|(_, short)| *short))
}

//! The doors to an object: itself, and the subresources that show and change a part of it.

use api::custom::Slot;
use api::json::Json as _;
use api::{Errors, Resource, Status};
use http::{Response, StatusCode};
use serde_json::Value;

use crate::body::Body;
use crate::codec::from_stored;
use crate::create::defaulted;
use crate::render::{Renderer, encoded, failure};
use crate::write::Outcome;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    Main,
    Status,
    Scale,
    Finalize,
    Approval,
    EphemeralContainers,
    Resize,
}

impl Door {
    /// The door a subresource's name opens; `None` for those that are no view of the object.
    pub fn named(subresource: &str) -> Option<Door> {
        Some(match subresource {
            "" => Door::Main,
            "status" => Door::Status,
            "scale" => Door::Scale,
            "finalize" => Door::Finalize,
            "approval" => Door::Approval,
            "ephemeralcontainers" => Door::EphemeralContainers,
            "resize" => Door::Resize,
            _ => return None,
        })
    }

    /// Group, version and kind of what goes through.
    pub fn kind(self, row: &Resource) -> (&'static str, &'static str, &'static str) {
        match self {
            Door::Scale => ("autoscaling", "v1", "Scale"),
            _ => (row.group, row.version, row.kind),
        }
    }

    /// What a client sees of the stored object.
    pub fn view(self, row: &'static Resource, stored: Value) -> Result<Value, Status> {
        match (self, row.custom) {
            (Door::Scale, Some(slot)) => custom_scale(slot, &stored),
            (Door::Scale, None) => Ok(api::convert::scale::scale_of(&stored)),
            _ => Ok(from_stored(row, stored)),
        }
    }

    /// The stored object after a client has sent `sent`.
    pub fn merge(self, row: &'static Resource, before: &Value, sent: Value) -> Result<Value, Status> {
        if matches!(self, Door::Main | Door::Status | Door::Finalize | Door::Approval) {
            return defaulted(row, sent);
        }
        if self == Door::Scale {
            let mut errors = Errors::default();
            api::convert::scale::validate_scale(&sent, &mut errors);
            if !errors.is_empty() {
                let name = before.at("metadata").text("name");
                return Err(Status::invalid("autoscaling", "Scale", name, &errors));
            }
        }
        let mut value = before.clone();
        // The versions a client insists on still count.
        for name in ["resourceVersion", "uid"] {
            copy(sent.at("metadata"), value.object_mut("metadata"), name);
        }
        match self {
            Door::Scale => match row.custom.and_then(|slot| slot.form().scale.clone()) {
                Some(paths) => paths.apply(&mut value, &sent),
                None => api::convert::scale::apply_scale(&mut value, &sent),
            },
            Door::EphemeralContainers => {
                let sent = defaulted(row, sent)?;
                copy(sent.at("spec"), value.object_mut("spec"), "ephemeralContainers");
            }
            _ => {
                let sent = defaulted(row, sent)?;
                for name in ["containers", "initContainers"] {
                    resize(sent.at("spec"), value.object_mut("spec"), name);
                }
                copy(sent.at("spec"), value.object_mut("spec"), "resources");
            }
        }
        Ok(value)
    }

    pub fn rendered(self, renderer: &Renderer, code: StatusCode, outcome: Outcome) -> Response<Body> {
        let value = match outcome {
            Outcome::Stored(object) if self != Door::Scale => return renderer.object(code, &object),
            Outcome::Stored(object) => object.value(),
            Outcome::Imagined(value) => value,
        };
        match self.view(renderer.resource, value) {
            Err(status) => failure(&renderer.format, &status),
            Ok(value) if self == Door::Scale => encoded(code, &renderer.format, value),
            Ok(value) => renderer.value(code, value),
        }
    }
}

fn custom_scale(slot: &Slot, object: &Value) -> Result<Value, Status> {
    let form = slot.form();
    let paths = form.scale.as_ref().ok_or_else(Status::no_such_path)?;
    paths.view(object).ok_or_else(|| {
        let path = &paths.spec_replicas_path;
        Status::internal(format!("the spec replicas field {path:?} does not exist"))
    })
}

fn copy(from: &Value, to: &mut serde_json::Map<String, Value>, name: &str) {
    match from.get(name) {
        Some(value) => drop(to.insert(name.into(), value.clone())),
        None => drop(to.remove(name)),
    }
}

/// A resize changes the resources (and how to resize them) of containers that are there, nothing else.
/// Other containers than before are left for the rules to refuse.
fn resize(sent: &Value, spec: &mut serde_json::Map<String, Value>, list: &str) {
    let kept = spec.get(list).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let names = |list: &[Value]| list.iter().map(|c| c.text("name").to_owned()).collect::<Vec<_>>();
    if names(sent.items(list)) != names(kept) {
        return copy(sent, spec, list);
    }
    let containers = spec.get_mut(list).and_then(Value::as_array_mut);
    for (container, sent) in containers.into_iter().flatten().zip(sent.items(list)) {
        if let Some(fields) = container.as_object_mut() {
            copy(sent, fields, "resources");
            copy(sent, fields, "resizePolicy");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(plural: &str, door: Door, before: Value, sent: Value, path: &str, expected: Value) {
        let row = api::table::find(if plural == "pods" { "" } else { "apps" }, "v1", plural).unwrap();
        let found = match door.merge(row, &before, sent) {
            Ok(value) => value.pointer(path).cloned().unwrap_or_default(),
            Err(status) => status.message.into(),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_door_lets_only_its_part_through() {
        let pod = |image: &str, cpu: &str| {
            json!({
                "metadata": {"name": "p", "namespace": "n", "labels": {"image": image}},
                "spec": {"containers": [{"name": "a", "image": image, "resources": {"requests": {"cpu": cpu}}}]},
            })
        };
        let old = pod("old", "1");
        check("pods", Door::Resize, old.clone(), pod("new", "2"), "/spec/containers/0/image", json!("old"));
        let cpu = "/spec/containers/0/resources/requests/cpu";
        check("pods", Door::Resize, old.clone(), pod("new", "2"), cpu, json!("2"));
        check("pods", Door::Resize, old.clone(), pod("new", "2"), "/metadata/labels/image", json!("old"));
        let renamed = json!({"spec": {"containers": [{"name": "b"}]}});
        check("pods", Door::Resize, old.clone(), renamed, "/spec/containers/0/name", json!("b"));
        let debug = json!({"spec": {"ephemeralContainers": [{"name": "d", "image": "i"}]}});
        let policy = "/spec/ephemeralContainers/0/terminationMessagePolicy";
        check("pods", Door::EphemeralContainers, old, debug, policy, json!("File"));
    }

    #[test]
    fn a_scale_is_checked_before_it_counts() {
        let before = json!({"metadata": {"name": "d", "namespace": "n"}, "spec": {"replicas": 1}});
        let scale = |n: i64| json!({"metadata": {"name": "d", "namespace": "n"}, "spec": {"replicas": n}, "status": {}});
        check("deployments", Door::Scale, before.clone(), scale(3), "/spec/replicas", json!(3));
        let refused = "Scale.autoscaling \"d\" is invalid: spec.replicas: Invalid value: -1: must be greater than or equal to 0";
        check("deployments", Door::Scale, before, scale(-1), "", json!(refused));
    }
}

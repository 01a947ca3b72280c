//! The doors to an object: itself, and the subresources that show and change a part of it.

use api::json::Json as _;
use api::{Resource, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::body::Body;
use crate::codec::from_stored;
use crate::create::defaulted;
use crate::render::{Renderer, encoded};
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
    pub fn view(self, row: &'static Resource, stored: Value) -> Value {
        match self {
            Door::Scale => api::convert::scale::scale_of(&stored),
            _ => from_stored(row, stored),
        }
    }

    /// The stored object after a client has sent `sent`.
    pub fn merge(self, row: &'static Resource, before: &Value, sent: Value) -> Result<Value, Status> {
        if self == Door::Main || self == Door::Status {
            return defaulted(row, sent);
        }
        let mut value = before.clone();
        // The versions a client insists on still count.
        for name in ["resourceVersion", "uid"] {
            let metadata = value.object_mut("metadata");
            match sent.at("metadata").get(name) {
                Some(said) => drop(metadata.insert(name.into(), said.clone())),
                None => drop(metadata.remove(name)),
            }
        }
        let spec = sent.at("spec");
        match self {
            Door::Scale => api::convert::scale::apply_scale(&mut value, &sent),
            Door::Finalize => copy(spec, value.object_mut("spec"), "finalizers"),
            Door::EphemeralContainers => copy(spec, value.object_mut("spec"), "ephemeralContainers"),
            Door::Approval => copy(sent.at("status"), value.object_mut("status"), "conditions"),
            Door::Resize => {
                let sent = defaulted(row, sent)?;
                for name in ["containers", "initContainers"] {
                    copy_resources(sent.at("spec").items(name), value.object_mut("spec").get_mut(name));
                }
                copy(sent.at("spec"), value.object_mut("spec"), "resources");
            }
            Door::Main | Door::Status => {}
        }
        Ok(value)
    }

    pub fn rendered(self, renderer: &Renderer, code: StatusCode, outcome: Outcome) -> Response<Body> {
        match outcome {
            Outcome::Stored(object) if self != Door::Scale => renderer.object(code, &object),
            Outcome::Stored(object) => {
                encoded(code, &renderer.format, self.view(renderer.resource, object.value()))
            }
            Outcome::Imagined(value) if self != Door::Scale => {
                renderer.value(code, self.view(renderer.resource, value))
            }
            Outcome::Imagined(value) => encoded(code, &renderer.format, self.view(renderer.resource, value)),
        }
    }
}

fn copy(from: &Value, to: &mut serde_json::Map<String, Value>, name: &str) {
    match from.get(name) {
        Some(value) => drop(to.insert(name.into(), value.clone())),
        None => drop(to.remove(name)),
    }
}

/// A resize changes the resources (and how to resize them) of containers that are there, nothing else.
fn copy_resources(sent: &[Value], kept: Option<&mut Value>) {
    for container in kept.and_then(Value::as_array_mut).into_iter().flatten() {
        let name = container.text("name").to_owned();
        let Some(sent) = sent.iter().find(|sent| sent.text("name") == name) else { continue };
        for field in ["resources", "resizePolicy"] {
            container[field] = sent.get(field).cloned().unwrap_or_else(|| json!(null));
        }
        if let Some(fields) = container.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
        }
    }
}

//! Views of an object: the object itself, and the subresources that read and write a part of it.
//!
//! Counterpart upstream: the per-subresource REST storages (`StatusREST`, `ScaleREST`, ...).

use api::custom::CrdHandle;
use api::json::JsonExt as _;
use api::{ErrorList, Resource, Status};
use http::{Response, StatusCode};
use serde_json::Value;

use crate::body::Body;
use crate::codec::from_stored;
use crate::create::defaulted;
use crate::render::{Renderer, encode_response, status_response};
use crate::write::WriteResult;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubresourceView {
    Object,
    Status,
    Scale,
    Finalize,
    Approval,
    EphemeralContainers,
    Resize,
}

impl SubresourceView {
    /// The view that a subresource's name selects; `None` for subresources that are no view of the
    /// object.
    pub fn from_subresource(subresource: &str) -> Option<SubresourceView> {
        Some(match subresource {
            "" => SubresourceView::Object,
            "status" => SubresourceView::Status,
            "scale" => SubresourceView::Scale,
            "finalize" => SubresourceView::Finalize,
            "approval" => SubresourceView::Approval,
            "ephemeralcontainers" => SubresourceView::EphemeralContainers,
            "resize" => SubresourceView::Resize,
            _ => return None,
        })
    }

    /// Group, version and kind of the request and response body.
    pub fn kind(self, row: &Resource) -> (&'static str, &'static str, &'static str) {
        match self {
            SubresourceView::Scale => ("autoscaling", "v1", "Scale"),
            _ => (row.group, row.version, row.kind),
        }
    }

    /// The stored object as a client of this view reads it.
    pub fn project(self, row: &'static Resource, stored: Value) -> Result<Value, Status> {
        match (self, row.custom) {
            (SubresourceView::Scale, Some(crd)) => custom_scale(crd, &stored),
            (SubresourceView::Scale, None) => Ok(api::convert::scale::scale_of(&stored)),
            _ => Ok(from_stored(row, stored)),
        }
    }

    /// The stored object after the client's update `sent`.
    pub fn apply_update(self, row: &'static Resource, before: &Value, sent: Value) -> Result<Value, Status> {
        if matches!(
            self,
            SubresourceView::Object
                | SubresourceView::Status
                | SubresourceView::Finalize
                | SubresourceView::Approval
        ) {
            return defaulted(row, sent);
        }
        if self == SubresourceView::Scale {
            let mut errors = ErrorList::default();
            api::convert::scale::validate_scale(&sent, &mut errors);
            if !errors.is_empty() {
                let name = before.at("metadata").text("name");
                return Err(Status::invalid("autoscaling", "Scale", name, &errors));
            }
        }
        let mut value = before.clone();
        // Preconditions of the client still apply to the whole object.
        for name in ["resourceVersion", "uid"] {
            copy(sent.at("metadata"), value.object_mut("metadata"), name);
        }
        match self {
            SubresourceView::Scale => match row.custom.and_then(|crd| crd.version_schema().scale.clone()) {
                Some(paths) => paths.apply(&mut value, &sent),
                None => api::convert::scale::apply_scale(&mut value, &sent),
            },
            SubresourceView::EphemeralContainers => {
                let sent = defaulted(row, sent)?;
                copy(sent.at("spec"), value.object_mut("spec"), "ephemeralContainers");
            }
            _ => {
                let sent = defaulted(row, sent)?;
                for name in ["containers", "initContainers"] {
                    merge_container_resources(sent.at("spec"), value.object_mut("spec"), name);
                }
                copy(sent.at("spec"), value.object_mut("spec"), "resources");
            }
        }
        Ok(value)
    }

    pub fn render(self, renderer: &Renderer, code: StatusCode, result: WriteResult) -> Response<Body> {
        let value = match result {
            WriteResult::Stored(object) if self != SubresourceView::Scale => {
                return renderer.object(code, &object);
            }
            WriteResult::Stored(object) => object.value(),
            WriteResult::DryRun(value) => value,
        };
        match self.project(renderer.resource, value) {
            Err(status) => status_response(&renderer.format, &status),
            Ok(value) if self == SubresourceView::Scale => encode_response(code, &renderer.format, value),
            Ok(value) => renderer.value(code, value),
        }
    }
}

fn custom_scale(crd: &CrdHandle, object: &Value) -> Result<Value, Status> {
    let version_schema = crd.version_schema();
    let paths = version_schema.scale.as_ref().ok_or_else(Status::unknown_path)?;
    paths.to_scale(object).ok_or_else(|| {
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

/// Copies the resources and resize policies of existing containers; other fields of the update are
/// ignored. If the containers differ, the whole list is copied, so that validation rejects it.
fn merge_container_resources(sent: &Value, spec: &mut serde_json::Map<String, Value>, list: &str) {
    let existing = spec.get(list).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let names = |list: &[Value]| list.iter().map(|c| c.text("name").to_owned()).collect::<Vec<_>>();
    if names(sent.items(list)) != names(existing) {
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
    fn check(plural: &str, view: SubresourceView, before: Value, sent: Value, path: &str, expected: Value) {
        let row =
            api::resource_table::find_resource(if plural == "pods" { "" } else { "apps" }, "v1", plural)
                .unwrap();
        let found = match view.apply_update(row, &before, sent) {
            Ok(value) => value.pointer(path).cloned().unwrap_or_default(),
            Err(status) => status.message.into(),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn subresource_update_changes_only_its_own_fields() {
        let pod = |image: &str, cpu: &str| {
            json!({
                "metadata": {"name": "p", "namespace": "n", "labels": {"image": image}},
                "spec": {"containers": [{"name": "a", "image": image, "resources": {"requests": {"cpu": cpu}}}]},
            })
        };
        let old = pod("old", "1");
        check(
            "pods",
            SubresourceView::Resize,
            old.clone(),
            pod("new", "2"),
            "/spec/containers/0/image",
            json!("old"),
        );
        let cpu = "/spec/containers/0/resources/requests/cpu";
        check("pods", SubresourceView::Resize, old.clone(), pod("new", "2"), cpu, json!("2"));
        check(
            "pods",
            SubresourceView::Resize,
            old.clone(),
            pod("new", "2"),
            "/metadata/labels/image",
            json!("old"),
        );
        let renamed = json!({"spec": {"containers": [{"name": "b"}]}});
        check("pods", SubresourceView::Resize, old.clone(), renamed, "/spec/containers/0/name", json!("b"));
        let debug = json!({"spec": {"ephemeralContainers": [{"name": "d", "image": "i"}]}});
        let policy = "/spec/ephemeralContainers/0/terminationMessagePolicy";
        check("pods", SubresourceView::EphemeralContainers, old, debug, policy, json!("File"));
    }

    #[test]
    fn rejects_invalid_scale() {
        let before = json!({"metadata": {"name": "d", "namespace": "n"}, "spec": {"replicas": 1}});
        let scale = |n: i64| json!({"metadata": {"name": "d", "namespace": "n"}, "spec": {"replicas": n}, "status": {}});
        check("deployments", SubresourceView::Scale, before.clone(), scale(3), "/spec/replicas", json!(3));
        let error = "Scale.autoscaling \"d\" is invalid: spec.replicas: Invalid value: -1: must be greater than or equal to 0";
        check("deployments", SubresourceView::Scale, before, scale(-1), "", json!(error));
    }
}

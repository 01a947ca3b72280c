//! Migration from client-side apply: the last-applied annotation determines which fields kubectl owned.
//! Upstream: `lastappliedmanager.go` and `lastappliedupdater.go`.

use serde_json::Value;

use super::compare::compare;
use super::field_set::Set;
use super::typed::{Typed, field_set, validate};
use crate::go;

/// The only field manager that takes over fields from client-side apply.
pub(crate) const KUBECTL: &str = "kubectl";
const LAST_APPLIED_ANNOTATION: &str = "kubectl.kubernetes.io/last-applied-configuration";
const MAX_ANNOTATIONS_BYTES: usize = 256 * 1024;

fn annotation(object: &Value) -> Option<&str> {
    object
        .get("metadata")?
        .get("annotations")?
        .get(LAST_APPLIED_ANNOTATION)?
        .as_str()
        .filter(|text| !text.is_empty())
}

/// The fields in the last-applied configuration that still have the value from there.
pub(crate) fn unchanged(typed: Typed, live: &Value, api_version: &str) -> Option<Set> {
    let last: Value = serde_json::from_str(annotation(live)?).ok()?;
    if last.get("apiVersion").and_then(Value::as_str) != Some(api_version) {
        return None;
    }
    validate(typed, live, false).ok()?;
    validate(typed, &last, false).ok()?;
    let mut set = field_set(typed, &last);
    let changes = compare(typed, &last, live);
    set.subtract(&changes.modified);
    set.subtract(&changes.added);
    set.subtract(&changes.removed);
    Some(set)
}

/// Updates the annotation, so that client-side apply still works afterwards.
pub(crate) fn refresh(object: &mut Value, config: &Value) {
    if annotation(object).is_none() {
        return;
    }
    let mut config = config.clone();
    if let Some(annotations) = annotations_mut(&mut config) {
        annotations.remove(LAST_APPLIED_ANNOTATION);
        if annotations.is_empty()
            && let Some(metadata) = config.get_mut("metadata").and_then(Value::as_object_mut)
        {
            metadata.remove("annotations");
        }
    }
    let text = go::json(&config) + "\n";
    if let Some(annotations) = annotations_mut(object) {
        annotations.insert(LAST_APPLIED_ANNOTATION.to_owned(), Value::String(text));
        let size: usize =
            annotations.iter().map(|(name, text)| name.len() + text.as_str().map_or(0, str::len)).sum();
        if size > MAX_ANNOTATIONS_BYTES {
            annotations.remove(LAST_APPLIED_ANNOTATION);
        }
    }
}

fn annotations_mut(object: &mut Value) -> Option<&mut serde_json::Map<String, Value>> {
    object.get_mut("metadata")?.get_mut("annotations")?.as_object_mut()
}

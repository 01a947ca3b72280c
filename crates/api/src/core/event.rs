//! Event: REST strategy and validation, shared with `events.k8s.io`.

use serde_json::Value;

use super::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::strategy::{NameFormat, RestStrategy};

pub struct Event;

const MAX_FIELD_BYTES: usize = 128;
const MAX_MESSAGE_BYTES: usize = 1024;

impl RestStrategy for Event {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_legacy_event(obj, "reportingComponent", errors);
    }

    /// Old clients use names that are not valid DNS subdomains.
    fn name_format(&self) -> NameFormat {
        NameFormat::PathSegment
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        let involved_object = obj.at("involvedObject");
        let text = |part: &Value, field: &str| part.text(field).to_owned();
        let component = text(obj, "reportingComponent");
        let source = match obj.at("source").text("component") {
            "" => component.clone(),
            source => source.to_owned(),
        };
        vec![
            ("involvedObject.kind", text(involved_object, "kind")),
            ("involvedObject.namespace", text(involved_object, "namespace")),
            ("involvedObject.name", text(involved_object, "name")),
            ("involvedObject.uid", text(involved_object, "uid")),
            ("involvedObject.apiVersion", text(involved_object, "apiVersion")),
            ("involvedObject.resourceVersion", text(involved_object, "resourceVersion")),
            ("involvedObject.fieldPath", text(involved_object, "fieldPath")),
            ("reason", text(obj, "reason")),
            ("reportingComponent", component),
            ("source", source),
            ("type", text(obj, "type")),
        ]
    }
}

/// Validates an Event in the core version. `controller` is the name of the `reportingComponent` field
/// in the version that the client uses.
pub(crate) fn validate_legacy_event(event: &Value, controller: &str, errors: &mut ErrorList) {
    let namespace = event.at("metadata").text("namespace");
    let involved_namespace = event.at("involvedObject").text("namespace");
    let is_new = event.has("eventTime");
    let fits = match (is_new, involved_namespace) {
        (false, "") => matches!(namespace, "" | "default"),
        (false, about) => about == namespace,
        (true, "") => matches!(namespace, "default" | "kube-system"),
        (true, _) => true,
    };
    if !fits {
        let path = Path::new("involvedObject.namespace");
        errors.invalid(&path, involved_namespace, "does not match event.namespace");
    }
    if is_new {
        let component = event.text("reportingComponent");
        if component.is_empty() {
            errors.required(&Path::new(controller), "");
        }
        rules::validate_name(component, names::qualified_name, &Path::new(controller), errors);
        for field in ["reportingInstance", "action", "reason"] {
            if event.text(field).is_empty() {
                errors.required(&Path::new(field), "");
            }
            at_most(event.text(field), MAX_FIELD_BYTES, field, errors);
        }
        at_most(event.text("message"), MAX_MESSAGE_BYTES, "message", errors);
    }
    rules::validate_name(namespace, names::dns1123_subdomain, &Path::new("namespace"), errors);
}

fn at_most(text: &str, max: usize, field: &str, errors: &mut ErrorList) {
    if text.len() > max {
        errors.invalid(&Path::new(field), "", &format!("can have at most {max} characters"));
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, parse};

    #[test]
    fn validates_legacy_events() {
        check(
            &Event,
            r#"{"metadata": {"namespace": "a"}, "involvedObject": {"namespace": "a"}, "reason": "x"}"#,
            &expect![""],
        );
        check(
            &Event,
            r#"{"metadata": {"namespace": "default"}, "involvedObject": {"kind": "Node"}}"#,
            &expect![""],
        );
        check(
            &Event,
            r#"{"metadata": {"namespace": "a"}, "involvedObject": {"namespace": "b"}}"#,
            &expect![[r#"
                involvedObject.namespace: Invalid value: "b": does not match event.namespace
            "#]],
        );
    }

    #[test]
    fn validates_new_events() {
        check(
            &Event,
            r#"{"metadata": {"namespace": "a"}, "eventTime": "2020-01-01T00:00:00.000000Z"}"#,
            &expect![[r#"
                involvedObject.namespace: Invalid value: "": does not match event.namespace
                reportingComponent: Required value
                reportingComponent: Invalid value: "": name part must be non-empty
                reportingComponent: Invalid value: "": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
                reportingInstance: Required value
                action: Required value
                reason: Required value
            "#]],
        );
    }

    #[test]
    fn source_defaults_to_reporting_component() {
        let fields =
            Event.selectable_fields(&parse(r#"{"reportingComponent": "kubelet", "type": "Normal"}"#));
        assert_eq!(fields.iter().find(|(name, _)| *name == "source").unwrap().1, "kubelet");
    }
}

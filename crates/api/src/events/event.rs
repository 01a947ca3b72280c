//! Event in `events.k8s.io`, which is stored as a core Event.

use std::borrow::Cow;

use serde_json::Value;

use crate::convert::convert;
use crate::core::event::validate_legacy_event;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::strategy::RestStrategy;

pub struct Event;

/// The immutable fields of an Event, by core name and name in errors, in upstream's order.
const IMMUTABLE_FIELDS: &[(&str, &str)] = &[
    ("involvedObject", "involvedObject"),
    ("reason", "reason"),
    ("message", "message"),
    ("source", "source"),
    ("firstTimestamp", "firstTimestamp"),
    ("lastTimestamp", "lastTimestamp"),
    ("count", "count"),
    ("reason", "reason"),
    ("type", "type"),
    ("eventTime", "eventTime"),
    ("action", "action"),
    ("related", "related"),
    ("reportingComponent", "reportingController"),
    ("reportingInstance", "reportingInstance"),
];

/// Objects may have either version. Validation uses the core version and its field names.
impl RestStrategy for Event {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let event = to_core(obj);
        validate_legacy_event(&event, "reportingController", errors);
    }

    fn validate_create(&self, new: &Value, errors: &mut ErrorList) {
        let event = to_core(new);
        validate_series(&event, errors);
        if !event.has("eventTime") {
            errors.required(&Path::new("eventTime"), "");
        }
        let kind = event.text("type");
        if !matches!(kind, "Normal" | "Warning") {
            errors.invalid(&Path::new("type"), "", &format!("has invalid value: {kind}"));
        }
        let source = event.at("source");
        let unset = [
            ("firstTimestamp", !event.has("firstTimestamp")),
            ("lastTimestamp", !event.has("lastTimestamp")),
            ("count", event.int("count").unwrap_or(0) == 0),
            ("source", source.text("component").is_empty() && source.text("host").is_empty()),
        ];
        for (field, _) in unset.iter().filter(|(_, is_unset)| !is_unset) {
            errors.invalid(&Path::new(field), "", "needs to be unset");
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let (new, old) = (to_core(new), to_core(old));
        if !meta::semantic_equal(new.at("series"), old.at("series")) {
            validate_series(&new, errors);
        }
        for (field, shown) in IMMUTABLE_FIELDS {
            meta::validate_immutable(new.at(field), old.at(field), &Path::new(shown), errors);
        }
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        let event = to_core(obj);
        let involved_object = event.at("involvedObject");
        let text = |part: &Value, field: &str| part.text(field).to_owned();
        vec![
            ("reason", text(&event, "reason")),
            ("regarding.kind", text(involved_object, "kind")),
            ("regarding.namespace", text(involved_object, "namespace")),
            ("regarding.name", text(involved_object, "name")),
            ("regarding.uid", text(involved_object, "uid")),
            ("regarding.apiVersion", text(involved_object, "apiVersion")),
            ("regarding.resourceVersion", text(involved_object, "resourceVersion")),
            ("regarding.fieldPath", text(involved_object, "fieldPath")),
            ("reportingController", text(&event, "reportingComponent")),
            ("type", text(&event, "type")),
        ]
    }

    fn stored_field<'n>(&self, name: &'n str) -> &'n str {
        match name {
            "regarding.kind" => "involvedObject.kind",
            "regarding.namespace" => "involvedObject.namespace",
            "regarding.name" => "involvedObject.name",
            "regarding.uid" => "involvedObject.uid",
            "regarding.apiVersion" => "involvedObject.apiVersion",
            "regarding.resourceVersion" => "involvedObject.resourceVersion",
            "regarding.fieldPath" => "involvedObject.fieldPath",
            "reportingController" => "reportingComponent",
            same => same,
        }
    }
}

fn to_core(event: &Value) -> Cow<'_, Value> {
    if event.text("apiVersion") == "v1" {
        return Cow::Borrowed(event);
    }
    Cow::Owned(convert(("events.k8s.io", "v1"), ("", "v1"), "Event", event.clone()))
}

fn validate_series(event: &Value, errors: &mut ErrorList) {
    let series = event.at("series");
    if series.is_null() {
        return;
    }
    if series.int("count").unwrap_or(0) < 2 {
        errors.invalid(&Path::new("series.count"), "", "should be at least 2");
    }
    if !series.has("lastObservedTime") {
        errors.required(&Path::new("series.lastObservedTime"), "");
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update, parse};

    const GOOD: &str = r#"{"metadata": {"namespace": "a"}, "eventTime": "2020-01-01T00:00:00.000000Z",
        "regarding": {"namespace": "a"}, "reportingController": "x.io/y", "reportingInstance": "z",
        "action": "Go", "reason": "Why", "type": "Normal", "note": "n"}"#;

    #[test]
    fn validates_new_events() {
        check(&Event, GOOD, &expect![""]);
        check(
            &Event,
            &GOOD
                .replace("\"Normal\"", "\"Odd\"")
                .replace("\"note\"", "\"deprecatedCount\": 1, \"series\": {\"count\": 1}, \"note\""),
            &expect![[r#"
                series.count: Invalid value: "": should be at least 2
                series.lastObservedTime: Required value
                type: Invalid value: "": has invalid value: Odd
                count: Invalid value: "": needs to be unset
            "#]],
        );
    }

    #[test]
    fn event_fields_are_immutable() {
        check_update(&Event, GOOD, GOOD, &expect![""]);
        check_update(
            &Event,
            GOOD,
            &GOOD.replace("\"Go\"", "\"Stop\"").replace("x.io", "z.io"),
            &expect![[r#"
                action: Invalid value: "Stop": field is immutable
                reportingController: Invalid value: "z.io/y": field is immutable
            "#]],
        );
    }

    #[test]
    fn selectable_fields_of_both_versions() {
        let event = parse(GOOD);
        let mut core = to_core(&event).into_owned();
        core["apiVersion"] = "v1".into();
        let fields = Event.selectable_fields(&event);
        assert_eq!(Event.selectable_fields(&core), fields);
        assert!(fields.contains(&("reportingController", "x.io/y".to_owned())), "{fields:?}");
        check(&Event, &core.to_string(), &expect![""]);
    }
}

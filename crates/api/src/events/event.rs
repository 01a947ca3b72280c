//! Event of events.k8s.io: another spelling of the core Event, in which it is stored.

use std::borrow::Cow;

use serde_json::Value;

use crate::convert::convert;
use crate::core::event::makes_sense;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta;

pub struct Event;

/// What the author of an Event may not change later, by its core name, in upstream's order.
const FIXED: &[(&str, &str)] = &[
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

/// Objects may come in either form; the rules are those of the core form, names and all.
impl Kind for Event {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let event = core_form(obj);
        makes_sense(&event, "reportingController", errors);
    }

    fn validate_create(&self, new: &Value, errors: &mut Errors) {
        let event = core_form(new);
        series(&event, errors);
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

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        let (new, old) = (core_form(new), core_form(old));
        if !meta::same(new.at("series"), old.at("series")) {
            series(&new, errors);
        }
        for (field, shown) in FIXED {
            meta::immutable(new.at(field), old.at(field), &Path::new(shown), errors);
        }
    }

    fn selectable(&self, obj: &Value) -> Vec<(&'static str, String)> {
        let event = core_form(obj);
        let about = event.at("involvedObject");
        let text = |part: &Value, field: &str| part.text(field).to_owned();
        vec![
            ("reason", text(&event, "reason")),
            ("regarding.kind", text(about, "kind")),
            ("regarding.namespace", text(about, "namespace")),
            ("regarding.name", text(about, "name")),
            ("regarding.uid", text(about, "uid")),
            ("regarding.apiVersion", text(about, "apiVersion")),
            ("regarding.resourceVersion", text(about, "resourceVersion")),
            ("regarding.fieldPath", text(about, "fieldPath")),
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

fn core_form(event: &Value) -> Cow<'_, Value> {
    if event.text("apiVersion") == "v1" {
        return Cow::Borrowed(event);
    }
    Cow::Owned(convert(("events.k8s.io", "v1"), ("", "v1"), "Event", event.clone()))
}

fn series(event: &Value, errors: &mut Errors) {
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
    fn strict() {
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
    fn fixed_once_written() {
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
    fn either_form() {
        let event = parse(GOOD);
        let mut core = core_form(&event).into_owned();
        core["apiVersion"] = "v1".into();
        let fields = Event.selectable(&event);
        assert_eq!(Event.selectable(&core), fields);
        assert!(fields.contains(&("reportingController", "x.io/y".to_owned())), "{fields:?}");
        check(&Event, &core.to_string(), &expect![""]);
    }
}

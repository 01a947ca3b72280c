//! Event: converts between the core group and `events.k8s.io`, which has other field names.

use serde_json::Value;

use super::{set_non_null, take_field};

/// The name of a field in the core group and in `events.k8s.io`.
const RENAMED: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

pub(super) fn to_core(event: &mut Value) {
    for (core, events) in RENAMED {
        let value = take_field(event, events);
        set_non_null(event, core, value);
    }
}

pub(super) fn from_core(event: &mut Value) {
    for (core, events) in RENAMED {
        let value = take_field(event, core);
        set_non_null(event, events, value);
    }
}

//! Formats label selectors like Go's `String()`, for messages that match upstream's.

use std::fmt::Write as _;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// `&LabelSelector{MatchLabels:...}`, or `nil` for a missing selector.
pub fn format_selector(selector: Option<&LabelSelector>) -> String {
    let Some(selector) = selector else { return "nil".to_owned() };
    let mut text = "&LabelSelector{MatchLabels:map[string]string{".to_owned();
    for (name, value) in selector.match_labels.iter().flatten() {
        let _ = write!(text, "{name}: {value},");
    }
    text += "},MatchExpressions:[]LabelSelectorRequirement{";
    for term in selector.match_expressions.iter().flatten() {
        let values = term.values.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(" ");
        let (key, operator) = (&term.key, &term.operator);
        let _ = write!(text, "LabelSelectorRequirement{{Key:{key},Operator:{operator},Values:[{values}],}},");
    }
    text + "},}"
}

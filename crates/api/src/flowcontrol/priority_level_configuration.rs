//! PriorityLevelConfiguration: how many requests of a level run at once, and what happens to the others.

use serde_json::{Value, json};

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::meta;

const MAX_QUEUES: i64 = 10_000_000;
/// The bits of the hash that hands are dealt with.
const MAX_HASH_BITS: f64 = 60.0;
const BETA_ANNOTATION: &str = "flowcontrol.k8s.io/v1beta3-preserve-zero-concurrency-shares";

pub struct PriorityLevelConfiguration;

impl Kind for PriorityLevelConfiguration {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        if obj.path("metadata.annotations").has(BETA_ANNOTATION) {
            let message = format!("annotation '{BETA_ANNOTATION}' is forbidden");
            errors.forbidden(&Path::new("metadata.annotations"), &message);
        }
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let name = obj.at("metadata").text("name");
        specification(spec, name, &path, errors);
        fixed(spec, name, &path, errors);
        super::conditions(obj, errors);
    }

    fn validate_status(&self, new: &Value, _old: &Value, errors: &mut Errors) {
        super::conditions(new, errors);
    }
}

/// The levels `exempt` and `catch-all` must be as the server expects them.
fn fixed(spec: &Value, name: &str, path: &Path, errors: &mut Errors) {
    match name {
        "exempt" if spec.text("type") != "Exempt" || spec.has("limited") => {
            let message = "spec of 'exempt' except the 'spec.exempt' field must equal the fixed value";
            errors.invalid(path, spec.clone(), message);
        }
        "catch-all" => {
            let wanted = json!({
                "type": "Limited",
                "limited": {
                    "nominalConcurrencyShares": 5,
                    "lendablePercent": 0,
                    "limitResponse": {"type": "Reject"},
                },
            });
            if !meta::same(spec, &wanted) {
                errors.invalid(path, spec.clone(), "spec of 'catch-all' must equal the fixed value");
            }
        }
        _ => {}
    }
}

fn specification(spec: &Value, name: &str, path: &Path, errors: &mut Errors) {
    let kind = spec.text("type");
    if (name == "exempt") != (kind == "Exempt") {
        errors.invalid(&path.at("type"), kind, "must be 'Exempt' if and only if `name` is 'exempt'");
    }
    let (limited, exempt) = (spec.at("limited"), spec.at("exempt"));
    match kind {
        "Exempt" => {
            if !limited.is_null() {
                errors.forbidden(&path.at("limited"), "must be nil if the type is not Limited");
            }
            shares(exempt, &path.at("exempt"), errors);
            lendable(exempt, &path.at("exempt"), errors);
        }
        "Limited" => {
            if !exempt.is_null() {
                errors.forbidden(&path.at("exempt"), "must be nil if the type is Limited");
            }
            if limited.is_null() {
                errors.required(&path.at("limited"), "must not be empty when type is Limited");
            } else {
                limits(limited, &path.at("limited"), errors);
            }
        }
        "" => errors.required(&path.at("type"), ""),
        _ => errors.not_supported(&path.at("type"), kind, &["Exempt", "Limited"]),
    }
}

fn shares(level: &Value, path: &Path, errors: &mut Errors) {
    if let Some(shares) = level.int("nominalConcurrencyShares").filter(|shares| *shares < 0) {
        errors.invalid(&path.at("nominalConcurrencyShares"), shares, "must be a non-negative integer");
    }
}

fn lendable(level: &Value, path: &Path, errors: &mut Errors) {
    if let Some(percent) = level.int("lendablePercent").filter(|percent| !(0..=100).contains(percent)) {
        errors.invalid(&path.at("lendablePercent"), percent, "must be between 0 and 100, inclusive");
    }
}

fn limits(limited: &Value, path: &Path, errors: &mut Errors) {
    shares(limited, path, errors);
    response(limited.at("limitResponse"), &path.at("limitResponse"), errors);
    lendable(limited, path, errors);
    if let Some(percent) = limited.int("borrowingLimitPercent").filter(|percent| *percent < 0) {
        let message = "if specified, must be a non-negative integer";
        errors.invalid(&path.at("borrowingLimitPercent"), percent, message);
    }
}

fn response(response: &Value, path: &Path, errors: &mut Errors) {
    let (kind, at) = (response.text("type"), path.at("queuing"));
    match (kind, response.has("queuing")) {
        ("Reject", true) => {
            errors.forbidden(&at, "must be nil if limited.limitResponse.type is not Limited");
        }
        ("Reject", false) => {}
        ("Queue", false) => {
            errors.required(&at, "must not be empty if limited.limitResponse.type is Limited");
        }
        ("Queue", true) => queuing(response.at("queuing"), &at, errors),
        ("", _) => errors.required(&path.at("type"), ""),
        _ => errors.not_supported(&path.at("type"), kind, &["Queue", "Reject"]),
    }
}

fn queuing(queuing: &Value, path: &Path, errors: &mut Errors) {
    let number = |field: &str| queuing.int(field).unwrap_or(0);
    let (queues, hand, length) = (number("queues"), number("handSize"), number("queueLengthLimit"));
    if length <= 0 {
        errors.invalid(&path.at("queueLengthLimit"), length, "must be positive");
    }
    if queues <= 0 {
        errors.invalid(&path.at("queues"), queues, "must be positive");
    } else if queues > MAX_QUEUES {
        errors.invalid(&path.at("queues"), queues, &format!("must not be greater than {MAX_QUEUES}"));
    }
    let path = path.at("handSize");
    #[expect(clippy::cast_precision_loss, reason = "both are 32-bit numbers")]
    let bits = || ((queues as f64).log2() * hand as f64).ceil();
    if hand <= 0 {
        errors.invalid(&path, hand, "must be positive");
    } else if hand > queues {
        errors.invalid(&path, hand, &format!("should not be greater than queues ({queues})"));
    } else if bits() > MAX_HASH_BITS {
        let message = format!(
            "required entropy bits of deckSize {queues} and handSize {hand} should not be greater than {MAX_HASH_BITS}"
        );
        errors.invalid(&path, hand, &message);
    }
}

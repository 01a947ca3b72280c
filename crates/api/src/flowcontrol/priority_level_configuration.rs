//! PriorityLevelConfiguration: the concurrency and queuing of a priority level.

use serde_json::{Value, json};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::strategy::RestStrategy;

const MAX_QUEUES: i64 = 10_000_000;
/// The number of hash bits for shuffle sharding.
const MAX_HASH_BITS: f64 = 60.0;
const BETA_ANNOTATION: &str = "flowcontrol.k8s.io/v1beta3-preserve-zero-concurrency-shares";

pub struct PriorityLevelConfiguration;

impl RestStrategy for PriorityLevelConfiguration {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        if obj.path("metadata.annotations").has(BETA_ANNOTATION) {
            let message = format!("annotation '{BETA_ANNOTATION}' is forbidden");
            errors.forbidden(&Path::new("metadata.annotations"), &message);
        }
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let name = obj.at("metadata").text("name");
        validate_spec(spec, name, &path, errors);
        validate_mandatory_spec(spec, name, &path, errors);
        super::validate_conditions(obj, errors);
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        super::validate_conditions(new, errors);
    }
}

/// Validates the mandatory levels `exempt` and `catch-all`.
fn validate_mandatory_spec(spec: &Value, name: &str, path: &Path, errors: &mut ErrorList) {
    match name {
        "exempt" if spec.text("type") != "Exempt" || spec.has("limited") => {
            let message = "spec of 'exempt' except the 'spec.exempt' field must equal the fixed value";
            errors.invalid(path, spec.clone(), message);
        }
        "catch-all" => {
            let required_spec = json!({
                "type": "Limited",
                "limited": {
                    "nominalConcurrencyShares": 5,
                    "lendablePercent": 0,
                    "limitResponse": {"type": "Reject"},
                },
            });
            if !meta::semantic_equal(spec, &required_spec) {
                errors.invalid(path, spec.clone(), "spec of 'catch-all' must equal the fixed value");
            }
        }
        _ => {}
    }
}

fn validate_spec(spec: &Value, name: &str, path: &Path, errors: &mut ErrorList) {
    let kind = spec.text("type");
    if (name == "exempt") != (kind == "Exempt") {
        errors.invalid(&path.child("type"), kind, "must be 'Exempt' if and only if `name` is 'exempt'");
    }
    let (limited, exempt) = (spec.at("limited"), spec.at("exempt"));
    match kind {
        "Exempt" => {
            if !limited.is_null() {
                errors.forbidden(&path.child("limited"), "must be nil if the type is not Limited");
            }
            validate_shares(exempt, &path.child("exempt"), errors);
            validate_lendable_percent(exempt, &path.child("exempt"), errors);
        }
        "Limited" => {
            if !exempt.is_null() {
                errors.forbidden(&path.child("exempt"), "must be nil if the type is Limited");
            }
            if limited.is_null() {
                errors.required(&path.child("limited"), "must not be empty when type is Limited");
            } else {
                validate_limits(limited, &path.child("limited"), errors);
            }
        }
        "" => errors.required(&path.child("type"), ""),
        _ => errors.not_supported(&path.child("type"), kind, &["Exempt", "Limited"]),
    }
}

fn validate_shares(level: &Value, path: &Path, errors: &mut ErrorList) {
    if let Some(shares) = level.int("nominalConcurrencyShares").filter(|shares| *shares < 0) {
        errors.invalid(&path.child("nominalConcurrencyShares"), shares, "must be a non-negative integer");
    }
}

fn validate_lendable_percent(level: &Value, path: &Path, errors: &mut ErrorList) {
    if let Some(percent) = level.int("lendablePercent").filter(|percent| !(0..=100).contains(percent)) {
        errors.invalid(&path.child("lendablePercent"), percent, "must be between 0 and 100, inclusive");
    }
}

fn validate_limits(limited: &Value, path: &Path, errors: &mut ErrorList) {
    validate_shares(limited, path, errors);
    validate_response(limited.at("limitResponse"), &path.child("limitResponse"), errors);
    validate_lendable_percent(limited, path, errors);
    if let Some(percent) = limited.int("borrowingLimitPercent").filter(|percent| *percent < 0) {
        let message = "if specified, must be a non-negative integer";
        errors.invalid(&path.child("borrowingLimitPercent"), percent, message);
    }
}

fn validate_response(response: &Value, path: &Path, errors: &mut ErrorList) {
    let (kind, at) = (response.text("type"), path.child("queuing"));
    match (kind, response.has("queuing")) {
        ("Reject", true) => {
            errors.forbidden(&at, "must be nil if limited.limitResponse.type is not Limited");
        }
        ("Reject", false) => {}
        ("Queue", false) => {
            errors.required(&at, "must not be empty if limited.limitResponse.type is Limited");
        }
        ("Queue", true) => validate_queuing(response.at("queuing"), &at, errors),
        ("", _) => errors.required(&path.child("type"), ""),
        _ => errors.not_supported(&path.child("type"), kind, &["Queue", "Reject"]),
    }
}

fn validate_queuing(queuing: &Value, path: &Path, errors: &mut ErrorList) {
    let number = |field: &str| queuing.int(field).unwrap_or(0);
    let (queues, hand, length) = (number("queues"), number("handSize"), number("queueLengthLimit"));
    if length <= 0 {
        errors.invalid(&path.child("queueLengthLimit"), length, "must be positive");
    }
    if queues <= 0 {
        errors.invalid(&path.child("queues"), queues, "must be positive");
    } else if queues > MAX_QUEUES {
        errors.invalid(&path.child("queues"), queues, &format!("must not be greater than {MAX_QUEUES}"));
    }
    let path = path.child("handSize");
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

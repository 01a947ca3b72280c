//! Lease: REST strategy and validation.

use serde_json::Value;

use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct Lease;

const STRATEGY_NAMES: &[&str] = &["OldestEmulationVersion"];

impl RestStrategy for Lease {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        if let Some(duration) = spec.int("leaseDurationSeconds").filter(|duration| *duration <= 0) {
            errors.invalid(&path.child("leaseDurationSeconds"), duration, "must be greater than 0");
        }
        meta::validate_non_negative(spec.at("leaseTransitions"), &path.child("leaseTransitions"), errors);
        let strategy = spec.text("strategy");
        if spec.has("strategy") {
            // Upstream's path contains `strategy` twice.
            let path = path.child("strategy.strategy");
            if strategy.contains('/') {
                rules::validate_name(strategy, names::qualified_name, &path, errors);
            } else if !STRATEGY_NAMES.contains(&strategy) {
                errors.not_supported(&path, strategy, STRATEGY_NAMES);
            }
        }
        if !spec.text("preferredHolder").is_empty() && strategy.is_empty() {
            let detail = "may only be specified if `strategy` is defined";
            errors.forbidden(&path.child("preferredHolder"), detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::check;

    #[test]
    fn validates_leases() {
        check(&Lease, r#"{"spec": {"holderIdentity": "a", "leaseDurationSeconds": 40}}"#, &expect![""]);
        check(
            &Lease,
            r#"{"spec": {"leaseDurationSeconds": 0, "leaseTransitions": -1, "preferredHolder": "x"}}"#,
            &expect![[r#"
                spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0
                spec.leaseTransitions: Invalid value: -1: must be greater than or equal to 0
                spec.preferredHolder: Forbidden: may only be specified if `strategy` is defined
            "#]],
        );
        check(
            &Lease,
            r#"{"spec": {"strategy": "Mine"}}"#,
            &expect![[r#"
            spec.strategy.strategy: Unsupported value: "Mine": supported values: "OldestEmulationVersion"
        "#]],
        );
    }
}

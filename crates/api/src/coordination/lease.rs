//! Lease: what is special about it.

use serde_json::Value;

use crate::core::rules;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::{meta, names};

pub struct Lease;

const STRATEGIES: &[&str] = &["OldestEmulationVersion"];

impl Kind for Lease {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        if let Some(duration) = spec.int("leaseDurationSeconds").filter(|duration| *duration <= 0) {
            errors.invalid(&path.at("leaseDurationSeconds"), duration, "must be greater than 0");
        }
        meta::non_negative(spec.at("leaseTransitions"), &path.at("leaseTransitions"), errors);
        let strategy = spec.text("strategy");
        if spec.has("strategy") {
            // Upstream says `strategy` twice.
            let path = path.at("strategy.strategy");
            if strategy.contains('/') {
                rules::name(strategy, names::qualified_name, &path, errors);
            } else if !STRATEGIES.contains(&strategy) {
                errors.not_supported(&path, strategy, STRATEGIES);
            }
        }
        if !spec.text("preferredHolder").is_empty() && strategy.is_empty() {
            let detail = "may only be specified if `strategy` is defined";
            errors.forbidden(&path.at("preferredHolder"), detail);
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::check;

    #[test]
    fn leases() {
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

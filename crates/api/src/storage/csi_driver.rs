//! CSIDriver: REST strategy and validation.

use serde_json::Value;

use crate::core::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct CSIDriver;

const FS_GROUP_POLICIES: &[&str] = &["File", "None", "ReadWriteOnceWithFSType"];
const MIN_TOKEN_SECONDS: i64 = 600;

impl RestStrategy for CSIDriver {
    fn prepare_for_create(&self, new: &mut Value) {
        drop_alpha_fields(new);
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        if !old.at("spec").has("preventPodSchedulingIfMissing") {
            drop_alpha_fields(new);
        }
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        let path = Path::new("spec");
        // The first name is a typo upstream.
        for (field, shown) in [
            ("attachRequired", "attachedRequired"),
            ("podInfoOnMount", "podInfoOnMount"),
            ("storageCapacity", "storageCapacity"),
        ] {
            if !spec.has(field) {
                errors.required(&path.child(shown), "");
            }
        }
        let policy = spec.at("fsGroupPolicy");
        rules::optional_one_of(policy, FS_GROUP_POLICIES, &path.child("fsGroupPolicy"), errors);
        token_requests(spec.items("tokenRequests"), &path.child("tokenRequests"), errors);
        for mode in spec.items("volumeLifecycleModes") {
            let path = path.child("volumeLifecycleModes");
            rules::optional_one_of(mode, &["Persistent", "Ephemeral"], &path, errors);
        }
        if !spec.has("seLinuxMount") {
            errors.required(&path.child("seLinuxMount"), "");
        }
        let field = "nodeAllocatableUpdatePeriodSeconds";
        if let Some(period) = spec.int(field).filter(|period| *period < 10) {
            errors.invalid(&path.child(field), period, "must be greater than or equal to 10 seconds");
        }
        let field = "serviceAccountTokenInSecrets";
        if spec.has(field) && spec.items("tokenRequests").is_empty() {
            let detail = "serviceAccountTokenInSecrets is set but no tokenRequests are specified";
            errors.invalid(&path.child(field), spec.at(field).clone(), detail);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let (new, old) = (new.at("spec"), old.at("spec"));
        for (field, shown) in
            [("attachRequired", "attachedRequired"), ("volumeLifecycleModes", "volumeLifecycleModes")]
        {
            meta::validate_immutable(new.at(field), old.at(field), &Path::new("spec").child(shown), errors);
        }
    }
}

fn drop_alpha_fields(obj: &mut Value) {
    if let Some(spec) = obj.get_mut("spec").and_then(Value::as_object_mut) {
        spec.remove("preventPodSchedulingIfMissing");
    }
}

fn token_requests(requests: &[Value], path: &Path, errors: &mut ErrorList) {
    let repeated = rules::find_duplicates(requests.iter().map(|request| request.text("audience")));
    for (i, request) in requests.iter().enumerate() {
        let path = path.index(i);
        let audience = request.text("audience");
        if repeated[i] {
            errors.duplicate(&path.child("audience"), audience);
            continue;
        }
        let Some(seconds) = request.int("expirationSeconds") else { continue };
        let path = path.child("expirationSeconds");
        if seconds < MIN_TOKEN_SECONDS {
            errors.invalid(&path, seconds, "may not specify a duration less than 10 minutes");
        }
        if seconds > 1 << 32 {
            errors.invalid(&path, seconds, "may not specify a duration larger than 2^32 seconds");
        }
    }
}

/// Validates a reference to a CSI driver, ignoring case.
pub(crate) fn validate_driver_name(name: &str, path: &Path, errors: &mut ErrorList) {
    if name.is_empty() {
        errors.required(path, "");
        return;
    }
    if name.len() > 63 {
        errors.too_long(path, 63);
    }
    for message in names::dns1123_subdomain(&name.to_lowercase()) {
        errors.invalid(path, name, &message);
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_csi_drivers() {
        let good = r#"{"spec": {"attachRequired": true, "podInfoOnMount": false, "storageCapacity": false,
            "fsGroupPolicy": "File", "volumeLifecycleModes": ["Persistent"], "seLinuxMount": false}}"#;
        check(&CSIDriver, good, &expect![""]);
        check(
            &CSIDriver,
            r#"{"spec": {"fsGroupPolicy": "X", "volumeLifecycleModes": ["Y"], "nodeAllocatableUpdatePeriodSeconds": 9,
                "tokenRequests": [{"audience": ""}, {"audience": ""}, {"audience": "a", "expirationSeconds": 1}]}}"#,
            &expect![[r#"
                spec.attachedRequired: Required value
                spec.podInfoOnMount: Required value
                spec.storageCapacity: Required value
                spec.fsGroupPolicy: Unsupported value: "X": supported values: "File", "None", "ReadWriteOnceWithFSType"
                spec.tokenRequests[1].audience: Duplicate value: ""
                spec.tokenRequests[2].expirationSeconds: Invalid value: 1: may not specify a duration less than 10 minutes
                spec.volumeLifecycleModes: Unsupported value: "Y": supported values: "Persistent", "Ephemeral"
                spec.seLinuxMount: Required value
                spec.nodeAllocatableUpdatePeriodSeconds: Invalid value: 9: must be greater than or equal to 10 seconds
            "#]],
        );
        check_update(
            &CSIDriver,
            good,
            &good.replace("\"attachRequired\": true", "\"attachRequired\": false"),
            &expect![[r#"
            spec.attachedRequired: Invalid value: false: field is immutable
        "#]],
        );
    }
}

//! `spec.conversion`: no conversion or a conversion webhook.

use std::collections::HashSet;

use serde_json::Value;

use super::required_one_of;
use crate::admissionregistration::client_config;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

/// Validates `spec.conversion`. The error paths are those of the internal version, which has the
/// webhook's fields one level up.
pub(super) fn validate_conversion(conversion: &Value, path: &Path, errors: &mut ErrorList) {
    if conversion.is_null() {
        return;
    }
    let strategy = conversion.text("strategy");
    required_one_of(strategy, &["None", "Webhook"], &path.child("strategy"), errors);
    let config = conversion.path("webhook.clientConfig");
    let versions = conversion.at("webhook").items("conversionReviewVersions");
    let config_path = path.child("webhookClientConfig");
    let versions_path = path.child("conversionReviewVersions");
    if strategy != "Webhook" {
        const UNUSED: &str = "should not be set when strategy is not set to Webhook";
        if !config.is_null() {
            errors.forbidden(&config_path, UNUSED);
        }
        if !versions.is_empty() {
            errors.forbidden(&versions_path, UNUSED);
        }
        return;
    }
    if config.is_null() {
        errors.required(&config_path, "required when strategy is set to Webhook");
    } else {
        client_config::validate_client_config(config, &config_path, errors);
    }
    review_versions(versions, &versions_path, errors);
}

fn review_versions(versions: &[Value], path: &Path, errors: &mut ErrorList) {
    if versions.is_empty() {
        errors.required(path, "");
        return;
    }
    let mut seen = HashSet::new();
    for (i, version) in versions.iter().enumerate() {
        let name = version.as_str().unwrap_or("");
        if !seen.insert(name) {
            errors.invalid(&path.index(i), name, "duplicate version");
            continue;
        }
        for message in names::dns1035_label(name) {
            errors.invalid(&path.index(i), name, &message);
        }
    }
    if !versions.iter().any(|version| version == "v1" || version == "v1beta1") {
        errors.invalid(path, versions.to_vec(), "must include at least one of v1, v1beta1");
    }
}

/// Invalid CA bundles are allowed until the CRD is established, because tools inject them later. After
/// that a valid bundle must not be replaced by an invalid one.
pub(super) fn validate_ca_bundle_update(
    new: &Value,
    old: &Value,
    established: bool,
    path: &Path,
    errors: &mut ErrorList,
) {
    let bundle = |spec: &Value| spec.path("conversion.webhook.clientConfig").text("caBundle").to_owned();
    let (given, before) = (bundle(new), bundle(old));
    let webhook = new.at("conversion").text("strategy") == "Webhook";
    let was_bad = !before.is_empty() && client_config::ca_bundle_error(&before).is_some();
    if webhook
        && established
        && !was_bad
        && !given.is_empty()
        && let Some(problem) = client_config::ca_bundle_error(&given)
    {
        errors.invalid(&path.child("webhookClientConfig.caBundle"), given, problem);
    }
}

//! ServiceAccount: REST strategy and validation.

use serde_json::{Value, json};

use super::rules;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct ServiceAccount;

const ENFORCE_MOUNTABLE_SECRETS: &str = "kubernetes.io/enforce-mountable-secrets";

impl RestStrategy for ServiceAccount {
    fn prepare(&self, new: &mut Value) {
        drop_secret_fields(new);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let is_annotated = |obj: &Value| rules::annotations(obj).has(ENFORCE_MOUNTABLE_SECRETS);
        if !is_annotated(new) || old.is_some_and(is_annotated) {
            return Vec::new();
        }
        vec![format!(
            "metadata.annotations[{ENFORCE_MOUNTABLE_SECRETS}]: deprecated in v1.32+; prefer separate namespaces to isolate access to mounted secrets"
        )]
    }
}

/// Only the name of a Secret reference is stored.
fn drop_secret_fields(obj: &mut Value) {
    for secret in obj.get_mut("secrets").and_then(Value::as_array_mut).into_iter().flatten() {
        *secret = json!({"name": secret.text("name")});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_references_keep_name_only() {
        let mut new = json!({"secrets": [{"name": "a", "kind": "Secret", "uid": "x"}]});
        ServiceAccount.prepare_for_create(&mut new);
        assert_eq!(new, json!({"secrets": [{"name": "a"}]}));
    }

    #[test]
    fn warning_on_first_use_only() {
        let annotated = json!({"metadata": {"annotations": {ENFORCE_MOUNTABLE_SECRETS: "true"}}});
        assert_eq!(ServiceAccount.warnings(&annotated, Some(&json!({}))).len(), 1);
        assert!(ServiceAccount.warnings(&annotated, Some(&annotated)).is_empty());
        assert!(ServiceAccount.warnings(&json!({}), None).is_empty());
    }
}

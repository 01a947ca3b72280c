//! ServiceAccount: what is special about it.

use serde_json::{Value, json};

use super::rules;
use crate::json::Json;
use crate::kind::Kind;

pub struct ServiceAccount;

const ENFORCE_MOUNTABLE_SECRETS: &str = "kubernetes.io/enforce-mountable-secrets";

impl Kind for ServiceAccount {
    fn prepare(&self, new: &mut Value) {
        keep_secret_names(new);
    }

    fn warnings(&self, new: &Value, old: Option<&Value>) -> Vec<String> {
        let marked = |obj: &Value| rules::annotations(obj).has(ENFORCE_MOUNTABLE_SECRETS);
        if !marked(new) || old.is_some_and(marked) {
            return Vec::new();
        }
        vec![format!(
            "metadata.annotations[{ENFORCE_MOUNTABLE_SECRETS}]: deprecated in v1.32+; prefer separate namespaces to isolate access to mounted secrets"
        )]
    }
}

/// Of a reference to a Secret, only the name means anything.
fn keep_secret_names(obj: &mut Value) {
    for secret in obj.get_mut("secrets").and_then(Value::as_array_mut).into_iter().flatten() {
        *secret = json!({"name": secret.text("name")});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_names() {
        let mut new = json!({"secrets": [{"name": "a", "kind": "Secret", "uid": "x"}]});
        ServiceAccount.prepare_create(&mut new);
        assert_eq!(new, json!({"secrets": [{"name": "a"}]}));
    }

    #[test]
    fn warns_once() {
        let marked = json!({"metadata": {"annotations": {ENFORCE_MOUNTABLE_SECRETS: "true"}}});
        assert_eq!(ServiceAccount.warnings(&marked, Some(&json!({}))).len(), 1);
        assert!(ServiceAccount.warnings(&marked, Some(&marked)).is_empty());
        assert!(ServiceAccount.warnings(&json!({}), None).is_empty());
    }
}

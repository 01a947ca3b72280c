//! Namespace: REST strategy and validation.

use serde_json::{Value, json};

use super::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::strategy::{NameFormat, RestStrategy};

pub struct Namespace;

const KUBERNETES_FINALIZER: &str = "kubernetes";
const NAME_LABEL: &str = "kubernetes.io/metadata.name";
const STANDARD_FINALIZERS: &[&str] = &[KUBERNETES_FINALIZER, "orphan", "foregroundDeletion"];

impl RestStrategy for Namespace {
    fn prepare_for_create(&self, new: &mut Value) {
        new.object_mut("status").clear();
        new.object_mut("status").insert("phase".to_owned(), json!("Active"));
        // The `kubernetes` finalizer keeps the Namespace until its content is deleted.
        let mut finalizers = new.at("spec").items("finalizers").to_vec();
        if !finalizers.contains(&json!(KUBERNETES_FINALIZER)) {
            finalizers.push(json!(KUBERNETES_FINALIZER));
        }
        new.object_mut("spec").insert("finalizers".to_owned(), Value::Array(finalizers));
        label_with_name(new);
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        // Only `/finalize` changes the finalizers of the spec.
        match old.at("spec").get("finalizers") {
            Some(finalizers) => {
                new.object_mut("spec").insert("finalizers".to_owned(), finalizers.clone());
            }
            None => {
                new.object_mut("spec").remove("finalizers");
            }
        }
        label_with_name(new);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        for finalizer in obj.at("spec").items("finalizers") {
            check_finalizer(finalizer.as_str().unwrap_or(""), &Path::new("spec.finalizers"), errors);
        }
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        let phase = new.at("status").text("phase");
        let (expected, state) = if new.at("metadata").has("deletionTimestamp") {
            ("Terminating", "is not empty")
        } else {
            ("Active", "is empty")
        };
        if phase != expected {
            let detail = format!("may only be '{expected}' if `deletionTimestamp` {state}");
            errors.invalid(&Path::new("status.Phase"), phase, &detail);
        }
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::Label
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        vec![("status.phase", obj.at("status").text("phase").to_owned())]
    }
}

/// Validates an update through `/finalize`, the only one that may change `spec.finalizers`.
pub fn validate_finalize(new: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec.finalizers");
    for (i, finalizer) in new.at("spec").items("finalizers").iter().enumerate() {
        check_finalizer(finalizer.as_str().unwrap_or(""), &path.index(i), errors);
    }
}

/// Sets the `kubernetes.io/metadata.name` label, so that selectors can match a Namespace by name.
fn label_with_name(obj: &mut Value) {
    let name = obj.at("metadata").text("name").to_owned();
    if name.is_empty() {
        return;
    }
    obj.object_mut("metadata");
    if let Some(metadata) = obj.get_mut("metadata") {
        metadata.object_mut("labels").insert(NAME_LABEL.to_owned(), Value::from(name));
    }
}

fn check_finalizer(finalizer: &str, path: &Path, errors: &mut ErrorList) {
    rules::validate_name(finalizer, names::qualified_name, path, errors);
    if !finalizer.contains('/') && !STANDARD_FINALIZERS.contains(&finalizer) {
        let detail = "name is neither a standard finalizer name nor is it fully qualified";
        errors.invalid(path, finalizer, detail);
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::core::testing::{check, lines};

    #[test]
    fn create_sets_phase_and_finalizer() {
        let mut new =
            json!({"metadata": {"name": "a"}, "spec": {"finalizers": ["x.io/y"]}, "status": {"phase": "Z"}});
        Namespace.prepare_for_create(&mut new);
        assert_eq!(
            new,
            json!({"metadata": {"name": "a", "labels": {"kubernetes.io/metadata.name": "a"}},
                   "spec": {"finalizers": ["x.io/y", "kubernetes"]}, "status": {"phase": "Active"}})
        );
        let mut update = json!({"metadata": {"name": "a", "labels": {"kubernetes.io/metadata.name": "b"}}});
        Namespace.prepare_for_update(&mut update, &new);
        assert_eq!((&update["metadata"], &update["spec"]), (&new["metadata"], &new["spec"]));
    }

    #[test]
    fn validates_finalizers() {
        check(
            &Namespace,
            r#"{"spec": {"finalizers": ["kubernetes", "a.io/b", "mine"]}}"#,
            &expect![[r#"
                spec.finalizers: Invalid value: "mine": name is neither a standard finalizer name nor is it fully qualified
            "#]],
        );
        let mut errors = ErrorList::default();
        validate_finalize(&json!({"spec": {"finalizers": ["kubernetes", "mine"]}}), &mut errors);
        assert_eq!(
            lines(&errors),
            "spec.finalizers[1]: Invalid value: \"mine\": name is neither a standard finalizer name nor is it fully qualified\n"
        );
    }

    #[test]
    fn phase_follows_deletion() {
        let mut errors = ErrorList::default();
        let old = json!({});
        for obj in [
            json!({"status": {"phase": "Active"}}),
            json!({"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Active"}}),
            json!({"status": {"phase": "Terminating"}}),
        ] {
            Namespace.validate_status_update(&obj, &old, &mut errors);
        }
        expect![[r#"
            status.Phase: Invalid value: "Active": may only be 'Terminating' if `deletionTimestamp` is not empty
            status.Phase: Invalid value: "Terminating": may only be 'Active' if `deletionTimestamp` is empty
        "#]]
        .assert_eq(&lines(&errors));
    }
}

//! ConfigMap: REST strategy and validation.

use serde_json::Value;

use super::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct ConfigMap;

/// Maximum total size of the values of a ConfigMap or Secret.
pub(super) const MAX_DATA_BYTES: usize = 1024 * 1024;

const IMMUTABLE_FIELD: &str = "field is immutable when `immutable` is set";

impl RestStrategy for ConfigMap {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let binary = obj.at("binaryData");
        let mut size = 0_usize;
        for (key, value) in obj.entries("data") {
            let path = Path::new("data").key(key);
            rules::validate_name(key, names::config_map_key, &path, errors);
            if binary.has(key) {
                errors.invalid(&path, key, "duplicate of key present in binaryData");
            }
            size = size.saturating_add(value.as_str().map_or(0, str::len));
        }
        for (key, value) in obj.entries("binaryData") {
            rules::validate_name(key, names::config_map_key, &Path::new("binaryData").key(key), errors);
            size = size.saturating_add(decoded_len(value));
        }
        if size > MAX_DATA_BYTES {
            // Upstream's path of the whole object.
            errors.too_long(&Path::new("[]"), MAX_DATA_BYTES);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        validate_immutable_data(new, old, &["data", "binaryData"], errors);
    }
}

/// Validates that an immutable object stays immutable and these fields do not change.
pub(super) fn validate_immutable_data(new: &Value, old: &Value, fields: &[&str], errors: &mut ErrorList) {
    if !old.flag("immutable") {
        return;
    }
    if !new.flag("immutable") {
        errors.forbidden(&Path::new("immutable"), IMMUTABLE_FIELD);
    }
    for field in fields {
        if !meta::semantic_equal(new.at(field), old.at(field)) {
            errors.forbidden(&Path::new(field), IMMUTABLE_FIELD);
        }
    }
}

/// The decoded length of a base64 string.
pub(super) fn decoded_len(value: &Value) -> usize {
    let text = value.as_str().unwrap_or("").trim_end_matches('=');
    text.len() / 4 * 3 + (text.len() % 4).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn validates_keys_and_size() {
        check(
            &ConfigMap,
            r#"{"data": {"a b": "c", "x": "", "..": ""}, "binaryData": {"x": "AA==", "!": ""}}"#,
            &expect![[r#"
                data[..]: Invalid value: "..": must not be '..'
                data[a b]: Invalid value: "a b": a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')
                data[x]: Invalid value: "x": duplicate of key present in binaryData
                binaryData[!]: Invalid value: "!": a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')
            "#]],
        );
        let too_large =
            json!({"data": {"a": "x".repeat(MAX_DATA_BYTES)}, "binaryData": {"b": "AA=="}}).to_string();
        check(
            &ConfigMap,
            &too_large,
            &expect![[r#"
            []: Too long: may not be more than 1048576 bytes
        "#]],
        );
        check(&ConfigMap, &too_large.replace("AA==", ""), &expect![""]);
    }

    #[test]
    fn immutable_config_map_rejects_changes() {
        let old = r#"{"immutable": true, "data": {"a": "b"}}"#;
        check_update(&ConfigMap, old, old, &expect![""]);
        check_update(
            &ConfigMap,
            old,
            r#"{"data": {"a": "c"}, "binaryData": {"a": ""}}"#,
            &expect![[r#"
            immutable: Forbidden: field is immutable when `immutable` is set
            data: Forbidden: field is immutable when `immutable` is set
            binaryData: Forbidden: field is immutable when `immutable` is set
        "#]],
        );
        check_update(&ConfigMap, r#"{"data": {"a": "b"}}"#, r#"{"immutable": true}"#, &expect![""]);
    }

    #[test]
    fn decoded_length_of_base64() {
        for (text, len) in [("", 0), ("AA==", 1), ("AAA=", 2), ("AAAA", 3), ("AAAAAA==", 4)] {
            assert_eq!(decoded_len(&json!(text)), len, "{text}");
        }
    }
}

//! Secret: REST strategy and validation.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::config_map::{MAX_DATA_BYTES, decoded_len, validate_immutable_data};
use super::rules;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

pub struct Secret;

const SERVICE_ACCOUNT_NAME: &str = "kubernetes.io/service-account.name";

impl RestStrategy for Secret {
    fn prepare_for_create(&self, new: &mut Value) {
        merge_string_data(new);
    }

    fn prepare_for_update(&self, new: &mut Value, old: &Value) {
        if new.text("type").is_empty() {
            let kind = old.at("type").clone();
            new.set_default("type", kind);
        }
        merge_string_data(new);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let path = Path::new("data");
        let mut size = 0_usize;
        for (key, value) in obj.entries("data") {
            rules::validate_name(key, names::config_map_key, &path.key(key), errors);
            size = size.saturating_add(decoded_len(value));
        }
        if size > MAX_DATA_BYTES {
            errors.too_long(&path, MAX_DATA_BYTES);
        }
        required_keys(obj, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        meta::validate_immutable(new.at("type"), old.at("type"), &Path::new("type"), errors);
        validate_immutable_data(new, old, &["data"], errors);
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        vec![("type", obj.text("type").to_owned())]
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        if new.text("type") != "kubernetes.io/tls" {
            return Vec::new();
        }
        let data = new.at("data");
        let warning = pem_warning(data.text("tls.crt"), "certificate", |label| label == "CERTIFICATE")
            .or_else(|| pem_warning(data.text("tls.key"), "key", |label| label.ends_with("PRIVATE KEY")));
        warning.into_iter().collect()
    }
}

/// The warning about a base64 PEM value that should be a certificate or key. Whether they match is not
/// checked.
fn pem_warning(encoded: &str, what: &str, is_expected: fn(&str) -> bool) -> Option<String> {
    let bytes = STANDARD.decode(encoded).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let labels: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim_end().strip_prefix("-----BEGIN ")?.strip_suffix("-----"))
        .collect();
    if labels.iter().any(|label| is_expected(label)) {
        return None;
    }
    if labels.is_empty() {
        return Some(format!("tls: failed to find any PEM data in {what} input"));
    }
    let skipped = labels.join(" ");
    Some(if what == "key" {
        format!(
            "tls: failed to find PEM block with type ending in \"PRIVATE KEY\" in key input after skipping PEM blocks of the following types: [{skipped}]"
        )
    } else {
        format!(
            "tls: failed to find \"CERTIFICATE\" PEM block in certificate input after skipping PEM blocks of the following types: [{skipped}]"
        )
    })
}

/// Merges `stringData` into `data`. It is write-only and never stored.
fn merge_string_data(obj: &mut Value) {
    let Some(Value::Object(plain)) = obj.as_object_mut().and_then(|map| map.remove("stringData")) else {
        return;
    };
    let data = obj.object_mut("data");
    for (key, value) in plain {
        data.insert(key, Value::from(STANDARD.encode(value.as_str().unwrap_or(""))));
    }
}

/// Validates the keys that the built-in types require.
fn required_keys(obj: &Value, errors: &mut ErrorList) {
    let path = Path::new("data");
    let data = obj.at("data");
    let missing = |keys: &[&'static str]| -> Vec<&'static str> {
        keys.iter().copied().filter(|key| !data.has(key)).collect()
    };
    let required = match obj.text("type") {
        "kubernetes.io/service-account-token" => {
            if rules::annotations(obj).text(SERVICE_ACCOUNT_NAME).is_empty() {
                errors.required(&Path::new("metadata.annotations").key(SERVICE_ACCOUNT_NAME), "");
            }
            Vec::new()
        }
        "kubernetes.io/dockercfg" => missing(&[".dockercfg"]),
        "kubernetes.io/dockerconfigjson" => missing(&[".dockerconfigjson"]),
        // One of the two keys is sufficient.
        "kubernetes.io/basic-auth" => match missing(&["username", "password"]) {
            both if both.len() == 2 => both,
            _ => Vec::new(),
        },
        "kubernetes.io/ssh-auth" if data.text("ssh-privatekey").is_empty() => vec!["ssh-privatekey"],
        "kubernetes.io/tls" => missing(&["tls.crt", "tls.key"]),
        _ => Vec::new(),
    };
    for key in &required {
        errors.required(&path.key(key), "");
    }
    if required.is_empty() {
        match obj.text("type") {
            "kubernetes.io/dockercfg" => json_object(data, ".dockercfg", errors),
            "kubernetes.io/dockerconfigjson" => json_object(data, ".dockerconfigjson", errors),
            _ => {}
        }
    }
}

fn json_object(data: &Value, key: &str, errors: &mut ErrorList) {
    let bytes = STANDARD.decode(data.text(key)).unwrap_or_default();
    let message = match serde_json::from_slice::<Value>(&bytes) {
        Ok(Value::Object(_) | Value::Null) => return,
        Ok(other) => format!(
            "json: cannot unmarshal {} into Go value of type map[string]interface {{}}",
            match other {
                Value::Array(_) => "array",
                Value::String(_) => "string",
                Value::Bool(_) => "bool",
                _ => "number",
            }
        ),
        Err(error) if error.is_eof() => "unexpected end of JSON input".to_owned(),
        Err(error) => {
            let line = bytes.split(|b| *b == b'\n').nth(error.line().saturating_sub(1)).unwrap_or(&[]);
            let at = line.get(error.column().saturating_sub(1)).copied().unwrap_or(b' ');
            format!("invalid character '{}' looking for beginning of value", char::from(at).escape_default())
        }
    };
    errors.invalid(&Path::new("data").key(key), "<secret contents redacted>", &message);
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;
    use crate::core::testing::{check, check_update};

    #[test]
    fn string_data_is_merged_into_data() {
        let mut new = json!({"data": {"a": "MQ==", "b": "MQ=="}, "stringData": {"a": "s3cr3t", "c": ""}});
        Secret.prepare_for_create(&mut new);
        assert_eq!(new, json!({"data": {"a": "czNjcjN0", "b": "MQ==", "c": ""}}));
        let mut new = json!({"type": null});
        Secret.prepare_for_update(&mut new, &json!({"type": "Opaque"}));
        assert_eq!(new, json!({"type": "Opaque"}));
    }

    #[test]
    fn validates_types() {
        let typed = |kind: &str, data: Value| json!({"type": kind, "data": data}).to_string();
        check(&Secret, &typed("Opaque", json!({"a": "MQ=="})), &expect![""]);
        check(
            &Secret,
            &typed("kubernetes.io/tls", json!({})),
            &expect![[r#"
            data[tls.crt]: Required value
            data[tls.key]: Required value
        "#]],
        );
        check(
            &Secret,
            &typed("kubernetes.io/service-account-token", json!({})),
            &expect![[r#"
            metadata.annotations[kubernetes.io/service-account.name]: Required value
        "#]],
        );
        check(
            &Secret,
            &typed("kubernetes.io/basic-auth", json!({})),
            &expect![[r#"
            data[username]: Required value
            data[password]: Required value
        "#]],
        );
        check(&Secret, &typed("kubernetes.io/basic-auth", json!({"password": ""})), &expect![""]);
        check(
            &Secret,
            &typed("kubernetes.io/ssh-auth", json!({"ssh-privatekey": ""})),
            &expect![[r#"
            data[ssh-privatekey]: Required value
        "#]],
        );
        check(
            &Secret,
            &typed("kubernetes.io/dockerconfigjson", json!({})),
            &expect![[r#"
            data[.dockerconfigjson]: Required value
        "#]],
        );
        for (content, expected) in [
            ("{}", expect![""]),
            (
                "[]",
                expect![[r#"
                data[.dockercfg]: Invalid value: "<secret contents redacted>": json: cannot unmarshal array into Go value of type map[string]interface {}
            "#]],
            ),
            (
                "",
                expect![[r#"
                data[.dockercfg]: Invalid value: "<secret contents redacted>": unexpected end of JSON input
            "#]],
            ),
            (
                "nope",
                expect![[r#"
                data[.dockercfg]: Invalid value: "<secret contents redacted>": invalid character 'o' looking for beginning of value
            "#]],
            ),
        ] {
            let data = json!({".dockercfg": STANDARD.encode(content)});
            check(&Secret, &typed("kubernetes.io/dockercfg", data), &expected);
        }
    }

    #[test]
    fn warning_for_invalid_pem() {
        let warn = |cert: &str, key: &str| {
            let data = json!({"tls.crt": STANDARD.encode(cert), "tls.key": STANDARD.encode(key)});
            Secret.warnings(&json!({"type": "kubernetes.io/tls", "data": data}), None).join(";")
        };
        let (cert, key) = ("-----BEGIN CERTIFICATE-----\n", "-----BEGIN EC PRIVATE KEY-----\n");
        assert_eq!(warn(cert, key), "");
        assert_eq!(warn("x", key), "tls: failed to find any PEM data in certificate input");
        assert_eq!(warn(cert, ""), "tls: failed to find any PEM data in key input");
        assert_eq!(
            warn(key, key),
            "tls: failed to find \"CERTIFICATE\" PEM block in certificate input after skipping PEM blocks of the following types: [EC PRIVATE KEY]"
        );
    }

    #[test]
    fn validates_updates() {
        check_update(
            &Secret,
            r#"{"type": "Opaque"}"#,
            r#"{"type": "x"}"#,
            &expect![[r#"
            type: Invalid value: "x": field is immutable
        "#]],
        );
        check_update(
            &Secret,
            r#"{"immutable": true}"#,
            r#"{"data": {"a": ""}}"#,
            &expect![[r#"
            immutable: Forbidden: field is immutable when `immutable` is set
            data: Forbidden: field is immutable when `immutable` is set
        "#]],
        );
    }
}

//! The format library: validates strings as DNS labels, UUIDs and so on.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{FunctionOp, overload_error, url};
use crate::time;
use crate::value::{LibraryValue, Value};

/// A named format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format(&'static str);

const NAMES: &[&str] = &[
    "dns1123Label",
    "dns1123Subdomain",
    "dns1035Label",
    "qualifiedName",
    "dns1123LabelPrefix",
    "dns1123SubdomainPrefix",
    "dns1035LabelPrefix",
    "labelValue",
    "uri",
    "uuid",
    "byte",
    "date",
    "datetime",
];

const START_AND_END_MESSAGE: &str = "must start and end with an alphanumeric character";
const QUALIFIED_NAME_REGEX: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const QUALIFIED_NAME_MESSAGE: &str = "must consist of alphanumeric characters, '-', '_' or '.', and";

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "format.named" => |_, args| match args {
            [Value::String(name)] => Ok(match NAMES.iter().find(|known| **known == &**name) {
                Some(name) => Value::some(Value::Library(LibraryValue::Format(Format(name)))),
                None => Value::Optional(None),
            }),
            _ => overload_error(),
        },
        "validate" => |cx, args| match args {
            [Value::Library(LibraryValue::Format(format)), Value::String(text)] => {
                cx.cost_tracker.add_steps(text.len() as u64)?;
                let errors = validate_format(format.0, text);
                if errors.is_empty() {
                    return Ok(Value::Optional(None));
                }
                Ok(Value::some(Value::list(errors.into_iter().map(Value::text).collect())))
            }
            _ => overload_error(),
        },
        "format.dns1123Label" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("dns1123Label")))),
        "format.dns1123Subdomain" => {
            |_, _| Ok(Value::Library(LibraryValue::Format(Format("dns1123Subdomain"))))
        }
        "format.dns1035Label" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("dns1035Label")))),
        "format.qualifiedName" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("qualifiedName")))),
        "format.dns1123LabelPrefix" => {
            |_, _| Ok(Value::Library(LibraryValue::Format(Format("dns1123LabelPrefix"))))
        }
        "format.dns1123SubdomainPrefix" => {
            |_, _| Ok(Value::Library(LibraryValue::Format(Format("dns1123SubdomainPrefix"))))
        }
        "format.dns1035LabelPrefix" => {
            |_, _| Ok(Value::Library(LibraryValue::Format(Format("dns1035LabelPrefix"))))
        }
        "format.labelValue" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("labelValue")))),
        "format.uri" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("uri")))),
        "format.uuid" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("uuid")))),
        "format.byte" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("byte")))),
        "format.date" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("date")))),
        "format.datetime" => |_, _| Ok(Value::Library(LibraryValue::Format(Format("datetime")))),
        _ => return None,
    })
}

fn validate_format(format: &str, text: &str) -> Vec<String> {
    // A prefix ending with a dash is valid if a generated name with it is.
    let prefix = |text: &str| match text.strip_suffix('-') {
        Some(name) => format!("{name}a"),
        None => text.to_owned(),
    };
    let error_if_not =
        |is_valid: bool, words: &str| if is_valid { Vec::new() } else { vec![words.to_owned()] };
    match format {
        "dns1123Label" => label(text),
        "dns1123LabelPrefix" => label(&prefix(text)),
        "dns1123Subdomain" => subdomain(text),
        "dns1123SubdomainPrefix" => subdomain(&prefix(text)),
        "dns1035Label" => dns1035_label(text),
        "dns1035LabelPrefix" => dns1035_label(&prefix(text)),
        "qualifiedName" => qualified_name(text),
        "labelValue" => label_value(text),
        "uri" => match url::parse(text) {
            Ok(_) => Vec::new(),
            Err(words) => vec![format!("parse {text:?}: {words}")],
        },
        "uuid" => error_if_not(is_uuid(text), "does not match the UUID format"),
        "byte" => error_if_not(STANDARD.decode(text).is_ok(), "invalid base64"),
        "date" => error_if_not(text.len() == 10 && time::parse_date(text).is_some(), "invalid date"),
        _ => error_if_not(time::parse_timestamp(text).is_some(), "invalid datetime"),
    }
}

fn is_uuid(text: &str) -> bool {
    let digits = text.bytes().filter(|byte| *byte != b'-');
    digits.clone().count() == 32
        && digits.clone().all(|byte| byte.is_ascii_hexdigit())
        && (text.len() == 32 || text.split('-').map(str::len).eq([8, 4, 4, 4, 12]))
}

fn spans(text: &str, first: fn(u8) -> bool, inner: fn(u8) -> bool, last: fn(u8) -> bool) -> bool {
    match text.as_bytes() {
        [] => false,
        [only] => first(*only),
        [start, middle @ .., end] => first(*start) && middle.iter().all(|byte| inner(*byte)) && last(*end),
    }
}

fn lower(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

fn is_label(text: &str) -> bool {
    spans(text, lower, |byte| lower(byte) || byte == b'-', lower)
}

fn is_qualified_name(text: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric();
    spans(text, word, |byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte), word)
}

fn check_length(text: &str, most: usize) -> Vec<String> {
    if text.len() <= most { Vec::new() } else { vec![format!("must be no more than {most} characters")] }
}

fn label(text: &str) -> Vec<String> {
    let mut errors = check_length(text, 63);
    if !is_label(text) {
        errors.push(match text.split('.').all(is_label) {
            true => "must not contain dots".to_owned(),
            false => format!(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and {START_AND_END_MESSAGE} (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
            ),
        });
    }
    errors
}

fn subdomain(text: &str) -> Vec<String> {
    let mut errors = check_length(text, 253);
    if !text.split('.').all(is_label) {
        errors.push(format!(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and {START_AND_END_MESSAGE} (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
        ));
    }
    errors
}

fn dns1035_label(text: &str) -> Vec<String> {
    let mut errors = check_length(text, 63);
    if !spans(text, |byte| byte.is_ascii_lowercase(), |byte| lower(byte) || byte == b'-', lower) {
        errors.push("a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')".to_owned());
    }
    errors
}

fn qualified_name_error() -> String {
    format!(
        "{QUALIFIED_NAME_MESSAGE} {START_AND_END_MESSAGE} (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{QUALIFIED_NAME_REGEX}')"
    )
}

fn qualified_name(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    let name = match text.split('/').collect::<Vec<_>>()[..] {
        [name] => name,
        [prefix, name] => {
            match prefix {
                "" => errors.push("prefix part must be non-empty".to_owned()),
                prefix => {
                    errors.extend(subdomain(prefix).into_iter().map(|error| format!("prefix part {error}")))
                }
            }
            name
        }
        _ => {
            return vec![format!(
                "a qualified name {} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
                qualified_name_error()
            )];
        }
    };
    match name {
        "" => errors.push("name part must be non-empty".to_owned()),
        name => errors.extend(check_length(name, 63).into_iter().map(|error| format!("name part {error}"))),
    }
    if !is_qualified_name(name) {
        errors.push(format!("name part {}", qualified_name_error()));
    }
    errors
}

fn label_value(text: &str) -> Vec<String> {
    let mut errors = check_length(text, 63);
    if !text.is_empty() && !is_qualified_name(text) {
        errors.push(format!(
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and {START_AND_END_MESSAGE} (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '({QUALIFIED_NAME_REGEX})?')"
        ));
    }
    errors
}

//! Named formats: what is wrong with a text that should be a DNS label, a UUID and so on.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{Native, no_such_overload, url};
use crate::time;
use crate::value::{Library, Value};

/// One of the named formats.
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

const ALPHANUMERIC: &str = "must start and end with an alphanumeric character";
const KEY: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const KEY_WORDS: &str = "must consist of alphanumeric characters, '-', '_' or '.', and";

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "format.named" => |_, args| match args {
            [Value::String(name)] => Ok(match NAMES.iter().find(|known| **known == &**name) {
                Some(name) => Value::some(Value::Library(Library::Format(Format(name)))),
                None => Value::Optional(None),
            }),
            _ => no_such_overload(),
        },
        "validate" => |cx, args| match args {
            [Value::Library(Library::Format(format)), Value::String(text)] => {
                cx.meter.steps(text.len() as u64)?;
                let wrong = complaints(format.0, text);
                if wrong.is_empty() {
                    return Ok(Value::Optional(None));
                }
                Ok(Value::some(Value::list(wrong.into_iter().map(Value::text).collect())))
            }
            _ => no_such_overload(),
        },
        "format.dns1123Label" => |_, _| Ok(Value::Library(Library::Format(Format("dns1123Label")))),
        "format.dns1123Subdomain" => |_, _| Ok(Value::Library(Library::Format(Format("dns1123Subdomain")))),
        "format.dns1035Label" => |_, _| Ok(Value::Library(Library::Format(Format("dns1035Label")))),
        "format.qualifiedName" => |_, _| Ok(Value::Library(Library::Format(Format("qualifiedName")))),
        "format.dns1123LabelPrefix" => {
            |_, _| Ok(Value::Library(Library::Format(Format("dns1123LabelPrefix"))))
        }
        "format.dns1123SubdomainPrefix" => {
            |_, _| Ok(Value::Library(Library::Format(Format("dns1123SubdomainPrefix"))))
        }
        "format.dns1035LabelPrefix" => {
            |_, _| Ok(Value::Library(Library::Format(Format("dns1035LabelPrefix"))))
        }
        "format.labelValue" => |_, _| Ok(Value::Library(Library::Format(Format("labelValue")))),
        "format.uri" => |_, _| Ok(Value::Library(Library::Format(Format("uri")))),
        "format.uuid" => |_, _| Ok(Value::Library(Library::Format(Format("uuid")))),
        "format.byte" => |_, _| Ok(Value::Library(Library::Format(Format("byte")))),
        "format.date" => |_, _| Ok(Value::Library(Library::Format(Format("date")))),
        "format.datetime" => |_, _| Ok(Value::Library(Library::Format(Format("datetime")))),
        _ => return None,
    })
}

fn complaints(format: &str, text: &str) -> Vec<String> {
    // Of a prefix, what a generated name would make of it is checked.
    let prefix = |text: &str| match text.strip_suffix('-') {
        Some(name) => format!("{name}a"),
        None => text.to_owned(),
    };
    let unless = |fine: bool, words: &str| if fine { Vec::new() } else { vec![words.to_owned()] };
    match format {
        "dns1123Label" => label(text),
        "dns1123LabelPrefix" => label(&prefix(text)),
        "dns1123Subdomain" => subdomain(text),
        "dns1123SubdomainPrefix" => subdomain(&prefix(text)),
        "dns1035Label" => old_label(text),
        "dns1035LabelPrefix" => old_label(&prefix(text)),
        "qualifiedName" => qualified_name(text),
        "labelValue" => label_value(text),
        "uri" => match url::parse(text) {
            Ok(_) => Vec::new(),
            Err(words) => vec![format!("parse {text:?}: {words}")],
        },
        "uuid" => unless(is_uuid(text), "does not match the UUID format"),
        "byte" => unless(STANDARD.decode(text).is_ok(), "invalid base64"),
        "date" => unless(text.len() == 10 && time::parse_date(text).is_some(), "invalid date"),
        _ => unless(time::parse_timestamp(text).is_some(), "invalid datetime"),
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

fn is_key(text: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric();
    spans(text, word, |byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte), word)
}

fn too_long(text: &str, most: usize) -> Vec<String> {
    if text.len() <= most { Vec::new() } else { vec![format!("must be no more than {most} characters")] }
}

fn label(text: &str) -> Vec<String> {
    let mut wrong = too_long(text, 63);
    if !is_label(text) {
        wrong.push(match text.split('.').all(is_label) {
            true => "must not contain dots".to_owned(),
            false => format!(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and {ALPHANUMERIC} (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
            ),
        });
    }
    wrong
}

fn subdomain(text: &str) -> Vec<String> {
    let mut wrong = too_long(text, 253);
    if !text.split('.').all(is_label) {
        wrong.push(format!(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and {ALPHANUMERIC} (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
        ));
    }
    wrong
}

fn old_label(text: &str) -> Vec<String> {
    let mut wrong = too_long(text, 63);
    if !spans(text, |byte| byte.is_ascii_lowercase(), |byte| lower(byte) || byte == b'-', lower) {
        wrong.push("a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')".to_owned());
    }
    wrong
}

fn key_words() -> String {
    format!(
        "{KEY_WORDS} {ALPHANUMERIC} (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{KEY}')"
    )
}

fn qualified_name(text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let name = match text.split('/').collect::<Vec<_>>()[..] {
        [name] => name,
        [prefix, name] => {
            match prefix {
                "" => wrong.push("prefix part must be non-empty".to_owned()),
                prefix => wrong.extend(subdomain(prefix).into_iter().map(|why| format!("prefix part {why}"))),
            }
            name
        }
        _ => {
            return vec![format!(
                "a qualified name {} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
                key_words()
            )];
        }
    };
    match name {
        "" => wrong.push("name part must be non-empty".to_owned()),
        name => wrong.extend(too_long(name, 63).into_iter().map(|why| format!("name part {why}"))),
    }
    if !is_key(name) {
        wrong.push(format!("name part {}", key_words()));
    }
    wrong
}

fn label_value(text: &str) -> Vec<String> {
    let mut wrong = too_long(text, 63);
    if !text.is_empty() && !is_key(text) {
        wrong.push(format!(
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and {ALPHANUMERIC} (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '({KEY})?')"
        ));
    }
    wrong
}

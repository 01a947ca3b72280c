//! The string formats that are validated. Upstream: `k8s.io/kube-openapi/pkg/validation/strfmt`.

use std::sync::LazyLock;

use jiff::civil::Date;
use regex::Regex;
use serde_json::Value;

use crate::json::JsonExt;
use crate::names;

type FormatCheck = fn(&str) -> bool;

/// Format names without dashes, which upstream ignores in comparisons.
const FORMATS: [(&str, FormatCheck); 26] = [
    ("bsonobjectid", |text| text.len() == 24 && text.bytes().all(|byte| byte.is_ascii_hexdigit())),
    ("uri", is_uri),
    ("email", is_email),
    ("hostname", is_hostname),
    ("ipv4", |text| text.contains('.') && names::parse_ip(text).is_some()),
    ("ipv6", |text| text.contains(':') && names::parse_ip(text).is_some()),
    ("cidr", |text| names::parse_cidr(text).is_some()),
    ("mac", is_mac),
    ("uuid", |text| is_uuid(text, None)),
    ("uuid3", |text| is_uuid(text, Some('3'))),
    ("uuid4", |text| is_uuid(text, Some('4'))),
    ("uuid5", |text| is_uuid(text, Some('5'))),
    ("isbn", |text| is_isbn10(text) || is_isbn13(text)),
    ("isbn10", is_isbn10),
    ("isbn13", is_isbn13),
    ("creditcard", is_credit_card),
    ("ssn", |text| SSN.is_match(text)),
    ("hexcolor", |text| HEX_COLOR.is_match(text)),
    ("rgbcolor", |text| RGB_COLOR.is_match(text)),
    ("byte", is_base64),
    ("password", |_| true),
    ("date", |text| text.len() == 10 && text.parse::<Date>().is_ok()),
    ("duration", is_duration),
    ("datetime", is_date_time),
    ("k8sshortname", |text| text.len() <= 63 && SHORT_NAME.is_match(text)),
    ("k8slongname", |text| text.len() <= 253 && LONG_NAME.is_match(text)),
];

/// The format of a schema if it applies to the schema's type; empty otherwise.
pub(super) fn known_format(schema: &Value) -> &str {
    let format = schema.text("format");
    if !format.is_empty() && is_known(schema) { format } else { "" }
}

/// Whether the format of a schema is validated.
pub fn is_known(schema: &Value) -> bool {
    let format = schema.text("format");
    match schema.text("type") {
        "" | "string" => {
            let name = format.replace('-', "");
            FORMATS.iter().any(|(known, _)| *known == name)
        }
        "integer" => matches!(format, "int32" | "int64"),
        "number" => matches!(format, "float" | "double"),
        _ => false,
    }
}

pub(super) fn is_valid(format: &str, text: &str) -> bool {
    let name = format.replace('-', "");
    FORMATS.iter().find(|(known, _)| *known == name).is_none_or(|(_, rule)| rule(text))
}

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("the pattern is a valid regular expression")
}

static HOSTNAME: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"^([a-zA-Z0-9\p{S}\p{L}]((-?[a-zA-Z0-9\p{S}\p{L}]{0,62})?)|([a-zA-Z0-9\p{S}\p{L}](([a-zA-Z0-9\-\p{S}\p{L}]{0,61}[a-zA-Z0-9\p{S}\p{L}])?)(\.)){1,}([a-zA-Z\p{L}]){2,63})$",
    )
});
static SSN: LazyLock<Regex> = LazyLock::new(|| regex(r"^[0-9]{3}[- ]?[0-9]{2}[- ]?[0-9]{4}$"));
static HEX_COLOR: LazyLock<Regex> = LazyLock::new(|| regex("^#?([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$"));
static RGB_COLOR: LazyLock<Regex> = LazyLock::new(|| {
    let part = r"\s*(0|[1-9][0-9]?|1[0-9][0-9]?|2[0-4][0-9]|25[0-5])\s*";
    regex(&format!(r"^rgb\({part},{part},{part}\)$"))
});
static CREDIT_CARD: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"^(?:4[0-9]{12}(?:[0-9]{3})?|5[1-5][0-9]{14}|(222[1-9]|22[3-9][0-9]|2[3-6][0-9]{2}|27[01][0-9]|2720)[0-9]{12}|6(?:011|5[0-9][0-9])[0-9]{12}|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}|(?:2131|1800|35[0-9]{3})[0-9]{11}|6[27][0-9]{14})$",
    )
});
static SHORT_NAME: LazyLock<Regex> = LazyLock::new(|| regex("^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"));
static LONG_NAME: LazyLock<Regex> =
    LazyLock::new(|| regex(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"));
static DURATION: LazyLock<Regex> = LazyLock::new(|| regex(r"([0-9]+)\s*([A-Za-zµ]+)"));
static DATE_TIME: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})$",
    )
});

fn is_hostname(text: &str) -> bool {
    HOSTNAME.is_match(text) && text.len() <= 255 && text.split('.').all(|label| label.len() <= 63)
}

/// An absolute URI or an absolute path.
fn is_uri(text: &str) -> bool {
    let valid = !text.contains(|c: char| c.is_ascii_control() || c == ' ') && has_valid_escapes(text);
    let scheme = text.split_once(':').is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    });
    valid && (text.starts_with('/') || scheme)
}

fn has_valid_escapes(text: &str) -> bool {
    text.split('%')
        .skip(1)
        .all(|rest| rest.get(..2).is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit())))
}

/// `name@domain`, optionally with a display name: `A B <a@b>`.
fn is_email(text: &str) -> bool {
    let address = match text.trim().strip_suffix('>') {
        Some(rest) => rest.rsplit_once('<').map_or("", |(_, address)| address),
        None => text.trim(),
    };
    let Some((local, domain)) = address.rsplit_once('@') else { return false };
    let quoted = local.len() > 2 && local.starts_with('"') && local.ends_with('"');
    let is_local_part = |part: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| !c.is_ascii() || c.is_ascii_alphanumeric() || "!#$%&'*+-/=?^_`{|}~".contains(c))
    };
    (quoted || local.split('.').all(is_local_part)) && domain.split('.').all(is_local_part)
}

fn is_mac(text: &str) -> bool {
    let groups = |separator: char, size: usize, counts: &[usize]| {
        let parts: Vec<&str> = text.split(separator).collect();
        counts.contains(&parts.len())
            && parts
                .iter()
                .all(|part| part.len() == size && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    groups(':', 2, &[6, 8, 20]) || groups('-', 2, &[6, 8, 20]) || groups('.', 4, &[3, 4, 10])
}

fn is_uuid(text: &str, version: Option<char>) -> bool {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let dash_positions: Vec<usize> = text.match_indices('-').map(|(at, _)| at).collect();
    // Each dash is optional, but dashes are only allowed between the groups.
    let mut expected = Vec::new();
    let mut missing = 0;
    for (i, at) in [8, 12, 16, 20].into_iter().enumerate() {
        let position = at + i - missing;
        if text.as_bytes().get(position) == Some(&b'-') {
            expected.push(position);
        } else {
            missing += 1;
        }
    }
    let variant = |c: u8| matches!(c.to_ascii_lowercase(), b'8' | b'9' | b'a' | b'b');
    digits.len() == 32
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        && dash_positions == expected
        && version.is_none_or(|version| {
            let bytes = digits.as_bytes();
            bytes[12] == version as u8 && (version == '3' || variant(bytes[16]))
        })
}

fn is_isbn10(text: &str) -> bool {
    let text: Vec<u8> = text.bytes().filter(|byte| !matches!(byte, b'-' | b' ' | b'\t' | b'\n')).collect();
    let digit = |(i, byte): (usize, &u8)| match byte {
        b'0'..=b'9' => Some(u32::from(byte - b'0')),
        b'X' if i == 9 => Some(10),
        _ => None,
    };
    let digits: Option<Vec<u32>> = text.iter().enumerate().map(digit).collect();
    digits.is_some_and(|digits| {
        digits.len() == 10
            && digits.iter().zip(1..).map(|(digit, weight)| digit * weight).sum::<u32>() % 11 == 0
    })
}

fn is_isbn13(text: &str) -> bool {
    let text: Vec<u8> = text.bytes().filter(|byte| !matches!(byte, b'-' | b' ' | b'\t' | b'\n')).collect();
    text.len() == 13
        && text.iter().all(u8::is_ascii_digit)
        && text
            .iter()
            .zip([1, 3].into_iter().cycle())
            .map(|(byte, weight)| u32::from(byte - b'0') * weight)
            .sum::<u32>()
            % 10
            == 0
}

fn is_credit_card(text: &str) -> bool {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let sum: u32 = digits
        .bytes()
        .rev()
        .map(|byte| u32::from(byte - b'0'))
        .zip([1, 2].into_iter().cycle())
        .map(|(digit, weight)| digit * weight / 10 + digit * weight % 10)
        .sum();
    CREDIT_CARD.is_match(&digits) && sum.is_multiple_of(10)
}

fn is_base64(text: &str) -> bool {
    let body = text.trim_end_matches('=');
    !text.is_empty()
        && text.len().is_multiple_of(4)
        && text.len() - body.len() <= 2
        && body.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'))
}

/// A Go duration, or a form such as `3 days`.
fn is_duration(text: &str) -> bool {
    const UNITS: [&str; 15] =
        ["ns", "nano", "us", "µs", "micro", "ms", "milli", "s", "sec", "m", "min", "h", "hr", "hour", "d"];
    const EXACT_UNITS: [&str; 5] = ["day", "w", "wk", "week", "second"];
    if crate::time::parse_duration(text).is_ok() {
        return true;
    }
    let mut found = false;
    for part in DURATION.captures_iter(text) {
        let unit = part[2].to_ascii_lowercase();
        let unit = unit.trim();
        let singular = unit.strip_suffix('s').unwrap_or(unit);
        let known = |unit: &str| UNITS.contains(&unit) || EXACT_UNITS.contains(&unit);
        if !(known(unit)
            || known(singular)
            || UNITS.iter().any(|known| known.len() > 2 && unit.starts_with(known)))
        {
            return false;
        }
        found = true;
    }
    found
}

fn is_date_time(text: &str) -> bool {
    DATE_TIME.is_match(text) && text.get(..10).is_some_and(|date| date.parse::<Date>().is_ok()) && {
        let number =
            |at: usize| text.get(at..at + 2).and_then(|digits| digits.parse::<u8>().ok()).unwrap_or(99);
        number(11) <= 23 && number(14) <= 59 && number(17) <= 59
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(format: &str, yes: &[&str], no: &[&str]) {
        yes.iter().for_each(|text| assert!(is_valid(format, text), "{format} {text}"));
        no.iter().for_each(|text| assert!(!is_valid(format, text), "{format} {text}"));
    }

    #[test]
    fn validates_string_formats() {
        check(
            "date-time",
            &["2014-12-15T19:30:20.000Z", "2026-01-01T00:00:00+02:00"],
            &["2026-13-01T00:00:00Z", "x", ""],
        );
        check("date", &["2026-02-28"], &["2026-02-30", "2026-2-1"]);
        check("duration", &["5m", "22 ns", "3 days", "1h30m"], &["x", "5", ""]);
        check("ipv4", &["10.0.0.1"], &["::1", "300.0.0.1"]);
        check("ipv6", &["::1"], &["10.0.0.1"]);
        check("cidr", &["10.0.0.0/8"], &["10.0.0.0"]);
        check(
            "uuid",
            &["00000000-0000-0000-0000-000000000000", "00000000000000000000000000000000"],
            &["x", "0000000-00000-0000-0000-000000000000"],
        );
        check("uuid4", &["9c858901-8a57-4791-81fe-4c455b099bc9"], &["9c858901-8a57-1791-81fe-4c455b099bc9"]);
        check("email", &["a@b.c", "A B <a@b>"], &["a", "a@"]);
        check("hostname", &["a.example.com", "localhost"], &["-a", "a b", ""]);
        check("uri", &["http://a/b?c", "/path", "urn:x"], &["a b", "relative"]);
        check("mac", &["00:00:5e:00:53:01"], &["00:00:5e:00:53"]);
        check("byte", &["aGk=", "aGVsbG8="], &["a", "a===", ""]);
        check("hexcolor", &["#FFF", "00aabb"], &["#FFFF"]);
        check("rgbcolor", &["rgb(255,0,10)"], &["rgb(256,0,0)"]);
        check("isbn", &["0321751043", "978-0321751041"], &["0321751044"]);
        check("creditcard", &["4111 1111 1111 1111"], &["4111111111111112"]);
        check("ssn", &["111-22-3333"], &["111"]);
        check("k8s-short-name", &["a-b"], &["A", "a.b"]);
        check("k8s-long-name", &["a-b.c"], &["A"]);
        check("mac", &[], &["é:00:00:00:00:00"]);
    }
}

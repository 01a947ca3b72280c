//! Parses and formats durations and timestamps. Durations are nanoseconds in an `i64`, as in Go.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

/// The first second of year 1.
pub(crate) const MIN_UNIX_SECONDS: i64 = -62_135_596_800;
/// The last second of year 9999.
const MAX_UNIX_SECONDS: i64 = 253_402_300_799;

const UNITS: &[(&str, f64)] = &[
    ("ns", 1.0),
    ("us", 1e3),
    ("\u{b5}s", 1e3),
    ("\u{3bc}s", 1e3),
    ("ms", 1e6),
    ("s", 1e9),
    ("m", 6e10),
    ("h", 3.6e12),
];

/// Units that schemas with `format: duration` allow beyond Go's. Upstream: `ParseDuration` in
/// `kube-openapi/pkg/validation/strfmt`.
const LENIENT_UNITS: &[(&str, f64)] = &[
    ("nano", 1.0),
    ("micro", 1e3),
    ("milli", 1e6),
    ("second", 1e9),
    ("sec", 1e9),
    ("minute", 6e10),
    ("min", 6e10),
    ("hour", 3.6e12),
    ("hr", 3.6e12),
    ("day", 8.64e13),
    ("d", 8.64e13),
    ("week", 6.048e14),
    ("wk", 6.048e14),
    ("w", 6.048e14),
];

/// Parses a duration such as `1h30m`, as Go's `time.ParseDuration` does.
pub(crate) fn parse_duration(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if digits == "0" {
        return Some(0);
    }
    if digits.is_empty() {
        return None;
    }
    let mut total: i128 = 0;
    let mut rest = digits;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|length| *length > 0)?;
        let after = &rest[number..];
        let unit = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let scale = UNITS.iter().find(|(name, _)| *name == &after[..unit])?.1;
        total = total.checked_add(scale_number(&rest[..number], scale)?)?;
        rest = &after[unit..];
    }
    i64::try_from(if negative { -total } else { total }).ok()
}

fn scale_number(number: &str, scale: f64) -> Option<i128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || whole.len() > 19 {
        return None;
    }
    let whole: i128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let part: f64 = if fraction.is_empty() { 0.0 } else { format!("0.{fraction}").parse().ok()? };
    Some(whole * scale as i128 + (part * scale) as i128)
}

/// Parses a value of a schema with `format: duration`.
pub(crate) fn parse_lenient_duration(text: &str) -> Option<i64> {
    parse_duration(text).or_else(|| {
        let text = text.trim();
        let number = text.find(|c: char| !c.is_ascii_digit()).filter(|length| *length > 0)?;
        let unit = text[number..].trim().to_ascii_lowercase();
        let unit = unit.strip_suffix('s').unwrap_or(&unit);
        let scale = LENIENT_UNITS.iter().find(|(name, _)| *name == unit)?.1;
        i64::try_from(scale_number(&text[..number], scale)?).ok()
    })
}

/// Formats a duration in seconds: `5400s`.
pub(crate) fn format_duration(nanos: i64) -> String {
    format!("{}s", format_double(nanos as f64 / 1e9))
}

/// Formats without an exponent, with the shortest representation.
fn format_double(value: f64) -> String {
    format!("{value}")
}

/// Parses an RFC 3339 timestamp within CEL's range of years.
pub(crate) fn parse_timestamp(text: &str) -> Option<Timestamp> {
    let shape = text.len() >= 20 && text.as_bytes()[10] == b'T' && text.as_bytes()[4] == b'-';
    let zone = text.ends_with('Z')
        || text.get(text.len().wrapping_sub(6)..).is_some_and(|z| z.as_bytes()[3] == b':');
    let timestamp: Timestamp = if shape && zone { text.parse().ok()? } else { return None };
    in_range(timestamp)
}

/// Parses a date such as `2024-02-03`.
pub(crate) fn parse_date(text: &str) -> Option<Timestamp> {
    let date: Date = text.parse().ok()?;
    in_range(date.to_zoned(TimeZone::UTC).ok()?.timestamp())
}

pub(crate) fn from_second(seconds: i64) -> Option<Timestamp> {
    Timestamp::from_second(seconds).ok().and_then(in_range)
}

pub(crate) fn in_range(timestamp: Timestamp) -> Option<Timestamp> {
    (MIN_UNIX_SECONDS..=MAX_UNIX_SECONDS).contains(&timestamp.as_second()).then_some(timestamp)
}

//! Times and durations in the formats of the API: RFC 3339, Go's `1h2m3s`, and kubectl's AGE column.

use std::fmt::Write as _;

use jiff::{SignedDuration, Timestamp};

/// Parses an RFC 3339 time as strictly as Go: `2026-01-02T03:04:05Z`, with optional fraction and offset.
pub fn parse_rfc3339(text: &str) -> Option<Timestamp> {
    let time = schema::time::Timestamp::parse(text).ok()?;
    Timestamp::new(time.seconds, i32::try_from(time.nanos).ok()?).ok()
}

/// Formats a time with seconds, as `metav1.Time`.
pub fn rfc3339(time: Timestamp) -> String {
    to_schema_timestamp(time).to_seconds()
}

/// Formats a time with microseconds, as `metav1.MicroTime`.
pub fn rfc3339_micro(time: Timestamp) -> String {
    to_schema_timestamp(time).to_micros()
}

/// Times before year 1 are not representable and become 1970.
fn to_schema_timestamp(time: Timestamp) -> schema::time::Timestamp {
    let nanos = time.as_nanosecond();
    let (seconds, nanos) = (nanos.div_euclid(1_000_000_000), nanos.rem_euclid(1_000_000_000));
    schema::time::Timestamp::new(seconds as i64, nanos as u32)
        .unwrap_or(schema::time::Timestamp { seconds: 0, nanos: 0 })
}

/// Parses a Go duration such as `1h30m`, `-1.5s` or `0`.
pub fn parse_duration(text: &str) -> Result<SignedDuration, String> {
    let invalid = || format!("time: invalid duration {}", crate::field::quote(text));
    let negative = text.starts_with('-');
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return Ok(SignedDuration::ZERO);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let (part, after) = duration_part(rest, text)?;
        total = total.checked_add(part).filter(|total| *total <= 1 << 63).ok_or_else(invalid)?;
        rest = after;
    }
    let nanos = if negative { 0i64.checked_sub_unsigned(total) } else { i64::try_from(total).ok() };
    nanos.map(SignedDuration::from_nanos).ok_or_else(invalid)
}

/// Parses one number with its unit into nanoseconds.
fn duration_part<'a>(rest: &'a str, text: &str) -> Result<(u64, &'a str), String> {
    let quoted = crate::field::quote;
    let invalid = || format!("time: invalid duration {}", quoted(text));
    let split = |text: &'a str| text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    let (whole, after) = split(rest);
    let (fraction, after) = after.strip_prefix('.').map_or(("", after), split);
    if whole.is_empty() && fraction.is_empty() {
        return Err(invalid());
    }
    let (unit, after) =
        after.split_at(after.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(after.len()));
    let scale: u64 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "" => return Err(format!("time: missing unit in duration {}", quoted(text))),
        other => {
            return Err(format!("time: unknown unit {} in duration {}", quoted(other), quoted(text)));
        }
    };
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| invalid())? };
    let mut nanos = whole.checked_mul(scale).ok_or_else(invalid)?;
    // Digits after the eighteenth are below a nanosecond for every unit.
    let fraction = &fraction[..fraction.len().min(18)];
    if let Ok(digits) = fraction.parse::<u128>() {
        let part = digits * u128::from(scale) / 10u128.pow(fraction.len() as u32);
        nanos = nanos.checked_add(part as u64).ok_or_else(invalid)?;
    }
    Ok((nanos, after))
}

/// Formats a duration as Go: `1h2m3.5s`, `1.5ms`, `0s`.
pub fn format_duration(duration: SignedDuration) -> String {
    let nanos = duration.as_nanos();
    let (sign, nanos) = (if nanos < 0 { "-" } else { "" }, nanos.unsigned_abs());
    let small = |unit: u128, name: &str| format!("{sign}{}{name}", format_decimal(nanos, unit));
    match nanos {
        0 => "0s".to_owned(),
        1..1_000 => small(1, "ns"),
        1_000..1_000_000 => small(1_000, "µs"),
        1_000_000..1_000_000_000 => small(1_000_000, "ms"),
        _ => {
            let mut out = sign.to_owned();
            let minutes = nanos / 60_000_000_000;
            if minutes >= 60 {
                let _ = write!(out, "{}h", minutes / 60);
            }
            if minutes > 0 {
                let _ = write!(out, "{}m", minutes % 60);
            }
            let _ = write!(out, "{}s", format_decimal(nanos % 60_000_000_000, 1_000_000_000));
            out
        }
    }
}

/// Formats `value / unit` without trailing zeros. `unit` is a power of ten.
fn format_decimal(value: u128, unit: u128) -> String {
    let (whole, part) = (value / unit, value % unit);
    if part == 0 {
        return whole.to_string();
    }
    let width = unit.ilog10() as usize;
    let fraction = format!("{part:0width$}");
    format!("{whole}.{}", fraction.trim_end_matches('0'))
}

/// Formats an age as kubectl's AGE column: two units for short durations, one for longer ones.
pub fn human_duration(duration: SignedDuration) -> String {
    let seconds = duration.as_secs();
    let pair = |big: i64, unit: &str, small: i64, rest: &str| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{rest}") }
    };
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    let (days, years) = (hours / 24, hours / 24 / 365);
    match seconds {
        ..-1 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        0..120 => format!("{seconds}s"),
        _ if minutes < 10 => pair(minutes, "m", seconds % 60, "s"),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => pair(hours, "h", minutes % 60, "m"),
        _ if hours < 48 => format!("{hours}h"),
        _ if hours < 24 * 8 => pair(days, "d", hours % 24, "h"),
        _ if hours < 24 * 365 * 2 => format!("{days}d"),
        _ if hours < 24 * 365 * 8 => pair(years, "y", days % 365, "d"),
        _ => format!("{years}y"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn time_formats_like_go() {
        for (text, seconds, micros) in [
            ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05.000000Z"),
            ("2026-01-02T03:04:05.123456789Z", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05.123456Z"),
            ("2026-01-02T03:04:05.5+02:00", "2026-01-02T01:04:05Z", "2026-01-02T01:04:05.500000Z"),
            ("1960-01-01T00:00:00.25Z", "1960-01-01T00:00:00Z", "1960-01-01T00:00:00.250000Z"),
        ] {
            let time = parse_rfc3339(text).expect(text);
            assert_eq!((rfc3339(time).as_str(), rfc3339_micro(time).as_str()), (seconds, micros), "{text}");
        }
        for text in [
            "",
            "2026-01-02",
            "2026-01-02 03:04:05Z",
            "2026-01-02T03:04:05",
            "2026-01-02T03:04:05.Z",
            "2026-01-02t03:04:05Z",
            "2026-01-02T03:04:05z",
            "2026-13-02T03:04:05Z",
            "2026-01-02T03:04:60Z",
            "2026-01-02T03:04:05+0200",
            "2026-01-02T03:04:05é",
        ] {
            assert_eq!(parse_rfc3339(text), None, "{text}");
        }
    }

    #[test]
    fn duration_formats_like_go() {
        for (text, formatted) in [
            ("0", "0s"),
            ("30s", "30s"),
            ("90s", "1m30s"),
            ("1h", "1h0m0s"),
            ("1.5h", "1h30m0s"),
            ("-1.5s", "-1.5s"),
            ("1ms500us", "1.5ms"),
            ("100ns", "100ns"),
            ("1us", "1µs"),
            (".5s", "500ms"),
            ("0.1234567891s", "123.456789ms"),
            ("2562047h47m16.854775807s", "2562047h47m16.854775807s"),
        ] {
            assert_eq!(parse_duration(text).map(format_duration).as_deref(), Ok(formatted), "{text}");
        }
        for (text, reason) in [
            ("", "time: invalid duration \"\""),
            ("3", "time: missing unit in duration \"3\""),
            (".s", "time: invalid duration \".s\""),
            ("3x", "time: unknown unit \"x\" in duration \"3x\""),
            ("9999999h", "time: invalid duration \"9999999h\""),
        ] {
            assert_eq!(parse_duration(text), Err(reason.to_owned()), "{text}");
        }
    }

    #[test]
    fn human_duration_matches_upstream() {
        let hours = |hours: i64| hours * 3600;
        for (seconds, expected) in [
            (-2, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (600, "10m"),
            (hours(3) - 1, "179m"),
            (hours(3), "3h"),
            (hours(3) + 60, "3h1m"),
            (hours(8), "8h"),
            (hours(47), "47h"),
            (hours(48), "2d"),
            (hours(49), "2d1h"),
            (hours(24 * 8), "8d"),
            (hours(24 * 729), "729d"),
            (hours(24 * 730), "2y"),
            (hours(24 * 731), "2y1d"),
            (hours(24 * 365 * 8), "8y"),
        ] {
            assert_eq!(human_duration(SignedDuration::from_secs(seconds)), expected, "{seconds}");
        }
    }

    proptest! {
        #[test]
        fn duration_round_trips(nanos: i64) {
            let formatted = format_duration(SignedDuration::from_nanos(nanos));
            prop_assert_eq!(parse_duration(&formatted), Ok(SignedDuration::from_nanos(nanos)));
        }

        #[test]
        fn parse_never_panics(text in "\\PC{0,30}|[0-9.hmsun+-]{0,40}|[0-9TZ:.+-]{0,30}") {
            let _ = (parse_duration(&text), parse_rfc3339(&text));
        }
    }
}

//! Cron schedules: five fields or a descriptor such as `@daily` or `@every 90s`. Upstream: `robfig/cron`.

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, Zoned};

/// The schedule of a CronJob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The times that match all fields.
    Times(CronFields),
    /// A fixed interval of at least a second.
    Every(Duration),
}

/// The values that each field matches: bit `n` is set for the value `n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CronFields {
    pub minutes: u64,
    pub hours: u64,
    pub days: u64,
    pub months: u64,
    pub weekdays: u64,
    /// Whether the day of the month (or the day of the week) is `*`. If neither is, a day matches if
    /// one of them does.
    pub any_day: bool,
    pub any_weekday: bool,
}

struct Bounds {
    min: u32,
    max: u32,
    /// The names of the values, starting with `min`.
    names: &'static [&'static str],
}

const MINUTES: Bounds = Bounds { min: 0, max: 59, names: &[] };
const HOURS: Bounds = Bounds { min: 0, max: 23, names: &[] };
const DAYS: Bounds = Bounds { min: 1, max: 31, names: &[] };
const MONTHS: Bounds = Bounds {
    min: 1,
    max: 12,
    names: &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
};
const WEEKDAYS: Bounds = Bounds { min: 0, max: 6, names: &["sun", "mon", "tue", "wed", "thu", "fri", "sat"] };

impl Schedule {
    /// Parses a schedule. The error has upstream's text.
    pub fn parse(text: &str) -> Result<Schedule, String> {
        if text.is_empty() {
            return Err("empty spec string".to_owned());
        }
        let mut text = text;
        if let Some(zoned) = text.strip_prefix("TZ=").or_else(|| text.strip_prefix("CRON_TZ=")) {
            // Time zones in a schedule are rejected later. Validate the rest here.
            text = zoned.split_once(' ').map_or("", |(_, rest)| rest.trim());
        }
        if text.starts_with('@') {
            return parse_descriptor(text);
        }
        let fields: Vec<&str> = text.split_whitespace().collect();
        let [minutes, hours, days, months, weekdays] = fields.as_slice() else {
            return Err(format!("expected exactly 5 fields, found {}: [{}]", fields.len(), fields.join(" ")));
        };
        let (minutes, _) = parse_field(minutes, &MINUTES)?;
        let (hours, _) = parse_field(hours, &HOURS)?;
        let (days, any_day) = parse_field(days, &DAYS)?;
        let (months, _) = parse_field(months, &MONTHS)?;
        let (weekdays, any_weekday) = parse_field(weekdays, &WEEKDAYS)?;
        Ok(Schedule::Times(CronFields { minutes, hours, days, months, weekdays, any_day, any_weekday }))
    }

    /// The first time after `after` in the time zone `zone`; `None` if there is none within five years,
    /// as for a February 31st.
    pub fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        let after = Timestamp::from_second(after.as_second()).ok()?;
        match self {
            Schedule::Every(interval) => after.checked_add(*interval).ok(),
            Schedule::Times(times) => times.next(after, zone),
        }
    }
}

impl CronFields {
    /// Steps through absolute time: a skipped local hour has no runs, and the runs of a repeated hour
    /// happen twice.
    fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        const MINUTE: SignedDuration = SignedDuration::from_mins(1);
        let to_minute = SignedDuration::from_secs(60 - after.as_second().rem_euclid(60));
        let mut time = after.checked_add(to_minute).ok()?.to_zoned(zone.clone());
        let last_year = time.year().checked_add(5)?;
        while time.year() <= last_year {
            let has = |bits: u64, value: i8| bits >> value & 1 == 1;
            time = if !has(self.months, time.month()) {
                let next =
                    time.first_of_month().ok()?.date().checked_add(jiff::Span::new().months(1)).ok()?;
                next.to_zoned(zone.clone()).ok()?.start_of_day().ok()?
            } else if !self.has_day(&time) {
                time.tomorrow().ok()?.start_of_day().ok()?
            } else if !has(self.hours, time.hour()) {
                let left = SignedDuration::from_mins(60 - i64::from(time.minute()));
                time.checked_add(left).ok()?
            } else if !has(self.minutes, time.minute()) {
                time.checked_add(MINUTE).ok()?
            } else {
                return Some(time.timestamp());
            };
        }
        None
    }

    fn has_day(&self, time: &Zoned) -> bool {
        let day = self.days >> time.day() & 1 == 1;
        let weekday = self.weekdays >> time.weekday().to_sunday_zero_offset() & 1 == 1;
        if self.any_day || self.any_weekday { day && weekday } else { day || weekday }
    }
}

fn parse_descriptor(text: &str) -> Result<Schedule, String> {
    let expression = match text {
        "@yearly" | "@annually" => "0 0 1 1 *",
        "@monthly" => "0 0 1 * *",
        "@weekly" => "0 0 * * 0",
        "@daily" | "@midnight" => "0 0 * * *",
        "@hourly" => "0 * * * *",
        _ => {
            let Some(every) = text.strip_prefix("@every ") else {
                return Err(format!("unrecognized descriptor: {text}"));
            };
            let every = parse_duration(every)
                .map_err(|reason| format!("failed to parse duration {text}: time: {reason}"))?;
            return Ok(Schedule::Every(Duration::from_secs(every.as_secs().max(1))));
        }
    };
    Schedule::parse(expression)
}

/// The bits of a field, and whether it is `*`.
fn parse_field(text: &str, bounds: &Bounds) -> Result<(u64, bool), String> {
    let (mut bits, mut any) = (0, false);
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (more, star) = parse_range(part, bounds)?;
        bits |= more;
        any |= star;
    }
    Ok((bits, any))
}

fn parse_range(text: &str, bounds: &Bounds) -> Result<(u64, bool), String> {
    let parts: Vec<&str> = text.split('/').collect();
    let limits: Vec<&str> = parts[0].split('-').collect();
    let star = limits[0] == "*" || limits[0] == "?";
    let (start, mut end) = if star {
        (bounds.min, bounds.max)
    } else {
        let start = parse_number_or_name(limits[0], bounds)?;
        match limits.as_slice() {
            [_] => (start, start),
            [_, end] => (start, parse_number_or_name(end, bounds)?),
            _ => return Err(format!("too many hyphens: {text}")),
        }
    };
    let step = match parts.as_slice() {
        [_] => 1,
        [_, step] => {
            let step = parse_number(step)?;
            if limits.len() == 1 {
                end = bounds.max;
            }
            step
        }
        _ => return Err(format!("too many slashes: {text}")),
    };
    if start < bounds.min {
        return Err(format!("beginning of range ({start}) below minimum ({}): {text}", bounds.min));
    }
    if end > bounds.max {
        return Err(format!("end of range ({end}) above maximum ({}): {text}", bounds.max));
    }
    if start > end {
        return Err(format!("beginning of range ({start}) beyond end of range ({end}): {text}"));
    }
    if step == 0 {
        return Err(format!("step of range should be a positive number: {text}"));
    }
    let bits = (start..=end).step_by(step as usize).fold(0, |bits, value| bits | 1 << value);
    Ok((bits, star && step == 1))
}

fn parse_number_or_name(text: &str, bounds: &Bounds) -> Result<u32, String> {
    let index = bounds.names.iter().position(|name| text.eq_ignore_ascii_case(name));
    match index {
        Some(index) => Ok(bounds.min + u32::try_from(index).unwrap_or(0)),
        None => parse_number(text),
    }
}

fn parse_number(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let quoted = crate::field::quote(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!(
            "failed to parse int from {text}: strconv.Atoi: parsing {quoted}: invalid syntax"
        ));
    }
    match text.parse::<i64>() {
        Err(_) => Err(format!(
            "failed to parse int from {text}: strconv.Atoi: parsing {quoted}: value out of range"
        )),
        Ok(number) if number < 0 => Err(format!("negative number ({number}) not allowed: {text}")),
        // Too large for any field; the range check reports it.
        Ok(number) => Ok(u32::try_from(number).unwrap_or(u32::MAX)),
    }
}

/// Parses a duration such as `1h30m`. Negative durations are rejected.
fn parse_duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, f64); 7] =
        [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let quoted = crate::field::quote(text);
    let invalid = || format!("invalid duration {quoted}");
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let value: f64 = rest[..end].parse().map_err(|_| invalid())?;
        rest = &rest[end..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let unit = &rest[..end];
        rest = &rest[end..];
        if unit.is_empty() {
            return Err(format!("missing unit in duration {quoted}"));
        }
        let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(format!("unknown unit {} in duration {quoted}", crate::field::quote(unit)));
        };
        seconds += value * scale;
    }
    if text.starts_with('-') {
        return Ok(Duration::ZERO);
    }
    // Go's durations are limited to 292 years.
    let max = Duration::from_nanos(i64::MAX.unsigned_abs());
    Duration::try_from_secs_f64(seconds).ok().filter(|duration| *duration <= max).ok_or_else(invalid)
}

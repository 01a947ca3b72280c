//! Times as upstream parses and formats them: RFC 3339, with the error messages of Go's `time.Parse`.

/// A point in time: `seconds` since 1970 and `nanos` within the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    pub seconds: i64,
    pub nanos: u32,
}

const SECONDS_LAYOUT: &str = "2006-01-02T15:04:05Z07:00";
const MICROS_LAYOUT: &str = "2006-01-02T15:04:05.000000Z07:00";

/// The first second of year 1: Go's zero time, which is null in JSON.
const ZERO_TIME_SECONDS: i64 = -62_135_596_800;

/// The last second of year 9999, the maximum of RFC 3339.
const MAX_SECONDS: i64 = 253_402_300_799;

impl Timestamp {
    /// Parses `metav1.Time`. The error has Go's text.
    pub fn parse(text: &str) -> Result<Timestamp, String> {
        Scanner { text, rest: text, layout: SECONDS_LAYOUT }.scan(false)
    }

    /// Parses `metav1.MicroTime`, which requires six fractional digits.
    pub fn parse_micro(text: &str) -> Result<Timestamp, String> {
        Scanner { text, rest: text, layout: MICROS_LAYOUT }.scan(true)
    }

    /// `None` if RFC 3339 cannot represent the time.
    pub fn new(seconds: i64, nanos: u32) -> Option<Timestamp> {
        ((ZERO_TIME_SECONDS..=MAX_SECONDS).contains(&seconds) && nanos < 1_000_000_000)
            .then_some(Timestamp { seconds, nanos })
    }

    pub fn is_zero(self) -> bool {
        self == Timestamp { seconds: ZERO_TIME_SECONDS, nanos: 0 }
    }

    /// `2006-01-02T15:04:05Z`.
    pub fn to_seconds(self) -> String {
        let (year, month, day) = civil_from_days(self.seconds.div_euclid(86_400));
        let second = self.seconds.rem_euclid(86_400);
        format!(
            "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
            second / 3600,
            second / 60 % 60,
            second % 60
        )
    }

    /// `2006-01-02T15:04:05.000000Z`.
    pub fn to_micros(self) -> String {
        let mut text = self.to_seconds();
        text.truncate(text.len() - 1);
        format!("{text}.{:06}Z", self.nanos / 1000)
    }
}

struct Scanner<'t> {
    text: &'t str,
    rest: &'t str,
    layout: &'static str,
}

impl Scanner<'_> {
    fn scan(mut self, micros: bool) -> Result<Timestamp, String> {
        let year = self.number(4, "2006")?;
        self.expect_literal("-")?;
        let month = self.number(2, "01")?;
        self.check_range(month, 1, 12, "month")?;
        self.expect_literal("-")?;
        // The day is checked last, when the length of the month is known.
        let day = self.number(2, "02")?;
        self.expect_literal("T")?;
        let hour = self.number(2, "15")?;
        self.check_range(hour, 0, 23, "hour")?;
        self.expect_literal(":")?;
        let minute = self.number(2, "04")?;
        self.check_range(minute, 0, 59, "minute")?;
        self.expect_literal(":")?;
        let second = self.number(2, "05")?;
        self.check_range(second, 0, 59, "second")?;
        let nanos = if micros { self.micros()? } else { self.fraction() };
        let offset = self.zone()?;
        if !self.rest.is_empty() {
            return Err(format!("parsing time {:?}: extra text: {:?}", self.text, self.rest));
        }
        self.check_range(day, 1, month_length(year, month), "day")?;
        let seconds =
            days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
        Timestamp::new(seconds, nanos)
            .ok_or_else(|| format!("parsing time {:?}: year out of range", self.text))
    }

    fn error(&self, element: &str) -> String {
        format!(
            "parsing time {:?} as {:?}: cannot parse {:?} as {element:?}",
            self.text, self.layout, self.rest
        )
    }

    fn check_range(&self, value: i64, low: i64, high: i64, what: &str) -> Result<(), String> {
        match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(format!("parsing time {:?}: {what} out of range", self.text)),
        }
    }

    fn number(&mut self, digits: usize, element: &str) -> Result<i64, String> {
        let text = self.rest.get(..digits).filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
        let number = text.and_then(|text| text.parse().ok()).ok_or_else(|| self.error(element))?;
        self.rest = &self.rest[digits..];
        Ok(number)
    }

    fn expect_literal(&mut self, text: &str) -> Result<(), String> {
        self.rest = self.rest.strip_prefix(text).ok_or_else(|| self.error(text))?;
        Ok(())
    }

    /// Any number of digits after a point or comma.
    fn fraction(&mut self) -> u32 {
        let digits = match self.rest.strip_prefix(['.', ',']) {
            Some(rest) => rest.bytes().take_while(u8::is_ascii_digit).count(),
            None => 0,
        };
        if digits == 0 {
            return 0;
        }
        let (text, rest) = self.rest.split_at(digits + 1);
        self.rest = rest;
        format!("{:0<9.9}", &text[1..]).parse().unwrap_or(0)
    }

    fn micros(&mut self) -> Result<u32, String> {
        let digits = self.rest.get(..7).and_then(|text| text.strip_prefix(['.', ',']));
        let micros = digits.filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
        let micros: u32 = micros.and_then(|text| text.parse().ok()).ok_or_else(|| self.error(".000000"))?;
        self.rest = &self.rest[7..];
        Ok(micros * 1000)
    }

    /// The offset from UTC in seconds, positive to the east.
    fn zone(&mut self) -> Result<i64, String> {
        if let Some(rest) = self.rest.strip_prefix('Z') {
            self.rest = rest;
            return Ok(0);
        }
        let error = self.error("Z07:00");
        let sign = match self.rest.as_bytes().first() {
            Some(b'+') => 1,
            Some(b'-') => -1,
            _ => return Err(error),
        };
        self.rest = &self.rest[1..];
        let mut part = |separator: &str| {
            self.expect_literal(separator).and_then(|()| self.number(2, "Z07:00")).map_err(|_| error.clone())
        };
        let (hours, minutes) = (part("")?, part(":")?);
        self.check_range(hours, 0, 24, "time zone offset hour")?;
        self.check_range(minutes, 0, 60, "time zone offset minute")?;
        Ok(sign * (hours * 3600 + minutes * 60))
    }
}

fn month_length(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970. The year starts in March, so the leap day comes last.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

/// The inverse of [`days_from_civil`]: year, month and day.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (year + era * 400 + carry, month, day)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Expect) {
        expect.assert_eq(&Timestamp::parse(text).map_or_else(|error| error, |time| time.to_micros()));
    }

    #[track_caller]
    fn check_micro(text: &str, expect: Expect) {
        expect.assert_eq(&Timestamp::parse_micro(text).map_or_else(|error| error, |time| time.to_micros()));
    }

    #[test]
    fn parse_accepts_same_times_as_go() {
        check("2026-11-15T20:53:54Z", expect!["2026-11-15T20:53:54.000000Z"]);
        check("2024-02-29T23:30:00-02:30", expect!["2024-03-01T02:00:00.000000Z"]);
        check("1969-12-31T23:59:59.1234567891Z", expect!["1969-12-31T23:59:59.123456Z"]);
        check_micro("2026-11-15T20:53:54.000001+01:00", expect!["2026-11-15T19:53:54.000001Z"]);
    }

    #[test]
    fn reports_errors_like_go() {
        check(
            "x",
            expect![[r#"parsing time "x" as "2006-01-02T15:04:05Z07:00": cannot parse "x" as "2006""#]],
        );
        check(
            "2026-11-15",
            expect![[r#"parsing time "2026-11-15" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "T""#]],
        );
        check(
            "2026-13-15T00:00:00Z",
            expect![[r#"parsing time "2026-13-15T00:00:00Z": month out of range"#]],
        );
        check("2026-02-29T00:00:00Z", expect![[r#"parsing time "2026-02-29T00:00:00Z": day out of range"#]]);
        check("2026-02-28T00:00:00Zz", expect![[r#"parsing time "2026-02-28T00:00:00Zz": extra text: "z""#]]);
        check(
            "2026-02-28T00:00:00é",
            expect![[
                r#"parsing time "2026-02-28T00:00:00é" as "2006-01-02T15:04:05Z07:00": cannot parse "é" as "Z07:00""#
            ]],
        );
        check_micro(
            "2026-02-28T00:00:00Z",
            expect![[
                r#"parsing time "2026-02-28T00:00:00Z" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "Z" as ".000000""#
            ]],
        );
    }

    proptest! {
        #[test]
        fn format_round_trips(seconds in ZERO_TIME_SECONDS..=MAX_SECONDS, nanos in 0u32..1_000_000_000) {
            let time = Timestamp { seconds, nanos: nanos / 1000 * 1000 };
            prop_assert_eq!(Timestamp::parse_micro(&time.to_micros()), Ok(time));
            prop_assert_eq!(Timestamp::parse(&time.to_seconds()), Ok(Timestamp { seconds, nanos: 0 }));
        }

        #[test]
        fn never_panics(text in "\\PC*") {
            let _ = Timestamp::parse(&text);
            let _ = Timestamp::parse_micro(&text);
        }
    }
}

//! `resource.Quantity`: a fixed-point number with a suffix, such as `500m`, `1Gi` or `12e6`.
//!
//! The value is `mantissa × 10^scale` with a scale of at least -9. Smaller fractions are rounded away from
//! zero, as upstream. Upstream has arbitrary precision; here 38 digits are exact and larger values saturate.

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Add, Sub};

use serde_json::Value;

/// The smallest scale.
const NANO_SCALE: i64 = -9;

#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    mantissa: i128,
    /// At least [`NANO_SCALE`].
    scale: i64,
    format: Format,
}

/// The suffix family that a quantity is printed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `Ki`, `Mi`, `Gi`…
    BinarySI,
    /// `m`, `k`, `M`…
    DecimalSI,
    /// `e3`, `e6`…
    DecimalExponent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    Format,
    Suffix,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ParseError::Format => {
                "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
            }
            ParseError::Suffix => "unable to parse quantity's suffix",
        })
    }
}

impl std::error::Error for ParseError {}

/// A quantity as upstream prints it. Text that already is in an accepted form is not changed.
pub fn canonicalize(text: &str) -> Result<String, ParseError> {
    let parts = QuantityParts::split(text)?;
    let quantity = parts.quantity()?;
    Ok(if parts.keeps_original_text() { text.to_owned() } else { quantity.to_string() })
}

impl Quantity {
    pub const ZERO: Quantity = Quantity { mantissa: 0, scale: 0, format: Format::DecimalSI };

    pub fn parse(text: &str) -> Result<Quantity, ParseError> {
        QuantityParts::split(text)?.quantity()
    }

    /// Parses a field value, which is a string or a number. `None` if it is absent or not a quantity.
    pub fn from_value(value: &Value) -> Option<Quantity> {
        match value {
            Value::String(text) => Quantity::parse(text).ok(),
            Value::Number(number) => Quantity::parse(&number.to_string()).ok(),
            _ => None,
        }
    }

    pub fn new(value: i64, format: Format) -> Quantity {
        Quantity { mantissa: value.into(), scale: 0, format }
    }

    pub fn from_milli(value: i64, format: Format) -> Quantity {
        Quantity { mantissa: value.into(), scale: -3, format }
    }

    pub fn format(&self) -> Format {
        self.format
    }

    pub fn is_zero(&self) -> bool {
        self.mantissa == 0
    }

    /// -1, 0 or 1.
    pub fn sign(&self) -> i32 {
        self.mantissa.signum() as i32
    }

    pub fn is_negative(&self) -> bool {
        self.mantissa < 0
    }

    pub fn is_positive(&self) -> bool {
        self.mantissa > 0
    }

    /// The value in whole units, rounded away from zero. Saturates.
    pub fn value(&self) -> i64 {
        self.value_at_scale(0).0
    }

    /// The value in thousandths, rounded away from zero. Saturates.
    pub fn milli(&self) -> i64 {
        self.value_at_scale(-3).0
    }

    pub fn is_whole(&self) -> bool {
        self.value_at_scale(0).1
    }

    /// For ratios and sums across resources, where precision does not matter.
    pub fn to_f64(&self) -> f64 {
        self.mantissa as f64 * 10f64.powi(self.scale.clamp(-400, 400) as i32)
    }

    /// Rounds to thousandths, away from zero.
    pub fn rounded_to_milli(self) -> Quantity {
        if self.scale >= -3 {
            return self;
        }
        let (mantissa, _) = div_away_from_zero(self.mantissa, -3 - self.scale);
        Quantity { mantissa, scale: -3, ..self }
    }

    pub fn negate(self) -> Quantity {
        Quantity { mantissa: self.mantissa.saturating_neg(), ..self }
    }

    /// The value times 10^-scale, and whether it is exact.
    fn value_at_scale(&self, scale: i64) -> (i64, bool) {
        let (value, exact) = if self.scale >= scale {
            let scaled = pow10(self.scale - scale).and_then(|factor| self.mantissa.checked_mul(factor));
            (scaled.unwrap_or(self.mantissa.signum().saturating_mul(i128::MAX)), true)
        } else {
            div_away_from_zero(self.mantissa, scale - self.scale)
        };
        let value = value.clamp(i64::MIN.into(), i64::MAX.into());
        (value as i64, exact)
    }

    /// Both mantissas at the smaller of the two scales; `None` if one overflows.
    fn align(&self, other: &Quantity) -> Option<(i128, i128, i64)> {
        let scale = self.scale.min(other.scale);
        let scaled = |q: &Quantity| {
            if q.mantissa == 0 { Some(0) } else { q.mantissa.checked_mul(pow10(q.scale - scale)?) }
        };
        Some((scaled(self)?, scaled(other)?, scale))
    }

    fn combine(self, other: Quantity, factor: impl Fn(i128, i128) -> i128) -> Quantity {
        let format = if self.is_zero() { other.format } else { self.format };
        match self.align(&other) {
            Some((a, b, scale)) => Quantity { mantissa: factor(a, b), scale, format },
            // On overflow one operand is larger than any real resource, and the other cannot change it.
            None if self.abs_f64() >= other.abs_f64() => Quantity { format, ..self },
            None => Quantity { mantissa: factor(0, other.mantissa), scale: other.scale, format },
        }
    }

    fn abs_f64(&self) -> f64 {
        self.to_f64().abs()
    }
}

impl Add for Quantity {
    type Output = Quantity;
    fn add(self, other: Quantity) -> Quantity {
        self.combine(other, i128::saturating_add)
    }
}

impl Sub for Quantity {
    type Output = Quantity;
    fn sub(self, other: Quantity) -> Quantity {
        self.combine(other, i128::saturating_sub)
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Quantity) -> Ordering {
        let by_sign = self.sign().cmp(&other.sign());
        if by_sign != Ordering::Equal {
            return by_sign;
        }
        match self.align(other) {
            Some((a, b, _)) => a.cmp(&b),
            // Only the operand with the larger scale can overflow, so it is larger in magnitude.
            None if self.sign() < 0 => other.scale.cmp(&self.scale),
            None => self.scale.cmp(&other.scale),
        }
    }
}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Quantity) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Compares values: `1` equals `1000m`.
impl PartialEq for Quantity {
    fn eq(&self, other: &Quantity) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Quantity {}

/// The canonical form: no fractional part, with the largest suffix that allows this.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_zero() {
            return f.write_str("0");
        }
        let whole = pow10(self.scale).and_then(|factor| self.mantissa.checked_mul(factor)).or_else(|| {
            let (value, exact) = div_away_from_zero(self.mantissa, -self.scale);
            (self.scale < 0 && exact).then_some(value)
        });
        if let (Format::BinarySI, Some(mut value)) = (self.format, whole)
            && value.abs() >= 1024
        {
            let mut suffix = 0;
            while value % 1024 == 0 && suffix + 1 < BINARY_SUFFIXES.len() {
                value /= 1024;
                suffix += 1;
            }
            return write!(f, "{value}{}", BINARY_SUFFIXES[suffix]);
        }
        let (mut value, mut exponent) = (self.mantissa, self.scale);
        let largest = if self.format == Format::DecimalExponent { i64::MAX } else { 18 };
        while value % 10 == 0 && exponent < largest {
            value /= 10;
            exponent += 1;
        }
        let shift = exponent.rem_euclid(3);
        let Some(value) = pow10(shift).and_then(|factor| value.checked_mul(factor)) else {
            return write!(f, "{value}e{exponent}");
        };
        exponent -= shift;
        match DECIMAL_SUFFIXES.iter().find(|(_, power)| *power == exponent) {
            Some((suffix, _)) if self.format != Format::DecimalExponent => write!(f, "{value}{suffix}"),
            _ if exponent == 0 => write!(f, "{value}"),
            _ => write!(f, "{value}e{exponent}"),
        }
    }
}

const BINARY_SUFFIXES: &[&str] = &["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL_SUFFIXES: &[(&str, i64)] = &[
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("", 0),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];

/// The parts of the text of a quantity.
struct QuantityParts<'a> {
    negative: bool,
    /// Without leading zeros. May be empty.
    whole: &'a str,
    fraction: &'a str,
    suffix: Suffix,
}

#[derive(Clone, Copy)]
enum Suffix {
    Binary(u32),
    Decimal(i64),
    Exponent(i64),
}

impl QuantityParts<'_> {
    fn split(text: &str) -> Result<QuantityParts<'_>, ParseError> {
        if text.is_empty() {
            return Err(ParseError::Format);
        }
        let negative = text.starts_with('-');
        let rest = text.strip_prefix(['-', '+']).unwrap_or(text);
        let (whole, rest) = digits(rest);
        let (fraction, rest) = match rest.strip_prefix('.') {
            Some(rest) => digits(rest),
            None => ("", rest),
        };
        let letters = rest.trim_start_matches(|c: char| "eEinumkKMGTP".contains(c));
        let after_sign = letters.strip_prefix(['-', '+']).unwrap_or(letters);
        if !after_sign.bytes().all(|b| b.is_ascii_digit()) {
            return Err(ParseError::Format);
        }
        Ok(QuantityParts {
            negative,
            whole: whole.trim_start_matches('0'),
            fraction,
            suffix: Suffix::from_value(rest)?,
        })
    }

    fn quantity(&self) -> Result<Quantity, ParseError> {
        let (mut mantissa, mut scale, mut inexact) = (0i128, 0i64, false);
        for (digit, in_fraction) in
            self.whole.bytes().map(|b| (b, false)).chain(self.fraction.bytes().map(|b| (b, true)))
        {
            let digit = i128::from(digit - b'0');
            match mantissa.checked_mul(10).and_then(|m| m.checked_add(digit)) {
                Some(more) if !inexact => {
                    mantissa = more;
                    scale -= i64::from(in_fraction);
                }
                // The mantissa is full: drop the digit and adjust the scale.
                _ => {
                    inexact |= digit != 0;
                    scale += i64::from(!in_fraction);
                }
            }
        }
        let mut format = Format::DecimalSI;
        match self.suffix {
            Suffix::Decimal(power) => scale += power,
            Suffix::Exponent(power) => {
                scale += power;
                format = Format::DecimalExponent;
            }
            Suffix::Binary(bits) => {
                format = Format::BinarySI;
                mantissa = mantissa.checked_mul(1 << bits).unwrap_or(i128::MAX);
            }
        }
        if mantissa == 0 {
            scale = 0;
        }
        if scale < NANO_SCALE {
            (mantissa, _) = div_away_from_zero(mantissa, NANO_SCALE - scale);
            scale = NANO_SCALE;
        }
        let mut quantity = Quantity { mantissa, scale, format };
        if format == Format::BinarySI {
            // Upstream caps binary quantities at `math.MaxInt64`, and prints those below 1 in decimal form.
            quantity = quantity.min(Quantity::new(i64::MAX, format));
            if quantity < Quantity::new(1, format) && !quantity.is_zero() {
                quantity.format = Format::DecimalSI;
            }
        }
        Ok(if self.negative { quantity.negate() } else { quantity })
    }

    /// Whether upstream keeps the text as written instead of formatting the value: its fast path in
    /// `ParseQuantity` accepts text that cannot be shortened.
    fn keeps_original_text(&self) -> bool {
        let whole = if self.whole.is_empty() { "0" } else { self.whole };
        let digits = whole.len() + self.fraction.len();
        let ends_in_000 = format!("{whole}{}", self.fraction).ends_with("000");
        match self.suffix {
            Suffix::Binary(bits) => {
                let spare_digits = 15 - whole.len() as i64 - i64::from(bits) * 3 / 10 - 1;
                self.fraction.is_empty()
                    && spare_digits >= 0
                    && whole.parse::<i64>().is_ok_and(|value| value & 7 != 0)
            }
            Suffix::Decimal(power) | Suffix::Exponent(power) => {
                let scale = power - self.fraction.len() as i64;
                digits <= 18
                    && scale >= NANO_SCALE
                    && scale % 3 == 0
                    && !ends_in_000
                    && !whole.starts_with('0')
            }
        }
    }
}

impl Suffix {
    fn from_value(text: &str) -> Result<Suffix, ParseError> {
        if let Some((_, power)) = DECIMAL_SUFFIXES.iter().find(|(suffix, _)| *suffix == text) {
            return Ok(Suffix::Decimal(*power));
        }
        if let Some(i) = BINARY_SUFFIXES.iter().position(|suffix| *suffix == text) {
            return Ok(Suffix::Binary(10 * i as u32));
        }
        let power = text.strip_prefix(['e', 'E']).and_then(|power| power.parse::<i32>().ok());
        power.map(|power| Suffix::Exponent(power.into())).ok_or(ParseError::Suffix)
    }
}

fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// 10^power; `None` if it overflows or the power is negative.
fn pow10(power: i64) -> Option<i128> {
    10i128.checked_pow(u32::try_from(power).ok()?)
}

/// `value / 10^power` rounded away from zero, and whether the division was exact.
fn div_away_from_zero(value: i128, power: i64) -> (i128, bool) {
    let Some(factor) = pow10(power) else { return (value.signum(), value == 0) };
    let exact = value % factor == 0;
    (value / factor + if exact { 0 } else { value.signum() }, exact)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(canonicalize(text).as_deref(), Ok(expected), "canonical form of {text}");
    }

    #[test]
    fn canonicalize_matches_upstream() {
        for (text, expected) in [
            ("0", "0"),
            ("-0", "0"),
            ("000", "0"),
            ("0.000", "0"),
            ("0Gi", "0"),
            ("1", "1"),
            ("05", "05"),
            ("0.5", "500m"),
            (".5", "500m"),
            ("1.5", "1500m"),
            ("100m", "100m"),
            ("1000m", "1"),
            ("1500m", "1500m"),
            ("0.1m", "100u"),
            ("0.0000000001", "1n"),
            ("-0.0000000001", "-1n"),
            ("1024", "1024"),
            ("1000", "1k"),
            ("1000k", "1M"),
            ("12e6", "12e6"),
            ("12E6", "12E6"),
            ("1e1", "10"),
            ("100e3", "100e3"),
            ("1000e3", "1e6"),
            ("1Ki", "1Ki"),
            ("1024Ki", "1Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Ki", "512"),
            ("0.1Ki", "102400m"),
            ("0.0001Ki", "102400u"),
            (".001Ki", "1024m"),
            (".000000000001Ki", "2n"),
            ("100.035Ki", "102435840m"),
            ("0.05Gi", "53687091200m"),
            ("3.001n", "4n"),
            ("1.1E-9", "2e-9"),
            ("1.3E+6", "1300e3"),
            ("1.G", "1.G"),
            ("7.123456M", "7.123456M"),
            ("1.500", "1.500"),
            ("64Mi", "64Mi"),
            ("1024Mi", "1Gi"),
            ("16Ei", "9223372036854775807"),
            ("-5", "-5"),
            ("+5", "+5"),
            ("1000E", "1000E"),
            ("1e2147483647", "10e2147483646"),
        ] {
            check(text, expected);
        }
    }

    #[test]
    fn parse_rejects_malformed_quantity() {
        for text in ["", "a", "1.2.3", "1 ", " 1", "--1", "1e", "1ee3", "1Zi", "5x", "1e99999999999", "1m3"] {
            assert!(canonicalize(text).is_err(), "{text}");
        }
        assert_eq!(Quantity::parse("1.2.3"), Err(ParseError::Format));
        assert_eq!(Quantity::parse("5Kx"), Err(ParseError::Format));
        assert_eq!(Quantity::parse("5KM"), Err(ParseError::Suffix));
    }

    #[test]
    fn add_sub_and_compare() {
        let q = |text| Quantity::parse(text).expect(text);
        assert_eq!((q("1Gi") + q("512Mi")).to_string(), "1536Mi");
        assert_eq!((q("1") - q("250m")).to_string(), "750m");
        assert_eq!((q("0") + q("1Ki")).to_string(), "1Ki");
        assert_eq!(q("1"), q("1000m"));
        assert!(q("1Ki") > q("1k") && q("-1") < q("-1m") && q("1e300") > q("1e200"));
        assert!(q("-1e300") < q("-1e200"));
        assert_eq!((q("1.1").value(), q("-1.1").value(), q("100m").milli()), (2, -2, 100));
        assert_eq!((q("1e300").value(), q("1e300").sign()), (i64::MAX, 1));
    }

    proptest! {
        #[test]
        fn canonicalize_keeps_canonical_form(text in "[+-]?[0-9]{0,20}(\\.[0-9]{0,20})?(n|u|m|k|Mi?|Gi?|Ei|e-?[0-9]{1,9})?") {
            if let Ok(once) = canonicalize(&text) {
                let twice = canonicalize(&once);
                prop_assert_eq!(twice.as_deref(), Ok(once.as_str()));
                prop_assert_eq!(Quantity::parse(&once), Quantity::parse(&text));
            }
        }

        #[test]
        fn parse_never_panics(a in "\\PC{0,12}|[0-9.eEikM+-]{0,40}", b in "[0-9]{0,40}e?[0-9]{0,9}") {
            if let (Ok(a), Ok(b)) = (Quantity::parse(&a), Quantity::parse(&b)) {
                let _ = (a + b, a - b, a.cmp(&b), a.value(), a.milli(), a.to_string());
            }
        }
    }
}

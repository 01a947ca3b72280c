//! `IntOrString` values that are a number or a percentage of a total.

use api::intstr::RoundingMode;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// The number, or the percentage of `total`. `None` for an invalid string.
pub fn scaled_value(value: &IntOrString, total: i32, round: RoundingMode) -> Option<i32> {
    let value = match value {
        IntOrString::Int(number) => return Some(*number),
        IntOrString::String(text) => api::intstr::IntOrString::Text(text),
    };
    let scaled = value.scaled_value(total.into(), round)?;
    Some(i32::try_from(scaled).unwrap_or(if scaled < 0 { i32::MIN } else { i32::MAX }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentage_is_scaled_with_rounding() {
        let check = |text: &str, total, round, expected| {
            assert_eq!(
                scaled_value(&IntOrString::String(text.into()), total, round),
                expected,
                "{text} of {total}"
            );
        };
        check("25%", 10, RoundingMode::Up, Some(3));
        check("25%", 10, RoundingMode::Down, Some(2));
        check("100%", 7, RoundingMode::Down, Some(7));
        check("300%", i32::MAX, RoundingMode::Down, Some(i32::MAX));
        check("many", 7, RoundingMode::Down, None);
        assert_eq!(scaled_value(&IntOrString::Int(4), 2, RoundingMode::Up), Some(4));
    }
}

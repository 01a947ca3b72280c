//! Numbers that may be written as a percentage of a whole.

use api::intstr::Round;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// The number, or that percentage of `total`; `None` for a string that is neither.
pub fn of(value: &IntOrString, total: i32, round: Round) -> Option<i32> {
    let value = match value {
        IntOrString::Int(number) => return Some(*number),
        IntOrString::String(text) => api::intstr::IntOrString::Text(text),
    };
    let scaled = value.scaled(total.into(), round)?;
    Some(i32::try_from(scaled).unwrap_or(if scaled < 0 { i32::MIN } else { i32::MAX }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_parts_of_the_whole() {
        let check = |text: &str, total, round, expected| {
            assert_eq!(of(&IntOrString::String(text.into()), total, round), expected, "{text} of {total}");
        };
        check("25%", 10, Round::Up, Some(3));
        check("25%", 10, Round::Down, Some(2));
        check("100%", 7, Round::Down, Some(7));
        check("300%", i32::MAX, Round::Down, Some(i32::MAX));
        check("many", 7, Round::Down, None);
        assert_eq!(of(&IntOrString::Int(4), 2, Round::Up), Some(4));
    }
}

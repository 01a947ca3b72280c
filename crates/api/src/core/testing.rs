//! Helpers for validation tests.

use serde_json::Value;

use crate::field::ErrorList;
use crate::strategy::RestStrategy;

/// The errors, one per line.
pub(crate) fn lines(errors: &ErrorList) -> String {
    errors.0.iter().map(|error| format!("{}: {}\n", error.path, error.message)).collect()
}

/// Checks the validation errors of a new object.
#[track_caller]
pub(crate) fn check(kind: &dyn RestStrategy, obj: &str, expected: &expect_test::Expect) {
    let mut errors = ErrorList::default();
    kind.validate(&parse(obj), &mut errors);
    kind.validate_create(&parse(obj), &mut errors);
    expected.assert_eq(&lines(&errors));
}

/// Checks the validation errors of an update.
#[track_caller]
pub(crate) fn check_update(kind: &dyn RestStrategy, old: &str, new: &str, expected: &expect_test::Expect) {
    let mut errors = ErrorList::default();
    kind.validate_update(&parse(new), &parse(old), &mut errors);
    expected.assert_eq(&lines(&errors));
}

#[track_caller]
pub(crate) fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

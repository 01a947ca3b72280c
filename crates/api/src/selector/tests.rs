use expect_test::{Expect, expect};
use serde_json::json;

use super::*;

#[track_caller]
fn check(text: &str, expected: Expect) {
    expected.assert_eq(&match LabelSelector::parse(text) {
        Ok(selector) => selector.to_string(),
        Err(reason) => format!("error: {reason}"),
    });
}

#[test]
fn label_selector_display_is_canonical() {
    check("", expect![""]);
    check(" z = 1 ,a!=b", expect!["a!=b,z=1"]);
    check("a==b", expect!["a==b"]);
    check("e in (y,x,x),!f,g notin (z),h>5,i<3,j", expect!["e in (x,y),!f,g notin (z),h>5,i<3,j"]);
    check("a in ()", expect!["a in ()"]);
    check("a in (,b)", expect!["a in (,b)"]);
    check("a=", expect!["a="]);
    check("in in (in,notin)", expect!["in in (in,notin)"]);
    check("a=\0garbage", expect!["a="]);
}

#[test]
fn rejects_invalid_label_selectors() {
    check("a===b", expect!["error: unable to parse requirement: found '=', expected: identifier"]);
    check("a,", expect!["error: found '', expected: identifier after ','"]);
    check(",a", expect!["error: found ',', expected: !, identifier, or 'end of string'"]);
    check(
        "a b",
        expect!["error: unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt"],
    );
    check("!a=b", expect!["error: found '=', expected: ',' or 'end of string'"]);
    check("!", expect!["error: unable to parse requirement: found '', expected: identifier"]);
    check("a in b", expect!["error: unable to parse requirement: found 'b' expected: '('"]);
    check(
        "a in (",
        expect!["error: unable to parse requirement: found '', expected: ',', ')' or identifier"],
    );
    check("a in (b", expect!["error: unable to parse requirement: found '', expected: ',' or ')'"]);
    check("a in (b,", expect!["error: unable to parse requirement: found '', expected: ',', or identifier"]);
    check(
        "a>x",
        expect![[
            r#"error: unable to parse requirement: values[0]: Invalid value: "x": for 'Gt', 'Lt' operators, the value must be an integer"#
        ]],
    );
    check("a=b!", expect!["error: found '!', expected: ',' or 'end of string'"]);
    check(
        "-=b",
        expect![[
            r#"error: unable to parse requirement: <nil>: Invalid value: "-": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"#
        ]],
    );
    check(
        "a=-",
        expect![[
            r#"error: unable to parse requirement: values[0][a]: Invalid value: "-": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"#
        ]],
    );
}

#[track_caller]
fn check_match(selector: &str, labels: Value, expected: bool) {
    let parsed = LabelSelector::parse(selector).expect(selector);
    assert_eq!(parsed.matches_labels(&labels), expected, "{selector} on {labels}");
}

#[test]
fn label_selector_matches_labels() {
    let labels = || json!({"a": "1", "b": "x"});
    for (selector, expected) in [
        ("", true),
        ("a=1", true),
        ("a=2", false),
        ("a!=1", false),
        ("c!=1", true),
        ("a in (1,2),b", true),
        ("a notin (1)", false),
        ("c notin (1)", true),
        ("!c", true),
        ("!a", false),
        ("a>0", true),
        ("a>1", false),
        ("a<2", true),
        ("b<2", false),
        ("c<2", false),
    ] {
        check_match(selector, labels(), expected);
    }
}

#[test]
fn absent_selector_matches_nothing_and_empty_everything() {
    let read = |value: Value| LabelSelector::from_value(&value);
    assert!(read(json!(null)).is_ok_and(|s| s.is_nothing() && !s.matches_labels(&json!({}))));
    assert!(read(json!({})).is_ok_and(|s| s.is_everything()));
    let both = json!({"matchLabels": {"z": "1"}, "matchExpressions": [{"key": "a", "operator": "Exists"}]});
    assert_eq!(read(both).map(|s| s.to_string()), Ok("a,z=1".to_owned()));
    let bad = json!({"matchExpressions": [{"key": "a", "operator": "Is"}]});
    assert_eq!(read(bad), Err(SelectorError("\"Is\" is not a valid label selector operator".to_owned())));
    assert_eq!(LabelSelector::from_set(&json!({"b": "2", "a": "1"})).to_string(), "a=1,b=2");
}

#[track_caller]
fn check_fields(text: &str, expected: Expect) {
    expected.assert_eq(&match FieldSelector::parse(text) {
        Ok(selector) => selector.to_string(),
        Err(reason) => format!("error: {reason}"),
    });
}

#[test]
fn field_selector_parse_and_match() {
    check_fields("", expect![""]);
    check_fields("b==2,a!=1,", expect!["a!=1,b=2"]);
    check_fields(r"a=x\,y\=z\\", expect![r"a=x\,y\=z\\"]);
    check_fields("a", expect!["error: invalid selector: 'a'; can't understand 'a'"]);
    check_fields(r"a=\x", expect![r"error: invalid field selector: invalid escape sequence: \x"]);
    check_fields(r"a=\", expect![r"error: invalid field selector: invalid escape sequence: \"]);
    check_fields("a===b", expect!["error: invalid field selector: unescaped character in value: 61"]);
    let selector = FieldSelector::parse("a=1,b!=2").expect("parses");
    assert!(selector.matches(|field| (field == "a").then_some("1")));
    assert_eq!((selector.exact("a"), selector.exact("b")), (Some("1"), None));
    assert!(!selector.matches(|_| Some("2")));
}

proptest::proptest! {
    #[test]
    fn display_round_trips(text in "[a-c=!(), inot<>5]{0,20}") {
        if let Ok(selector) = LabelSelector::parse(&text) {
            proptest::prop_assert_eq!(LabelSelector::parse(&selector.to_string()), Ok(selector));
        }
    }

    #[test]
    fn parse_never_panics(text in "\\PC{0,20}") {
        let _ = (LabelSelector::parse(&text), FieldSelector::parse(&text));
    }
}

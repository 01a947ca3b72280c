use proptest::prelude::*;

use super::super::compile;
use super::*;

const SIZE_LIMIT: usize = 8 << 20;

#[track_caller]
fn check(pattern: &str, expected: &str) {
    let error = parse(pattern).map_or_else(|error| error.to_string(), |_| String::new());
    assert_eq!(error.trim_start_matches("error parsing regexp: "), expected, "{pattern}");
}

#[track_caller]
fn matches(pattern: &str, yes: &[&str], no: &[&str]) {
    let regex = compile(pattern, SIZE_LIMIT).unwrap();
    yes.iter().for_each(|text| assert!(regex.is_match(text), "{pattern} {text}"));
    no.iter().for_each(|text| assert!(!regex.is_match(text), "{pattern} {text}"));
}

#[test]
fn rejects_patterns_that_go_rejects() {
    check("(", "missing closing ): `(`");
    check("a(b|c", "missing closing ): `a(b|c`");
    check("a)b", "unexpected ): `a)b`");
    check("x[a-", "missing closing ]: `[a-`");
    check("[]", "missing closing ]: `[]`");
    check("[z-a]", "invalid character class range: `z-a`");
    check("[[:nope:]]", "invalid character class range: `[:nope:]`");
    check(r"[a-\d]", r"invalid escape sequence: `\d`");
    check(r"\p{Nope}", r"invalid character class range: `\p{Nope}`");
    check(r"\p{Lowercase}", r"invalid character class range: `\p{Lowercase}`");
    check(r"\p{sc=Greek}", r"invalid character class range: `\p{sc=Greek}`");
    check("*", "missing argument to repetition operator: `*`");
    check("+,x", "missing argument to repetition operator: `+`");
    check("a|*", "missing argument to repetition operator: `*`");
    check("a**", "invalid nested repetition operator: `**`");
    check("a{2,1}", "invalid repeat count: `{2,1}`");
    check("a{1001}", "invalid repeat count: `{1001}`");
    check(r"\y", r"invalid escape sequence: `\y`");
    check(r"\xg1", r"invalid escape sequence: `\xg1`");
    check(r"(a)\1", r"invalid escape sequence: `\1`");
    check(r"a\", "trailing backslash at end of expression: ``");
    check("(?=a)", "invalid or unsupported Perl syntax: `(?=`");
    check("^(?!a)", "invalid or unsupported Perl syntax: `(?!`");
    check("(?i", "invalid or unsupported Perl syntax: `(?i`");
    check("(?<=a)", "invalid named capture: `(?<=a)`");
    check("(?P<n", "invalid named capture: `(?P<n`");
}

#[test]
fn limits_product_of_nested_repeat_counts() {
    check("((a{1000}){1000})", "invalid repeat count: `{1000}`");
    check("(a{100}){11}", "invalid repeat count: `{11}`");
    check("(x|(y{20}){10})z{3}|(x|(y{20}){10}){6}?", "invalid repeat count: `{6}?`");
    check("(a{2,}){501,}", "invalid repeat count: `{501,}`");
    check("((a{1000})*){2}", "invalid repeat count: `{2}`");
    for pattern in
        ["(a{100}){10}", "(a{1000}){1}", "(a{1000})*", "(a{1000}){0}", "(a{0}){1000}", "(a{0,}){1000}"]
    {
        check(pattern, "");
    }
}

#[test]
fn limits_size_and_nesting() {
    let long = format!("({}){{1000}}", "ab".repeat(1700));
    check(&long, &format!("expression too large: `{long}`"));
    check(&format!("({}){{1000}}", "ab".repeat(1600)), "");
    let nested = |depth: usize| format!("{}a{}", "(".repeat(depth), ")".repeat(depth));
    check(&nested(999), "");
    check(&nested(1000), &format!("expression nests too deeply: `{}`", nested(1000)));
    let plain = |depth: usize| format!("{}a{}", "(?:".repeat(depth), ")".repeat(depth));
    check(&plain(5000), "");
}

#[test]
fn accepts_patterns_that_go_accepts() {
    matches(&format!("^{}a{}$", "(".repeat(998), ")".repeat(998)), &["a"], &["b"]);
    matches(&format!("^{}a{}$", "(x|y+".repeat(240), ")*".repeat(240)), &[""], &["b"]);
    matches(&format!("^{}a{}$", "(?:x".repeat(480), ")?".repeat(480)), &["x", "xx"], &["b"]);
    matches(r"^.{1000}$", &[&"é".repeat(1000)], &["a"]);
}

#[test]
fn accepts_syntax_of_go() {
    matches(r"^{.*}$", &["{a}"], &["a"]);
    matches("^a{,2}$", &["a{,2}"], &["aa"]);
    matches("^a{01}$", &["a{01}"], &["a"]);
    matches("^a{ 1 }$", &["a{ 1 }"], &["a"]);
    matches(r"^\<\>\_\ \-$", &["<>_ -"], &["a"]);
    matches(r"^\012\0$", &["\n\0"], &["0120"]);
    matches(r"^\x41\x{1F600}$", &["A😀"], &["A"]);
    matches(r"^\b{start}$", &[], &["a"]);
    matches("^[+--]$", &["+", ",", "-"], &["."]);
    matches("^[--/]$", &["-", ".", "/"], &["a"]);
    matches(r"^[\d-z]$", &["5", "-", "z"], &["a"]);
    matches(r"^[a\-z]$", &["a", "-", "z"], &["b"]);
    matches("^[]a]$", &["]", "a"], &["b"]);
    matches("^[^]a]$", &["b"], &["]", "a"]);
    matches("^[[a&&b~~c]$", &["[", "a", "&", "b", "~", "c"], &["d"]);
    matches(r"^[[:alpha:]_-]$", &["a", "_", "-"], &["1"]);
    matches(r"^[[:^alpha:]]$", &["1"], &["a"]);
    matches(r"^[^\D]\D\w\s$", &["1a_ "], &["aa_ "]);
    matches(r"^\d\s$", &["1 "], &["٣ ", "1\u{a0}"]);
    matches(r"^\pL\p{Greek}\P{^Lu}$", &["éαA"], &["1αA", "éaA", "éαa"]);
    matches(r"^(?P<n>a)|(?<n>b)$", &["a", "b"], &["c"]);
    matches("^(?)a(?i)b(?-i)c$", &["abc", "aBc"], &["abC", "ABc"]);
    matches("^(?ii-s:A)$", &["a"], &["b"]);
    matches(r"^\Qa(b\E+$", &["a(bb"], &["ab"]);
    matches(r"\bab\B", &["xx abc"], &["ab"]);
    matches("^(?:|a)b*?(c)?$", &["", "abc"], &["cc"]);
    matches("^a#b$", &["a#b"], &["a"]);
}

proptest! {
    /// Accepted patterns compile, unless they are too large.
    #[test]
    fn accepted_patterns_compile(pattern in r"[\\(\[\])*+?{}0-9a-z^:,<>=!|.p$&~ -]{0,12}") {
        if parse(&pattern).is_ok()
            && let Err(error) = compile(&pattern, SIZE_LIMIT)
        {
            prop_assert!(error.contains("expression too large"), "{pattern}: {error}");
        }
    }
}

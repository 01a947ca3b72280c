use proptest::prelude::*;

use super::evaluate;

const TOKENS: &[&str] = &[
    "x",
    "x.a",
    "x.name",
    "x.nested",
    "y",
    "1",
    "0",
    "-1",
    "9223372036854775807",
    "2u",
    "1.5",
    "'a'",
    "b'a'",
    "''",
    "r'\\d'",
    "true",
    "null",
    "[1, 2]",
    "{'a': 1}",
    "[]",
    "{}",
    "+",
    "-",
    "*",
    "/",
    "%",
    "==",
    "!=",
    "<",
    ">=",
    "in",
    "&&",
    "||",
    "!",
    "?",
    ":",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ".",
    ".?a",
    "[?0]",
    ".all(i, i == 1)",
    ".exists(k, v, k != v)",
    ".map(i, i)",
    ".filter(i, true)",
    ".transformMap(k, v, v)",
    ".optMap(i, i)",
    ".sortBy(i, i)",
    "size(",
    "string(",
    "int(",
    "type(",
    "dyn(",
    "duration('1h')",
    "timestamp(0)",
    ".size()",
    ".split('')",
    ".join()",
    ".format([1])",
    ".matches('a*')",
    ".replace('', 'abc')",
    ".substring(1)",
    ".sum()",
    ".flatten()",
    ".distinct()",
    ".sort()",
    "lists.range(5)",
    "optional.of(",
    "optional.none()",
    ".value()",
    ".orValue(1)",
    "quantity('1')",
    ".add(",
    "ip('::1')",
    "cidr('10.0.0.0/8')",
    "url('http://a/')",
    "semver('1.2.3')",
    "sets.contains(",
    "has(",
    "authorizer",
    ".group('')",
    "for",
    "`a`",
    "//",
    "\n",
    "\"",
    "'''",
    "\u{1f600}",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_tokens_never_panic(
        words in prop::collection::vec(prop::sample::select(TOKENS), 0..12), blank in any::<bool>(),
    ) {
        evaluate(&words.join(if blank { " " } else { "" }));
    }

    #[test]
    fn random_text_never_panics(source in "\\PC{0,40}") {
        evaluate(&source);
    }

    #[test]
    fn patterns_and_urls_never_panic(text in "[a-z\\[\\]()*+?^$|\\\\.{},0-9:/%@-]{0,20}") {
        let text = text.replace('\\', "\\\\");
        for function in ["matches", "find", "findAll", "split"] {
            evaluate(&format!("'{text}'.{function}(dyn('{text}'))"));
        }
        for function in ["url", "quantity", "semver", "ip", "cidr", "duration", "timestamp", "isURL"] {
            evaluate(&format!("{function}(dyn('{text}'))"));
        }
    }
}

#[test]
fn expressions_of_maximum_depth_fit_worker_stack() {
    let deep = |open: &str, inner: &str, close: &str, depth| {
        format!("{}{inner}{}", open.repeat(depth), close.repeat(depth))
    };
    let sources = vec![
        deep("(", "1", ")", 248),
        deep("[", "1", "]", 240),
        deep("{'a': ", "1", "}", 240),
        deep("[1].map(i, ", "1", ")", 78),
        deep("!(", "true", ")", 240),
        format!("{}1", "true ? 1 : ".repeat(240)),
        format!("1{}", " + 1".repeat(249)),
        format!("x{}", ".nested".repeat(249)),
        format!("true{}", " && true".repeat(5000)),
        format!("optional.of(1){}", ".optMap(v, v)".repeat(60)),
    ];
    let small = std::thread::Builder::new().stack_size(2 << 20);
    let run = small.spawn(move || sources.iter().map(|source| evaluate(source)).collect::<Vec<_>>());
    let results = run.expect("a thread starts").join().expect("no expression overflows the stack");
    assert_eq!(results[0], "1");
    assert_eq!(results[6], "250");
}

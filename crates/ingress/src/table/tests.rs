use proptest::prelude::*;

use super::*;

fn backend(name: &str) -> Arc<Backend> {
    Arc::new(Backend::new(name.to_owned(), Vec::new()))
}

/// Lines such as `host /path backend`, `= ` before a path that is exact, and `host default backend`.
fn table(text: &str) -> Table {
    let (mut rules, mut defaults) = (Vec::new(), Vec::new());
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let host = if words[0] == "*" { String::new() } else { words[0].to_owned() };
        match words[1..] {
            ["default", name] => defaults.push((host, backend(name))),
            ["=", path, name] => {
                let path_type = PathType::Exact;
                rules.push(Rule { host, path: path.to_owned(), path_type, backend: backend(name) });
            }
            [path, name] => {
                let path_type = PathType::Prefix;
                rules.push(Rule { host, path: path.to_owned(), path_type, backend: backend(name) });
            }
            _ => panic!("{line}"),
        }
    }
    Table::new(rules, defaults)
}

#[track_caller]
fn check(table: &Table, host: &str, path: &str, expected: &str) {
    let found = table.find(host, path).map_or("-", |backend| &backend.name);
    assert_eq!(found, expected, "{host}{path}");
}

#[test]
fn paths_match_by_elements() {
    let table = table(
        "a.io /foo foo
         a.io /foo/bar/ bar
         a.io = /foo/exact exact
         a.io = /slash/ slash",
    );
    for (path, expected) in [
        ("/foo", "foo"),
        ("/foo/", "foo"),
        ("/foo/x", "foo"),
        ("/foobar", "-"),
        ("/foo/bar", "bar"),
        ("/foo/bar/x", "bar"),
        ("/foo/barx", "foo"),
        ("/foo/exact", "exact"),
        ("/foo/exact/", "foo"),
        ("/slash", "-"),
        ("/slash/", "slash"),
        ("/", "-"),
        ("", "-"),
    ] {
        check(&table, "a.io", path, expected);
    }
}

#[test]
fn hosts_match_from_the_most_exact() {
    let table = table(
        "* / any
         *.io /w wild
         a.io /x exact
         *.b.io / deep",
    );
    check(&table, "a.io", "/x", "exact");
    check(&table, "A.IO.", "/x", "exact");
    // The host has rules, so that others' are not asked.
    check(&table, "a.io", "/w", "-");
    check(&table, "c.io", "/w", "wild");
    check(&table, "c.io", "/x", "-");
    // One label only, and not none.
    check(&table, "x.c.io", "/w", "any");
    check(&table, "io", "/w", "any");
    check(&table, ".io", "/w", "any");
    check(&table, "x.b.io", "/", "deep");
    check(&table, "b.io", "/", "-");
    check(&table, "other", "/", "any");
    check(&table, "", "/", "any");
}

#[test]
fn what_nobody_answers_for_goes_to_a_default() {
    let table = table(
        "a.io /x x
         b.io /x y
         a.io default of-a
         * default of-all",
    );
    check(&table, "a.io", "/nothing", "of-a");
    check(&table, "b.io", "/nothing", "of-a");
    let table = self::table("* default of-all\na.io /x x");
    check(&table, "a.io", "/nothing", "of-all");
    check(&table, "c.io", "/", "of-all");
}

#[test]
fn the_older_one_is_right() {
    let table = table(
        "a.io /x first
         a.io /x second
         a.io = /x third
         a.io = /x fourth",
    );
    check(&table, "a.io", "/x", "third");
    check(&table, "a.io", "/x/y", "first");
}

#[test]
fn everyone_has_a_turn() {
    let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let backend = Backend::new("b".to_owned(), vec![address(1), address(2)]);
    let turns: Vec<Vec<u16>> =
        (0..3).map(|_| backend.in_turn().map(|place| place.address.port()).collect()).collect();
    assert_eq!(turns, [[1, 2], [2, 1], [1, 2]]);
    assert_eq!(Backend::default().in_turn().count(), 0);
}

fn host() -> impl Strategy<Value = String> {
    prop_oneof![Just("*".to_owned()), "[ab]\\.io", Just("*.io".to_owned())]
}

proptest! {
    #[test]
    fn whatever_is_asked_has_an_answer(host in ".{0,20}", path in ".{0,20}") {
        let table = table("* / any\n*.io /x wild\na.io = /x exact");
        table.find(&host, &path);
    }

    /// Whoever is found has a rule that matches, and no rule of the same host that matches is longer.
    #[test]
    fn the_longest_match_is_found(
        rules in proptest::collection::vec((host(), "(/[ab]){0,3}/?", any::<bool>()), 0..12),
        asked in "[abc]\\.io",
        path in "(/[abc]){0,4}/?",
    ) {
        let rules: Vec<Rule> = rules
            .into_iter()
            .enumerate()
            .map(|(index, (host, path, exact))| Rule {
                host: if host == "*" { String::new() } else { host },
                path: format!("/{}", path.trim_start_matches('/')),
                path_type: if exact { PathType::Exact } else { PathType::Prefix },
                backend: backend(&index.to_string()),
            })
            .collect();
        let table = Table::new(rules.clone(), Vec::new());
        let level = |rule: &Rule| match rule.host.as_str() {
            "" => 0,
            "*.io" => 1,
            host if host == asked => 2,
            _ => -1,
        };
        let best = rules.iter().map(level).max().unwrap_or(-1).max(0);
        let matches = |rule: &&Rule| {
            level(rule) == best
                && match rule.path_type {
                    PathType::Exact => rule.path == path,
                    PathType::Prefix => {
                        let (own, other) = (rule.path.trim_end_matches('/'), path.trim_end_matches('/'));
                        own == other || other.starts_with(&format!("{own}/"))
                    }
                }
        };
        let length = |rule: &Rule| elements(&rule.path).count();
        let found = table.find(&asked, &path);
        let candidates: Vec<&Rule> = rules.iter().filter(matches).collect();
        prop_assert_eq!(found.is_some(), !candidates.is_empty());
        if let Some(found) = found {
            let rule = &rules[found.name.parse::<usize>().unwrap()];
            prop_assert!(matches(&rule));
            prop_assert!(candidates.iter().all(|other| length(other) <= length(rule)));
        }
    }
}

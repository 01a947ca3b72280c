use proptest::prelude::*;

use super::*;

fn backend(name: &str) -> Arc<Backend> {
    Arc::new(Backend::new(name.to_owned(), Vec::new()))
}

/// Builds a table from lines such as `host /path backend` and `host default backend`. `= ` before a
/// path makes it exact.
fn table(text: &str) -> RouteTable {
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
    RouteTable::new(rules, defaults)
}

#[track_caller]
fn check(table: &RouteTable, host: &str, path: &str, expected: &str) {
    let found = table.find(host, path).map_or("-", |backend| &backend.name);
    assert_eq!(found, expected, "{host}{path}");
}

#[test]
fn prefix_paths_match_whole_elements() {
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
fn exact_host_precedes_wildcard_and_any_host() {
    let table = table(
        "* / any
         *.io /w wild
         a.io /x exact
         *.b.io / deep",
    );
    check(&table, "a.io", "/x", "exact");
    check(&table, "A.IO.", "/x", "exact");
    // The host has rules, so rules for other hosts are not used.
    check(&table, "a.io", "/w", "-");
    check(&table, "c.io", "/w", "wild");
    check(&table, "c.io", "/x", "-");
    // A wildcard matches exactly one label.
    check(&table, "x.c.io", "/w", "any");
    check(&table, "io", "/w", "any");
    check(&table, ".io", "/w", "any");
    check(&table, "x.b.io", "/", "deep");
    check(&table, "b.io", "/", "-");
    check(&table, "other", "/", "any");
    check(&table, "", "/", "any");
}

#[test]
fn requests_without_rule_use_default_backend() {
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
fn older_rule_wins_for_equal_paths() {
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
fn rotates_first_address_per_request() {
    let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let backend = Backend::new("b".to_owned(), vec![address(1), address(2)]);
    let port_lists: Vec<Vec<u16>> =
        (0..3).map(|_| backend.rotate().map(|backend_addr| backend_addr.address.port()).collect()).collect();
    assert_eq!(port_lists, [[1, 2], [2, 1], [1, 2]]);
    assert_eq!(Backend::default().rotate().count(), 0);
}

fn host() -> impl Strategy<Value = String> {
    prop_oneof![Just("*".to_owned()), "[ab]\\.io", Just("*.io".to_owned())]
}

proptest! {
    #[test]
    fn find_does_not_panic_for_arbitrary_requests(host in ".{0,20}", path in ".{0,20}") {
        let table = table("* / any\n*.io /x wild\na.io = /x exact");
        table.find(&host, &path);
    }

    /// The found rule matches, and no longer rule of the same host matches.
    #[test]
    fn longest_matching_path_wins(
        rules in proptest::collection::vec((host(), "(/[ab]){0,3}/?", any::<bool>()), 0..12),
        requested_host in "[abc]\\.io",
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
        let table = RouteTable::new(rules.clone(), Vec::new());
        let level = |rule: &Rule| match rule.host.as_str() {
            "" => 0,
            "*.io" => 1,
            host if host == requested_host => 2,
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
        let found = table.find(&requested_host, &path);
        let candidates: Vec<&Rule> = rules.iter().filter(matches).collect();
        prop_assert_eq!(found.is_some(), !candidates.is_empty());
        if let Some(found) = found {
            let rule = &rules[found.name.parse::<usize>().unwrap()];
            prop_assert!(matches(&rule));
            prop_assert!(candidates.iter().all(|other| length(other) <= length(rule)));
        }
    }
}

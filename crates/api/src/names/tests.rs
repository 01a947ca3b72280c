use expect_test::{Expect, expect};

use super::*;

#[track_caller]
fn check(rule: fn(&str) -> Vec<String>, value: &str, expected: Expect) {
    expected.assert_eq(&rule(value).join("\n"));
}

#[track_caller]
fn check_good(rule: fn(&str) -> Vec<String>, values: &[&str]) {
    for value in values {
        assert_eq!(rule(value), Vec::<String>::new(), "{value:?} is good");
    }
}

#[track_caller]
fn check_bad(rule: fn(&str) -> Vec<String>, values: &[&str]) {
    for value in values {
        assert!(!rule(value).is_empty(), "{value:?} must be invalid");
    }
}

#[test]
fn validates_dns_names() {
    let long = "a".repeat(64);
    check_good(dns1123_label, &["a", "1", "a-b", "1-a", &long[1..]]);
    check_bad(dns1123_label, &["", "-a", "a-", "A", "a_b", "é", "a b"]);
    check(dns1123_label, "a.b", expect!["must not contain dots"]);
    check(dns1123_label, &long, expect!["must be no more than 63 characters"]);
    check(
        dns1123_label,
        "A",
        expect![
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
        ],
    );
    check_good(dns1123_subdomain, &["a", "a.b", "1.2.3", "a.".repeat(126).trim_end_matches('.')]);
    check_bad(dns1123_subdomain, &["", ".", "a.", ".a", "a..b", "a.-b", "A.b"]);
    check(
        dns1123_subdomain,
        "X_y",
        expect![
            r"a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
        ],
    );
    check_good(dns1123_subdomain_with_underscore, &["_a.b", "a_b", "a"]);
    check_bad(dns1123_subdomain_with_underscore, &["__a", "a_", "_"]);
    check_good(dns1035_label, &["a", "a-1"]);
    check_bad(dns1035_label, &["1a", "", "a-", "a.b"]);
    check_good(wildcard_dns1123_subdomain, &["*.a", "*.a.b"]);
    check_bad(wildcard_dns1123_subdomain, &["*", "*.", "a.*", "*.*.a", "*a.b", "a.b"]);
}

#[test]
fn validates_label_keys_and_values() {
    check_good(qualified_name, &["a", "A_b.c-1", "example.com/a", "a.b/C"]);
    check(
        qualified_name,
        "bad key",
        expect![
            "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        ],
    );
    check(
        qualified_name,
        "/",
        expect![[r"
            prefix part must be non-empty
            name part must be non-empty
            name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"]],
    );
    check(
        qualified_name,
        "a/b/c",
        expect![
            "a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
        ],
    );
    check_good(label_value, &["", "a", "a_b.C-1", "12345"]);
    check(
        label_value,
        "bad value!",
        expect![
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
        ],
    );
    check(
        config_map_key,
        "a b",
        expect![
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
        ],
    );
    check_good(config_map_key, &["a", ".a", "-", "a..b"]);
    check(config_map_key, "..", expect!["must not be '..'"]);
    check(config_map_key, "..a", expect!["must not start with '..'"]);
    check_good(c_identifier, &["_a", "A1"]);
    check_bad(c_identifier, &["", "1a", "a-b"]);
    check_good(condition_reason, &["A", "A_", "A,b:c_"]);
    check_bad(condition_reason, &["", "1", "A,", "A b"]);
}

#[test]
fn validates_ports_and_env_names() {
    check_good(port_name, &["http", "a-1", "1a"]);
    check(
        port_name,
        "-A--1-",
        expect![[r"
            must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)
            must contain at least one letter (a-z)
            must not contain consecutive hyphens
            must not begin or end with a hyphen"]],
    );
    assert_eq!(port_number(0), ["must be between 1 and 65535, inclusive"]);
    assert!(port_number(1).is_empty() && port_number(65535).is_empty() && !port_number(65536).is_empty());
    assert!(user_id(0).is_empty() && !user_id(-1).is_empty() && !user_id(1 << 31).is_empty());
    check_good(env_var_name, &["A", "a b", "1", "!"]);
    check(env_var_name, "", expect!["environment variable name must be non-empty"]);
    check_bad(env_var_name, &["a=b", "é", "\t"]);
    check_good(percent, &["0%", "100%", "999%"]);
    check_bad(percent, &["", "%", "5", "-5%", "5%%"]);
    check_good(http_header_name, &["X-Header-1"]);
    check_bad(http_header_name, &["", "a b", "a:b"]);
    check_good(path_segment_name, &["system:admin", "A b", ""]);
    check(
        path_segment_name,
        "a/%",
        expect![[r"
        may not contain '/'
        may not contain '%'"]],
    );
    check(path_segment_name, "..", expect!["may not be '..'"]);
}

#[test]
fn validates_addresses() {
    check_good(ip, &["10.9.8.7", "2001:db8::ffff", "::1"]);
    check(ip, "2001:DB8::1", expect![[r#"must be in canonical form ("2001:db8::1")"#]]);
    check(ip, "010.1.1.1", expect!["must not have leading 0s"]);
    check(ip, "::ffff:1.2.3.4", expect!["must not be an IPv4-mapped IPv6 address"]);
    check(ip, "1.2.3", expect!["must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"]);
    check_bad(ip, &["", "1.2.3.4.5", "256.1.1.1", "1.2.3.+4", "fe80::1%eth0", ":", "::00000000g"]);
    check_good(ip_any_form, &["2001:DB8:0::1"]);
    check_good(cidr, &["10.0.0.0/8", "::/0", "10.9.8.7/32"]);
    check(cidr, "10.0.0.1/8", expect!["must not have bits set beyond the prefix length"]);
    check(cidr, "10.0.0.0/08", expect!["must not have leading 0s in IP or prefix length"]);
    check(cidr, "::ffff:1.2.3.4/128", expect!["must not have an IPv4-mapped IPv6 address"]);
    check(cidr, "FE80::/64", expect![[r#"must be in canonical form ("fe80::/64")"#]]);
    check_bad(cidr, &["", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/+8", "/8", "::/129"]);
    check_good(interface_address, &["192.168.1.5/24"]);
    check_bad(interface_address, &["192.168.1.5", "192.168.1.5/024"]);
}

#[track_caller]
fn check_field(rule: fn(&str, &Path, &mut ErrorList), value: &str, expected: Expect) {
    let mut errors = ErrorList::default();
    rule(value, &Path::new("f"), &mut errors);
    expected.assert_eq(&errors.to_string());
}

#[test]
fn validates_domains() {
    check_field(fully_qualified_name, "a.b.c", expect![""]);
    check_field(
        fully_qualified_name,
        "a.b",
        expect![[
            r#"f: Invalid value: "a.b": should be a domain with at least three segments separated by dots"#
        ]],
    );
    check_field(fully_qualified_name, "", expect!["f: Required value"]);
    check_field(fully_qualified_domain_name, "a.b.", expect![""]);
    check_field(
        fully_qualified_domain_name,
        "a",
        expect![[
            r#"f: Invalid value: "a": should be a domain with at least two segments separated by dots"#
        ]],
    );
    check_field(domain_prefixed_path, "acme.io/foo/%20", expect![""]);
    check_field(
        domain_prefixed_path,
        "acme.io/",
        expect![[r#"f: Invalid value: "acme.io/": must be a domain-prefixed path (such as "acme.io/foo")"#]],
    );
    check_field(
        domain_prefixed_path,
        "acme.io/a b",
        expect![[
            r#"f: Invalid value: "a b": Invalid path (regex used for validation is '[A-Za-z0-9/\-._~%!$&'()*+,;=:]+')"#
        ]],
    );
    check_field(
        domain_prefixed_key,
        "a",
        expect![[r#"f: Invalid value: "a": must be a domain-prefixed key (such as "acme.io/foo")"#]],
    );
    check_field(domain_prefixed_key, "a.io/b", expect![""]);
}

proptest::proptest! {
    #[test]
    fn validators_never_panic(value in "\\PC{0,20}|[0-9a-f:./%*-]{0,40}") {
        for rule in [
            dns1123_label, dns1123_subdomain, dns1035_label, qualified_name, label_value, config_map_key, port_name,
            env_var_name, percent, ip, ip_any_form, cidr, interface_address,
            wildcard_dns1123_subdomain, condition_reason, path_segment_name,
        ] {
            rule(&value);
        }
    }
}

#[test]
fn versions_are_ordered_by_stability() {
    let sorted =
        ["v10", "v2", "v1", "v11beta2", "v10beta3", "v3beta1", "v12alpha1", "v11alpha2", "foo1", "foo10"];
    let mut versions = sorted;
    versions.sort();
    versions.sort_by(|a, b| compare_versions(b, a));
    assert_eq!(versions, sorted);
}

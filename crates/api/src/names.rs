//! String format checks. Each function returns upstream's error messages; no message means valid.
//!
//! The messages quote regular expressions, because users see them. The checks themselves do not use
//! regular expressions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::field::{ErrorList, Path};

const LABEL_REGEX: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN_REGEX: &str = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const MAX_SUBDOMAIN_BYTES: usize = 253;
const KEY_REGEX: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const KEY_MESSAGE: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const KEY_EXAMPLES: &[&str] = &["MyName", "my.name", "123-abc"];

pub fn dns1123_label(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 63);
    if !is_label(value) {
        messages.push(if is_subdomain(value) {
            "must not contain dots".to_owned()
        } else {
            regex_message(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character",
                LABEL_REGEX,
                &["my-name", "123-abc"],
            )
        });
    }
    messages
}

pub fn dns1123_subdomain(value: &str) -> Vec<String> {
    let mut messages = too_long(value, MAX_SUBDOMAIN_BYTES);
    if !is_subdomain(value) {
        messages.push(regex_message(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character",
            SUBDOMAIN_REGEX,
            &["example.com"],
        ));
    }
    messages
}

/// Like a subdomain, but labels may contain `_`, also as the first character (DNS search paths).
pub fn dns1123_subdomain_with_underscore(value: &str) -> Vec<String> {
    let label = |label: &str| {
        let rest = label.strip_prefix('_').unwrap_or(label);
        has_valid_bytes(
            rest,
            is_lower_letter_or_digit,
            |b| is_lower_letter_or_digit(b) || b == b'-' || b == b'_',
            is_lower_letter_or_digit,
        )
    };
    let mut messages = too_long(value, MAX_SUBDOMAIN_BYTES);
    if !value.split('.').all(label) {
        messages.push(regex_message(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', '-' or '.', and must start and end with an alphanumeric character",
            r"_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?(\._?[a-z0-9]([-_a-z0-9]*[a-z0-9])?)*",
            &["example.com"],
        ));
    }
    messages
}

pub fn dns1035_label(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 63);
    if !has_valid_bytes(value, |b| b.is_ascii_lowercase(), is_label_byte, is_lower_letter_or_digit) {
        messages.push(regex_message(
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character",
            "[a-z]([-a-z0-9]*[a-z0-9])?",
            &["my-name", "abc-123"],
        ));
    }
    messages
}

/// Such as `*.example.com`.
pub fn wildcard_dns1123_subdomain(value: &str) -> Vec<String> {
    let mut messages = too_long(value, MAX_SUBDOMAIN_BYTES);
    if !value.strip_prefix("*.").is_some_and(is_subdomain) {
        messages.push(regex_message(
            "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character",
            &format!(r"\*\.{SUBDOMAIN_REGEX}"),
            &["*.example.com"],
        ));
    }
    messages
}

/// The key of a label or annotation, a finalizer or resource name: `name` or `prefix/name`.
pub fn qualified_name(value: &str) -> Vec<String> {
    let mut messages = Vec::new();
    let name = match *value.split('/').collect::<Vec<_>>() {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                messages.push("prefix part must be non-empty".to_owned());
            } else {
                messages.extend(
                    dns1123_subdomain(prefix).into_iter().map(|reason| format!("prefix part {reason}")),
                );
            }
            name
        }
        _ => {
            let message = regex_message(KEY_MESSAGE, KEY_REGEX, KEY_EXAMPLES);
            return vec![format!(
                "a valid label key {message} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
    };
    if name.is_empty() {
        messages.push("name part must be non-empty".to_owned());
    } else {
        messages.extend(too_long(name, 63).into_iter().map(|reason| format!("name part {reason}")));
    }
    if !is_key_name(name) {
        messages.push(format!("name part {}", regex_message(KEY_MESSAGE, KEY_REGEX, KEY_EXAMPLES)));
    }
    messages
}

pub fn label_value(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 63);
    if !value.is_empty() && !is_key_name(value) {
        messages.push(regex_message(
            &format!("a valid label must be an empty string or {}", &KEY_MESSAGE["must ".len()..]),
            &format!("({KEY_REGEX})?"),
            &["MyValue", "my_value", "12345"],
        ));
    }
    messages
}

/// A key of a ConfigMap or Secret.
pub fn config_map_key(value: &str) -> Vec<String> {
    let mut messages = too_long(value, MAX_SUBDOMAIN_BYTES);
    if !non_empty_and_all(value, |b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        messages.push(regex_message(
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
            "[-._a-zA-Z0-9]+",
            &["key.name", "KEY_NAME", "key-name"],
        ));
    }
    match value {
        "." | ".." => messages.push(format!("must not be '{value}'")),
        _ if value.starts_with("..") => messages.push("must not start with '..'".to_owned()),
        _ => {}
    }
    messages
}

pub fn port_name(value: &str) -> Vec<String> {
    let mut messages = too_long(value, 15);
    if !non_empty_and_all(value, is_label_byte) {
        messages.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned());
    }
    if !value.bytes().any(|b| b.is_ascii_lowercase()) {
        messages.push("must contain at least one letter (a-z)".to_owned());
    }
    if value.contains("--") {
        messages.push("must not contain consecutive hyphens".to_owned());
    }
    if value.starts_with('-') || value.ends_with('-') {
        messages.push("must not begin or end with a hyphen".to_owned());
    }
    messages
}

pub fn port_number(value: i64) -> Vec<String> {
    in_range(value, 1, 65535)
}

pub fn in_range(value: i64, low: i64, high: i64) -> Vec<String> {
    if (low..=high).contains(&value) {
        Vec::new()
    } else {
        vec![format!("must be between {low} and {high}, inclusive")]
    }
}

/// A Unix user ID.
pub fn user_id(value: i64) -> Vec<String> {
    in_range(value, 0, i64::from(i32::MAX))
}

/// Relaxed in Kubernetes 1.34: any printable character except `=`.
pub fn env_var_name(value: &str) -> Vec<String> {
    if value.is_empty() {
        return vec!["environment variable name must be non-empty".to_owned()];
    }
    error_if_invalid(
        value.bytes().all(|b| (b.is_ascii_graphic() || b == b' ') && b != b'='),
        "a valid environment variable name must consist only of printable ASCII characters other than '='",
    )
}

pub fn http_header_name(value: &str) -> Vec<String> {
    let message = || {
        regex_message(
            "a valid HTTP header must consist of alphanumeric characters or '-'",
            "[-A-Za-z0-9]+",
            &["X-Header-Name"],
        )
    };
    if non_empty_and_all(value, |b| b.is_ascii_alphanumeric() || b == b'-') {
        Vec::new()
    } else {
        vec![message()]
    }
}

/// A percentage such as `93%`.
pub fn percent(value: &str) -> Vec<String> {
    let message = || {
        regex_message(
            "a valid percent string must be a numeric string followed by an ending '%'",
            "[0-9]+%",
            &["1%", "93%"],
        )
    };
    let valid =
        value.strip_suffix('%').is_some_and(|digits| non_empty_and_all(digits, |b| b.is_ascii_digit()));
    if valid { Vec::new() } else { vec![message()] }
}

pub fn c_identifier(value: &str) -> Vec<String> {
    let message = || {
        regex_message(
            "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_'",
            "[A-Za-z_][A-Za-z0-9_]*",
            &["my_name", "MY_NAME", "MyName"],
        )
    };
    let valid = non_empty_and_all(value, |b| b.is_ascii_alphanumeric() || b == b'_')
        && !value.starts_with(|c: char| c.is_ascii_digit());
    if valid { Vec::new() } else { vec![message()] }
}

/// A segment of a URL path.
pub fn path_segment_name(value: &str) -> Vec<String> {
    match value {
        "." | ".." => vec![format!("may not be '{value}'")],
        _ => path_segment_prefix(value),
    }
}

pub fn path_segment_prefix(value: &str) -> Vec<String> {
    ["/", "%"]
        .into_iter()
        .filter(|bad| value.contains(bad))
        .map(|bad| format!("may not contain '{bad}'"))
        .collect()
}

/// The reason of a `metav1.Condition`.
pub fn condition_reason(value: &str) -> Vec<String> {
    let message = || {
        regex_message(
            "a condition reason must start with alphabetic character, optionally followed by a string of alphanumeric characters or '_,:', and must end with an alphanumeric character or '_'",
            "[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?",
            &["my_name", "MY_NAME", "MyName", "ReasonA,ReasonB", "ReasonA:ReasonB"],
        )
    };
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let valid =
        has_valid_bytes(value, |b| b.is_ascii_alphabetic(), |b| word(b) || b == b',' || b == b':', word);
    if valid { Vec::new() } else { vec![message()] }
}

/// An IP address in fields that require the canonical form.
pub fn ip(value: &str) -> Vec<String> {
    let messages = ip_any_form(value);
    if let (true, Some(ip)) = (messages.is_empty(), parse_ip(value)) {
        let canonical = ip.to_string();
        return error_if_invalid(canonical == value, &format!("must be in canonical form ({canonical:?})"));
    }
    messages
}

/// An IP address in legacy fields, which do not require the canonical form: `FE80::0:1` is valid.
pub fn ip_any_form(value: &str) -> Vec<String> {
    match parse_ip(value) {
        None => vec!["must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned()],
        Some(_) if value.parse::<IpAddr>().is_err() => vec!["must not have leading 0s".to_owned()],
        Some(IpAddr::V6(ip)) => {
            error_if_invalid(ip.to_ipv4_mapped().is_none(), "must not be an IPv4-mapped IPv6 address")
        }
        Some(IpAddr::V4(_)) => Vec::new(),
    }
}

/// A CIDR such as `10.9.8.0/24` in canonical form.
pub fn cidr(value: &str) -> Vec<String> {
    let messages = cidr_any_form(value);
    if let (true, Some((ip, bits))) = (messages.is_empty(), parse_cidr(value)) {
        let canonical = format!("{}/{bits}", mask(ip, bits));
        return error_if_invalid(canonical == value, &format!("must be in canonical form ({canonical:?})"));
    }
    messages
}

/// A CIDR in legacy fields, which do not require the canonical form.
pub fn cidr_any_form(value: &str) -> Vec<String> {
    let Some((ip, bits)) = parse_cidr(value) else {
        return vec!["must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)".to_owned()];
    };
    let (address, length) = value.split_once('/').unwrap_or((value, ""));
    if address.parse::<IpAddr>().is_err() || (length.len() > 1 && length.starts_with('0')) {
        return vec!["must not have leading 0s in IP or prefix length".to_owned()];
    }
    if matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some()) {
        return vec!["must not have an IPv4-mapped IPv6 address".to_owned()];
    }
    error_if_invalid(mask(ip, bits) == ip, "must not have bits set beyond the prefix length")
}

/// An interface address with its prefix length, such as `192.168.1.5/24`.
pub fn interface_address(value: &str) -> Vec<String> {
    let Some((ip, bits)) = parse_cidr(value) else {
        return vec!["must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)".to_owned()];
    };
    let canonical = format!("{ip}/{bits}");
    error_if_invalid(canonical == value, &format!("must be in canonical form ({canonical:?})"))
}

/// Parses an IP address. Leading zeros are accepted, because stored objects may have them.
pub fn parse_ip(value: &str) -> Option<IpAddr> {
    if value.contains(':') {
        let mut groups: Vec<String> = value.split(':').map(trim_leading_zeros).collect();
        if let Some(last) = groups.last_mut()
            && last.contains('.')
        {
            *last = parse_ipv4(last)?.to_string();
        }
        groups.join(":").parse::<Ipv6Addr>().ok().map(IpAddr::V6)
    } else {
        parse_ipv4(value).map(IpAddr::V4)
    }
}

/// Parses a CIDR into address and prefix length.
pub fn parse_cidr(value: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = value.split_once('/')?;
    let ip = parse_ip(address)?;
    let bits: u8 =
        if non_empty_and_all(length, |b| b.is_ascii_digit()) { length.parse().ok()? } else { return None };
    (bits <= if ip.is_ipv4() { 32 } else { 128 }).then_some((ip, bits))
}

/// The address with the host bits cleared.
pub fn mask(ip: IpAddr, bits: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits.min(32))).unwrap_or(0);
            IpAddr::V4(Ipv4Addr::from_bits(ip.to_bits() & mask))
        }
        IpAddr::V6(ip) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits.min(128))).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & mask))
        }
    }
}

/// A domain with at least three labels, as in signer and webhook names.
pub fn fully_qualified_name(value: &str, path: &Path, errors: &mut ErrorList) {
    let messages = dns1123_subdomain(value);
    if value.is_empty() {
        errors.required(path, "");
    } else if !messages.is_empty() {
        errors.invalid(path, value, &messages.join(","));
    } else if value.split('.').count() < 3 {
        errors.invalid(path, value, "should be a domain with at least three segments separated by dots");
    }
}

/// A domain with at least two labels, optionally with a trailing dot.
pub fn fully_qualified_domain_name(value: &str, path: &Path, errors: &mut ErrorList) {
    if value.is_empty() {
        return errors.required(path, "");
    }
    let value = value.strip_suffix('.').unwrap_or(value);
    let messages = dns1123_subdomain(value);
    if !messages.is_empty() {
        return errors.invalid(path, value, &messages.join(","));
    }
    if value.split('.').count() < 2 {
        return errors.invalid(
            path,
            value,
            "should be a domain with at least two segments separated by dots",
        );
    }
    for label in value.split('.') {
        let messages = dns1123_label(label);
        if !messages.is_empty() {
            return errors.invalid(path, label, &messages.join(","));
        }
    }
}

/// A domain-prefixed path such as `acme.io/foo/bar`.
pub fn domain_prefixed_path(value: &str, path: &Path, errors: &mut ErrorList) {
    const PATH: &str = r"[A-Za-z0-9/\-._~%!$&'()*+,;=:]+";
    if value.is_empty() {
        return errors.required(path, "");
    }
    let Some((host, rest)) =
        value.split_once('/').filter(|(host, rest)| !host.is_empty() && !rest.is_empty())
    else {
        return errors.invalid(path, value, "must be a domain-prefixed path (such as \"acme.io/foo\")");
    };
    for reason in dns1123_subdomain(host) {
        errors.invalid(path, host, &reason);
    }
    if !non_empty_and_all(rest, |b| b.is_ascii_alphanumeric() || b"/-._~%!$&'()*+,;=:".contains(&b)) {
        errors.invalid(path, rest, &regex_message("Invalid path", PATH, &[]));
    }
}

/// A domain-prefixed key such as `acme.io/foo`.
pub fn domain_prefixed_key(value: &str, path: &Path, errors: &mut ErrorList) {
    let messages = qualified_name(value);
    if value.is_empty() {
        errors.required(path, "");
    } else if !messages.is_empty() {
        messages.iter().for_each(|reason| errors.invalid(path, value, reason));
    } else if !value.contains('/') {
        errors.invalid(path, value, "must be a domain-prefixed key (such as \"acme.io/foo\")");
    }
}

/// The message about a value that does not match a regular expression. The odd commas are upstream's.
pub fn regex_message(message: &str, regex: &str, examples: &[&str]) -> String {
    if examples.is_empty() {
        return format!("{message} (regex used for validation is '{regex}')");
    }
    let examples: Vec<String> = examples.iter().map(|example| format!("'{example}', ")).collect();
    format!("{message} (e.g. {}regex used for validation is '{regex}')", examples.join(" or "))
}

/// The message for a value longer than `max`.
pub fn too_long(value: &str, max: usize) -> Vec<String> {
    if value.len() <= max { Vec::new() } else { vec![format!("must be no more than {max} characters")] }
}

/// Compares API versions by stability, as upstream's `CompareKubeAwareVersionStrings`: `v2` > `v1` >
/// `v1beta2` > `v1alpha1` > other names, which are in reverse alphabetical order.
pub fn compare_versions(a: &str, b: &str) -> std::cmp::Ordering {
    match (version_parts(a), version_parts(b)) {
        (Some(a), Some(b)) => a.cmp(&b),
        (Some(_), None) => std::cmp::Ordering::Greater,
        (None, Some(_)) => std::cmp::Ordering::Less,
        (None, None) => b.cmp(a),
    }
}

/// `v1beta2` is (1 for beta, 1, 2).
fn version_parts(version: &str) -> Option<(u8, u64, u64)> {
    let rest = version.strip_prefix('v')?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (major, rest) = rest.split_at(digits);
    let number = |text: &str| text.parse().ok().filter(|_| !text.starts_with('0') || text == "0");
    let major = number(major)?;
    if rest.is_empty() {
        return Some((2, major, 0));
    }
    let stages = [("beta", 1), ("alpha", 0)];
    stages.into_iter().find_map(|(word, stage)| Some((stage, major, number(rest.strip_prefix(word)?)?)))
}

pub fn is_label(value: &str) -> bool {
    has_valid_bytes(value, is_lower_letter_or_digit, is_label_byte, is_lower_letter_or_digit)
}

pub fn is_subdomain(value: &str) -> bool {
    value.split('.').all(is_label)
}

fn is_key_name(value: &str) -> bool {
    let is_letter_or_digit = |b: u8| b.is_ascii_alphanumeric();
    has_valid_bytes(
        value,
        is_letter_or_digit,
        |b| is_letter_or_digit(b) || b"-_.".contains(&b),
        is_letter_or_digit,
    )
}

fn is_lower_letter_or_digit(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

fn is_label_byte(b: u8) -> bool {
    is_lower_letter_or_digit(b) || b == b'-'
}

/// Whether the value is not empty and all bytes are valid.
fn non_empty_and_all(value: &str, valid: impl Fn(u8) -> bool) -> bool {
    !value.is_empty() && value.bytes().all(valid)
}

/// Whether the first byte, the last byte and those between are valid. A single byte must be a valid
/// first byte.
fn has_valid_bytes(
    value: &str,
    first: impl Fn(u8) -> bool,
    inner: impl Fn(u8) -> bool,
    last: impl Fn(u8) -> bool,
) -> bool {
    match value.as_bytes() {
        [] => false,
        [one] => first(*one),
        [head, middle @ .., tail] => first(*head) && middle.iter().all(|&b| inner(b)) && last(*tail),
    }
}

fn error_if_invalid(valid: bool, message: &str) -> Vec<String> {
    if valid { Vec::new() } else { vec![message.to_owned()] }
}

/// Removes leading zeros of a hexadecimal group with more than four digits.
fn trim_leading_zeros(group: &str) -> String {
    if group.len() <= 4 || group.contains('.') {
        return group.to_owned();
    }
    let digits = group.trim_start_matches('0');
    if digits.is_empty() { "0".to_owned() } else { digits.to_owned() }
}

fn parse_ipv4(value: &str) -> Option<Ipv4Addr> {
    let octets: Vec<u8> = value
        .split('.')
        .map(|octet| non_empty_and_all(octet, |b| b.is_ascii_digit()).then(|| octet.parse().ok()).flatten())
        .collect::<Option<_>>()?;
    <[u8; 4]>::try_from(octets).ok().map(Ipv4Addr::from)
}

#[cfg(test)]
mod tests;

//! The URL library: absolute URLs, parsed as Go's `net/url` does.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{FunctionOp, overload_error};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{Key, LibraryValue, Map, Text, Value};

/// A parsed URL.
#[derive(Debug, PartialEq, Eq)]
pub struct Url {
    scheme: String,
    user: Option<String>,
    host: String,
    path: String,
    query: String,
    fragment: String,
}

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "url" => |_, args| match args {
            [Value::String(text)] => match parse(text) {
                Ok(url) => Ok(Value::Library(LibraryValue::Url(Arc::new(url)))),
                Err(words) => Err(EvalError::new(format!(
                    "URL parse error during conversion from string: parse {:?}: {words}",
                    &**text
                ))),
            },
            _ => overload_error(),
        },
        "isURL" => |_, args| match args {
            [Value::String(text)] => Ok(Value::Bool(parse(text).is_ok())),
            _ => overload_error(),
        },
        "getScheme" => |_, args| url_field(args, |url| url.scheme.clone()),
        "getHost" => |_, args| url_field(args, |url| url.host.clone()),
        "getHostname" => |_, args| url_field(args, |url| split_port(&url.host).0.to_owned()),
        "getPort" => |_, args| url_field(args, |url| split_port(&url.host).1.to_owned()),
        "getEscapedPath" => |_, args| url_field(args, |url| url.path.clone()),
        "getQuery" => |cx, args| match args {
            [Value::Library(LibraryValue::Url(url))] => {
                let pairs: Vec<(String, String)> = url.query.split('&').filter_map(pair).collect();
                cx.cost_tracker.add_values(pairs.len() * 3)?;
                cx.cost_tracker.add_bytes(url.query.len())?;
                let mut map: BTreeMap<String, Vec<Value<'_>>> = BTreeMap::new();
                for (name, value) in pairs {
                    map.entry(name).or_default().push(Value::text(value));
                }
                let entries = map
                    .into_iter()
                    .map(|(name, values)| (Key::String(Text::Shared(name.into())), Value::list(values)));
                Ok(Value::Map(Map::Shared(Arc::new(entries.collect()))))
            }
            _ => overload_error(),
        },
        _ => return None,
    })
}

fn url_field<'a>(args: &[Value<'a>], read: impl Fn(&Url) -> String) -> EvalResult<'a> {
    match args {
        [Value::Library(LibraryValue::Url(url))] => Ok(Value::text(read(url))),
        _ => overload_error(),
    }
}

fn pair(text: &str) -> Option<(String, String)> {
    if text.is_empty() || text.contains(';') {
        return None;
    }
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    Some((unescape(&name.replace('+', " "))?, unescape(&value.replace('+', " "))?))
}

pub(super) fn parse(text: &str) -> Result<Url, String> {
    if text.bytes().any(|byte| byte < 0x20 || byte == 0x7f) {
        return Err("net/url: invalid control character in URL".to_owned());
    }
    if text.is_empty() {
        return Err("empty url".to_owned());
    }
    let (scheme, rest) = scheme(text)?;
    if scheme.is_empty() && !rest.starts_with('/') {
        return Err("invalid URI for request".to_owned());
    }
    if !rest.starts_with('/') {
        // An opaque URL such as `mailto:someone` has no components.
        let nothing = String::new;
        return Ok(Url {
            scheme,
            user: None,
            host: nothing(),
            path: nothing(),
            query: nothing(),
            fragment: rest.to_owned(),
        });
    }
    let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = rest.strip_prefix("//").filter(|_| !scheme.is_empty() && !rest.starts_with("///"));
    let (user, host, path) = match authority {
        Some(rest) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let (user, host) = match authority.rsplit_once('@') {
                Some((user, host)) => (Some(user.to_owned()), host),
                None => (None, authority),
            };
            (user, parse_host(host)?, path)
        }
        None => (None, String::new(), rest.strip_prefix("//").filter(|_| !scheme.is_empty()).unwrap_or(rest)),
    };
    if unescape(path).is_none() {
        return Err(bad_escape(path));
    }
    Ok(Url {
        scheme,
        user,
        host,
        path: escaped_path(path),
        query: query.to_owned(),
        fragment: fragment.to_owned(),
    })
}

fn scheme(text: &str) -> Result<(String, &str), String> {
    for (index, c) in text.char_indices() {
        match c {
            'a'..='z' | 'A'..='Z' => {}
            '0'..='9' | '+' | '-' | '.' if index > 0 => {}
            ':' if index == 0 => return Err("missing protocol scheme".to_owned()),
            ':' => return Ok((text[..index].to_ascii_lowercase(), &text[index + 1..])),
            _ => break,
        }
    }
    Ok((String::new(), text))
}

fn parse_host(host: &str) -> Result<String, String> {
    let port = if let Some(inner) = host.strip_prefix('[') {
        let Some((_, after)) = inner.split_once(']') else { return Err("missing ']' in host".to_owned()) };
        after
    } else {
        host.find(':').map_or("", |at| &host[at..])
    };
    let digits = port.strip_prefix(':').unwrap_or(port);
    if (!port.is_empty() && !port.starts_with(':')) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("invalid port {port:?} after host"));
    }
    if let Some(bad) = host.chars().find(|c| " <>\"\\^`{|}".contains(*c)) {
        return Err(format!("invalid character {:?} in host name", bad.to_string()));
    }
    unescape(host).ok_or_else(|| bad_escape(host))
}

fn bad_escape(text: &str) -> String {
    let at = text.find('%').unwrap_or(0);
    let escape: String = text[at..].chars().take(3).collect();
    format!("invalid URL escape {escape:?}")
}

fn split_port(host: &str) -> (&str, &str) {
    if let Some(inner) = host.strip_prefix('[') {
        let (name, after) = inner.split_once(']').unwrap_or((inner, ""));
        return (name, after.strip_prefix(':').unwrap_or(""));
    }
    host.rsplit_once(':').unwrap_or((host, ""))
}

fn unescape(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let bytes = text.as_bytes();
    let mut index = 0;
    while index < bytes.len() {
        if bytes[index] == b'%' {
            let hex = text.get(index + 1..index + 3)?;
            out.push(
                u8::from_str_radix(hex, 16).ok().filter(|_| hex.bytes().all(|b| b.is_ascii_hexdigit()))?,
            );
            index += 3;
        } else {
            out.push(bytes[index]);
            index += 1;
        }
    }
    Some(String::from_utf8_lossy(&out).into_owned())
}

/// Escapes the invalid characters in a path. Existing escapes are kept.
fn escaped_path(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@!'()*%[]".contains(&byte) {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

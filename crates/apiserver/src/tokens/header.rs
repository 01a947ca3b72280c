//! Extracts the bearer token of a request: from the `Authorization` header or, for browsers that
//! cannot set it, from a WebSocket subprotocol.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderMap, HeaderValue, header};

const BEARER_PROTOCOL_PREFIX: &str = "base64url.bearer.authorization.k8s.io.";

/// A token was sent in an invalid encoding.
#[derive(Debug, PartialEq, Eq)]
pub struct MalformedToken;

/// Removes the token from the headers, so that no later code sees it.
pub fn take_token(headers: &mut HeaderMap) -> Result<Option<String>, MalformedToken> {
    let bearer = headers.remove(header::AUTHORIZATION).as_ref().and_then(bearer_token);
    let protocol = if is_websocket(headers) { protocol_token(headers) } else { Ok(None) };
    match bearer {
        Some(token) => Ok(Some(token)),
        None => protocol,
    }
}

/// The token of an `Authorization` header. Without one, other credentials apply.
pub fn bearer_token(value: &HeaderValue) -> Option<String> {
    // Invalid UTF-8 cannot be a valid token, but is treated as one, so that authentication fails.
    let text = String::from_utf8_lossy(value.as_bytes());
    let mut words = text.trim().split(' ');
    let is_bearer = words.next()?.eq_ignore_ascii_case("bearer");
    words.next().filter(|token| is_bearer && !token.is_empty()).map(str::to_owned)
}

fn is_websocket(headers: &HeaderMap) -> bool {
    let has = |name: header::HeaderName, word: &str| {
        let value = headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
        value.split(',').any(|part| part.trim().eq_ignore_ascii_case(word))
    };
    has(header::UPGRADE, "websocket") && has(header::CONNECTION, "upgrade")
}

/// The token among the subprotocols. Another subprotocol must be offered, which the server selects.
fn protocol_token(headers: &mut HeaderMap) -> Result<Option<String>, MalformedToken> {
    let sent: Vec<String> = headers
        .get_all(header::SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .flat_map(|value| value.to_str().unwrap_or("").split(','))
        .map(|protocol| protocol.trim().to_owned())
        .collect();
    let (tokens, others): (Vec<String>, Vec<String>) =
        sent.into_iter().partition(|protocol| protocol.starts_with(BEARER_PROTOCOL_PREFIX));
    if tokens.is_empty() {
        return Ok(None);
    }
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    if let (false, Ok(value)) = (others.is_empty(), others.join(",").parse()) {
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, value);
    }
    let [token] = tokens.as_slice() else { return Err(MalformedToken) };
    let bytes = URL_SAFE_NO_PAD.decode(&token[BEARER_PROTOCOL_PREFIX.len()..]).map_err(|_| MalformedToken)?;
    match String::from_utf8(bytes) {
        Ok(token) if token.is_empty() => Ok(None),
        Ok(token) if !others.is_empty() => Ok(Some(token)),
        _ => Err(MalformedToken),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(protocols: &[&str], token: Result<Option<&str>, MalformedToken>, left: &str) {
        let mut headers = HeaderMap::new();
        headers.insert(header::UPGRADE, HeaderValue::from_static("WebSocket"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("keep-alive, Upgrade"));
        for value in protocols {
            headers.append(header::SEC_WEBSOCKET_PROTOCOL, value.parse().unwrap());
        }
        let mut plain = headers.clone();
        plain.remove(header::UPGRADE);
        assert_eq!(take_token(&mut plain), Ok(None), "no WebSocket");
        assert_eq!(take_token(&mut headers).as_ref().map(Option::as_deref), token.as_ref().copied());
        let found = headers.get(header::SEC_WEBSOCKET_PROTOCOL).map_or("", |value| value.to_str().unwrap());
        assert_eq!(found, left);
    }

    #[test]
    fn reads_token_from_websocket_protocol() {
        let token = format!("{BEARER_PROTOCOL_PREFIX}{}", URL_SAFE_NO_PAD.encode("abc"));
        check(&[], Ok(None), "");
        check(&["v4.channel.k8s.io"], Ok(None), "v4.channel.k8s.io");
        check(&[&format!("a, {token} ,b")], Ok(Some("abc")), "a,b");
        check(&["a", &token, "b"], Ok(Some("abc")), "a,b");
        check(&[&token], Err(MalformedToken), "");
        check(&["a", &token, &token], Err(MalformedToken), "a");
        check(&["a", &format!("{BEARER_PROTOCOL_PREFIX}?")], Err(MalformedToken), "a");
        check(
            &["a", &format!("{BEARER_PROTOCOL_PREFIX}{}", URL_SAFE_NO_PAD.encode([0xff]))],
            Err(MalformedToken),
            "a",
        );
        check(&["a", BEARER_PROTOCOL_PREFIX], Ok(None), "a");
    }
}

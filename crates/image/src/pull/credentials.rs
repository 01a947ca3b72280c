//! Registry credentials.

use base64::Engine as _;

/// Credentials for a registry. `Debug` does not print them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    pub username: String,
    pub password: String,
    /// A registry token that is sent as bearer token without a token request.
    pub token: String,
    /// An OAuth2 refresh token that is exchanged for a bearer token, instead of a password.
    pub identity_token: String,
}

impl Credentials {
    /// Parses the `auth` field of a docker configuration: `user:password` in base64, with or
    /// without padding and line breaks.
    pub fn from_auth(auth: &str) -> Option<Credentials> {
        let auth: String = auth.split_whitespace().collect();
        let bytes =
            base64::engine::general_purpose::STANDARD_NO_PAD.decode(auth.trim_end_matches('=')).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let (username, password) = text.split_once(':')?;
        let password = password.trim_end_matches('\0').to_owned();
        Some(Credentials { username: username.to_owned(), password, ..Credentials::default() })
    }

    pub(super) fn basic(&self) -> Option<String> {
        let text = format!("{}:{}", self.username, self.password);
        let encoded = base64::engine::general_purpose::STANDARD.encode(text);
        (!self.username.is_empty()).then(|| format!("Basic {encoded}"))
    }
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_base64_with_and_without_padding() {
        for auth in ["bWU6c2VjcmV0cw==", "bWU6c2VjcmV0cw", "bWU6c2Vj\r\ncmV0cw==\n", " bWU6c2VjcmV0cw=\n"] {
            let known = Credentials::from_auth(auth).unwrap();
            assert_eq!((known.username.as_str(), known.password.as_str()), ("me", "secrets"), "{auth:?}");
        }
        assert!(Credentials::from_auth("bWU6c2*j").is_none() && Credentials::from_auth("bWU").is_none());
    }
}

//! Join tokens: how a new node and a server establish mutual trust. The token contains the digest of
//! the cluster's CA certificate and a bootstrap token for the node.
//!
//! The server sends its CA along with its certificate, so one handshake suffices: the node accepts the
//! CA with the pinned digest and no other. Compare `kubeadm join --discovery-token-ca-cert-hash`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use ring::digest::{SHA256, digest};
use ring::rand::SecureRandom as _;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring as provider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _};
use rustls::{CertificateError, ClientConfig, Error as TlsError, RootCertStore};

use crate::request::to_pem;
use crate::tls::signatures;
use crate::{ClientCertificate, Error};

/// The prefix of join tokens, the same as in k3s.
const TOKEN_PREFIX: &str = "K10";
const SEPARATOR: &str = "::";
const ID_LENGTH: usize = 6;
const SECRET_LENGTH: usize = 16;
/// The characters of IDs and secrets of bootstrap tokens.
const TOKEN_ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// The SHA-256 digest of a CA certificate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The digest of the first certificate in `pem`.
    pub fn from_pem(pem: &str) -> Result<Fingerprint, Error> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes());
        let der = der.map_err(|_| Error::Malformed { what: "the CA certificate".to_owned() })?;
        Ok(Fingerprint::of_der(&der))
    }

    fn of_der(der: &[u8]) -> Fingerprint {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, der).as_ref());
        Fingerprint(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Fingerprint, Error> {
        let malformed = || Error::Token;
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(malformed());
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| malformed())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| malformed())?;
        }
        Ok(Fingerprint(bytes))
    }
}

/// A bootstrap token, with which a new node authenticates.
#[derive(Clone, PartialEq, Eq)]
pub struct BootstrapToken {
    pub id: String,
    pub secret: String,
}

impl BootstrapToken {
    pub fn random() -> Result<BootstrapToken, Error> {
        let mut bytes = [0; 64];
        ring::rand::SystemRandom::new().fill(&mut bytes).map_err(|_| Error::Randomness)?;
        // 252 is the largest multiple of 36 below 256: larger bytes are discarded, so that all letters
        // are equally likely.
        let mut letters = bytes.iter().filter(|byte| **byte < 252).map(|byte| letter(*byte));
        let mut take = |count| letters.by_ref().take(count).collect::<String>();
        let token = BootstrapToken { id: take(ID_LENGTH), secret: take(SECRET_LENGTH) };
        // At least 22 of 64 random bytes are below 252, except with negligible probability.
        if token.secret.len() == SECRET_LENGTH { Ok(token) } else { Err(Error::Randomness) }
    }

    /// Parses `<id>.<secret>`. From `<user>:<password>` or a password alone, ID and secret are derived,
    /// so that server and node get the same token from the same password.
    pub fn from_text(text: &str) -> Result<BootstrapToken, Error> {
        let plain = |text: &str| text.bytes().all(|byte| TOKEN_ALPHABET.contains(&byte));
        if let Some((id, secret)) = text.split_once('.')
            && id.len() == ID_LENGTH
            && secret.len() == SECRET_LENGTH
            && plain(id)
            && plain(secret)
        {
            return Ok(BootstrapToken { id: id.to_owned(), secret: secret.to_owned() });
        }
        let word = text.split_once(':').map_or(text, |(_, word)| word);
        if word.is_empty() {
            return Err(Error::Token);
        }
        let derive = |purpose: &str, length| -> String {
            let digest = digest(&SHA256, format!("skiff {purpose} {word}").as_bytes());
            digest.as_ref().iter().take(length).map(|byte| letter(*byte)).collect()
        };
        Ok(BootstrapToken { id: derive("id", ID_LENGTH), secret: derive("secret", SECRET_LENGTH) })
    }

    /// The token as it is sent to the API server.
    pub fn bearer(&self) -> String {
        format!("{}.{}", self.id, self.secret)
    }
}

fn letter(byte: u8) -> char {
    char::from(TOKEN_ALPHABET[usize::from(byte) % TOKEN_ALPHABET.len()])
}

/// Omits the secret, so that it cannot appear in logs.
impl fmt::Debug for BootstrapToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bootstrap").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A join token: `K10<CA digest>::<id>.<secret>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinToken {
    /// `None` for a token that only authenticates the node and does not pin the CA.
    pub authority: Option<Fingerprint>,
    pub bootstrap: BootstrapToken,
}

impl JoinToken {
    /// Formats the token with its secret. The result must not be logged.
    pub fn to_secret_string(&self) -> String {
        let bearer = self.bootstrap.bearer();
        match &self.authority {
            Some(authority) => format!("{TOKEN_PREFIX}{authority}{SEPARATOR}{bearer}"),
            None => bearer,
        }
    }
}

impl FromStr for JoinToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<JoinToken, Error> {
        let text = text.trim();
        let pinned = text.strip_prefix(TOKEN_PREFIX).and_then(|rest| rest.split_once(SEPARATOR));
        let Some((authority, rest)) = pinned else {
            return Ok(JoinToken { authority: None, bootstrap: BootstrapToken::from_text(text)? });
        };
        Ok(JoinToken { authority: Some(authority.parse()?), bootstrap: BootstrapToken::from_text(rest)? })
    }
}

/// A verifier that trusts servers whose chain contains the CA with the pinned digest.
#[derive(Debug)]
pub struct PinnedAuthorityVerifier {
    authority: Fingerprint,
    found: Mutex<Option<CertificateDer<'static>>>,
}

impl PinnedAuthorityVerifier {
    pub fn new(authority: Fingerprint) -> Arc<PinnedAuthorityVerifier> {
        Arc::new(PinnedAuthorityVerifier { authority, found: Mutex::default() })
    }

    /// The CA certificate in PEM, after the first successful handshake.
    pub fn authority(&self) -> Option<String> {
        self.found.lock().as_ref().map(|der| to_pem(der))
    }

    /// A TLS client configuration with this verifier. The caller sets the ALPN protocols.
    pub fn config(
        self: &Arc<Self>,
        client_certificate: Option<Arc<ClientCertificate>>,
    ) -> Result<ClientConfig, Error> {
        let builder = ClientConfig::builder_with_provider(Arc::new(provider::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|source| Error::Tls { source })?
            .dangerous()
            .with_custom_certificate_verifier(self.clone());
        Ok(match client_certificate {
            Some(client_certificate) => builder.with_client_cert_resolver(client_certificate),
            None => builder.with_no_client_auth(),
        })
    }
}

impl ServerCertVerifier for PinnedAuthorityVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let authority = intermediates.iter().find(|other| Fingerprint::of_der(other) == self.authority);
        let authority = authority.ok_or(CertificateError::UnknownIssuer)?.clone().into_owned();
        // The pinned CA is the only root, so a certificate of any other CA is rejected even if the
        // server sends the pinned one along.
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone())?;
        let provider = Arc::new(provider::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
        let verifier = verifier.map_err(|_| CertificateError::UnknownIssuer)?;
        let verified = verifier.verify_server_cert(end_entity, intermediates, name, ocsp_response, now)?;
        *self.found.lock() = Some(authority);
        Ok(verified)
    }

    signatures!();
}

#[cfg(test)]
mod tests;

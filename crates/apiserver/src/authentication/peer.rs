//! The client end of a connection and its certificate.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use sha2::Digest as _;

use super::Authenticators;
use crate::access::User;

/// Verified once per connection; later only the expiry of the certificate is checked.
#[derive(Clone, Default)]
pub struct Peer(Option<Arc<PeerCertificate>>);

struct PeerCertificate {
    /// Whether it is signed by a client CA.
    verified: bool,
    /// The user, if verified and parseable.
    user: Option<User>,
    /// Whether it is the certificate of a front proxy.
    proxy: bool,
    until: Timestamp,
}

impl Peer {
    /// From the certificate chain of the TLS handshake, which has verified that the client has the
    /// key of the leaf.
    pub fn of(authenticators: &Authenticators, chain: Option<&[CertificateDer<'_>]>, now: Timestamp) -> Peer {
        let Some(([leaf, ..], chain)) = chain.map(|chain| (chain, chain)) else { return Peer::default() };
        let identity = pki::identity_of(leaf);
        let until = match &identity {
            Ok(identity) => identity.not_after,
            // Without an expiry that can be parsed, the verification of the chain below is the only
            // check.
            Err(_) => Timestamp::MAX,
        };
        let clients = authenticators.clients.as_ref();
        let verified = clients.is_some_and(|clients| clients.is_trusted(chain, now));
        let name = identity.as_ref().map_or("", |identity| identity.user.as_str());
        let proxy = authenticators.proxy.as_ref();
        let proxy = proxy.is_some_and(|proxy| proxy.allows(name) && proxy.authority.is_trusted(chain, now));
        let user = identity.ok().filter(|_| verified).map(|identity| user(identity, leaf));
        Peer(Some(Arc::new(PeerCertificate { verified, user, proxy, until })))
    }

    /// A peer without certificate: another component in this process.
    pub fn known(user: User) -> Peer {
        let until = Timestamp::MAX;
        Peer(Some(Arc::new(PeerCertificate { verified: true, user: Some(user), proxy: false, until })))
    }

    pub fn user(&self, now: Timestamp) -> Option<User> {
        self.valid(now)?.user.clone()
    }

    /// Whether the client sent a certificate, valid or not.
    pub fn has_certificate(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the peer may set the user in request headers.
    pub fn is_proxy(&self, now: Timestamp) -> bool {
        self.valid(now).is_some_and(|certificate| certificate.proxy)
    }

    /// Whether the client sent a certificate that is not a valid client certificate.
    pub fn is_rejected(&self, now: Timestamp) -> bool {
        self.0.is_some() && !self.valid(now).is_some_and(|certificate| certificate.verified)
    }

    fn valid(&self, now: Timestamp) -> Option<&PeerCertificate> {
        self.0.as_deref().filter(|certificate| now < certificate.until)
    }
}

fn user(identity: pki::Identity, leaf: &CertificateDer<'_>) -> User {
    let mut user = User::from_certificate(identity);
    // The fingerprint for audit events and `kubectl auth whoami`.
    let digest: String = sha2::Sha256::digest(leaf).iter().map(|byte| format!("{byte:02x}")).collect();
    user.extra
        .insert("authentication.kubernetes.io/credential-id".into(), vec![format!("X509SHA256={digest}")]);
    user
}

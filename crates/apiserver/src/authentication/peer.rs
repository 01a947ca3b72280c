//! The other end of a connection: who its certificate says it is.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use sha2::Digest as _;

use super::Authenticators;
use crate::access::User;

/// Judged once for each connection; only the time passes after that.
#[derive(Clone, Default)]
pub struct Peer(Option<Arc<PeerCertificate>>);

/// A certificate that was shown.
struct PeerCertificate {
    /// Whether an authority for clients vouches for it.
    verified: bool,
    /// Whom it names, if it is vouched for and names somebody.
    user: Option<User>,
    /// Whether it may speak for others.
    proxy: bool,
    until: Timestamp,
}

impl Peer {
    /// By the certificates of a handshake, which has proven that the client holds the first one's key.
    pub fn of(authenticators: &Authenticators, chain: Option<&[CertificateDer<'_>]>, now: Timestamp) -> Peer {
        let Some(([leaf, ..], chain)) = chain.map(|chain| (chain, chain)) else { return Peer::default() };
        let identity = pki::identity_of(leaf);
        let until = match &identity {
            Ok(identity) => identity.not_after,
            // It names nobody; the chain is judged by its own dates now, and that must do.
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

    /// Somebody known without any certificate: a role in this process.
    pub fn known(user: User) -> Peer {
        let until = Timestamp::MAX;
        Peer(Some(Arc::new(PeerCertificate { verified: true, user: Some(user), proxy: false, until })))
    }

    pub fn user(&self, now: Timestamp) -> Option<User> {
        self.valid(now)?.user.clone()
    }

    /// Whether a certificate was shown, good or not.
    pub fn has_certificate(&self) -> bool {
        self.0.is_some()
    }

    /// Whether headers may name the user.
    pub fn is_proxy(&self, now: Timestamp) -> bool {
        self.valid(now).is_some_and(|certificate| certificate.proxy)
    }

    /// Whether a certificate was shown that is no good as a client's.
    pub fn is_rejected(&self, now: Timestamp) -> bool {
        self.0.is_some() && !self.valid(now).is_some_and(|certificate| certificate.verified)
    }

    fn valid(&self, now: Timestamp) -> Option<&PeerCertificate> {
        self.0.as_deref().filter(|certificate| now < certificate.until)
    }
}

fn user(identity: pki::Identity, leaf: &CertificateDer<'_>) -> User {
    let mut user = User::from_certificate(identity);
    // Which certificate it was, for audit and `kubectl auth whoami`.
    let digest: String = sha2::Sha256::digest(leaf).iter().map(|byte| format!("{byte:02x}")).collect();
    user.extra
        .insert("authentication.kubernetes.io/credential-id".into(), vec![format!("X509SHA256={digest}")]);
    user
}

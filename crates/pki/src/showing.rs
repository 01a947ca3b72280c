//! A certificate shown to servers that are trusted each for a reason of its own.

use std::sync::Arc;

use parking_lot::RwLock;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, ClientConfig, Error as TlsError, RootCertStore, SignatureScheme};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::authority::validity;
use crate::tls::{anybody, certified, signatures};
use crate::{Error, Issued};

/// Who we are to others. Connections made after a [`Showing::replace`] show the new certificate.
#[derive(Debug)]
pub struct Showing {
    key: RwLock<Arc<CertifiedKey>>,
}

impl Showing {
    pub fn new(issued: &Issued) -> Result<Arc<Showing>, Error> {
        Ok(Arc::new(Showing { key: RwLock::new(certified(issued)?) }))
    }

    /// Keeps the old certificate where the new one is no good.
    pub fn replace(&self, issued: &Issued) -> Result<(), Error> {
        let key = certified(issued)?;
        *self.key.write() = key;
        Ok(())
    }
}

impl ResolvesClientCert for Showing {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.key.read().clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// How to connect to a server that one of `roots` vouches for; without any, to whoever answers there, which
/// is for those alone who have asked for it in so many words. HTTP/1.1 only, since HTTP/2 cannot change to
/// another protocol.
pub fn dialing_config(
    roots: Option<Vec<CertificateDer<'static>>>,
    showing: Option<Arc<Showing>>,
) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|source| Error::Tls { source })?;
    let builder = match roots {
        Some(roots) => builder.dangerous().with_custom_certificate_verifier(trusting(roots)?),
        None => builder.dangerous().with_custom_certificate_verifier(anybody()),
    };
    let mut config = match showing {
        Some(showing) => builder.with_client_cert_resolver(showing),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Trusts whoever one of `roots` vouches for, and a server that shows one of them itself: a certificate that is
/// its own authority is what many webhooks have.
pub fn trusting(roots: Vec<CertificateDer<'static>>) -> Result<Arc<dyn ServerCertVerifier>, Error> {
    let mut store = RootCertStore::empty();
    for root in &roots {
        store.add(root.clone()).map_err(|source| Error::Tls { source })?;
    }
    trusting_itself(store, roots)
}

/// The same where only some of the roots may be a server's own certificate: trusts whoever one of `store` vouches for,
/// and a server that shows one of `own`.
pub fn trusting_itself(
    store: RootCertStore,
    own: Vec<CertificateDer<'static>>,
) -> Result<Arc<dyn ServerCertVerifier>, Error> {
    let provider = Arc::new(ring::default_provider());
    let chains = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider).build();
    let chains = chains.map_err(|source| Error::ClientAuthority { source })?;
    Ok(Arc::new(Trusting { chains, roots: own }))
}

#[derive(Debug)]
struct Trusting {
    chains: Arc<WebPkiServerVerifier>,
    roots: Vec<CertificateDer<'static>>,
}

impl Trusting {
    /// Whether a root that is shown as a server's certificate is good for that name and time.
    fn itself(
        &self,
        shown: &CertificateDer<'_>,
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), TlsError> {
        if !self.roots.iter().any(|root| root == shown) {
            return Err(CertificateError::UnknownIssuer.into());
        }
        let (_, certificate) =
            X509Certificate::from_der(shown).map_err(|_| TlsError::from(CertificateError::BadEncoding))?;
        let (from, until) = validity(&certificate);
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        if now < from.as_second() {
            return Err(CertificateError::NotValidYet.into());
        }
        if now > until.as_second() {
            return Err(CertificateError::Expired.into());
        }
        verify_server_name(&ParsedCertificate::try_from(shown)?, name)
    }
}

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        match self.chains.verify_server_cert(shown, between, name, ocsp, now) {
            Err(error) => match self.itself(shown, name, now) {
                Ok(()) => Ok(ServerCertVerified::assertion()),
                Err(TlsError::InvalidCertificate(CertificateError::UnknownIssuer)) => Err(error),
                Err(other) => Err(other),
            },
            verified => verified,
        }
    }

    signatures!();
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_certificate_that_is_its_own_authority_is_trusted_where_it_is_named() {
        let made = || {
            let mut params = rcgen::CertificateParams::new(vec!["hook.default.svc".to_owned()]).unwrap();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().clone()
        };
        let (own, stranger) = (made(), made());
        let verifier = trusting(vec![own.clone()]).unwrap();
        let check = |shown: &CertificateDer<'_>, name: &str, now: Duration| {
            let name = ServerName::try_from(name.to_owned()).unwrap();
            verifier.verify_server_cert(shown, &[], &name, &[], UnixTime::since_unix_epoch(now)).is_ok()
        };
        let now = Duration::from_secs(1_800_000_000);
        assert!(check(&own, "hook.default.svc", now));
        assert!(!check(&own, "other.default.svc", now));
        assert!(!check(&own, "hook.default.svc", Duration::from_secs(100_000_000_000)));
        assert!(!check(&stranger, "hook.default.svc", now));
    }
}

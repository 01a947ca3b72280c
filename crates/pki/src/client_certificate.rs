//! TLS client configurations: a replaceable client certificate, and verifiers for servers with various
//! trust roots.

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
use crate::tls::{certified_key, insecure_verifier, signatures};
use crate::{CertKeyPair, Error};

/// A replaceable client certificate. Connections made after [`ClientCertificate::replace`] use the new
/// one.
#[derive(Debug)]
pub struct ClientCertificate {
    key: RwLock<Arc<CertifiedKey>>,
}

impl ClientCertificate {
    pub fn new(issued: &CertKeyPair) -> Result<Arc<ClientCertificate>, Error> {
        Ok(Arc::new(ClientCertificate { key: RwLock::new(certified_key(issued)?) }))
    }

    /// Replaces the certificate. If the new one is invalid, the old one stays in use.
    pub fn replace(&self, issued: &CertKeyPair) -> Result<(), Error> {
        let key = certified_key(issued)?;
        *self.key.write() = key;
        Ok(())
    }
}

impl ResolvesClientCert for ClientCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.key.read().clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// A TLS client configuration that trusts servers verified by `roots`. If `roots` is `None`, the server
/// certificate is not verified: only for `insecureSkipTLSVerify` and the like. Offers HTTP/1.1 only,
/// because a connection upgrade is not possible with HTTP/2.
pub fn client_tls_config(
    roots: Option<Vec<CertificateDer<'static>>>,
    client_certificate: Option<Arc<ClientCertificate>>,
) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|source| Error::Tls { source })?;
    let builder = match roots {
        Some(roots) => builder.dangerous().with_custom_certificate_verifier(server_verifier(roots)?),
        None => builder.dangerous().with_custom_certificate_verifier(insecure_verifier()),
    };
    let mut config = match client_certificate {
        Some(client_certificate) => builder.with_client_cert_resolver(client_certificate),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A verifier that trusts servers whose chain ends in one of `roots`, and servers that present one of
/// `roots` as their own certificate. Many webhooks use a self-signed certificate that is its own CA.
pub fn server_verifier(roots: Vec<CertificateDer<'static>>) -> Result<Arc<dyn ServerCertVerifier>, Error> {
    let mut store = RootCertStore::empty();
    for root in &roots {
        store.add(root.clone()).map_err(|source| Error::Tls { source })?;
    }
    server_verifier_with_self_signed(store, roots)
}

/// Like [`server_verifier`], with separate lists: `store` has the roots for chains, `own` the
/// self-signed server certificates that are trusted.
pub fn server_verifier_with_self_signed(
    store: RootCertStore,
    own: Vec<CertificateDer<'static>>,
) -> Result<Arc<dyn ServerCertVerifier>, Error> {
    let provider = Arc::new(ring::default_provider());
    let chain_verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider).build();
    let chain_verifier = chain_verifier.map_err(|source| Error::ClientAuthority { source })?;
    Ok(Arc::new(SelfSignedVerifier { chain_verifier, roots: own }))
}

#[derive(Debug)]
struct SelfSignedVerifier {
    chain_verifier: Arc<WebPkiServerVerifier>,
    roots: Vec<CertificateDer<'static>>,
}

impl SelfSignedVerifier {
    /// Verifies name and validity period of a server certificate that is itself a root. WebPKI rejects
    /// these, because a CA certificate may not be used as an end entity.
    fn verify_self_signed(
        &self,
        end_entity: &CertificateDer<'_>,
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), TlsError> {
        if !self.roots.iter().any(|root| root == end_entity) {
            return Err(CertificateError::UnknownIssuer.into());
        }
        let (_, certificate) = X509Certificate::from_der(end_entity)
            .map_err(|_| TlsError::from(CertificateError::BadEncoding))?;
        let (from, until) = validity(&certificate);
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        if now < from.as_second() {
            return Err(CertificateError::NotValidYet.into());
        }
        if now > until.as_second() {
            return Err(CertificateError::Expired.into());
        }
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, name)
    }
}

impl ServerCertVerifier for SelfSignedVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        match self.chain_verifier.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            Err(error) => match self.verify_self_signed(end_entity, name, now) {
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
    fn self_signed_certificate_in_roots_is_trusted() {
        let self_signed = || {
            let mut params = rcgen::CertificateParams::new(vec!["hook.default.svc".to_owned()]).unwrap();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().clone()
        };
        let (own, stranger) = (self_signed(), self_signed());
        let verifier = server_verifier(vec![own.clone()]).unwrap();
        let check = |end_entity: &CertificateDer<'_>, name: &str, now: Duration| {
            let name = ServerName::try_from(name.to_owned()).unwrap();
            verifier.verify_server_cert(end_entity, &[], &name, &[], UnixTime::since_unix_epoch(now)).is_ok()
        };
        let now = Duration::from_secs(1_800_000_000);
        assert!(check(&own, "hook.default.svc", now));
        assert!(!check(&own, "other.default.svc", now));
        assert!(!check(&own, "hook.default.svc", Duration::from_secs(100_000_000_000)));
        assert!(!check(&stranger, "hook.default.svc", now));
    }
}

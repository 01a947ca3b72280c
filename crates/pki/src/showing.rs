//! A certificate shown to servers that are trusted each for a reason of its own.

use std::sync::Arc;

use parking_lot::RwLock;
use rustls::client::ResolvesClientCert;
use rustls::crypto::ring;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, SignatureScheme};

use crate::tls::{Anybody, certified};
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
    roots: Option<RootCertStore>,
    showing: Option<Arc<Showing>>,
) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let algorithms = provider.signature_verification_algorithms;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|source| Error::Tls { source })?;
    let builder = match roots {
        Some(roots) => builder.with_root_certificates(roots),
        None => builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody { algorithms })),
    };
    let mut config = match showing {
        Some(showing) => builder.with_client_cert_resolver(showing),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

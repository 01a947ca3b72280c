//! TLS configurations: the server's certificate, which can be replaced at run time, and verification of
//! client certificates.
//!
//! The handshake only verifies that a client has the key of its certificate. Whether the certificate is
//! trusted is checked afterwards with [`ClientAuthority`], so that a client with an untrusted
//! certificate gets an HTTP response and may still authenticate with a token.

use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::RwLock;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{CipherSuite, ClientConfig, DistinguishedName, Error as TlsError, RootCertStore, ServerConfig};

use crate::{CertKeyPair, Error};

/// Implements the signature methods of a certificate verifier: the peer must have the key of its
/// certificate.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            let algorithms = crate::tls::algorithms();
            rustls::crypto::verify_tls12_signature(message, certificate, signature, &algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            let algorithms = crate::tls::algorithms();
            rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            crate::tls::algorithms().supported_schemes()
        }
    };
}
pub(crate) use signatures;

/// The supported signature algorithms of certificates and handshakes.
pub(crate) fn algorithms() -> WebPkiSupportedAlgorithms {
    ring::default_provider().signature_verification_algorithms
}

/// A replaceable server certificate. Connections made after [`ServingCertificate::replace`] use the new
/// one.
#[derive(Debug)]
pub struct ServingCertificate {
    key: RwLock<Arc<CertifiedKey>>,
}

impl ServingCertificate {
    pub fn new(cert_key_pair: &CertKeyPair) -> Result<Arc<ServingCertificate>, Error> {
        Ok(Arc::new(ServingCertificate { key: RwLock::new(certified_key(cert_key_pair)?) }))
    }

    /// The certificate that new connections use.
    pub fn certificate(&self) -> CertificateDer<'static> {
        let key = self.key.read();
        key.cert.first().cloned().expect("a certified key has a certificate")
    }

    /// Replaces the certificate. If the new one is invalid, the old one stays in use.
    pub fn replace(&self, cert_key_pair: &CertKeyPair) -> Result<(), Error> {
        let key = certified_key(cert_key_pair)?;
        *self.key.write() = key;
        Ok(())
    }
}

/// A TLS client configuration for the cluster's servers: trusted authorities and a replaceable client
/// certificate. Connections made after [`ClientTls::replace`] use the new one.
pub struct ClientTls {
    roots: Arc<RootCertStore>,
    config: RwLock<Arc<ClientConfig>>,
}

impl ClientTls {
    /// Trusts only the authorities in `pem`.
    pub fn new(pem: &str, cert_key_pair: &CertKeyPair) -> Result<Arc<ClientTls>, Error> {
        let mut roots = RootCertStore::empty();
        for root in certificates(pem, "the cluster CA")? {
            roots.add(root).map_err(|source| Error::Tls { source })?;
        }
        let roots = Arc::new(roots);
        let config = RwLock::new(client_config(&roots, cert_key_pair)?);
        Ok(Arc::new(ClientTls { roots, config }))
    }

    pub fn config(&self) -> Arc<ClientConfig> {
        self.config.read().clone()
    }

    /// Replaces the client certificate. If the new one is invalid, the old one stays in use.
    pub fn replace(&self, cert_key_pair: &CertKeyPair) -> Result<(), Error> {
        let config = client_config(&self.roots, cert_key_pair)?;
        *self.config.write() = config;
        Ok(())
    }
}

/// Offers HTTP/1.1 only, because a connection upgrade is not possible with HTTP/2.
fn client_config(
    roots: &Arc<RootCertStore>,
    cert_key_pair: &CertKeyPair,
) -> Result<Arc<ClientConfig>, Error> {
    let chain = certificates(&cert_key_pair.cert_pem, "the client's certificate")?;
    let key = PrivateKeyDer::from_pem_slice(cert_key_pair.key_pem.as_bytes())
        .map_err(|_| Error::Malformed { what: "the client's key".to_owned() })?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|source| Error::Tls { source })?
        .with_root_certificates(roots.clone())
        .with_client_auth_cert(chain, key)
        .map_err(|source| Error::Tls { source })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// For servers whose certificate cannot be verified, such as those in pods, which are addressed by IP.
pub fn unverified() -> Result<Arc<ClientConfig>, Error> {
    crate::client_tls_config(None, None)
}

/// A verifier that accepts any server certificate, for users who configured that.
pub fn insecure_verifier() -> Arc<dyn ServerCertVerifier> {
    Arc::new(InsecureVerifier)
}

/// Verifies only that the server has the key of its certificate.
#[derive(Debug)]
struct InsecureVerifier;

impl ServerCertVerifier for InsecureVerifier {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.key.read().clone())
    }
}

/// The certificate authorities for client certificates.
#[derive(Clone, Debug)]
pub struct ClientAuthority {
    verifier: Arc<dyn ClientCertVerifier>,
}

impl ClientAuthority {
    /// `pem` contains one or more certificates. `what` names their source in errors.
    pub fn new(pem: &str, what: &str) -> Result<ClientAuthority, Error> {
        let mut roots = RootCertStore::empty();
        for root in certificates(pem, what)? {
            roots.add(root).map_err(|source| Error::Tls { source })?;
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|source| Error::ClientAuthority { source })?;
        Ok(ClientAuthority { verifier })
    }

    /// Whether the first certificate of the chain is valid for a client at `now`. The handshake has
    /// already verified that the client has its key.
    pub fn is_trusted(&self, chain: &[CertificateDer<'_>], now: Timestamp) -> bool {
        let Some((leaf, intermediates)) = chain.split_first() else { return false };
        let seconds = u64::try_from(now.as_second()).unwrap_or(0);
        let now = UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        self.verifier.verify_client_cert(leaf, intermediates, now).is_ok()
    }
}

/// A server configuration with TLS 1.2 and 1.3 that prefers HTTP/2 over HTTP/1.1. Client certificates
/// are optional; the subjects of `authorities` are sent to clients as hints.
///
/// The server chooses the cipher suite, as upstream's does, and prefers the cheapest secure one.
/// Encryption is most of the cost of a large list response.
pub fn server_config(
    serving: Arc<ServingCertificate>,
    authorities: &[ClientAuthority],
) -> Result<ServerConfig, Error> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| cost(suite.suite(), has_aes()));
    let provider = Arc::new(provider);
    let hints = authorities.iter().flat_map(|authority| authority.verifier.root_hint_subjects());
    let clients = PossessionVerifier { hints: hints.cloned().collect() };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|source| Error::Tls { source })?
        .with_client_cert_verifier(Arc::new(clients))
        .with_cert_resolver(serving);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.ignore_client_order = true;
    Ok(config)
}

/// Ranks cipher suites by cost. AES is cheaper than ChaCha20 only with hardware support.
fn cost(cipher: CipherSuite, has_aes: bool) -> u8 {
    let name = cipher.as_str().unwrap_or_default();
    match name.contains("CHACHA20") {
        true if !has_aes => 0,
        true => 3,
        false if name.contains("AES_128") => 1,
        false => 2,
    }
}

fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// Verifies only that clients have the key of their certificate.
#[derive(Debug)]
struct PossessionVerifier {
    hints: Vec<DistinguishedName>,
}

impl ClientCertVerifier for PossessionVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        Ok(ClientCertVerified::assertion())
    }

    signatures!();
}

/// Parses a certificate and its key for rustls and checks that they match.
pub fn certified_key(cert_key_pair: &CertKeyPair) -> Result<Arc<CertifiedKey>, Error> {
    let key = PrivateKeyDer::from_pem_slice(cert_key_pair.key_pem.as_bytes())
        .map_err(|_| Error::Malformed { what: "the server's private key".to_owned() })?;
    let chain = certificates(&cert_key_pair.cert_pem, "the server's certificate")?;
    let tls = |source| Error::Tls { source };
    let key = ring::sign::any_supported_type(&key).map_err(tls)?;
    let certified = CertifiedKey::new(chain, key);
    certified.keys_match().map_err(tls)?;
    Ok(Arc::new(certified))
}

fn certificates(pem: &str, what: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let malformed = || Error::Malformed { what: what.to_owned() };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err(malformed()),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;
    use std::time::Duration;

    use rustls::pki_types::ServerName;
    use rustls::sign::SingleCertAndKey;
    use rustls::{ClientConfig, ClientConnection, ServerConnection};

    use super::*;
    use crate::{Authority, CertKeyPair, Leaf, Usage, identity_of};

    /// The handshake uses the system clock, so these certificates start now.
    fn authority(dir: &Path, name: &str) -> Authority {
        Authority::load_or_create(dir, name, Timestamp::now()).unwrap()
    }

    fn issue(authority: &Authority, common_name: &str, usage: Usage) -> CertKeyPair {
        let leaf = Leaf {
            common_name: common_name.to_owned(),
            organizations: vec![],
            dns_names: vec!["localhost".to_owned()],
            ips: vec!["127.0.0.1".parse().unwrap()],
            usage,
            lifetime: Duration::from_secs(3600),
        };
        authority.issue(&leaf, Timestamp::now()).unwrap()
    }

    /// Performs a handshake in memory. Returns the client's certificates or the first error.
    fn handshake(
        server: ServerConfig,
        trusted: &str,
        client: Option<(&CertKeyPair, &CertKeyPair)>,
    ) -> Result<Vec<CertificateDer<'static>>, String> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(trusted.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match client {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                // Not `with_client_auth_cert`, which rejects a key that does not match the certificate.
                let key = PrivateKeyDer::from_pem_slice(key.key_pem.as_bytes()).unwrap();
                let key = ring::sign::any_supported_type(&key).unwrap();
                let presented_key = CertifiedKey::new(certificates(&certificate.cert_pem, "").unwrap(), key);
                builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(presented_key)))
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec(), b"h2".to_vec()];
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut server = ServerConnection::new(Arc::new(server)).unwrap();
        for _ in 0..4 {
            transfer(|to| client.write_tls(to), |from| server.read_tls(from));
            server.process_new_packets().map_err(|error| error.to_string())?;
            transfer(|to| server.write_tls(to), |from| client.read_tls(from));
            client.process_new_packets().map_err(|error| error.to_string())?;
        }
        assert!(!server.is_handshaking() && !client.is_handshaking());
        assert_eq!(server.alpn_protocol(), Some(&b"h2"[..]));
        // The client prefers 256-bit keys.
        let cipher = server.negotiated_cipher_suite().expect("the handshake is complete").suite();
        let expected = if has_aes() {
            CipherSuite::TLS13_AES_128_GCM_SHA256
        } else {
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256
        };
        assert_eq!(cipher, expected);
        Ok(server.peer_certificates().unwrap_or_default().iter().cloned().map(|it| it.into_owned()).collect())
    }

    fn transfer(
        write: impl FnOnce(&mut dyn io::Write) -> io::Result<usize>,
        read: impl FnOnce(&mut dyn io::Read) -> io::Result<usize>,
    ) {
        let mut bytes = Vec::new();
        write(&mut bytes).unwrap();
        read(&mut bytes.as_slice()).unwrap();
    }

    #[test]
    fn client_certificate_is_optional_but_must_be_valid() {
        let dir = tempfile::tempdir().unwrap();
        let (server_ca, client_ca) = (authority(dir.path(), "server-ca"), authority(dir.path(), "client-ca"));
        let serving = ServingCertificate::new(&issue(&server_ca, "skiff", Usage::Server)).unwrap();
        let clients = ClientAuthority::new(client_ca.pem(), "").unwrap();
        let config = || server_config(serving.clone(), std::slice::from_ref(&clients)).unwrap();
        let authenticated_user = |client: &CertKeyPair, then: Timestamp| {
            let chain = handshake(config(), server_ca.pem(), Some((client, client))).unwrap();
            clients.is_trusted(&chain, then).then(|| identity_of(&chain[0]).unwrap().user)
        };
        let now = Timestamp::now();

        assert_eq!(handshake(config(), server_ca.pem(), None), Ok(Vec::new()));
        assert!(!clients.is_trusted(&[], now));
        let client = issue(&client_ca, "system:admin", Usage::Client);
        assert_eq!(authenticated_user(&client, now).as_deref(), Some("system:admin"));
        assert_eq!(authenticated_user(&client, now + jiff::SignedDuration::from_hours(2)), None, "expired");
        let wrong_authority = issue(&server_ca, "system:admin", Usage::Client);
        assert_eq!(authenticated_user(&wrong_authority, now), None, "signed by the server CA");
        let wrong_usage = issue(&client_ca, "system:admin", Usage::Server);
        assert_eq!(authenticated_user(&wrong_usage, now), None, "a server's certificate");
        let wrong_key = handshake(config(), server_ca.pem(), Some((&client, &wrong_authority)));
        assert!(wrong_key.is_err(), "a certificate without its key");
        assert!(handshake(config(), client_ca.pem(), None).is_err(), "a server certificate of the wrong CA");
    }

    #[test]
    fn replaced_certificate_is_used_for_new_connections() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (authority(dir.path(), "old"), authority(dir.path(), "new"));
        let serving = ServingCertificate::new(&issue(&old, "skiff", Usage::Server)).unwrap();
        let config = server_config(serving.clone(), &[]).unwrap();
        let is_trusted_by = |ca: &Authority| handshake(config.clone(), ca.pem(), None).is_ok();
        assert_eq!((is_trusted_by(&old), is_trusted_by(&new)), (true, false));
        assert!(serving.replace(&CertKeyPair { cert_pem: String::new(), key_pem: String::new() }).is_err());
        assert_eq!((is_trusted_by(&old), is_trusted_by(&new)), (true, false));
        serving.replace(&issue(&new, "skiff", Usage::Server)).unwrap();
        assert_eq!((is_trusted_by(&old), is_trusted_by(&new)), (false, true));
    }

    #[test]
    fn malformed_certificates_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let ca = authority(dir.path(), "ca");
        let server = issue(&ca, "skiff", Usage::Server);
        let other = issue(&ca, "skiff", Usage::Server);
        let error = |cert: &str, key: &str| {
            let cert_key_pair = CertKeyPair { cert_pem: cert.to_owned(), key_pem: key.to_owned() };
            ServingCertificate::new(&cert_key_pair).unwrap_err().to_string()
        };
        let (cert, key) = (server.cert_pem.as_str(), server.key_pem.as_str());
        assert_eq!(error("", key), "cannot parse the server's certificate: invalid certificate or key");
        assert_eq!(error(cert, "x"), "cannot parse the server's private key: invalid certificate or key");
        assert_eq!(error(cert, &other.key_pem), "cannot set up TLS");
        let error = ClientAuthority::new("", "/etc/clients.pem").unwrap_err();
        assert_eq!(error.to_string(), "cannot parse /etc/clients.pem: invalid certificate or key");
    }
}

//! How the server speaks TLS.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, crypto::ring};

use crate::Error;

/// TLS 1.2 and 1.3, HTTP/2 before HTTP/1.1. A client may stay anonymous (it may have a token), but a
/// certificate it does show must come from `client_ca_pem`.
pub fn server_config(cert_pem: &str, key_pem: &str, client_ca_pem: &str) -> Result<ServerConfig, Error> {
    let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
        .map_err(|_| Error::Malformed { what: "the server's private key".to_owned() })?;
    let chain = certificates(cert_pem, "the server's certificate")?;
    let mut roots = RootCertStore::empty();
    for root in certificates(client_ca_pem, "the client authority")? {
        roots.add(root).map_err(|source| Error::Tls { source })?;
    }
    let provider = Arc::new(ring::default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|source| Error::ClientAuthority { source })?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_client_cert_verifier(clients).with_single_cert(chain, key))
        .map_err(|source| Error::Tls { source })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
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

    use jiff::Timestamp;
    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, ServerConnection};

    use super::*;
    use crate::{Authority, Issued, Leaf, Usage, identity_of};

    /// The handshake reads the machine's clock, so these certificates start now.
    fn authority(dir: &Path, name: &str) -> Authority {
        Authority::load_or_create(dir, name, Timestamp::now()).unwrap()
    }

    fn issue(authority: &Authority, common_name: &str, usage: Usage) -> Issued {
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

    /// Shakes hands in memory; the client's name as the server sees it, or the first error.
    fn handshake(server: ServerConfig, trusted: &str, client: Option<&Issued>) -> Result<String, String> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(trusted.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match client {
            None => builder.with_no_client_auth(),
            Some(issued) => builder
                .with_client_auth_cert(
                    certificates(&issued.cert_pem, "").unwrap(),
                    PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap(),
                )
                .unwrap(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec(), b"h2".to_vec()];
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut server = ServerConnection::new(Arc::new(server)).unwrap();
        for _ in 0..4 {
            pass(|to| client.write_tls(to), |from| server.read_tls(from));
            server.process_new_packets().map_err(|error| error.to_string())?;
            pass(|to| server.write_tls(to), |from| client.read_tls(from));
            client.process_new_packets().map_err(|error| error.to_string())?;
        }
        assert!(!server.is_handshaking() && !client.is_handshaking());
        assert_eq!(server.alpn_protocol(), Some(&b"h2"[..]));
        Ok(match server.peer_certificates() {
            Some([first, ..]) => identity_of(first).unwrap().user,
            _ => "anonymous".to_owned(),
        })
    }

    fn pass(
        write: impl FnOnce(&mut dyn io::Write) -> io::Result<usize>,
        read: impl FnOnce(&mut dyn io::Read) -> io::Result<usize>,
    ) {
        let mut bytes = Vec::new();
        write(&mut bytes).unwrap();
        read(&mut bytes.as_slice()).unwrap();
    }

    #[test]
    fn clients_may_stay_anonymous_but_not_lie() {
        let dir = tempfile::tempdir().unwrap();
        let (server_ca, client_ca) = (authority(dir.path(), "server-ca"), authority(dir.path(), "client-ca"));
        let server = issue(&server_ca, "skiff", Usage::Server);
        let config = || server_config(&server.cert_pem, &server.key_pem, client_ca.pem()).unwrap();
        let check = |client: Option<&Issued>| handshake(config(), server_ca.pem(), client);

        assert_eq!(check(None), Ok("anonymous".to_owned()));
        let client = issue(&client_ca, "system:admin", Usage::Client);
        assert_eq!(check(Some(&client)), Ok("system:admin".to_owned()));
        let forged = issue(&server_ca, "system:admin", Usage::Client);
        assert!(check(Some(&forged)).is_err(), "signed by the authority for servers");
        let misused = issue(&client_ca, "system:admin", Usage::Server);
        assert!(check(Some(&misused)).is_err(), "a server's certificate");
        assert!(handshake(config(), client_ca.pem(), None).is_err(), "a server from the wrong authority");
    }

    #[test]
    fn nonsense_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let ca = authority(dir.path(), "ca");
        let server = issue(&ca, "skiff", Usage::Server);
        let other = issue(&ca, "skiff", Usage::Server);
        let error = |cert: &str, key: &str, ca: &str| server_config(cert, key, ca).unwrap_err().to_string();
        let (cert, key) = (server.cert_pem.as_str(), server.key_pem.as_str());
        assert_eq!(error("", key, ca.pem()), "the server's certificate is not a certificate or key");
        assert_eq!(error(cert, "x", ca.pem()), "the server's private key is not a certificate or key");
        assert_eq!(error(cert, key, ""), "the client authority is not a certificate or key");
        assert_eq!(error(cert, &other.key_pem, ca.pem()), "cannot set up TLS");
    }
}

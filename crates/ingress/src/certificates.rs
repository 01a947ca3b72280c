//! The TLS certificates by server name. New connections use the current ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use parking_lot::{Mutex, RwLock};
use pki::{CertKeyPair, Leaf, Usage};
use reconcile::Object as _;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

const DEFAULT_CERTIFICATE_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Selects a certificate by SNI.
#[derive(Debug)]
pub struct Certificates {
    by_name: RwLock<HashMap<String, Arc<CertifiedKey>>>,
    /// The self-signed default certificate, for names without another one.
    default_certificate: Arc<CertifiedKey>,
    /// The parsed Secrets by UID.
    parsed_secrets: Mutex<HashMap<String, ParsedSecret>>,
}

/// The resource version of a Secret, and its certificate if it is valid.
type ParsedSecret = (String, Option<Arc<CertifiedKey>>);

impl Certificates {
    pub fn new(now: Timestamp) -> Result<Arc<Certificates>, pki::Error> {
        let leaf = Leaf {
            common_name: "skiff default ingress certificate".to_owned(),
            organizations: Vec::new(),
            dns_names: vec!["ingress.local".to_owned()],
            ips: Vec::new(),
            usage: Usage::Server,
            lifetime: DEFAULT_CERTIFICATE_LIFETIME,
        };
        let default_certificate = pki::certified_key(&pki::self_signed(&leaf, now)?)?;
        Ok(Arc::new(Certificates {
            by_name: RwLock::default(),
            default_certificate,
            parsed_secrets: Mutex::default(),
        }))
    }

    /// The TLS configuration of the server: no client certificates, HTTP/2 preferred over HTTP/1.1.
    pub fn tls(self: &Arc<Self>) -> Result<ServerConfig, rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }

    /// Replaces all certificates. The first one for a name wins. Unchanged Secrets are not parsed
    /// again.
    pub fn replace(&self, named: &[(String, Arc<Secret>)]) {
        let mut parsed_secrets = self.parsed_secrets.lock();
        let mut by_name = HashMap::new();
        let previous = std::mem::take(&mut *parsed_secrets);
        for (name, secret) in named {
            let version = secret.metadata.resource_version.clone().unwrap_or_default();
            let known = parsed_secrets.get(secret.uid()).or_else(|| previous.get(secret.uid()));
            let key = match known {
                Some((known_version, key)) if *known_version == version => key.clone(),
                _ => parse_secret(secret),
            };
            parsed_secrets.insert(secret.uid().to_owned(), (version, key.clone()));
            if let Some(key) = key {
                by_name.entry(name.clone()).or_insert(key);
            }
        }
        *self.by_name.write() = by_name;
    }

    fn find(&self, name: &str) -> Arc<CertifiedKey> {
        let name = name.to_ascii_lowercase();
        let by_name = self.by_name.read();
        let wildcard = || by_name.get(&format!("*.{}", name.split_once('.')?.1));
        // The empty name is the host of a rule without one.
        let found = by_name.get(&name).or_else(wildcard).or_else(|| by_name.get(""));
        found.unwrap_or(&self.default_certificate).clone()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.find(hello.server_name().unwrap_or_default()))
    }
}

/// Parses a `kubernetes.io/tls` Secret. An invalid one is logged without its content.
fn parse_secret(secret: &Secret) -> Option<Arc<CertifiedKey>> {
    let text = |name: &str| {
        let bytes = secret.data.as_ref().and_then(|data| data.get(name));
        bytes.map(|bytes| String::from_utf8_lossy(&bytes.0).into_owned()).unwrap_or_default()
    };
    let key_pair = CertKeyPair { cert_pem: text("tls.crt"), key_pem: text("tls.key") };
    let parsed = pki::certified_key(&key_pair);
    parsed
        .inspect_err(|error| tracing::warn!(%error, secret = %secret.key(), "invalid TLS secret, ignored"))
        .ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    fn secret(uid: &str, version: &str, key_pair: &CertKeyPair) -> Arc<Secret> {
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        let data = [
            ("tls.crt".to_owned(), bytes(&key_pair.cert_pem)),
            ("tls.key".to_owned(), bytes(&key_pair.key_pem)),
        ];
        Arc::new(Secret {
            metadata: ObjectMeta {
                name: Some(uid.to_owned()),
                uid: Some(uid.to_owned()),
                resource_version: Some(version.to_owned()),
                ..ObjectMeta::default()
            },
            data: Some(data.into()),
            ..Secret::default()
        })
    }

    fn self_signed_certificate(name: &str) -> CertKeyPair {
        let leaf = Leaf {
            common_name: name.to_owned(),
            organizations: Vec::new(),
            dns_names: vec![name.to_owned()],
            ips: Vec::new(),
            usage: Usage::Server,
            lifetime: DEFAULT_CERTIFICATE_LIFETIME,
        };
        pki::self_signed(&leaf, Timestamp::now()).unwrap()
    }

    #[test]
    fn exact_name_wins_and_changed_secrets_are_parsed_again() {
        let all = Certificates::new(Timestamp::now()).unwrap();
        let (a, wild) = (
            secret("a", "1", &self_signed_certificate("a.io")),
            secret("w", "1", &self_signed_certificate("w.io")),
        );
        let named = |name: &str, secret: &Arc<Secret>| (name.to_owned(), secret.clone());
        all.replace(&[named("a.io", &a), named("a.io", &wild), named("*.io", &wild)]);
        let (of_a, of_wild) = (all.find("A.io"), all.find("b.io"));
        assert!(!Arc::ptr_eq(&of_a, &of_wild));
        assert!(Arc::ptr_eq(&all.find("x.b.io"), &all.default_certificate));
        assert!(Arc::ptr_eq(&all.find(""), &all.default_certificate));
        // Unchanged Secrets are not parsed again, changed ones are.
        let newer = secret("w", "2", &self_signed_certificate("w.io"));
        all.replace(&[named("a.io", &a), named("*.io", &newer)]);
        assert!(Arc::ptr_eq(&of_a, &all.find("a.io")));
        assert!(!Arc::ptr_eq(&of_wild, &all.find("b.io")));
        // An invalid Secret is treated as missing.
        let broken = secret("a", "3", &CertKeyPair { cert_pem: String::new(), key_pem: String::new() });
        all.replace(&[named("a.io", &broken)]);
        assert!(Arc::ptr_eq(&all.find("a.io"), &all.default_certificate));
    }
}

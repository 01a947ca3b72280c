//! Certificate signing requests for certificates that another authority signs (the kubelet's, for
//! example), and the files that hold the signed result.

use std::path::Path;

use jiff::Timestamp;
use rcgen::KeyPair;

use crate::leaf::{CertKeyPair, Leaf, is_valid, matches};
use crate::{Error, file};

/// A certificate signing request and its private key, both PEM-encoded.
pub struct CsrKeyPair {
    pub request: String,
    pub key_pem: String,
}

/// Creates a key and a certificate signing request for it.
pub fn create_csr(leaf: &Leaf) -> Result<CsrKeyPair, Error> {
    let sign = |source| Error::Sign { common_name: leaf.common_name.clone(), source };
    let mut params = crate::leaf::params(leaf)?;
    // A CertificateSigningRequest object lists the usages in `spec.usages`, so the PKCS #10 request has
    // none.
    params.key_usages.clear();
    params.extended_key_usages.clear();
    let key = KeyPair::generate().map_err(|source| Error::Key { source })?;
    let request = params.serialize_request(&key).and_then(|request| request.pem()).map_err(sign)?;
    Ok(CsrKeyPair { request, key_pem: key.serialize_pem() })
}

/// Writes a certificate and its key to `<base_name>.crt` and `<base_name>.key`.
pub fn store_certificate(dir: &Path, base_name: &str, cert_key_pair: &CertKeyPair) -> Result<(), Error> {
    file::private_dir(dir)?;
    file::write_file(&dir.join(format!("{base_name}.key")), cert_key_pair.key_pem.as_bytes(), 0o600)?;
    file::write_file(&dir.join(format!("{base_name}.crt")), cert_key_pair.cert_pem.as_bytes(), 0o600)
}

/// Reads the stored certificate. Returns `None` if it is missing, not valid at `now` or does not match
/// `leaf`. It may be due for renewal: see [`CertKeyPair::renewal_time`].
pub fn load_certificate(
    dir: &Path,
    base_name: &str,
    leaf: &Leaf,
    now: Timestamp,
) -> Result<Option<CertKeyPair>, Error> {
    let read = |end: &str| file::read(&dir.join(format!("{base_name}.{end}")));
    let (Some(cert_pem), Some(key_pem)) = (read("crt")?, read("key")?) else { return Ok(None) };
    let stored = CertKeyPair { cert_pem, key_pem };
    Ok((matches(&stored, leaf) && is_valid(&stored, now)).then_some(stored))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Authority, Request, Usage};

    #[test]
    fn signed_csr_is_stored_and_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let now: Timestamp = "2026-11-15T12:00:00Z".parse().unwrap();
        let ca = Authority::load_or_create(dir.path(), "ca", now).unwrap();
        let leaf = Leaf {
            common_name: "system:node:a".to_owned(),
            organizations: vec!["system:nodes".to_owned()],
            dns_names: vec!["a".to_owned()],
            ips: vec!["192.0.2.1".parse().unwrap()],
            usage: Usage::Server,
            lifetime: Duration::from_secs(3600),
        };
        let csr = create_csr(&leaf).unwrap();
        let request = Request::parse(csr.request.as_bytes()).unwrap();
        assert_eq!((request.common_name.as_str(), request.ips.len()), ("system:node:a", 1));
        let usages = ["server auth".to_owned(), "digital signature".to_owned()];
        let cert_pem = ca.sign_request(&request, &usages, leaf.lifetime, now).unwrap();
        let cert_key_pair = CertKeyPair { cert_pem, key_pem: csr.key_pem };
        store_certificate(dir.path(), "kubelet", &cert_key_pair).unwrap();
        let found = |leaf: &Leaf, now| load_certificate(dir.path(), "kubelet", leaf, now).unwrap().is_some();
        assert!(found(&leaf, now));
        assert!(!found(&leaf, now + Duration::from_secs(3601)), "expired");
        assert!(!found(&Leaf { dns_names: vec!["b".to_owned()], ..leaf.clone() }, now), "different DNS name");
        std::fs::remove_file(dir.path().join("kubelet.key")).unwrap();
        assert!(!found(&leaf, now));
    }
}

//! A certificate authority: a self-signed certificate and its key, stored as `<name>.crt` and
//! `<name>.key`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::{Error, file};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Ten years, as kubeadm's CAs. An authority is never replaced automatically, because everything in the
/// cluster trusts it.
const LIFETIME: Duration = Duration::from_secs(3650 * DAY.as_secs());
/// `notBefore` lies in the past by this much, so that machines whose clocks are behind accept the
/// certificate.
const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

/// A certificate authority with its private key.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
    not_after: Timestamp,
}

impl Authority {
    /// Reads `<name>.crt` and `<name>.key` from `dir` and creates what is missing.
    ///
    /// If only the key exists (an interrupted first start), a certificate is created for it. A
    /// certificate without its key is an error: a new key would invalidate all certificates signed so
    /// far.
    pub fn load_or_create(dir: &Path, name: &str, now: Timestamp) -> Result<Authority, Error> {
        file::private_dir(dir)?;
        let cert_path = dir.join(format!("{name}.crt"));
        let key_path = dir.join(format!("{name}.key"));
        let (cert, key) = (file::read(&cert_path)?, file::read(&key_path)?);
        let key = match key {
            Some(pem) => parse_key(&pem, &key_path)?,
            None if cert.is_some() => return Err(Error::KeyMissing { cert: cert_path }),
            None => {
                let key = KeyPair::generate().map_err(|source| Error::Key { source })?;
                file::write_file(&key_path, key.serialize_pem().as_bytes(), 0o600)?;
                key
            }
        };
        let pem = match cert {
            Some(pem) => pem,
            None => {
                let pem = self_sign(name, &key, now)?;
                file::write_file(&cert_path, pem.as_bytes(), 0o600)?;
                pem
            }
        };
        Authority::from_parts(pem, key, cert_path, now)
    }

    /// Reads an existing authority. Missing files are an error.
    pub fn load(certificate: &Path, key: &Path, now: Timestamp) -> Result<Authority, Error> {
        let parsed = parse_key(&file::read_present(key)?, key)?;
        Authority::from_parts(file::read_present(certificate)?, parsed, certificate.to_owned(), now)
    }

    /// The PEM-encoded certificate, to distribute as a trust root.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    pub(crate) fn der(&self) -> &[u8] {
        &self.der
    }

    pub(crate) fn key(&self) -> &KeyPair {
        self.issuer.key()
    }

    /// Whether the certificate's signature was made with this authority's key.
    pub(crate) fn signed(&self, certificate: &X509Certificate<'_>) -> bool {
        X509Certificate::from_der(&self.der)
            .is_ok_and(|(_, own)| certificate.verify_signature(Some(own.public_key())).is_ok())
    }

    /// Signs a certificate that is valid from now for `lifetime`, but never longer than the authority
    /// itself.
    pub(crate) fn sign(
        &self,
        mut params: CertificateParams,
        key: &KeyPair,
        lifetime: Duration,
        now: Timestamp,
    ) -> Result<String, rcgen::Error> {
        set_validity(&mut params, now, later(now, lifetime).min(self.not_after));
        params.use_authority_key_identifier_extension = true;
        params.signed_by(key, &self.issuer).map(|cert| cert.pem())
    }

    fn from_parts(pem: String, key: KeyPair, path: PathBuf, now: Timestamp) -> Result<Authority, Error> {
        let malformed = || Error::Malformed { what: path.display().to_string() };
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| malformed())?;
        let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| malformed())?;
        if parsed.public_key().subject_public_key.data != rcgen::PublicKeyData::der_bytes(&key) {
            return Err(Error::KeyMismatch { cert: path });
        }
        let (not_before, not_after) = validity(&parsed);
        if now < not_before || not_after <= now {
            return Err(Error::Expired { cert: path, not_before, not_after });
        }
        let issuer = Issuer::from_ca_cert_der(&der, key).map_err(|_| malformed())?;
        Ok(Authority { issuer, pem, der, not_after })
    }
}

/// The `notBefore` and `notAfter` times of a certificate.
pub(crate) fn validity(certificate: &X509Certificate<'_>) -> (Timestamp, Timestamp) {
    let validity = certificate.validity();
    let at = |seconds, otherwise| Timestamp::from_second(seconds).unwrap_or(otherwise);
    (
        at(validity.not_before.timestamp(), Timestamp::MAX),
        // RFC 5280's "no well-defined expiration" (99991231235959Z) is beyond the maximum of a UTC
        // Timestamp.
        at(validity.not_after.timestamp(), Timestamp::MAX),
    )
}

pub(crate) fn parse_key(pem: &str, path: &Path) -> Result<KeyPair, Error> {
    KeyPair::from_pem(pem).map_err(|_| Error::Malformed { what: path.display().to_string() })
}

fn self_sign(name: &str, key: &KeyPair, now: Timestamp) -> Result<String, Error> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
    set_validity(&mut params, now, later(now, LIFETIME));
    params
        .self_signed(key)
        .map(|cert| cert.pem())
        .map_err(|source| Error::Sign { common_name: name.to_owned(), source })
}

pub(crate) fn set_validity(params: &mut CertificateParams, now: Timestamp, until: Timestamp) {
    let seconds = |at: Timestamp| Duration::from_secs(u64::try_from(at.as_second()).unwrap_or(0));
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + seconds(now).saturating_sub(CLOCK_SKEW);
    params.not_after = epoch + seconds(until);
}

fn later(now: Timestamp, by: Duration) -> Timestamp {
    now.checked_add(by).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn now() -> Timestamp {
        "2026-11-15T12:00:00Z".parse().unwrap()
    }

    fn error(dir: &Path, now: Timestamp) -> String {
        match Authority::load_or_create(dir, "server-ca", now) {
            Ok(_) => panic!("expected an error"),
            Err(error) => error.to_string().replace(&dir.display().to_string(), "DIR"),
        }
    }

    #[test]
    fn is_created_once_with_private_permissions() {
        let dir = tempfile::tempdir().unwrap();
        let tls = dir.path().join("tls");
        let created = Authority::load_or_create(&tls, "server-ca", now()).unwrap();
        let loaded = Authority::load_or_create(&tls, "server-ca", now()).unwrap();
        assert_eq!(created.pem(), loaded.pem());
        let other = Authority::load_or_create(&tls, "client-ca", now()).unwrap();
        assert_ne!(created.pem(), other.pem());
        for name in ["", "server-ca.crt", "server-ca.key", "client-ca.key"] {
            let mode = fs::metadata(tls.join(name)).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, if name.is_empty() { 0o700 } else { 0o600 }, "{name:?}");
        }
    }

    #[test]
    fn key_without_certificate_is_completed() {
        let dir = tempfile::tempdir().unwrap();
        Authority::load_or_create(dir.path(), "server-ca", now()).unwrap();
        let key = fs::read(dir.path().join("server-ca.key")).unwrap();
        fs::remove_file(dir.path().join("server-ca.crt")).unwrap();
        Authority::load_or_create(dir.path(), "server-ca", now()).unwrap();
        assert_eq!(key, fs::read(dir.path().join("server-ca.key")).unwrap());
    }

    #[test]
    fn existing_certificate_is_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        Authority::load_or_create(dir, "server-ca", now()).unwrap();
        Authority::load_or_create(dir, "other", now()).unwrap();
        let later = now().checked_add(LIFETIME).unwrap();
        expect_test::expect![[
            "the certificate authority DIR/server-ca.crt is valid only from 2026-11-15T11:55:00Z to \
             2036-11-12T12:00:00Z"
        ]]
        .assert_eq(&error(dir, later));
        assert!(error(dir, Timestamp::UNIX_EPOCH).contains("is valid only from"));

        fs::copy(dir.join("other.key"), dir.join("server-ca.key")).unwrap();
        assert_eq!(error(dir, now()), "DIR/server-ca.crt does not match its private key");
        fs::write(dir.join("server-ca.key"), "nonsense").unwrap();
        assert_eq!(error(dir, now()), "cannot parse DIR/server-ca.key: invalid certificate or key");
        fs::remove_file(dir.join("server-ca.key")).unwrap();
        assert_eq!(error(dir, now()), "the private key of DIR/server-ca.crt is missing");
    }
}

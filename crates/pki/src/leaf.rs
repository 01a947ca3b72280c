//! Server and client certificates, signed by an [`Authority`] and replaced when they no longer match
//! their specification.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::authority::{Authority, set_validity, validity};
use crate::identity::subject;
use crate::{Error, file};

/// The specification of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The user name of a client.
    pub common_name: String,
    /// The groups of a client; at most one.
    pub organizations: Vec<String>,
    pub dns_names: Vec<String>,
    pub ips: Vec<IpAddr>,
    pub usage: Usage,
    pub lifetime: Duration,
}

/// The extended key usage of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    Server,
    Client,
}

/// A signed certificate and its private key.
#[derive(Clone, PartialEq, Eq)]
pub struct CertKeyPair {
    pub cert_pem: String,
    pub key_pem: String,
}

/// Reads `<base_name>.crt` and `<base_name>.key` from `dir`. Creates new files if these are missing or
/// malformed, have less than a quarter of their lifetime left, were signed by another authority or do
/// not match `leaf`.
pub fn load_or_issue(
    dir: &Path,
    base_name: &str,
    authority: &Authority,
    leaf: &Leaf,
    now: Timestamp,
) -> Result<CertKeyPair, Error> {
    file::private_dir(dir)?;
    let cert_path = dir.join(format!("{base_name}.crt"));
    let key_path = dir.join(format!("{base_name}.key"));
    if let (Some(cert_pem), Some(key_pem)) = (file::read(&cert_path)?, file::read(&key_path)?) {
        let stored = CertKeyPair { cert_pem, key_pem };
        if fits(&stored, authority, leaf, now) {
            return Ok(stored);
        }
    }
    let cert_key_pair = authority.issue(leaf, now)?;
    // A crash between the two writes leaves a key and a certificate that do not match. The next start
    // replaces them.
    file::write_file(&key_path, cert_key_pair.key_pem.as_bytes(), 0o600)?;
    file::write_file(&cert_path, cert_key_pair.cert_pem.as_bytes(), 0o600)?;
    Ok(cert_key_pair)
}

impl Authority {
    /// Creates a key and signs a certificate for it.
    pub fn issue(&self, leaf: &Leaf, now: Timestamp) -> Result<CertKeyPair, Error> {
        let sign = |source| Error::Sign { common_name: leaf.common_name.clone(), source };
        let params = params(leaf)?;
        let key = KeyPair::generate().map_err(|source| Error::Key { source })?;
        let cert_pem = self.sign(params, &key, leaf.lifetime, now).map_err(sign)?;
        Ok(CertKeyPair { cert_pem, key_pem: key.serialize_pem() })
    }
}

/// Creates a self-signed certificate, for a server that has not been given one.
pub fn self_signed(leaf: &Leaf, now: Timestamp) -> Result<CertKeyPair, Error> {
    let mut params = params(leaf)?;
    set_validity(&mut params, now, now.checked_add(leaf.lifetime).unwrap_or(Timestamp::MAX));
    let key = KeyPair::generate().map_err(|source| Error::Key { source })?;
    let signed = params.self_signed(&key);
    let cert = signed.map_err(|source| Error::Sign { common_name: leaf.common_name.clone(), source })?;
    Ok(CertKeyPair { cert_pem: cert.pem(), key_pem: key.serialize_pem() })
}

impl CertKeyPair {
    /// The time from which [`load_or_issue`] replaces the certificate. For a malformed certificate, the
    /// epoch.
    pub fn renewal_time(&self) -> Timestamp {
        let der = CertificateDer::from_pem_slice(self.cert_pem.as_bytes()).ok();
        let renew_at = der.as_ref().and_then(|der| {
            let (_, cert) = X509Certificate::from_der(der).ok()?;
            let (not_before, not_after) = validity(&cert);
            // At exactly a quarter of the lifetime left the certificate is still kept, so this is one
            // second later.
            let left = not_before.duration_until(not_after) / 4 - SignedDuration::from_secs(1);
            not_after.checked_sub(left).ok()
        });
        renew_at.unwrap_or(Timestamp::UNIX_EPOCH)
    }
}

/// The expiry (`notAfter`) of the first certificate in PEM.
pub fn expiry(cert_pem: &str) -> Option<Timestamp> {
    let der = CertificateDer::from_pem_slice(cert_pem.as_bytes()).ok()?;
    X509Certificate::from_der(&der).ok().map(|(_, cert)| validity(&cert).1)
}

pub(crate) fn params(leaf: &Leaf) -> Result<CertificateParams, Error> {
    let sign = |source| Error::Sign { common_name: leaf.common_name.clone(), source };
    let mut name = DistinguishedName::new();
    match leaf.organizations.as_slice() {
        [] => {}
        [one] => name.push(DnType::OrganizationName, one),
        many => {
            // rcgen keeps one value per attribute type. An error is better than a silently dropped
            // group.
            return Err(Error::Organizations { common_name: leaf.common_name.clone(), count: many.len() });
        }
    }
    name.push(DnType::CommonName, &leaf.common_name);
    let mut params = CertificateParams::default();
    params.distinguished_name = name;
    for dns in &leaf.dns_names {
        params.subject_alt_names.push(SanType::DnsName(dns.as_str().try_into().map_err(sign)?));
    }
    params.subject_alt_names.extend(leaf.ips.iter().copied().map(SanType::IpAddress));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match leaf.usage {
        Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
        Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
    }];
    Ok(params)
}

/// Whether a stored certificate matches `leaf`, is fresh and was signed by `authority`.
fn fits(stored: &CertKeyPair, authority: &Authority, leaf: &Leaf, now: Timestamp) -> bool {
    let Ok(der) = CertificateDer::from_pem_slice(stored.cert_pem.as_bytes()) else { return false };
    let Ok((_, cert)) = X509Certificate::from_der(&der) else { return false };
    matches(stored, leaf) && is_fresh(&cert, now) && authority.signed(&cert)
}

/// Whether a certificate belongs to its key and matches `leaf`.
pub(crate) fn matches(stored: &CertKeyPair, leaf: &Leaf) -> bool {
    let Ok(der) = CertificateDer::from_pem_slice(stored.cert_pem.as_bytes()) else { return false };
    let Ok((_, cert)) = X509Certificate::from_der(&der) else { return false };
    let Ok(key) = KeyPair::from_pem(&stored.key_pem) else { return false };
    let (user, groups, _) = subject(&cert);
    cert.public_key().subject_public_key.data == rcgen::PublicKeyData::der_bytes(&key)
        && user == leaf.common_name
        && groups == leaf.organizations
        && names(&cert) == expected_names(leaf)
        && usage(&cert) == Some(leaf.usage)
}

/// Whether `now` is within the certificate's validity period.
pub(crate) fn is_valid(stored: &CertKeyPair, now: Timestamp) -> bool {
    let Ok(der) = CertificateDer::from_pem_slice(stored.cert_pem.as_bytes()) else { return false };
    let Ok((_, cert)) = X509Certificate::from_der(&der) else { return false };
    let (not_before, not_after) = validity(&cert);
    not_before <= now && now < not_after
}

fn is_fresh(cert: &X509Certificate<'_>, now: Timestamp) -> bool {
    let (not_before, not_after) = validity(cert);
    let left = now.duration_until(not_after);
    not_before <= now && left > SignedDuration::ZERO && left >= not_before.duration_until(not_after) / 4
}

fn usage(cert: &X509Certificate<'_>) -> Option<Usage> {
    let usage = cert.extended_key_usage().ok()??.value;
    match (usage.server_auth, usage.client_auth) {
        (true, false) => Some(Usage::Server),
        (false, true) => Some(Usage::Client),
        _ => None,
    }
}

/// The subject alternative names: DNS names as text, IP addresses as bytes.
fn names(cert: &X509Certificate<'_>) -> BTreeSet<Vec<u8>> {
    let Ok(Some(extension)) = cert.subject_alternative_name() else { return BTreeSet::new() };
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(dns) => dns.as_bytes().to_vec(),
        GeneralName::IPAddress(bytes) => bytes.to_vec(),
        other => other.to_string().into_bytes(),
    };
    extension.value.general_names.iter().map(name).collect()
}

fn expected_names(leaf: &Leaf) -> BTreeSet<Vec<u8>> {
    let address = |ip: &IpAddr| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let dns = leaf.dns_names.iter().map(|name| name.as_bytes().to_vec());
    dns.chain(leaf.ips.iter().map(address)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn now() -> Timestamp {
        "2026-11-15T12:00:00Z".parse().unwrap()
    }

    fn server() -> Leaf {
        Leaf {
            common_name: "skiff".to_owned(),
            organizations: vec![],
            dns_names: vec!["kubernetes".to_owned(), "localhost".to_owned()],
            ips: vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()],
            usage: Usage::Server,
            lifetime: 100 * DAY,
        }
    }

    /// Whether a certificate created for [`server`] is replaced when the second start differs by
    /// `change`.
    #[track_caller]
    fn check(what: &str, change: impl FnOnce(&mut Leaf, &mut Timestamp), replaced: bool) {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::load_or_create(dir.path(), "ca", now()).unwrap();
        let first = load_or_issue(dir.path(), "server", &ca, &server(), now()).unwrap();
        let (mut leaf, mut then) = (server(), now());
        change(&mut leaf, &mut then);
        let second = load_or_issue(dir.path(), "server", &ca, &leaf, then).unwrap();
        assert_eq!(first.cert_pem != second.cert_pem, replaced, "{what}");
        let third = load_or_issue(dir.path(), "server", &ca, &leaf, then).unwrap();
        assert!(second == third, "{what}: not replaced twice");
    }

    #[test]
    fn is_replaced_when_spec_or_validity_changes() {
        check("nothing changed", |_, _| {}, false);
        check("names reordered", |leaf, _| leaf.dns_names.reverse(), false);
        check("a name more", |leaf, _| leaf.dns_names.push("node-1".to_owned()), true);
        check("an address less", |leaf, _| leaf.ips.truncate(1), true);
        check("another user", |leaf, _| leaf.common_name.push('2'), true);
        check("a group", |leaf, _| leaf.organizations.push("system:masters".to_owned()), true);
        check("another use", |leaf, _| leaf.usage = Usage::Client, true);
        check("half its life over", |_, now| *now = now.checked_add(50 * DAY).unwrap(), false);
        check("near its end", |_, now| *now = now.checked_add(80 * DAY).unwrap(), true);
        check("expired", |_, now| *now = now.checked_add(101 * DAY).unwrap(), true);
    }

    #[test]
    fn is_replaced_for_another_authority_or_when_malformed() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::load_or_create(dir.path(), "ca", now()).unwrap();
        // Both authorities have the same name, so only the signature differs.
        let other_dir = tempfile::tempdir().unwrap();
        let other = Authority::load_or_create(other_dir.path(), "ca", now()).unwrap();
        let first = load_or_issue(dir.path(), "server", &ca, &server(), now()).unwrap();
        let second = load_or_issue(dir.path(), "server", &other, &server(), now()).unwrap();
        assert_ne!(first.cert_pem, second.cert_pem);

        for file in ["server.crt", "server.key"] {
            std::fs::write(dir.path().join(file), "").unwrap();
            load_or_issue(dir.path(), "server", &other, &server(), now()).unwrap();
            assert_ne!(std::fs::read(dir.path().join(file)).unwrap(), b"");
        }
        std::fs::write(dir.path().join("server.key"), &first.key_pem).unwrap();
        let third = load_or_issue(dir.path(), "server", &other, &server(), now()).unwrap();
        assert_ne!(third.key_pem, first.key_pem);
    }

    #[test]
    fn never_expires_after_its_authority() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::load_or_create(dir.path(), "ca", now()).unwrap();
        let leaf = Leaf { lifetime: 100_000 * DAY, ..server() };
        let cert_key_pair = ca.issue(&leaf, now()).unwrap();
        let der = CertificateDer::from_pem_slice(cert_key_pair.cert_pem.as_bytes()).unwrap();
        let (_, cert) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(validity(&cert).1, now().checked_add(3650 * DAY).unwrap());
    }

    #[test]
    fn renewal_time_matches_replacement_condition() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::load_or_create(dir.path(), "ca", now()).unwrap();
        let cert_key_pair = ca.issue(&server(), now()).unwrap();
        let renew_at = cert_key_pair.renewal_time();
        let second = SignedDuration::from_secs(1);
        assert!(
            fits(&cert_key_pair, &ca, &server(), renew_at - second)
                && !fits(&cert_key_pair, &ca, &server(), renew_at)
        );
        let malformed = CertKeyPair { cert_pem: String::new(), ..cert_key_pair };
        assert_eq!(malformed.renewal_time(), Timestamp::UNIX_EPOCH);
    }

    #[test]
    fn rejects_unsupported_subject_and_names() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::load_or_create(dir.path(), "ca", now()).unwrap();
        let groups = Leaf { organizations: vec!["a".to_owned(), "b".to_owned()], ..server() };
        let error = ca.issue(&groups, now()).err().unwrap().to_string();
        assert_eq!(error, "a certificate can have only one organization, \"skiff\" requests 2");
        let name = Leaf { dns_names: vec!["käse".to_owned()], ..server() };
        let error = ca.issue(&name, now()).err().unwrap().to_string();
        assert_eq!(error, "cannot sign a certificate for \"skiff\"");
    }
}

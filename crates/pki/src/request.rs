//! Signs certificate signing requests (PKCS #10).
//!
//! The certificate gets the key and the subject alternative names of the request byte by byte, and each
//! attribute of its subject unchanged; only the order of the attributes differs. rcgen would lose data
//! here, for example all organizations but one.

mod subject;

use std::net::IpAddr;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use rcgen::SigningKey as _;
use ring::rand::SecureRandom as _;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::der_parser::{Oid, oid};
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::authority::{Authority, validity};
use crate::{Error, der};

const SUBJECT_ALT_NAME: Oid<'static> = oid!(2.5.29.17);
/// `notBefore` lies in the past by this much, so that machines whose clocks are behind accept the
/// certificate.
const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);
/// Certificates with a shorter lifetime than this get all of it from now on. Others lose
/// [`CLOCK_SKEW`]. The limit is the same as in upstream's signer
/// (`pkg/controller/certificates/authority`).
const SHORT_LIFETIME: Duration = Duration::from_secs(8 * 60 * 60);

/// The key usages by their Kubernetes names, with the bit of the KeyUsage extension.
const KEY_USAGES: &[(&str, u8)] = &[
    ("signing", 0),
    ("digital signature", 0),
    ("content commitment", 1),
    ("key encipherment", 2),
    ("data encipherment", 3),
    ("key agreement", 4),
    ("cert sign", 5),
    ("crl sign", 6),
    ("encipher only", 7),
    ("decipher only", 8),
];
/// The extended key usages by their Kubernetes names, with the DER-encoded object identifier.
const EXTENDED_USAGES: &[(&str, &[u8])] = &[
    ("any", &[0x55, 0x1d, 0x25, 0x00]),
    ("server auth", &[0x2b, 6, 1, 5, 5, 7, 3, 1]),
    ("client auth", &[0x2b, 6, 1, 5, 5, 7, 3, 2]),
    ("code signing", &[0x2b, 6, 1, 5, 5, 7, 3, 3]),
    ("email protection", &[0x2b, 6, 1, 5, 5, 7, 3, 4]),
    ("s/mime", &[0x2b, 6, 1, 5, 5, 7, 3, 4]),
    ("ipsec end system", &[0x2b, 6, 1, 5, 5, 7, 3, 5]),
    ("ipsec tunnel", &[0x2b, 6, 1, 5, 5, 7, 3, 6]),
    ("ipsec user", &[0x2b, 6, 1, 5, 5, 7, 3, 7]),
    ("timestamping", &[0x2b, 6, 1, 5, 5, 7, 3, 8]),
    ("ocsp signing", &[0x2b, 6, 1, 5, 5, 7, 3, 9]),
    ("microsoft sgc", &[0x2b, 6, 1, 4, 1, 0x82, 0x37, 0x0a, 3, 3]),
    ("netscape sgc", &[0x60, 0x86, 0x48, 1, 0x86, 0xf8, 0x42, 4, 1]),
];

/// A certificate signing request. Its self-signature is verified: the requester has the private key.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub common_name: String,
    pub organizations: Vec<String>,
    pub dns_names: Vec<String>,
    pub ips: Vec<IpAddr>,
    pub email_count: usize,
    pub uri_count: usize,
    subject: Vec<u8>,
    key: Vec<u8>,
    /// The DER-encoded subject alternative names.
    names: Option<Vec<u8>>,
}

impl Request {
    pub fn parse(pem: &[u8]) -> Result<Request, Error> {
        let malformed = || Error::Malformed { what: "the certificate request".to_owned() };
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem).map_err(|_| malformed())?;
        let Pem { label, contents } = pem;
        if label != "CERTIFICATE REQUEST" {
            return Err(malformed());
        }
        let (_, request) = X509CertificationRequest::from_der(&contents).map_err(|_| malformed())?;
        request.verify_signature().map_err(|_| malformed())?;
        let info = &request.certification_request_info;
        let strings = |values: &mut dyn Iterator<Item = &x509_parser::x509::AttributeTypeAndValue<'_>>| {
            values.map(|value| value.as_str().unwrap_or_default().to_owned()).collect::<Vec<String>>()
        };
        let mut parsed = Request {
            common_name: strings(&mut info.subject.iter_common_name()).pop().unwrap_or_default(),
            organizations: strings(&mut info.subject.iter_organization()),
            dns_names: Vec::new(),
            ips: Vec::new(),
            email_count: 0,
            uri_count: 0,
            subject: subject::encode_in_go_order(&info.subject),
            key: info.subject_pki.raw.to_vec(),
            names: None,
        };
        for attribute in info.iter_attributes() {
            let ParsedCriAttribute::ExtensionRequest(requested) = attribute.parsed_attribute() else {
                continue;
            };
            for extension in requested.extensions.iter().filter(|extension| extension.oid == SUBJECT_ALT_NAME)
            {
                parsed.names = Some(extension.value.to_vec());
                let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else {
                    return Err(malformed());
                };
                names.general_names.iter().for_each(|name| parsed.add_name(name));
            }
        }
        Ok(parsed)
    }

    fn add_name(&mut self, name: &GeneralName<'_>) {
        match name {
            GeneralName::DNSName(name) => self.dns_names.push((*name).to_owned()),
            GeneralName::RFC822Name(_) => self.email_count += 1,
            GeneralName::URI(_) => self.uri_count += 1,
            GeneralName::IPAddress(bytes) => {
                let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
                let v6 = <[u8; 16]>::try_from(*bytes).map(IpAddr::from);
                self.ips.extend(v4.or(v6));
            }
            _ => {}
        }
    }
}

impl Authority {
    /// Signs a certificate for the key of `request` with these Kubernetes usages. It never expires
    /// after the authority.
    pub fn sign_request(
        &self,
        request: &Request,
        usages: &[String],
        lifetime: Duration,
        now: Timestamp,
    ) -> Result<String, Error> {
        let malformed = || Error::Malformed { what: "the certificate authority".to_owned() };
        let (_, own) = X509Certificate::from_der(self.der()).map_err(|_| malformed())?;
        let algorithm = signature_algorithm(self.key().algorithm()).ok_or_else(malformed)?;
        let begin = now.checked_sub(CLOCK_SKEW).unwrap_or(now);
        let from = if lifetime < SHORT_LIFETIME { now } else { begin };
        let end = from.checked_add(lifetime).unwrap_or(now).min(validity(&own).1);
        let mut serial = [0; 16];
        ring::rand::SystemRandom::new().fill(&mut serial).map_err(|_| Error::Randomness)?;
        // The first bit is clear, so the number is positive. The second is set, so it always has 16
        // bytes.
        serial[0] = serial[0] & 0x7f | 0x40;
        let to_sign = der::sequence(&[
            der::tagged(0xa0, &der::tagged(0x02, &[2])),
            der::tagged(0x02, &serial),
            algorithm.to_vec(),
            own.subject().as_raw().to_vec(),
            der::sequence(&[der::time(begin), der::time(end)]),
            request.subject.clone(),
            request.key.clone(),
            der::tagged(0xa3, &der::sequence(&extensions(request, usages, &own))),
        ]);
        let sign = |source| Error::Sign { common_name: request.common_name.clone(), source };
        let signature = self.key().sign(&to_sign).map_err(sign)?;
        let signature = der::tagged(0x03, &[&[0], signature.as_slice()].concat());
        Ok(to_pem(&der::sequence(&[to_sign, algorithm.to_vec(), signature])))
    }
}

fn extensions(request: &Request, usages: &[String], authority: &X509Certificate<'_>) -> Vec<Vec<u8>> {
    let extension = |oid: &[u8], critical: bool, value: &[u8]| {
        let critical = if critical { der::tagged(0x01, &[0xff]) } else { Vec::new() };
        der::sequence(&[der::tagged(0x06, oid), critical, der::tagged(0x04, value)])
    };
    let is_requested = |name: &&str| usages.iter().any(|usage| usage == name);
    let mut all = Vec::new();
    let bits = KEY_USAGES
        .iter()
        .filter(|(name, _)| is_requested(name))
        .fold(0u16, |bits, (_, bit)| bits | 0x8000 >> bit);
    if bits != 0 {
        all.push(extension(&[0x55, 0x1d, 0x0f], true, &der::bits(bits)));
    }
    let mut extended: Vec<Vec<u8>> = Vec::new();
    for (_, oid) in EXTENDED_USAGES.iter().filter(|(name, _)| is_requested(name)) {
        let encoded = der::tagged(0x06, oid);
        if !extended.contains(&encoded) {
            extended.push(encoded);
        }
    }
    if !extended.is_empty() {
        all.push(extension(&[0x55, 0x1d, 0x25], false, &der::sequence(&extended)));
    }
    // Basic constraints: not a CA.
    all.push(extension(&[0x55, 0x1d, 0x13], true, &der::sequence(&[])));
    let key = authority.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(key) => Some(key.0),
        _ => None,
    });
    if let Some(key) = key {
        all.push(extension(&[0x55, 0x1d, 0x23], false, &der::sequence(&[der::tagged(0x80, key)])));
    }
    if let Some(names) = &request.names {
        // RFC 5280 requires the extension to be critical if the subject is empty.
        let only = request.subject.len() <= 2;
        all.push(extension(&[0x55, 0x1d, 0x11], only, names));
    }
    all
}

/// The DER-encoded AlgorithmIdentifier for signatures with a key of this algorithm.
fn signature_algorithm(algorithm: &rcgen::SignatureAlgorithm) -> Option<&'static [u8]> {
    let known: [(&rcgen::SignatureAlgorithm, &'static [u8]); 4] = [
        (&rcgen::PKCS_ECDSA_P256_SHA256, &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2]),
        (&rcgen::PKCS_ECDSA_P384_SHA384, &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 3]),
        (&rcgen::PKCS_ED25519, &[0x30, 5, 6, 3, 0x2b, 0x65, 0x70]),
        (&rcgen::PKCS_RSA_SHA256, &[0x30, 13, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 11, 5, 0]),
    ];
    known.into_iter().find(|(known, _)| *known == algorithm).map(|(_, encoded)| encoded)
}

pub(crate) fn to_pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap_or_default()).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};

    use super::*;

    fn authority(now: Timestamp) -> Authority {
        let dir = tempfile::tempdir().unwrap();
        Authority::load_or_create(dir.path(), "ca", now).unwrap()
    }

    fn request(names: Vec<SanType>) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, "system:node:n");
        params.subject_alt_names = names;
        params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap()
    }

    #[test]
    fn certificate_contains_names_usages_and_key_of_the_request() {
        let now: Timestamp = "2026-11-15T12:00:00Z".parse().unwrap();
        let ca = authority(now);
        let names =
            vec![SanType::DnsName("n.example".try_into().unwrap()), SanType::IpAddress([10, 0, 0, 1].into())];
        let parsed = Request::parse(request(names).as_bytes()).unwrap();
        assert_eq!(
            (parsed.common_name.as_str(), parsed.organizations.as_slice()),
            ("system:node:n", &["system:nodes".to_owned()][..])
        );
        assert_eq!(
            (parsed.dns_names.len(), parsed.ips.len(), parsed.email_count, parsed.uri_count),
            (1, 1, 0, 0)
        );
        let usages = ["digital signature", "key encipherment", "server auth"].map(str::to_owned);
        let day = Duration::from_secs(24 * 3600);
        let pem = ca.sign_request(&parsed, &usages, day, now).unwrap();
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let (rest, cert) = X509Certificate::from_der(&der).unwrap();
        assert!(rest.is_empty() && ca.signed(&cert));
        assert_eq!(
            validity(&cert),
            ("2026-11-15T11:55:00Z".parse().unwrap(), "2026-11-16T11:55:00Z".parse().unwrap())
        );
        let usage = cert.key_usage().unwrap().unwrap().value;
        assert!(usage.digital_signature() && usage.key_encipherment() && !usage.key_cert_sign());
        let extended = cert.extended_key_usage().unwrap().unwrap().value;
        assert!(extended.server_auth && !extended.client_auth);
        assert!(!cert.basic_constraints().unwrap().unwrap().value.ca);
        assert_eq!(cert.subject_alternative_name().unwrap().unwrap().value.general_names.len(), 2);
        assert_eq!(crate::identity_of(&der).unwrap().groups, ["system:nodes"]);
    }

    #[test]
    fn subject_attribute_order_matches_go() {
        let now: Timestamp = "2026-11-15T12:00:00Z".parse().unwrap();
        let ca = authority(now);
        let mut params = CertificateParams::default();
        let mut name = rcgen::DistinguishedName::new();
        for (kind, value) in [
            (DnType::CommonName, "jane"),
            (DnType::CustomDnType(vec![0, 9, 2342, 19_200_300, 100, 1, 25]), "example"),
            (DnType::OrganizationalUnitName, "unit"),
            (DnType::OrganizationName, "system:nodes"),
            (DnType::LocalityName, "here"),
            (DnType::CountryName, "DE"),
        ] {
            name.push(kind, value);
        }
        params.distinguished_name = name;
        let pem = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
        let parsed = Request::parse(pem.as_bytes()).unwrap();
        let pem = ca.sign_request(&parsed, &["client auth".to_owned()], CLOCK_SKEW, now).unwrap();
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let (_, cert) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(cert.subject().to_string(), "C=DE, O=system:nodes, OU=unit, L=here, CN=jane, DC=example");
    }

    #[test]
    fn certificates_never_expire_after_their_authority() {
        let now: Timestamp = "2026-11-15T12:00:00Z".parse().unwrap();
        let ca = authority(now);
        let parsed = Request::parse(request(Vec::new()).as_bytes()).unwrap();
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        let pem = ca.sign_request(&parsed, &["client auth".to_owned()], century, now).unwrap();
        assert_eq!(crate::expiry(&pem), crate::expiry(ca.pem()));
        let minutes = Duration::from_secs(600);
        let pem = ca.sign_request(&parsed, &["client auth".to_owned()], minutes, now).unwrap();
        assert_eq!(crate::expiry(&pem), Some("2026-11-15T12:10:00Z".parse().unwrap()));
    }

    #[test]
    fn rejects_malformed_requests() {
        for text in
            ["", "x", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"]
        {
            assert!(Request::parse(text.as_bytes()).is_err());
        }
        let wrong = request(Vec::new()).replace("CERTIFICATE REQUEST", "CERTIFICATE");
        assert!(Request::parse(wrong.as_bytes()).is_err());
    }
}

//! The user that a client certificate identifies.
//!
//! Upstream: `CommonNameUserConversion` in `apiserver/pkg/authentication/request/x509`.

use jiff::Timestamp;
use x509_parser::der_parser::{Oid, oid};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::Error;
use crate::authority::validity;

/// The object identifier of the user's UID in a certificate subject.
const UID: Oid<'static> = oid!(1.3.6.1.4.1.57683.2);

/// The user that a client certificate identifies. Does not imply that the certificate is trusted: see
/// [`ClientAuthority::is_trusted`](crate::ClientAuthority::is_trusted).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub user: String,
    pub groups: Vec<String>,
    pub uid: Option<String>,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

/// Reads the user from the certificate's common name and the groups from its organizations.
pub fn identity_of(der: &[u8]) -> Result<Identity, Error> {
    let (_, cert) = X509Certificate::from_der(der)
        .map_err(|_| Error::Malformed { what: "the client's certificate".to_owned() })?;
    let (user, groups, uid) = subject(&cert);
    if user.is_empty() {
        return Err(Error::NoCommonName);
    }
    let (not_before, not_after) = validity(&cert);
    Ok(Identity { user, groups, uid, not_before, not_after })
}

/// Common name, organizations and UID. If there are several common names, the last one counts, as in
/// Go.
pub(crate) fn subject(cert: &X509Certificate<'_>) -> (String, Vec<String>, Option<String>) {
    let name = cert.subject();
    let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
        attribute.as_str().unwrap_or_default().to_owned()
    };
    let user = name.iter_common_name().last().map(text).unwrap_or_default();
    let groups = name.iter_organization().map(text).collect();
    let uid = name.iter_by_oid(&UID).map(text).next().filter(|uid| !uid.is_empty());
    (user, groups, uid)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::pki_types::{CertificateDer, pem::PemObject as _};

    use super::*;
    use crate::{Authority, Leaf, Usage};

    fn certificate(common_name: &str, organizations: &[&str]) -> CertificateDer<'static> {
        let dir = tempfile::tempdir().unwrap();
        let now = "2026-11-15T12:00:00Z".parse().unwrap();
        let ca = Authority::load_or_create(dir.path(), "client-ca", now).unwrap();
        let leaf = Leaf {
            common_name: common_name.to_owned(),
            organizations: organizations.iter().map(ToString::to_string).collect(),
            dns_names: vec![],
            ips: vec![],
            usage: Usage::Client,
            lifetime: Duration::from_secs(3600),
        };
        let cert_key_pair = ca.issue(&leaf, now).unwrap();
        CertificateDer::from_pem_slice(cert_key_pair.cert_pem.as_bytes()).unwrap()
    }

    #[test]
    fn user_is_common_name_and_groups_are_organizations() {
        expect_test::expect![[r#"
            Identity {
                user: "system:admin",
                groups: [
                    "system:masters",
                ],
                uid: None,
                not_before: 2026-11-15T11:55:00Z,
                not_after: 2026-11-15T13:00:00Z,
            }
        "#]]
        .assert_debug_eq(&identity_of(&certificate("system:admin", &["system:masters"])).unwrap());
    }

    #[test]
    fn certificate_without_common_name_or_malformed_is_rejected() {
        let error = |der: &[u8]| identity_of(der).unwrap_err().to_string();
        assert_eq!(error(&certificate("", &["system:masters"])), "the client certificate has no common name");
        let whole = certificate("a", &[]);
        for end in 0..whole.len() {
            assert_eq!(
                error(&whole[..end]),
                "cannot parse the client's certificate: invalid certificate or key"
            );
        }
    }
}

//! Request header authentication: a front proxy, such as an aggregator, has authenticated the user
//! and sends it in headers. The headers are only trusted with the proxy's client certificate.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName};

use super::Error;
use crate::access::User;

/// `--requestheader-*`.
#[derive(Clone, Debug, Default)]
pub struct FrontProxy {
    /// PEM of the CA of proxy client certificates.
    pub ca_pem: String,
    /// Allowed common names of proxies; empty allows every certificate of the CA.
    pub allowed_names: Vec<String>,
    pub username_headers: Vec<String>,
    pub uid_headers: Vec<String>,
    pub group_headers: Vec<String>,
    pub extra_header_prefixes: Vec<String>,
}

pub struct FrontProxyAuthenticator {
    pub authority: pki::ClientAuthority,
    pub headers: FrontProxy,
}

impl FrontProxyAuthenticator {
    pub fn new(options: FrontProxy) -> Result<FrontProxyAuthenticator, Error> {
        for (flag, values) in [
            ("requestheader-username-headers", &options.username_headers),
            ("requestheader-uid-headers", &options.uid_headers),
            ("requestheader-group-headers", &options.group_headers),
            ("requestheader-extra-headers-prefix", &options.extra_header_prefixes),
            ("requestheader-allowed-names", &options.allowed_names),
        ] {
            if values.iter().any(|value| value.trim().is_empty()) {
                return Err(Error::Flag { flag, reason: "empty value".to_owned() });
            }
        }
        let authority = pki::ClientAuthority::new(&options.ca_pem, "the request header CA")?;
        Ok(FrontProxyAuthenticator { authority, headers: options })
    }

    pub fn allows(&self, common_name: &str) -> bool {
        let allowed = &self.headers.allowed_names;
        allowed.is_empty() || allowed.iter().any(|name| name == common_name)
    }
}

impl FrontProxy {
    /// The user in the headers, which are removed.
    pub fn take_user(&self, headers: &mut HeaderMap) -> Option<User> {
        let all = |names: &[String]| -> Vec<String> {
            let values = names.iter().flat_map(|name| headers.get_all(name.trim()));
            let strings = values.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
            strings.filter(|text| !text.is_empty()).collect()
        };
        let name = all(&self.username_headers).into_iter().next()?;
        let uid = all(&self.uid_headers).into_iter().next().unwrap_or_default();
        let groups = all(&self.group_headers);
        let mut extra = BTreeMap::<String, Vec<String>>::new();
        let mut used: Vec<HeaderName> = Vec::new();
        for prefix in &self.extra_header_prefixes {
            let prefix = prefix.trim().to_ascii_lowercase();
            for (header, value) in headers.iter() {
                let Some(key) = header.as_str().strip_prefix(&prefix) else { continue };
                let text = String::from_utf8_lossy(value.as_bytes()).into_owned();
                extra.entry(stream::url_encoding::unescape(key)).or_default().push(text);
                used.push(header.clone());
            }
        }
        for name in [&self.username_headers, &self.uid_headers, &self.group_headers].into_iter().flatten() {
            headers.remove(name.trim());
        }
        for header in used {
            headers.remove(header);
        }
        Some(User { name, uid, groups, extra })
    }
}

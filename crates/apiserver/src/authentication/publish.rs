//! What API servers behind this one must know to trust it, in a ConfigMap: whose client certificates are
//! good, and which proxies may name users in which headers.

use api::Status;
use api::json::Json as _;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::Authenticators;
use crate::bootstrap;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

pub const NAMESPACE: &str = "kube-system";
pub const NAME: &str = "extension-apiserver-authentication";

/// Makes the ConfigMap, or adds what is missing in it. What other servers have put there stays.
pub async fn publish(server: &Server) -> Result<(), Status> {
    let resource = api::table::find("", "v1", "configmaps").expect("ConfigMaps are in the table");
    let ours = data(&server.authenticators);
    let map = json!({"data": ours});
    bootstrap::ensure(server, resource, NAMESPACE, NAME, map).await?;
    let target = Target { name: NAME.into(), ..Target::collection(resource, NAMESPACE) };
    let options = WriteOptions::internal(Timestamp::now());
    let change = |before: &Value| {
        let mut after = before.clone();
        for (key, value) in &ours {
            let text = joined(before.at("data").text(key), value);
            after.object_mut("data").insert((*key).to_owned(), text.into());
        }
        Ok(Change::replace(after))
    };
    server.change(&target, &options, change).await.map(drop)
}

fn data(authenticators: &Authenticators) -> std::collections::BTreeMap<&'static str, String> {
    let mut data = std::collections::BTreeMap::new();
    if !authenticators.client_ca_pem.is_empty() {
        data.insert("client-ca-file", authenticators.client_ca_pem.clone());
    }
    let Some(proxy) = &authenticators.proxy else { return data };
    let proxy = &proxy.headers;
    data.insert("requestheader-client-ca-file", proxy.ca_pem.clone());
    for (key, values) in [
        ("requestheader-username-headers", &proxy.username_headers),
        ("requestheader-uid-headers", &proxy.uid_headers),
        ("requestheader-group-headers", &proxy.group_headers),
        ("requestheader-extra-headers-prefix", &proxy.extra_header_prefixes),
        ("requestheader-allowed-names", &proxy.allowed_names),
    ] {
        if key != "requestheader-uid-headers" || !values.is_empty() {
            data.insert(key, json!(values).to_string());
        }
    }
    data
}

/// Lists are joined as lists, certificates as text; what cannot be read is replaced.
fn joined(before: &str, ours: &str) -> String {
    let list = |text: &str| serde_json::from_str::<Vec<String>>(text);
    let Ok(wanted) = list(ours) else {
        let certificates = before.contains("-----BEGIN CERTIFICATE-----") && before.ends_with('\n');
        return match before {
            _ if !certificates => ours.to_owned(),
            _ if before.contains(ours) => before.to_owned(),
            _ => format!("{before}{ours}"),
        };
    };
    let mut all = list(before).unwrap_or_default();
    for name in wanted {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    json!(all).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_others_is_lost() {
        assert_eq!(joined("", "[\"a\"]"), "[\"a\"]");
        assert_eq!(joined("[\"b\",\"a\"]", "[\"a\",\"c\"]"), "[\"b\",\"a\",\"c\"]");
        assert_eq!(joined("nonsense", "[\"a\"]"), "[\"a\"]");
        let (one, two) = ("-----BEGIN CERTIFICATE-----\n1\n", "-----BEGIN CERTIFICATE-----\n2\n");
        assert_eq!(joined(one, two), format!("{one}{two}"));
        assert_eq!(joined(&format!("{one}{two}"), two), format!("{one}{two}"));
        assert_eq!(joined("nonsense", two), two);
    }
}

//! Publishes the ConfigMap `extension-apiserver-authentication`, from which extension API servers
//! learn the client CA and the request header configuration.

use api::Status;
use api::json::JsonExt as _;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::Authenticators;
use crate::bootstrap;
use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

pub const NAMESPACE: &str = "kube-system";
pub const NAME: &str = "extension-apiserver-authentication";

/// Creates or completes the ConfigMap. Values of other API servers are kept.
pub async fn publish(server: &Server) -> Result<(), Status> {
    let resource =
        api::resource_table::find_resource("", "v1", "configmaps").expect("ConfigMaps are in the table");
    let own_data = data(&server.authenticators);
    let map = json!({"data": own_data});
    bootstrap::ensure(server, resource, NAMESPACE, NAME, map).await?;
    let target = Target { name: NAME.into(), ..Target::collection(resource, NAMESPACE) };
    let options = WriteOptions::internal(Timestamp::now());
    let change = |before: &Value| {
        let mut after = before.clone();
        for (key, value) in &own_data {
            let text = merge_values(before.at("data").text(key), value);
            after.object_mut("data").insert((*key).to_owned(), text.into());
        }
        Ok(ObjectChange::replace(after))
    };
    server.update_object(&target, &options, change).await.map(drop)
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

/// Merges JSON lists, and concatenates certificates. A value that cannot be merged is replaced.
fn merge_values(before: &str, own_value: &str) -> String {
    let list = |text: &str| serde_json::from_str::<Vec<String>>(text);
    let Ok(names) = list(own_value) else {
        let certificates = before.contains("-----BEGIN CERTIFICATE-----") && before.ends_with('\n');
        return match before {
            _ if !certificates => own_value.to_owned(),
            _ if before.contains(own_value) => before.to_owned(),
            _ => format!("{before}{own_value}"),
        };
    };
    let mut all = list(before).unwrap_or_default();
    for name in names {
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
    fn preserves_values_of_other_servers() {
        assert_eq!(merge_values("", "[\"a\"]"), "[\"a\"]");
        assert_eq!(merge_values("[\"b\",\"a\"]", "[\"a\",\"c\"]"), "[\"b\",\"a\",\"c\"]");
        assert_eq!(merge_values("nonsense", "[\"a\"]"), "[\"a\"]");
        let (one, two) = ("-----BEGIN CERTIFICATE-----\n1\n", "-----BEGIN CERTIFICATE-----\n2\n");
        assert_eq!(merge_values(one, two), format!("{one}{two}"));
        assert_eq!(merge_values(&format!("{one}{two}"), two), format!("{one}{two}"));
        assert_eq!(merge_values("nonsense", two), two);
    }
}

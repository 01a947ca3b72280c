//! Upstream's EncryptionConfiguration: which resources are encrypted in the store, with which keys.
//!
//! The types here hold secrets, so none of them is `Debug`. Errors name the field path and never
//! contain a value.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::field::quote;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use store::Store;
use store::encryption::{
    AesGcm, EncryptionRules, EncryptionStore, KeyError, Kms, LegacyAlgorithm, LegacyCipher, Provider,
};

use crate::cache::kind_of;

const API_VERSIONS: [&str; 1] = ["apiserver.config.k8s.io/v1"];

/// Why the encryption configuration cannot be used. Never contains a secret.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("invalid encryption configuration {path}: {reason}")]
    Configuration { path: PathBuf, reason: String },
}

/// A store that encrypts the values of the resources that the configuration lists.
#[derive(Clone)]
pub struct EncryptedStore {
    sealed: Arc<EncryptionStore>,
    pub(crate) path: PathBuf,
}

impl EncryptedStore {
    pub fn new(store: Arc<dyn Store>, path: &Path) -> Result<EncryptedStore, Error> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let rules = parse(&text).map_err(|reason| Error::Configuration { path: path.to_owned(), reason })?;
        Ok(EncryptedStore { sealed: Arc::new(EncryptionStore::new(store, rules)), path: path.to_owned() })
    }

    /// The encrypting store, which the API server works on.
    pub fn store(&self) -> Arc<dyn Store> {
        self.sealed.clone()
    }

    /// Replaces the rules with those of a new version of the file.
    pub(crate) async fn reload(self, text: String) -> Result<(), String> {
        let rules = parse(&text)?;
        self.sealed.reload(rules).await.map_err(|error| error.to_string())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct EncryptionConfiguration {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    resources: Vec<ResourceConfiguration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResourceConfiguration {
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    providers: Vec<ProviderConfiguration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProviderConfiguration {
    aesgcm: Option<Keys>,
    aescbc: Option<Keys>,
    secretbox: Option<Keys>,
    identity: Option<Identity>,
    kms: Option<KmsConfiguration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    #[serde(default)]
    keys: Vec<Key>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Key {
    #[serde(default)]
    name: String,
    #[serde(default)]
    secret: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KmsConfiguration {
    #[serde(default, rename = "apiVersion")]
    api_version: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    endpoint: String,
    timeout: Option<String>,
    /// Only for KMS v1.
    #[serde(default)]
    #[expect(dead_code, reason = "accepted, as upstream accepts it")]
    cachesize: Option<i32>,
}

impl KmsConfiguration {
    fn build(self, at: &str, errors: &mut Vec<String>) -> Option<Provider> {
        let before = errors.len();
        if self.name.is_empty() {
            errors.push(format!("{at}.name: Required value: name is a mandatory field for a provider"));
        } else if self.name.contains(':') {
            let name = &self.name;
            errors.push(format!(
                "{at}.name: Invalid value: {}: invalid KMS provider name {name}, must not contain ':'",
                quote(name)
            ));
        }
        if self.api_version != "v2" {
            let version = quote(&self.api_version);
            errors.push(format!("{at}.apiVersion: Invalid value: {version}: only v2 is supported"));
        }
        let text = self.timeout.as_deref().unwrap_or("3s");
        let timeout = api::time::parse_duration(text).ok().and_then(|time| Duration::try_from(time).ok());
        let timeout = timeout.filter(|time| !time.is_zero());
        if timeout.is_none() {
            let text = quote(text);
            errors.push(format!("{at}.timeout: Invalid value: {text}: timeout should be a positive value"));
        }
        match Kms::new(&self.name, &self.endpoint, timeout.unwrap_or_default()) {
            Ok(kms) => (errors.len() == before).then(|| Provider::Kms(Box::new(kms))),
            Err(reason) => {
                errors.push(format!("{at}.endpoint: {reason}"));
                None
            }
        }
    }
}

/// Parses and validates the configuration. The error joins all problems, worded as upstream does.
fn parse(text: &str) -> Result<EncryptionRules, String> {
    let configuration: EncryptionConfiguration =
        schema::yaml::from_str(text).map_err(|error| error.without_values())?;
    if configuration.kind != "EncryptionConfiguration"
        || !API_VERSIONS.contains(&configuration.api_version.as_str())
    {
        return Err(format!("kind is not EncryptionConfiguration or apiVersion is not {}", API_VERSIONS[0]));
    }
    let mut errors = Vec::new();
    if configuration.resources.is_empty() {
        errors.push("resources: Required value: at least one resources is required".to_owned());
    }
    let mut rules = EncryptionRules::new(kind_of);
    for (i, rule) in configuration.resources.into_iter().enumerate() {
        let (kinds, at) = (format!("resources[{i}].resources"), format!("resources[{i}].providers"));
        for (list, is_empty) in [(&kinds, rule.resources.is_empty()), (&at, rule.providers.is_empty())] {
            if is_empty {
                errors.push(format!("{list}: Required value: at least one {list} is required"));
            }
        }
        validate_resources(&kinds, &rule.resources, &mut errors);
        let providers = rule.providers.into_iter().enumerate();
        let providers: Vec<Provider> = providers
            .filter_map(|(j, provider)| provider.build(&format!("{at}[{j}]"), &mut errors))
            .collect();
        let providers: Arc<[Provider]> = providers.into();
        for kind in &rule.resources {
            let (group, plural) = group_and_plural(kind);
            rules.add(group, plural, &providers);
        }
    }
    if errors.is_empty() { Ok(rules) } else { Err(crate::rbac::aggregate_errors(&errors)) }
}

/// Splits `deployments.apps`, `secrets`, `*.apps`, `*.` (the core group) and `*.*`.
fn group_and_plural(kind: &str) -> (&str, &str) {
    match kind.split_once('.') {
        Some((plural, group)) => (group, plural),
        None => ("", kind),
    }
}

fn validate_resources(at: &str, kinds: &[String], errors: &mut Vec<String>) {
    for (i, kind) in kinds.iter().enumerate() {
        let (group, plural) = group_and_plural(kind);
        let reason = if kind.chars().any(char::is_uppercase) {
            "resource name should not contain capital letters"
        } else if kind == "*" {
            "use '*.' to encrypt all the resources from core API group or *.* to encrypt all resources"
        } else if matches!(
            kind.as_str(),
            "apiserveripinfo" | "serviceipallocations" | "servicenodeportallocations"
        ) {
            "resources which do not have REST API/s cannot be encrypted"
        } else if group == "events.k8s.io" {
            "'*.events.k8s.io' objects are stored using the 'events' API group in etcd. Use 'events' instead in the config file"
        } else if group == "extensions" {
            "'extensions' group has been removed and cannot be used for encryption"
        } else if group == "*" && plural != "*" {
            "encrypting the same resource across groups is not supported"
        } else {
            continue;
        };
        errors.push(format!("{at}[{i}]: Invalid value: {}: {reason}", quote(kind)));
    }
    let list = || format!("{at}: Invalid value: [{}]", kinds.join(" "));
    let pairs = || (0..kinds.len()).flat_map(|i| (i + 1..kinds.len()).map(move |j| (i, j)));
    if pairs().any(|(i, j)| kinds[i] == kinds[j]) {
        errors.push(format!("{}: the same resource cannot be specified multiple times", list()));
    }
    let is_overlapping = |(i, j): (usize, usize)| {
        let ((group, plural), (other, another)) = (group_and_plural(&kinds[i]), group_and_plural(&kinds[j]));
        kinds[i] != kinds[j]
            && (kinds[i] == "*.*" || kinds[j] == "*.*" || group == other && (plural == "*" || another == "*"))
    };
    if pairs().any(is_overlapping) {
        errors.push(format!(
            "{}: using overlapping resources such as 'secrets' and '*.' in the same resource list is not allowed as they will be masked",
            list()
        ));
    }
}

/// Builds a provider from key names and keys.
type BuildProvider = fn(&[(String, Vec<u8>)]) -> Result<Provider, KeyError>;

impl ProviderConfiguration {
    fn build(self, at: &str, errors: &mut Vec<String>) -> Option<Provider> {
        let ProviderConfiguration { aesgcm, aescbc, secretbox, identity, kms } = self;
        let given =
            [aesgcm.is_some(), aescbc.is_some(), secretbox.is_some(), identity.is_some(), kms.is_some()];
        match given.iter().filter(|given| **given).count() {
            0 => {
                errors.push(format!("{at}: Required value: at least one provider is required"));
                return None;
            }
            1 => {}
            _ => {
                errors.push(format!(
                    "{at}: more than one provider specified in a single element, should split into different list elements"
                ));
                return None;
            }
        }
        if let Some(kms) = kms {
            return kms.build(&format!("{at}.kms"), errors);
        }
        if identity.is_some() {
            return Some(Provider::Identity);
        }
        let (name, given, build): (_, _, BuildProvider) = match (aesgcm, aescbc, secretbox) {
            (Some(given), ..) => ("aesgcm", given, |keys| AesGcm::new(keys).map(Provider::AesGcm)),
            (_, Some(given), _) => ("aescbc", given, |keys| {
                LegacyCipher::new(LegacyAlgorithm::AesCbc, keys).map(Provider::Legacy)
            }),
            (.., given) => ("secretbox", given?, |keys| {
                LegacyCipher::new(LegacyAlgorithm::Secretbox, keys).map(Provider::Legacy)
            }),
        };
        let at = format!("{at}.{name}.keys");
        let mut keys = Vec::new();
        for (i, key) in given.keys.into_iter().enumerate() {
            if key.name.is_empty() {
                errors.push(format!("{at}[{i}].name: Required value: name is a mandatory field for a key"));
            }
            if key.secret.is_empty() {
                errors
                    .push(format!("{at}[{i}].secret: Required value: secret is a mandatory field for a key"));
            } else {
                match STANDARD.decode(&key.secret) {
                    Ok(secret) => keys.push((key.name, secret)),
                    Err(_) => errors.push(format!(
                        "{at}[{i}].secret: Invalid value: \"REDACTED\": secrets must be base64 encoded"
                    )),
                }
            }
        }
        match build(&keys) {
            Ok(provider) => Some(provider),
            Err(reason) => {
                errors.push(format!("{at}: {reason}"));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(resources: &str, expected: expect_test::Expect) {
        let text = format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n{resources}"
        );
        expected.assert_eq(&parse(&text).err().unwrap_or_default());
    }

    #[test]
    fn validation_errors_do_not_contain_secrets() {
        let good = "- resources: [secrets, '*.apps']\n  providers: [{aesgcm: {keys: [{name: k, secret: c2VjcmV0IGlzIHNlY3VyZSw=}]}}, {identity: {}}]\n";
        // The key has 17 bytes.
        check(
            good,
            expect_test::expect![
                "resources[0].providers[0].aesgcm.keys: secret is not of the expected length, got 17, expected one of [16 32]"
            ],
        );
        check(&good.replace("ZSw=", "ZQ=="), expect_test::expect![""]);
        check(
            &good.replace("c2Vj", "_hush"),
            expect_test::expect![[
                r#"[resources[0].providers[0].aesgcm.keys[0].secret: Invalid value: "REDACTED": secrets must be base64 encoded, resources[0].providers[0].aesgcm.keys: at least one keys is required]"#
            ]],
        );
        check(
            &good.replace("secret: c2V", "secrets: hush"),
            expect_test::expect!["unknown field `secrets`, expected `name` or `secret`"],
        );
        check(
            &good.replace("'*.apps'", "'*.', '*.*', Pods, secrets"),
            expect_test::expect![[
                r#"[resources[0].resources[3]: Invalid value: "Pods": resource name should not contain capital letters, resources[0].resources: Invalid value: [secrets *. *.* Pods secrets]: the same resource cannot be specified multiple times, resources[0].resources: Invalid value: [secrets *. *.* Pods secrets]: using overlapping resources such as 'secrets' and '*.' in the same resource list is not allowed as they will be masked, resources[0].providers[0].aesgcm.keys: secret is not of the expected length, got 17, expected one of [16 32]]"#
            ]],
        );
        check(
            "- resources: [pods]\n  providers: [{kms: {name: 'a:b', endpoint: 'http://x', timeout: 0s}}]\n",
            expect_test::expect![[
                r#"[resources[0].providers[0].kms.name: Invalid value: "a:b": invalid KMS provider name a:b, must not contain ':', resources[0].providers[0].kms.apiVersion: Invalid value: "": only v2 is supported, resources[0].providers[0].kms.timeout: Invalid value: "0s": timeout should be a positive value, resources[0].providers[0].kms.endpoint: "http://x" is not the URL of a unix socket]"#
            ]],
        );
        check(
            "- resources: [pods]\n  providers: [{identity: {}, kms: {name: x}}, {secretbox: {keys: []}}, {}]\n",
            expect_test::expect![
                "[resources[0].providers[0]: more than one provider specified in a single element, should split into different list elements, resources[0].providers[1].secretbox.keys: at least one keys is required, resources[0].providers[2]: Required value: at least one provider is required]"
            ],
        );
    }
}

//! Credential provider plugins: programs on the node that return registry credentials for an image.
//! Selects the plugins for an image, runs them and caches their responses.
//!
//! Providers are kept as JSON from the configuration. A plugin reads a CredentialProviderRequest
//! and writes a CredentialProviderResponse. Responses never appear in logs or errors, even invalid
//! ones: they may contain passwords.
//!
//! Upstream: `pkg/credentialprovider/plugin`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use parking_lot::Mutex;
use reconcile::{Ctx, Key, Object as _};
use runtime::cri::AuthConfig;
use serde_json::{Map, Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::Instant;

use crate::image_pull_records::{self, PullSecret};
use crate::keyed_mutex::KeyedMutex;
use crate::pull_secrets::{self, RegistryCredential};
use crate::volumes::request_token;

const API_VERSIONS: [&str; 3] = ["v1", "v1alpha1", "v1beta1"];
const API_GROUP_PREFIX: &str = "credentialprovider.kubelet.k8s.io/";
/// The timeout of a plugin, as upstream.
const EXEC_TIMEOUT: Duration = Duration::from_secs(60);
/// The cache key of responses for all images. No image has this name.
const GLOBAL_CACHE_KEY: &str = "<global>";

/// Cached responses and their expiry, by cache key.
type CredentialCache = HashMap<String, (Instant, Value)>;

/// The credential provider configuration of a node.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The directory of the plugin binaries.
    pub plugin_dir: PathBuf,
    /// The providers as in the configuration file.
    pub providers: Vec<Value>,
}

impl Config {
    /// Reads a CredentialProviderConfig file, or all such files of a directory.
    pub fn read(path: &Path, plugin_dir: &Path) -> Result<Config, String> {
        if !plugin_dir.is_dir() {
            return Err(format!("plugin binary directory {} did not exist", plugin_dir.display()));
        }
        let read_error =
            |error: std::io::Error| format!("unable to access path {:?}: {error}", path.display());
        let mut files = vec![path.to_owned()];
        if std::fs::metadata(path).map_err(read_error)?.is_dir() {
            let entries = std::fs::read_dir(path).map_err(read_error)?.flatten().map(|entry| entry.path());
            let is_config_file = |path: &PathBuf| {
                let extension = path.extension().unwrap_or_default();
                path.is_file() && ["json", "yaml", "yml"].iter().any(|known| extension == *known)
            };
            files = entries.filter(is_config_file).collect();
            files.sort();
        }
        let mut providers = Vec::new();
        for file in &files {
            let failed = |why: String| format!("error decoding config {:?}: {why}", file.display());
            let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
            let config: Value = schema::yaml::parse(&text).map_err(|error| failed(error.to_string()))?;
            let version =
                config["apiVersion"].as_str().and_then(|text| text.strip_prefix("kubelet.config.k8s.io/"));
            let is_known = version.is_some_and(|version| API_VERSIONS.contains(&version));
            if config["kind"] != "CredentialProviderConfig" || !is_known {
                return Err(failed(
                    "expected kind CredentialProviderConfig of kubelet.config.k8s.io/v1".to_owned(),
                ));
            }
            providers.extend(config["providers"].as_array().cloned().unwrap_or_default());
        }
        let message = match providers.is_empty() {
            true => Some("providers: Required value: at least 1 item in plugins is required".to_owned()),
            false => (0..providers.len()).find_map(|at| validate_provider(&providers[at], &providers[..at])),
        };
        if let Some(message) = message {
            return Err(format!("failed to validate credential provider config: {message}"));
        }
        for program in providers.iter().map(|provider| plugin_dir.join(text(provider, "name"))) {
            if !program.is_file() {
                return Err(format!("plugin binary executable {} did not exist", program.display()));
            }
        }
        Ok(Config { plugin_dir: plugin_dir.to_owned(), providers })
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn strings<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a str> {
    value[field].as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn duration(value: &Value) -> Option<Duration> {
    let text = value.as_str()?;
    let found: SignedDuration = if text == "0" { SignedDuration::ZERO } else { text.parse().ok()? };
    Duration::try_from(found).ok()
}

/// Validates a provider against those before it. Returns upstream's message for the first error.
fn validate_provider(provider: &Value, before: &[Value]) -> Option<String> {
    let (name, version) = (text(provider, "name"), text(provider, "apiVersion"));
    let attributes = &provider["tokenAttributes"];
    let needs_token = attributes.is_object();
    let account = &attributes["requireServiceAccount"];
    let invalid = |why: &str| format!("providers.name: Invalid value: {name:?}: provider name cannot {why}");
    let of_token = |field: &str, kind: &str| format!("providers.tokenAttributes.{field}: {kind}");
    let is_version =
        version.strip_prefix(API_GROUP_PREFIX).is_some_and(|version| API_VERSIONS.contains(&version));
    let is_first = !before.iter().any(|other| text(other, "name") == name);
    let required = strings(attributes, "requiredServiceAccountAnnotationKeys");
    let optional: Vec<&str> = strings(attributes, "optionalServiceAccountAnnotationKeys").collect();
    let both: Vec<&str> = required.filter(|key| optional.contains(key)).collect();
    let has_required = strings(attributes, "requiredServiceAccountAnnotationKeys").next().is_some();
    let cache = text(attributes, "cacheType");
    let rules: [(bool, String); 14] = [
        (!name.contains('/'), invalid("contain '/'")),
        (!name.contains(' '), invalid("contain spaces")),
        (name != ".", invalid("be '.'")),
        (name != ".." && !name.is_empty(), invalid("be '..'")),
        (is_first, format!("providers.name: Duplicate value: {name:?}")),
        (!version.is_empty(), "providers.apiVersion: Required value".to_owned()),
        (is_version, format!("providers.apiVersion: Unsupported value: {version:?}")),
        (
            strings(provider, "matchImages").next().is_some(),
            "providers.matchImages: Required value: at least 1 item in matchImages is required".to_owned(),
        ),
        (
            duration(&provider["defaultCacheDuration"]).is_some(),
            "providers.defaultCacheDuration: Required value: must be a duration such as 10m0s".to_owned(),
        ),
        (
            !needs_token || !text(attributes, "serviceAccountTokenAudience").is_empty(),
            of_token("serviceAccountTokenAudience", "Required value"),
        ),
        (!needs_token || account.is_boolean(), of_token("requireServiceAccount", "Required value")),
        (
            !(needs_token && has_required && *account == false),
            of_token(
                "requiredServiceAccountAnnotationKeys",
                "Forbidden: requireServiceAccount cannot be false when requiredServiceAccountAnnotationKeys is set",
            ),
        ),
        (
            both.is_empty(),
            format!(
                "providers.tokenAttributes: Invalid value: {both:?}: annotation keys cannot be both required and optional"
            ),
        ),
        (
            !needs_token || ["ServiceAccount", "Token"].contains(&cache),
            of_token(
                "cacheType",
                &format!("Unsupported value: {cache:?}: supported values: \"ServiceAccount\", \"Token\""),
            ),
        ),
    ];
    rules.into_iter().find(|(holds, _)| !holds).map(|(_, message)| message)
}

/// The credential providers of a node with their caches.
pub struct Providers {
    config: Config,
    /// One cache per provider.
    caches: Vec<Mutex<CredentialCache>>,
    /// Locked by provider and image while a plugin runs. Concurrent pulls then find its response in
    /// the cache.
    locks: KeyedMutex,
}

impl Providers {
    pub fn new(config: Config) -> Providers {
        let caches = config.providers.iter().map(|_| Mutex::default()).collect();
        Providers { config, caches, locks: KeyedMutex::default() }
    }

    /// The credentials for an image from all providers that match it.
    pub async fn keys(&self, ctx: &Ctx, pod: &Pod, image: &str) -> Vec<RegistryCredential> {
        let repository = pull_secrets::repository(image);
        let mut all = Vec::new();
        for (provider, cache) in self.config.providers.iter().zip(&self.caches) {
            if !strings(provider, "matchImages")
                .any(|place| pull_secrets::matches_repository(place, &repository))
            {
                continue;
            }
            let found = async {
                let Some(identity) = pull_identity(ctx, pod, &provider["tokenAttributes"]).await? else {
                    return Ok(());
                };
                let entries = self.fetch_credentials(provider, cache, &repository, &identity).await?;
                for (server, entry) in entries.as_object().into_iter().flatten() {
                    let (username, password) = (text(entry, "username"), text(entry, "password"));
                    let auth = AuthConfig {
                        username: username.to_owned(),
                        password: password.to_owned(),
                        ..AuthConfig::default()
                    };
                    all.push((
                        pull_secrets::normalize_registry(server),
                        RegistryCredential { auth, source: identity.account.clone() },
                    ));
                }
                Ok::<(), String>(())
            };
            if let Err(error) = found.await {
                let name = text(provider, "name");
                tracing::warn!(error, provider = name, image, pod = %pod.key(), "failed to get credentials from the credential provider");
            }
        }
        pull_secrets::matching_credentials(all, image)
    }

    /// The credentials by registry, from the cache or from the plugin.
    async fn fetch_credentials(
        &self,
        provider: &Value,
        cache: &Mutex<CredentialCache>,
        repository: &str,
        identity: &PullIdentity,
    ) -> Result<Value, String> {
        let key = |base: &str| json!([base, identity.cache_key]).to_string();
        let _guard = self.locks.lock(&format!("{} {}", text(provider, "name"), key(repository))).await;
        let registry = repository.split('/').next().unwrap_or_default();
        let now = Instant::now();
        {
            let mut cache = cache.lock();
            cache.retain(|_, (until, _)| *until >= now);
            let cached =
                [repository, registry, GLOBAL_CACHE_KEY].iter().find_map(|base| cache.get(&key(base)));
            if let Some((_, entries)) = cached {
                return Ok(entries.clone());
            }
        }
        let answer = self.exec_plugin(provider, repository, identity).await?;
        let entries = &answer["auth"];
        let is_token =
            |entry: &Value| !identity.token.is_empty() && text(entry, "password") == identity.token;
        if provider["tokenAttributes"]["cacheType"] != "Token"
            && entries.as_object().is_some_and(|entries| entries.values().any(is_token))
        {
            return Err(
                "credential provider plugin returned the service account token as the password which is not \
                        allowed when service account cache type is not set to 'Token'"
                    .to_owned(),
            );
        }
        let base = match text(&answer, "cacheKeyType") {
            "Image" => repository,
            "Registry" => registry,
            "Global" => GLOBAL_CACHE_KEY,
            other => {
                return Err(format!(
                    "credential provider plugin did not return a valid cacheKeyType: {other}"
                ));
            }
        };
        let ttl = match &answer["cacheDuration"] {
            Value::Null => duration(&provider["defaultCacheDuration"]),
            value => duration(value),
        };
        if let Some(until) = ttl.filter(|ttl| !ttl.is_zero()).and_then(|ttl| now.checked_add(ttl)) {
            cache.lock().insert(key(base), (until, entries.clone()));
        }
        Ok(entries.clone())
    }

    /// Runs the plugin and checks its response.
    async fn exec_plugin(
        &self,
        provider: &Value,
        repository: &str,
        identity: &PullIdentity,
    ) -> Result<Value, String> {
        let (name, version) = (text(provider, "name"), text(provider, "apiVersion"));
        let mut request =
            json!({"kind": "CredentialProviderRequest", "apiVersion": version, "image": repository});
        if !identity.token.is_empty() {
            request["serviceAccountToken"] = json!(identity.token);
            request["serviceAccountAnnotations"] = identity.annotations.clone().into();
        }
        let mut command = Command::new(self.config.plugin_dir.join(name));
        command.args(strings(provider, "args"));
        command.envs(
            provider["env"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|one| (text(one, "name"), text(one, "value"))),
        );
        // A timeout drops the child, which kills it.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let failed = |why: String| {
            format!("error execing credential provider plugin {name} for image {repository}: {why}")
        };
        let run = async {
            let mut child = command.spawn()?;
            if let Some(mut input) = child.stdin.take() {
                // A plugin that does not read its input is not an error.
                let _ = input.write_all(request.to_string().as_bytes()).await;
            }
            child.wait_with_output().await
        };
        let done = tokio::time::timeout(EXEC_TIMEOUT, run).await;
        let done = done.map_err(|_| failed("context deadline exceeded".to_owned()))?;
        let done = done.map_err(|error| failed(error.to_string()))?;
        if !done.status.success() {
            let stderr = String::from_utf8_lossy(&done.stderr).trim().to_owned();
            return Err(format!("{}: {stderr}", failed(done.status.to_string())));
        }
        let answer: Value = serde_json::from_slice(&done.stdout).unwrap_or_default();
        if answer["kind"] != "CredentialProviderResponse" {
            return Err("error decoding credential provider plugin response from stdout".to_owned());
        }
        match text(&answer, "apiVersion") {
            response_version if response_version == version => Ok(answer),
            response_version => Err(format!(
                "apiVersion from credential plugin response did not match expected apiVersion:{version}, actual apiVersion:{response_version}"
            )),
        }
    }
}

/// The identity that a plugin gets credentials for.
#[derive(Default)]
struct PullIdentity {
    /// The pod's service account, if the plugin receives its token.
    account: Option<PullSecret>,
    token: String,
    annotations: Map<String, Value>,
    /// The part of the cache key that separates identities.
    cache_key: Value,
}

/// The identity to pass to a provider. `None` if the provider does not apply to this pod.
async fn pull_identity(ctx: &Ctx, pod: &Pod, attributes: &Value) -> Result<Option<PullIdentity>, String> {
    let name = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref()).unwrap_or_default();
    if !attributes.is_object() || (name.is_empty() && attributes["requireServiceAccount"] == false) {
        return Ok(Some(PullIdentity::default()));
    }
    if name.is_empty() {
        return Ok(None);
    }
    let account = ctx.client.get::<ServiceAccount>(&Key::new(pod.namespace(), name)).await;
    let account = account.map_err(|error| format!("failed to get service account: {error}"))?;
    let mut annotations = Map::new();
    for (field, is_needed) in
        [("requiredServiceAccountAnnotationKeys", true), ("optionalServiceAccountAnnotationKeys", false)]
    {
        for key in strings(attributes, field) {
            match account.annotation(key) {
                Some(value) => drop(annotations.insert(key.to_owned(), json!(value))),
                // Upstream: a service account without a required annotation has opted out of this
                // provider.
                None if is_needed => return Ok(None),
                None => {}
            }
        }
    }
    let audience = text(attributes, "serviceAccountTokenAudience");
    let token = request_token(pod, Some(audience), 3600, ctx)
        .await
        .map_err(|why| format!("service account token: {why}"))?;
    let own = (attributes["cacheType"] == "Token").then(|| image_pull_records::sha256_hex(&token));
    let from = PullSecret::account(pod.namespace(), name, account.uid());
    let cache_key = json!([from.namespace, from.name, from.uid, annotations, own]);
    Ok(Some(PullIdentity { account: Some(from), token, annotations, cache_key }))
}

#[cfg(test)]
mod tests;

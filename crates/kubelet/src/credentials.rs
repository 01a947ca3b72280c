//! Credentials for registries from programs on the node (upstream's credential providers): which of them is asked for
//! which image, what it is told, and how long its answer is good.
//!
//! A provider is kept as its configuration has it. It reads a CredentialProviderRequest and writes a
//! CredentialProviderResponse, which is never shown to anybody: it may hold passwords even where it is wrong.

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

use crate::busy::Busy;
use crate::pull_secrets::{self, Shown};
use crate::pulled::{self, PullSecret};
use crate::volumes::token;

const API_VERSIONS: [&str; 3] = ["v1", "v1alpha1", "v1beta1"];
const GROUP: &str = "credentialprovider.kubelet.k8s.io/";
/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// What an answer for all images is kept under; no image has such a name.
const ALL: &str = "<global>";

/// What was said before, by for what, and until when it is good.
type Known = HashMap<String, (Instant, Value)>;

/// The providers of a node.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Where the programs are.
    pub programs: PathBuf,
    /// Each as the file of the configuration has it.
    pub providers: Vec<Value>,
}

impl Config {
    /// Reads a CredentialProviderConfig, or all that are in a directory.
    pub fn read(path: &Path, programs: &Path) -> Result<Config, String> {
        if !programs.is_dir() {
            return Err(format!("plugin binary directory {} did not exist", programs.display()));
        }
        let unreadable =
            |error: std::io::Error| format!("unable to access path {:?}: {error}", path.display());
        let mut files = vec![path.to_owned()];
        if std::fs::metadata(path).map_err(unreadable)?.is_dir() {
            let entries = std::fs::read_dir(path).map_err(unreadable)?.flatten().map(|entry| entry.path());
            let is_meant = |path: &PathBuf| {
                let kind = path.extension().unwrap_or_default();
                path.is_file() && ["json", "yaml", "yml"].iter().any(|known| kind == *known)
            };
            files = entries.filter(is_meant).collect();
            files.sort();
        }
        let mut providers = Vec::new();
        for file in &files {
            let failed = |why: String| format!("error decoding config {:?}: {why}", file.display());
            let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
            let config: Value = schema::yaml::value(&text).map_err(|error| failed(error.to_string()))?;
            let version =
                config["apiVersion"].as_str().and_then(|text| text.strip_prefix("kubelet.config.k8s.io/"));
            let is_known = version.is_some_and(|version| API_VERSIONS.contains(&version));
            if config["kind"] != "CredentialProviderConfig" || !is_known {
                return Err(failed(
                    "this is no CredentialProviderConfig of kubelet.config.k8s.io/v1".to_owned(),
                ));
            }
            providers.extend(config["providers"].as_array().cloned().unwrap_or_default());
        }
        let problem = match providers.is_empty() {
            true => Some("providers: Required value: at least 1 item in plugins is required".to_owned()),
            false => (0..providers.len()).find_map(|at| problem(&providers[at], &providers[..at])),
        };
        if let Some(problem) = problem {
            return Err(format!("failed to validate credential provider config: {problem}"));
        }
        for program in providers.iter().map(|provider| programs.join(text(provider, "name"))) {
            if !program.is_file() {
                return Err(format!("plugin binary executable {} did not exist", program.display()));
            }
        }
        Ok(Config { programs: programs.to_owned(), providers })
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn texts<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a str> {
    value[field].as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn duration(value: &Value) -> Option<Duration> {
    let text = value.as_str()?;
    let found: SignedDuration = if text == "0" { SignedDuration::ZERO } else { text.parse().ok()? };
    Duration::try_from(found).ok()
}

/// What is wrong with a provider that comes after these, in upstream's words.
fn problem(provider: &Value, before: &[Value]) -> Option<String> {
    let (name, version) = (text(provider, "name"), text(provider, "apiVersion"));
    let attributes = &provider["tokenAttributes"];
    let asks = attributes.is_object();
    let account = &attributes["requireServiceAccount"];
    let invalid = |why: &str| format!("providers.name: Invalid value: {name:?}: provider name cannot {why}");
    let of_token = |field: &str, kind: &str| format!("providers.tokenAttributes.{field}: {kind}");
    let is_version = version.strip_prefix(GROUP).is_some_and(|version| API_VERSIONS.contains(&version));
    let is_first = !before.iter().any(|other| text(other, "name") == name);
    let needs = texts(attributes, "requiredServiceAccountAnnotationKeys");
    let takes: Vec<&str> = texts(attributes, "optionalServiceAccountAnnotationKeys").collect();
    let both: Vec<&str> = needs.filter(|key| takes.contains(key)).collect();
    let has_needs = texts(attributes, "requiredServiceAccountAnnotationKeys").next().is_some();
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
            texts(provider, "matchImages").next().is_some(),
            "providers.matchImages: Required value: at least 1 item in matchImages is required".to_owned(),
        ),
        (
            duration(&provider["defaultCacheDuration"]).is_some(),
            "providers.defaultCacheDuration: Required value: a time such as 10m0s".to_owned(),
        ),
        (
            !asks || !text(attributes, "serviceAccountTokenAudience").is_empty(),
            of_token("serviceAccountTokenAudience", "Required value"),
        ),
        (!asks || account.is_boolean(), of_token("requireServiceAccount", "Required value")),
        (
            !(asks && has_needs && *account == false),
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
            !asks || ["ServiceAccount", "Token"].contains(&cache),
            of_token(
                "cacheType",
                &format!("Unsupported value: {cache:?}: supported values: \"ServiceAccount\", \"Token\""),
            ),
        ),
    ];
    rules.into_iter().find(|(holds, _)| !holds).map(|(_, problem)| problem)
}

/// The providers of a node, and what they have said.
pub struct Providers {
    config: Config,
    /// By provider.
    known: Vec<Mutex<Known>>,
    /// Held while one is asked for an image: the answer may be the one that others wait for.
    asked: Busy,
}

impl Providers {
    pub fn new(config: Config) -> Providers {
        let known = config.providers.iter().map(|_| Mutex::default()).collect();
        Providers { config, known, asked: Busy::default() }
    }

    /// What to show to the image's registry, by all providers that are for it.
    pub async fn keys(&self, ctx: &Ctx, pod: &Pod, image: &str) -> Vec<Shown> {
        let repository = pull_secrets::repository(image);
        let mut all = Vec::new();
        for (provider, known) in self.config.providers.iter().zip(&self.known) {
            if !texts(provider, "matchImages").any(|place| pull_secrets::is_for(place, &repository)) {
                continue;
            }
            let found = async {
                let Some(asker) = asker(ctx, pod, &provider["tokenAttributes"]).await? else { return Ok(()) };
                let auths = self.ask(provider, known, &repository, &asker).await?;
                for (server, entry) in auths.as_object().into_iter().flatten() {
                    let (username, password) = (text(entry, "username"), text(entry, "password"));
                    let auth = AuthConfig {
                        username: username.to_owned(),
                        password: password.to_owned(),
                        ..AuthConfig::default()
                    };
                    all.push((pull_secrets::place(server), Shown { auth, from: asker.account.clone() }));
                }
                Ok::<(), String>(())
            };
            if let Err(error) = found.await {
                let name = text(provider, "name");
                tracing::warn!(error, provider = name, image, pod = %pod.key(), "no credentials for an image");
            }
        }
        pull_secrets::chosen(all, image)
    }

    /// The credentials by registry, as said before or now.
    async fn ask(
        &self,
        provider: &Value,
        known: &Mutex<Known>,
        repository: &str,
        asker: &Asker,
    ) -> Result<Value, String> {
        let key = |base: &str| json!([base, asker.known_by]).to_string();
        let _alone = self.asked.alone(&format!("{} {}", text(provider, "name"), key(repository))).await;
        let registry = repository.split('/').next().unwrap_or_default();
        let now = Instant::now();
        {
            let mut known = known.lock();
            known.retain(|_, (until, _)| *until >= now);
            let told = [repository, registry, ALL].iter().find_map(|base| known.get(&key(base)));
            if let Some((_, auths)) = told {
                return Ok(auths.clone());
            }
        }
        let answer = self.run(provider, repository, asker).await?;
        let auths = &answer["auth"];
        let is_token = |entry: &Value| !asker.token.is_empty() && text(entry, "password") == asker.token;
        if provider["tokenAttributes"]["cacheType"] != "Token"
            && auths.as_object().is_some_and(|auths| auths.values().any(is_token))
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
            "Global" => ALL,
            other => {
                return Err(format!(
                    "credential provider plugin did not return a valid cacheKeyType: {other}"
                ));
            }
        };
        let lasts = match &answer["cacheDuration"] {
            Value::Null => duration(&provider["defaultCacheDuration"]),
            told => duration(told),
        };
        if let Some(until) = lasts.filter(|lasts| !lasts.is_zero()).and_then(|lasts| now.checked_add(lasts)) {
            known.lock().insert(key(base), (until, auths.clone()));
        }
        Ok(auths.clone())
    }

    /// Has the program answer.
    async fn run(&self, provider: &Value, repository: &str, asker: &Asker) -> Result<Value, String> {
        let (name, version) = (text(provider, "name"), text(provider, "apiVersion"));
        let mut request =
            json!({"kind": "CredentialProviderRequest", "apiVersion": version, "image": repository});
        if !asker.token.is_empty() {
            request["serviceAccountToken"] = json!(asker.token);
            request["serviceAccountAnnotations"] = asker.annotations.clone().into();
        }
        let mut command = Command::new(self.config.programs.join(name));
        command.args(texts(provider, "args"));
        command.envs(
            provider["env"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|one| (text(one, "name"), text(one, "value"))),
        );
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let failed = |why: String| {
            format!("error execing credential provider plugin {name} for image {repository}: {why}")
        };
        let run = async {
            let mut child = command.spawn()?;
            if let Some(mut input) = child.stdin.take() {
                // Whoever needs to know nothing need not listen.
                let _ = input.write_all(request.to_string().as_bytes()).await;
            }
            child.wait_with_output().await
        };
        let done = tokio::time::timeout(PATIENCE, run).await;
        let done = done.map_err(|_| failed("context deadline exceeded".to_owned()))?;
        let done = done.map_err(|error| failed(error.to_string()))?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
            return Err(format!("{}: {said}", failed(done.status.to_string())));
        }
        let answer: Value = serde_json::from_slice(&done.stdout).unwrap_or_default();
        if answer["kind"] != "CredentialProviderResponse" {
            return Err("error decoding credential provider plugin response from stdout".to_owned());
        }
        match text(&answer, "apiVersion") {
            told if told == version => Ok(answer),
            told => Err(format!(
                "apiVersion from credential plugin response did not match expected apiVersion:{version}, actual apiVersion:{told}"
            )),
        }
    }
}

/// For whom a provider is asked.
#[derive(Default)]
struct Asker {
    /// The pod's service account, where it is told of it.
    account: Option<PullSecret>,
    token: String,
    annotations: Map<String, Value>,
    /// Answers are good for others that have the same.
    known_by: Value,
}

/// What a provider is told of the pod; `None` where it is not to be asked at all.
async fn asker(ctx: &Ctx, pod: &Pod, attributes: &Value) -> Result<Option<Asker>, String> {
    let name = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref()).unwrap_or_default();
    if !attributes.is_object() || (name.is_empty() && attributes["requireServiceAccount"] == false) {
        return Ok(Some(Asker::default()));
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
        for key in texts(attributes, field) {
            match account.annotation(key) {
                Some(value) => drop(annotations.insert(key.to_owned(), json!(value))),
                // By that an account says that it does not want to be used here.
                None if is_needed => return Ok(None),
                None => {}
            }
        }
    }
    let audience = text(attributes, "serviceAccountTokenAudience");
    let token =
        token(pod, Some(audience), 3600, ctx).await.map_err(|why| format!("service account token: {why}"))?;
    let own = (attributes["cacheType"] == "Token").then(|| pulled::hex(&token));
    let from = PullSecret::account(pod.namespace(), name, account.uid());
    let known_by = json!([from.namespace, from.name, from.uid, annotations, own]);
    Ok(Some(Asker { account: Some(from), token, annotations, known_by }))
}

#[cfg(test)]
mod tests;

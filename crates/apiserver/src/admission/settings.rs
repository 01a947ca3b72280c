//! The configuration file of `--admission-control-config-file`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::json::JsonExt as _;

use serde::Deserialize;
use serde_json::Value;

use super::{event_rates, pod_security};
use crate::https::AuthInfoResolver;

/// The configuration of the plugins; defaults are upstream's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `tolerationSeconds` that DefaultTolerationSeconds adds for not-ready and for unreachable
    /// nodes.
    pub toleration_seconds: [i64; 2],
    pub(super) pod_security: pod_security::Settings,
    pub(super) event_rates: Vec<event_rates::Limit>,
    /// Client credentials for mutating and for validating webhooks.
    pub(super) webhook_users: [Option<Arc<AuthInfoResolver>>; 2],
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            toleration_seconds: [300, 300],
            pod_security: Default::default(),
            event_rates: Vec::new(),
            webhook_users: [None, None],
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a valid admission configuration: {reason}")]
    Invalid { path: PathBuf, reason: String },
    #[error("invalid configuration of admission plugin {plugin:?} in {path}: {reason}")]
    Plugin { path: PathBuf, plugin: String, reason: String },
}

/// `AdmissionConfiguration` as in the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    #[serde(default)]
    plugins: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    /// Path of a file with the configuration, relative to this file.
    path: Option<PathBuf>,
    /// Inline configuration; takes precedence over `path`.
    configuration: Option<Value>,
}

impl Settings {
    /// Reads the file and the files it references.
    pub fn load(path: &Path) -> Result<Settings, SettingsError> {
        let invalid = |reason: String| SettingsError::Invalid { path: path.to_owned(), reason };
        let file: File = Deserialize::deserialize(read(path)?).map_err(|error| invalid(error.to_string()))?;
        let known = matches!(
            file.api_version.as_str(),
            "apiserver.config.k8s.io/v1" | "apiserver.config.k8s.io/v1alpha1" | "apiserver.k8s.io/v1alpha1"
        );
        if !known || file.kind != "AdmissionConfiguration" {
            return Err(invalid(
                "expected an AdmissionConfiguration of apiserver.config.k8s.io/v1".to_owned(),
            ));
        }
        let mut settings = Settings::default();
        for entry in file.plugins {
            let value = match (entry.configuration, entry.path) {
                (Some(value), _) => value,
                (None, Some(own)) if !own.as_os_str().is_empty() => {
                    read(&path.parent().unwrap_or(Path::new("")).join(own))?
                }
                _ => continue,
            };
            settings.set(&entry.name, &value).map_err(|reason| SettingsError::Plugin {
                path: path.to_owned(),
                plugin: entry.name,
                reason,
            })?;
        }
        Ok(settings)
    }

    fn set(&mut self, plugin: &str, value: &Value) -> Result<(), String> {
        match plugin {
            "PodSecurity" => self.pod_security = pod_security::Settings::read(value)?,
            "EventRateLimit" => self.event_rates = event_rates::read(value)?,
            "MutatingAdmissionWebhook" => self.webhook_users[0] = webhook_users(value)?,
            "ValidatingAdmissionWebhook" => self.webhook_users[1] = webhook_users(value)?,
            _ => return Err("this plugin takes no configuration".to_owned()),
        }
        Ok(())
    }
}

fn webhook_users(value: &Value) -> Result<Option<Arc<AuthInfoResolver>>, String> {
    let kind = (value.text("apiVersion"), value.text("kind"));
    let known = [
        ("apiserver.config.k8s.io/v1", "WebhookAdmissionConfiguration"),
        ("apiserver.config.k8s.io/v1alpha1", "WebhookAdmission"),
    ];
    if !known.contains(&kind) {
        return Err("expected a WebhookAdmissionConfiguration of apiserver.config.k8s.io/v1".to_owned());
    }
    if let Some((field, _)) =
        value.as_object().into_iter().flatten().find(|(field, _)| !WEBHOOK_FIELDS.contains(&field.as_str()))
    {
        return Err(format!("unknown field {field:?}"));
    }
    match value.text("kubeConfigFile") {
        "" => Ok(None),
        path if !path.starts_with('/') => {
            Err(format!("kubeConfigFile: Invalid value: {path:?}: must be an absolute file path"))
        }
        path => {
            let users = AuthInfoResolver::load(Path::new(path));
            users.map(|users| Some(Arc::new(users))).map_err(|error| error.to_string())
        }
    }
}

const WEBHOOK_FIELDS: [&str; 3] = ["apiVersion", "kind", "kubeConfigFile"];

fn read(path: &Path) -> Result<Value, SettingsError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| SettingsError::Read { path: path.to_owned(), source })?;
    schema::yaml::parse(&text)
        .map_err(|error| SettingsError::Invalid { path: path.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG_HEADER: &str =
        "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n";
    const POLICY: &str =
        "apiVersion: pod-security.admission.config.k8s.io/v1\nkind: PodSecurityConfiguration\n";

    #[track_caller]
    fn check(text: &str, expected: Result<bool, &str>) {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("own.yaml"), format!("{POLICY}defaults: {{enforce: baseline}}\n"))
            .expect("a file");
        let path = dir.path().join("admission.yaml");
        std::fs::write(&path, text).expect("a file");
        // The result is whether any setting differs from the default.
        let found = Settings::load(&path).map(|settings| settings != Settings::default());
        let found = found.map_err(|error| error.to_string().replace(&path.display().to_string(), "FILE"));
        assert_eq!(found.as_ref().map(|set| *set).map_err(String::as_str), expected, "{text}");
    }

    #[test]
    fn configuration_file_sets_plugins() {
        check("apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\n", Ok(false));
        check(&format!("{CONFIG_HEADER}- name: PodSecurity\n  path: own.yaml\n"), Ok(true));
        check(&format!("{CONFIG_HEADER}- name: PodSecurity\n  path: ''\n"), Ok(false));
        let inline = POLICY.replace('\n', "\n    ");
        check(
            &format!(
                "{CONFIG_HEADER}- name: PodSecurity\n  configuration:\n    {inline}defaults: {{warn: restricted}}\n"
            ),
            Ok(true),
        );
        check(
            &format!(
                "{CONFIG_HEADER}- name: PodSecurity\n  configuration:\n    {inline}defaults: {{warn: strict, enforce-version: v2, notify: x}}\n    exemptions: {{usernames: [''], namespaces: [a, a], runtimeClasses: [B]}}\n"
            ),
            Err(
                r#"invalid configuration of admission plugin "PodSecurity" in FILE: [defaults.enforce-version: Invalid value: "v2": must be "latest" or "v1.x", defaults.warn: Invalid value: "strict": must be one of privileged, baseline, restricted, defaults.notify: Forbidden: unknown field, exemptions.namespaces[1]: Duplicate value: "a", exemptions.runtimeClasses[0]: Invalid value: "B": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*'), exemptions.usernames[0]: Invalid value: "": username must not be empty]"#,
            ),
        );
        check(
            &format!("{CONFIG_HEADER}- name: Priority\n  configuration: {{}}\n"),
            Err(
                r#"invalid configuration of admission plugin "Priority" in FILE: this plugin takes no configuration"#,
            ),
        );
        let webhook = |file: &str| {
            format!(
                "{CONFIG_HEADER}- name: ValidatingAdmissionWebhook\n  configuration: {{apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmissionConfiguration, kubeConfigFile: {file}}}\n"
            )
        };
        check(&webhook("''"), Ok(false));
        check(
            &webhook("users.yaml"),
            Err(
                r#"invalid configuration of admission plugin "ValidatingAdmissionWebhook" in FILE: kubeConfigFile: Invalid value: "users.yaml": must be an absolute file path"#,
            ),
        );
        check(
            &webhook("/nowhere/users.yaml"),
            Err(
                r#"invalid configuration of admission plugin "ValidatingAdmissionWebhook" in FILE: cannot read /nowhere/users.yaml"#,
            ),
        );
        check(
            "apiVersion: v1\nkind: Pod\n",
            Err(
                "FILE is not a valid admission configuration: expected an AdmissionConfiguration of apiserver.config.k8s.io/v1",
            ),
        );
    }
}

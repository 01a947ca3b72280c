//! AuthorizationConfiguration: the authorizer chain with its webhooks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::field::quote;
use serde::Deserialize;

use super::{AuthorizerChain, Error, Step, Webhook, WebhookOptions, conditions};

const VERSIONS: [&str; 3] =
    ["apiserver.config.k8s.io/v1", "apiserver.config.k8s.io/v1beta1", "apiserver.config.k8s.io/v1alpha1"];
const MAX_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Configuration {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    authorizers: Vec<Authorizer>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Authorizer {
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    name: String,
    webhook: Option<Settings>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Settings {
    #[serde(default, rename = "authorizedTTL")]
    authorized_ttl: String,
    #[serde(default = "yes")]
    cache_authorized_requests: bool,
    #[serde(default, rename = "unauthorizedTTL")]
    unauthorized_ttl: String,
    #[serde(default = "yes")]
    cache_unauthorized_requests: bool,
    #[serde(default)]
    timeout: String,
    #[serde(default)]
    subject_access_review_version: String,
    #[serde(default)]
    #[expect(dead_code, reason = "there is only one version")]
    match_condition_subject_access_review_version: String,
    #[serde(default)]
    failure_policy: String,
    connection_info: Connection,
    #[serde(default)]
    match_conditions: Vec<Condition>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Connection {
    #[serde(default, rename = "type")]
    kind: String,
    kube_config_file: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Condition {
    expression: String,
}

fn yes() -> bool {
    true
}

pub fn read(path: &Path) -> Result<AuthorizerChain, Error> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|source| Error::Read { path: path.to_owned(), source })?;
    chain(path, &text)
}

/// Builds the chain from the text of the configuration file at `path`.
pub fn chain(path: &Path, text: &str) -> Result<AuthorizerChain, Error> {
    let bad = |reason: String| Error::Configuration { path: path.to_owned(), reason };
    let specs = parse(text).map_err(bad)?;
    let steps = specs.into_iter().map(|step| {
        Ok(match step {
            AuthorizerSpec::Node => Step::Node,
            AuthorizerSpec::Rbac => Step::Rbac,
            AuthorizerSpec::Webhook(options) => Step::Webhook(Box::new(Webhook::new(&options)?)),
        })
    });
    let chain = AuthorizerChain { steps: steps.collect::<Result<_, Error>>()? };
    chain.validate().map_err(bad)
}

#[derive(Debug)]
pub enum AuthorizerSpec {
    Node,
    Rbac,
    Webhook(WebhookOptions),
}

/// Validates with upstream's messages.
pub fn parse(text: &str) -> Result<Vec<AuthorizerSpec>, String> {
    let configuration: Configuration = schema::yaml::from_str(text).map_err(|error| error.to_string())?;
    if configuration.kind != "AuthorizationConfiguration"
        || !VERSIONS.contains(&configuration.api_version.as_str())
    {
        return Err(format!("expected AuthorizationConfiguration of {}", VERSIONS[0]));
    }
    let mut errors = Vec::new();
    if configuration.authorizers.is_empty() {
        errors.push("authorizers: Required value: at least one authorization mode must be defined".into());
    }
    let mut names = BTreeSet::new();
    let mut specs = Vec::new();
    for (i, authorizer) in configuration.authorizers.into_iter().enumerate() {
        let at = format!("authorizers[{i}]");
        if authorizer.name.is_empty() {
            errors.push(format!("{at}.name: Required value"));
        } else if !names.insert(authorizer.name.clone()) {
            errors.push(format!("{at}.name: Duplicate value: {}", quote(&authorizer.name)));
        }
        match (authorizer.kind.as_str(), authorizer.webhook) {
            ("", _) => errors.push(format!("{at}.type: Required value")),
            ("Webhook", Some(settings)) => {
                let options = settings.options(&at, authorizer.name, &mut errors);
                specs.extend(options.map(AuthorizerSpec::Webhook));
            }
            ("Webhook", None) => {
                errors.push(format!("{at}.webhook: Required value: required when type=Webhook"));
            }
            ("Node", None) => specs.push(AuthorizerSpec::Node),
            ("RBAC", None) => specs.push(AuthorizerSpec::Rbac),
            ("Node" | "RBAC", Some(_)) => errors.push(format!(
                "{at}.webhook: Invalid value: \"non-null\": may only be specified when type=Webhook"
            )),
            (other, _) => errors.push(format!(
                "{at}.type: Unsupported value: {}: supported values: \"Node\", \"RBAC\", \"Webhook\"",
                quote(other)
            )),
        }
    }
    if errors.is_empty() { Ok(specs) } else { Err(crate::rbac::aggregate_errors(&errors)) }
}

impl Settings {
    fn options(self, at: &str, name: String, errors: &mut Vec<String>) -> Option<WebhookOptions> {
        let before = errors.len();
        let mut duration = |field: &str, text: &str, max: Option<Duration>| {
            let time = api::time::parse_duration(text).ok().and_then(|time| Duration::try_from(time).ok());
            let range = if max.is_some() { "must be > 0s and <= 30s" } else { "must be > 0s" };
            match time {
                _ if text.is_empty() => errors.push(format!("{at}.{field}: Required value")),
                Some(time) if !time.is_zero() && max.is_none_or(|max| time <= max) => return time,
                _ => errors.push(format!("{at}.{field}: Invalid value: {}: {range}", quote(text))),
            }
            Duration::ZERO
        };
        let timeout = duration("timeout", &self.timeout, Some(MAX_TIMEOUT));
        let authorized = duration("authorizedTTL", &self.authorized_ttl, None);
        let unauthorized = duration("unauthorizedTTL", &self.unauthorized_ttl, None);
        let mut one_of = |field: &str, value: &str, values: &[&str]| {
            if value.is_empty() {
                errors.push(format!("{at}.{field}: Required value"));
            } else if !values.contains(&value) {
                let values: Vec<String> = values.iter().map(|value| quote(value)).collect();
                errors.push(format!(
                    "{at}.{field}: Unsupported value: {}: supported values: {}",
                    quote(value),
                    values.join(", ")
                ));
            }
        };
        one_of("subjectAccessReviewVersion", &self.subject_access_review_version, &["v1", "v1beta1"]);
        one_of("failurePolicy", &self.failure_policy, &["NoOpinion", "Deny"]);
        one_of("connectionInfo.type", &self.connection_info.kind, &["KubeConfigFile"]);
        let field = "connectionInfo.kubeConfigFile";
        let kubeconfig = self.connection_info.kube_config_file.unwrap_or_default();
        if kubeconfig.as_os_str().is_empty() {
            errors.push(format!("{at}.{field}: Required value"));
        } else if !kubeconfig.is_absolute() {
            let path_text = quote(&kubeconfig.display().to_string());
            errors.push(format!("{at}.{field}: Invalid value: {path_text}: must be an absolute path"));
        }
        for (i, condition) in self.match_conditions.iter().enumerate() {
            if let Err(reason) = conditions::compile(&condition.expression) {
                let expression = quote(&condition.expression);
                errors.push(format!(
                    "{at}.matchConditions[{i}].expression: Invalid value: {expression}: {reason}"
                ));
            }
        }
        let ttl = |time, keep| if keep { time } else { Duration::ZERO };
        (errors.len() == before).then_some(WebhookOptions {
            name,
            kubeconfig,
            version: self.subject_access_review_version,
            authorized: ttl(authorized, self.cache_authorized_requests),
            unauthorized: ttl(unauthorized, self.cache_unauthorized_requests),
            timeout,
            conditions: self.match_conditions.into_iter().map(|condition| condition.expression).collect(),
            deny_on_failure: self.failure_policy == "Deny",
        })
    }
}

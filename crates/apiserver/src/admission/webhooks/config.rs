//! Compiled webhook configurations.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use api::json::JsonExt as _;
use api::selector::LabelSelector;
use serde_json::Value;

use crate::admission::expressions::MatchCondition;
use crate::https::AuthInfoResolver;
use crate::webhook_client::WebhookClient;

/// One webhook.
pub struct Hook {
    pub name: String,
    /// The name of the configuration object.
    pub configuration: String,
    /// Unique among all webhooks of its type: configuration, name and index.
    pub uid: String,
    pub rules: Vec<Rule>,
    /// `matchPolicy: Exact`.
    pub exact: bool,
    pub namespaces: LabelSelector,
    pub objects: LabelSelector,
    pub conditions: Vec<MatchCondition>,
    pub fails_open: bool,
    pub timeout: Duration,
    /// Whether it has side effects on dry run; `None` if `sideEffects` is not set.
    pub side_effects: Option<bool>,
    pub reinvoke: bool,
    /// The AdmissionReview version to send; `None` if it lists no supported version.
    pub version: Option<ReviewVersion>,
    client_config: Value,
    webhook_client: OnceLock<Result<WebhookClient, String>>,
}

impl Hook {
    /// The client, created on first use.
    pub fn webhook_client(&self, users: Option<&AuthInfoResolver>) -> Result<&WebhookClient, &String> {
        self.webhook_client.get_or_init(|| WebhookClient::new(&self.client_config, users)).as_ref()
    }
}

/// One of `rules`: the requests to call the webhook for.
#[derive(Debug, Default)]
pub struct Rule {
    pub operations: Vec<String>,
    pub groups: Vec<String>,
    pub versions: Vec<String>,
    /// Resource and subresource.
    pub resources: Vec<(String, String)>,
    pub scope: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReviewVersion {
    V1,
    V1Beta1,
}

impl ReviewVersion {
    pub fn name(self) -> &'static str {
        match self {
            ReviewVersion::V1 => "admission.k8s.io/v1",
            ReviewVersion::V1Beta1 => "admission.k8s.io/v1beta1",
        }
    }
}

/// The webhooks of a configuration, in order.
pub fn compile(configuration: &Value) -> Vec<Arc<Hook>> {
    let name = configuration.at("metadata").text("name");
    let mut name_counts: HashMap<&str, usize> = HashMap::new();
    let hooks = configuration.items("webhooks").iter().map(|hook| {
        let count = name_counts.entry(hook.text("name")).or_default();
        *count += 1;
        Arc::new(self::hook(name, *count - 1, hook))
    });
    hooks.collect()
}

fn hook(configuration: &str, count: usize, hook: &Value) -> Hook {
    let name = hook.text("name");
    // Validation has checked the selectors; one that cannot be parsed selects nothing.
    let selector = |field: &str| match hook.at(field) {
        Value::Null => LabelSelector::everything(),
        given => LabelSelector::from_value(given).unwrap_or_else(|_| LabelSelector::nothing()),
    };
    let conditions = hook
        .items("matchConditions")
        .iter()
        .map(|condition| MatchCondition::new(condition.text("expression")));
    let version = hook.items("admissionReviewVersions").iter().find_map(|version| match version.as_str() {
        Some("v1") => Some(ReviewVersion::V1),
        Some("v1beta1") => Some(ReviewVersion::V1Beta1),
        _ => None,
    });
    let seconds = hook.int("timeoutSeconds").and_then(|seconds| u64::try_from(seconds).ok());
    Hook {
        name: name.to_owned(),
        configuration: configuration.to_owned(),
        uid: format!("{configuration}/{name}/{count}"),
        rules: hook.items("rules").iter().map(rule).collect(),
        exact: hook.text("matchPolicy") == "Exact",
        namespaces: selector("namespaceSelector"),
        objects: selector("objectSelector"),
        conditions: conditions.collect(),
        fails_open: hook.text("failurePolicy") == "Ignore",
        timeout: Duration::from_secs(seconds.unwrap_or(10)),
        side_effects: hook
            .at("sideEffects")
            .as_str()
            .map(|side_effects| !matches!(side_effects, "None" | "NoneOnDryRun")),
        reinvoke: hook.text("reinvocationPolicy") == "IfNeeded",
        version,
        client_config: hook.at("clientConfig").clone(),
        webhook_client: OnceLock::new(),
    }
}

pub fn rule(rule: &Value) -> Rule {
    let string_list = |field: &str| {
        rule.items(field).iter().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>()
    };
    let resources = string_list("resources").into_iter().map(|text| match text.split_once('/') {
        Some((resource, subresource)) => (resource.to_owned(), subresource.to_owned()),
        None => (text, String::new()),
    });
    Rule {
        operations: string_list("operations"),
        groups: string_list("apiGroups"),
        versions: string_list("apiVersions"),
        resources: resources.collect(),
        scope: rule.text("scope").to_owned(),
    }
}

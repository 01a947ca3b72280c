//! A configuration's webhooks, ready to be asked.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use api::json::Json as _;
use api::selector::LabelSelector;
use serde_json::Value;

use crate::admission::expressions::Condition;
use crate::callout::Callout;
use crate::https::Users;

/// One webhook.
pub struct Hook {
    pub name: String,
    /// The name of its configuration.
    pub configuration: String,
    /// What tells it from all others of its kind.
    pub uid: String,
    pub rules: Vec<Rule>,
    /// Only the very version that was asked for counts.
    pub exact: bool,
    pub namespaces: LabelSelector,
    pub objects: LabelSelector,
    pub conditions: Vec<Condition>,
    pub fails_open: bool,
    pub timeout: Duration,
    /// `None`: it does not say whether it has any.
    pub side_effects: Option<bool>,
    pub reinvoke: bool,
    /// The version of AdmissionReview it is asked in; `None` where it knows none that we know.
    pub version: Option<Version>,
    client: Value,
    callout: OnceLock<Result<Callout, String>>,
}

impl Hook {
    /// How to call it, which is worked out the first time.
    pub fn callout(&self, users: Option<&Users>) -> Result<&Callout, &String> {
        self.callout.get_or_init(|| Callout::new(&self.client, users)).as_ref()
    }
}

/// What a webhook wants to be asked about.
#[derive(Debug, Default)]
pub struct Rule {
    pub operations: Vec<String>,
    pub groups: Vec<String>,
    pub versions: Vec<String>,
    /// Resources and their subresources.
    pub resources: Vec<(String, String)>,
    pub scope: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1,
    V1Beta1,
}

impl Version {
    pub fn name(self) -> &'static str {
        match self {
            Version::V1 => "admission.k8s.io/v1",
            Version::V1Beta1 => "admission.k8s.io/v1beta1",
        }
    }
}

/// The webhooks of a configuration, in their order.
pub fn compile(configuration: &Value) -> Vec<Arc<Hook>> {
    let name = configuration.at("metadata").text("name");
    let mut same: HashMap<&str, usize> = HashMap::new();
    let hooks = configuration.items("webhooks").iter().map(|hook| {
        let count = same.entry(hook.text("name")).or_default();
        *count += 1;
        Arc::new(self::hook(name, *count - 1, hook))
    });
    hooks.collect()
}

fn hook(configuration: &str, count: usize, hook: &Value) -> Hook {
    let name = hook.text("name");
    // Rules of the kind have checked selectors; one that cannot be read selects nothing.
    let selector = |field: &str| match hook.at(field) {
        Value::Null => LabelSelector::everything(),
        given => LabelSelector::from_value(given).unwrap_or_else(|_| LabelSelector::nothing()),
    };
    let conditions =
        hook.items("matchConditions").iter().map(|condition| Condition::new(condition.text("expression")));
    let version = hook.items("admissionReviewVersions").iter().find_map(|version| match version.as_str() {
        Some("v1") => Some(Version::V1),
        Some("v1beta1") => Some(Version::V1Beta1),
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
        side_effects: hook.at("sideEffects").as_str().map(|said| !matches!(said, "None" | "NoneOnDryRun")),
        reinvoke: hook.text("reinvocationPolicy") == "IfNeeded",
        version,
        client: hook.at("clientConfig").clone(),
        callout: OnceLock::new(),
    }
}

pub fn rule(rule: &Value) -> Rule {
    let texts = |field: &str| {
        rule.items(field).iter().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<_>>()
    };
    let resources = texts("resources").into_iter().map(|text| match text.split_once('/') {
        Some((resource, subresource)) => (resource.to_owned(), subresource.to_owned()),
        None => (text, String::new()),
    });
    Rule {
        operations: texts("operations"),
        groups: texts("apiGroups"),
        versions: texts("apiVersions"),
        resources: resources.collect(),
        scope: rule.text("scope").to_owned(),
    }
}

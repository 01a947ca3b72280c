//! Authorization by SubjectAccessReview webhook.

use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::{Error, Verdict, WebhookOptions, conditions};
use crate::access::User;
use crate::authentication::ReviewCache;
use crate::https::HttpsClient;
use crate::rbac::Attributes;

/// As upstream: larger reviews are not cached, so that clients cannot fill the cache with large
/// keys.
const MAX_CACHED_REVIEW_BYTES: usize = 10_000;

pub struct Webhook {
    client: HttpsClient,
    options: WebhookOptions,
    cache: ReviewCache<Verdict>,
    conditions: Vec<cel::Program>,
}

impl Webhook {
    pub fn new(options: &WebhookOptions) -> Result<Webhook, Error> {
        if !matches!(options.version.as_str(), "v1" | "v1beta1") {
            return Err(Error::Flags(format!(
                "unsupported authorization webhook version {:?}, supported versions are \"v1\", \"v1beta1\"",
                options.version
            )));
        }
        let client = HttpsClient::from_kubeconfig(&options.kubeconfig)?.with_timeout(options.timeout);
        let conditions =
            options.conditions.iter().map(|text| conditions::compile(text).map_err(Error::Flags));
        let conditions = conditions.collect::<Result<_, _>>()?;
        Ok(Webhook { client, options: options.clone(), cache: ReviewCache::default(), conditions })
    }

    pub async fn authorize(&self, user: &User, request_attributes: &Attributes<'_>) -> Verdict {
        if !self.conditions.is_empty() {
            match conditions::conditions_match(&self.conditions, &spec("groups", user, request_attributes)) {
                Ok(true) => {}
                Ok(false) => return Verdict::default(),
                Err(evaluation_error) => {
                    let denied = self.options.deny_on_failure;
                    return Verdict { denied, evaluation_error, ..Verdict::default() };
                }
            }
        }
        // The field is named `group` in v1beta1.
        let groups = if self.options.version == "v1beta1" { "group" } else { "groups" };
        let spec = spec(groups, user, request_attributes);
        let text = spec.to_string();
        let key = self.cache.key(&[text.as_bytes()]);
        if let Some(verdict) = self.cache.get(&key) {
            return verdict;
        }
        let review = json!({
            "apiVersion": format!("authorization.k8s.io/{}", self.options.version),
            "kind": "SubjectAccessReview", "metadata": {"creationTimestamp": null},
            "spec": spec, "status": {"allowed": false},
        });
        let answer = match self.client.post_with_retry(&review).await {
            Ok(answer) => answer,
            Err(error) => {
                tracing::warn!(webhook = self.options.name, %error, "SubjectAccessReview webhook failed");
                let denied = self.options.deny_on_failure;
                return Verdict { denied, evaluation_error: error.to_string(), ..Verdict::default() };
            }
        };
        let status = answer.at("status");
        let (allowed, denied) = (status.flag("allowed"), status.flag("denied"));
        let evaluation_error = match (allowed, denied) {
            (true, true) => "webhook subject access review returned both allow and deny response",
            _ => "",
        };
        let reason = status.text("reason").to_owned();
        let verdict = Verdict {
            allowed: allowed && !denied,
            denied,
            reason,
            evaluation_error: evaluation_error.to_owned(),
        };
        if text.len() <= MAX_CACHED_REVIEW_BYTES {
            let ttl = if allowed { self.options.authorized } else { self.options.unauthorized };
            self.cache.insert(key, verdict.clone(), ttl);
        }
        verdict
    }
}

/// The spec of the SubjectAccessReview; `groups` is the field name in the review version.
fn spec(groups: &str, user: &User, request_attributes: &Attributes<'_>) -> Value {
    let mut spec = json!({"user": user.name, groups: user.groups});
    if !user.uid.is_empty() {
        spec.set("uid", user.uid.clone());
    }
    if !user.extra.is_empty() {
        spec.set("extra", json!(user.extra));
    }
    match *request_attributes {
        Attributes::Path { verb, path } => {
            spec.set("nonResourceAttributes", json!({"path": path, "verb": verb}));
        }
        Attributes::Resource { verb, group, resource, subresource, namespace, name, .. } => {
            let version = api::resource_table::RESOURCES
                .iter()
                .find(|row| row.group == group && row.plural == resource);
            let mut attributes = json!({});
            for (key, value) in [
                ("namespace", namespace),
                ("verb", verb),
                ("group", group),
                ("version", version.map_or("*", |row| row.version)),
                ("resource", resource),
                ("subresource", subresource),
                ("name", name),
            ] {
                if !value.is_empty() {
                    attributes.set(key, value);
                }
            }
            spec.set("resourceAttributes", attributes);
        }
    }
    spec
}

//! Conversion of custom resources by webhook: ConversionReview.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use api::Status;
use api::custom::Definition;
use api::field::quote;
use api::json::JsonExt as _;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::server::Server;
use crate::webhook_client::WebhookClient;

/// Timeout of a conversion request.
const CONVERSION_TIMEOUT: Duration = Duration::from_secs(30);
/// Objects per ConversionReview.
const MAX_OBJECTS_PER_REVIEW: usize = 500;

/// Clients of conversion webhooks by name of the definition. The serial number detects a changed
/// definition.
#[derive(Default)]
pub struct ConversionWebhooks(Mutex<HashMap<String, (u32, Arc<ConversionWebhook>)>>);

struct ConversionWebhook {
    client: Result<WebhookClient, String>,
    /// The ConversionReview version; `None` if the webhook accepts no supported one.
    version: Option<&'static str>,
}

impl ConversionWebhooks {
    fn of(&self, definition: &Definition, webhook: &Value) -> Arc<ConversionWebhook> {
        let mut hooks = self.0.lock();
        if let Some((serial, hook)) = hooks.get(&definition.name)
            && *serial == definition.serial
        {
            return hook.clone();
        }
        let known =
            webhook.items("conversionReviewVersions").iter().find_map(|version| match version.as_str() {
                Some("v1") => Some("apiextensions.k8s.io/v1"),
                Some("v1beta1") => Some("apiextensions.k8s.io/v1beta1"),
                _ => None,
            });
        let hook = Arc::new(ConversionWebhook {
            client: WebhookClient::new(webhook.at("clientConfig"), None),
            version: known,
        });
        hooks.insert(definition.name.clone(), (definition.serial, hook.clone()));
        hook
    }
}

/// Converts objects to another version of their kind. None of them may be in it already.
pub async fn convert(
    server: &Server,
    definition: &Definition,
    webhook: &Value,
    values: Vec<Value>,
    desired_version: &str,
) -> Result<Vec<Value>, Status> {
    let hook = server.conversion_webhooks.of(definition, webhook);
    let mut converted = Vec::with_capacity(values.len());
    for chunk in values.chunks(MAX_OBJECTS_PER_REVIEW) {
        let first = &chunk[0];
        let gvk = format!("{}, Kind={}", first.text("apiVersion"), first.text("kind"));
        let answer = call_webhook(server, &hook, chunk, desired_version).await;
        let answer = answer.map_err(|reason| conversion_error(&gvk, &format!("failed: {reason}")))?;
        if answer.len() != chunk.len() {
            let reason = format!("returned {} objects, expected {}", answer.len(), chunk.len());
            return Err(conversion_error(&gvk, &reason));
        }
        for (i, (before, mut after)) in chunk.iter().zip(answer).enumerate() {
            validate_converted(before, &mut after, desired_version).map_err(|reason| {
                conversion_error(&gvk, &format!("returned invalid object at index {i}: {reason}"))
            })?;
            converted.push(after);
        }
    }
    Ok(converted)
}

fn conversion_error(gvk: &str, reason: &str) -> Status {
    Status::internal(format!("conversion webhook for {gvk} {reason}"))
}

async fn call_webhook(
    server: &Server,
    hook: &ConversionWebhook,
    values: &[Value],
    desired_version: &str,
) -> Result<Vec<Value>, String> {
    let version = hook.version.ok_or("no supported conversion review versions")?;
    let client = hook.client.as_ref().map_err(Clone::clone)?;
    let uid = uuid::Uuid::new_v4().to_string();
    let review = json!({
        "kind": "ConversionReview", "apiVersion": version,
        "request": {"uid": uid, "desiredAPIVersion": desired_version, "objects": values},
    });
    let reply = client
        .post(server, review.to_string().into(), CONVERSION_TIMEOUT)
        .await
        .map_err(|failure| failure.message)?;
    let mut review: Value = serde_json::from_slice(&reply).map_err(|error| error.to_string())?;
    let strict = version.ends_with("/v1");
    if strict && (review.text("kind"), review.text("apiVersion")) != ("ConversionReview", version) {
        let (group, version) = version.split_once('/').unwrap_or_default();
        return Err(format!(
            "expected webhook response of {group}/{version}, Kind=ConversionReview, got {}, Kind={}",
            review.text("apiVersion"),
            review.text("kind")
        ));
    }
    let response = review.at("response");
    if !response.is_object() {
        return Err("no response provided".to_owned());
    }
    if strict && response.text("uid") != uid {
        return Err(format!("expected response.uid={}, got {}", quote(&uid), quote(response.text("uid"))));
    }
    let result = response.at("result");
    if result.text("status") != "Success" {
        return Err(match result.text("message") {
            "" => format!("response.result.status was '{}', not 'Success'", result.text("status")),
            message => message.to_owned(),
        });
    }
    match review["response"]["convertedObjects"].take() {
        Value::Array(objects) => Ok(objects),
        _ => Ok(Vec::new()),
    }
}

/// Checks a converted object. Of its metadata, only labels and annotations may change; the rest is
/// restored.
fn validate_converted(before: &Value, after: &mut Value, desired_version: &str) -> Result<(), String> {
    if after.text("apiVersion") != desired_version {
        let found = after.text("apiVersion");
        return Err(format!("invalid groupVersion (expected {desired_version}, received {found})"));
    }
    if before.text("kind") != after.text("kind") {
        let (expected, found) = (before.text("kind"), after.text("kind"));
        return Err(format!("invalid kind (expected {expected}, received {found})"));
    }
    let Some(metadata) = after.get("metadata").and_then(Value::as_object) else {
        return Err("missing metadata in converted object".to_owned());
    };
    let old = before.at("metadata");
    for (field, name) in [("name", "name"), ("namespace", "namespace"), ("uid", "UID")] {
        let found = metadata.get(field).and_then(Value::as_str).unwrap_or("");
        if old.text(field) != found {
            return Err(format!("must have the same {name}: {} != {found}", old.text(field)));
        }
    }
    let mut merged_metadata: Map<String, Value> = old.as_object().cloned().unwrap_or_default();
    for field in ["labels", "annotations"] {
        match metadata.get(field) {
            Some(new) if new.is_object() => drop(merged_metadata.insert(field.to_owned(), new.clone())),
            _ => drop(merged_metadata.remove(field)),
        }
    }
    after.set("metadata", merged_metadata);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_metadata(after: Value, expected: &str) {
        let before = json!({
            "apiVersion": "a.b/v1", "kind": "K",
            "metadata": {"name": "n", "uid": "u", "labels": {"l": "1"}, "generation": 3},
        });
        let mut after = after;
        let found = match validate_converted(&before, &mut after, "a.b/v2") {
            Ok(()) => after["metadata"].to_string(),
            Err(reason) => reason,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_webhook_changes_no_metadata_but_labels_and_annotations() {
        let object = |metadata: Value| json!({"apiVersion": "a.b/v2", "kind": "K", "metadata": metadata});
        check_metadata(
            object(json!({"name": "n", "uid": "u", "generation": 9, "annotations": {"a": "1"}})),
            r#"{"annotations":{"a":"1"},"generation":3,"name":"n","uid":"u"}"#,
        );
        check_metadata(object(json!({"name": "m", "uid": "u"})), "must have the same name: n != m");
        check_metadata(object(json!({"name": "n", "uid": "v"})), "must have the same UID: u != v");
        check_metadata(json!({"apiVersion": "a.b/v2", "kind": "K"}), "missing metadata in converted object");
        check_metadata(
            json!({"apiVersion": "a.b/v1"}),
            "invalid groupVersion (expected a.b/v2, received a.b/v1)",
        );
        check_metadata(json!({"apiVersion": "a.b/v2", "kind": "J"}), "invalid kind (expected K, received J)");
    }
}

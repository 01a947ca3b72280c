//! MutatingWebhookConfiguration: webhooks that mutate the objects of requests.

use serde_json::Value;

use crate::field::ErrorList;
use crate::strategy::RestStrategy;

pub struct MutatingWebhookConfiguration;

impl RestStrategy for MutatingWebhookConfiguration {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        super::webhook::validate_webhooks(obj, true, errors);
    }
}

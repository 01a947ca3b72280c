//! ValidatingWebhookConfiguration: webhooks that validate requests.

use serde_json::Value;

use crate::field::ErrorList;
use crate::strategy::RestStrategy;

pub struct ValidatingWebhookConfiguration;

impl RestStrategy for ValidatingWebhookConfiguration {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        super::webhook::validate_webhooks(obj, false, errors);
    }
}

//! ValidatingWebhookConfiguration: webhooks that may refuse a request.

use serde_json::Value;

use crate::field::Errors;
use crate::kind::Kind;

pub struct ValidatingWebhookConfiguration;

impl Kind for ValidatingWebhookConfiguration {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::webhook::webhooks(obj, false, errors);
    }
}

//! MutatingWebhookConfiguration: webhooks that may change a request.

use serde_json::Value;

use crate::field::Errors;
use crate::kind::Kind;

pub struct MutatingWebhookConfiguration;

impl Kind for MutatingWebhookConfiguration {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::webhook::webhooks(obj, true, errors);
    }
}

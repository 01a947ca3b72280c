//! ValidatingWebhookConfiguration: what is special about it.

use crate::kind::Kind;

pub struct ValidatingWebhookConfiguration;

impl Kind for ValidatingWebhookConfiguration {}

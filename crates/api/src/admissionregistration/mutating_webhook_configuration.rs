//! MutatingWebhookConfiguration: what is special about it.

use crate::kind::Kind;

pub struct MutatingWebhookConfiguration;

impl Kind for MutatingWebhookConfiguration {}

//! DefaultBinder: binds a pod to its node by a Binding.

use std::sync::Arc;

use serde_json::Value;

use crate::bind::{Bind, BindContext, Bound};
use crate::framework::Plugin;
use crate::state::PodInfo;

pub const NAME: &str = "DefaultBinder";

struct DefaultBinder;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    Ok(Plugin::new(NAME).bind(Arc::new(DefaultBinder)))
}

#[async_trait::async_trait]
impl Bind for DefaultBinder {
    async fn bind(&self, context: &BindContext, pod: &PodInfo, node: &str) -> Bound {
        match context.api.bind(pod, node).await {
            Ok(()) => Bound::Yes,
            Err(error) => Bound::Failed(error.to_string()),
        }
    }
}

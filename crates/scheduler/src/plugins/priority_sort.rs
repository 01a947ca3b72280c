//! PrioritySort: pods of higher priority first, then those that wait longer.

use std::cmp::Ordering;
use std::sync::Arc;

use serde_json::Value;

use crate::framework::{Plugin, QueueSort};
use crate::queue::QueuedPod;

pub const NAME: &str = "PrioritySort";

struct PrioritySort;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    Ok(Plugin::new(NAME).queue_sort(Arc::new(PrioritySort)))
}

impl QueueSort for PrioritySort {
    fn compare(&self, a: &QueuedPod, b: &QueuedPod) -> Ordering {
        b.info.priority.cmp(&a.info.priority).then(a.queued_at.cmp(&b.queued_at))
    }
}

//! PrioritySort: orders pods by priority, then by the time they were queued.

use std::cmp::Ordering;
use std::sync::Arc;

use serde_json::Value;

use crate::framework::{Plugin, QueueSort};
use crate::queue::QueuedPod;

pub const NAME: &str = "PrioritySort";

struct PrioritySort;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    Ok(Plugin::new(NAME).queue_sort(Arc::new(PrioritySort)))
}

impl QueueSort for PrioritySort {
    fn compare(&self, a: &QueuedPod, b: &QueuedPod) -> Ordering {
        b.info.priority.cmp(&a.info.priority).then(a.queued_at.cmp(&b.queued_at))
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::testing::test_cluster;

    /// Compares two pods, each queued at the given second.
    #[track_caller]
    fn check((a, a_at): (&str, i64), (b, b_at): (&str, i64), expected: Ordering) {
        let sort = make(&Value::Null).unwrap().queue_sort.unwrap();
        let mut cluster = test_cluster("");
        let mut queued = |line: &str, at: i64| {
            let (info, object) = cluster.info(line);
            QueuedPod::new(info, Arc::new(object), Timestamp::from_second(at).unwrap())
        };
        let (a, b) = (queued(a, a_at), queued(b, b_at));
        assert_eq!(sort.compare(&a, &b), expected);
        assert_eq!(sort.compare(&b, &a), expected.reverse());
    }

    #[test]
    fn queue_order_is_priority_then_time() {
        for (a, b, first) in [
            // The queue time does not matter between different priorities.
            (("pod a priority=10", 9), ("pod b priority=5", 1), Ordering::Less),
            (("pod a priority=-1", 1), ("pod b", 9), Ordering::Greater),
            // No priority is priority 0.
            (("pod a", 3), ("pod b priority=0", 3), Ordering::Equal),
            (("pod a", 3), ("pod b priority=0", 4), Ordering::Less),
            (("pod a priority=7", 1), ("pod b priority=7", 2), Ordering::Less),
            (("pod a priority=7", 2), ("pod b priority=7", 1), Ordering::Greater),
            // The extreme values.
            (("pod a priority=2147483647", 2), ("pod b priority=-2147483648", 1), Ordering::Less),
        ] {
            check(a, b, first);
        }
    }
}

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::{QueuePosition, QueuedPod, SchedulingQueue};
use crate::framework::{ClusterEvent, ObjectPair};
use crate::state::{NodeInfo, PodInfo, State};
use crate::testing::{default_profile, node, pod};

struct TestQueue {
    queue: SchedulingQueue,
    state: State,
    now: Timestamp,
}

fn new_test_queue() -> TestQueue {
    let queue = SchedulingQueue::new(&[default_profile()], Duration::from_secs(1), Duration::from_secs(10));
    TestQueue { queue, state: State::default(), now: Timestamp::from_second(1_000_000).unwrap() }
}

impl TestQueue {
    fn info(&mut self, line: &str) -> Arc<PodInfo> {
        Arc::new(PodInfo::new(&pod(line), &mut self.state.strings))
    }

    fn add(&mut self, line: &str) {
        let info = self.info(line);
        self.queue.add(info, Arc::new(pod(line)), &self.state, self.now);
    }

    fn advance(&mut self, millis: i64) {
        self.now += SignedDuration::from_millis(millis);
        self.queue.flush(&self.state, self.now);
    }

    fn pop(&mut self) -> Option<String> {
        self.queue.pop().map(|pod| pod.info.name.to_string())
    }

    fn fail(&mut self, mut pod: QueuedPod, plugins: &[&'static str]) {
        pod.rejected_by = plugins.iter().copied().collect();
        self.queue.add_unschedulable(pod, &self.state, self.now);
    }

    fn position(&self, name: &str) -> Option<QueuePosition> {
        self.queue.position(&format!("uid-{name}"))
    }

    fn node_added(&mut self, line: &str) {
        let mut info = NodeInfo::named(0, "n".into());
        info.set(Arc::new(node(line)), &mut self.state.strings);
        let change = ClusterEvent::Node(ObjectPair { old: None, new: Some(&info) });
        self.queue.move_all_to_active_or_backoff(&change, &self.state, self.now);
    }
}

#[test]
fn returns_pods_by_priority_then_queue_time() {
    let mut test_queue = new_test_queue();
    test_queue.add("pod a");
    test_queue.now += SignedDuration::from_millis(1);
    test_queue.add("pod b priority=5");
    test_queue.add("pod c");
    test_queue.add("pod gone priority=9");
    test_queue.queue.remove("uid-gone");
    let order: Vec<String> = std::iter::from_fn(|| test_queue.pop()).collect();
    assert_eq!(order, ["b", "a", "c"]);
}

#[test]
fn requeues_unschedulable_pod_on_matching_event() {
    let mut test_queue = new_test_queue();
    test_queue.add("pod a cpu=2");
    let queued_pod = test_queue.queue.pop().unwrap();
    test_queue.fail(queued_pod, &["NodeResourcesFit"]);
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Unschedulable));
    test_queue.node_added("node n cpu=1");
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Unschedulable));
    test_queue.node_added("node n cpu=2");
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Backoff));
    // No other pod is active, so it is popped before its backoff ends.
    assert_eq!(test_queue.pop().as_deref(), Some("a"));
}

#[test]
fn backoff_is_exponential_up_to_maximum() {
    let mut test_queue = new_test_queue();
    test_queue.add("pod a");
    test_queue.add("pod busy priority=9");
    for seconds in [1, 2, 4, 8, 10, 10] {
        // The busy pod is always active, so pods are not popped from backoff early.
        let busy = test_queue.queue.pop().unwrap();
        let queued_pod = test_queue.queue.pop().unwrap();
        assert_eq!((&*busy.info.name, &*queued_pod.info.name), ("busy", "a"));
        test_queue.fail(queued_pod, &["NodeName"]);
        test_queue.queue.add(busy.info, busy.object, &test_queue.state, test_queue.now);
        test_queue.node_added("node n");
        assert_eq!(test_queue.position("a"), Some(QueuePosition::Backoff));
        test_queue.advance(seconds * 1000 - 1);
        assert_eq!(test_queue.position("a"), Some(QueuePosition::Backoff), "after less than {seconds} s");
        test_queue.advance(1001);
        assert_eq!(test_queue.position("a"), Some(QueuePosition::Active), "after {seconds} s");
    }
}

#[test]
fn retries_after_error_backoff_without_event() {
    let mut test_queue = new_test_queue();
    test_queue.add("pod a");
    let queued_pod = test_queue.queue.pop().unwrap();
    test_queue.fail(queued_pod, &[]);
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Backoff));
    assert_eq!(test_queue.pop(), None);
    test_queue.advance(2000);
    assert_eq!(test_queue.pop().as_deref(), Some("a"));
}

#[test]
fn unschedulable_pods_are_queued_again_after_timeout() {
    let mut test_queue = new_test_queue();
    test_queue.add("pod a");
    let queued_pod = test_queue.queue.pop().unwrap();
    test_queue.fail(queued_pod, &["NodeName"]);
    test_queue.advance(300_000);
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Unschedulable));
    let next = test_queue.queue.next_deadline().unwrap();
    assert_eq!(next, test_queue.now + SignedDuration::from_secs(1));
    test_queue.advance(1_000);
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Active));
}

#[test]
fn gated_pods_wait_until_gates_are_removed() {
    let mut test_queue = new_test_queue();
    let gated = r#"pod a {"spec":{"schedulingGates":[{"name":"g"}]}}"#;
    test_queue.add(gated);
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Unschedulable));
    assert_eq!(test_queue.queue.pending_pods(), [0, 0, 0, 1]);
    test_queue.node_added("node n");
    test_queue.advance(1_000);
    assert_eq!(test_queue.position("a"), Some(QueuePosition::Unschedulable));
    let open = test_queue.info("pod a");
    test_queue.queue.update(open, Arc::new(pod("pod a")), &test_queue.state, test_queue.now);
    assert_eq!(test_queue.pop().as_deref(), Some("a"));
}

#[test]
fn nominated_node_is_updated_and_removed_with_pod() {
    let mut test_queue = new_test_queue();
    test_queue.add("pod a nominated=n1");
    assert_eq!(test_queue.queue.nominator.node_of("uid-a").map(|node| &**node), Some("n1"));
    let moved = test_queue.info("pod a nominated=n2");
    test_queue.queue.update(moved, Arc::new(pod("pod a nominated=n2")), &test_queue.state, test_queue.now);
    assert_eq!(test_queue.queue.nominator.node_of("uid-a").map(|node| &**node), Some("n2"));
    test_queue.queue.remove("uid-a");
    assert_eq!(test_queue.queue.nominator.node_of("uid-a"), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// For any sequence of operations no pod is lost or duplicated, and without further events all are popped
    /// in the end.
    #[test]
    fn queue_tracks_each_pod_exactly_once(steps in prop::collection::vec((0..6u8, 0..5u8, 0..4000i64), 1..80)) {
        let mut test_queue = new_test_queue();
        let mut known = std::collections::BTreeSet::new();
        let mut out: Vec<QueuedPod> = Vec::new();
        for (step, name, millis) in steps {
            let line = format!("pod p{name} priority={}", name % 3);
            match step {
                0 => {
                    if !out.iter().any(|pod| *pod.info.name == format!("p{name}")) {
                        test_queue.add(&line);
                        known.insert(format!("uid-p{name}"));
                    }
                }
                1 => out.extend(test_queue.queue.pop()),
                2 => {
                    if let Some(pod) = out.pop() {
                        test_queue.fail(pod, &["NodeName"]);
                    }
                }
                3 => {
                    if let Some(pod) = out.pop() {
                        test_queue.fail(pod, &[]);
                    }
                }
                4 => test_queue.node_added("node n"),
                _ => test_queue.advance(millis),
            }
            let sum: usize = test_queue.queue.pending_pods().iter().sum();
            prop_assert_eq!(sum + out.len(), known.len());
        }
        for pod in out {
            test_queue.fail(pod, &["NodeName"]);
        }
        test_queue.advance(400_000);
        test_queue.advance(20_000);
        let mut names: Vec<String> = std::iter::from_fn(|| test_queue.queue.pop()).map(|pod| pod.info.uid.to_string()).collect();
        names.sort();
        prop_assert_eq!(names, known.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(test_queue.queue.next_deadline(), None);
    }
}

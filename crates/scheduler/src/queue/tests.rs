use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::{Place, Queue, QueuedPod};
use crate::framework::{Change, Pair};
use crate::state::{NodeInfo, PodInfo, State};
use crate::testing::{default_profile, node, pod};

struct Rig {
    queue: Queue,
    state: State,
    now: Timestamp,
}

fn rig() -> Rig {
    let queue = Queue::new(&[default_profile()], Duration::from_secs(1), Duration::from_secs(10));
    Rig { queue, state: State::default(), now: Timestamp::from_second(1_000_000).unwrap() }
}

impl Rig {
    fn info(&mut self, line: &str) -> Arc<PodInfo> {
        Arc::new(PodInfo::new(&pod(line), &mut self.state.strings))
    }

    fn add(&mut self, line: &str) {
        let info = self.info(line);
        self.queue.add(info, Arc::new(pod(line)), &self.state, self.now);
    }

    fn pass(&mut self, millis: i64) {
        self.now += SignedDuration::from_millis(millis);
        self.queue.tick(&self.state, self.now);
    }

    fn pop(&mut self) -> Option<String> {
        self.queue.pop().map(|pod| pod.info.name.to_string())
    }

    fn fail(&mut self, mut pod: QueuedPod, plugins: &[&'static str]) {
        pod.rejected_by = plugins.iter().copied().collect();
        self.queue.failed(pod, &self.state, self.now);
    }

    fn place(&self, name: &str) -> Option<Place> {
        self.queue.place(&format!("uid-{name}"))
    }

    fn node_added(&mut self, line: &str) {
        let mut info = NodeInfo::named(0, "n".into());
        info.set(Arc::new(node(line)), &mut self.state.strings);
        let change = Change::Node(Pair { old: None, new: Some(&info) });
        self.queue.wake(&change, &self.state, self.now);
    }
}

#[test]
fn by_priority_then_by_age() {
    let mut rig = rig();
    rig.add("pod a");
    rig.now += SignedDuration::from_millis(1);
    rig.add("pod b priority=5");
    rig.add("pod c");
    rig.add("pod gone priority=9");
    rig.queue.remove("uid-gone");
    let order: Vec<String> = std::iter::from_fn(|| rig.pop()).collect();
    assert_eq!(order, ["b", "a", "c"]);
}

#[test]
fn failed_pods_wait_for_what_helps() {
    let mut rig = rig();
    rig.add("pod a cpu=2");
    let tried = rig.queue.pop().unwrap();
    rig.fail(tried, &["NodeResourcesFit"]);
    assert_eq!(rig.place("a"), Some(Place::Unschedulable));
    rig.node_added("node n cpu=1");
    assert_eq!(rig.place("a"), Some(Place::Unschedulable));
    rig.node_added("node n cpu=2");
    assert_eq!(rig.place("a"), Some(Place::Backoff));
    // Nobody else is waiting, so it need not either.
    assert_eq!(rig.pop().as_deref(), Some("a"));
}

#[test]
fn backoff_doubles() {
    let mut rig = rig();
    rig.add("pod a");
    rig.add("pod busy priority=9");
    for seconds in [1, 2, 4, 8, 10, 10] {
        // The busy pod keeps the scheduler from taking pods out of backoff early.
        let busy = rig.queue.pop().unwrap();
        let tried = rig.queue.pop().unwrap();
        assert_eq!((&*busy.info.name, &*tried.info.name), ("busy", "a"));
        rig.fail(tried, &["NodeName"]);
        rig.queue.add(busy.info, busy.object, &rig.state, rig.now);
        rig.node_added("node n");
        assert_eq!(rig.place("a"), Some(Place::Backoff));
        rig.pass(seconds * 1000 - 1);
        assert_eq!(rig.place("a"), Some(Place::Backoff), "after less than {seconds} s");
        rig.pass(1001);
        assert_eq!(rig.place("a"), Some(Place::Active), "after {seconds} s");
    }
}

#[test]
fn errors_wait_without_an_event() {
    let mut rig = rig();
    rig.add("pod a");
    let tried = rig.queue.pop().unwrap();
    rig.fail(tried, &[]);
    assert_eq!(rig.place("a"), Some(Place::Backoff));
    assert_eq!(rig.pop(), None);
    rig.pass(2000);
    assert_eq!(rig.pop().as_deref(), Some("a"));
}

#[test]
fn leftovers_are_tried_after_five_minutes() {
    let mut rig = rig();
    rig.add("pod a");
    let tried = rig.queue.pop().unwrap();
    rig.fail(tried, &["NodeName"]);
    rig.pass(300_000);
    assert_eq!(rig.place("a"), Some(Place::Unschedulable));
    let next = rig.queue.next_deadline().unwrap();
    assert_eq!(next, rig.now + SignedDuration::from_secs(1));
    rig.pass(1_000);
    assert_eq!(rig.place("a"), Some(Place::Active));
}

#[test]
fn gates_keep_pods_out_until_they_open() {
    let mut rig = rig();
    let gated = r#"pod a {"spec":{"schedulingGates":[{"name":"g"}]}}"#;
    rig.add(gated);
    assert_eq!(rig.place("a"), Some(Place::Unschedulable));
    assert_eq!(rig.queue.lengths(), [0, 0, 0, 1]);
    rig.node_added("node n");
    rig.pass(1_000);
    assert_eq!(rig.place("a"), Some(Place::Unschedulable));
    let open = rig.info("pod a");
    rig.queue.update(open, Arc::new(pod("pod a")), &rig.state, rig.now);
    assert_eq!(rig.pop().as_deref(), Some("a"));
}

#[test]
fn promises_follow_the_pod() {
    let mut rig = rig();
    rig.add("pod a nominated=n1");
    assert_eq!(rig.queue.nominator.node_of("uid-a").map(|node| &**node), Some("n1"));
    let moved = rig.info("pod a nominated=n2");
    rig.queue.update(moved, Arc::new(pod("pod a nominated=n2")), &rig.state, rig.now);
    assert_eq!(rig.queue.nominator.node_of("uid-a").map(|node| &**node), Some("n2"));
    rig.queue.remove("uid-a");
    assert_eq!(rig.queue.nominator.node_of("uid-a"), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// No pod is lost and none is there twice, whatever happens; left alone, all are tried in the end.
    #[test]
    fn pods_are_neither_lost_nor_doubled(steps in prop::collection::vec((0..6u8, 0..5u8, 0..4000i64), 1..80)) {
        let mut rig = rig();
        let mut known = std::collections::BTreeSet::new();
        let mut out: Vec<QueuedPod> = Vec::new();
        for (step, name, millis) in steps {
            let line = format!("pod p{name} priority={}", name % 3);
            match step {
                0 => {
                    if !out.iter().any(|pod| *pod.info.name == format!("p{name}")) {
                        rig.add(&line);
                        known.insert(format!("uid-p{name}"));
                    }
                }
                1 => out.extend(rig.queue.pop()),
                2 => {
                    if let Some(pod) = out.pop() {
                        rig.fail(pod, &["NodeName"]);
                    }
                }
                3 => {
                    if let Some(pod) = out.pop() {
                        rig.fail(pod, &[]);
                    }
                }
                4 => rig.node_added("node n"),
                _ => rig.pass(millis),
            }
            let sum: usize = rig.queue.lengths().iter().sum();
            prop_assert_eq!(sum + out.len(), known.len());
        }
        for pod in out {
            rig.fail(pod, &["NodeName"]);
        }
        rig.pass(400_000);
        rig.pass(20_000);
        let mut popped: Vec<String> = std::iter::from_fn(|| rig.queue.pop()).map(|pod| pod.info.uid.to_string()).collect();
        popped.sort();
        prop_assert_eq!(popped, known.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(rig.queue.next_deadline(), None);
    }
}

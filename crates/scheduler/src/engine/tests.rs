use std::fmt::Write as _;
use std::sync::Arc;

use expect_test::{Expect, expect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;

use super::{Action, Binding, Delta, Engine, Event, Setback};
use crate::algorithm::NoExtenders;
use crate::config::Config;
use crate::framework::Chore;
use crate::framework::registry::BUILT_IN;
use crate::testing::{node, pod};

struct Rig {
    engine: Engine,
    now: Timestamp,
    /// Bindings that were not answered yet.
    bindings: Vec<Binding>,
    log: String,
}

fn rig() -> Rig {
    let engine = Engine::new(&Config::standard(), BUILT_IN, Arc::new(NoExtenders), 11).unwrap();
    Rig { engine, now: Timestamp::from_second(1_000_000).unwrap(), bindings: Vec::new(), log: String::new() }
}

impl Rig {
    fn node(&mut self, line: &str) {
        let after = Some(Arc::new(node(line)));
        self.engine.handle(Event::Node(Delta { before: None, after }), self.now);
    }

    fn pod(&mut self, before: Option<&str>, after: Option<&str>) {
        let read = |line: &str| Arc::new(pod(line));
        let delta = Delta { before: before.map(read), after: after.map(read) };
        self.engine.handle(Event::Pod(delta), self.now);
    }

    fn pass(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
        self.engine.tick(self.now);
    }

    /// Tries all pods that can be tried and writes down what comes of it.
    fn settle(&mut self) {
        while self.engine.step(self.now) {}
        for action in self.engine.actions() {
            match action {
                Action::Bind(binding) => {
                    writeln!(self.log, "bind {} to {}", binding.info.name, binding.node).unwrap();
                    self.bindings.push(binding);
                }
                Action::Note(note) => writeln!(self.log, "{} {}", note.reason, note.message).unwrap(),
                Action::PatchStatus { name, patch, .. } => {
                    let condition = &patch["status"]["conditions"][0];
                    let promised = &patch["status"]["nominatedNodeName"];
                    writeln!(self.log, "patch {name} {} nominated {promised}", condition["reason"]).unwrap();
                }
                Action::Chore(chore) => {
                    let (what, claim) = match chore {
                        Chore::Release(claim) => ("release", claim),
                        Chore::Delete(claim) => ("delete", claim),
                    };
                    writeln!(self.log, "{what} {}", claim.metadata.name.as_deref().unwrap_or_default())
                        .unwrap();
                }
                Action::Preempt(preemption) => {
                    let victims: Vec<&str> = preemption.victims.iter().map(|pod| &*pod.name).collect();
                    writeln!(self.log, "remove {} from {}", victims.join(" "), preemption.node).unwrap();
                }
            }
        }
    }

    #[track_caller]
    fn check(&mut self, expected: Expect) {
        self.settle();
        expected.assert_eq(&std::mem::take(&mut self.log));
    }

    fn answer(&mut self, error: Option<&str>) {
        let binding = self.bindings.pop().expect("a binding waits for its answer");
        let event = match error {
            None => Event::Bound(Box::new(binding)),
            Some(words) => {
                let current: Option<Arc<core::Pod>> = Some(binding.pod.object.clone());
                let setback = Setback::Error(words.to_owned());
                Event::Unbound { binding: Box::new(binding), setback, current }
            }
        };
        self.engine.handle(event, self.now);
    }
}

#[test]
fn a_pod_is_bound_once() {
    let mut rig = rig();
    rig.node("node a");
    rig.pod(None, Some("pod p cpu=1"));
    rig.check(expect!["bind p to a\n"]);
    // Updates on the way change nothing.
    rig.pod(Some("pod p cpu=1"), Some("pod p cpu=1 label=x=y"));
    rig.check(expect![""]);
    rig.answer(None);
    rig.check(expect!["Scheduled Successfully assigned default/p to a\n"]);
    rig.pod(Some("pod p cpu=1"), Some("pod p cpu=1 on=a"));
    rig.check(expect![""]);
    assert_eq!(rig.engine.state.node_named("a").unwrap().pods.len(), 1);
    assert!(!rig.engine.state.is_assumed("uid-p"));
}

#[test]
fn what_is_assumed_is_taken() {
    let mut rig = rig();
    rig.node("node a cpu=1");
    rig.pod(None, Some("pod p cpu=1"));
    rig.pod(None, Some("pod q cpu=1"));
    rig.check(expect![[r#"
        bind p to a
        FailedScheduling 0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.
        patch q "Unschedulable" nominated null
    "#]]);
    // The binding fails: the room is free again, and the other pod gets its chance.
    rig.answer(Some("conflict"));
    rig.check(expect![[r#"
        FailedScheduling conflict
        patch p "SchedulerError" nominated null
        bind q to a
    "#]]);
}

#[test]
fn a_lost_binding_is_tried_again() {
    let mut rig = rig();
    rig.node("node a");
    rig.pod(None, Some("pod p"));
    rig.check(expect!["bind p to a\n"]);
    rig.answer(Some("boom"));
    rig.check(expect![[r#"
        FailedScheduling boom
        patch p "SchedulerError" nominated null
    "#]]);
    rig.pass(2);
    rig.check(expect!["bind p to a\n"]);
    // Answered well, but the event never comes: after a quarter of an hour the room is free.
    rig.answer(None);
    rig.check(expect!["Scheduled Successfully assigned default/p to a\n"]);
    rig.pass(15 * 60 + 1);
    assert_eq!(rig.engine.state.placed(), 0);
}

#[test]
fn room_is_made_and_kept() {
    let mut rig = rig();
    rig.node("node a cpu=1");
    rig.pod(None, Some("pod low on=a cpu=1"));
    rig.pod(None, Some("pod high cpu=1 priority=10"));
    rig.check(expect![[r#"
        FailedScheduling 0/1 nodes are available: 1 Insufficient cpu.
        patch high "Unschedulable" nominated "a"
        remove low from a
    "#]]);
    // A pod of lower priority may not take the room.
    rig.pod(None, Some("pod middle cpu=1 priority=5"));
    rig.pod(Some("pod low on=a cpu=1"), None);
    rig.pass(2);
    rig.check(expect![[r#"
        bind high to a
        FailedScheduling 0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.
        patch middle "Unschedulable" nominated null
    "#]]);
}

#[test]
fn pods_wait_for_nodes() {
    let mut rig = rig();
    rig.pod(None, Some("pod p"));
    rig.check(expect![[r#"
        FailedScheduling no nodes available to schedule pods
        patch p "Unschedulable" nominated null
    "#]]);
    rig.node("node a taint=k=v:NoSchedule");
    rig.pass(2);
    rig.check(expect![[r#"
        FailedScheduling 0/1 nodes are available: 1 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.
        patch p "Unschedulable" nominated null
    "#]]);
    rig.node("node a");
    rig.check(expect!["bind p to a\n"]);
}

#[test]
fn others_pods_and_deleted_pods_are_left_alone() {
    let mut rig = rig();
    rig.node("node a");
    rig.pod(None, Some(r#"pod p {"spec":{"schedulerName":"mine"}}"#));
    rig.pod(None, Some("pod q leaving"));
    rig.pod(None, Some(r#"pod r {"status":{"phase":"Failed"}}"#));
    rig.check(expect!["FailedScheduling skip schedule deleting pod: default/q\n"]);
}

#[test]
fn a_pod_is_not_tried_without_its_claims() {
    use k8s_openapi::api::resource::v1 as resource;
    let mut rig = rig();
    rig.node("node a");
    let line = |status: &str| {
        let claims =
            r#"[{"name":"c","resourceClaimTemplateName":"t"},{"name":"d","resourceClaimName":"shared"}]"#;
        format!(r#"pod p {{"spec":{{"resourceClaims":{claims}}},"status":{{{status}}}}}"#)
    };
    let (early, named) =
        (line(""), line(r#""resourceClaimStatuses":[{"name":"c","resourceClaimName":"made"}]"#));
    let claim = |name: &str, owner: &str| -> Arc<resource::ResourceClaim> {
        let owner = serde_json::json!([
            {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": owner, "controller": true},
        ]);
        let results = serde_json::json!([{"request": "r", "driver": "d", "pool": "a", "device": name}]);
        let value = serde_json::json!({
            "metadata": {"name": name, "namespace": "default", "uid": name, "ownerReferences": owner},
            "spec": {}, "status": {"allocation": {"devices": {"results": results}}},
        });
        Arc::new(serde_json::from_value(value).unwrap())
    };
    let gated = |rig: &Rig| rig.engine.queue.lengths()[3];
    let change = |rig: &mut Rig, before: Option<Arc<resource::ResourceClaim>>, after| {
        rig.engine.handle(Event::ResourceClaim(Delta { before, after }), rig.now);
    };
    rig.pod(None, Some(&early));
    rig.check(expect![""]);
    assert_eq!(gated(&rig), 1);
    // Its name is not enough, nor is one of its claims, nor that of somebody else.
    rig.pod(Some(&early), Some(&named));
    change(&mut rig, None, Some(claim("shared", "x")));
    change(&mut rig, None, Some(claim("made", "another")));
    rig.node("node b");
    rig.check(expect![""]);
    assert_eq!(gated(&rig), 1);
    change(&mut rig, Some(claim("made", "another")), None);
    change(&mut rig, None, Some(claim("made", "uid-p")));
    rig.check(expect!["bind p to a\n"]);
}

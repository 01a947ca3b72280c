use std::fmt::Write as _;
use std::sync::Arc;

use expect_test::{Expect, expect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;

use super::{Action, BindFailure, Binding, Delta, Engine, Event};
use crate::algorithm::NoExtenders;
use crate::config::Config;
use crate::framework::CleanupTask;
use crate::framework::registry::IN_TREE_PLUGINS;
use crate::testing::{node, pod};

struct TestScheduler {
    engine: Engine,
    now: Timestamp,
    /// Bindings without a result so far.
    bindings: Vec<Binding>,
    log: String,
}

fn new_test_scheduler() -> TestScheduler {
    let engine = Engine::new(&Config::with_defaults(), IN_TREE_PLUGINS, Arc::new(NoExtenders), 11).unwrap();
    TestScheduler {
        engine,
        now: Timestamp::from_second(1_000_000).unwrap(),
        bindings: Vec::new(),
        log: String::new(),
    }
}

impl TestScheduler {
    fn node(&mut self, line: &str) {
        let after = Some(Arc::new(node(line)));
        self.engine.handle(Event::Node(Delta { before: None, after }), self.now);
    }

    fn pod(&mut self, before: Option<&str>, after: Option<&str>) {
        let read = |line: &str| Arc::new(pod(line));
        let delta = Delta { before: before.map(read), after: after.map(read) };
        self.engine.handle(Event::Pod(delta), self.now);
    }

    fn advance(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
        self.engine.tick(self.now);
    }

    /// Schedules all ready pods and logs the resulting actions.
    fn schedule_all(&mut self) {
        while self.engine.schedule_one(self.now) {}
        for action in self.engine.actions() {
            match action {
                Action::Bind(binding) => {
                    writeln!(self.log, "bind {} to {}", binding.info.name, binding.node).unwrap();
                    self.bindings.push(binding);
                }
                Action::RecordEvent(note) => writeln!(self.log, "{} {}", note.reason, note.message).unwrap(),
                Action::PatchStatus { name, patch, .. } => {
                    let condition = &patch["status"]["conditions"][0];
                    let nominated = &patch["status"]["nominatedNodeName"];
                    writeln!(self.log, "patch {name} {} nominated {nominated}", condition["reason"]).unwrap();
                }
                Action::Cleanup(task) => {
                    let (what, claim) = match task {
                        CleanupTask::Release(claim) => ("release", claim),
                        CleanupTask::Delete(claim) => ("delete", claim),
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
        self.schedule_all();
        expected.assert_eq(&std::mem::take(&mut self.log));
    }

    fn finish_binding(&mut self, error: Option<&str>) {
        let binding = self.bindings.pop().expect("a binding waits for its answer");
        let event = match error {
            None => Event::Bound(Box::new(binding)),
            Some(message) => {
                let current: Option<Arc<core::Pod>> = Some(binding.pod.object.clone());
                let failure = BindFailure::Error(message.to_owned());
                Event::Unbound { binding: Box::new(binding), failure, current }
            }
        };
        self.engine.handle(event, self.now);
    }
}

#[test]
fn binds_pod_once() {
    let mut scheduler = new_test_scheduler();
    scheduler.node("node a");
    scheduler.pod(None, Some("pod p cpu=1"));
    scheduler.check(expect!["bind p to a\n"]);
    // Updates during the binding cycle do not start another one.
    scheduler.pod(Some("pod p cpu=1"), Some("pod p cpu=1 label=x=y"));
    scheduler.check(expect![""]);
    scheduler.finish_binding(None);
    scheduler.check(expect!["Scheduled Successfully assigned default/p to a\n"]);
    scheduler.pod(Some("pod p cpu=1"), Some("pod p cpu=1 on=a"));
    scheduler.check(expect![""]);
    assert_eq!(scheduler.engine.state.node_by_name("a").unwrap().pods.len(), 1);
    assert!(!scheduler.engine.state.is_assumed("uid-p"));
}

#[test]
fn assumed_pod_uses_node_resources() {
    let mut scheduler = new_test_scheduler();
    scheduler.node("node a cpu=1");
    scheduler.pod(None, Some("pod p cpu=1"));
    scheduler.pod(None, Some("pod q cpu=1"));
    scheduler.check(expect![[r#"
        bind p to a
        FailedScheduling 0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.
        patch q "Unschedulable" nominated null
    "#]]);
    // The binding fails: its resources are free and the other pod is scheduled.
    scheduler.finish_binding(Some("conflict"));
    scheduler.check(expect![[r#"
        FailedScheduling conflict
        patch p "SchedulerError" nominated null
        bind q to a
    "#]]);
}

#[test]
fn retries_failed_binding_after_backoff() {
    let mut scheduler = new_test_scheduler();
    scheduler.node("node a");
    scheduler.pod(None, Some("pod p"));
    scheduler.check(expect!["bind p to a\n"]);
    scheduler.finish_binding(Some("boom"));
    scheduler.check(expect![[r#"
        FailedScheduling boom
        patch p "SchedulerError" nominated null
    "#]]);
    scheduler.advance(2);
    scheduler.check(expect!["bind p to a\n"]);
    // The binding succeeds but no update event arrives: the assumed pod expires after 15 minutes.
    scheduler.finish_binding(None);
    scheduler.check(expect!["Scheduled Successfully assigned default/p to a\n"]);
    scheduler.advance(15 * 60 + 1);
    assert_eq!(scheduler.engine.state.pod_count(), 0);
}

#[test]
fn nominated_node_is_reserved_after_preemption() {
    let mut scheduler = new_test_scheduler();
    scheduler.node("node a cpu=1");
    scheduler.pod(None, Some("pod low on=a cpu=1"));
    scheduler.pod(None, Some("pod high cpu=1 priority=10"));
    scheduler.check(expect![[r#"
        FailedScheduling 0/1 nodes are available: 1 Insufficient cpu.
        patch high "Unschedulable" nominated "a"
        remove low from a
    "#]]);
    // A pod of lower priority may not use the resources reserved by the nomination.
    scheduler.pod(None, Some("pod middle cpu=1 priority=5"));
    scheduler.pod(Some("pod low on=a cpu=1"), None);
    scheduler.advance(2);
    scheduler.check(expect![[r#"
        bind high to a
        FailedScheduling 0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.
        patch middle "Unschedulable" nominated null
    "#]]);
}

#[test]
fn binds_pending_pod_when_node_is_added() {
    let mut scheduler = new_test_scheduler();
    scheduler.pod(None, Some("pod p"));
    scheduler.check(expect![[r#"
        FailedScheduling no nodes available to schedule pods
        patch p "Unschedulable" nominated null
    "#]]);
    scheduler.node("node a taint=k=v:NoSchedule");
    scheduler.advance(2);
    scheduler.check(expect![[r#"
        FailedScheduling 0/1 nodes are available: 1 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.
        patch p "Unschedulable" nominated null
    "#]]);
    scheduler.node("node a");
    scheduler.check(expect!["bind p to a\n"]);
}

#[test]
fn skips_pods_of_other_scheduler_and_terminating_pods() {
    let mut scheduler = new_test_scheduler();
    scheduler.node("node a");
    scheduler.pod(None, Some(r#"pod p {"spec":{"schedulerName":"mine"}}"#));
    scheduler.pod(None, Some("pod q leaving"));
    scheduler.pod(None, Some(r#"pod r {"status":{"phase":"Failed"}}"#));
    scheduler.check(expect!["FailedScheduling skip schedule deleting pod: default/q\n"]);
}

#[test]
fn gates_pod_until_resource_claims_exist() {
    use k8s_openapi::api::resource::v1 as resource;
    let mut scheduler = new_test_scheduler();
    scheduler.node("node a");
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
    let gated = |scheduler: &TestScheduler| scheduler.engine.queue.pending_pods()[3];
    let change = |scheduler: &mut TestScheduler, before: Option<Arc<resource::ResourceClaim>>, after| {
        scheduler.engine.handle(Event::ResourceClaim(Delta { before, after }), scheduler.now);
    };
    scheduler.pod(None, Some(&early));
    scheduler.check(expect![""]);
    assert_eq!(gated(&scheduler), 1);
    // A claim's name alone is not enough, nor one of two claims, nor a claim that another pod owns.
    scheduler.pod(Some(&early), Some(&named));
    change(&mut scheduler, None, Some(claim("shared", "x")));
    change(&mut scheduler, None, Some(claim("made", "another")));
    scheduler.node("node b");
    scheduler.check(expect![""]);
    assert_eq!(gated(&scheduler), 1);
    change(&mut scheduler, Some(claim("made", "another")), None);
    change(&mut scheduler, None, Some(claim("made", "uid-p")));
    scheduler.check(expect!["bind p to a\n"]);
}

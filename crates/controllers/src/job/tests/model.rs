//! A model of a Job, its pods and a controller that may be stopped between any two actions.

use std::collections::BTreeSet;

use jiff::SignedDuration;
use proptest::prelude::*;

use super::super::plan::is_finished;
use super::*;

/// The next operation. The numbers select one of the existing pods.
#[derive(Clone, Copy, Debug)]
enum Operation {
    /// A sync that is stopped after this number of actions.
    Sync(usize),
    /// A pod proceeds to its next phase.
    Run(usize),
    Fail(usize),
    /// A user deletes a pod.
    Delete(usize),
    Suspend(bool),
    Wait(i64),
}

fn operations() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => (0usize..9).prop_map(Operation::Sync),
        4 => (0usize..9).prop_map(Operation::Run),
        2 => (0usize..9).prop_map(Operation::Fail),
        1 => (0usize..9).prop_map(Operation::Delete),
        1 => any::<bool>().prop_map(Operation::Suspend),
        2 => (0i64..700).prop_map(Operation::Wait),
    ]
}

struct Model {
    job: Job,
    pods: Vec<Pod>,
    created_count: usize,
    /// In-memory state, lost when the controller is stopped.
    backoff: Option<Backoff>,
    now: Timestamp,
    /// Pods that were terminal or to be deleted when their finalizer was removed after counting.
    untracked: BTreeSet<String>,
    /// Those of them that were terminal.
    must_be_counted: BTreeSet<String>,
    /// Pods that are terminal or were deleted.
    ended: BTreeSet<String>,
}

enum ModelAction {
    Status(Box<JobStatus>),
    Untrack { uid: String, counts: bool },
    Delete(String),
    Create(NewPod),
}

impl Model {
    fn new(spec: Value) -> Model {
        let job = job(spec, json!({}));
        Model {
            job,
            pods: vec![],
            created_count: 0,
            backoff: None,
            now: now(),
            untracked: BTreeSet::new(),
            must_be_counted: BTreeSet::new(),
            ended: BTreeSet::new(),
        }
    }

    fn plan(&self, may_change_pods: bool) -> Plan {
        let pods: Vec<Arc<Pod>> = self.pods.iter().cloned().map(Arc::new).collect();
        let backoff = self.backoff.unwrap_or_else(|| backoff_from_counted_pods(&pods));
        plan(&JobSnapshot { job: &self.job, pods: &pods, backoff, now: self.now }, may_change_pods)
    }

    /// Runs one sync up to `limit` actions. Returns whether there was anything to do.
    fn sync(&mut self, limit: usize) -> bool {
        let plan = self.plan(true);
        let actions = model_actions(&plan);
        let (all, busy) = (actions.len() <= limit, !actions.is_empty());
        for act in actions.into_iter().take(limit) {
            self.apply(act);
        }
        self.backoff = all.then_some(plan.backoff);
        self.check();
        busy
    }

    fn apply(&mut self, act: ModelAction) {
        match act {
            ModelAction::Status(status) => self.job.status = Some(*status),
            ModelAction::Create(new_pod) => {
                self.created_count += 1;
                let mut pod = pods::pod(&self.job, &new_pod);
                let uid = format!("pod-{:03}", self.created_count);
                pod.metadata.name = Some(uid.clone());
                pod.metadata.uid = Some(uid);
                pod.metadata.creation_timestamp = Some(time(self.now));
                pod.status = Some(Default::default());
                self.pods.push(pod);
            }
            ModelAction::Delete(uid) => self.delete(&uid),
            ModelAction::Untrack { uid, counts } => {
                if let Some(pod) = self.pods.iter_mut().find(|pod| pod.uid() == uid) {
                    pod.metadata.finalizers = None;
                    if counts && pod::is_terminal(pod) {
                        self.must_be_counted.insert(uid.clone());
                    }
                    if counts {
                        assert!(self.untracked.insert(uid), "the finalizer was removed twice");
                    }
                }
            }
        }
        // Terminal pods without finalizer disappear when they are deleted.
        self.pods.retain(|pod| is_tracked(pod) || !pod.is_deleting());
    }

    fn delete(&mut self, uid: &str) {
        let now = self.now;
        if let Some(pod) = self.pods.iter_mut().find(|pod| pod.uid() == uid) {
            pod.metadata.deletion_timestamp = Some(time(now));
            self.ended.insert(uid.to_owned());
        }
    }

    fn end(&mut self, choice: usize, phase: &str) {
        let now = self.now;
        let mut running: Vec<&mut Pod> = self.pods.iter_mut().filter(|pod| !pod::is_terminal(pod)).collect();
        let count = running.len().max(1);
        if let Some(pod) = running.get_mut(choice % count) {
            let status = json!({"phase": phase, "conditions": [{"type": "Ready", "status": "False",
                "lastTransitionTime": now.to_string()}]});
            pod.status = Some(serde_json::from_value(status).expect("a status"));
            self.ended.insert(pod.uid().to_owned());
        }
    }

    fn execute(&mut self, what: Operation) {
        match what {
            Operation::Sync(limit) => _ = self.sync(limit),
            Operation::Run(choice) => self.end(choice, "Succeeded"),
            Operation::Fail(choice) => self.end(choice, "Failed"),
            Operation::Delete(choice) => {
                let uid = self.pods.get(choice % self.pods.len().max(1)).map(|pod| pod.uid().to_owned());
                uid.iter().for_each(|uid| self.delete(uid));
                self.pods.retain(|pod| is_tracked(pod) || !pod.is_deleting());
            }
            Operation::Suspend(suspend) if !is_finished(&self.job) => {
                self.job.spec.as_mut().expect("a spec").suspend = Some(suspend)
            }
            Operation::Suspend(_) => {}
            Operation::Wait(seconds) => self.now += SignedDuration::from_secs(seconds),
        }
    }

    fn counted(&self) -> usize {
        let status = self.job.status.clone().unwrap_or_default();
        usize::try_from(status.succeeded.unwrap_or(0) + status.failed.unwrap_or(0)).expect("a count")
    }

    /// Checks that only untracked pods are counted, and that parallelism is not exceeded.
    fn check(&self) {
        // Indexes are counted when observed, because adding to a set twice has no effect.
        let indexed = self.job.spec.as_ref().is_some_and(|spec| spec.completion_mode.is_some());
        let most = if indexed { &self.ended } else { &self.untracked };
        assert!(self.counted() <= most.len(), "{} counted of {most:?}", self.counted());
        let parallelism = self.job.spec.as_ref().and_then(|spec| spec.parallelism).unwrap_or(1);
        let active = self.pods.iter().filter(|pod| pod::is_active(pod)).count();
        assert!(active <= usize::try_from(parallelism).expect("a count"), "{active} at once");
    }
}

fn time(at: Timestamp) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::Time {
    k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at)
}

/// The actions of a step in order.
fn model_actions(plan: &Plan) -> Vec<ModelAction> {
    let untrack = |pod: &Arc<Pod>, counts| ModelAction::Untrack { uid: pod.uid().to_owned(), counts };
    let mut actions = Vec::new();
    match &plan.step {
        Step::Done => {}
        Step::Pods { remove, create } => {
            for pod in remove {
                actions.extend(is_tracked(pod).then(|| untrack(pod, false)));
                actions.push(ModelAction::Delete(pod.uid().to_owned()));
            }
            actions.extend(create.iter().cloned().map(ModelAction::Create));
        }
        Step::Track(tracking) => {
            actions
                .extend(tracking.status.iter().map(|status| ModelAction::Status(Box::new(status.clone()))));
            actions.extend(tracking.delete.iter().map(|pod| ModelAction::Delete(pod.uid().to_owned())));
            actions.extend(tracking.untrack.iter().map(|pod| untrack(pod, true)));
        }
    }
    actions
}

fn specs() -> impl Strategy<Value = Value> {
    let policy = prop_oneof![Just("Failed"), Just("TerminatingOrFailed")];
    (1i32..4, prop::option::of(1i32..6), any::<bool>(), 0i32..5, policy).prop_map(
        |(parallelism, completions, indexed, limit, policy)| {
            let mut spec = json!({"parallelism": parallelism, "completions": completions,
                "podReplacementPolicy": policy, "backoffLimit": limit});
            if indexed && completions.is_some() {
                spec["completionMode"] = json!("Indexed");
                if limit > 2 {
                    spec["backoffLimitPerIndex"] = json!(1);
                }
            }
            spec
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// For any operations and any stops of the controller, each pod is counted once and the Job finishes.
    #[test]
    fn every_pod_is_counted_once(spec in specs(), steps in prop::collection::vec(operations(), 0..60)) {
        let indexed = spec["completionMode"] == "Indexed";
        let mut model = Model::new(spec);
        for what in steps {
            model.execute(what);
        }
        model.execute(Operation::Suspend(false));
        for _ in 0..200 {
            while model.sync(usize::MAX) {}
            if is_finished(&model.job) {
                break;
            }
            model.now += SignedDuration::from_secs(700);
            model.end(0, "Succeeded");
        }
        prop_assert!(is_finished(&model.job), "the Job never finishes: {:?} {:?}", model.job.status, model.pods);
        prop_assert_eq!(render(&model.plan(true)), "rest\n");
        let left: Vec<&str> = model.pods.iter().filter(|pod| is_tracked(pod)).map(|pod| pod.uid()).collect();
        prop_assert!(left.is_empty(), "still tracked: {:?}", left);
        // Two pods of one index count once. This can happen if a pod is deleted while it succeeds.
        if !indexed {
            prop_assert!(model.counted() >= model.must_be_counted.len(), "{:?} of {:?}", model.job.status, model.must_be_counted);
        }
    }
}

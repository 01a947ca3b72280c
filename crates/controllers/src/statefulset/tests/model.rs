//! A model of a StatefulSet, its pods and a controller that may be stopped between any two actions.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::pod::{is_ready, is_terminal};

/// The next operation. The numbers select one of the existing pods.
#[derive(Clone, Copy, Debug)]
enum Operation {
    /// A sync that is stopped after this number of actions.
    Sync(usize),
    /// A pod proceeds: it becomes ready unless its image is broken, or disappears if it is being deleted.
    Run(usize),
    Fail(usize),
    /// A user deletes a pod.
    Delete(usize),
    /// Sets another image; 0 is broken.
    Image(u8),
    Scale(i32),
    Partition(i32),
}

fn operations() -> impl Strategy<Value = Operation> {
    prop_oneof![
        8 => (0usize..4).prop_map(Operation::Sync),
        8 => (0usize..9).prop_map(Operation::Run),
        1 => (0usize..9).prop_map(Operation::Fail),
        1 => (0usize..9).prop_map(Operation::Delete),
        1 => (0u8..4).prop_map(Operation::Image),
        1 => (0i32..5).prop_map(Operation::Scale),
        1 => (0i32..4).prop_map(Operation::Partition),
    ]
}

struct Model {
    set: StatefulSet,
    pods: BTreeMap<String, Pod>,
    claims: BTreeMap<String, PersistentVolumeClaim>,
    revisions: Vec<Arc<ControllerRevision>>,
    created_count: usize,
}

impl Model {
    fn spec(&mut self) -> &mut k8s_openapi::api::apps::v1::StatefulSetSpec {
        self.set.spec.as_mut().expect("a spec")
    }

    fn replicas(&self) -> i32 {
        self.set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }

    fn is_ordered(&self) -> bool {
        let spec = self.set.spec.as_ref().expect("a spec");
        spec.pod_management_policy.as_deref() != Some("Parallel")
    }

    fn plan(&self) -> Plan {
        let pods: Vec<Arc<Pod>> = self.pods.values().cloned().map(Arc::new).collect();
        let claims: Vec<_> = self.claims.values().cloned().map(Arc::new).collect();
        let spec = self.set.spec.as_ref().expect("a spec");
        let history = History::of(&spec.template, self.revisions.clone());
        plan(
            &StatefulSetSnapshot {
                set: &self.set,
                spec,
                pods: &pods,
                claims: &claims,
                history: &history,
                now: now(),
            },
            true,
        )
    }

    /// Runs one sync up to `limit` actions. Returns whether there was anything to do.
    fn sync(&mut self, limit: usize) -> bool {
        match self.plan().step {
            Step::Done => return false,
            _ if limit == 0 => {}
            Step::Revise(MissingRevision::Create { number }) => {
                self.revisions.push(revision(&self.set, number))
            }
            Step::Revise(MissingRevision::SetNumber { revision, number }) => {
                self.revisions.retain(|known| known.name() != revision.name());
                self.revisions.push(Arc::new(ControllerRevision { revision: number, ..(*revision).clone() }));
            }
            Step::TruncateHistory(old) => self.revisions.retain(|known| !old.contains(known)),
            Step::Status(status) => self.set.status = Some(status),
            Step::Apply(actions) => actions.into_iter().take(limit).for_each(|action| self.apply(action)),
        }
        true
    }

    fn apply(&mut self, action: Action) {
        match action {
            Action::CreateClaim { claim, .. } => {
                assert!(
                    self.claims.insert(claim.name().to_owned(), claim).is_none(),
                    "a claim must be created once"
                );
            }
            Action::UpdateClaimOwners(claim) => _ = self.claims.insert(claim.name().to_owned(), claim),
            Action::CreatePod(mut pod) => {
                let ordinal = pods::ordinal(&self.set, &pod).expect("an ordinal");
                assert!(ordinal < self.replicas(), "ordinal {ordinal} is out of range");
                for lower in (0..ordinal).filter(|_| self.is_ordered()) {
                    let below = self.pods.get(&pods::pod_name(&self.set, lower));
                    assert!(
                        below.is_some_and(is_ready),
                        "ordinal {ordinal} was created before {lower} is healthy"
                    );
                }
                assert!(
                    self.claims.contains_key(&format!("data-{}", pod.name())),
                    "a pod was created before its claim"
                );
                self.created_count += 1;
                pod.metadata.uid = Some(format!("uid-{}", self.created_count));
                pod.status = serde_json::from_value(json!({"phase": "Pending"})).expect("a status");
                let previous = self.pods.insert(pod.name().to_owned(), *pod);
                assert!(previous.is_none(), "an ordinal must have one pod only");
            }
            Action::DeletePod(pod) => {
                let ordinal = pods::ordinal(&self.set, &pod).expect("an ordinal");
                let has_greater_ordinal =
                    self.pods.keys().any(|name| *name > pods::pod_name(&self.set, ordinal));
                let surplus = ordinal >= self.replicas();
                assert!(
                    !(surplus && has_greater_ordinal && self.is_ordered()),
                    "ordinal {ordinal} was deleted before higher ones"
                );
                self.delete(pod.name());
            }
            Action::LabelPod { .. } | Action::Wait { .. } => {}
        }
    }

    fn delete(&mut self, name: &str) {
        if let Some(pod) = self.pods.get_mut(name) {
            pod.metadata.deletion_timestamp = serde_json::from_value(json!(NOW)).expect("a time");
        }
    }

    fn pod_at(&self, choice: usize) -> Option<String> {
        self.pods.keys().nth(choice % self.pods.len().max(1)).cloned()
    }

    fn run(&mut self, name: &str) {
        let Some(pod) = self.pods.get_mut(name) else { return };
        let image = pod.spec.as_ref().and_then(|spec| spec.containers[0].image.clone());
        if pod.is_deleting() {
            self.pods.remove(name);
        } else if !is_terminal(pod) && image.as_deref() != Some("image-0") {
            let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
            pod.status = serde_json::from_value(ready).expect("a status");
        }
    }

    fn execute(&mut self, what: Operation) {
        match what {
            Operation::Sync(limit) => _ = self.sync(limit),
            Operation::Run(choice) => {
                if let Some(name) = self.pod_at(choice) {
                    self.run(&name);
                }
            }
            Operation::Fail(choice) => {
                let name = self.pod_at(choice);
                if let Some(pod) = name.and_then(|name| self.pods.get_mut(&name)) {
                    pod.status = serde_json::from_value(json!({"phase": "Failed"})).expect("a status");
                }
            }
            Operation::Delete(choice) => {
                if let Some(name) = self.pod_at(choice) {
                    self.delete(&name);
                }
            }
            Operation::Image(image) => {
                let template = self.spec().template.spec.as_mut().expect("a pod");
                template.containers[0].image = Some(format!("image-{image}"));
            }
            Operation::Scale(replicas) => self.spec().replicas = Some(replicas),
            Operation::Partition(partition) => {
                let strategy = self.spec().update_strategy.as_mut().expect("a strategy");
                strategy.rolling_update.get_or_insert_default().partition = Some(partition);
            }
        }
    }

    fn run_until_stable(&mut self) {
        for _ in 0..300 {
            while self.sync(usize::MAX) {}
            let names: Vec<String> = self.pods.keys().cloned().collect();
            let waiting = |pod: &Pod| pod.is_deleting() || !is_ready(pod);
            if !self.pods.values().any(waiting) {
                return;
            }
            names.iter().for_each(|name| self.run(name));
        }
        panic!("the plan does not converge: {} {:?}", render(&self.plan()), self.pods.keys());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// For any operations and any stops of the controller, there is never a second pod of an ordinal, the
    /// order is kept, and all pods are updated as soon as the template works.
    #[test]
    fn state_is_consistent_after_interrupted_sync(parallel in any::<bool>(), steps in prop::collection::vec(operations(), 0..80)) {
        let policy = if parallel { "Parallel" } else { "OrderedReady" };
        let spec = json!({"replicas": 3, "podManagementPolicy": policy,
            "volumeClaimTemplates": [{"metadata": {"name": "data"}}], "revisionHistoryLimit": 2,
            "persistentVolumeClaimRetentionPolicy": {"whenScaled": "Retain", "whenDeleted": "Delete"}});
        let set = set(spec, "image-1");
        let mut model = Model { set, pods: BTreeMap::new(), claims: BTreeMap::new(), revisions: vec![], created_count: 0 };
        for what in steps {
            model.execute(what);
        }
        model.execute(Operation::Image(9));
        model.execute(Operation::Partition(0));
        model.run_until_stable();
        prop_assert_eq!(render(&model.plan()), "rest\n");
        let replicas = usize::try_from(model.replicas()).expect("a count");
        prop_assert_eq!(model.pods.len(), replicas);
        for pod in model.pods.values() {
            prop_assert_eq!(pod.spec.as_ref().and_then(|spec| spec.containers[0].image.as_deref()), Some("image-9"));
        }
        let status = model.set.status.clone().unwrap_or_default();
        prop_assert_eq!(status.current_revision, status.update_revision);
        prop_assert!(model.revisions.len() <= 3, "{} revisions", model.revisions.len());
    }
}

//! A Deployment and its ReplicaSets without an API server. Plans are applied to it, and the ReplicaSet
//! controller and the kubelet are simulated.

use std::fmt::Write as _;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, ReplicaSetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::Object as _;
use serde_json::{Value, json};

use super::super::scale::RolloutLimits;
use super::super::{Action, plan};

pub struct FakeCluster {
    pub deployment: Deployment,
    sets: Vec<Arc<ReplicaSet>>,
    pub now: Timestamp,
    created: i64,
    pub next: Option<Timestamp>,
    /// A log of the applied changes.
    pub log: String,
    without_status: bool,
}

impl FakeCluster {
    pub fn new(replicas: i32, surge: &str, unavailable: &str) -> FakeCluster {
        let number = |text: &str| text.parse::<i32>().map_or_else(|_| json!(text), |number| json!(number));
        let value = json!({
            "metadata": {"name": "web", "namespace": "d", "uid": "d", "generation": 1},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}},
                "progressDeadlineSeconds": 600, "revisionHistoryLimit": 10,
                "strategy": {"type": "RollingUpdate",
                    "rollingUpdate": {"maxSurge": number(surge), "maxUnavailable": number(unavailable)}},
                "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": []}}},
        });
        let mut cluster = FakeCluster {
            deployment: serde_json::from_value(value).expect("a deployment"),
            sets: Vec::new(),
            now: "2026-01-01T12:00:00Z".parse().expect("a time"),
            created: 0,
            next: None,
            log: String::new(),
            without_status: false,
        };
        cluster.template("a");
        cluster
    }

    pub fn limits(&self) -> RolloutLimits {
        RolloutLimits::of(&self.deployment)
    }

    /// Clears the log and stops logging status changes.
    pub fn log_without_status(&mut self) -> &mut FakeCluster {
        self.log.clear();
        self.without_status = true;
        self
    }

    pub fn template(&mut self, name: &str) -> &mut FakeCluster {
        self.spec(|spec| spec["template"]["spec"] = json!({"containers": [{"name": "c", "image": name}]}))
    }

    pub fn replicas(&mut self, replicas: i32) -> &mut FakeCluster {
        self.spec(|spec| spec["replicas"] = json!(replicas))
    }

    pub fn paused(&mut self, paused: bool) -> &mut FakeCluster {
        self.spec(|spec| spec["paused"] = json!(paused))
    }

    pub fn history(&mut self, limit: i32) -> &mut FakeCluster {
        self.spec(|spec| spec["revisionHistoryLimit"] = json!(limit))
    }

    pub fn recreate(&mut self) -> &mut FakeCluster {
        self.spec(|spec| spec["strategy"] = json!({"type": "Recreate"}))
    }

    pub fn annotate(&mut self, name: &str, value: &str) -> &mut FakeCluster {
        let annotations = self.deployment.metadata.annotations.get_or_insert_default();
        annotations.insert(name.to_owned(), value.to_owned());
        self
    }

    pub fn advance(&mut self, seconds: i64) -> &mut FakeCluster {
        self.now = self.now.checked_add(SignedDuration::from_secs(seconds)).expect("a time");
        self
    }

    fn spec(&mut self, change: impl FnOnce(&mut Value)) -> &mut FakeCluster {
        let mut spec = serde_json::to_value(&self.deployment.spec).expect("a spec");
        change(&mut spec);
        let spec = serde_json::from_value(spec).expect("a spec");
        if self.deployment.spec != spec {
            self.deployment.spec = spec;
            *self.deployment.metadata.generation.get_or_insert_default() += 1;
        }
        self
    }

    /// Runs all controllers until nothing changes.
    pub fn run_until_stable(&mut self) -> &mut FakeCluster {
        for round in 0.. {
            assert!(round < 500, "the plan does not converge:\n{}", self.log);
            let before = (self.deployment.clone(), self.sets.clone());
            self.sync_checked();
            for i in 0..self.sets.len() {
                self.sync_replica_set(i);
            }
            if before == (self.deployment.clone(), self.sets.clone()) {
                // One pod at a time, so that every intermediate state is observed.
                (0..self.sets.len()).for_each(|i| self.make_pod_available(i));
                if before.1 == self.sets {
                    break;
                }
            }
        }
        self
    }

    /// Simulates the ReplicaSet controller. Unavailable pods are deleted first.
    pub fn sync_replica_set(&mut self, i: usize) {
        let Some(set) = self.sets.get_mut(i) else { return };
        let desired = replicas(set);
        let before = set.status.clone().unwrap_or_default();
        let available = before.available_replicas.unwrap_or(0).min(desired);
        let status = ReplicaSetStatus {
            replicas: desired,
            ready_replicas: Some(available),
            available_replicas: Some(available),
            observed_generation: set.metadata.generation,
            ..before
        };
        if set.status.as_ref() != Some(&status) {
            Arc::make_mut(set).status = Some(status);
        }
    }

    /// Makes one more pod available, unless the template is `bad`.
    pub fn make_pod_available(&mut self, i: usize) {
        let Some(set) = self.sets.get_mut(i).filter(|set| image(set) != "bad") else { return };
        let has = set.status.as_ref().map_or(0, |status| status.replicas);
        let available = available(set);
        if available < has {
            let status = Arc::make_mut(set).status.get_or_insert_default();
            (status.available_replicas, status.ready_replicas) = (Some(available + 1), Some(available + 1));
        }
    }

    pub fn break_pod(&mut self, i: usize) {
        let Some(set) = self.sets.get_mut(i).filter(|set| available(set) > 0) else { return };
        let reduced = Some(available(set) - 1);
        let status = Arc::make_mut(set).status.get_or_insert_default();
        (status.available_replicas, status.ready_replicas) = (reduced, reduced);
    }

    /// Runs one sync and checks that it stays within the rollout limits.
    pub fn sync_checked(&mut self) {
        let limits = self.limits();
        let total = |sets: &[Arc<ReplicaSet>]| sets.iter().map(|set| replicas(set)).sum::<i32>();
        let available_total =
            |sets: &[Arc<ReplicaSet>]| sets.iter().map(|set| available(set).min(replicas(set))).sum::<i32>();
        let desired = limits.replicas.to_string();
        let is_scaling = |set: &&Arc<ReplicaSet>| {
            replicas(set) > 0 && set.annotation("deployment.kubernetes.io/desired-replicas") != Some(&desired)
        };
        // Proportional scaling is not a rollout step and is not checked.
        let scaling = limits.paused || self.sets.iter().any(|set| is_scaling(&set));
        let (before, available_before) = (total(&self.sets), available_total(&self.sets));
        let pods_before: Vec<(String, i32)> =
            self.sets.iter().map(|set| (image(set), running(set))).collect();
        self.sync();
        if scaling {
            return;
        }
        if !limits.rolling {
            let current = image_of(&self.deployment);
            let is_new = self.sets.iter().any(|set| image(set) == current && replicas(set) > 0);
            let was_new = pods_before.iter().any(|(name, pods)| *name == current && *pods > 0);
            if is_new && !was_new && before == 0 {
                assert!(
                    pods_before.iter().all(|(name, pods)| *name == current || *pods == 0),
                    "{}",
                    self.log
                );
            }
        } else {
            assert!(
                total(&self.sets) <= before.max(limits.max_total_pods()),
                "too many replicas:\n{}",
                self.log
            );
            let min_available = available_before.min(limits.min_available());
            assert!(
                available_total(&self.sets) >= min_available,
                "too few available replicas:\n{}",
                self.log
            );
        }
    }

    pub fn sync(&mut self) {
        let pods = |set: &ReplicaSet| running(set) > 0;
        self.next = None;
        for action in plan(&self.deployment, &self.sets, pods, self.now) {
            match action {
                Action::CreateSet(set) => {
                    let (image, size) = (image(&set), replicas(&set));
                    let revision = set.annotation("deployment.kubernetes.io/revision").unwrap_or("none");
                    let _ = writeln!(self.log, "create {image} 0->{size} revision={revision}");
                    let mut set = *set;
                    self.created += 1;
                    set.metadata.uid = Some(set.name().to_owned());
                    set.metadata.generation = Some(1);
                    let time = Timestamp::from_second(self.created).expect("a time");
                    set.metadata.creation_timestamp = Some(Time(time));
                    self.sets.push(Arc::new(set));
                }
                Action::UpdateSet { set, from } => {
                    let to = replicas(&set);
                    if from != to {
                        let _ = writeln!(self.log, "scale {} {from}->{to}", image(&set));
                    }
                    let mut set = set;
                    *Arc::make_mut(&mut set).metadata.generation.get_or_insert_default() +=
                        i64::from(from != to);
                    let slot = self.sets.iter_mut().find(|other| other.name() == set.name());
                    *slot.expect("a set") = set;
                }
                Action::DeleteSet(set) => {
                    let _ = writeln!(self.log, "delete {}", image(&set));
                    self.sets.retain(|other| other.name() != set.name());
                }
                Action::WriteStatus(updated) => {
                    self.deployment = *updated;
                    if !self.without_status {
                        self.log_status();
                    }
                }
                Action::WriteSpec(written) => {
                    let _ = writeln!(self.log, "write {}", image_of(&written));
                    let changed = i64::from(written.spec != self.deployment.spec);
                    self.deployment = *written;
                    *self.deployment.metadata.generation.get_or_insert_default() += changed;
                }
                Action::Event(_, reason, message) => _ = writeln!(self.log, "event {reason} {message}"),
                Action::RequeueAt(at) => self.next = Some(at),
            }
        }
    }

    fn log_status(&mut self) {
        let status = self.deployment.status.clone().unwrap_or_default();
        let counts = [
            ("replicas", status.replicas),
            ("updated", status.updated_replicas),
            ("available", status.available_replicas),
            ("unavailable", status.unavailable_replicas),
        ];
        let mut line = "status".to_owned();
        for (name, count) in counts {
            let _ = write!(line, " {name}={}", count.unwrap_or(0));
        }
        for condition in status.conditions.iter().flatten() {
            let reason = condition.reason.as_deref().unwrap_or_default();
            let _ = write!(line, " {}={}/{reason}", condition.type_, condition.status);
        }
        let _ = writeln!(self.log, "{line}");
    }

    /// The ReplicaSets and their replica counts: the one of the current template first, then by age.
    pub fn sizes(&self) -> String {
        let current = image_of(&self.deployment);
        let mut sets: Vec<_> = self.sets.iter().collect();
        sets.sort_by_key(|set| image(set) != current);
        let sizes: Vec<String> = sets.iter().map(|set| format!("{}={}", image(set), replicas(set))).collect();
        sizes.join(" ")
    }

    pub fn condition(&self, kind: &str) -> String {
        let conditions = self.deployment.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let mut found = conditions.filter(|condition| condition.type_ == kind);
        let found = found.next().expect("the condition");
        let (reason, message) = (found.reason.as_deref(), found.message.as_deref());
        format!("{}/{} {}", found.status, reason.unwrap_or_default(), message.unwrap_or_default())
    }

    /// The annotation with this suffix, of the ReplicaSet with this template or else of the Deployment.
    pub fn annotation(&self, template: &str, name: &str) -> String {
        let set = self.sets.iter().find(|set| image(set) == template);
        let metadata = set.map_or(&self.deployment.metadata, |set| &set.metadata);
        let mut found =
            metadata.annotations.iter().flatten().filter(|(key, _)| key.ends_with(&format!("/{name}")));
        found.next().map(|(_, value)| value.clone()).unwrap_or_default()
    }
}

fn replicas(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

fn running(set: &ReplicaSet) -> i32 {
    set.status.as_ref().map_or(0, |status| status.replicas)
}

fn available(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
}

fn image(set: &ReplicaSet) -> String {
    let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
    let container = template.and_then(|template| template.spec.as_ref()?.containers.first());
    container.and_then(|container| container.image.clone()).unwrap_or_default()
}

fn image_of(deployment: &Deployment) -> String {
    let container = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()?.containers.first());
    container.and_then(|container| container.image.clone()).unwrap_or_default()
}

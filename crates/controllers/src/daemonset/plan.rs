//! Decides which nodes a DaemonSet's pods are made on and deleted from, and in which order they are replaced.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, DaemonSetSpec, DaemonSetStatus};
use k8s_openapi::api::core::v1::{Node, Pod};
use reconcile::{Object as _, Severity};

use super::pods::{Wish, is_updated, target, wish};
use super::rollout;
use crate::history::{History, POD_REVISION, Revise, surplus};
use crate::pod::{is_available, is_ready, is_terminal, next_available, node, phase};

/// The most pods made, and the most deleted, at once.
const BURST: usize = 250;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(15 * 60);

/// A DaemonSet as its controller sees it.
pub struct Sight<'a> {
    pub set: &'a DaemonSet,
    pub spec: &'a DaemonSetSpec,
    pub nodes: &'a [Arc<Node>],
    /// The pods it owns.
    pub pods: &'a [Arc<Pod>],
    pub history: &'a History,
    /// Nodes on which its pods have failed.
    pub retries: &'a Retries,
    pub now: Timestamp,
}

/// How long to wait before a failed pod is replaced, by node.
pub type Retries = HashMap<String, Retry>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Retry {
    pub pause: Duration,
    pub since: Timestamp,
}

/// What to do next.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub step: Step,
    pub recheck: Option<Timestamp>,
}

#[derive(Debug, Default, PartialEq)]
pub enum Step {
    #[default]
    Rest,
    /// The present template has several revisions.
    Merge {
        keep: Arc<ControllerRevision>,
        drop: Vec<Arc<ControllerRevision>>,
        relabel: Vec<Arc<Pod>>,
    },
    Revise(Revise),
    Pods(Pods),
    Trim(Vec<Arc<ControllerRevision>>),
    Status(DaemonSetStatus),
}

/// Pods to make and to delete.
#[derive(Debug, Default, PartialEq)]
pub struct Pods {
    pub delete: Vec<Arc<Pod>>,
    /// The nodes to make pods for.
    pub create: Vec<String>,
    pub retries: Vec<(String, Retry)>,
    pub events: Vec<(Severity, &'static str, String)>,
}

/// What to do next. `manage` is whether pods may be made and deleted.
pub fn plan(sight: &Sight<'_>, manage: bool) -> Plan {
    // Its revisions may be gone before its pods, so nothing that is said about it can be relied on.
    if sight.set.is_deleting() {
        return Plan::default();
    }
    if let Some(step) = merge(sight) {
        return Plan { step, recheck: None };
    }
    let current = match sight.history.settled() {
        Ok(current) => current,
        Err(lacking) => return Plan { step: Step::Revise(lacking), recheck: None },
    };
    let hash = current.label(POD_REVISION).unwrap_or_default();
    let places = Places::of(sight, hash);
    let mut plan = Plan { recheck: None, step: Step::Rest };
    let pause = sight.spec.min_ready_seconds.unwrap_or(0);
    plan.recheck = next_available(sight.pods, pause, sight.now);
    if manage {
        let (mut pods, wait) = places.manage();
        plan.recheck = [plan.recheck, wait].into_iter().flatten().min();
        if pods.delete.is_empty() && pods.create.is_empty() && rolls(sight.spec) {
            (pods.delete, pods.create) = rollout::plan(&places);
        }
        pods.delete.truncate(BURST);
        pods.create.truncate(BURST);
        if !pods.delete.is_empty() || !pods.create.is_empty() {
            plan.step = Step::Pods(pods);
            return plan;
        }
    }
    let used = |revision: &ControllerRevision| {
        let hash = revision.label(POD_REVISION);
        sight.pods.iter().any(|pod| hash.is_some() && pod.label(POD_REVISION) == hash)
    };
    let old = surplus(&sight.history.old, sight.spec.revision_history_limit, used);
    let status = places.status();
    if !old.is_empty() {
        plan.step = Step::Trim(old.into_iter().cloned().collect());
    } else if sight.set.status.as_ref() != Some(&status) {
        plan.step = Step::Status(status);
    }
    plan
}

fn rolls(spec: &DaemonSetSpec) -> bool {
    let strategy = spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref());
    strategy == Some("RollingUpdate")
}

fn merge(sight: &Sight<'_>) -> Option<Step> {
    let (keep, drop) = sight.history.current.split_last().filter(|(_, drop)| !drop.is_empty())?;
    let hash = keep.label(POD_REVISION);
    let dropped = |pod: &&Arc<Pod>| {
        let label = pod.label(POD_REVISION);
        label != hash && drop.iter().any(|revision| revision.label(POD_REVISION) == label)
    };
    let relabel = sight.pods.iter().filter(dropped).cloned().collect();
    Some(Step::Merge { keep: keep.clone(), drop: drop.to_vec(), relabel })
}

/// A DaemonSet's pods by the nodes they are on or meant for.
pub(super) struct Places<'a> {
    pub(super) sight: &'a Sight<'a>,
    pub(super) hash: &'a str,
    pub(super) wishes: BTreeMap<&'a str, Wish>,
    /// Without those that are over and going away, which are nobody's concern any more. The oldest first, but
    /// those on a node before those that wait for one.
    pub(super) pods: BTreeMap<&'a str, Vec<&'a Arc<Pod>>>,
}

impl<'a> Places<'a> {
    fn of(sight: &'a Sight<'a>, hash: &'a str) -> Places<'a> {
        let wishes = sight.nodes.iter().map(|node| (node.name(), wish(sight.set, node))).collect();
        let mut pods: BTreeMap<&str, Vec<&Arc<Pod>>> = BTreeMap::new();
        for pod in sight.pods.iter().filter(|pod| !(is_terminal(pod) && pod.is_deleting())) {
            if let Some(node) = target(pod) {
                pods.entry(node).or_default().push(pod);
            }
        }
        for list in pods.values_mut() {
            list.sort_by_key(|pod| {
                let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
                (node(pod).is_empty(), created, pod.name().to_owned())
            });
        }
        Places { sight, hash, wishes, pods }
    }

    pub(super) fn is_new(&self, pod: &Pod) -> bool {
        is_updated(pod, self.sight.set, self.hash)
    }

    pub(super) fn is_available(&self, pod: &Pod) -> bool {
        is_available(pod, self.sight.spec.min_ready_seconds.unwrap_or(0), self.sight.now)
    }

    pub(super) fn desired(&self) -> usize {
        self.wishes.values().filter(|wish| **wish == Wish::Run).count()
    }

    /// One pod on each node that should have one, none on the others. Also tells when to look again.
    fn manage(&self) -> (Pods, Option<Timestamp>) {
        let (mut pods, mut wait) = (Pods::default(), None);
        for (name, wish) in &self.wishes {
            let here = self.pods.get(name).map(Vec::as_slice).unwrap_or_default();
            match wish {
                Wish::Run if here.is_empty() => pods.create.push((*name).to_owned()),
                Wish::Leave => {
                    pods.delete.extend(here.iter().filter(|pod| !pod.is_deleting()).copied().cloned())
                }
                _ => {
                    let again = self.keep(name, *wish, here, &mut pods);
                    wait = [wait, again].into_iter().flatten().min();
                }
            }
        }
        // Nobody else deletes pods that wait for a node that is gone.
        let lost = self.pods.iter().filter(|(name, _)| !self.wishes.contains_key(*name));
        let waiting =
            lost.flat_map(|(_, list)| list).filter(|pod| node(pod).is_empty() && !pod.is_deleting());
        pods.delete.extend(waiting.copied().cloned());
        (pods, wait)
    }

    /// Deletes what is over or too much on a node.
    fn keep(&self, name: &str, wish: Wish, here: &[&Arc<Pod>], pods: &mut Pods) -> Option<Timestamp> {
        let (mut running, mut wait) = (Vec::new(), None);
        for pod in here.iter().filter(|pod| !pod.is_deleting()) {
            match phase(pod) {
                "Failed" => match self.retry(name) {
                    Err(until) => wait = Some(until),
                    Ok(retry) => {
                        let message = format!(
                            "Found failed daemon pod {} on node {name}, will try to kill it",
                            pod.key()
                        );
                        pods.events.push((Severity::Warning, "FailedDaemonPod", message));
                        pods.retries.push((name.to_owned(), retry));
                        pods.delete.push(Arc::clone(pod));
                    }
                },
                "Succeeded" => {
                    let message = format!(
                        "Found succeeded daemon pod {} on node {name}, will try to delete it",
                        pod.key()
                    );
                    pods.events.push((Severity::Normal, "SucceededDaemonPod", message));
                    pods.delete.push(Arc::clone(pod));
                }
                _ => running.push(*pod),
            }
        }
        if !rollout::surges(self.sight.spec) {
            pods.delete.extend(running.into_iter().skip(1).cloned());
            return wait;
        }
        if running.is_empty() && wish == Wish::Run && wait.is_none() {
            pods.create.push(name.to_owned());
        }
        if running.len() > 1 {
            self.prune(running, pods);
        }
        wait
    }

    /// Where two may run, they are an old one that serves and a new one that does not yet.
    fn prune(&self, running: Vec<&Arc<Pod>>, pods: &mut Pods) {
        let (new, old): (Vec<_>, Vec<_>) =
            running.into_iter().partition(|pod| pod.label(POD_REVISION) == Some(self.hash));
        if let (Some(new), Some(old)) = (new.first(), old.first())
            && (!is_ready(old) || self.is_available(new))
        {
            pods.delete.push(Arc::clone(old));
        }
        pods.delete.extend(new.into_iter().skip(1).chain(old.into_iter().skip(1)).cloned());
    }

    /// How to go on after a pod has failed on a node, or until when to wait.
    fn retry(&self, node: &str) -> Result<Retry, Timestamp> {
        let now = self.sight.now;
        let Some(last) = self.sight.retries.get(node) else {
            return Ok(Retry { pause: FIRST_PAUSE, since: now });
        };
        let until = last.since.checked_add(last.pause).unwrap_or(Timestamp::MAX);
        let forgotten = last.since.checked_add(LONGEST_PAUSE * 2).unwrap_or(Timestamp::MAX);
        match now {
            now if now < until => Err(until),
            now if now > forgotten => Ok(Retry { pause: FIRST_PAUSE, since: now }),
            now => Ok(Retry { pause: (last.pause * 2).min(LONGEST_PAUSE), since: now }),
        }
    }

    fn status(&self) -> DaemonSetStatus {
        let mut status = self.sight.set.status.clone().unwrap_or_default();
        let (mut desired, mut current, mut misscheduled, mut ready) = (0, 0, 0, 0);
        let (mut updated, mut available) = (0, 0);
        for (name, wish) in &self.wishes {
            let first = self.pods.get(name).and_then(|list| list.first());
            if *wish != Wish::Run {
                misscheduled += i32::from(first.is_some());
                continue;
            }
            desired += 1;
            let Some(pod) = first else { continue };
            current += 1;
            ready += i32::from(is_ready(pod));
            available += i32::from(self.is_available(pod));
            updated += i32::from(self.is_new(pod));
        }
        let number = |count: i32| Some(count).filter(|count| *count != 0);
        status.desired_number_scheduled = desired;
        status.current_number_scheduled = current;
        status.number_misscheduled = misscheduled;
        status.number_ready = ready;
        status.updated_number_scheduled = number(updated);
        status.number_available = number(available);
        status.number_unavailable = number(desired - available);
        status.observed_generation = self.sight.set.metadata.generation;
        status
    }
}

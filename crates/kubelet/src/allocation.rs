//! What the node has agreed to give each of its pods. A pod whose spec asks for something else gets it once there is room
//! beside what was promised to the others; until then it goes on with what it has. [`plan`] has the judgement.
//!
//! What was agreed to is written down in the pod's directory, and so is what its runs were given last: both outlive this
//! process, and go with the pod. Nothing is forced onto the disk: whatever loses it has also ended all that ran.

mod plan;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use reconcile::{Key, Object as _};
use schema::quantity::Quantity;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::admission::{self, Refusal};
use crate::memory::Memory;
use crate::observed::Observed;
use crate::pod::resize::said::{Resizing, summary};
use crate::pod::resize::{Amounts, Whole, is_under_way};
use crate::{Node, pod};
use plan::{Present, decide};

/// In the directory of a pod.
const FILE: &str = "resources.json";

/// What is written down of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub allocated: Allocation,
    /// What runs were given last, by their ids, where that is not what they were made with.
    pub given: BTreeMap<String, Amounts>,
    /// What all of them were given together.
    pub whole: Whole,
}

/// What was agreed to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Allocation {
    pub pod: Option<ResourceRequirements>,
    /// By name.
    pub containers: BTreeMap<String, ResourceRequirements>,
}

impl Record {
    fn new(pod: &Pod) -> Record {
        Record { allocated: Allocation::of(pod), whole: Whole::of(pod), ..Record::default() }
    }

    fn read(dir: &Path) -> Option<Record> {
        serde_json::from_slice(&std::fs::read(dir.join(FILE)).ok()?).ok()
    }

    /// Writes it down, whole or not at all.
    fn keep(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let aside = dir.join(format!(".{FILE}"));
        std::fs::write(&aside, serde_json::to_vec(self)?)?;
        std::fs::rename(&aside, dir.join(FILE))
    }
}

impl Allocation {
    /// All that the pod asks for.
    pub fn of(pod: &Pod) -> Allocation {
        let Some(spec) = &pod.spec else { return Allocation::default() };
        let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        let own =
            |container: &Container| (container.name.clone(), container.resources.clone().unwrap_or_default());
        Allocation { pod: spec.resources.clone(), containers: containers.map(own).collect() }
    }

    /// Whether the pod asks for something else.
    pub fn differs(&self, pod: &Pod) -> bool {
        let wanted = Allocation::of(pod);
        let same = |a: Option<&ResourceRequirements>, b: Option<&ResourceRequirements>| {
            let lists = |resources: Option<&ResourceRequirements>| {
                let resources = resources.cloned().unwrap_or_default();
                [amounts(resources.requests), amounts(resources.limits)]
            };
            lists(a) == lists(b)
        };
        let is_same = |(name, wanted)| same(self.containers.get(name), Some(wanted));
        !(same(self.pod.as_ref(), wanted.pod.as_ref()) && wanted.containers.iter().all(is_same))
    }

    /// The pod as it would be if it asked for what was agreed to.
    pub fn put_into<'a>(&self, pod: &'a Pod) -> Cow<'a, Pod> {
        let is_same = |spec: &PodSpec| {
            let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
            let own = |one: &Container| {
                self.containers.get(&one.name).is_none_or(|own| one.resources.as_ref() == Some(own))
            };
            spec.resources == self.pod && containers.all(own)
        };
        if pod.spec.as_ref().is_none_or(is_same) {
            return Cow::Borrowed(pod);
        }
        let mut pod = pod.clone();
        let Some(spec) = &mut pod.spec else { return Cow::Owned(pod) };
        spec.resources.clone_from(&self.pod);
        for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            if let Some(own) = self.containers.get(&container.name) {
                container.resources = Some(own.clone());
            }
        }
        Cow::Owned(pod)
    }

    /// The same, of a pod that others have too.
    fn shared(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        match self.put_into(pod) {
            Cow::Borrowed(_) => pod.clone(),
            Cow::Owned(changed) => Arc::new(changed),
        }
    }
}

fn amounts(list: Option<BTreeMap<String, Text>>) -> BTreeMap<String, Option<Quantity>> {
    list.into_iter().flatten().map(|(name, text)| (name, Quantity::parse(&text.0).ok())).collect()
}

/// Whether a pod has been let in, be it by somebody before us.
pub fn is_in(pod: &Pod, memory: &Memory) -> bool {
    memory.let_in || pod.status.as_ref().is_some_and(|status| status.start_time.is_some())
}

/// Looks again for room for those that wait for it, whenever others have less than before.
pub async fn keep(node: &Node) {
    let (pods, nodes) = (node.ctx.caches.pods(), node.ctx.caches.nodes());
    let changed = Arc::new(Notify::new());
    let (news, own) = (changed.clone(), node.settings.node_name.clone());
    pods.listen(move |change| {
        let here =
            |pod: &&Arc<Pod>| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&own);
        if change.before.filter(here).is_some_and(|before| frees(before, change.after)) {
            news.notify_one();
        }
    });
    let (news, own) = (changed.clone(), node.settings.node_name.clone());
    nodes.listen(move |change| {
        let has = |node: Option<&Arc<k8s_openapi::api::core::v1::Node>>| {
            let status = node?.status.as_ref()?;
            let conditions = status.conditions.iter().flatten();
            let conditions = conditions.map(|condition| condition.status.clone()).collect::<Vec<_>>();
            Some((status.allocatable.clone(), conditions))
        };
        if change.newest().name() == own && has(change.before) != has(change.after) {
            news.notify_one();
        }
    });
    loop {
        changed.notified().await;
        if node.memories.lock().values().any(|memory| memory.resizing.pending.is_some()) {
            consider(node, &node.judging.lock());
        }
    }
}

/// Whether a pod may have less now than before.
fn frees(before: &Pod, after: Option<&Arc<Pod>>) -> bool {
    let Some(after) = after.filter(|after| !pod::is_over(after)) else { return !pod::is_over(before) };
    !told(before).eq(told(after))
}

/// What is said of what a pod and its containers have and were promised.
fn told(pod: &Pod) -> impl Iterator<Item = (Option<&ResourceRequirements>, Option<&BTreeMap<String, Text>>)> {
    let status = pod.status.as_ref();
    let of_pod = status.map(|status| (status.resources.as_ref(), status.allocated_resources.as_ref()));
    let lists =
        status.into_iter().flat_map(|status| [&status.container_statuses, &status.init_container_statuses]);
    let each = lists.flatten().flatten();
    let each = each.map(|one| (one.resources.as_ref(), one.allocated_resources.as_ref()));
    of_pod.into_iter().chain(each)
}

/// Judges all resizes that wait for room, and tells what has become of them. `_judging` is held meanwhile.
fn consider(node: &Node, _judging: &parking_lot::MutexGuard<'_, ()>) {
    let name = &node.settings.node_name;
    let Some(host) = node.ctx.caches.nodes().get(&Key::new("", name)) else { return };
    let now = node.ctx.clock.now();
    let pressures = node.keeping.pressures().lasting(now, node.settings.keeping.lasts);
    let judge = |pod: &Pod, others: &[Arc<Pod>]| {
        let short = admission::under(pod, pressures);
        short.or_else(|| admission::judge(pod, &host, others, &node.abilities.lock()))
    };
    let on_node = node.pods().into_iter().filter(|pod| !pod::is_over(pod));
    let mut memories = node.memories.lock();
    let present: Vec<Present> = on_node
        .filter_map(|pod| {
            let memory = known(&memories, &node.settings, &pod);
            let since = memory.resizing.pending.as_ref().map(|pending| pending.since);
            let allocated = memory.record.as_ref().map(|record| record.allocated.clone());
            is_in(&pod, &memory).then_some(Present { pod, allocated, since })
        })
        .collect();
    for (pod, refusal) in decide(&present, judge) {
        let memory = open(&mut memories, &node.settings, pod);
        let generation = pod.metadata.generation;
        let tells = |what: &str, error: &str| summary(what, pod, generation.unwrap_or_default(), error);
        match refusal {
            None => {
                let record = memory.record.get_or_insert_with(|| Record::new(pod));
                let agreed = Record { allocated: Allocation::of(pod), ..record.clone() };
                if !node.keep(pod, &agreed) {
                    continue;
                }
                *record = agreed;
                memory.resizing.begin(generation, now);
                node.ctx.events.normal(&**pod, "ResizeStarted", tells("Pod resize started", ""));
            }
            Some(Refusal { reason, message }) => {
                if memory.resizing.defer(&message, generation, now) {
                    let told = tells(&format!("Pod resize {reason}"), &message);
                    node.ctx.events.warning(&**pod, "ResizeDeferred", told);
                }
            }
        }
        node.look_at(pod.key());
    }
}

/// What is remembered of a pod; the first time, as it was left.
fn open<'a>(
    memories: &'a mut HashMap<String, Memory>,
    settings: &crate::Settings,
    pod: &Pod,
) -> &'a mut Memory {
    memories.entry(pod.uid().to_owned()).or_insert_with(|| left(settings, pod))
}

/// The same of a pod that somebody else cares for, which may be gone by now.
fn known<'a>(
    memories: &'a HashMap<String, Memory>,
    settings: &crate::Settings,
    pod: &Pod,
) -> Cow<'a, Memory> {
    memories.get(pod.uid()).map_or_else(|| Cow::Owned(left(settings, pod)), Cow::Borrowed)
}

/// What somebody before us has left of what was known of a pod.
fn left(settings: &crate::Settings, pod: &Pod) -> Memory {
    Memory {
        record: Record::read(&settings.pod_dir(pod)),
        resizing: pod.status.as_ref().map(Resizing::told).unwrap_or_default(),
        ..Memory::default()
    }
}

impl Node {
    /// Looks at what is remembered of a pod, or changes it. Of one that is gone nothing is, whoever still has it.
    pub fn remember<T>(&self, pod: &Pod, f: impl FnOnce(&mut Memory) -> T) -> T {
        let mut memories = self.memories.lock();
        let is_new = !memories.contains_key(pod.uid());
        let result = f(open(&mut memories, &self.settings, pod));
        drop(memories);
        // Whoever goes from now on is forgotten once it is gone.
        if is_new && self.pod_exactly(&pod.key(), pod.uid()).is_none() {
            self.memories.lock().remove(pod.uid());
        }
        result
    }

    /// The pod as it would be if it asked for what was agreed to.
    pub fn allocated<'a>(&self, pod: &'a Pod) -> Cow<'a, Pod> {
        self.remember(pod, |memory| match &memory.record {
            Some(record) => record.allocated.put_into(pod),
            None => Cow::Borrowed(pod),
        })
    }

    /// Changes what is written down of a pod.
    pub fn note_down(&self, pod: &Pod, change: impl FnOnce(&mut Record)) {
        self.remember(pod, |memory| {
            let Some(record) = &mut memory.record else { return };
            let before = record.clone();
            change(record);
            if *record != before {
                self.keep(pod, record);
            }
        });
    }

    /// Writes down what is known of a pod; `false` where that fails.
    fn keep(&self, pod: &Pod, record: &Record) -> bool {
        let kept = record.keep(&self.settings.pod_dir(pod));
        if let Err(error) = &kept {
            tracing::error!(%error, pod = %pod.key(), "cannot write down what a pod is given");
        }
        kept.is_ok()
    }

    /// Lets a pod in once, unless something speaks against it; whoever comes after it finds less room.
    pub fn let_in(&self, pod: &Pod) -> Option<Refusal> {
        let name = &self.settings.node_name;
        let host = self.ctx.caches.nodes().get(&Key::new("", name))?;
        let _judging = self.judging.lock();
        let on_node = self.pods();
        let mut memories = self.memories.lock();
        if is_in(pod, &known(&memories, &self.settings, pod)) {
            return None;
        }
        let others = on_node.into_iter().filter(|other| other.uid() != pod.uid() && !pod::is_over(other));
        let others: Vec<Arc<Pod>> = others
            .filter_map(|other| {
                let memory = known(&memories, &self.settings, &other);
                let allocated = || memory.record.as_ref().map(|record| record.allocated.shared(&other));
                is_in(&other, &memory).then(|| allocated().unwrap_or_else(|| other.clone()))
            })
            .collect();
        let refusal = admission::judge(pod, &host, &others, &self.abilities.lock());
        open(&mut memories, &self.settings, pod).let_in = refusal.is_none();
        refusal
    }

    /// Sees to it that what the pod asks for is agreed to, as far as there is room; the pod as it would be if it asked for
    /// what was.
    pub fn settle<'a>(&self, pod: &'a Pod) -> Cow<'a, Pod> {
        self.remember(pod, |memory| {
            // Of one that goes nothing is to be left.
            if memory.record.is_none() && is_in(pod, memory) && !pod.is_deleting() {
                self.keep(pod, memory.record.insert(Record::new(pod)));
            }
        });
        if self.is_to_be_judged(pod) {
            let judging = self.judging.lock();
            // Another may have judged all of them meanwhile.
            if self.is_to_be_judged(pod) {
                consider(self, &judging);
            }
        }
        self.allocated(pod)
    }

    fn is_to_be_judged(&self, pod: &Pod) -> bool {
        self.remember(pod, |memory| {
            let wants = memory.record.as_ref().is_some_and(|record| record.allocated.differs(pod));
            if !wants {
                memory.resizing.give_up();
            }
            wants && !pod.is_deleting() && memory.resizing.judged != pod.metadata.generation
        })
    }

    /// Notices what a resize has come to; `pod` is as it asks for itself.
    pub fn follow_resize(&self, pod: &Pod, seen: &Observed) {
        let now = self.ctx.clock.now();
        let done = self.remember(pod, |memory| {
            let allocated = memory.record.as_ref()?.allocated.put_into(pod);
            if is_under_way(&allocated, seen, memory) {
                memory.resizing.go_on(pod.metadata.generation, now);
                return None;
            }
            memory.resizing.end().map(|generation| (allocated.into_owned(), generation))
        });
        if let Some((allocated, generation)) = done {
            let told = summary("Pod resize completed", &allocated, generation, "");
            self.ctx.events.normal(pod, "ResizeCompleted", told);
        }
    }
}

#[cfg(test)]
mod tests;

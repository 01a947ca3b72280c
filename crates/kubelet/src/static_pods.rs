//! The pods of this node: those that the API server assigns to it, and static pods, whose manifests
//! are on this host and which do not depend on the API server.
//!
//! In the API, a static pod is represented by a mirror pod, which is created by
//! [`crate::manifests`]. Nothing is run for a mirror pod, and its status is that of the static pod.
//! All code of this crate gets its pods from this module, and never from the cache alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use parking_lot::Mutex;
use reconcile::{Error, Key, Object as _};
use tokio::sync::Notify;

use crate::Node;
use crate::manifests::MIRROR_ANNOTATION;

/// The static pods by namespace and name.
#[derive(Default)]
pub struct StaticPods {
    pods: Mutex<BTreeMap<Key, StaticPod>>,
    /// Notified when a static pod is added or removed, and when its mirror pod is.
    pub changed: Notify,
}

struct StaticPod {
    /// The pod with its last status. It is terminating once its manifest is removed or changed.
    pod: Arc<Pod>,
    /// The pod of the changed manifest, which starts when this one is removed.
    replacement: Option<Arc<Pod>>,
}

impl StaticPods {
    /// Applies the pods of all manifests. Returns the pods that have changed.
    pub fn update(&self, mut desired: BTreeMap<Key, Pod>, now: Timestamp) -> Vec<Key> {
        let mut changed = Vec::new();
        let mut pods = self.pods.lock();
        for (key, known) in pods.iter_mut() {
            known.replacement = desired.remove(key).map(Arc::new);
            if known.pod.is_deleting() {
                continue;
            }
            if known.replacement.as_ref().is_some_and(|next| next.uid() == known.pod.uid()) {
                known.replacement = None;
                continue;
            }
            known.pod = Arc::new(mark_deleted(&known.pod, now));
            changed.push(key.clone());
        }
        changed.extend(desired.keys().cloned());
        pods.extend(
            desired.into_iter().map(|(key, pod)| (key, StaticPod { pod: Arc::new(pod), replacement: None })),
        );
        changed
    }

    pub fn get(&self, key: &Key) -> Option<Arc<Pod>> {
        self.pods.lock().get(key).map(|known| known.pod.clone())
    }

    pub fn all(&self) -> Vec<Arc<Pod>> {
        self.pods.lock().values().map(|known| known.pod.clone()).collect()
    }

    /// Removes a pod of which nothing is left, and starts its replacement, if any.
    pub fn remove(&self, pod: &Pod) {
        let mut pods = self.pods.lock();
        let Some(known) = pods.get_mut(&pod.key()).filter(|known| known.pod.uid() == pod.uid()) else {
            return;
        };
        match known.replacement.take() {
            Some(next) => known.pod = next,
            None => drop(pods.remove(&pod.key())),
        }
        self.changed.notify_one();
    }

    fn set_status(&self, pod: &Pod, status: PodStatus) {
        if let Some(known) = self.pods.lock().get_mut(&pod.key())
            && known.pod.uid() == pod.uid()
        {
            known.pod = Arc::new(Pod { status: Some(status), ..Pod::clone(&known.pod) });
        }
    }
}

/// The pod with a deletion timestamp.
fn mark_deleted(pod: &Pod, now: Timestamp) -> Pod {
    let mut pod = pod.clone();
    let grace = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(30);
    let end = now.checked_add(SignedDuration::from_secs(grace)).unwrap_or(now);
    pod.metadata.deletion_timestamp = Some(Time(end));
    pod.metadata.deletion_grace_period_seconds = Some(grace);
    pod
}

/// Whether a pod is a static pod or a mirror pod.
pub fn is_static(pod: &Pod) -> bool {
    pod.annotation(MIRROR_ANNOTATION).is_some()
}

impl Node {
    /// The pod of this name, if it is this node's.
    pub fn pod(&self, key: &Key) -> Option<Arc<Pod>> {
        let from_api =
            || self.ctx.caches.pods().get(key).filter(|pod| self.is_own_pod(pod) && !is_static(pod));
        self.static_pods.get(key).or_else(from_api)
    }

    /// The pod of this name and uid, if it is this node's.
    pub fn pod_with_uid(&self, key: &Key, uid: &str) -> Option<Arc<Pod>> {
        let from_api = || self.ctx.caches.pods().get_exactly(key, uid).filter(|pod| !is_static(pod));
        self.static_pods.get(key).filter(|pod| pod.uid() == uid).or_else(from_api)
    }

    /// All pods of this node.
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        let from_api = self.ctx.caches.pods().indexed("node", &self.settings.node_name);
        let from_api = from_api.into_iter().filter(|pod| !is_static(pod));
        self.static_pods.all().into_iter().chain(from_api).collect()
    }

    /// The mirror pod of a static pod, if it is up to date.
    pub fn mirror_pod(&self, pod: &Pod) -> Option<Arc<Pod>> {
        let found = self.ctx.caches.pods().get(&pod.key())?;
        (found.annotation(MIRROR_ANNOTATION) == Some(pod.uid()) && self.is_own_pod(&found)).then_some(found)
    }

    /// A static pod with its last status. After a restart of the kubelet, that is the status of the
    /// mirror pod.
    pub fn with_status(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        let has_status = pod.status.as_ref().is_some_and(|status| status.start_time.is_some());
        let mirror = if has_status || !is_static(pod) { None } else { self.mirror_pod(pod) };
        // A terminated one may have been stopped with the host, and starts again.
        match mirror
            .filter(|mirror| !crate::pod::is_terminal(mirror))
            .and_then(|mirror| mirror.status.clone())
        {
            Some(status) => Arc::new(Pod { status: Some(status), ..Pod::clone(pod) }),
            None => pod.clone(),
        }
    }

    /// Updates the status of a static pod, and of its mirror pod if there is one.
    pub async fn update_mirror_status(&self, pod: &Pod, status: PodStatus) -> Result<(), Error> {
        self.static_pods.set_status(pod, status.clone());
        let Some(mirror) = self.mirror_pod(pod).filter(|mirror| mirror.status.as_ref() != Some(&status))
        else {
            return Ok(());
        };
        match self.ctx.replace_status(&Pod { status: Some(status), ..Pod::clone(&mirror) }).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn desired_pods(pods: &[(&str, &str)]) -> BTreeMap<Key, Pod> {
        let pod = |(name, uid): &(&str, &str)| -> Pod {
            let metadata = json!({"name": name, "namespace": "n", "uid": uid});
            serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).expect("a pod")
        };
        pods.iter().map(pod).map(|pod| (pod.key(), pod)).collect()
    }

    #[test]
    fn replaced_pod_is_removed_before_its_replacement_starts() {
        let pods = StaticPods::default();
        let set = |now: &[(&str, &str)], expected: &[&str]| {
            let changed = pods.update(desired_pods(now), Timestamp::UNIX_EPOCH);
            let names: Vec<String> = changed.iter().map(|key| key.name.to_string()).collect();
            assert_eq!(names, expected, "{now:?}");
        };
        let check = |expected: &str| {
            let describe =
                |pod: &Arc<Pod>| format!("{}{}", pod.uid(), if pod.is_deleting() { " goes" } else { "" });
            assert_eq!(pods.all().iter().map(describe).collect::<Vec<_>>().join(", "), expected);
        };
        let end = |uid: &str| {
            let all = pods.all();
            pods.remove(all.iter().find(|pod| pod.uid() == uid).expect("a pod"));
        };
        set(&[("a", "a1"), ("b", "b1")], &["a", "b"]);
        set(&[("a", "a1"), ("b", "b1")], &[]);
        set(&[("a", "a2")], &["a", "b"]);
        check("a1 goes, b1 goes");
        // A terminating pod does not come back.
        set(&[("a", "a3"), ("b", "b1")], &[]);
        end("a1");
        end("b1");
        check("a3, b1");
        set(&[("a", "a3")], &["b"]);
        end("b1");
        check("a3");
    }
}

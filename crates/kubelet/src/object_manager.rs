//! Secrets and ConfigMaps for a node that may read only those its own pods refer to.
//!
//! Such a node cannot follow all of a kind, so each object that is referred to is followed by itself, and together
//! they look like a collection: to the rest of the node nothing is different. A pod waits until what it refers to has
//! been looked for once ([`Referred::known`]), since what is optional must not be missed for being late.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response};
use k8s_openapi::api::core::v1::{Pod, Volume};
use parking_lot::Mutex;
use reconcile::{Caches, Connection, Error, Key, Object as _, RawObject, Watch, WatchChange, WatchEvent};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

/// How long to wait after an object could not be followed.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long a pod waits for what it refers to, before it is looked at again later.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// News that nobody has taken yet; whoever has more waits.
const EVENT_CHANNEL_CAPACITY: usize = 64;

/// Kinds that are followed object by object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ObjectKind {
    Secret,
    ConfigMap,
}

impl ObjectKind {
    const ALL: [ObjectKind; 2] = [ObjectKind::Secret, ObjectKind::ConfigMap];

    fn plural(self) -> &'static str {
        match self {
            ObjectKind::Secret => "secrets",
            ObjectKind::ConfigMap => "configmaps",
        }
    }

    fn watch_path(self, object: &Key) -> String {
        let (namespace, name) = (&object.namespace, &object.name);
        format!("/api/v1/namespaces/{namespace}/{}?fieldSelector=metadata.name%3D{name}", self.plural())
    }
}

type ReferencedObject = (ObjectKind, Key);

/// A connection on which Secrets and ConfigMaps are those that pods of one node refer to.
pub struct ObjectManager {
    inner: Arc<dyn Connection>,
    /// What each pod of this node refers to, by the pod's uid.
    pods: Mutex<BTreeMap<String, BTreeSet<ReferencedObject>>>,
    desired: watch::Sender<BTreeSet<ReferencedObject>>,
    /// What has been looked for, there or not.
    synced: watch::Sender<BTreeSet<ReferencedObject>>,
}

impl ObjectManager {
    pub fn new(inner: Arc<dyn Connection>) -> Arc<ObjectManager> {
        Arc::new(ObjectManager {
            inner,
            pods: Mutex::default(),
            desired: watch::Sender::new(BTreeSet::new()),
            synced: watch::Sender::new(BTreeSet::new()),
        })
    }

    /// Wants what pods of this node refer to, as they come and go.
    pub fn listen(self: &Arc<Self>, caches: &Caches, node: &str) {
        let (manager, node) = (Arc::downgrade(self), node.to_owned());
        caches.pods().listen(move |changed| {
            let pod = changed.latest();
            let here = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&node);
            let (Some(manager), true) = (manager.upgrade(), here) else { return };
            manager.set_pod_references(pod.uid(), changed.after.map(|pod| references(pod)));
        });
    }

    fn set_pod_references(&self, uid: &str, references: Option<BTreeSet<ReferencedObject>>) {
        let mut pods = self.pods.lock();
        if pods.get(uid) == references.as_ref() {
            return;
        }
        match references {
            Some(references) => drop(pods.insert(uid.to_owned(), references)),
            None => drop(pods.remove(uid)),
        }
        let all: BTreeSet<ReferencedObject> = pods.values().flatten().cloned().collect();
        self.desired.send_if_modified(|desired| {
            let changed = *desired != all;
            *desired = all;
            changed
        });
    }

    /// Waits until everything a pod refers to has been looked for.
    pub async fn wait_synced(&self, pod: &Pod) -> Result<(), Error> {
        let references = references(pod);
        let mut synced = self.synced.subscribe();
        let all = synced.wait_for(|synced| references.is_subset(synced));
        match tokio::time::timeout(FETCH_TIMEOUT, all).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::NotCached(format!("what pod {} refers to", pod.key()))),
        }
    }
}

#[async_trait]
impl Connection for ObjectManager {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        self.inner.send(request).await
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        let kind =
            ObjectKind::ALL.into_iter().find(|kind| collection == format!("/api/v1/{}", kind.plural()));
        let Some(kind) = kind else { return self.inner.watch(collection).await };
        let (sender, receiver) = mpsc::channel(EVENT_CHANNEL_CAPACITY);
        Ok(Box::new(MergedWatch {
            kind,
            inner: self.inner.clone(),
            desired: self.desired.subscribe(),
            synced: self.synced.clone(),
            watches: BTreeMap::new(),
            sender,
            receiver,
            last_delivered: None,
            revision: 0,
        }))
    }

    fn impersonate(&self, name: &str) -> Option<Arc<dyn Connection>> {
        self.inner.impersonate(name)
    }
}

/// News of one object.
type ReferencedObjectEvent = (Key, WatchEvent);

/// One object that is followed.
struct ObjectWatch {
    task: AbortHandle,
    /// Its newest state, as long as it is there.
    last: Option<RawObject>,
}

/// All objects of a kind that are wanted, as one feed.
struct MergedWatch {
    kind: ObjectKind,
    inner: Arc<dyn Connection>,
    desired: watch::Receiver<BTreeSet<ReferencedObject>>,
    synced: watch::Sender<BTreeSet<ReferencedObject>>,
    watches: BTreeMap<Key, ObjectWatch>,
    sender: mpsc::Sender<ReferencedObjectEvent>,
    receiver: mpsc::Receiver<ReferencedObjectEvent>,
    /// What was told last: by the time more is asked for, it has been taken in.
    last_delivered: Option<Key>,
    /// 0 before anything was told.
    revision: u64,
}

impl MergedWatch {
    /// Follows what is newly wanted, and lets go of the rest, which is as good as deleted.
    fn sync_watches(&mut self) -> Vec<WatchChange> {
        let desired: BTreeSet<Key> = {
            let all = self.desired.borrow_and_update();
            all.iter().filter(|(kind, _)| *kind == self.kind).map(|(_, key)| key.clone()).collect()
        };
        let stale: Vec<Key> = self.watches.keys().filter(|key| !desired.contains(key)).cloned().collect();
        let mut deleted = Vec::new();
        for key in stale {
            let Some(ObjectWatch { task: following, last }) = self.watches.remove(&key) else { continue };
            following.abort();
            deleted.extend(last.map(|object| WatchChange { object, deleted: true }));
            self.synced.send_if_modified(|synced| synced.remove(&(self.kind, key)));
        }
        for key in desired {
            if !self.watches.contains_key(&key) {
                let task = watch_object(self.inner.clone(), self.kind, key.clone(), self.sender.clone());
                let task = tokio::spawn(task).abort_handle();
                self.watches.insert(key, ObjectWatch { task, last: None });
            }
        }
        deleted
    }

    /// The changes in news of one object.
    fn apply_event(&mut self, key: &Key, event: WatchEvent) -> Vec<WatchChange> {
        let Some(object_watch) = self.watches.get_mut(key) else { return Vec::new() };
        let (changes, revision) = match event {
            WatchEvent::Changes { changes, revision } => (changes, revision),
            WatchEvent::Replace { objects, revision } if objects.is_empty() => {
                let deleted = object_watch.last.take().map(|object| WatchChange { object, deleted: true });
                (deleted.into_iter().collect(), revision)
            }
            WatchEvent::Replace { objects, revision } => {
                (objects.into_iter().map(|object| WatchChange { object, deleted: false }).collect(), revision)
            }
        };
        if let Some(change) = changes.last() {
            object_watch.last = (!change.deleted).then(|| change.object.clone());
        }
        self.revision = self.revision.max(revision);
        changes
    }
}

impl Drop for MergedWatch {
    fn drop(&mut self) {
        self.watches.values().for_each(|object_watch| object_watch.task.abort());
        let kind = self.kind;
        self.synced.send_modify(|synced| synced.retain(|(of, _)| *of != kind));
    }
}

#[async_trait]
impl Watch for MergedWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        if self.revision == 0 {
            self.revision = 1;
            self.desired.mark_changed();
            return Ok(WatchEvent::Replace { objects: Vec::new(), revision: 1 });
        }
        if let Some(key) = self.last_delivered.take() {
            self.synced.send_if_modified(|synced| synced.insert((self.kind, key)));
        }
        let changes = tokio::select! {
            changed = self.desired.changed() => match changed {
                Ok(()) => self.sync_watches(),
                // Nobody will want anything any more.
                Err(_) => std::future::pending().await,
            },
            received = self.receiver.recv() => match received {
                Some((key, event)) => {
                    let changes = self.apply_event(&key, event);
                    self.last_delivered = self.watches.contains_key(&key).then_some(key);
                    changes
                }
                None => std::future::pending().await,
            },
        };
        Ok(WatchEvent::Changes { changes, revision: self.revision })
    }
}

/// Tells of one object for as long as somebody listens.
async fn watch_object(
    inner: Arc<dyn Connection>,
    kind: ObjectKind,
    key: Key,
    sender: mpsc::Sender<ReferencedObjectEvent>,
) {
    let path = kind.watch_path(&key);
    loop {
        let mut object_watch = match inner.watch(&path).await {
            Ok(object_watch) => object_watch,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, path, "cannot follow, trying again");
                tokio::time::sleep(RETRY_DELAY).await;
                continue;
            }
        };
        loop {
            match object_watch.next().await {
                Ok(event) => {
                    if sender.send((key.clone(), event)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, path, "cannot follow, trying again");
                    break;
                }
            }
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Whether a pod refers to an object of its namespace.
pub fn references_object(pod: &Pod, plural: &str, name: &str) -> bool {
    references(pod).iter().any(|(kind, key)| kind.plural() == plural && *key.name == *name)
}

/// What a pod refers to that this node reads for it.
fn references(pod: &Pod) -> BTreeSet<ReferencedObject> {
    let mut found = BTreeSet::new();
    let mut add = |kind: ObjectKind, name: &str| {
        if !name.is_empty() {
            found.insert((kind, Key::new(pod.namespace(), name)));
        }
    };
    let Some(spec) = &pod.spec else { return found };
    for secret in spec.image_pull_secrets.iter().flatten() {
        add(ObjectKind::Secret, &secret.name);
    }
    spec.volumes.iter().flatten().for_each(|volume| volume_references(volume, &mut add));
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let plain = containers.map(|container| (&container.env, &container.env_from));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral = ephemeral.map(|container| (&container.env, &container.env_from));
    for (variables, sources) in plain.chain(ephemeral) {
        for source in variables.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            source.secret_key_ref.iter().for_each(|key| add(ObjectKind::Secret, &key.name));
            source.config_map_key_ref.iter().for_each(|key| add(ObjectKind::ConfigMap, &key.name));
        }
        for source in sources.iter().flatten() {
            source.secret_ref.iter().for_each(|all| add(ObjectKind::Secret, &all.name));
            source.config_map_ref.iter().for_each(|all| add(ObjectKind::ConfigMap, &all.name));
        }
    }
    found
}

fn volume_references(volume: &Volume, add: &mut impl FnMut(ObjectKind, &str)) {
    if let Some(secret) = &volume.secret {
        add(ObjectKind::Secret, secret.secret_name.as_deref().unwrap_or_default());
    }
    volume.config_map.iter().for_each(|map| add(ObjectKind::ConfigMap, &map.name));
    let csi_secrets = volume.csi.iter().filter_map(|csi| csi.node_publish_secret_ref.as_ref());
    csi_secrets.for_each(|secret| add(ObjectKind::Secret, &secret.name));
    let projected = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
    for source in projected {
        source.secret.iter().for_each(|secret| add(ObjectKind::Secret, &secret.name));
        source.config_map.iter().for_each(|map| add(ObjectKind::ConfigMap, &map.name));
    }
}

#[cfg(test)]
mod tests;

//! Secrets and ConfigMaps for a node that may only read those that its own pods reference.
//! Counterpart of upstream's watch-based Secret and ConfigMap managers.
//!
//! Such a node cannot watch a whole collection. So each referenced object has a watch of its own,
//! and together they look like a watch of the collection to the caches. A pod waits until all
//! objects that it references were fetched once ([`ObjectManager::wait_synced`]), because an
//! optional object must not be skipped only because it is late.

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

/// Delay before a failed watch is restarted.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long a pod waits for the objects it references, before its sync fails and is retried.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Events that have not been read yet. A watch waits while the channel is full.
const EVENT_CHANNEL_CAPACITY: usize = 64;

/// The kinds that are watched object by object.
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

/// A connection that limits Secrets and ConfigMaps to those that the pods of one node reference.
pub struct ObjectManager {
    inner: Arc<dyn Connection>,
    /// The references of each pod of this node by pod UID.
    pods: Mutex<BTreeMap<String, BTreeSet<ReferencedObject>>>,
    desired: watch::Sender<BTreeSet<ReferencedObject>>,
    /// Objects that were fetched at least once, whether they exist or not.
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

    /// Tracks the references of this node's pods.
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

    /// Waits until all objects that a pod references were fetched once.
    pub async fn wait_synced(&self, pod: &Pod) -> Result<(), Error> {
        let references = references(pod);
        let mut synced = self.synced.subscribe();
        let all = synced.wait_for(|synced| references.is_subset(synced));
        match tokio::time::timeout(FETCH_TIMEOUT, all).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::NotCached(format!("the objects that pod {} references", pod.key()))),
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

/// An event about one object.
type ReferencedObjectEvent = (Key, WatchEvent);

/// The watch of one object.
struct ObjectWatch {
    task: AbortHandle,
    /// The current state of the object, if it exists.
    last: Option<RawObject>,
}

/// All referenced objects of a kind as one watch.
struct MergedWatch {
    kind: ObjectKind,
    inner: Arc<dyn Connection>,
    desired: watch::Receiver<BTreeSet<ReferencedObject>>,
    synced: watch::Sender<BTreeSet<ReferencedObject>>,
    watches: BTreeMap<Key, ObjectWatch>,
    sender: mpsc::Sender<ReferencedObjectEvent>,
    receiver: mpsc::Receiver<ReferencedObjectEvent>,
    /// The object of the last event. When the next event is requested, the cache has applied it,
    /// and the object counts as synced.
    last_delivered: Option<Key>,
    /// 0 before the first event.
    revision: u64,
}

impl MergedWatch {
    /// Starts watches of newly referenced objects and stops those that no pod references any more.
    /// The latter are returned as deletions.
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

    /// Applies an event about one object and returns the changes.
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
                // The sender is gone, so that no pod will reference anything.
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

/// Sends the events about one object until the receiver is dropped.
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
                tracing::warn!(error = &error as &dyn std::error::Error, path, "watch failed, will retry");
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
                    tracing::warn!(error, path, "watch failed, will retry");
                    break;
                }
            }
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Whether a pod references an object in its namespace.
pub fn references_object(pod: &Pod, plural: &str, name: &str) -> bool {
    references(pod).iter().any(|(kind, key)| kind.plural() == plural && *key.name == *name)
}

/// The Secrets and ConfigMaps that a pod references.
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

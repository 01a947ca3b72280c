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
use reconcile::{Caches, Change, Connection, Error, Feed, Key, News, Object as _, Raw};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

/// How long to wait after an object could not be followed.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a pod waits for what it refers to, before it is looked at again later.
const DEADLINE: Duration = Duration::from_secs(10);
/// News that nobody has taken yet; whoever has more waits.
const BACKLOG: usize = 64;

/// Kinds that are followed object by object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Secret,
    ConfigMap,
}

impl Kind {
    const ALL: [Kind; 2] = [Kind::Secret, Kind::ConfigMap];

    fn plural(self) -> &'static str {
        match self {
            Kind::Secret => "secrets",
            Kind::ConfigMap => "configmaps",
        }
    }

    fn followed_as(self, object: &Key) -> String {
        let (namespace, name) = (&object.namespace, &object.name);
        format!("/api/v1/namespaces/{namespace}/{}?fieldSelector=metadata.name%3D{name}", self.plural())
    }
}

type Thing = (Kind, Key);

/// A connection on which Secrets and ConfigMaps are those that pods of one node refer to.
pub struct Referred {
    inner: Arc<dyn Connection>,
    /// What each pod of this node refers to, by the pod's uid.
    pods: Mutex<BTreeMap<String, BTreeSet<Thing>>>,
    wanted: watch::Sender<BTreeSet<Thing>>,
    /// What has been looked for, there or not.
    known: watch::Sender<BTreeSet<Thing>>,
}

impl Referred {
    pub fn new(inner: Arc<dyn Connection>) -> Arc<Referred> {
        Arc::new(Referred {
            inner,
            pods: Mutex::default(),
            wanted: watch::Sender::new(BTreeSet::new()),
            known: watch::Sender::new(BTreeSet::new()),
        })
    }

    /// Wants what pods of this node refer to, as they come and go.
    pub fn listen(self: &Arc<Self>, caches: &Caches, node: &str) {
        let (referred, node) = (Arc::downgrade(self), node.to_owned());
        caches.pods().listen(move |changed| {
            let pod = changed.newest();
            let here = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&node);
            let (Some(referred), true) = (referred.upgrade(), here) else { return };
            referred.note(pod.uid(), changed.after.map(|pod| references(pod)));
        });
    }

    fn note(&self, uid: &str, things: Option<BTreeSet<Thing>>) {
        let mut pods = self.pods.lock();
        if pods.get(uid) == things.as_ref() {
            return;
        }
        match things {
            Some(things) => drop(pods.insert(uid.to_owned(), things)),
            None => drop(pods.remove(uid)),
        }
        let all: BTreeSet<Thing> = pods.values().flatten().cloned().collect();
        self.wanted.send_if_modified(|wanted| {
            let changed = *wanted != all;
            *wanted = all;
            changed
        });
    }

    /// Waits until everything a pod refers to has been looked for.
    pub async fn known(&self, pod: &Pod) -> Result<(), Error> {
        let things = references(pod);
        let mut known = self.known.subscribe();
        let all = known.wait_for(|known| things.is_subset(known));
        match tokio::time::timeout(DEADLINE, all).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::NotSeen(format!("what pod {} refers to", pod.key()))),
        }
    }
}

#[async_trait]
impl Connection for Referred {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        self.inner.send(request).await
    }

    async fn follow(&self, collection: &str) -> Result<Box<dyn Feed>, Error> {
        let kind = Kind::ALL.into_iter().find(|kind| collection == format!("/api/v1/{}", kind.plural()));
        let Some(kind) = kind else { return self.inner.follow(collection).await };
        let (tell, news) = mpsc::channel(BACKLOG);
        Ok(Box::new(Together {
            kind,
            inner: self.inner.clone(),
            wanted: self.wanted.subscribe(),
            known: self.known.clone(),
            followed: BTreeMap::new(),
            tell,
            news,
            told: None,
            revision: 0,
        }))
    }

    fn acting_as(&self, name: &str) -> Option<Arc<dyn Connection>> {
        self.inner.acting_as(name)
    }
}

/// News of one object.
type Told = (Key, News);

/// One object that is followed.
struct Followed {
    following: AbortHandle,
    /// Its newest state, as long as it is there.
    last: Option<Raw>,
}

/// All objects of a kind that are wanted, as one feed.
struct Together {
    kind: Kind,
    inner: Arc<dyn Connection>,
    wanted: watch::Receiver<BTreeSet<Thing>>,
    known: watch::Sender<BTreeSet<Thing>>,
    followed: BTreeMap<Key, Followed>,
    tell: mpsc::Sender<Told>,
    news: mpsc::Receiver<Told>,
    /// What was told last: by the time more is asked for, it has been taken in.
    told: Option<Key>,
    /// 0 before anything was told.
    revision: u64,
}

impl Together {
    /// Follows what is newly wanted, and lets go of the rest, which is as good as deleted.
    fn look_around(&mut self) -> Vec<Change> {
        let wanted: BTreeSet<Key> = {
            let all = self.wanted.borrow_and_update();
            all.iter().filter(|(kind, _)| *kind == self.kind).map(|(_, key)| key.clone()).collect()
        };
        let unwanted: Vec<Key> = self.followed.keys().filter(|key| !wanted.contains(key)).cloned().collect();
        let mut gone = Vec::new();
        for key in unwanted {
            let Some(Followed { following, last }) = self.followed.remove(&key) else { continue };
            following.abort();
            gone.extend(last.map(|object| Change { object, deleted: true }));
            self.known.send_if_modified(|known| known.remove(&(self.kind, key)));
        }
        for key in wanted {
            if !self.followed.contains_key(&key) {
                let following = follow(self.inner.clone(), self.kind, key.clone(), self.tell.clone());
                let following = tokio::spawn(following).abort_handle();
                self.followed.insert(key, Followed { following, last: None });
            }
        }
        gone
    }

    /// The changes in news of one object.
    fn take_in(&mut self, key: &Key, news: News) -> Vec<Change> {
        let Some(followed) = self.followed.get_mut(key) else { return Vec::new() };
        let (changes, revision) = match news {
            News::Changes { changes, revision } => (changes, revision),
            News::Everything { objects, revision } if objects.is_empty() => {
                let gone = followed.last.take().map(|object| Change { object, deleted: true });
                (gone.into_iter().collect(), revision)
            }
            News::Everything { objects, revision } => {
                (objects.into_iter().map(|object| Change { object, deleted: false }).collect(), revision)
            }
        };
        if let Some(change) = changes.last() {
            followed.last = (!change.deleted).then(|| change.object.clone());
        }
        self.revision = self.revision.max(revision);
        changes
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        self.followed.values().for_each(|followed| followed.following.abort());
        let kind = self.kind;
        self.known.send_modify(|known| known.retain(|(of, _)| *of != kind));
    }
}

#[async_trait]
impl Feed for Together {
    async fn next(&mut self) -> Result<News, Error> {
        if self.revision == 0 {
            self.revision = 1;
            self.wanted.mark_changed();
            return Ok(News::Everything { objects: Vec::new(), revision: 1 });
        }
        if let Some(key) = self.told.take() {
            self.known.send_if_modified(|known| known.insert((self.kind, key)));
        }
        let changes = tokio::select! {
            changed = self.wanted.changed() => match changed {
                Ok(()) => self.look_around(),
                // Nobody will want anything any more.
                Err(_) => std::future::pending().await,
            },
            told = self.news.recv() => match told {
                Some((key, news)) => {
                    let changes = self.take_in(&key, news);
                    self.told = self.followed.contains_key(&key).then_some(key);
                    changes
                }
                None => std::future::pending().await,
            },
        };
        Ok(News::Changes { changes, revision: self.revision })
    }
}

/// Tells of one object for as long as somebody listens.
async fn follow(inner: Arc<dyn Connection>, kind: Kind, key: Key, tell: mpsc::Sender<Told>) {
    let path = kind.followed_as(&key);
    loop {
        let mut feed = match inner.follow(&path).await {
            Ok(feed) => feed,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, path, "cannot follow, trying again");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        loop {
            match feed.next().await {
                Ok(news) => {
                    if tell.send((key.clone(), news)).await.is_err() {
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
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether a pod refers to an object of its namespace.
pub fn refers(pod: &Pod, plural: &str, name: &str) -> bool {
    references(pod).iter().any(|(kind, key)| kind.plural() == plural && *key.name == *name)
}

/// What a pod refers to that this node reads for it.
fn references(pod: &Pod) -> BTreeSet<Thing> {
    let mut found = BTreeSet::new();
    let mut see = |kind: Kind, name: &str| {
        if !name.is_empty() {
            found.insert((kind, Key::new(pod.namespace(), name)));
        }
    };
    let Some(spec) = &pod.spec else { return found };
    for secret in spec.image_pull_secrets.iter().flatten() {
        see(Kind::Secret, &secret.name);
    }
    spec.volumes.iter().flatten().for_each(|volume| of_volume(volume, &mut see));
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let plain = containers.map(|container| (&container.env, &container.env_from));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral = ephemeral.map(|container| (&container.env, &container.env_from));
    for (variables, sources) in plain.chain(ephemeral) {
        for source in variables.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            source.secret_key_ref.iter().for_each(|key| see(Kind::Secret, &key.name));
            source.config_map_key_ref.iter().for_each(|key| see(Kind::ConfigMap, &key.name));
        }
        for source in sources.iter().flatten() {
            source.secret_ref.iter().for_each(|all| see(Kind::Secret, &all.name));
            source.config_map_ref.iter().for_each(|all| see(Kind::ConfigMap, &all.name));
        }
    }
    found
}

fn of_volume(volume: &Volume, see: &mut impl FnMut(Kind, &str)) {
    if let Some(secret) = &volume.secret {
        see(Kind::Secret, secret.secret_name.as_deref().unwrap_or_default());
    }
    volume.config_map.iter().for_each(|map| see(Kind::ConfigMap, &map.name));
    let published = volume.csi.iter().filter_map(|csi| csi.node_publish_secret_ref.as_ref());
    published.for_each(|secret| see(Kind::Secret, &secret.name));
    let projected = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
    for source in projected {
        source.secret.iter().for_each(|secret| see(Kind::Secret, &secret.name));
        source.config_map.iter().for_each(|map| see(Kind::ConfigMap, &map.name));
    }
}

#[cfg(test)]
mod tests;

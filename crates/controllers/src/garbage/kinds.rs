//! Follows every collection that can be followed, for its metadata alone, into the graph.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use reconcile::{Ctx, Enqueue, Error, News, Raw, Served};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::graph::{Graph, KindId, Partial, Uid};

/// How long to wait after something failed.
const PAUSE: Duration = Duration::from_secs(1);
/// How long to wait before asking again for groups that did not answer.
const MISSING_PAUSE: Duration = Duration::from_secs(30);
/// How long to wait for more news of kinds before looking at them.
const CROWD: Duration = Duration::from_millis(250);

/// Kinds in whose objects nobody looks for owners.
const IGNORED: &[(&str, &str)] = &[("", "events"), ("events.k8s.io", "events")];
/// Kinds whose objects bring other kinds.
const BRINGING_KINDS: &[(&str, &str)] =
    &[("apiextensions.k8s.io", "customresourcedefinitions"), ("apiregistration.k8s.io", "apiservices")];

/// The kinds that are served, and the graph of all their objects.
pub struct Kinds {
    pub graph: RwLock<Graph>,
    state: RwLock<State>,
    enqueue: Enqueue<Uid>,
    /// Something has changed that may bring or end kinds.
    rediscover: Notify,
}

#[derive(Default)]
struct State {
    /// Every kind in every version, to understand owner references.
    served: Vec<Arc<Served>>,
    /// The kinds that are or were followed; their places are their ids.
    followed: Vec<Arc<Served>>,
}

/// The feeds that are read; all end when this is dropped.
#[derive(Default)]
struct Feeds {
    tasks: JoinSet<()>,
    by_kind: HashMap<KindId, AbortHandle>,
}

impl Kinds {
    pub fn new(enqueue: Enqueue<Uid>) -> Arc<Kinds> {
        Arc::new(Kinds {
            graph: RwLock::default(),
            state: RwLock::default(),
            enqueue,
            rediscover: Notify::new(),
        })
    }

    pub fn followed(&self, id: KindId) -> Option<Arc<Served>> {
        self.state.read().followed.get(usize::from(id.0)).cloned()
    }

    /// The kind an owner reference names.
    pub fn named(&self, api_version: &str, kind: &str) -> Option<Arc<Served>> {
        let state = self.state.read();
        let named = |served: &&Arc<Served>| served.kind == kind && served.api_version() == api_version;
        state.served.iter().find(named).cloned()
    }

    pub fn wake(&self, uid: Uid) {
        self.enqueue.now(uid);
    }

    /// Follows what there is until dropped; `filled` turns true once all of it is known for the first time.
    pub async fn follow_all(self: Arc<Kinds>, ctx: Ctx, filled: watch::Sender<bool>) {
        let mut feeds = Feeds::default();
        loop {
            let missing = match self.discover(&ctx, &mut feeds).await {
                Ok((new, missing)) => {
                    for kind in new {
                        let _ = kind.await;
                    }
                    filled.send_replace(true);
                    missing
                }
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot learn the kinds there are"
                    );
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            tokio::select! {
                // Definitions come in crowds, and each changes more than once.
                () = self.rediscover.notified() => tokio::time::sleep(CROWD).await,
                () = tokio::time::sleep(MISSING_PAUSE), if missing => {}
            }
        }
    }

    /// Begins to follow kinds that are new and ends following those that are no more. Answers with what to wait
    /// for until the new ones are known, and whether some group did not answer.
    async fn discover(
        self: &Arc<Kinds>,
        ctx: &Ctx,
        feeds: &mut Feeds,
    ) -> Result<(Vec<oneshot::Receiver<()>>, bool), Error> {
        let found = ctx.client.discover().await?;
        let missing = !found.failed.is_empty();
        let served: Vec<Arc<Served>> = found.kinds.into_iter().map(Arc::new).collect();
        let wanted: Vec<Arc<Served>> = served.iter().filter(|kind| is_followed(kind)).cloned().collect();
        let mut fills = Vec::new();
        let mut ended = Vec::new();
        {
            let mut state = self.state.write();
            state.served = served;
            // A group that does not answer now has not lost its kinds.
            if !missing {
                let wanted: HashSet<&Arc<Served>> = wanted.iter().collect();
                feeds.by_kind.retain(|id, feed| {
                    let kept = wanted.contains(&state.followed[usize::from(id.0)]);
                    if !kept {
                        feed.abort();
                        ended.push(*id);
                    }
                    kept
                });
            }
            let known: HashSet<Arc<Served>> =
                feeds.by_kind.keys().map(|id| state.followed[usize::from(id.0)].clone()).collect();
            for kind in wanted.into_iter().filter(|kind| !known.contains(kind)) {
                let Ok(id) = u16::try_from(state.followed.len()).map(KindId) else { break };
                let (fill, is_filled) = oneshot::channel();
                fills.push(is_filled);
                state.followed.push(kind.clone());
                let feed = feeds.tasks.spawn(self.clone().follow(ctx.clone(), id, kind, fill));
                feeds.by_kind.insert(id, feed);
            }
        }
        let mut graph = self.graph.write();
        ended.into_iter().for_each(|id| graph.drop_kind(id));
        // Owners of kinds that were unknown may be known now.
        graph.unsettled(&mut |uid| self.wake(uid));
        Ok((fills, missing))
    }

    async fn follow(self: Arc<Kinds>, ctx: Ctx, id: KindId, kind: Arc<Served>, fill: oneshot::Sender<()>) {
        let mut fill = Some(fill);
        loop {
            match ctx.client.connection().follow(&kind.collection("")).await {
                Ok(mut feed) => loop {
                    match feed.next().await {
                        Ok(news) => self.take_in(id, &kind, news),
                        Err(error) => {
                            tracing::debug!(%error, kind = kind.kind, "following anew");
                            break;
                        }
                    }
                    if let Some(fill) = fill.take() {
                        let _ = fill.send(());
                    }
                },
                Err(error) => {
                    tracing::debug!(%error, kind = kind.kind, "cannot follow, trying again");
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn take_in(&self, id: KindId, kind: &Served, news: News) {
        let group_kind = (kind.group.as_str(), kind.kind.as_str());
        let wake = &mut |uid| self.wake(uid);
        match news {
            News::Everything { objects, .. } => {
                let mut present = HashSet::new();
                for object in objects.iter().filter_map(read) {
                    present.insert(Uid::of(&object.metadata.uid));
                    self.graph.write().observe(id, group_kind, &object.metadata, wake);
                }
                self.graph.write().retain(id, &present, wake);
            }
            News::Changes { changes, .. } => {
                let mut graph = self.graph.write();
                for change in &changes {
                    let Some(object) = read(&change.object) else { continue };
                    match change.deleted {
                        true => graph.forget(Uid::of(&object.metadata.uid), wake),
                        false => graph.observe(id, group_kind, &object.metadata, wake),
                    }
                }
                drop(graph);
                if BRINGING_KINDS.contains(&(&*kind.group, &*kind.plural)) && !changes.is_empty() {
                    self.rediscover.notify_one();
                }
            }
        }
    }
}

fn is_followed(kind: &Served) -> bool {
    let deletable = ["delete", "list", "watch"].into_iter().all(|verb| kind.can(verb));
    kind.preferred && deletable && !IGNORED.contains(&(&*kind.group, &*kind.plural))
}

fn read(raw: &Raw) -> Option<Partial> {
    serde_json::from_slice(&raw.json())
        .inspect_err(|error| tracing::error!(%error, "an object has metadata that cannot be read"))
        .ok()
}

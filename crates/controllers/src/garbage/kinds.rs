//! Discovers all deletable kinds and watches their metadata into the graph.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use reconcile::{ApiResource, Ctx, Enqueue, Error, RawObject, WatchEvent};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::graph::{Graph, KindId, PartialObject, Uid};

/// How long to wait after a failure.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// How long to wait before discovery is retried for groups that failed.
const FAILED_DISCOVERY_RETRY: Duration = Duration::from_secs(30);
/// How long to wait for further changes before discovery is run.
const DISCOVERY_DELAY: Duration = Duration::from_millis(250);

/// Resources whose objects are ignored.
const IGNORED_RESOURCES: &[(&str, &str)] = &[("", "events"), ("events.k8s.io", "events")];
/// Resources that define further resources.
const KIND_DEFINITION_RESOURCES: &[(&str, &str)] =
    &[("apiextensions.k8s.io", "customresourcedefinitions"), ("apiregistration.k8s.io", "apiservices")];

/// The served kinds and the graph of their objects.
pub struct Kinds {
    pub graph: RwLock<Graph>,
    state: RwLock<State>,
    enqueue: Enqueue<Uid>,
    /// Signals that kinds may have been added or removed.
    discovery_needed: Notify,
}

#[derive(Default)]
struct State {
    /// All kinds in all versions, to resolve owner references.
    served: Vec<Arc<ApiResource>>,
    /// Kinds that are or were watched, indexed by [`KindId`].
    monitors: Vec<Arc<ApiResource>>,
}

/// The running watches. They are aborted when this is dropped.
#[derive(Default)]
struct Watches {
    tasks: JoinSet<()>,
    by_kind: HashMap<KindId, AbortHandle>,
}

impl Kinds {
    pub fn new(enqueue: Enqueue<Uid>) -> Arc<Kinds> {
        Arc::new(Kinds {
            graph: RwLock::default(),
            state: RwLock::default(),
            enqueue,
            discovery_needed: Notify::new(),
        })
    }

    pub fn monitor_kind(&self, id: KindId) -> Option<Arc<ApiResource>> {
        self.state.read().monitors.get(usize::from(id.0)).cloned()
    }

    /// The kind that an owner reference refers to.
    pub fn find_kind(&self, api_version: &str, kind: &str) -> Option<Arc<ApiResource>> {
        let state = self.state.read();
        let named = |served: &&Arc<ApiResource>| served.kind == kind && served.api_version() == api_version;
        state.served.iter().find(named).cloned()
    }

    pub fn wake(&self, uid: Uid) {
        self.enqueue.now(uid);
    }

    /// Watches all kinds until dropped. `synced` becomes true after the initial sync.
    pub async fn watch_all(self: Arc<Kinds>, ctx: Ctx, synced: watch::Sender<bool>) {
        let mut watches = Watches::default();
        loop {
            let missing = match self.discover(&ctx, &mut watches).await {
                Ok((new, missing)) => {
                    for kind in new {
                        let _ = kind.await;
                    }
                    synced.send_replace(true);
                    missing
                }
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "API discovery failed, will retry"
                    );
                    tokio::time::sleep(RETRY_PERIOD).await;
                    continue;
                }
            };
            tokio::select! {
                // CRDs are often created in bursts, and each changes more than once.
                () = self.discovery_needed.notified() => tokio::time::sleep(DISCOVERY_DELAY).await,
                () = tokio::time::sleep(FAILED_DISCOVERY_RETRY), if missing => {}
            }
        }
    }

    /// Starts watches for new kinds and stops those of removed ones. Returns the receivers that signal the
    /// initial sync of the new kinds, and whether discovery failed for some group.
    async fn discover(
        self: &Arc<Kinds>,
        ctx: &Ctx,
        watches: &mut Watches,
    ) -> Result<(Vec<oneshot::Receiver<()>>, bool), Error> {
        let found = ctx.client.discover().await?;
        let missing = !found.failed.is_empty();
        let served: Vec<Arc<ApiResource>> = found.kinds.into_iter().map(Arc::new).collect();
        let to_watch: Vec<Arc<ApiResource>> = served.iter().filter(|kind| can_watch(kind)).cloned().collect();
        let mut sync_signals = Vec::new();
        let mut ended = Vec::new();
        {
            let mut state = self.state.write();
            state.served = served;
            // A group whose discovery failed may still serve its kinds.
            if !missing {
                let to_watch: HashSet<&Arc<ApiResource>> = to_watch.iter().collect();
                watches.by_kind.retain(|id, watch_handle| {
                    let keep = to_watch.contains(&state.monitors[usize::from(id.0)]);
                    if !keep {
                        watch_handle.abort();
                        ended.push(*id);
                    }
                    keep
                });
            }
            let known: HashSet<Arc<ApiResource>> =
                watches.by_kind.keys().map(|id| state.monitors[usize::from(id.0)].clone()).collect();
            for kind in to_watch.into_iter().filter(|kind| !known.contains(kind)) {
                let Ok(id) = u16::try_from(state.monitors.len()).map(KindId) else { break };
                let (synced, is_synced) = oneshot::channel();
                sync_signals.push(is_synced);
                state.monitors.push(kind.clone());
                let watch_handle =
                    watches.tasks.spawn(self.clone().watch_kind(ctx.clone(), id, kind, synced));
                watches.by_kind.insert(id, watch_handle);
            }
        }
        let mut graph = self.graph.write();
        ended.into_iter().for_each(|id| graph.remove_kind(id));
        // Owner references to kinds that were unknown so far may be resolvable now.
        graph.wake_dependents_of_unknown_owners(&mut |uid| self.wake(uid));
        Ok((sync_signals, missing))
    }

    async fn watch_kind(
        self: Arc<Kinds>,
        ctx: Ctx,
        id: KindId,
        kind: Arc<ApiResource>,
        synced: oneshot::Sender<()>,
    ) {
        let mut synced = Some(synced);
        loop {
            match ctx.client.connection().watch(&kind.collection("")).await {
                Ok(mut watch) => loop {
                    match watch.next().await {
                        Ok(event) => self.apply_event(id, &kind, event),
                        Err(error) => {
                            tracing::debug!(%error, kind = kind.kind, "watch ended, will restart");
                            break;
                        }
                    }
                    if let Some(synced) = synced.take() {
                        let _ = synced.send(());
                    }
                },
                Err(error) => {
                    tracing::debug!(%error, kind = kind.kind, "failed to start watch, will retry");
                }
            }
            tokio::time::sleep(RETRY_PERIOD).await;
        }
    }

    fn apply_event(&self, id: KindId, kind: &ApiResource, event: WatchEvent) {
        let group_kind = (kind.group.as_str(), kind.kind.as_str());
        let wake = &mut |uid| self.wake(uid);
        match event {
            WatchEvent::Replace { objects, .. } => {
                let mut present = HashSet::new();
                for object in objects.iter().filter_map(read) {
                    present.insert(Uid::of(&object.metadata.uid));
                    self.graph.write().observe(id, group_kind, &object.metadata, wake);
                }
                self.graph.write().remove_absent(id, &present, wake);
            }
            WatchEvent::Changes { changes, .. } => {
                let mut graph = self.graph.write();
                for change in &changes {
                    let Some(object) = read(&change.object) else { continue };
                    match change.deleted {
                        true => graph.forget(Uid::of(&object.metadata.uid), wake),
                        false => graph.observe(id, group_kind, &object.metadata, wake),
                    }
                }
                drop(graph);
                if KIND_DEFINITION_RESOURCES.contains(&(&*kind.group, &*kind.plural)) && !changes.is_empty() {
                    self.discovery_needed.notify_one();
                }
            }
        }
    }
}

fn can_watch(kind: &ApiResource) -> bool {
    let can_delete = ["delete", "list", "watch"].into_iter().all(|verb| kind.supports_verb(verb));
    kind.preferred && can_delete && !IGNORED_RESOURCES.contains(&(&*kind.group, &*kind.plural))
}

fn read(raw: &RawObject) -> Option<PartialObject> {
    serde_json::from_slice(&raw.json())
        .inspect_err(|error| tracing::error!(%error, "failed to decode object metadata, object ignored"))
        .ok()
}

//! What the objects of kinds that quotas limit use.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use api::quota::{Counted, Facts, counts_until, usage};
use api::resources::ResourceList;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceQuota;
use parking_lot::Mutex;
use reconcile::{Ctx, Enqueue, Error, News, Object, Raw};
use serde::Deserialize;
use serde_json::Value;
use tokio::task::{AbortHandle, JoinSet};

use super::GRANTED;
use super::plan::{self, Entry, Kind};

/// How long to wait after a kind could not be followed.
const PAUSE: Duration = Duration::from_secs(1);
/// How long to wait before asking again for a kind that nobody serves.
const UNSERVED: Duration = Duration::from_secs(10);

pub struct Ledger {
    ctx: Ctx,
    enqueue: Enqueue,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    kinds: HashMap<Kind, Page>,
    tasks: JoinSet<()>,
}

/// One kind.
struct Page {
    task: AbortHandle,
    /// Not known yet; known, or known not to be served.
    state: Known,
    /// By namespace and name.
    spaces: HashMap<String, BTreeMap<String, Entry>>,
}

#[derive(PartialEq)]
enum Known {
    NotYet,
    Filled,
    Unserved,
}

/// Something happened to an object.
#[derive(Clone, Copy, PartialEq)]
enum Turn {
    Came,
    Changed,
}

/// Nothing is followed any more once this is dropped.
pub struct Open(pub Arc<Ledger>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.state.lock().tasks.abort_all();
    }
}

impl Ledger {
    pub fn open(ctx: Ctx, enqueue: Enqueue) -> Open {
        Open(Arc::new(Ledger { ctx, enqueue, state: Mutex::default() }))
    }

    /// Follows these kinds and no others.
    pub fn follow_only(self: &Arc<Ledger>, wanted: BTreeSet<Kind>) {
        let mut state = self.state.lock();
        state.kinds.retain(|kind, page| {
            let kept = wanted.contains(kind);
            if !kept {
                page.task.abort();
            }
            kept
        });
        for kind in wanted {
            if !state.kinds.contains_key(&kind) {
                let (ledger, followed) = (self.clone(), kind.clone());
                let task = state.tasks.spawn(async move {
                    loop {
                        let pause = ledger.follow(&followed).await;
                        tokio::time::sleep(pause).await;
                    }
                });
                state.kinds.insert(kind, Page { task, state: Known::NotYet, spaces: HashMap::new() });
            }
        }
        while state.tasks.try_join_next().is_some() {}
    }

    /// What is used of a quota and when that changes by itself; nothing while a kind is not known yet.
    pub fn count(&self, quota: &ResourceQuota, now: Timestamp) -> Option<(ResourceList, Option<Timestamp>)> {
        let state = self.state.lock();
        let mut known = BTreeSet::new();
        let mut spaces = Vec::new();
        for kind in plan::kinds(&[Arc::new(quota.clone())]) {
            let page = state.kinds.get(&kind)?;
            match page.state {
                Known::NotYet => return None,
                Known::Unserved => continue,
                Known::Filled => {}
            }
            spaces.extend(page.spaces.get(quota.namespace()));
            known.insert(kind);
        }
        let entries = spaces.into_iter().flat_map(|space| space.values());
        Some(plan::count(quota, &known, entries, now))
    }

    /// Follows a kind until that fails; answers how long to wait before trying again.
    async fn follow(&self, kind: &Kind) -> Duration {
        let collection = match self.collection(kind).await {
            Ok(Some(collection)) => collection,
            Ok(None) => {
                self.set(kind, Known::Unserved);
                return UNSERVED;
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    plural = kind.1,
                    "cannot learn of a kind"
                );
                return PAUSE;
            }
        };
        let feed = self.ctx.client.connection().follow(&collection).await;
        let Ok(mut feed) = feed else { return PAUSE };
        loop {
            match feed.next().await {
                Ok(news) => self.take_in(kind, news),
                Err(error) => {
                    tracing::debug!(%error, plural = kind.1, "following anew");
                    return PAUSE;
                }
            }
        }
    }

    async fn collection(&self, (group, plural): &Kind) -> Result<Option<String>, Error> {
        if group.is_empty() && api::table::find("", "v1", plural).is_some() {
            return Ok(Some(format!("/api/v1/{plural}")));
        }
        let found = self.ctx.client.discover().await?;
        let is_it = |kind: &&reconcile::Served| {
            kind.preferred
                && kind.namespaced
                && kind.group == *group
                && kind.plural == *plural
                && kind.can("watch")
        };
        Ok(found.kinds.iter().find(is_it).map(|kind| kind.collection("")))
    }

    fn set(&self, kind: &Kind, known: Known) {
        if let Some(page) = self.state.lock().kinds.get_mut(kind) {
            page.state = known;
        }
        self.wake_all();
    }

    fn take_in(&self, kind: &Kind, news: News) {
        let now = self.ctx.clock.now();
        let counted = Counted { group: &kind.0, plural: &kind.1 };
        match news {
            News::Everything { objects, .. } => {
                let mut spaces: HashMap<String, BTreeMap<String, Entry>> = HashMap::new();
                for (namespace, name, entry) in objects.iter().filter_map(|raw| read(counted, raw, now)) {
                    spaces.entry(namespace).or_default().insert(name, entry);
                }
                if let Some(page) = self.state.lock().kinds.get_mut(kind) {
                    page.spaces = spaces;
                }
                self.set(kind, Known::Filled);
            }
            News::Changes { changes, .. } => {
                for change in changes {
                    let Some((namespace, name, entry)) = read(counted, &change.object, now) else { continue };
                    let news = {
                        let mut state = self.state.lock();
                        let Some(page) = state.kinds.get_mut(kind) else { return };
                        put(&mut page.spaces, &namespace, name, (!change.deleted).then_some(entry))
                    };
                    news.into_iter().for_each(|news| self.wake(&namespace, news));
                }
            }
        }
    }

    fn wake(&self, namespace: &str, news: Turn) {
        for quota in self.ctx.caches.resource_quotas().in_namespace(namespace) {
            match news {
                Turn::Changed => self.enqueue.now(quota.key()),
                // What was granted to others may not be stored yet.
                Turn::Came => self.enqueue.after(quota.key(), GRANTED),
            }
        }
    }

    fn wake_all(&self) {
        self.ctx.caches.resource_quotas().all().iter().for_each(|quota| self.enqueue.now(quota.key()));
    }
}

/// Puts an entry into its place, or takes it away; answers what that is to quotas.
fn put(
    spaces: &mut HashMap<String, BTreeMap<String, Entry>>,
    namespace: &str,
    name: String,
    entry: Option<Entry>,
) -> Option<Turn> {
    let space = spaces.entry(namespace.to_owned()).or_default();
    let before = match &entry {
        Some(entry) => space.insert(name, entry.clone()),
        None => space.remove(&name),
    };
    if space.is_empty() {
        spaces.remove(namespace);
    }
    match (before, entry) {
        (None, Some(_)) => Some(Turn::Came),
        (before, after) => (before != after).then_some(Turn::Changed),
    }
}

/// Where an object is and what it uses.
fn read(kind: Counted<'_>, raw: &Raw, now: Timestamp) -> Option<(String, String, Entry)> {
    #[derive(Deserialize)]
    struct Named {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Metadata {
        #[serde(default)]
        namespace: String,
        name: String,
    }
    let json = raw.json();
    let named: Named = serde_json::from_slice(&json).ok()?;
    let object = match kind.looks_inside() {
        true => serde_json::from_slice(&json).ok()?,
        false => Value::Null,
    };
    let uses = usage(kind, &object, now);
    let end = counts_until(&object).filter(|_| kind == Counted::core("pods"));
    let end = end.and_then(|end| Timestamp::from_second(end.saturating_add(1)).ok());
    let entry = Entry {
        afterwards: end.map(|end| (end, usage(kind, &object, end))),
        facts: Facts::of(kind, &object),
        uses,
    };
    Some((named.metadata.namespace, named.metadata.name, entry))
}

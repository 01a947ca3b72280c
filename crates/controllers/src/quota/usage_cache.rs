//! The usage of all objects of the kinds that quotas limit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use api::quota::{QuotaResource, ScopeAttributes, counted_until, usage};
use api::resources::ResourceList;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceQuota;
use parking_lot::Mutex;
use reconcile::{Ctx, Enqueue, Error, Object, RawObject, WatchEvent};
use serde::Deserialize;
use serde_json::Value;
use tokio::task::{AbortHandle, JoinSet};

use super::RESYNC_AFTER_INCREASE;
use super::plan::{self, GroupResource, ObjectUsage};

/// The delay before a failed watch is retried.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// The delay before discovery is retried for a kind that is not served.
const NOT_SERVED_RETRY: Duration = Duration::from_secs(10);

pub struct UsageCache {
    ctx: Ctx,
    enqueue: Enqueue,
    state: Mutex<CacheState>,
}

#[derive(Default)]
struct CacheState {
    kinds: HashMap<GroupResource, KindUsage>,
    tasks: JoinSet<()>,
}

/// The usage of the objects of one kind.
struct KindUsage {
    task: AbortHandle,
    /// Whether the objects are synced, or the kind is not served.
    state: SyncState,
    /// By namespace and name.
    by_namespace: HashMap<String, BTreeMap<String, ObjectUsage>>,
}

#[derive(PartialEq)]
enum SyncState {
    Pending,
    Synced,
    NotServed,
}

/// What happened to an object, from the point of view of a quota.
#[derive(Clone, Copy, PartialEq)]
enum ObjectEvent {
    Added,
    Modified,
}

/// Stops all watches when it is dropped.
pub struct UsageCacheGuard(pub Arc<UsageCache>);

impl Drop for UsageCacheGuard {
    fn drop(&mut self) {
        self.0.state.lock().tasks.abort_all();
    }
}

impl UsageCache {
    pub fn start(ctx: Ctx, enqueue: Enqueue) -> UsageCacheGuard {
        UsageCacheGuard(Arc::new(UsageCache { ctx, enqueue, state: Mutex::default() }))
    }

    /// Watches exactly these kinds.
    pub fn watch_only(self: &Arc<UsageCache>, desired: BTreeSet<GroupResource>) {
        let mut state = self.state.lock();
        state.kinds.retain(|kind, kind_usage| {
            let keep = desired.contains(kind);
            if !keep {
                kind_usage.task.abort();
            }
            keep
        });
        for kind in desired {
            if !state.kinds.contains_key(&kind) {
                let (cache, monitors) = (self.clone(), kind.clone());
                let task = state.tasks.spawn(async move {
                    loop {
                        let pause = cache.watch_kind(&monitors).await;
                        tokio::time::sleep(pause).await;
                    }
                });
                state.kinds.insert(
                    kind,
                    KindUsage { task, state: SyncState::Pending, by_namespace: HashMap::new() },
                );
            }
        }
        while state.tasks.try_join_next().is_some() {}
    }

    /// The usage of a quota, and when it changes without an event. `None` while some kind is not synced.
    pub fn count(&self, quota: &ResourceQuota, now: Timestamp) -> Option<(ResourceList, Option<Timestamp>)> {
        let state = self.state.lock();
        let mut synced_kinds = BTreeSet::new();
        let mut by_namespace = Vec::new();
        for kind in plan::limited_resources(&[Arc::new(quota.clone())]) {
            let kind_usage = state.kinds.get(&kind)?;
            match kind_usage.state {
                SyncState::Pending => return None,
                SyncState::NotServed => continue,
                SyncState::Synced => {}
            }
            by_namespace.extend(kind_usage.by_namespace.get(quota.namespace()));
            synced_kinds.insert(kind);
        }
        let entries = by_namespace.into_iter().flat_map(|objects| objects.values());
        Some(plan::count(quota, &synced_kinds, entries, now))
    }

    /// Watches a kind until the watch fails. Returns how long to wait before a retry.
    async fn watch_kind(&self, kind: &GroupResource) -> Duration {
        let collection = match self.collection(kind).await {
            Ok(Some(collection)) => collection,
            Ok(None) => {
                self.set_sync_state(kind, SyncState::NotServed);
                return NOT_SERVED_RETRY;
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    plural = kind.1,
                    "API discovery failed for a quota resource, will retry"
                );
                return RETRY_PERIOD;
            }
        };
        let watch = self.ctx.client.connection().watch(&collection).await;
        let Ok(mut watch) = watch else { return RETRY_PERIOD };
        loop {
            match watch.next().await {
                Ok(event) => self.apply_event(kind, event),
                Err(error) => {
                    tracing::debug!(%error, plural = kind.1, "watch ended, will restart");
                    return RETRY_PERIOD;
                }
            }
        }
    }

    async fn collection(&self, (group, plural): &GroupResource) -> Result<Option<String>, Error> {
        if group.is_empty() && api::resource_table::find_resource("", "v1", plural).is_some() {
            return Ok(Some(format!("/api/v1/{plural}")));
        }
        let found = self.ctx.client.discover().await?;
        let is_it = |kind: &&reconcile::ApiResource| {
            kind.preferred
                && kind.namespaced
                && kind.group == *group
                && kind.plural == *plural
                && kind.supports_verb("watch")
        };
        Ok(found.kinds.iter().find(is_it).map(|kind| kind.collection("")))
    }

    fn set_sync_state(&self, kind: &GroupResource, sync_state: SyncState) {
        if let Some(kind_usage) = self.state.lock().kinds.get_mut(kind) {
            kind_usage.state = sync_state;
        }
        self.wake_all();
    }

    fn apply_event(&self, kind: &GroupResource, event: WatchEvent) {
        let now = self.ctx.clock.now();
        let counted = QuotaResource { group: &kind.0, plural: &kind.1 };
        match event {
            WatchEvent::Replace { objects, .. } => {
                let mut by_namespace: HashMap<String, BTreeMap<String, ObjectUsage>> = HashMap::new();
                for (namespace, name, entry) in
                    objects.iter().filter_map(|raw| parse_entry(counted, raw, now))
                {
                    by_namespace.entry(namespace).or_default().insert(name, entry);
                }
                if let Some(kind_usage) = self.state.lock().kinds.get_mut(kind) {
                    kind_usage.by_namespace = by_namespace;
                }
                self.set_sync_state(kind, SyncState::Synced);
            }
            WatchEvent::Changes { changes, .. } => {
                for change in changes {
                    let Some((namespace, name, entry)) = parse_entry(counted, &change.object, now) else {
                        continue;
                    };
                    let event = {
                        let mut state = self.state.lock();
                        let Some(kind_usage) = state.kinds.get_mut(kind) else { return };
                        update_entry(
                            &mut kind_usage.by_namespace,
                            &namespace,
                            name,
                            (!change.deleted).then_some(entry),
                        )
                    };
                    event.into_iter().for_each(|event| self.wake(&namespace, event));
                }
            }
        }
    }

    fn wake(&self, namespace: &str, event: ObjectEvent) {
        for quota in self.ctx.caches.resource_quotas().in_namespace(namespace) {
            match event {
                ObjectEvent::Modified => self.enqueue.now(quota.key()),
                // Objects admitted at the same time may not be stored yet.
                ObjectEvent::Added => self.enqueue.after(quota.key(), RESYNC_AFTER_INCREASE),
            }
        }
    }

    fn wake_all(&self) {
        self.ctx.caches.resource_quotas().all().iter().for_each(|quota| self.enqueue.now(quota.key()));
    }
}

/// Updates or removes an entry. Returns what that means for quotas.
fn update_entry(
    by_namespace: &mut HashMap<String, BTreeMap<String, ObjectUsage>>,
    namespace: &str,
    name: String,
    entry: Option<ObjectUsage>,
) -> Option<ObjectEvent> {
    let objects = by_namespace.entry(namespace.to_owned()).or_default();
    let before = match &entry {
        Some(entry) => objects.insert(name, entry.clone()),
        None => objects.remove(&name),
    };
    if objects.is_empty() {
        by_namespace.remove(namespace);
    }
    match (before, entry) {
        (None, Some(_)) => Some(ObjectEvent::Added),
        (before, after) => (before != after).then_some(ObjectEvent::Modified),
    }
}

/// Decodes namespace, name and usage of an object.
fn parse_entry(
    kind: QuotaResource<'_>,
    raw: &RawObject,
    now: Timestamp,
) -> Option<(String, String, ObjectUsage)> {
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
    let object = match kind.needs_object() {
        true => serde_json::from_slice(&json).ok()?,
        false => Value::Null,
    };
    let uses = usage(kind, &object, now);
    let end = counted_until(&object).filter(|_| kind == QuotaResource::core("pods"));
    let end = end.and_then(|end| Timestamp::from_second(end.saturating_add(1)).ok());
    let entry = ObjectUsage {
        later_usage: end.map(|end| (end, usage(kind, &object, end))),
        attributes: ScopeAttributes::from_object(kind, &object),
        uses,
    };
    Some((named.metadata.namespace, named.metadata.name, entry))
}

//! A view derived from some kinds, brought up to date incrementally when it is read.
//!
//! A read applies the events since the previous read. A view costs nothing while it is not used,
//! and is never older than the cache.

use std::sync::Arc;

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{EventBatch, Shard};
use crate::object::Object;

/// State derived from objects.
pub trait View: Default {
    /// Applies the newest state of an object or its deletion. `kind` is the index of its shard.
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool);
}

pub struct IncrementalView<V, const N: usize> {
    shards: [Arc<Shard>; N],
    state: RwLock<State<V, N>>,
}

struct State<V, const N: usize> {
    /// The position in each shard up to which events are applied; `None` before the first full
    /// read.
    positions: Option<[u64; N]>,
    view: V,
}

impl<V: View, const N: usize> IncrementalView<V, N> {
    pub fn new(shards: [Arc<Shard>; N]) -> IncrementalView<V, N> {
        IncrementalView { shards, state: RwLock::new(State { positions: None, view: V::default() }) }
    }

    /// For a view that already contains the current state of the cache.
    pub fn with_loaded_view(shards: [Arc<Shard>; N], view: V) -> IncrementalView<V, N> {
        let positions = shards.each_ref().map(|shard| shard.position());
        IncrementalView { shards, state: RwLock::new(State { positions: Some(positions), view }) }
    }

    /// The view, up to date with the cache.
    pub fn current(&self) -> MappedRwLockReadGuard<'_, V> {
        let latest = self.shards.each_ref().map(|shard| shard.position());
        let mut state = self.state.read();
        // `positions` is compared without the shard locks: events after `latest` was taken are
        // applied by the next read.
        if state.positions != Some(latest) {
            drop(state);
            let mut stale = self.state.write();
            if !stale.apply_events(&self.shards) {
                stale.reload(&self.shards);
            }
            state = RwLockWriteGuard::downgrade(stale);
        }
        RwLockReadGuard::map(state, |state| &state.view)
    }
}

impl<V: View, const N: usize> State<V, N> {
    /// Applies new events; false if a shard has dropped some of them.
    fn apply_events(&mut self, shards: &[Arc<Shard>; N]) -> bool {
        let Some(mut positions) = self.positions else { return false };
        for (kind, shard) in shards.iter().enumerate() {
            let EventBatch::Events(events) = shard.events_from(positions[kind], usize::MAX) else {
                return false;
            };
            positions[kind] += events.len() as u64;
            for event in events {
                self.view.apply(kind, &event.object, event.deleted);
            }
        }
        self.positions = Some(positions);
        true
    }

    fn reload(&mut self, shards: &[Arc<Shard>; N]) {
        self.view = V::default();
        let mut positions = [0; N];
        for (kind, shard) in shards.iter().enumerate() {
            let (snapshot, position) = shard.snapshot_and_position("", 0);
            positions[kind] = position;
            for object in &snapshot.objects {
                self.view.apply(kind, object, false);
            }
        }
        self.positions = Some(positions);
    }
}

//! A view of some kinds that is brought up to date when somebody looks at it.
//!
//! Whoever looks takes in the events since the last look, so a view costs nothing while nobody does, and is
//! never older than the cache.

use std::sync::Arc;

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{EventBatch, Shard};
use crate::object::Object;

/// What is made of the objects.
pub trait View: Default {
    /// Takes in the newest state of an object, or that it is gone. `kind` counts the kinds in the order they
    /// are followed.
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool);
}

pub struct IncrementalView<V, const N: usize> {
    shards: [Arc<Shard>; N],
    state: RwLock<State<V, N>>,
}

struct State<V, const N: usize> {
    /// Up to where the events of each shard are in the view; `None` before everything was read once.
    positions: Option<[u64; N]>,
    view: V,
}

impl<V: View, const N: usize> IncrementalView<V, N> {
    pub fn new(shards: [Arc<Shard>; N]) -> IncrementalView<V, N> {
        IncrementalView { shards, state: RwLock::new(State { positions: None, view: V::default() }) }
    }

    /// A view that knows what is in the cache already.
    pub fn with_loaded_view(shards: [Arc<Shard>; N], view: V) -> IncrementalView<V, N> {
        let positions = shards.each_ref().map(|shard| shard.position());
        IncrementalView { shards, state: RwLock::new(State { positions: Some(positions), view }) }
    }

    /// The view, with everything in it that is in the cache.
    pub fn current(&self) -> MappedRwLockReadGuard<'_, V> {
        let latest = self.shards.each_ref().map(|shard| shard.position());
        let mut state = self.state.read();
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
    /// Takes in new events; false where some are no longer there.
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

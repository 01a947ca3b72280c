//! Common functions that map a change to the keys to enqueue, like controller-runtime's `handler` package.

use std::sync::Arc;

use client::{Key, Object};

use crate::cache::{Cache, ObjectUpdate};

/// Enqueues the changed object.
pub fn own<T: Object>(changed: &ObjectUpdate<'_, T>, enqueue: &mut dyn FnMut(Key)) {
    enqueue(changed.latest().key());
}

/// Enqueues the controlling owners of this kind, before and after the change.
pub fn owner_of_kind<T: Object>(
    kind: &'static str,
) -> impl Fn(&ObjectUpdate<'_, T>, &mut dyn FnMut(Key)) + Send + Sync {
    move |changed, enqueue| {
        for object in [changed.before, changed.after].into_iter().flatten() {
            if let Some(owner) = object.controller().filter(|owner| owner.kind == kind) {
                enqueue(Key::new(object.namespace(), &owner.name));
            }
        }
    }
}

/// Enqueues every object of another kind in the same namespace for which `predicate` is true before or after
/// the change.
pub fn in_namespace<T: Object, O: Object, F: Fn(&T, &O) -> bool + Send + Sync>(
    others: &Arc<Cache<O>>,
    predicate: F,
) -> impl Fn(&ObjectUpdate<'_, T>, &mut dyn FnMut(Key)) + Send + Sync + use<T, O, F> {
    let others = others.clone();
    move |changed, enqueue| {
        for other in others.in_namespace(changed.latest().namespace()) {
            let states = [changed.before, changed.after];
            if states.into_iter().flatten().any(|object| predicate(object, &other)) {
                enqueue(other.key());
            }
        }
    }
}

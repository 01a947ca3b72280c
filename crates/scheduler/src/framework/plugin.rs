//! A plugin: its name and its implementations of extension points.

use std::sync::Arc;

use super::{
    Bind, Permit, PostBind, PostFilter, PreBind, PreEnqueue, PreFilter, PreScore, QueueSort, Requeue, Reserve,
};

macro_rules! points {
    ($($(#[$doc:meta])* $point:ident: $what:ident,)*) => {
        /// A configured plugin.
        #[derive(Clone)]
        pub struct Plugin {
            pub name: &'static str,
            $($(#[$doc])* pub $point: Option<Arc<dyn $what>>,)*
        }

        impl Plugin {
            /// Creates a plugin without extension points.
            pub fn new(name: &'static str) -> Plugin {
                Plugin { name, $($point: None,)* }
            }

            $(
                /// Registers the plugin at this extension point.
                pub fn $point(mut self, what: Arc<dyn $what>) -> Plugin {
                    self.$point = Some(what);
                    self
                }
            )*
        }
    };
}

points! {
    pre_enqueue: PreEnqueue,
    queue_sort: QueueSort,
    /// Also provides the filter.
    pre_filter: PreFilter,
    post_filter: PostFilter,
    /// Also provides the score function.
    pre_score: PreScore,
    reserve: Reserve,
    permit: Permit,
    pre_bind: PreBind,
    bind: Bind,
    post_bind: PostBind,
    requeue: Requeue,
}

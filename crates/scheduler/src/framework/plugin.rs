//! A plugin: a name, and what it does at each point it takes part in.

use std::sync::Arc;

use super::{
    Bind, Permit, PostBind, PostFilter, PreBind, PreEnqueue, PreFilter, PreScore, QueueSort, Requeue, Reserve,
};

macro_rules! points {
    ($($(#[$doc:meta])* $point:ident: $what:ident,)*) => {
        /// A plugin, ready to take part.
        #[derive(Clone)]
        pub struct Plugin {
            pub name: &'static str,
            $($(#[$doc])* pub $point: Option<Arc<dyn $what>>,)*
        }

        impl Plugin {
            /// A plugin that takes part nowhere yet.
            pub fn new(name: &'static str) -> Plugin {
                Plugin { name, $($point: None,)* }
            }

            $(
                /// Takes part at this point.
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
    /// Also makes the filter.
    pre_filter: PreFilter,
    post_filter: PostFilter,
    /// Also makes the score.
    pre_score: PreScore,
    reserve: Reserve,
    permit: Permit,
    pre_bind: PreBind,
    bind: Bind,
    post_bind: PostBind,
    requeue: Requeue,
}

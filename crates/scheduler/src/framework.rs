//! The scheduling framework: one small trait for each extension point.
//!
//! A plugin is a [`Plugin`] that registers its extension points, and an entry in the [`registry`]. State that
//! upstream keeps in `CycleState` is the value that PreFilter or PreScore returns: the filter or score
//! function for this pod. It lives for one scheduling cycle, during which the [`State`] does not change.
//!
//! Order of the extension points: [`PreEnqueue`], [`QueueSort`], [`PreFilter`] and [`Filter`], [`PostFilter`]
//! if no node passes, [`PreScore`] and [`Score`], [`Reserve`], [`Permit`]; then, asynchronously, [`PreBind`],
//! [`Bind`], [`PostBind`]. [`Requeue`] is the queueing hint: it decides which cluster events requeue a pod
//! that the plugin rejected.

mod cluster_event;
mod filters;
mod plugin;
mod profile;
pub mod registry;
mod status;

use std::cmp::Ordering;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::resource::v1::ResourceClaim;

pub use cluster_event::{ClusterEvent, ObjectPair};
pub use filters::{Filters, MAX_SCORE, NoNominations, Nominations, default_normalize_score};
pub use plugin::Plugin;
pub use profile::{EvaluationCounts, Profile, ProfileError, Scorer};
pub use status::{Code, Status};

use crate::algorithm::{Diagnosis, Extenders, Random};
use crate::queue::QueuedPod;
use crate::state::{NodeId, NodeInfo, PodInfo, State};

/// The input of a scheduling cycle.
#[derive(Clone, Copy)]
pub struct Cycle<'c> {
    pub state: &'c State,
    pub pod: &'c Arc<PodInfo>,
    /// The pod as it is in the API.
    pub object: &'c core::Pod,
}

/// The PreEnqueue extension point: keeps a pod out of the active queue until it is ready.
pub trait PreEnqueue: Send + Sync {
    /// Whether the pod may be scheduled. A plugin that rejects pods must also implement [`Requeue`].
    fn pre_enqueue(&self, pod: &PodInfo, state: &State) -> Status;
}

/// The QueueSort extension point.
pub trait QueueSort: Send + Sync {
    /// `Less` if `a` is scheduled before `b`.
    fn compare(&self, a: &QueuedPod, b: &QueuedPod) -> Ordering;
}

/// Result of a PreFilter plugin.
pub enum PreFilterResult<'c> {
    /// The plugin's filter does not apply to this pod.
    Skip,
    /// The filter to run for each node.
    Filter(Box<dyn Filter<'c> + 'c>),
    /// Only these nodes are candidates; the filter runs for each of them.
    FilterNodes(Vec<String>, Box<dyn Filter<'c> + 'c>),
    /// The pod fits no node.
    Reject(Status),
}

impl PreFilterResult<'_> {
    /// The status name in metrics, as upstream.
    pub fn name(&self) -> &'static str {
        match self {
            PreFilterResult::Skip => "Skip",
            PreFilterResult::Filter(_) | PreFilterResult::FilterNodes(..) => "Success",
            PreFilterResult::Reject(status) => status.code.name(),
        }
    }
}

/// The PreFilter extension point: precomputes what the filter of a pod needs.
pub trait PreFilter: Send + Sync {
    /// Creates the filter for one pod.
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c>;
}

/// The Filter extension point: whether a pod fits a node. Created for one pod by a [`PreFilter`].
pub trait Filter<'c>: Send {
    /// Returns success or the reasons for the rejection.
    fn filter(&self, node: &NodeInfo) -> Status;
    /// Updates the precomputed state as if another pod ran on the node (upstream's `AddPod`).
    fn add_pod(&mut self, _pod: &PodInfo, _node: &NodeInfo) {}
    /// Updates the precomputed state as if another pod were removed from the node (upstream's `RemovePod`).
    fn remove_pod(&mut self, _pod: &PodInfo, _node: &NodeInfo) {}
    /// Returns an independent copy for simulations; `None` if adding and removing pods does not affect the
    /// filter.
    fn fork(&self) -> Option<Box<dyn Filter<'c> + 'c>> {
        None
    }
    /// Returns a cheap check that rejects most nodes, if the filter has one.
    fn fast_filter(&self) -> Option<&dyn FastFilter> {
        None
    }
}

/// A cheap check without reasons. The reasons are computed with the full filter only if no node passes.
pub trait FastFilter {
    /// Whether the filter certainly rejects the node. `false` does not mean that it passes.
    fn rejects(&self, node: NodeId) -> bool;
}

/// A filter that is a function of the node and keeps no state.
pub struct FnFilter<F>(pub F);

impl<'c, F: Fn(&NodeInfo) -> Status + Send + 'c> Filter<'c> for FnFilter<F> {
    fn filter(&self, node: &NodeInfo) -> Status {
        (self.0)(node)
    }
}

/// The input of a PostFilter plugin.
pub struct PostFilterContext<'a, 'c> {
    pub cycle: Cycle<'c>,
    pub filters: &'a Filters<'c>,
    pub diagnosis: &'a Diagnosis,
    pub nominations: &'a dyn Nominations,
    pub random: &'a mut Random,
    pub extenders: &'a dyn Extenders,
}

/// An API request that a PostFilter plugin needs so that the pod can be scheduled later.
#[derive(Clone, Debug, PartialEq)]
pub enum CleanupTask {
    /// Deallocate the claim: no pod uses it.
    Release(Arc<ResourceClaim>),
    Delete(Arc<ResourceClaim>),
}

/// Result of a PostFilter plugin.
pub enum PostFilterResult {
    /// The pod may fit the node once the victims are deleted.
    Nominate { node: Arc<str>, victims: Vec<Arc<PodInfo>> },
    /// The pod may be schedulable after the task is done.
    Cleanup { status: Status, task: CleanupTask },
    /// Nothing found. `clear_nomination`: remove the existing nomination, which cannot help any more.
    Rejected { status: Status, clear_nomination: bool },
}

impl PostFilterResult {
    /// The status name in metrics, as upstream.
    pub fn name(&self) -> &'static str {
        match self {
            PostFilterResult::Nominate { .. } => "Success",
            PostFilterResult::Cleanup { status, .. } | PostFilterResult::Rejected { status, .. } => {
                status.code.name()
            }
        }
    }
}

/// The PostFilter extension point: runs if no node passes the filters.
pub trait PostFilter: Send + Sync {
    /// Tries to make the pod schedulable.
    fn post_filter(&self, attempt: &mut PostFilterContext<'_, '_>) -> PostFilterResult;
}

/// Result of a PreScore plugin.
pub enum PreScoreResult<'c> {
    /// The plugin does not score nodes for this pod.
    Skip,
    /// The score function to run for each node.
    Score(Box<dyn Score + 'c>),
    /// An internal error.
    Error(String),
}

impl PreScoreResult<'_> {
    /// The status name in metrics, as upstream.
    pub fn name(&self) -> &'static str {
        match self {
            PreScoreResult::Skip => "Skip",
            PreScoreResult::Score(_) => "Success",
            PreScoreResult::Error(_) => "Error",
        }
    }
}

/// The PreScore extension point: precomputes what the score function of a pod needs.
pub trait PreScore: Send + Sync {
    /// Creates the score function for one pod. `nodes` passed the filters.
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, nodes: &[NodeId]) -> PreScoreResult<'c>;
}

/// The Score extension point. Created for one pod by a [`PreScore`].
pub trait Score: Send {
    /// Returns the score of a node: 0 to [`MAX_SCORE`], or any number if `normalize` maps it to this range.
    fn score(&self, node: &NodeInfo) -> i64;
    /// Maps the scores of all nodes to 0 to [`MAX_SCORE`] (upstream's `NormalizeScore`).
    fn normalize(&self, _nodes: &[NodeId], _scores: &mut [i64]) {}
}

/// The Reserve extension point: tracks what a pod uses besides the node's resources.
pub trait Reserve: Send + Sync {
    /// Called when a node was selected.
    fn reserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>) -> Status;
    /// Called when the pod is not bound after all. Must be idempotent and safe without a preceding `reserve`.
    fn unreserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>);
}

/// Result of a Permit plugin.
pub enum PermitResult {
    Allow,
    /// Wait for the plugin to allow the pod; it is rejected after a timeout.
    Wait(PermitWait),
    Reject(Status),
}

impl PermitResult {
    /// The status name in metrics, as upstream.
    pub fn name(&self) -> &'static str {
        match self {
            PermitResult::Allow => "Success",
            PermitResult::Wait(_) => "Wait",
            PermitResult::Reject(status) => status.code.name(),
        }
    }
}

/// The Permit extension point: can delay or reject the binding of a pod.
pub trait Permit: Send + Sync {
    /// Called after Reserve.
    fn permit(&self, pod: &PodInfo, node: &str) -> PermitResult;
}

// The extension points of the binding cycle; see `crate::run`.
pub use crate::bind::{Bind, BindContext, PermitWait, PostBind, PreBind};

/// Queueing hints of a plugin (upstream's `EnqueueExtensions`).
pub trait Requeue: Send + Sync {
    /// Whether the event may make the pod schedulable, so that it should be retried.
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, state: &State) -> bool;
}

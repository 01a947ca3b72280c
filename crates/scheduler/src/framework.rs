//! The framework: where a plugin can take part in scheduling a pod, one small trait for each point.
//!
//! A plugin is a value of [`Plugin`] that says which points it takes part in, and a row in the
//! [`registry`]. What a plugin works out once per pod (upstream's cycle state) is the value its pre-filter or
//! pre-score gives back: the filter or the score itself, made for this pod. It lives for one cycle, in which
//! nothing of the [`State`] changes.
//!
//! In order: [`PreEnqueue`], [`QueueSort`], [`PreFilter`] and [`Filter`], [`PostFilter`] if no node passes,
//! [`PreScore`] and [`Score`], [`Reserve`], [`Permit`], then beside the next pod's cycle [`PreBind`],
//! [`Bind`], [`PostBind`]. [`Requeue`] says which changes may help a pod the plugin has turned away.

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

/// One pod's turn.
#[derive(Clone, Copy)]
pub struct Cycle<'c> {
    pub state: &'c State,
    pub pod: &'c Arc<PodInfo>,
    /// The pod as it is in the API.
    pub object: &'c core::Pod,
}

/// Keeps a pod out of the queue until it is ready.
pub trait PreEnqueue: Send + Sync {
    /// Whether the pod may be scheduled yet. What keeps it out also says what lets it in ([`Requeue`]).
    fn pre_enqueue(&self, pod: &PodInfo, state: &State) -> Status;
}

/// Which of two pods goes first.
pub trait QueueSort: Send + Sync {
    /// `Less` if `a` goes first.
    fn compare(&self, a: &QueuedPod, b: &QueuedPod) -> Ordering;
}

/// What a pre-filter says about a pod.
pub enum PreFilterResult<'c> {
    /// The plugin has nothing to say about this pod.
    Skip,
    /// Ask this about each node.
    Filter(Box<dyn Filter<'c> + 'c>),
    /// Only these nodes come into question; ask this about each.
    FilterNodes(Vec<String>, Box<dyn Filter<'c> + 'c>),
    /// No node will do.
    Reject(Status),
}

impl PreFilterResult<'_> {
    /// As upstream names it in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            PreFilterResult::Skip => "Skip",
            PreFilterResult::Filter(_) | PreFilterResult::FilterNodes(..) => "Success",
            PreFilterResult::Reject(status) => status.code.name(),
        }
    }
}

/// Works out once what the filter of a pod needs.
pub trait PreFilter: Send + Sync {
    /// Prepares the filter for one pod.
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c>;
}

/// Whether a pod can run on a node; made for one pod by a [`PreFilter`].
pub trait Filter<'c>: Send {
    /// Success, or why not.
    fn filter(&self, node: &NodeInfo) -> Status;
    /// Another pod is put on a node, to see what would be.
    fn add_pod(&mut self, _pod: &PodInfo, _node: &NodeInfo) {}
    /// Another pod is taken off a node, to see what would be.
    fn remove_pod(&mut self, _pod: &PodInfo, _node: &NodeInfo) {}
    /// A copy that can be changed by itself. `None` if adding and removing pods changes nothing.
    fn fork(&self) -> Option<Box<dyn Filter<'c> + 'c>> {
        None
    }
    /// A way to tell at once that most nodes are out, for a filter that has one.
    fn fast_filter(&self) -> Option<&dyn FastFilter> {
        None
    }
}

/// Tells that a node will not pass without saying why, which is asked only when no node does.
pub trait FastFilter {
    /// Whether the filter is sure to turn the node away.
    fn rejects(&self, node: NodeId) -> bool;
}

/// A filter that is a plain function of the node.
pub struct FnFilter<F>(pub F);

impl<'c, F: Fn(&NodeInfo) -> Status + Send + 'c> Filter<'c> for FnFilter<F> {
    fn filter(&self, node: &NodeInfo) -> Status {
        (self.0)(node)
    }
}

/// What is known when no node was found.
pub struct PostFilterContext<'a, 'c> {
    pub cycle: Cycle<'c>,
    pub filters: &'a Filters<'c>,
    pub diagnosis: &'a Diagnosis,
    pub nominations: &'a dyn Nominations,
    pub random: &'a mut Random,
    pub extenders: &'a dyn Extenders,
}

/// Something to be done about a resource claim, so that a pod may be tried again.
#[derive(Clone, Debug, PartialEq)]
pub enum CleanupTask {
    /// Nobody uses what it was given.
    Release(Arc<ResourceClaim>),
    Delete(Arc<ResourceClaim>),
}

/// What a post-filter has come up with.
pub enum PostFilterResult {
    /// The pod may fit a node once these pods are gone.
    Nominate { node: Arc<str>, victims: Vec<Arc<PodInfo>> },
    /// Nothing now, but this may help later.
    Cleanup { status: Status, task: CleanupTask },
    /// Nothing to be done. With `clear`, a node nominated before is no hope any more.
    Rejected { status: Status, clear_nomination: bool },
}

impl PostFilterResult {
    /// As upstream names it in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            PostFilterResult::Nominate { .. } => "Success",
            PostFilterResult::Cleanup { status, .. } | PostFilterResult::Rejected { status, .. } => {
                status.code.name()
            }
        }
    }
}

/// Tries to make room when no node was found.
pub trait PostFilter: Send + Sync {
    /// Looks for a way.
    fn post_filter(&self, attempt: &mut PostFilterContext<'_, '_>) -> PostFilterResult;
}

/// What a pre-score says about a pod.
pub enum PreScoreResult<'c> {
    /// The plugin has nothing to say about this pod.
    Skip,
    /// Ask this about each node.
    Score(Box<dyn Score + 'c>),
    /// Something went wrong.
    Error(String),
}

impl PreScoreResult<'_> {
    /// As upstream names it in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            PreScoreResult::Skip => "Skip",
            PreScoreResult::Score(_) => "Success",
            PreScoreResult::Error(_) => "Error",
        }
    }
}

/// Works out once what the score of a pod needs.
pub trait PreScore: Send + Sync {
    /// Prepares the score for one pod and the nodes it fits.
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, nodes: &[NodeId]) -> PreScoreResult<'c>;
}

/// How good a node is for a pod; made for one pod by a [`PreScore`].
pub trait Score: Send {
    /// Any number, if `normalize` brings them between 0 and [`MAX_SCORE`].
    fn score(&self, node: &NodeInfo) -> i64;
    /// Brings all scores between 0 and [`MAX_SCORE`].
    fn normalize(&self, _nodes: &[NodeId], _scores: &mut [i64]) {}
}

/// Keeps books on what a pod takes beside the node's resources.
pub trait Reserve: Send + Sync {
    /// A node is chosen.
    fn reserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>) -> Status;
    /// It came to nothing. Must undo, also what was never reserved.
    fn unreserve(&self, state: &mut State, pod: &PodInfo, node: &Arc<str>);
}

/// Whether a pod may be bound now.
pub enum PermitResult {
    Allow,
    /// Not before it is allowed; rejected after some time.
    Wait(PermitWait),
    Reject(Status),
}

impl PermitResult {
    /// As upstream names it in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            PermitResult::Allow => "Success",
            PermitResult::Wait(_) => "Wait",
            PermitResult::Reject(status) => status.code.name(),
        }
    }
}

/// Holds a pod back before it is bound.
pub trait Permit: Send + Sync {
    /// Asked when a node is chosen and reserved.
    fn permit(&self, pod: &PodInfo, node: &str) -> PermitResult;
}

/// What the last steps of a binding can do: see `crate::run`.
pub use crate::bind::{Bind, BindContext, PermitWait, PostBind, PreBind};

/// Which changes can help a pod that the plugin has turned away.
pub trait Requeue: Send + Sync {
    /// Whether the pod should be tried again.
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, state: &State) -> bool;
}

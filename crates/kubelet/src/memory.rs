//! What a pod's worker knows that the runtime does not: how probes went and what could not be started.
//! Lost with the process, and found out again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::{SignedDuration, Timestamp};

/// What is known of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// By the id of the run.
    pub health: HashMap<String, Health>,
    /// By the name of the container that could not be started.
    pub failures: BTreeMap<String, Failure>,
    /// Why there is no sandbox.
    pub sandbox_failure: Option<Failure>,
    /// How often containers were asked how they are: the container, which probe, whether the answer was good.
    pub asked: BTreeMap<(String, &'static str, bool), u64>,
    /// What runs were last given, where that is not what they were made with.
    pub resized: HashMap<String, String>,
    /// Runs and failures of which was told that they are left alone for a while.
    pub told: BTreeSet<String>,
    /// They are made, and the pod's to change.
    pub has_volumes: bool,
    /// It was found to have a place on the node.
    pub let_in: bool,
    /// Why the pod was ended by the node: reason and message.
    pub ended: Option<(String, String)>,
    /// The seconds it has for that, where these are not its own to choose.
    pub end_within: Option<i64>,
}

/// How the probes of a running container went so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// The startup probe has succeeded, or there is none.
    pub started: bool,
    pub ready: bool,
    /// The liveness or the startup probe has failed too often.
    pub dead: bool,
}

/// Something that could not be done, and is tried again later and later.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// Such as `ErrImagePull`.
    pub reason: String,
    pub message: String,
    pub times: u32,
    pub at: Timestamp,
    pub again: Timestamp,
}

/// A failed attempt is what is said at first; then that it is left alone for a while.
const QUIET_AFTER: SignedDuration = SignedDuration::from_secs(2);

impl Failure {
    /// From when on it is said that nothing is tried for a while; only of images that cannot be pulled.
    pub fn quiet_from(&self) -> Option<Timestamp> {
        (self.reason == "ErrImagePull").then(|| self.at.checked_add(QUIET_AFTER).ok()).flatten()
    }
}

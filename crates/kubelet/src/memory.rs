//! What a pod's worker knows that the runtime does not: how probes went and what could not be started.
//! Lost with the process, and found out again.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;

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
    /// Why the pod was ended by the node: reason and message.
    pub ended: Option<(String, String)>,
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
    pub again: Timestamp,
}

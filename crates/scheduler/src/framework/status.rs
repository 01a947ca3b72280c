//! What plugins say about a pod and a node.

use std::borrow::Cow;

/// How it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Success,
    /// Something went wrong; nothing is said about the pod.
    Error,
    /// Not now. Removing other pods may help.
    Unschedulable,
    /// Not now, and removing other pods would not help.
    UnschedulableAndUnresolvable,
    /// The pod must wait for something outside.
    Pending,
}

impl Code {
    /// As upstream names it in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Code::Success => "Success",
            Code::Error => "Error",
            Code::Unschedulable => "Unschedulable",
            Code::UnschedulableAndUnresolvable => "UnschedulableAndUnresolvable",
            Code::Pending => "Pending",
        }
    }
}

/// A code with reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub code: Code,
    pub reasons: Vec<Cow<'static, str>>,
    /// Who says so; filled in by the framework.
    pub plugin: &'static str,
}

impl Status {
    /// All is well.
    pub const fn success() -> Status {
        Status { code: Code::Success, reasons: Vec::new(), plugin: "" }
    }

    /// Removing other pods may help.
    pub fn unschedulable(reason: impl Into<Cow<'static, str>>) -> Status {
        Status { code: Code::Unschedulable, reasons: vec![reason.into()], plugin: "" }
    }

    /// Removing other pods would not help.
    pub fn unresolvable(reason: impl Into<Cow<'static, str>>) -> Status {
        Status { code: Code::UnschedulableAndUnresolvable, reasons: vec![reason.into()], plugin: "" }
    }

    /// Something went wrong.
    pub fn error(reason: impl Into<Cow<'static, str>>) -> Status {
        Status { code: Code::Error, reasons: vec![reason.into()], plugin: "" }
    }

    /// Says who says so.
    pub fn with_plugin(mut self, plugin: &'static str) -> Status {
        self.plugin = plugin;
        self
    }

    /// Whether all is well.
    pub fn is_success(&self) -> bool {
        self.code == Code::Success
    }

    /// Whether the pod is turned away.
    pub fn is_rejected(&self) -> bool {
        matches!(self.code, Code::Unschedulable | Code::UnschedulableAndUnresolvable | Code::Pending)
    }

    /// The reasons in one line.
    pub fn message(&self) -> String {
        self.reasons.join(", ")
    }
}

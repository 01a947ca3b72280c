//! Results of plugins. Counterpart of upstream's `framework.Status`.

use std::borrow::Cow;

/// The kind of result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Success,
    /// An internal error. The pod is neither accepted nor rejected.
    Error,
    /// The pod does not fit. Preemption may help.
    Unschedulable,
    /// The pod does not fit, and preemption would not help.
    UnschedulableAndUnresolvable,
    /// The pod waits for an external component.
    Pending,
}

impl Code {
    /// The status name in metrics, as upstream.
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
    /// The plugin that returned the status; set by the framework.
    pub plugin: &'static str,
}

impl Status {
    /// The pod fits.
    pub const fn success() -> Status {
        Status { code: Code::Success, reasons: Vec::new(), plugin: "" }
    }

    /// The pod does not fit; preemption may help.
    pub fn unschedulable(reason: impl Into<Cow<'static, str>>) -> Status {
        Status { code: Code::Unschedulable, reasons: vec![reason.into()], plugin: "" }
    }

    /// The pod does not fit; preemption would not help.
    pub fn unresolvable(reason: impl Into<Cow<'static, str>>) -> Status {
        Status { code: Code::UnschedulableAndUnresolvable, reasons: vec![reason.into()], plugin: "" }
    }

    /// An internal error.
    pub fn error(reason: impl Into<Cow<'static, str>>) -> Status {
        Status { code: Code::Error, reasons: vec![reason.into()], plugin: "" }
    }

    /// Sets the plugin.
    pub fn with_plugin(mut self, plugin: &'static str) -> Status {
        self.plugin = plugin;
        self
    }

    /// Whether the pod fits.
    pub fn is_success(&self) -> bool {
        self.code == Code::Success
    }

    /// Whether the pod is rejected.
    pub fn is_rejected(&self) -> bool {
        matches!(self.code, Code::Unschedulable | Code::UnschedulableAndUnresolvable | Code::Pending)
    }

    /// The reasons, joined.
    pub fn message(&self) -> String {
        self.reasons.join(", ")
    }
}

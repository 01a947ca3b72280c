//! What is told about a request beyond its answer: to the client in warnings, to the audit log in annotations.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Gathered on the way of a request, whatever becomes of it.
#[derive(Debug, Default)]
pub struct WarningRecorder {
    warnings: Mutex<Vec<String>>,
    annotations: Mutex<BTreeMap<String, String>>,
}

impl WarningRecorder {
    /// Lets the client know of something that is not wrong enough to refuse; the same thing once.
    pub fn warn(&self, text: impl Into<String>) {
        let text = text.into();
        let mut warnings = self.warnings.lock();
        if !warnings.contains(&text) {
            warnings.push(text);
        }
    }

    /// Leaves something for the audit log. The last word on a key counts.
    pub fn annotate(&self, key: impl Into<String>, text: impl Into<String>) {
        self.annotations.lock().insert(key.into(), text.into());
    }

    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().clone()
    }

    pub fn annotations(&self) -> BTreeMap<String, String> {
        self.annotations.lock().clone()
    }
}

//! Collects warnings for the client and annotations for the audit log while a request is handled.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// The warnings and audit annotations of one request. They are used whatever its result is.
#[derive(Debug, Default)]
pub struct WarningRecorder {
    warnings: Mutex<Vec<String>>,
    annotations: Mutex<BTreeMap<String, String>>,
}

impl WarningRecorder {
    /// Adds a warning header to the response. Duplicates are dropped.
    pub fn warn(&self, text: impl Into<String>) {
        let text = text.into();
        let mut warnings = self.warnings.lock();
        if !warnings.contains(&text) {
            warnings.push(text);
        }
    }

    /// Sets an audit annotation. The last value of a key wins.
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

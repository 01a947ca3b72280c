//! Strings that many objects share, and sets of labels made of them.
//!
//! A thousand pods of one template carry the same label keys and values; each is kept once. What no object
//! uses any more is let go by [`Strings::sweep`].

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Every string in use, once.
#[derive(Debug, Default)]
pub struct StringPool {
    all: HashSet<Arc<str>>,
    /// Sweep again when this many are kept.
    limit: usize,
}

impl StringPool {
    /// The shared form of a string.
    pub fn get_or_insert(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.all.get(text) {
            return known.clone();
        }
        if self.all.len() >= self.limit {
            self.remove_unused();
        }
        let text: Arc<str> = text.into();
        self.all.insert(text.clone());
        text
    }

    /// Lets go of what nobody uses.
    pub fn remove_unused(&mut self) {
        self.all.retain(|text| Arc::strong_count(text) > 1);
        self.limit = (self.all.len() * 2).max(1024);
    }

    /// The labels of an object.
    pub fn labels(&mut self, labels: Option<&BTreeMap<String, String>>) -> Labels {
        let shared =
            labels.into_iter().flatten().map(|(k, v)| (self.get_or_insert(k), self.get_or_insert(v)));
        Labels(shared.collect())
    }
}

/// Labels, sorted by key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Labels(Box<[(Arc<str>, Arc<str>)]>);

impl Labels {
    /// The value of one label.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.shared(key).map(|value| &**value)
    }

    /// The value of one label, to be kept.
    pub fn shared(&self, key: &str) -> Option<&Arc<str>> {
        self.0.iter().find(|(name, _)| &**name == key).map(|(_, value)| value)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each key with its value.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// Whether a selector means an object with these labels.
    pub fn matched_by(&self, selector: &api::selector::LabelSelector) -> bool {
        selector.matches(|key| self.get(key))
    }
}

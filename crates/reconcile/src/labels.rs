//! Interned strings, and label sets made of them.
//!
//! A thousand pods of one template carry the same label keys and values; each string is stored once. Strings
//! that are no longer used are removed by [`StringPool::remove_unused`].

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// A pool of interned strings.
#[derive(Debug, Default)]
pub struct StringPool {
    all: HashSet<Arc<str>>,
    /// Unused strings are removed when the pool has this many.
    limit: usize,
}

impl StringPool {
    /// Returns the interned form of a string.
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

    /// Removes the strings that only the pool references.
    pub fn remove_unused(&mut self) {
        self.all.retain(|text| Arc::strong_count(text) > 1);
        self.limit = (self.all.len() * 2).max(1024);
    }

    /// Interns the labels of an object.
    pub fn labels(&mut self, labels: Option<&BTreeMap<String, String>>) -> Labels {
        let shared =
            labels.into_iter().flatten().map(|(k, v)| (self.get_or_insert(k), self.get_or_insert(v)));
        Labels(shared.collect())
    }
}

/// A label set, sorted by key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Labels(Box<[(Arc<str>, Arc<str>)]>);

impl Labels {
    /// Returns the value of a label.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.shared(key).map(|value| &**value)
    }

    /// Returns the interned value of a label.
    pub fn shared(&self, key: &str) -> Option<&Arc<str>> {
        self.0.iter().find(|(name, _)| &**name == key).map(|(_, value)| value)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// Whether a selector matches these labels.
    pub fn matched_by(&self, selector: &api::selector::LabelSelector) -> bool {
        selector.matches(|key| self.get(key))
    }
}

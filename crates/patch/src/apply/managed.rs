//! Parses and serializes `metadata.managedFields`.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::field_set::Set;
use super::fields_v1;
use crate::go;

/// The same limit as upstream on the number of entries with operation Update.
const MAX_UPDATE_MANAGERS: usize = 10;
/// The manager of the merged oldest entries beyond the limit.
const OLD_UPDATES_MANAGER_NAME: &str = "ancient-changes";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    Apply,
    Update,
}

/// The identity of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub operation: Operation,
    pub manager: String,
    /// Ignored for the operation Apply: a manager has one entry for all versions.
    pub api_version: String,
    pub subresource: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub owner: Owner,
    pub time: Option<String>,
    pub set: Set,
    /// The serialized set, until it is parsed on demand. Most writes affect few entries.
    raw: Option<Value>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ManagedFields {
    pub entries: Vec<Entry>,
}

impl Owner {
    fn matches(&self, other: &Owner) -> bool {
        self.operation == other.operation
            && self.manager == other.manager
            && self.subresource == other.subresource
            && (self.operation == Operation::Apply || self.api_version == other.api_version)
    }

    /// The key by which upstream sorts managers in lists.
    pub fn sort_key(&self) -> String {
        let mut parts = format!("{{\"manager\":{}", go::json(&Value::from(self.manager.as_str())));
        match self.operation {
            Operation::Apply => parts.push_str(",\"operation\":\"Apply\""),
            Operation::Update => {
                let version = go::json(&Value::from(self.api_version.as_str()));
                parts.push_str(&format!(",\"operation\":\"Update\",\"apiVersion\":{version}"));
            }
        }
        if !self.subresource.is_empty() {
            parts
                .push_str(&format!(",\"subresource\":{}", go::json(&Value::from(self.subresource.as_str()))));
        }
        parts.push('}');
        parts
    }

    /// The manager as it is described in conflicts.
    pub fn describe(&self) -> String {
        let mut text = go::quote(&self.manager);
        if !self.subresource.is_empty() {
            text.push_str(&format!(" with subresource {}", go::quote(&self.subresource)));
        }
        if self.operation == Operation::Update {
            text.push_str(&format!(" using {}", self.api_version));
        }
        text
    }
}

impl ManagedFields {
    /// Parses entries completely, including their sets.
    pub fn parse(entries: &Value) -> Result<ManagedFields, String> {
        let mut managed = ManagedFields::headers(entries.clone())?;
        for (entry, source) in managed.entries.iter_mut().zip(entries.as_array().into_iter().flatten()) {
            let raw = entry.raw.take().unwrap_or_default();
            entry.set = fields_v1::parse(&raw).map_err(|e| {
                format!("error decoding versioned set from {}: error decoding set: {e}", go::print(source))
            })?;
        }
        // If there are several entries of one manager, the last one counts.
        let mut seen = HashSet::new();
        let mut entries: Vec<Entry> = managed.entries.into_iter().rev().collect();
        entries.retain(|entry| seen.insert(entry.owner.sort_key()));
        entries.reverse();
        Ok(ManagedFields { entries })
    }

    /// Parses stored entries without their sets.
    pub fn headers(entries: Value) -> Result<ManagedFields, String> {
        let mut managed = ManagedFields::default();
        let Value::Array(list) = entries else { return Ok(managed) };
        for (at, mut entry) in list.into_iter().enumerate() {
            let text = |name: &str| entry.get(name).and_then(Value::as_str).unwrap_or("").to_owned();
            let operation = match entry.get("operation").and_then(Value::as_str) {
                Some("Apply") => Operation::Apply,
                Some("Update") => Operation::Update,
                _ => return Err("operation must be `Apply` or `Update`".to_owned()),
            };
            let api_version = text("apiVersion");
            if api_version.is_empty() {
                return Err("apiVersion must not be empty".to_owned());
            }
            match text("fieldsType").as_str() {
                "FieldsV1" => {}
                "" => return Err(format!("missing fieldsType in managed fields entry {at}")),
                other => {
                    return Err(format!(
                        "invalid fieldsType {} in managed fields entry {at}",
                        go::quote(other)
                    ));
                }
            }
            let owner =
                Owner { operation, manager: text("manager"), api_version, subresource: text("subresource") };
            let time = entry.get("time").and_then(Value::as_str).map(str::to_owned);
            let raw = Some(entry.get_mut("fieldsV1").map(Value::take).unwrap_or_default());
            managed.entries.push(Entry { owner, time, set: Set::default(), raw });
        }
        Ok(managed)
    }

    /// Serializes the entries in upstream's order: Apply before Update, then by time, then by name.
    pub fn print(mut self) -> Value {
        self.entries.sort_by(|Entry { owner: a, time: a_time, .. }, Entry { owner: b, time: b_time, .. }| {
            (a.operation.cmp(&b.operation))
                .then_with(|| a_time.cmp(b_time))
                .then_with(|| a.manager.cmp(&b.manager))
                .then_with(|| a.api_version.cmp(&b.api_version))
                .then_with(|| a.subresource.cmp(&b.subresource))
        });
        Value::Array(self.entries.into_iter().map(Entry::print).collect())
    }

    pub fn remove(&mut self, owner: &Owner) -> Option<Entry> {
        let at = self.entries.iter().position(|entry| entry.owner.matches(owner))?;
        Some(self.entries.remove(at))
    }

    pub fn drop_empty(&mut self) {
        self.entries.retain(|entry| entry.raw.is_some() || !entry.set.is_empty());
    }

    /// Merges the oldest Update entries into one if there are too many.
    pub fn cap_update_managers(&mut self) {
        let (mut updates, applies): (Vec<Entry>, Vec<Entry>) =
            self.entries.drain(..).partition(|entry| entry.owner.operation == Operation::Update);
        self.entries = applies;
        if updates.len() > MAX_UPDATE_MANAGERS {
            updates.sort_by_cached_key(|entry| (entry.time.clone(), entry.owner.sort_key()));
            updates = fold_oldest(updates);
        }
        self.entries.append(&mut updates);
    }
}

/// Only entries of the same API version can be merged, so the first one of a version is kept until
/// there is a second.
fn fold_oldest(updates: Vec<Entry>) -> Vec<Entry> {
    let mut count = updates.len();
    let mut slots: Vec<Option<Entry>> = updates.into_iter().map(Some).collect();
    let mut first_of: HashMap<String, usize> = HashMap::new();
    let old_updates = slots.iter().enumerate().filter_map(|(at, slot)| {
        let owner = &slot.as_ref()?.owner;
        (owner.manager == OLD_UPDATES_MANAGER_NAME && owner.subresource.is_empty())
            .then(|| (owner.api_version.clone(), at))
    });
    let mut buckets: HashMap<String, usize> = old_updates.collect();
    for at in 0..slots.len() {
        if count <= MAX_UPDATE_MANAGERS {
            break;
        }
        let Some(version) = slots[at].as_ref().map(|entry| entry.owner.api_version.clone()) else { continue };
        let Some(&first) = first_of.get(&version) else {
            first_of.insert(version, at);
            continue;
        };
        let bucket = Owner {
            operation: Operation::Update,
            manager: OLD_UPDATES_MANAGER_NAME.to_owned(),
            api_version: version,
            subresource: String::new(),
        };
        let into = *buckets.entry(bucket.api_version.clone()).or_insert(first);
        if into == at {
            continue;
        }
        let Some(mut entry) = slots[at].take() else { continue };
        if let Some(old_updates) = &mut slots[into] {
            old_updates.owner = bucket;
            old_updates.time = entry.time.take();
            old_updates.set_mut().add(std::mem::take(entry.set_mut()));
        }
        count -= 1;
    }
    slots.into_iter().flatten().collect()
}

impl Entry {
    pub fn new(owner: Owner, time: Option<String>, set: Set) -> Entry {
        Entry { owner, time, set, raw: None }
    }

    /// The set, parsed on demand. A stored set was validated before it was stored, so errors are
    /// ignored.
    pub fn set_mut(&mut self) -> &mut Set {
        if let Some(raw) = self.raw.take() {
            self.set = fields_v1::parse(&raw).unwrap_or_default();
        }
        &mut self.set
    }

    /// Whether the set overlaps `changes`.
    pub fn has_overlap(&self, changes: &Set) -> bool {
        self.raw.as_ref().is_none_or(|raw| fields_v1::has_overlap(raw, changes))
    }

    fn print(self) -> Value {
        let Entry { owner, time, set, raw } = self;
        let operation = match owner.operation {
            Operation::Apply => "Apply",
            Operation::Update => "Update",
        };
        let values = [
            ("manager", owner.manager),
            ("operation", operation.to_owned()),
            ("apiVersion", owner.api_version),
            ("time", time.unwrap_or_default()),
            ("fieldsType", "FieldsV1".to_owned()),
            ("subresource", owner.subresource),
        ];
        let mut entry: Map<String, Value> = values
            .into_iter()
            .filter(|(_, text)| !text.is_empty())
            .map(|(name, text)| (name.to_owned(), Value::String(text)))
            .collect();
        entry.insert("fieldsV1".to_owned(), raw.unwrap_or_else(|| fields_v1::print(&set)));
        Value::Object(entry)
    }
}

/// A client clears the managed fields by sending no entries or a single empty one.
pub(crate) fn is_reset(entries: &Value) -> bool {
    match entries.as_array().map(Vec::as_slice) {
        Some([]) => true,
        Some([entry]) => entry.as_object().is_some_and(|fields| fields.values().all(Value::is_null)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_old_updates_of_one_api_version() {
        let entry = |n: usize| {
            let version = if n.is_multiple_of(2) { "v1" } else { "v2" };
            let owner = Owner {
                operation: Operation::Update,
                manager: format!("m{n}"),
                api_version: version.to_owned(),
                subresource: String::new(),
            };
            Entry::new(owner, Some(format!("2026-01-01T00:00:{n:02}Z")), Set::of(&[&[&format!("f{n}")]]))
        };
        let mut managed = ManagedFields { entries: (0..12).rev().map(entry).collect() };
        managed.cap_update_managers();
        let describe_entries = |managed: &ManagedFields| -> Vec<String> {
            let entries = managed.entries.iter();
            let mut entries_text: Vec<String> = entries
                .map(|e| format!("{} {} {}", e.owner.manager, e.owner.api_version, e.set.paths().concat()))
                .collect();
            entries_text.sort();
            entries_text
        };
        let folded = describe_entries(&managed);
        assert_eq!(folded[..2], ["ancient-changes v1 .f0.f2", "ancient-changes v2 .f1.f3"]);
        assert_eq!(folded.len(), 10);
        managed.cap_update_managers();
        assert_eq!(describe_entries(&managed), folded);
        managed.entries.push(entry(12));
        managed.cap_update_managers();
        assert!(describe_entries(&managed).contains(&"ancient-changes v1 .f0.f2.f4".to_owned()));
    }

    #[test]
    fn rejects_invalid_entries() {
        #[track_caller]
        fn check(entry: Value, want: &str) {
            let error = ManagedFields::parse(&Value::from(vec![entry])).expect_err("unsound");
            assert!(error.starts_with(want), "{error}");
        }
        use serde_json::json;
        check(json!({}), "operation must be `Apply` or `Update`");
        check(json!({"operation": "Update"}), "apiVersion must not be empty");
        check(
            json!({"operation": "Update", "apiVersion": "v1"}),
            "missing fieldsType in managed fields entry 0",
        );
        check(
            json!({"operation": "Update", "apiVersion": "v1", "fieldsType": "X"}),
            "invalid fieldsType \"X\" in managed fields entry 0",
        );
        check(
            json!({"operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": {"x": {}}}),
            "error decoding versioned set from map[",
        );
    }
}

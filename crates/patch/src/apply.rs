//! Server-side apply, and the field ownership that other writes record for it.
//!
//! Each entry of `metadata.managedFields` is a manager with the set of field paths it owns. [`track`]
//! assigns the fields changed by a write to its manager. [`apply`] merges an applied configuration into
//! the live object, reports conflicts with other managers unless forced, and removes fields that the
//! manager applied before and has now left out. All paths follow the schema ([`typed`]). There is no
//! version conversion: entries of other API versions are treated as if they were of this one.
//!
//! Upstream: `apimachinery/pkg/util/managedfields` and `sigs.k8s.io/structured-merge-diff`.

mod compare;
mod conflict;
mod created;
mod field_set;
mod fields_v1;
mod last_applied;
mod managed;
mod merge;
mod overlay;
mod prune;
#[cfg(test)]
mod tests;
mod typed;

use std::sync::LazyLock;

use schema::{Table, TypeId};
use serde_json::{Map, Value};

pub use self::conflict::{Cause, Conflicts};
use self::created::ExcludedFields;
use self::field_set::{Set, same};
use self::managed::{Entry, ManagedFields, Operation, Owner};
pub use self::overlay::overlay;
use self::typed::Typed;

/// The field manager of a request, and the version and subresource that it uses.
#[derive(Clone, Copy, Debug)]
pub struct FieldManager<'a> {
    pub manager: &'a str,
    pub api_version: &'a str,
    /// Empty for the main resource.
    pub subresource: &'a str,
    /// RFC 3339, UTC, in seconds.
    pub now: &'a str,
    /// Fields that this endpoint does not write, such as `&[&["status"]]`. They are not owned through
    /// it.
    pub ignore: &'a [&'a [&'a str]],
}

/// The variants correspond to upstream's response statuses, and the texts are upstream's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    #[error("{0}")]
    BadRequest(String),
    /// Status 409, reason `Conflict`, with causes.
    #[error(transparent)]
    Conflict(#[from] Conflicts),
    /// Status 500 without a reason.
    #[error("{0}")]
    Internal(String),
}

/// Fields that identify the object or are set by the server. They have no owner.
static STRIP_SET: LazyLock<Set> = LazyLock::new(|| {
    Set::of(&[
        &["apiVersion"],
        &["kind"],
        &["metadata"],
        &["metadata", "name"],
        &["metadata", "namespace"],
        &["metadata", "creationTimestamp"],
        &["metadata", "selfLink"],
        &["metadata", "uid"],
        &["metadata", "clusterName"],
        &["metadata", "generation"],
        &["metadata", "managedFields"],
        &["metadata", "resourceVersion"],
    ])
});

/// Server-side apply: returns the result of applying `config` to `live` (`None`: the object does not
/// exist), with its managed fields. The caller applies defaults and validates.
pub fn apply(
    table: &Table,
    ty: TypeId,
    live: Option<&Value>,
    config: &Value,
    writer: &FieldManager,
    force: bool,
) -> Result<Value, ApplyError> {
    let managed = live.map_or(Ok(ManagedFields::default()), |live| ManagedFields::parse(entries(live)));
    let managed =
        managed.map_err(|e| ApplyError::Internal(format!("failed to decode managed fields: {e}")))?;
    check_kind(table, ty, config)?;
    if entries(config).is_array() {
        return Err(ApplyError::BadRequest("metadata.managedFields must be nil".to_owned()));
    }
    let typed = Typed::root(table, ty);
    typed::validate(typed, config, false).map_err(|e| {
        ApplyError::Internal(format!(
            "failed to create typed patch object ({}): {e}",
            describe_object(config)
        ))
    })?;

    let mut live = live.cloned().unwrap_or_else(|| Value::Object(Map::new()));
    take_entries(&mut live);
    let mut request = ApplyRequest { typed, live: &live, config, writer, managed };
    if request.managed.entries.is_empty() {
        request.add_before_first_apply(table, ty);
    }
    let mut object = match request.run(force) {
        // kubectl takes over from client-side apply: conflicts about fields that still have the
        // last-applied value are ignored.
        Err(ApplyError::Conflict(conflicts)) if writer.manager == last_applied::KUBECTL => {
            let allowed = last_applied::unchanged(typed, &live, writer.api_version).unwrap_or_default();
            let conflicts = conflicts.except(&allowed);
            if !conflicts.is_empty() {
                return Err(conflicts.into());
            }
            request.run(true)?
        }
        other => other?,
    };
    if writer.manager == last_applied::KUBECTL {
        last_applied::refresh(&mut object, config);
    }
    Ok(object)
}

/// Updates the managed fields of `new` for a write other than apply over `live` (`None`: a create). If
/// the client has sent valid managed fields, these are the starting point.
pub fn track(table: &Table, ty: TypeId, live: Option<&Value>, new: &mut Value, writer: &FieldManager) {
    let sent = take_entries(new);
    let stored = live.map_or(&Value::Null, entries);
    let main = writer.subresource.is_empty();
    if main && sent.as_ref().is_some_and(managed::is_reset) && live.is_some() {
        return;
    }
    let sent = sent.filter(|sent| main && sent.as_array().is_some_and(|list| !list.is_empty()));

    if live.is_none()
        && sent.is_none()
        && let Some(record) = track_new(table, ty, new, writer)
        // The record is nested more deeply than the object, which may already have the maximum depth
        // that can be parsed.
        && let Ok(record) = serde_json::from_slice(&record)
    {
        return put_entries(new, record);
    }
    let typed = Typed::root(table, ty);
    let ignored = Set::of(writer.ignore);
    let zero;
    let old = match live {
        Some(live) => live,
        None => {
            zero = typed::zero(table, ty);
            &zero
        }
    };
    let mut changes = compare::compare(typed, old, new).without_trees(&ignored);
    for set in [&mut changes.removed, &mut changes.modified, &mut changes.added] {
        set.subtract(&STRIP_SET);
    }
    let is_record_unchanged = sent.as_ref().is_none_or(|sent| sent == stored);
    if live.is_some() && changes.is_empty() && is_record_unchanged {
        put_entries(new, sent.unwrap_or_else(|| stored.clone()));
        return;
    }
    let mut managed = match sent {
        Some(sent) if is_record_unchanged => ManagedFields::headers(sent).ok(),
        Some(sent) => ManagedFields::parse(&sent).or_else(|_| ManagedFields::headers(stored.clone())).ok(),
        None => ManagedFields::headers(stored.clone()).ok(),
    }
    .unwrap_or_default();
    // An object without managed fields (cleared, or from before they existed) is not tracked until the
    // next apply.
    if managed.entries.is_empty() && live.is_some() {
        return;
    }
    update_ownership(
        typed,
        &mut managed,
        changes,
        &owner(writer, writer.manager, Operation::Update),
        writer.now,
    );
    managed.cap_update_managers();
    put_entries(new, managed.print());
}

/// The managed fields of a new object as JSON text, the same as [`track`] would set; `[]` if the
/// manager owns nothing. `None` if the object has something that only `track` supports.
pub fn track_new(table: &Table, ty: TypeId, new: &Value, writer: &FieldManager) -> Option<Vec<u8>> {
    let ignored = Set::of(writer.ignore);
    let excluded = ExcludedFields { paths: Some(&STRIP_SET), trees: Some(&ignored) };
    let mut out = Vec::with_capacity(1024);
    let text = |out: &mut Vec<u8>, name: &str, value: &str| {
        out.extend_from_slice(name.as_bytes());
        schema::json::write_text(value, out);
    };
    let owner = owner(writer, writer.manager, Operation::Update);
    text(&mut out, "[{\"apiVersion\":", &owner.api_version);
    out.extend_from_slice(b",\"fieldsType\":\"FieldsV1\",\"fieldsV1\":");
    if !created::fields(Typed::root(table, ty), new, excluded, &mut out).ok()? {
        return Some(b"[]".to_vec());
    }
    text(&mut out, ",\"manager\":", &owner.manager);
    text(&mut out, ",\"operation\":", "Update");
    if !owner.subresource.is_empty() {
        text(&mut out, ",\"subresource\":", &owner.subresource);
    }
    text(&mut out, ",\"time\":", writer.now);
    out.extend_from_slice(b"}]");
    Some(out)
}

/// Restores the timestamps of `live` if the object is otherwise unchanged, so that writing the same
/// object again is a no-op.
pub fn keep_times(live: &Value, new: &mut Value) {
    let (Value::Array(old), Value::Array(entries)) = (entries(live), entries(new)) else { return };
    if old == entries || old.len() != entries.len() {
        return;
    }
    // Compares in place. This runs on every update, and copies of whole objects would dominate its
    // cost.
    let entries_same = old.iter().zip(entries).all(|(a, b)| equal_except(a, b, &["time"]));
    let metadata = |object| Value::get(object, "metadata").unwrap_or(&Value::Null);
    if entries_same
        && equal_except(live, new, &["metadata"])
        && equal_except(metadata(live), metadata(new), &["managedFields", "resourceVersion"])
    {
        put_entries(new, Value::from(old.clone()));
    }
}

/// Whether two values are equal apart from these fields.
fn equal_except(a: &Value, b: &Value, fields: &[&str]) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let counts = |(name, _): &(&String, &Value)| !fields.contains(&name.as_str());
            a.iter().filter(counts).eq(b.iter().filter(counts))
        }
        _ => a == b,
    }
}

/// The state of one apply request.
struct ApplyRequest<'r> {
    typed: Typed<'r>,
    /// The live object without its managed fields.
    live: &'r Value,
    config: &'r Value,
    writer: &'r FieldManager<'r>,
    managed: ManagedFields,
}

impl ApplyRequest<'_> {
    /// Before the first apply to an untracked object, all its fields are assigned to the manager
    /// `before-first-apply`.
    fn add_before_first_apply(&mut self, table: &Table, ty: TypeId) {
        if self.live.as_object().is_none_or(Map::is_empty) {
            return;
        }
        let zero = typed::zero(table, ty);
        let changes =
            compare::compare(self.typed, &zero, self.live).without_trees(&Set::of(self.writer.ignore));
        let before = owner(self.writer, "before-first-apply", Operation::Update);
        update_ownership(self.typed, &mut self.managed, changes, &before, self.writer.now);
    }

    fn run(&self, force: bool) -> Result<Value, ApplyError> {
        let ignored = Set::of(self.writer.ignore);
        let me = owner(self.writer, self.writer.manager, Operation::Apply);
        let mut managed = self.managed.clone();
        managed
            .entries
            .iter_mut()
            .for_each(|entry| prune::reconcile_field_set_with_schema(self.typed, &mut entry.set));

        let merged = merge::merge(self.typed, self.live, self.config)
            .map_err(|e| ApplyError::Internal(format!("failed to merge config: {e}")))?;
        let mut set = typed::field_set(self.typed, self.config);
        set.subtract_trees(&ignored);
        let last = managed.remove(&me);
        let mut object = match &last {
            None => merged,
            Some(last) => {
                let mut owned = set.clone();
                managed.entries.iter().for_each(|entry| owned.add(entry.set.clone()));
                prune::prune(self.typed, merged, &last.set, &owned)
            }
        };
        prune::remove_null_values(self.typed, &mut object);
        if object.is_null() {
            object = Value::Object(Map::new());
        }

        let changes = compare::compare(self.typed, self.live, &object).without_trees(&ignored);
        let mut changed = changes.modified;
        changed.add(changes.added);
        if !force {
            let taken = managed.entries.iter().map(|entry| (&entry.owner, entry.set.intersection(&changed)));
            let conflicts = Conflicts::new(taken.filter(|(_, set)| !set.is_empty()));
            if !conflicts.is_empty() {
                return Err(conflicts.into());
            }
        }
        for entry in &mut managed.entries {
            entry.set.subtract(&changed);
            entry.set.subtract(&changes.removed);
        }
        set.subtract(&STRIP_SET);
        let time = if same(self.live, &object) {
            last.and_then(|last| last.time)
        } else {
            Some(self.writer.now.to_owned())
        };
        managed.entries.push(Entry::new(me, time, set));
        managed.drop_empty();
        if !managed.entries.is_empty() {
            put_entries(&mut object, managed.print());
        }
        Ok(object)
    }
}

/// Assigns the changed fields to their writer and removes them from all other managers.
fn update_ownership(
    typed: Typed,
    managed: &mut ManagedFields,
    changes: compare::Comparison,
    writer: &Owner,
    now: &str,
) {
    let mut owned = changes.modified;
    owned.add(changes.added);
    for entry in &mut managed.entries {
        if entry.has_overlap(&owned) || entry.has_overlap(&changes.removed) {
            let set = entry.set_mut();
            prune::reconcile_field_set_with_schema(typed, set);
            set.subtract(&owned);
            set.subtract(&changes.removed);
        }
    }
    owned.subtract(&STRIP_SET);
    if !owned.is_empty() {
        if let Some(mut entry) = managed.remove(writer) {
            owned.add(std::mem::take(entry.set_mut()));
        }
        managed.entries.push(Entry::new(writer.clone(), Some(now.to_owned()), owned));
    }
    managed.drop_empty();
}

fn owner(writer: &FieldManager, manager: &str, operation: Operation) -> Owner {
    Owner {
        operation,
        manager: if manager.is_empty() { "unknown" } else { manager }.to_owned(),
        api_version: writer.api_version.to_owned(),
        subresource: writer.subresource.to_owned(),
    }
}

fn check_kind(table: &Table, ty: TypeId, config: &Value) -> Result<(), ApplyError> {
    let kinds = &table.get(ty).kinds;
    let (group, version, kind) = gvk(config);
    let fits =
        |known: &schema::Gvk| *known.group == *group && *known.version == *version && *known.kind == *kind;
    if kinds.is_empty() || kinds.iter().any(fits) {
        return Ok(());
    }
    Err(ApplyError::BadRequest(format!("invalid object type: {group}/{version}, Kind={kind}")))
}

fn gvk(object: &Value) -> (&str, &str, &str) {
    let text = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or("");
    let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
    (group, version, text("kind"))
}

/// The object as it is described in errors: `default/web; apps/v1, Kind=Deployment`.
fn describe_object(object: &Value) -> String {
    let (group, version, kind) = gvk(object);
    let meta =
        |name: &str| object.get("metadata").and_then(|m| m.get(name)).and_then(Value::as_str).unwrap_or("");
    format!("{}/{}; {group}/{version}, Kind={kind}", meta("namespace"), meta("name"))
}

fn entries(object: &Value) -> &Value {
    object.get("metadata").and_then(|metadata| metadata.get("managedFields")).unwrap_or(&Value::Null)
}

fn take_entries(object: &mut Value) -> Option<Value> {
    object.get_mut("metadata")?.as_object_mut()?.remove("managedFields")
}

fn put_entries(object: &mut Value, entries: Value) {
    if entries.as_array().is_none_or(Vec::is_empty) {
        return;
    }
    let Value::Object(fields) = object else { return };
    let metadata = fields.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(metadata) = metadata {
        metadata.insert("managedFields".to_owned(), entries);
    }
}

//! What create, update, patch and delete share: their options and the write to the store.

use std::collections::HashSet;
use std::sync::Arc;

use api::json::JsonExt as _;
use api::{ErrorList, Path, Resource, Status};
use http::{HeaderValue, Response};
use jiff::Timestamp;
use serde_json::{Map, Value};
use store::{Expect, Write};

use crate::access::User;
use crate::body::Body;
use crate::codec::FieldValidation;
use crate::object::{Object, to_stored_with};
use crate::registry::stored_as;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::warning_recorder::WarningRecorder;

/// The options of a write request, from its query.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    pub dry_run: bool,
    /// The field manager that owns the fields which the write sets.
    pub manager: String,
    pub validation: FieldValidation,
    pub is_patch: bool,
    /// The options as sent, for admission plugins and webhooks.
    pub raw_options: Value,
    pub now: Timestamp,
    /// The requesting user; `None` for the server itself.
    pub user: Option<User>,
    /// Collects the warnings and audit annotations of the request.
    pub recorder: Arc<WarningRecorder>,
}

/// The result of a write.
pub enum WriteResult {
    Stored(Arc<Object>),
    /// The object of a dry run, which is not stored.
    DryRun(Value),
}

impl WriteOptions {
    pub fn parse(call: &Call, kind: &str) -> Result<WriteOptions, Status> {
        WriteOptions::parse_with(call, kind, ErrorList::default())
    }

    /// Like `parse`, with additional errors of the caller.
    pub fn parse_with(call: &Call, kind: &str, mut errors: ErrorList) -> Result<WriteOptions, Status> {
        let given = call.query.get("fieldManager");
        api::meta::validate_field_manager(given, &Path::new("fieldManager"), &mut errors);
        let dry_run: Vec<&str> = call.query.all("dryRun").collect();
        check_dry_run(&dry_run, &mut errors);
        let word = call.query.get("fieldValidation");
        let validation = FieldValidation::parse(word);
        if validation.is_none() {
            errors.not_supported(&Path::new("fieldValidation"), word, &["", "Ignore", "Strict", "Warn"]);
        }
        let (true, Some(validation)) = (errors.is_empty(), validation) else {
            return Err(Status::invalid("meta.k8s.io", kind, "", &errors));
        };
        let manager = match given {
            "" => default_manager(call.header(http::header::USER_AGENT)),
            given => given.to_owned(),
        };
        Ok(WriteOptions {
            dry_run: !dry_run.is_empty(),
            manager,
            validation,
            now: call.now,
            user: Some(call.user.clone()),
            is_patch: kind == "PatchOptions",
            raw_options: raw_options(call, &dry_run),
            recorder: call.recorder.clone(),
        })
    }

    /// For writes of the server itself.
    pub fn internal(now: Timestamp) -> WriteOptions {
        WriteOptions {
            dry_run: false,
            manager: "skiff".into(),
            validation: FieldValidation::Ignore,
            now,
            user: None,
            is_patch: false,
            raw_options: Value::Null,
            recorder: Arc::default(),
        }
    }

    pub fn timestamp(&self) -> String {
        self.now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }
}

/// The nesting depth of objects that can be decoded again.
const MAX_OBJECT_DEPTH: usize = 127;
/// The nesting depth outside of `managedFields`, whose entry for a field is five levels deeper than
/// the field.
const MAX_FIELD_DEPTH: usize = MAX_OBJECT_DEPTH - 5;

/// Rejects objects that could be stored but not decoded again.
pub fn check_depth(row: &Resource, value: &Value) -> Result<(), Status> {
    let is_too_deep = |above: usize, name: &str, member: &Value| {
        let limit = if name == "managedFields" { MAX_OBJECT_DEPTH } else { MAX_FIELD_DEPTH };
        above + schema::json::depth(member) > limit
    };
    let too_deep = value.as_object().into_iter().flatten().any(|(name, member)| match member {
        Value::Object(metadata) if name == "metadata" => {
            metadata.iter().any(|(name, member)| is_too_deep(2, name, member))
        }
        member => is_too_deep(1, "", member),
    });
    if !too_deep {
        return Ok(());
    }
    let (kind, version) = (row.kind, row.version);
    let error = schema::DecodeError::Depth;
    Err(Status::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {error}")))
}

pub fn check_dry_run(values: &[&str], errors: &mut ErrorList) {
    if values.iter().any(|value| *value != "All") {
        errors.not_supported(&Path::new("dryRun"), values, &["All"]);
    }
}

fn raw_options(call: &Call, dry_run: &[&str]) -> Value {
    let mut given = Map::new();
    if !dry_run.is_empty() {
        given.insert("dryRun".into(), dry_run.to_vec().into());
    }
    for name in ["fieldManager", "fieldValidation"] {
        if !call.query.get(name).is_empty() {
            given.insert(name.into(), call.query.get(name).into());
        }
    }
    Value::Object(given)
}

/// The program name of the user agent.
fn default_manager(agent: &str) -> String {
    let name = agent.split('/').next().unwrap_or("");
    if name.is_empty() {
        "unknown".to_owned()
    } else {
        name.chars().filter(|c| !c.is_control()).take(128).collect()
    }
}

impl Server {
    /// Stores `value`, replacing `old` or as a new object. `None`: a conflicting write came first.
    pub async fn put(
        &self,
        resource: &'static Resource,
        value: Value,
        old: Option<&Object>,
    ) -> Result<Option<Arc<Object>>, Status> {
        self.put_with(resource, value, None, old).await
    }

    /// Like `put`, with managedFields that are encoded already.
    pub async fn put_with(
        &self,
        resource: &'static Resource,
        value: Value,
        record: Option<&[u8]>,
        old: Option<&Object>,
    ) -> Result<Option<Arc<Object>>, Status> {
        let stored = stored_as(resource);
        let meta = value.at("metadata");
        let collection = Target::collection(resource, meta.text("namespace"));
        let key: Arc<str> = Target { name: meta.text("name").to_owned(), ..collection }.key().into();
        let value = self.to_storage(resource, value).await?;
        let is_event = stored.group.is_empty() && stored.plural == "events";
        let bytes = to_stored_with(value, record);
        let write = Write {
            key: key.clone(),
            value: Some(bytes.clone()),
            expect: old.map_or(Expect::Absent, |old| Expect::Revision(old.revision)),
            // An event TTL of zero means no expiry.
            ttl: is_event.then_some(self.event_ttl).filter(|ttl| !ttl.is_zero()),
            lazy: is_heartbeat(stored),
        };
        match self.store.write(write).await {
            // The local store notifies the cache before the write returns, so the object is shared
            // with it. A remote store does not.
            Ok(revision) => match self.shard(resource).get(&key).filter(|object| object.revision == revision)
            {
                Some(object) => Ok(Some(object)),
                None => Ok(Some(Arc::new(Object::new(key, bytes, revision).map_err(Status::internal)?))),
            },
            Err(error) => self.handle_conflict(error).await,
        }
    }

    /// Deletes `old`. `None`: a conflicting write came first.
    pub async fn remove(&self, old: &Object) -> Result<Option<store::Revision>, Status> {
        let write = Write {
            key: old.key.clone(),
            value: None,
            expect: Expect::Revision(old.revision),
            ttl: None,
            lazy: false,
        };
        match self.store.write(write).await {
            Ok(revision) => Ok(Some(revision)),
            Err(error) => self.handle_conflict(error).await,
        }
    }

    /// Handles a failed write. After a conflict, waits until the cache is up to date, so that the
    /// retry can succeed.
    async fn handle_conflict<T>(&self, error: store::Error) -> Result<Option<T>, Status> {
        match error {
            store::Error::Conflict { .. } | store::Error::Exists { .. } => {
                self.wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent).await?;
                Ok(None)
            }
            store::Error::Unavailable { reason } => {
                let mut status =
                    Status::failure(503, "ServiceUnavailable", format!("store is not writable: {reason}"));
                status.details.get_or_insert_default().retry_after_seconds = 1;
                Err(status)
            }
            other => Err(Status::internal(other)),
        }
    }

    /// The object that a write is based on, at least as new as all acknowledged writes.
    pub async fn current(&self, target: &Target) -> Result<Option<Arc<Object>>, Status> {
        self.wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent).await?;
        Ok(self.find(target))
    }
}

/// Leases and Events are acknowledged before they are synced to disk.
fn is_heartbeat(stored: &Resource) -> bool {
    matches!((stored.group, stored.plural), ("coordination.k8s.io", "leases") | ("", "events"))
}

/// The suffix of upstream's warning for duplicates in a patched object.
pub const AFTER_ADMISSION: &str = " after mutating admission happens";

/// Removes duplicate owner references. Returns the warning for the client.
pub fn dedup_owner_references(value: &mut Value, when: &str) -> Option<String> {
    let owners = value.pointer_mut("/metadata/ownerReferences")?.as_array_mut()?;
    let mut seen = HashSet::new();
    let mut duplicates = Vec::new();
    owners.retain(|owner| {
        let new = seen.insert(owner.to_string());
        if !new {
            duplicates.push(owner.text("uid").to_owned());
        }
        new
    });
    (!duplicates.is_empty()).then(|| {
        format!(
            ".metadata.ownerReferences contains duplicate entries{when}; API server dedups owner references in 1.20+, and may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: {}",
            duplicates.join(", ")
        )
    })
}

/// Adds `Warning` headers: at most 50, truncated to 1024 characters each.
pub fn with_warnings(mut response: Response<Body>, warnings: &[String]) -> Response<Body> {
    for warning in warnings.iter().take(50) {
        let text: String = warning.chars().filter(|c| !c.is_control()).take(1024).collect();
        let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
        if let Ok(value) = HeaderValue::try_from(format!("299 - \"{quoted}\"")) {
            response.headers_mut().append(http::header::WARNING, value);
        }
    }
    response
}

pub const OBJECT_MODIFIED_MESSAGE: &str =
    "the object has been modified; please apply your changes to the latest version and try again";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn duplicate_owner_references_are_removed() {
        let owner = |name: &str| json!({"name": name, "uid": "u"});
        let mut value = json!({"metadata": {"ownerReferences": [owner("a"), owner("b"), owner("a")]}});
        let warning = dedup_owner_references(&mut value, "").unwrap();
        assert!(warning.ends_with("duplicate UID(s) observed: u"), "{warning}");
        assert_eq!(value, json!({"metadata": {"ownerReferences": [owner("a"), owner("b")]}}));
        assert_eq!(dedup_owner_references(&mut value, ""), None);
        assert_eq!(dedup_owner_references(&mut json!({}), ""), None);
    }
}

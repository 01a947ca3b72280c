//! GET and LIST: from the cache, or from the store's history if the client requests an exact
//! revision.

use std::sync::Arc;

use api::Status;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use store::Revision;

use crate::body::Body;
use crate::cache::{CacheError, Shard};
use crate::object::Object;
use crate::options::{ListOptions, ResourceVersionMatch, read_version};
use crate::registry::prefix;
use crate::render::{ListMeta, Renderer};
use crate::request::{Query, Target};
use crate::server::Server;

const CONTINUE_EXPIRED: &str = "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.";

pub async fn get(
    server: &Server,
    target: &Target,
    query: &Query,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let version = match read_version(query.get("resourceVersion")).map_err(unknown_error)? {
        None => ResourceVersionMatch::MostRecent,
        Some(0) => ResourceVersionMatch::Any,
        Some(revision) => ResourceVersionMatch::NotOlderThan(revision),
    };
    server.wait_until_fresh(version).await?;
    let object = server.find(target).ok_or_else(|| target.not_found())?;
    let object = server.convert_for_request(target.resource, object).await?;
    Ok(renderer.object(StatusCode::OK, &object))
}

/// An internal error without a reason, as upstream returns it.
fn unknown_error(message: String) -> Status {
    Status::failure(500, "", message)
}

pub async fn list(
    server: &Server,
    target: &Target,
    options: &ListOptions,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let (objects, meta) = select_objects(server, target, options).await?;
    Ok(renderer.list(objects, &meta).await)
}

/// The selected objects and the list metadata.
pub async fn select_objects(
    server: &Server,
    target: &Target,
    options: &ListOptions,
) -> Result<(Vec<Arc<Object>>, ListMeta), Status> {
    let token = if options.token.is_empty() {
        None
    } else {
        Some(ContinueToken::parse(&options.token, &options.version)?)
    };
    match (token, options.version) {
        (Some(token), _) if token.rv > 0 => {
            list_from_store(server, target, options, token.rv as Revision, Some(&token.start)).await
        }
        (Some(token), _) => {
            server.wait_until_fresh(ResourceVersionMatch::MostRecent).await?;
            list_from_cache(server, target, options, Some(&token.start)).await
        }
        (None, ResourceVersionMatch::Exact(revision)) => {
            list_from_store(server, target, options, revision, None).await
        }
        (None, version) => {
            server.wait_until_fresh(version).await?;
            list_from_cache(server, target, options, None).await
        }
    }
}

/// Lists from the cache.
async fn list_from_cache(
    server: &Server,
    target: &Target,
    options: &ListOptions,
    after: Option<&str>,
) -> Result<(Vec<Arc<Object>>, ListMeta), Status> {
    let known = server.cache.revision();
    let scope = target.key_prefix(&options.selection);
    let snapshot =
        server.shard(target.resource).snapshot_with_labels(&scope, known, &options.selection.exact_labels());
    let mut objects = snapshot.objects;
    if let Some(start) = after {
        let start = format!("{}{start}", prefix(target.resource));
        objects.retain(|object| *object.key >= *start);
    }
    // Selectors of custom resources match the object in the requested version.
    if options.selection.needs_decoding() {
        objects = server.convert_all_for_request(target.resource, objects).await?;
    }
    let all = options.selection.is_everything();
    if !all {
        objects.retain(|object| options.selection.matches(object));
    }
    let mut meta = ListMeta { revision: snapshot.revision, ..ListMeta::default() };
    if options.limit > 0 && objects.len() > options.limit {
        // `remainingItemCount` is only set where it needs no counting: without selectors, as
        // upstream.
        meta.remaining = all.then(|| objects.len() - options.limit);
        objects.truncate(options.limit);
        meta.token = ContinueToken::after(target, objects.last(), snapshot.revision as i64);
    }
    Ok((server.convert_all_for_request(target.resource, objects).await?, meta))
}

/// Lists from the store's history.
async fn list_from_store(
    server: &Server,
    target: &Target,
    options: &ListOptions,
    revision: Revision,
    start: Option<&str>,
) -> Result<(Vec<Arc<Object>>, ListMeta), Status> {
    let collection = target.key();
    let mut from = start.map(|start| format!("{}{start}", prefix(target.resource)));
    let mut objects: Vec<Arc<Object>> = Vec::new();
    let mut meta = ListMeta { revision, ..ListMeta::default() };
    let limit = if options.limit == 0 { usize::MAX } else { options.limit };
    loop {
        // One object beyond the limit shows that more objects match.
        let page = server
            .store
            .list(&collection, from.as_deref(), limit.saturating_add(1).min(1_000), Some(revision))
            .await;
        let page = page.map_err(|error| expired(error, start))?;
        from = page.entries.last().map(|entry| format!("{}\0", entry.key));
        let before = objects.len();
        let read = page.entries.len();
        for entry in page.entries {
            let Ok(object) = Object::new(entry.key, entry.value, entry.revision) else { continue };
            let object = server.convert_for_request(target.resource, Arc::new(object)).await?;
            if options.selection.matches(&object) {
                objects.push(object);
            }
        }
        if objects.len() > limit {
            let extra = objects.len() - limit;
            objects.truncate(limit);
            meta.token = ContinueToken::after(target, objects.last(), revision as i64);
            if options.selection.is_everything() {
                meta.remaining = Some(extra + page.remaining);
            }
            debug_assert!(before <= limit && read > 0);
            break;
        }
        if page.remaining == 0 || read == 0 {
            break;
        }
    }
    Ok((objects, meta))
}

fn expired(error: store::Error, start: Option<&str>) -> Status {
    match error {
        store::Error::Compacted { .. } => match start {
            Some(start) => {
                let mut status = Status::expired(CONTINUE_EXPIRED);
                // The client may continue from here without consistency.
                let token =
                    ContinueToken { v: CONTINUE_TOKEN_VERSION.into(), rv: -1, start: start.to_owned() }
                        .print();
                status.metadata.token = token.into();
                status
            }
            None => Status::expired("The resourceVersion for the provided list is too old."),
        },
        store::Error::Future { requested: asked, current } => too_large(asked, current, 0),
        other => Status::internal(other),
    }
}

/// The requested revision is newer than the store's.
fn too_large(requested: Revision, current: Revision, retry: u32) -> Status {
    let message = format!("Timeout: Too large resource version: {requested}, current: {current}");
    let mut status = Status::failure(504, "Timeout", message);
    let details = status.details.get_or_insert_default();
    details.retry_after_seconds = retry;
    details.causes.push(api::status::StatusCause {
        reason: "ResourceVersionTooLarge".into(),
        message: "Too large resource version".into(),
        field: String::new(),
    });
    status
}

impl Server {
    /// Waits until the cache is at least as new as `version` requires.
    pub async fn wait_until_fresh(&self, version: ResourceVersionMatch) -> Result<(), Status> {
        let revision = match version {
            ResourceVersionMatch::Any => return Ok(()),
            ResourceVersionMatch::MostRecent => self.store.revision().await.map_err(Status::internal)?,
            ResourceVersionMatch::NotOlderThan(revision) | ResourceVersionMatch::Exact(revision) => revision,
        };
        self.cache.wait_until_fresh(revision).await.map_err(|error| match error {
            CacheError::TooLarge { requested: asked, current } => too_large(asked, current, 1),
            CacheError::TooOld { .. } => Status::expired(error.to_string()),
        })
    }

    pub fn shard(&self, resource: &'static api::Resource) -> Arc<Shard> {
        self.cache.shard(&prefix(resource))
    }

    /// The object in the cache, without waiting.
    pub fn find(&self, target: &Target) -> Option<Arc<Object>> {
        self.shard(target.resource).get(&target.key())
    }
}

const CONTINUE_TOKEN_VERSION: &str = "meta.k8s.io/v1";

/// A continue token in upstream's format, for compatibility with its tools.
#[derive(Debug, Serialize, Deserialize)]
struct ContinueToken {
    v: String,
    /// The revision of the first page; -1 for an inconsistent continuation.
    #[serde(default)]
    rv: i64,
    /// The next key, relative to the resource's prefix.
    #[serde(default)]
    start: String,
}

impl ContinueToken {
    fn after(target: &Target, last: Option<&Arc<Object>>, rv: i64) -> String {
        let last = last.map_or("", |object| &object.key);
        let start = format!("{}\0", last.strip_prefix(&prefix(target.resource)).unwrap_or(last));
        ContinueToken { v: CONTINUE_TOKEN_VERSION.into(), rv, start }.print()
    }

    fn print(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    fn parse(text: &str, version: &ResourceVersionMatch) -> Result<ContinueToken, Status> {
        let bad = |reason: String| {
            Status::bad_request(format!("invalid continue token: continue key is not valid{reason}"))
        };
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|error| bad(format!(": {error}")))?;
        let token: ContinueToken =
            serde_json::from_slice(&bytes).map_err(|error| bad(format!(": {error}")))?;
        if token.v != CONTINUE_TOKEN_VERSION {
            return Err(bad(format!(": server does not recognize this encoded version {}", token.v)));
        }
        if token.rv == 0 {
            return Err(bad(": incorrect encoded start resourceVersion (version meta.k8s.io/v1)".into()));
        }
        if token.start.is_empty() {
            return Err(bad(": encoded start key empty (version meta.k8s.io/v1)".into()));
        }
        // A manipulated token must not lead outside of the list.
        let key = token.start.strip_prefix('/').unwrap_or(&token.start);
        if key.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(bad(format!(": {}", token.start)));
        }
        if !matches!(version, ResourceVersionMatch::MostRecent | ResourceVersionMatch::Any) {
            return Err(Status::bad_request(
                "specifying resource version is not allowed when using continue",
            ));
        }
        Ok(ContinueToken { start: key.to_owned(), ..token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(json: &str, version: ResourceVersionMatch, expected: Result<&str, &str>) {
        let found = ContinueToken::parse(&URL_SAFE_NO_PAD.encode(json), &version);
        let found =
            found.map(|token| format!("{} {}", token.rv, token.start)).map_err(|status| status.message);
        assert_eq!(found.as_deref().map_err(String::as_str), expected, "{json}");
    }

    #[test]
    fn continue_tokens_are_validated() {
        let token = ContinueToken { v: CONTINUE_TOKEN_VERSION.into(), rv: 7, start: "a/b\0".into() };
        assert_eq!(
            ContinueToken::parse(&token.print(), &ResourceVersionMatch::MostRecent).unwrap().start,
            "a/b\0"
        );
        let good = r#"{"v":"meta.k8s.io/v1","rv":-1,"start":"/a/b"}"#;
        check(good, ResourceVersionMatch::Any, Ok("-1 a/b"));
        check(
            good,
            ResourceVersionMatch::NotOlderThan(3),
            Err("specifying resource version is not allowed when using continue"),
        );
        for (json, reason) in [
            (r#"{"v":"v9","rv":1,"start":"a"}"#, ": server does not recognize this encoded version v9"),
            (
                r#"{"v":"meta.k8s.io/v1","start":"a"}"#,
                ": incorrect encoded start resourceVersion (version meta.k8s.io/v1)",
            ),
            (r#"{"v":"meta.k8s.io/v1","rv":1}"#, ": encoded start key empty (version meta.k8s.io/v1)"),
            (r#"{"v":"meta.k8s.io/v1","rv":1,"start":"../a"}"#, ": ../a"),
            (r#"{"v":"meta.k8s.io/v1","rv":1,"start":"//a"}"#, ": //a"),
        ] {
            let message = format!("invalid continue token: continue key is not valid{reason}");
            check(json, ResourceVersionMatch::MostRecent, Err(&message));
        }
    }
}

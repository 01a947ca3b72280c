//! GET of one object and LIST of many, from the cache where possible and from the store where a client
//! asks for the past.

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
use crate::options::{ListOptions, Version, read_version};
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
    let version = match read_version(query.get("resourceVersion")).map_err(unknown)? {
        None => Version::MostRecent,
        Some(0) => Version::Any,
        Some(revision) => Version::NotOlderThan(revision),
    };
    server.fresh(version).await?;
    let object = server.find(target).ok_or_else(|| target.not_found())?;
    let object = server.shown(target.resource, object).await?;
    Ok(renderer.object(StatusCode::OK, &object))
}

/// What upstream has no word for.
fn unknown(message: String) -> Status {
    Status::failure(500, "", message)
}

pub async fn list(
    server: &Server,
    target: &Target,
    options: &ListOptions,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let (objects, meta) = select(server, target, options).await?;
    Ok(renderer.list(objects, &meta).await)
}

/// The objects a list is about and what its metadata says.
pub async fn select(
    server: &Server,
    target: &Target,
    options: &ListOptions,
) -> Result<(Vec<Arc<Object>>, ListMeta), Status> {
    let token =
        if options.token.is_empty() { None } else { Some(Token::parse(&options.token, &options.version)?) };
    match (token, options.version) {
        (Some(token), _) if token.rv > 0 => {
            past(server, target, options, token.rv as Revision, Some(&token.start)).await
        }
        (Some(token), _) => {
            server.fresh(Version::MostRecent).await?;
            present(server, target, options, Some(&token.start)).await
        }
        (None, Version::Exact(revision)) => past(server, target, options, revision, None).await,
        (None, version) => {
            server.fresh(version).await?;
            present(server, target, options, None).await
        }
    }
}

/// From the cache.
async fn present(
    server: &Server,
    target: &Target,
    options: &ListOptions,
    after: Option<&str>,
) -> Result<(Vec<Arc<Object>>, ListMeta), Status> {
    let known = server.cache.revision();
    let scope = target.scope(&options.selection);
    let snapshot =
        server.shard(target.resource).snapshot_with(&scope, known, &options.selection.exact_labels());
    let mut objects = snapshot.objects;
    if let Some(start) = after {
        let start = format!("{}{start}", prefix(target.resource));
        objects.retain(|object| *object.key >= *start);
    }
    // What a custom object is selected by is what clients see of it.
    if options.selection.looks_inside() {
        objects = server.shown_all(target.resource, objects).await?;
    }
    let all = options.selection.is_everything();
    if !all {
        objects.retain(|object| options.selection.matches(object));
    }
    let mut meta = ListMeta { revision: snapshot.revision, ..ListMeta::default() };
    if options.limit > 0 && objects.len() > options.limit {
        // How many more match is only said where it is known without looking: when everything does.
        meta.remaining = all.then(|| objects.len() - options.limit);
        objects.truncate(options.limit);
        meta.token = Token::after(target, objects.last(), snapshot.revision as i64);
    }
    Ok((server.shown_all(target.resource, objects).await?, meta))
}

/// From the store's history.
async fn past(
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
    let wanted = if options.limit == 0 { usize::MAX } else { options.limit };
    loop {
        // One more than wanted tells whether there is more that matches.
        let page = server
            .store
            .list(&collection, from.as_deref(), wanted.saturating_add(1).min(1_000), Some(revision))
            .await;
        let page = page.map_err(|error| expired(error, start))?;
        from = page.entries.last().map(|entry| format!("{}\0", entry.key));
        let before = objects.len();
        let read = page.entries.len();
        for entry in page.entries {
            let Ok(object) = Object::new(entry.key, entry.value, entry.revision) else { continue };
            let object = server.shown(target.resource, Arc::new(object)).await?;
            if options.selection.matches(&object) {
                objects.push(object);
            }
        }
        if objects.len() > wanted {
            let beyond = objects.len() - wanted;
            objects.truncate(wanted);
            meta.token = Token::after(target, objects.last(), revision as i64);
            if options.selection.is_everything() {
                meta.remaining = Some(beyond + page.remaining);
            }
            debug_assert!(before <= wanted && read > 0);
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
                // The client may go on from here, at the price of consistency.
                let token = Token { v: VERSION.into(), rv: -1, start: start.to_owned() }.print();
                status.metadata.token = token.into();
                status
            }
            None => Status::expired("The resourceVersion for the provided list is too old."),
        },
        store::Error::Future { asked, current } => too_large(asked, current, 0),
        other => Status::internal(other),
    }
}

/// The client has seen a revision this server has not.
fn too_large(asked: Revision, current: Revision, retry: u32) -> Status {
    let message = format!("Timeout: Too large resource version: {asked}, current: {current}");
    let mut status = Status::failure(504, "Timeout", message);
    let details = status.details.get_or_insert_default();
    details.retry_after_seconds = retry;
    details.causes.push(api::status::Cause {
        reason: "ResourceVersionTooLarge".into(),
        message: "Too large resource version".into(),
        field: String::new(),
    });
    status
}

impl Server {
    /// Waits until the cache is as fresh as `version` asks.
    pub async fn fresh(&self, version: Version) -> Result<(), Status> {
        let revision = match version {
            Version::Any => return Ok(()),
            Version::MostRecent => self.store.revision().await.map_err(Status::internal)?,
            Version::NotOlderThan(revision) | Version::Exact(revision) => revision,
        };
        self.cache.reached(revision).await.map_err(|error| match error {
            CacheError::TooLarge { asked, current } => too_large(asked, current, 1),
            CacheError::TooOld { .. } => Status::expired(error.to_string()),
        })
    }

    pub fn shard(&self, resource: &'static api::Resource) -> Arc<Shard> {
        self.cache.shard(&prefix(resource))
    }

    /// The object as the cache knows it now.
    pub fn find(&self, target: &Target) -> Option<Arc<Object>> {
        self.shard(target.resource).get(&target.key())
    }
}

const VERSION: &str = "meta.k8s.io/v1";

/// A continue token: upstream's form, so that its tools can read ours.
#[derive(Debug, Serialize, Deserialize)]
struct Token {
    v: String,
    /// The revision of the first page; -1 where the client gave up consistency.
    #[serde(default)]
    rv: i64,
    /// The next key, below the kind's prefix.
    #[serde(default)]
    start: String,
}

impl Token {
    fn after(target: &Target, last: Option<&Arc<Object>>, rv: i64) -> String {
        let last = last.map_or("", |object| &object.key);
        let start = format!("{}\0", last.strip_prefix(&prefix(target.resource)).unwrap_or(last));
        Token { v: VERSION.into(), rv, start }.print()
    }

    fn print(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    fn parse(text: &str, version: &Version) -> Result<Token, Status> {
        let bad = |why: String| {
            Status::bad_request(format!("invalid continue token: continue key is not valid{why}"))
        };
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|error| bad(format!(": {error}")))?;
        let token: Token = serde_json::from_slice(&bytes).map_err(|error| bad(format!(": {error}")))?;
        if token.v != VERSION {
            return Err(bad(format!(": server does not recognize this encoded version {}", token.v)));
        }
        if token.rv == 0 {
            return Err(bad(": incorrect encoded start resourceVersion (version meta.k8s.io/v1)".into()));
        }
        if token.start.is_empty() {
            return Err(bad(": encoded start key empty (version meta.k8s.io/v1)".into()));
        }
        // Nobody continues outside of the list, by whatever spelling.
        let key = token.start.strip_prefix('/').unwrap_or(&token.start);
        if key.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(bad(format!(": {}", token.start)));
        }
        if !matches!(version, Version::MostRecent | Version::Any) {
            return Err(Status::bad_request(
                "specifying resource version is not allowed when using continue",
            ));
        }
        Ok(Token { start: key.to_owned(), ..token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(json: &str, version: Version, expected: Result<&str, &str>) {
        let found = Token::parse(&URL_SAFE_NO_PAD.encode(json), &version);
        let found =
            found.map(|token| format!("{} {}", token.rv, token.start)).map_err(|status| status.message);
        assert_eq!(found.as_deref().map_err(String::as_str), expected, "{json}");
    }

    #[test]
    fn continue_tokens() {
        let token = Token { v: VERSION.into(), rv: 7, start: "a/b\0".into() };
        assert_eq!(Token::parse(&token.print(), &Version::MostRecent).unwrap().start, "a/b\0");
        let good = r#"{"v":"meta.k8s.io/v1","rv":-1,"start":"/a/b"}"#;
        check(good, Version::Any, Ok("-1 a/b"));
        check(
            good,
            Version::NotOlderThan(3),
            Err("specifying resource version is not allowed when using continue"),
        );
        for (json, why) in [
            (r#"{"v":"v9","rv":1,"start":"a"}"#, ": server does not recognize this encoded version v9"),
            (
                r#"{"v":"meta.k8s.io/v1","start":"a"}"#,
                ": incorrect encoded start resourceVersion (version meta.k8s.io/v1)",
            ),
            (r#"{"v":"meta.k8s.io/v1","rv":1}"#, ": encoded start key empty (version meta.k8s.io/v1)"),
            (r#"{"v":"meta.k8s.io/v1","rv":1,"start":"../a"}"#, ": ../a"),
            (r#"{"v":"meta.k8s.io/v1","rv":1,"start":"//a"}"#, ": //a"),
        ] {
            let message = format!("invalid continue token: continue key is not valid{why}");
            check(json, Version::MostRecent, Err(&message));
        }
    }
}

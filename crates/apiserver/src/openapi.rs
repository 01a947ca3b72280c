//! OpenAPI documents, generated from the resource table and the schema's definitions.
//!
//! Documents are generated per request and not cached: they are megabytes that clients fetch once
//! and cache by hash. Only the hashes are cached, since the index lists all of them.

mod custom;
mod gnostic;
mod operations;
mod parameters;
#[cfg(test)]
mod tests;
mod v2;
mod v3;

use std::cell::LazyCell;
use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{LazyLock, Mutex, PoisonError};

use api::Resource;
use schema::openapi::{Definitions, OpenApiVersion};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha512};

const JSON_MEDIA_TYPE: &str = "application/json";
const PROTOBUF_MEDIA_TYPE: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

pub struct Document {
    pub bytes: Vec<u8>,
    pub content_type: &'static str,
    /// SHA-512 of the content, as upstream computes it.
    pub hash: String,
}

/// The OpenAPI v2 document, extended by `add`. Old clients request it as protobuf.
pub fn v2_document(rows: &[&'static Resource], protobuf: bool, add: impl FnOnce(&mut Value)) -> Document {
    let mut value = v2::document(rows);
    add(&mut value);
    match protobuf {
        true => Document::new(gnostic::document(&value), PROTOBUF_MEDIA_TYPE),
        false => Document::new(value.to_string().into_bytes(), JSON_MEDIA_TYPE),
    }
}

/// The index of the OpenAPI v3 documents and their URLs, by path (`apis/apps/v1`).
pub fn v3_index(rows: &[&'static Resource]) -> Value {
    let definitions = LazyCell::new(|| custom::with_custom(Definitions::new(OpenApiVersion::V3), rows));
    let paths: Map<String, Value> = names(rows)
        .into_iter()
        .map(|name| {
            let url = format!("/openapi/v3/{name}?hash={}", hash(rows, &name, &definitions));
            (name, json!({ "serverRelativeURL": url }))
        })
        .collect();
    json!({ "paths": paths })
}

/// One of the documents that the index lists.
pub fn v3_document(rows: &[&'static Resource], name: &str) -> Option<Document> {
    if !names(rows).contains(name) {
        return None;
    }
    let rows_of = rows_of(rows, name);
    let document =
        v3::document(rows, name, &custom::with_custom(Definitions::new(OpenApiVersion::V3), &rows_of));
    Some(Document::new(document.to_string().into_bytes(), JSON_MEDIA_TYPE))
}

impl Document {
    fn new(bytes: Vec<u8>, content_type: &'static str) -> Document {
        let hash = Sha512::digest(&bytes).iter().map(|byte| format!("{byte:02X}")).collect();
        Document { bytes, content_type, hash }
    }
}

fn names(rows: &[&'static Resource]) -> BTreeSet<String> {
    let mut names = BTreeSet::from(["api", "apis", "version"].map(str::to_owned));
    for row in rows {
        match row.group {
            "" => names.insert(format!("api/{}", row.version)),
            group => {
                names.insert(format!("apis/{group}"));
                names.insert(format!("apis/{group}/{}", row.version))
            }
        };
    }
    names
}

/// The rows that a document covers.
fn rows_of(rows: &[&'static Resource], name: &str) -> Vec<&'static Resource> {
    let of = |row: &&&'static Resource| match row.group {
        "" => name.strip_prefix("api/") == Some(row.version),
        group => name.strip_prefix("apis/").is_some_and(|name| {
            name == group
                || name.strip_prefix(group).and_then(|rest| rest.strip_prefix('/')) == Some(row.version)
        }),
    };
    rows.iter().filter(of).copied().collect()
}

/// The capacity of the hash cache. Hashes of built-in resources never change; those of custom
/// resources may change often.
const MAX_CACHED_HASHES: usize = 10_000;

/// The cached hash of a document. Built-in rows never change while the process runs; the serial of
/// a CustomResourceDefinition changes with it.
fn hash<F: FnOnce() -> Definitions>(
    rows: &[&'static Resource],
    name: &str,
    definitions: &LazyCell<Definitions, F>,
) -> String {
    static HASH_CACHE: LazyLock<Mutex<HashMap<(u64, String), String>>> = LazyLock::new(Mutex::default);
    let mut hasher = DefaultHasher::new();
    for row in rows_of(rows, name) {
        (row.group, row.version, row.plural).hash(&mut hasher);
        row.custom.map(|slot| slot.definition().serial).hash(&mut hasher);
    }
    let key = (hasher.finish(), name.to_owned());
    let cached = HASH_CACHE.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
    cached.unwrap_or_else(|| {
        let hash =
            Document::new(v3::document(rows, name, definitions).to_string().into_bytes(), JSON_MEDIA_TYPE)
                .hash;
        let mut cached = HASH_CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        if cached.len() >= MAX_CACHED_HASHES {
            cached.clear();
        }
        cached.insert(key, hash.clone());
        hash
    })
}

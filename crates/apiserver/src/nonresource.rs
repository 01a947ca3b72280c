//! Non-resource paths: health, version, metrics and OpenAPI.

use std::sync::Arc;

use api::Status;
use api::field::quote;
use bytes::Bytes;
use http::{Response, StatusCode, header};
use serde_json::{Value, json};

use crate::body::Body;
use crate::negotiate::{Format, MediaType};
use crate::openapi;
use crate::render::{self, OrderedJson, encode_response};
use crate::server::{Call, Server, method_not_allowed};

/// The reported version: that of the upstream release whose API this server implements.
pub const VERSION: &str = "v1.36.4";

pub async fn handle(server: &Arc<Server>, call: &Call) -> Result<Response<Body>, Status> {
    if !matches!(call.method.as_str(), "GET" | "HEAD") {
        return Err(method_not_allowed());
    }
    let json = Format { media: MediaType::Json, pretty: call.format.pretty, ..Format::JSON };
    let path = call.path.trim_end_matches('/');
    let (base, check) = match path.strip_prefix('/').and_then(|rest| rest.split_once('/')) {
        Some((base, check)) => (format!("/{base}"), Some(check)),
        None => (path.to_owned(), None),
    };
    match (base.as_str(), check) {
        ("/healthz" | "/livez" | "/readyz", check) => health(server, call, &base[1..], check),
        ("/skiff", Some("tunnel")) => crate::tunnels::handle(server, call),
        ("/version", None) => {
            let version = version();
            let body = render::json(&json, &OrderedJson::version(&version));
            Ok(render::build_response(StatusCode::OK, MediaType::Json, body.into()))
        }
        ("/metrics", None) => Ok(text_response(
            StatusCode::OK,
            server.metrics.print(server),
            "text/plain; version=0.0.4; charset=utf-8",
        )),
        ("/openapi", Some("v2")) => Ok(openapi_v2(server, call)),
        ("/openapi", Some("v3")) => Ok(openapi_v3_index(server, call)),
        ("/openapi", Some(rest)) => {
            let group_version = rest.strip_prefix("v3/").ok_or_else(Status::unknown_path)?;
            if let Some(entry) = server.aggregator.find_openapi_v3(group_version) {
                return crate::aggregator::proxy_request(server, call, &entry).await;
            }
            openapi_v3(server, call, group_version)
        }
        ("/.well-known" | "/openid", Some(_)) => {
            crate::tokens::handle_discovery(server, path).ok_or_else(Status::unknown_path)
        }
        ("", None) => Ok(encode_response(StatusCode::OK, &json, json!({"paths": paths(server)}))),
        _ => Err(Status::unknown_path()),
    }
}

pub fn version() -> Value {
    json!({
        "major": "1", "minor": "36", "emulationMajor": "1", "emulationMinor": "36",
        "minCompatibilityMajor": "1", "minCompatibilityMinor": "35",
        "gitVersion": VERSION, "gitCommit": option_env!("SKIFF_COMMIT").unwrap_or("unknown"), "gitTreeState": "clean",
        "buildDate": option_env!("SKIFF_BUILD_DATE").unwrap_or("1970-01-01T00:00:00Z"), "goVersion": "go1.26", "compiler": "gc",
        "platform": format!("linux/{}", if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }),
    })
}

fn text_response(code: StatusCode, text: String, content_type: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(Bytes::from(text)));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-cache, private"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    response
}

/// Runs one health check. `None` for an unknown name, `Err` with the reason of a failure.
fn check_health(server: &Server, name: &str) -> Option<Result<(), String>> {
    let good = |good: bool, reason: &str| if good { Ok(()) } else { Err(reason.to_owned()) };
    Some(match name {
        "ping" | "log" => Ok(()),
        "etcd" | "informer-sync" => good(server.cache.revision() > 0, "watch cache not initialized"),
        "store-writable" => server.store.write_failure().map_or(Ok(()), Err),
        "poststarthook/start-system-namespaces" => {
            good(*server.ready.borrow(), "bootstrap objects not created yet")
        }
        "shutdown" => good(!*server.shutdown.borrow(), "the server is shutting down"),
        _ => return None,
    })
}

fn health(
    server: &Server,
    call: &Call,
    endpoint: &str,
    check_name: Option<&str>,
) -> Result<Response<Body>, Status> {
    let names: &[&str] = match endpoint {
        // A server that cannot write still serves reads, and a restart does not help: it is live,
        // but not ready.
        "readyz" => &[
            "ping",
            "log",
            "etcd",
            "store-writable",
            "informer-sync",
            "poststarthook/start-system-namespaces",
            "shutdown",
        ],
        _ => &["ping", "log", "etcd", "poststarthook/start-system-namespaces"],
    };
    const PLAIN_TEXT: &str = "text/plain; charset=utf-8";
    if let Some(name) = check_name {
        return match check_health(server, name).filter(|_| names.contains(&name)) {
            None => Err(Status::unknown_path()),
            Some(Ok(())) => Ok(text_response(StatusCode::OK, "ok".into(), PLAIN_TEXT)),
            Some(Err(reason)) => Ok(text_response(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("internal server error: {reason}\n"),
                PLAIN_TEXT,
            )),
        };
    }
    let excluded: std::collections::BTreeSet<&str> = call.query.all("exclude").collect();
    let mut lines = String::new();
    let mut failed = false;
    for name in names {
        if excluded.contains(name) {
            lines += &format!("[+]{name} excluded: ok\n");
            continue;
        }
        match check_health(server, name) {
            Some(Err(_)) => {
                failed = true;
                lines += &format!("[-]{name} failed: reason withheld\n");
            }
            _ => lines += &format!("[+]{name} ok\n"),
        }
    }
    let unknown: Vec<String> =
        excluded.iter().filter(|name| !names.contains(name)).map(|name| quote(name)).collect();
    if !unknown.is_empty() {
        lines +=
            &format!("warn: some health checks cannot be excluded: no matches for {}\n", unknown.join(", "));
    }
    Ok(match (failed, call.query.has("verbose")) {
        (true, _) => text_response(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("{lines}{endpoint} check failed\n"),
            PLAIN_TEXT,
        ),
        (false, true) => {
            text_response(StatusCode::OK, format!("{lines}{endpoint} check passed\n"), PLAIN_TEXT)
        }
        (false, false) => text_response(StatusCode::OK, "ok".into(), PLAIN_TEXT),
    })
}

fn paths(server: &Server) -> Vec<String> {
    let mut paths = vec!["/api".to_owned(), "/api/v1".to_owned(), "/apis".to_owned()];
    for row in server.registry.rows().iter().filter(|row| !row.group.is_empty()) {
        paths.push(format!("/apis/{}", row.group));
        paths.push(format!("/apis/{}/{}", row.group, row.version));
    }
    paths.extend(
        [
            "/.well-known/openid-configuration",
            "/healthz",
            "/livez",
            "/metrics",
            "/openapi/v2",
            "/openapi/v3",
            "/openid/v1/jwks",
            "/readyz",
            "/version",
        ]
        .map(str::to_owned),
    );
    paths.sort();
    paths.dedup();
    paths
}

fn openapi_v2(server: &Server, call: &Call) -> Response<Body> {
    // Old clients accept a media type with an `@`, which is invalid; the response uses the valid
    // one.
    let accept = call.header(header::ACCEPT);
    let protobuf =
        accept.contains("openapi.spec.v2@v1.0+protobuf") || accept.contains("openapi.spec.v2.v1.0+protobuf");
    let document = openapi::v2_document(&server.registry.rows(), protobuf, |document| {
        server.aggregator.add_to_v2(document);
    });
    conditional_response(call, document, None)
}

fn openapi_v3_index(server: &Server, call: &Call) -> Response<Body> {
    let mut index = openapi::v3_index(&server.registry.rows());
    server.aggregator.add_to_v3_index(&mut index);
    let mut response = encode_response(StatusCode::OK, &Format::JSON, index);
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-cache, private"));
    let _ = call;
    response
}

fn openapi_v3(server: &Server, call: &Call, group_version: &str) -> Result<Response<Body>, Status> {
    let document =
        openapi::v3_document(&server.registry.rows(), group_version).ok_or_else(Status::unknown_path)?;
    Ok(conditional_response(call, document, Some(call.query.get("hash"))))
}

/// A document with its hash as ETag: unchanged documents are not sent again, and a URL with the
/// hash is immutable.
fn conditional_response(
    call: &Call,
    document: openapi::Document,
    requested_hash: Option<&str>,
) -> Response<Body> {
    let etag = format!("\"{}\"", document.hash);
    let same = call.header(header::IF_NONE_MATCH).split(',').any(|tag| tag.trim() == etag);
    let mut response = Response::new(if same { Body::empty() } else { Body::from(document.bytes) });
    if same {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(document.content_type));
    headers.insert(header::VARY, header::HeaderValue::from_static("Accept"));
    let immutable = requested_hash.is_some_and(|hash| hash == document.hash);
    let control = if immutable { "public, immutable, max-age=31536000" } else { "no-cache, private" };
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static(control));
    if let Ok(value) = etag.parse() {
        headers.insert(header::ETAG, value);
    }
    response
}

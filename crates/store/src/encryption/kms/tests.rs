use std::convert::Infallible;
use std::path::Path;
use std::sync::Mutex as StdMutex;

use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixListener;

use super::*;
use crate::encryption::{EncryptionRules, EncryptionStore, Provider};
use crate::log::{Config, LogStore};
use crate::{Expect, Store, Write};

/// A fake service that "encrypts" by inverting bits, with a key ID that can be changed.
#[derive(Default)]
struct FakeKms {
    key_id: String,
    healthz: String,
    calls: Vec<String>,
}

fn invert_bits(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| !byte).collect()
}

impl FakeKms {
    fn handle(&mut self, path: &str, message: &[u8]) -> Result<Vec<u8>, &'static str> {
        let name = path.rsplit('/').next().unwrap().to_owned();
        self.calls.push(name.clone());
        let key_id = self.key_id.clone();
        Ok(match name.as_str() {
            "Status" => {
                let healthz = self.healthz.clone();
                StatusResponse { version: "v2".into(), healthz, key_id }.encode_to_vec()
            }
            "Encrypt" => {
                let request = EncryptRequest::decode(message).unwrap();
                let annotations = [("a.example".to_owned(), b"x".to_vec())].into();
                EncryptResponse { ciphertext: invert_bits(&request.plaintext), key_id, annotations }
                    .encode_to_vec()
            }
            _ => {
                let request = DecryptRequest::decode(message).unwrap();
                if request.annotations.get("a.example").map(Vec::as_slice) != Some(b"x") {
                    return Err("no such key");
                }
                DecryptResponse { plaintext: invert_bits(&request.ciphertext) }.encode_to_vec()
            }
        })
    }
}

/// Serves gRPC on a Unix socket until the test ends.
fn start_kms(path: &Path) -> Arc<StdMutex<FakeKms>> {
    let service = FakeKms { key_id: "1".into(), healthz: "ok".into(), calls: Vec::new() };
    let service = Arc::new(StdMutex::new(service));
    let listener = UnixListener::bind(path).unwrap();
    let shared = service.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let shared = shared.clone();
            let handler = service_fn(move |request: hyper::Request<Incoming>| {
                let shared = shared.clone();
                async move {
                    let path = request.uri().path().to_owned();
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    // A gRPC message has a five-byte prefix: a compression flag and its length.
                    let result = shared.lock().unwrap().handle(&path, &body[5..]);
                    let mut trailers = hyper::HeaderMap::new();
                    let mut frames = Vec::new();
                    match result {
                        Ok(message) => {
                            let length = u32::try_from(message.len()).unwrap().to_be_bytes();
                            let framed = [&[0][..], &length, &message].concat();
                            frames.push(Ok::<_, Infallible>(Frame::data(Bytes::from(framed))));
                            trailers.insert("grpc-status", "0".parse().unwrap());
                        }
                        Err(error) => {
                            trailers.insert("grpc-status", "5".parse().unwrap());
                            trailers.insert("grpc-message", error.parse().unwrap());
                        }
                    }
                    frames.push(Ok(Frame::trailers(trailers)));
                    let mut response =
                        hyper::Response::new(StreamBody::new(futures_util::stream::iter(frames)));
                    response.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
                    Ok::<_, Infallible>(response)
                }
            });
            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(server.serve_connection(TokioIo::new(stream), handler));
        }
    });
    service
}

fn new_kms(path: &Path) -> Kms {
    Kms::new("cloud", &format!("unix://{}", path.display()), Duration::from_secs(3)).unwrap()
}

#[tokio::test]
async fn encrypt_uses_remote_key_and_cached_seed() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kms.sock");
    let service = start_kms(&socket);
    let first = new_kms(&socket);
    let encrypted = first.encrypt("/a", b"hush hush").await.unwrap();
    assert!(encrypted.starts_with(b"k8s:enc:kms:v2:cloud:"));
    assert!(!encrypted.windows(4).any(|part| part == b"hush"));
    assert_ne!(encrypted, first.encrypt("/a", b"hush hush").await.unwrap());
    assert_eq!(service.lock().unwrap().calls, ["Status", "Encrypt"], "one seed for several values");

    // Another server has no cached seed. It calls the service once.
    let second = new_kms(&socket);
    for _ in 0..3 {
        let (plain, is_current) = second.decrypt("/a", &encrypted).await.unwrap().unwrap();
        assert_eq!((plain.as_ref(), is_current), (&b"hush hush"[..], true));
    }
    assert_eq!(service.lock().unwrap().calls[2..], ["Decrypt", "Status", "Encrypt"]);
    let error = second.decrypt("/b", &encrypted).await.unwrap().unwrap_err().to_string();
    assert_eq!(error, "key management service cloud: cipher: message authentication failed");
    assert!(second.decrypt("/a", b"k8s:enc:kms:v2:other:x").await.is_none());
    assert!(second.decrypt("/a", b"k8s:enc:kms:v2:cloud:\xff").await.unwrap().is_err());

    // The service has a new key: new values use it, and old ones are stale.
    service.lock().unwrap().key_id = "2".into();
    first.state.lock().await.as_mut().unwrap().last_check -= STATUS_INTERVAL;
    let encrypted_again = first.encrypt("/a", b"x").await.unwrap();
    assert!(first.decrypt("/a", &encrypted_again).await.unwrap().unwrap().1);
    assert!(!first.decrypt("/a", &encrypted).await.unwrap().unwrap().1);
}

#[tokio::test]
async fn uses_cached_seed_while_service_fails() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kms.sock");
    let error = new_kms(&socket).encrypt("/a", b"hush").await.unwrap_err().to_string();
    assert!(error.starts_with("key management service cloud: ") && !error.contains("hush"), "{error}");
    let service = start_kms(&socket);
    let kms = new_kms(&socket);
    kms.encrypt("/a", b"x").await.unwrap();
    service.lock().unwrap().healthz = "ill".into();
    kms.state.lock().await.as_mut().unwrap().last_check -= STATUS_INTERVAL;
    kms.encrypt("/a", b"x").await.unwrap();
    {
        let mut state = kms.state.lock().await;
        let state_mut = state.as_mut().unwrap();
        (state_mut.last_check, state_mut.last_status) =
            (state_mut.last_check - STATUS_INTERVAL, state_mut.last_status - MAX_STATUS_AGE);
    }
    let error = kms.encrypt("/a", b"x").await.unwrap_err().to_string();
    assert_eq!(error, "key management service cloud: got unexpected healthz status: ill");
    assert!(Kms::new("x", "http://localhost", Duration::from_secs(1)).is_err());
}

#[tokio::test]
async fn store_encryption_with_kms() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kms.sock");
    let _service = start_kms(&socket);
    let inner: Arc<dyn Store> =
        Arc::new(LogStore::open(&dir.path().join("store"), Config::default()).unwrap());
    let open_store = |kms: Kms| {
        let mut rules = EncryptionRules::new(|_| Some(("", "secrets")));
        rules.add("", "secrets", &vec![Provider::Kms(Box::new(kms)), Provider::Identity].into());
        EncryptionStore::new(inner.clone(), rules)
    };
    let value = Some(Bytes::from_static(b"hush"));
    let write = Write { key: "/a".into(), value, expect: Expect::Absent, ttl: None, lazy: false };
    open_store(new_kms(&socket)).write(write).await.unwrap();
    let store = open_store(new_kms(&socket));
    assert_eq!(store.get("/a").await.unwrap().unwrap().value, "hush");
    assert!(!store.is_stale("/a"));
}

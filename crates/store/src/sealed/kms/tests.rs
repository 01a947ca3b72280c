use std::convert::Infallible;
use std::path::Path;
use std::sync::Mutex as StdMutex;

use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixListener;

use super::*;
use crate::log::{Config, LogStore};
use crate::sealed::{Provider, Rules, Sealed};
use crate::{Expect, Store, Write};

/// A service whose "encryption" turns every bit, under a key that may change.
#[derive(Default)]
struct Service {
    key_id: String,
    healthz: String,
    asked: Vec<String>,
}

fn turned(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| !byte).collect()
}

impl Service {
    fn answer(&mut self, path: &str, message: &[u8]) -> Result<Vec<u8>, &'static str> {
        let name = path.rsplit('/').next().unwrap().to_owned();
        self.asked.push(name.clone());
        let key_id = self.key_id.clone();
        Ok(match name.as_str() {
            "Status" => {
                let healthz = self.healthz.clone();
                StatusResponse { version: "v2".into(), healthz, key_id }.encode_to_vec()
            }
            "Encrypt" => {
                let request = EncryptRequest::decode(message).unwrap();
                let annotations = [("a.example".to_owned(), b"x".to_vec())].into();
                EncryptResponse { ciphertext: turned(&request.plaintext), key_id, annotations }
                    .encode_to_vec()
            }
            _ => {
                let request = DecryptRequest::decode(message).unwrap();
                if request.annotations.get("a.example").map(Vec::as_slice) != Some(b"x") {
                    return Err("no such key");
                }
                DecryptResponse { plaintext: turned(&request.ciphertext) }.encode_to_vec()
            }
        })
    }
}

/// Serves gRPC on a socket until the test ends.
fn serve(path: &Path) -> Arc<StdMutex<Service>> {
    let service = Service { key_id: "1".into(), healthz: "ok".into(), asked: Vec::new() };
    let service = Arc::new(StdMutex::new(service));
    let listener = UnixListener::bind(path).unwrap();
    let shared = service.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let shared = shared.clone();
            let answer = service_fn(move |request: hyper::Request<Incoming>| {
                let shared = shared.clone();
                async move {
                    let path = request.uri().path().to_owned();
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    // A message is preceded by whether it is compressed, and its length.
                    let result = shared.lock().unwrap().answer(&path, &body[5..]);
                    let mut trailers = hyper::HeaderMap::new();
                    let mut frames = Vec::new();
                    match result {
                        Ok(message) => {
                            let length = u32::try_from(message.len()).unwrap().to_be_bytes();
                            let framed = [&[0][..], &length, &message].concat();
                            frames.push(Ok::<_, Infallible>(Frame::data(Bytes::from(framed))));
                            trailers.insert("grpc-status", "0".parse().unwrap());
                        }
                        Err(why) => {
                            trailers.insert("grpc-status", "5".parse().unwrap());
                            trailers.insert("grpc-message", why.parse().unwrap());
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
            tokio::spawn(server.serve_connection(TokioIo::new(stream), answer));
        }
    });
    service
}

fn kms(path: &Path) -> Kms {
    Kms::new("cloud", &format!("unix://{}", path.display()), Duration::from_secs(3)).unwrap()
}

#[tokio::test]
async fn values_are_sealed_with_keys_that_the_service_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kms.sock");
    let service = serve(&socket);
    let first = kms(&socket);
    let sealed = first.seal("/a", b"hush hush").await.unwrap();
    assert!(sealed.starts_with(b"k8s:enc:kms:v2:cloud:"));
    assert!(!sealed.windows(4).any(|part| part == b"hush"));
    assert_ne!(sealed, first.seal("/a", b"hush hush").await.unwrap());
    assert_eq!(service.lock().unwrap().asked, ["Status", "Encrypt"], "not for every value");

    // Another server, which has to ask; and asks once.
    let second = kms(&socket);
    for _ in 0..3 {
        let (plain, fresh) = second.open("/a", &sealed).await.unwrap().unwrap();
        assert_eq!((plain.as_ref(), fresh), (&b"hush hush"[..], true));
    }
    assert_eq!(service.lock().unwrap().asked[2..], ["Decrypt", "Status", "Encrypt"]);
    let error = second.open("/b", &sealed).await.unwrap().unwrap_err().to_string();
    assert_eq!(error, "key management service cloud: cipher: message authentication failed");
    assert!(second.open("/a", b"k8s:enc:kms:v2:other:x").await.is_none());
    assert!(second.open("/a", b"k8s:enc:kms:v2:cloud:\xff").await.unwrap().is_err());

    // The service has a new key: new values are sealed with it, and old ones are stale.
    service.lock().unwrap().key_id = "2".into();
    first.state.lock().await.as_mut().unwrap().checked -= STATUS_EVERY;
    let renewed = first.seal("/a", b"x").await.unwrap();
    assert!(first.open("/a", &renewed).await.unwrap().unwrap().1);
    assert!(!first.open("/a", &sealed).await.unwrap().unwrap().1);
}

#[tokio::test]
async fn a_service_that_fails_is_borne_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kms.sock");
    let error = kms(&socket).seal("/a", b"hush").await.unwrap_err().to_string();
    assert!(error.starts_with("key management service cloud: ") && !error.contains("hush"), "{error}");
    let service = serve(&socket);
    let kms = kms(&socket);
    kms.seal("/a", b"x").await.unwrap();
    service.lock().unwrap().healthz = "ill".into();
    kms.state.lock().await.as_mut().unwrap().checked -= STATUS_EVERY;
    kms.seal("/a", b"x").await.unwrap();
    {
        let mut state = kms.state.lock().await;
        let past = state.as_mut().unwrap();
        (past.checked, past.heard) = (past.checked - STATUS_EVERY, past.heard - GOOD_FOR);
    }
    let error = kms.seal("/a", b"x").await.unwrap_err().to_string();
    assert_eq!(error, "key management service cloud: got unexpected healthz status: ill");
    assert!(Kms::new("x", "http://localhost", Duration::from_secs(1)).is_err());
}

#[tokio::test]
async fn a_store_is_sealed_by_a_service() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kms.sock");
    let _service = serve(&socket);
    let inner: Arc<dyn Store> =
        Arc::new(LogStore::open(&dir.path().join("store"), Config::default()).unwrap());
    let open = |kms: Kms| {
        let mut rules = Rules::new(|_| Some(("", "secrets")));
        rules.add("", "secrets", &vec![Provider::Kms(Box::new(kms)), Provider::Identity].into());
        Sealed::new(inner.clone(), rules)
    };
    let value = Some(Bytes::from_static(b"hush"));
    let write = Write { key: "/a".into(), value, expect: Expect::Absent, ttl: None, lazy: false };
    open(kms(&socket)).write(write).await.unwrap();
    let store = open(kms(&socket));
    assert_eq!(store.get("/a").await.unwrap().unwrap().value, "hush");
    assert!(!store.is_stale("/a"));
}

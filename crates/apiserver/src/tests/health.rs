//! Health endpoints.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use store::log::Config;

use super::TestServer;
use crate::access::User;
use crate::negotiate::negotiate;
use crate::request::Query;
use crate::server::Call;

const DEADLINE: Duration = Duration::from_secs(30);

async fn get(test_server: &TestServer, path: &str) -> (u16, String) {
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let (headers, query) = (http::HeaderMap::new(), Query::parse(query));
    let call = Call {
        method: http::Method::GET,
        path: path.to_owned(),
        format: negotiate(&headers, &query).expect("JSON"),
        query,
        raw_query: String::new(),
        remote: None,
        headers,
        body: bytes::Bytes::new(),
        user: User::default(),
        now: jiff::Timestamp::now(),
        upgrade: None,
        recorder: Arc::default(),
    };
    let response = crate::nonresource::handle(&test_server.server, &call).await.expect("a response");
    let code = response.status().as_u16();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    (code, String::from_utf8(body.into()).expect("text"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readyz_fails_while_the_store_is_not_writable() {
    let is_full = Arc::new(AtomicBool::new(false));
    let switch = is_full.clone();
    let faults: store::log::FaultHook = Arc::new(move |_| match switch.load(Ordering::SeqCst) {
        true => Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error())),
        false => Ok(()),
    });
    let test_server = TestServer::start_with(Config { faults, ..Config::default() }).await;
    assert_eq!(get(&test_server, "/readyz").await, (200, "ok".to_owned()));
    let verbose = get(&test_server, "/readyz?verbose").await.1;
    assert!(verbose.contains("[+]store-writable ok\n"), "{verbose}");

    is_full.store(true, Ordering::SeqCst);
    let map = serde_json::json!({"metadata": {"name": "a"}});
    test_server
        .call("POST /api/v1/namespaces/default/configmaps", "application/json", &map.to_string())
        .await;
    for path in ["/readyz", "/readyz?verbose"] {
        let (code, text) = get(&test_server, path).await;
        assert_eq!(code, 500, "{text}");
        assert!(text.contains("[-]store-writable failed: reason withheld\n"), "{text}");
        assert!(text.ends_with("readyz check failed\n"), "{text}");
    }
    let (code, text) = get(&test_server, "/readyz/store-writable").await;
    assert_eq!(code, 500);
    assert!(text.starts_with("internal server error: cannot write to "), "{text}");
    assert!(text.contains("No space left on device"), "{text}");
    assert_eq!(get(&test_server, "/livez").await.0, 200, "a restart would not help");

    // It becomes ready without a client's write once the disk accepts writes again.
    is_full.store(false, Ordering::SeqCst);
    let started = Instant::now();
    while get(&test_server, "/readyz").await.0 != 200 {
        assert!(started.elapsed() < DEADLINE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

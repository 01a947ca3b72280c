//! Tests against a fake registry that interrupts connections, requires passwords and returns wrong
//! content.

use std::sync::Mutex;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// The content and the behavior of the fake registry.
#[derive(Default)]
struct RegistryState {
    blobs: Vec<(String, Vec<u8>)>,
    wants_password: bool,
    /// Interrupts this many responses in the middle.
    interrupted_responses: u32,
    /// Sends half of a response whose path ends with this suffix and then blocks, this many times.
    blocked_responses: (String, u32),
    /// Responds with this status this many times per path, with this `Retry-After`.
    busy: (&'static str, u32, &'static str),
    /// Redirects blob requests to this host.
    redirect_blobs_to: Option<String>,
    /// Sends the `Docker-Content-Digest` header.
    sends_digest_header: bool,
    /// Redirects token requests to this host.
    redirect_tokens_to: Option<String>,
    /// The `Authorization` header of every request.
    auth_headers: Vec<(String, Option<String>)>,
    requests: Vec<String>,
}

struct FakeRegistry {
    host: String,
    state: Arc<Mutex<RegistryState>>,
}

impl FakeRegistry {
    async fn start(state: RegistryState) -> FakeRegistry {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let state = Arc::new(Mutex::new(state));
        let known = state.clone();
        let own = host.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, known.clone(), own.clone()));
            }
        });
        FakeRegistry { host, state }
    }

    fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    state: Arc<Mutex<RegistryState>>,
    host: String,
) {
    let mut received = Vec::new();
    loop {
        while !received.windows(4).any(|end| end == b"\r\n\r\n") {
            if stream.read_buf(&mut received).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let length = |text: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix("content-length: "));
            line.and_then(|line| line.trim().parse::<usize>().ok()).unwrap_or(0)
        };
        let mut text = String::from_utf8_lossy(&received).to_lowercase();
        while let Some((head, body)) = text.split_once("\r\n\r\n")
            && body.len() < length(head)
        {
            if stream.read_buf(&mut received).await.unwrap_or(0) == 0 {
                return;
            }
            text = String::from_utf8_lossy(&received).to_lowercase();
        }
        received.clear();
        let (response, end) = response(&text, &state, &host);
        let missing_bytes = match end {
            ResponseEnd::Complete => 0,
            ResponseEnd::Interrupted => 300,
            ResponseEnd::Blocked => 50,
        };
        let written = stream.write_all(&response[..response.len() - missing_bytes]).await;
        if end == ResponseEnd::Blocked {
            std::future::pending::<()>().await;
        }
        if written.is_err() || end == ResponseEnd::Interrupted {
            return;
        }
    }
}

/// How a response ends.
#[derive(Clone, Copy, PartialEq)]
enum ResponseEnd {
    Complete,
    Interrupted,
    Blocked,
}

fn response(request: &str, state: &Mutex<RegistryState>, host: &str) -> (Vec<u8>, ResponseEnd) {
    let mut state = state.lock().unwrap();
    let path = request.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let header = |name: &str| {
        request.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")).map(str::to_owned))
    };
    let from: usize = header("range")
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
        .unwrap_or(0);
    let is_head = request.starts_with("head ");
    state.requests.push(match from {
        0 if is_head => format!("HEAD {path}"),
        0 => path.clone(),
        _ => format!("{path} from {from}"),
    });
    let authorization = header("authorization");
    state.auth_headers.push((path.clone(), authorization));
    let reply = |status: &str, more: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\n{more}content-length: {}\r\n\r\n", body.len());
        [head.as_bytes(), body].concat()
    };
    // A request with an absolute URI is for a proxy, which requires `Proxy-Authorization`.
    if path.starts_with("http://") && header("proxy-authorization").is_none() {
        return (reply("407 Proxy Authentication Required", "", b""), ResponseEnd::Complete);
    }
    let times = state.requests.iter().filter(|entry| entry.trim_start_matches("HEAD ") == path).count();
    let (status, most, seconds) = state.busy;
    if times <= most as usize {
        let error_body = br#"{"errors": [{"code": "TOO_MANY", "message": "Not now"}, {"code": "X"}]}"#;
        return (reply(status, &format!("retry-after: {seconds}\r\n"), error_body), ResponseEnd::Complete);
    }
    if let Some(location) = state.redirect_tokens_to.clone().filter(|_| path.starts_with("/token")) {
        let more = format!("location: {location}/moved{path}\r\n");
        return (reply("307 Temporary Redirect", &more, b""), ResponseEnd::Complete);
    }
    if path.starts_with("/token") || path.starts_with("/moved/token") {
        // me:secret
        let is_known = header("authorization").is_some_and(|key| key == "basic bwu6c2vjcmv0")
            || (request.starts_with("post ") && request.ends_with("&refresh_token=who-i-am"));
        let body: &[u8] = br#"{"token": "let-me-in"}"#;
        return (
            if is_known { reply("200 OK", "", body) } else { reply("401 Unauthorized", "", b"") },
            ResponseEnd::Complete,
        );
    }
    if state.wants_password && header("authorization").is_none_or(|key| key != "bearer let-me-in") {
        let more = format!(
            "www-authenticate: Negotiate\r\n\
             www-authenticate: Bearer realm=\"http://{host}/token?a=b\",service=\"fake\"\r\n\
             www-authenticate: Basic realm=\"fake\"\r\n"
        );
        return (reply("401 Unauthorized", &more, b""), ResponseEnd::Complete);
    }
    if let Some(location) = state.redirect_blobs_to.clone().filter(|_| path.contains("/blobs/")) {
        let more = format!("location: http://{location}{path}\r\n");
        return (reply("307 Temporary Redirect", &more, b""), ResponseEnd::Complete);
    }
    let path = path.split('?').next().unwrap_or_default().to_owned();
    let Some((_, body)) = state.blobs.iter().find(|(name, _)| path.ends_with(name.as_str())).cloned() else {
        return (reply("404 Not Found", "", b"{}"), ResponseEnd::Complete);
    };
    if is_head {
        let digest = format!("docker-content-digest: {}\r\n", Digest::of(&body));
        return (
            reply("200 OK", if state.sends_digest_header { &digest } else { "" }, b""),
            ResponseEnd::Complete,
        );
    }
    let is_interrupted =
        path.contains("/blobs/") && body.len() - from > 1000 && state.interrupted_responses > 0;
    state.interrupted_responses -= u32::from(is_interrupted);
    let is_blocked =
        path.ends_with(&state.blocked_responses.0) && state.blocked_responses.1 > 0 && !is_interrupted;
    state.blocked_responses.1 -= u32::from(is_blocked);
    let end = match (is_interrupted, is_blocked) {
        (true, _) => ResponseEnd::Interrupted,
        (_, true) => ResponseEnd::Blocked,
        _ => ResponseEnd::Complete,
    };
    let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
    (reply(status, "", &body[from..]), end)
}

/// An image with one layer, referenced by an index for several platforms.
fn image(lies: bool) -> Vec<(String, Vec<u8>)> {
    let mut layer = tar::Builder::new(Vec::new());
    let content = vec![b'x'; 5000];
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    layer.append_data(&mut header, "file", &content[..]).unwrap();
    let layer = layer.into_inner().unwrap();
    let config =
        format!(r#"{{"config": {{"Cmd": ["x"]}}, "rootfs": {{"diff_ids": ["{}"]}}}}"#, Digest::of(&layer))
            .into_bytes();
    let manifest = format!(
        r#"{{"schemaVersion": 2, "config": {{"digest": "{}", "size": {}}}, "layers": [{{"digest": "{}", "size": {}}}]}}"#,
        Digest::of(&config), config.len(), Digest::of(&layer), layer.len()
    ).into_bytes();
    let architecture = crate::manifest::architecture();
    let index = format!(
        r#"{{"schemaVersion": 2, "manifests": [{{"digest": "{}", "platform": {{"os": "linux", "architecture": "z80"}}}}, {{"digest": "{}", "platform": {{"os": "linux", "architecture": "{architecture}"}}}}]}}"#,
        Digest::of(b"other"), Digest::of(&manifest)
    ).into_bytes();
    let named = |bytes: Vec<u8>| (Digest::of(&bytes).to_string(), bytes);
    let mut pieces = vec![("manifests/v1".to_owned(), index), named(manifest), named(config), named(layer)];
    if lies {
        let last = pieces.len() - 1;
        pieces[last].1[3000] = b'y';
    }
    pieces
}

async fn pull(
    fake: &FakeRegistry,
    name: &str,
    credentials: Option<Credentials>,
) -> (tempfile::TempDir, Result<Image, PullError>) {
    pull_with(fast_retry_puller, fake, name, credentials).await
}

/// Polls until a condition holds, for up to 30 seconds.
async fn wait_until(is_so: impl Fn() -> bool) {
    let started = std::time::Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(30), "timed out waiting for the condition");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn pull_with(
    puller: impl Fn(Store) -> Puller,
    fake: &FakeRegistry,
    name: &str,
    credentials: Option<Credentials>,
) -> (tempfile::TempDir, Result<Image, PullError>) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let reference = Reference::parse(&format!("{}/{name}", fake.host)).unwrap();
    let pulled = puller(store.clone()).pull(&reference, credentials.as_ref()).await;
    if pulled.is_err() {
        assert_eq!(store.images().unwrap(), []);
        // A canceled write on the blocking pool removes its file when it completes.
        wait_until(|| std::fs::read_dir(directory.path().join("tmp")).unwrap().count() == 0).await;
    }
    (directory, pulled)
}

/// Retries after a short delay.
fn fast_retry_puller(store: Store) -> Puller {
    let timeouts =
        RegistryTimeouts { initial_backoff: Duration::from_millis(5), ..RegistryTimeouts::default() };
    Puller { timeouts, ..Puller::new(store, RegistrySettings::default()) }
}

/// Short read timeout, too. One second is still long enough for a busy test machine.
fn short_timeout_puller(store: Store) -> Puller {
    let puller = fast_retry_puller(store);
    Puller {
        timeouts: RegistryTimeouts { read_timeout: Duration::from_secs(1), ..puller.timeouts },
        ..puller
    }
}

fn can_unpack() -> bool {
    rustix::process::geteuid().is_root()
}

#[tokio::test]
async fn pulls_an_image_over_interrupted_connections() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let fake = FakeRegistry::start(RegistryState {
        blobs: image(false),
        interrupted_responses: 2,
        ..RegistryState::default()
    })
    .await;
    let (_directory, pulled) = pull(&fake, "team/app:v1", None).await;
    let pulled = pulled.unwrap();
    assert_eq!(pulled.tags.iter().next().unwrap(), &format!("{}/team/app:v1", fake.host));
    let requests = fake.requests();
    assert!(requests.iter().any(|path| path.contains(" from ")), "{requests:?}");
    assert_eq!(requests.iter().filter(|path| path.ends_with("manifests/v1")).count(), 1);
}

/// A blocked download is resumed a limited number of times.
#[tokio::test]
async fn retries_after_a_read_timeout() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let layer = image(false).pop().unwrap().0;
    for (path, times, expected) in [
        (&*layer, 2, None),
        (&*layer, 99, Some(format!("/v2/app/blobs/{layer}\": no data received for 1s"))),
        ("manifests/v1", 1, None),
        ("manifests/v1", 99, Some("/v2/app/manifests/v1\": no data received for 1s".to_owned())),
    ] {
        let state = RegistryState {
            blobs: image(false),
            blocked_responses: (path.to_owned(), times),
            ..RegistryState::default()
        };
        let fake = FakeRegistry::start(state).await;
        let (_directory, pulled) = pull_with(short_timeout_puller, &fake, "app:v1", None).await;
        let message = pulled.err().map(|error| error.to_string());
        let start = format!("failed to do request: GET \"http://{}", fake.host);
        assert_eq!(message, expected.map(|end| start + &end), "{path} {times}");
        let is_taken_up = fake.requests().iter().any(|path| path.contains(" from "));
        assert_eq!(is_taken_up, path == layer, "received data is not fetched again");
    }
}

/// Garbage collection during a pull keeps only the blobs that the pull requires.
#[tokio::test]
async fn collect_during_a_pull_keeps_its_blobs() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let pieces = image(false);
    let [config, layer] = [2, 3].map(|at| Digest::parse(&pieces[at].0).unwrap());
    let fake = FakeRegistry::start(RegistryState {
        blobs: pieces,
        blocked_responses: (layer.to_string(), 1),
        ..RegistryState::default()
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let reference = Reference::parse(&format!("{}/app:v1", fake.host)).unwrap();
    let puller = short_timeout_puller(store.clone());
    let pulling = tokio::spawn(async move { puller.pull(&reference, None).await });
    wait_until(|| store.has(&config, true) && fake.requests().iter().any(|path| path.ends_with(layer.hex())))
        .await;
    let unused = Digest::of(b"unreferenced");
    store.add_blob(&unused, &b"unreferenced"[..]).unwrap();
    assert!(store.collect_garbage(|| Ok(Default::default()), |_, _| false).unwrap() > Some(0));
    assert!(!store.has(&unused, false) && store.has(&config, true));
    let pulled = pulling.await.unwrap().unwrap();
    assert!(store.layer(&pulled.layers[0]).exists() && store.manifest(&pulled).is_ok());
    assert_eq!(fake.requests().iter().filter(|path| path.ends_with(config.hex())).count(), 1);
}

/// Pods that start together fetch an image once.
#[tokio::test]
async fn concurrent_pulls_fetch_each_blob_once() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let pieces = image(false);
    let layer = pieces[3].0.clone();
    // The first pull blocks on the layer. When it is canceled, another one fetches the layer.
    for is_canceled in [false, true] {
        let blocked_responses = (layer.clone(), if is_canceled { 1 } else { 0 });
        let fake = FakeRegistry::start(RegistryState {
            blobs: pieces.clone(),
            blocked_responses,
            ..RegistryState::default()
        })
        .await;
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let begin = || {
            let (puller, reference) = (fast_retry_puller(store.clone()), format!("{}/app:v1", fake.host));
            let reference = Reference::parse(&reference).unwrap();
            tokio::spawn(async move { puller.pull(&reference, None).await })
        };
        let fetch_count = || fake.requests().iter().filter(|path| path.ends_with(&layer)).count();
        let first = begin();
        wait_until(|| !is_canceled || fetch_count() > 0).await;
        let others: Vec<_> = (0..5).map(|_| begin()).collect();
        if is_canceled {
            first.abort();
        }
        for other in others {
            other.await.unwrap().unwrap();
        }
        assert!(first.await.is_ok_and(|pulled| pulled.is_ok()) || is_canceled);
        assert_eq!(fetch_count(), if is_canceled { 2 } else { 1 });
    }
}

/// A slow disk must not block the async worker threads.
#[tokio::test]
async fn writes_blobs_off_the_async_threads() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let pipe = directory.path().join("slow");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    // A full pipe blocks the writer until something is read.
    let fifo = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let mut reader = fifo.try_clone().unwrap();
    let path = tempfile::TempPath::try_from_path(&pipe).unwrap();
    let file = tempfile::NamedTempFile::from_parts(fifo, path);
    let part = PartialBlob { file, hash: Sha256::new(), received: 0 };
    let content = Bytes::from(vec![1; 1 << 20]);
    let written = part.write(&store, vec![content.clone()]);
    let read = async move {
        let mut bytes = vec![0; 1 << 20];
        tokio::task::spawn_blocking(move || io::Read::read_exact(&mut reader, &mut bytes).map(|()| bytes))
            .await
    };
    let (part, read) = tokio::join!(written, read);
    assert_eq!(Digest::from_hash(part.unwrap().hash), Digest::of(&content));
    assert!(read.unwrap().unwrap() == content);
}

/// Registries count manifest GET requests against rate limits, but not HEAD requests.
#[tokio::test]
async fn head_request_detects_an_unchanged_image() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let mut pieces = image(false);
    pieces.push(("manifests/v2".to_owned(), pieces[0].1.clone()));
    let other = Digest::of(b"other");
    pieces.push((other.to_string(), pieces[0].1.clone()));
    let fake = FakeRegistry::start(RegistryState {
        blobs: pieces,
        sends_digest_header: true,
        ..RegistryState::default()
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let pull = async |tag: &str| {
        let reference = Reference::parse(&format!("{}/app:{tag}", fake.host)).unwrap();
        let before = fake.requests().len();
        let image = fast_retry_puller(store.clone()).pull(&reference, None).await.unwrap();
        (image, fake.requests().split_off(before))
    };
    let (first, requests) = pull("v1").await;
    assert_eq!(requests.len(), 4);
    assert_eq!(pull("v1").await, (first.clone(), vec!["HEAD /v2/app/manifests/v1".to_owned()]));
    let (second, requests) = pull("v2").await;
    assert_eq!(requests, ["HEAD /v2/app/manifests/v2"]);
    assert_eq!((second.id, second.tags.len()), (first.id.clone(), 2));
    assert_eq!(store.images().unwrap()[0].tags, second.tags);
    // Missing or corrupt content is fetched again.
    for broken in [store.blob(&first.id), store.blob(&first.manifest)] {
        std::fs::write(broken, "").unwrap();
        assert!(pull("v1").await.1.len() > 2);
    }
    std::fs::remove_dir_all(store.layer(&first.layers[0])).unwrap();
    assert!(pull("v1").await.1.len() > 2 && store.layer(&first.layers[0]).exists());
    // A reference with a digest resolves to exactly that digest or fails.
    let reference = Reference::parse(&format!("{}/app@{other}", fake.host)).unwrap();
    let pulled = fast_retry_puller(store.clone()).pull(&reference, None).await;
    assert!(matches!(pulled, Err(PullError::Store(Error::WrongDigest { .. }))), "{pulled:?}");
    fake.state.lock().unwrap().sends_digest_header = false;
    assert_eq!(pull("v1").await.1.len(), 3);
}

/// A pulled image is found by every reference that it can be requested by.
#[tokio::test]
async fn find_a_pulled_image_by_index_digest() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let mut pieces = image(false);
    let (index, manifest) = (Digest::of(&pieces[0].1), pieces[1].0.clone());
    pieces.push((index.to_string(), pieces[0].1.clone()));
    let fake = FakeRegistry::start(RegistryState { blobs: pieces, ..RegistryState::default() }).await;
    let repository = format!("{}/app", fake.host);
    let by_index = format!("{repository}@{index}");
    for (requested, tags) in [
        (format!("app@{index}"), vec![]),
        (format!("app:v1@{index}"), vec![]),
        ("app:v1".to_owned(), vec![format!("{repository}:v1")]),
    ] {
        let (directory, pulled) = pull(&fake, &requested, None).await;
        let pulled = pulled.unwrap();
        assert!(pulled.digests.iter().eq([&by_index]), "{requested}: {:?}", pulled.digests);
        assert_eq!(Vec::from_iter(pulled.tags.clone()), tags, "{requested}");
        let store = Store::open(directory.path()).unwrap();
        for name in [&by_index, &format!("{repository}@{manifest}"), &format!("{repository}:v9@{index}")] {
            assert_eq!(store.find(name).unwrap().as_ref(), Some(&pulled), "{name}");
        }
        for name in [format!("{}/other@{index}", fake.host), format!("{}/other@{manifest}", fake.host)] {
            assert_eq!(store.find(&name).unwrap(), None, "{name}");
        }
    }
}

#[tokio::test]
async fn accepts_password_and_identity_token() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let fake = FakeRegistry::start(RegistryState {
        blobs: image(false),
        wants_password: true,
        ..RegistryState::default()
    })
    .await;
    let key = Credentials::from_auth("bWU6c2VjcmV0").unwrap();
    let (_directory, pulled) = pull(&fake, "app:v1", Some(key)).await;
    assert!(pulled.is_ok(), "{pulled:?}");
    let key = Credentials { identity_token: "who-i-am".to_owned(), ..Credentials::default() };
    let (_directory, pulled) = pull(&fake, "app:v1", Some(key)).await;
    assert!(pulled.is_ok(), "{pulled:?}");
    let (_directory, pulled) = pull(&fake, "app:v1", None).await;
    let name = format!("{}/app:v1", fake.host);
    let expected = format!(
        "failed to resolve reference {name:?}: pull access denied, repository does not exist or may require authorization: authorization failed"
    );
    assert_eq!(pulled.unwrap_err().to_string(), expected);
}

/// A configuration that exceeds the size limit is not requested.
#[tokio::test]
async fn rejects_config_with_an_invalid_size() {
    for size in [0, MAX_DOCUMENT_BYTES + 1] {
        let digest = Digest::of(b"config");
        let config = format!(r#"{{"digest": "{digest}", "size": {size}}}"#);
        let manifest = format!(r#"{{"schemaVersion": 2, "config": {config}, "layers": []}}"#);
        let contents = vec![("manifests/v1".to_owned(), manifest.into_bytes())];
        let fake = FakeRegistry::start(RegistryState { blobs: contents, ..RegistryState::default() }).await;
        let (_directory, pulled) = pull(&fake, "app:v1", None).await;
        let message = pulled.unwrap_err().to_string();
        assert!(
            message.ends_with(&format!("config {digest} has an invalid size of {size} bytes")),
            "{message}"
        );
        assert_eq!(fake.requests().len(), 1);
    }
}

#[tokio::test]
async fn reports_wrong_digest_and_missing_manifest() {
    let fake = FakeRegistry::start(RegistryState { blobs: image(true), ..RegistryState::default() }).await;
    let (_directory, pulled) = pull(&fake, "app:v1", None).await;
    assert!(matches!(pulled, Err(PullError::Store(Error::WrongDigest { .. }))), "{pulled:?}");
    let (_directory, pulled) = pull(&fake, "app:v2", None).await;
    let name = format!("{}/app:v2", fake.host);
    assert_eq!(
        pulled.unwrap_err().to_string(),
        format!("failed to resolve reference {name:?}: {name}: not found")
    );
    let unreachable = FakeRegistry { host: "127.0.0.1:1".to_owned(), state: Arc::default() };
    let (_directory, pulled) = pull(&unreachable, "app:v1", None).await;
    let expected = "failed to do request: GET \"http://127.0.0.1:1/v2/app/manifests/v1\": Connection refused (os error 111)";
    assert_eq!(pulled.unwrap_err().to_string(), expected);
}

#[tokio::test]
async fn mirrors_are_used_before_the_registry() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let fake = FakeRegistry::start(RegistryState { blobs: image(false), ..RegistryState::default() }).await;
    // The first mirror is unreachable, the second responds. The registry itself is not contacted.
    let endpoints = format!("[\"http://127.0.0.1:1\", \"http://{}\"]", fake.host);
    let text = format!("mirrors:\n  registry.invalid:\n    endpoint: {endpoints}\n");
    let settings: RegistrySettings = schema::yaml::from_str(&text).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let puller = Puller::new(Store::open(directory.path()).unwrap(), settings);
    let reference = Reference::parse("registry.invalid/team/app:v1").unwrap();
    let pulled = puller.pull(&reference, None).await.unwrap();
    assert_eq!(pulled.tags.iter().next().unwrap(), "registry.invalid/team/app:v1");
    assert!(
        fake.requests().contains(&"/v2/team/app/manifests/v1?ns=registry.invalid".to_owned()),
        "{:?}",
        fake.requests()
    );
}

#[tokio::test]
async fn retries_when_rate_limited() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    for (busy, wants_password, is_good) in [
        (("429 Too Many Requests", 4, "0"), false, true),
        // The token server is rate limited, too.
        (("429 Too Many Requests", 2, "0"), true, true),
        (("408 Request Timeout", 4, "tomorrow"), false, true),
        (("503 Service Unavailable", 1, ""), false, true),
        (("429 Too Many Requests", 99, "0"), false, false),
        (("400 Bad Request", 1, "0"), false, false),
    ] {
        let state = RegistryState { blobs: image(false), wants_password, busy, ..RegistryState::default() };
        let fake = FakeRegistry::start(state).await;
        let key = Credentials::from_auth("bWU6c2VjcmV0");
        let (_directory, pulled) = pull(&fake, "app:v1", key).await;
        assert_eq!(pulled.is_ok(), is_good, "{busy:?}: {pulled:?}");
        if let Err(error) = pulled {
            let message = error.to_string();
            let start = "unexpected status from GET request to http://";
            let end = format!("/v2/app/manifests/v1: {}\ntoo many: Not now\nx: ", busy.0);
            assert!(message.starts_with(start) && message.ends_with(&end), "{message}");
        }
    }
}

#[test]
fn retry_delay_respects_retry_after() {
    let timeouts = RegistryTimeouts::default();
    for (after, tries, expected) in
        [(None, 0, 250), (None, 3, 2_000), (Some(7), 0, 7_000), (Some(0), 1, 500), (Some(86_400), 1, 60_000)]
    {
        let after = after.map(Duration::from_secs);
        let (url, message, status) = (String::new(), String::new(), StatusCode::TOO_MANY_REQUESTS);
        let error = PullError::Status { method: "GET", url, status, errors: message, after };
        assert_eq!(error.retry_delay(timeouts, tries), Duration::from_millis(expected), "{after:?}");
    }
}

/// Credentials are not sent to the target of a redirect, even if it requests them.
#[tokio::test]
async fn redirects_do_not_forward_credentials() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    for requires_auth in [false, true] {
        let location =
            RegistryState { blobs: image(false), wants_password: requires_auth, ..RegistryState::default() };
        let location = FakeRegistry::start(location).await;
        let redirect_blobs_to = Some(location.host.clone());
        let state = RegistryState {
            blobs: image(false),
            wants_password: true,
            redirect_blobs_to,
            ..RegistryState::default()
        };
        let fake = FakeRegistry::start(state).await;
        let (_directory, pulled) = pull(&fake, "app:v1", Credentials::from_auth("bWU6c2VjcmV0")).await;
        assert_eq!(pulled.is_ok(), !requires_auth, "{pulled:?}");
        let auth_headers = location.state.lock().unwrap().auth_headers.clone();
        assert!(
            !auth_headers.is_empty() && auth_headers.iter().all(|(_, key)| key.is_none()),
            "{auth_headers:?}"
        );
        assert!(auth_headers.iter().all(|(path, _)| path.contains("/blobs/")), "{auth_headers:?}");
        let auth_headers = fake.state.lock().unwrap().auth_headers.clone();
        let count_requests =
            |start: &str| auth_headers.iter().filter(|(path, _)| path.starts_with(start)).count();
        assert_eq!(
            count_requests("/token?a=b&scope=repository:app:pull&service=fake"),
            1,
            "{auth_headers:?}"
        );
    }
}

/// The same holds for token servers, also for a redirect within the same host.
#[tokio::test]
async fn token_redirects_do_not_forward_the_password() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let other = FakeRegistry::start(RegistryState::default()).await;
    for (redirect_tokens_to, is_good) in [(String::new(), true), (format!("http://{}", other.host), false)] {
        let redirect_tokens_to = Some(redirect_tokens_to);
        let state = RegistryState {
            blobs: image(false),
            wants_password: true,
            redirect_tokens_to,
            ..RegistryState::default()
        };
        let fake = FakeRegistry::start(state).await;
        let (_directory, pulled) = pull(&fake, "app:v1", Credentials::from_auth("bWU6c2VjcmV0")).await;
        assert_eq!(pulled.is_ok(), is_good, "{pulled:?}");
    }
    let auth_headers = other.state.lock().unwrap().auth_headers.clone();
    assert!(
        auth_headers.iter().all(|(path, key)| path.starts_with("/moved/token") && key.is_none()),
        "{auth_headers:?}"
    );
    assert_eq!(auth_headers.len(), 1);
}

/// A proxy that also serves the registry. It speaks TLS inside a tunnel.
async fn proxy(stream: TcpStream, state: Arc<Mutex<RegistryState>>, tls: tokio_rustls::TlsAcceptor) {
    let mut start = [0; 7];
    while stream.peek(&mut start).await.is_ok_and(|count| count < start.len()) {
        tokio::task::yield_now().await;
    }
    if &start != b"CONNECT" {
        return serve(stream, state, String::new()).await;
    }
    let (mut stream, mut head) = (stream, Vec::new());
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let is_known = head.contains("Proxy-Authorization: Basic bWU6c2VjcmV0\r\n");
    let to = head.split(' ').nth(1).unwrap().to_owned();
    state.lock().unwrap().requests.push(format!("CONNECT {to}"));
    let status = if is_known { "200 Connection established" } else { "407 Proxy Authentication Required" };
    stream.write_all(format!("HTTP/1.1 {status}\r\nx: y\r\n\r\n").as_bytes()).await.unwrap();
    if let (true, Ok(stream)) = (is_known, tls.accept(stream).await) {
        serve(stream, state, String::new()).await;
    }
}

#[tokio::test]
async fn pulls_through_a_proxy() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let params = rcgen::CertificateParams::new(vec!["registry.invalid".to_owned()]).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate =
        pki::CertKeyPair { cert_pem: params.self_signed(&key).unwrap().pem(), key_pem: key.serialize_pem() };
    let tls = Arc::new(pki::server_config(pki::ServingCertificate::new(&certificate).unwrap(), &[]).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let state = Arc::new(Mutex::new(RegistryState { blobs: image(false), ..RegistryState::default() }));
    let known = state.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(proxy(stream, known.clone(), tls.clone().into()));
        }
    });
    let with_key = format!("http://me:secret@{host}");
    let proxy_error = format!("proxy {host}: 407 Proxy Authentication Required");
    let address_error = "invalid proxy address, must be http://host:port";
    for (endpoint, proxy, expected_request, expected) in [
        ("http://registry.invalid", &with_key, "http://registry.invalid/v2/app/manifests/v1", None),
        ("https://registry.invalid:8443", &with_key, "CONNECT registry.invalid:8443", None),
        ("https://registry.invalid", &with_key, "CONNECT registry.invalid:443", None),
        ("https://registry.invalid", &host, "CONNECT registry.invalid:443", Some(proxy_error.as_str())),
        ("https://registry.invalid", &"socks5://x".to_owned(), "", Some(address_error)),
        (
            "https://registry.invalid",
            &"127.0.0.1:1".to_owned(),
            "",
            Some("proxy 127.0.0.1:1: Connection refused (os error 111)"),
        ),
    ] {
        let text = format!(
            "mirrors: {{registry.invalid: {{endpoint: ['{endpoint}']}}}}\n\
             configs: {{'*': {{tls: {{insecure_skip_verify: true}}}}}}\n"
        );
        let settings: RegistrySettings = schema::yaml::from_str(&text).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let (settings, proxies) = (
            Arc::new(settings.mirrors_only(true)),
            Proxies::new(|name| name.starts_with("HTTP").then(|| proxy.clone())),
        );
        let puller = Puller { settings, proxies: Arc::new(proxies), ..fast_retry_puller(store) };
        state.lock().unwrap().requests.clear();
        let pulled = puller.pull(&Reference::parse("registry.invalid/app:v1").unwrap(), None).await;
        match (expected, pulled) {
            (None, pulled) => assert!(pulled.is_ok(), "{endpoint}: {pulled:?}"),
            (Some(error_body), pulled) => {
                let message = pulled.unwrap_err().to_string();
                assert!(message.ends_with(&format!(": {error_body}")), "{message}");
            }
        }
        let received = state.lock().unwrap().requests.clone();
        assert!(
            expected_request.is_empty()
                || received
                    .iter()
                    .any(|received| received == &expected_request.to_lowercase()
                        || received == expected_request),
            "{received:?}"
        );
    }
}

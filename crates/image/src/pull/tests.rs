//! Against a registry of our own that cuts connections, asks for passwords and tells lies.

use std::sync::Mutex;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// What the registry has and how it behaves.
#[derive(Default)]
struct Behaviour {
    blobs: Vec<(String, Vec<u8>)>,
    wants_password: bool,
    /// Cuts this many answers in the middle.
    cuts: u32,
    /// Says no more than half of answers whose path ends so, and keeps silent, this many times.
    stalls: (String, u32),
    /// Has too much to do, this many times for each path, and wants to be left alone for so many seconds.
    busy: (&'static str, u32, &'static str),
    /// Where pieces really are.
    sends_to: Option<String>,
    /// Says which manifest it is that somebody asks about.
    tells_digests: bool,
    /// Where tokens really are.
    tokens_at: Option<String>,
    /// What every request has shown of who we are.
    shown: Vec<(String, Option<String>)>,
    asked: Vec<String>,
}

struct Fake {
    host: String,
    behaviour: Arc<Mutex<Behaviour>>,
}

impl Fake {
    async fn start(behaviour: Behaviour) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let behaviour = Arc::new(Mutex::new(behaviour));
        let known = behaviour.clone();
        let own = host.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, known.clone(), own.clone()));
            }
        });
        Fake { host, behaviour }
    }

    fn asked(&self) -> Vec<String> {
        self.behaviour.lock().unwrap().asked.clone()
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    behaviour: Arc<Mutex<Behaviour>>,
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
        let (answer, end) = answer(&text, &behaviour, &host);
        let kept_back = match end {
            End::Proper => 0,
            End::Cut => 300,
            End::Stalled => 50,
        };
        let written = stream.write_all(&answer[..answer.len() - kept_back]).await;
        if end == End::Stalled {
            std::future::pending::<()>().await;
        }
        if written.is_err() || end == End::Cut {
            return;
        }
    }
}

/// How an answer ends.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Proper,
    Cut,
    Stalled,
}

fn answer(request: &str, behaviour: &Mutex<Behaviour>, host: &str) -> (Vec<u8>, End) {
    let mut behaviour = behaviour.lock().unwrap();
    let path = request.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let header = |name: &str| {
        request.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")).map(str::to_owned))
    };
    let from: usize = header("range")
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
        .unwrap_or(0);
    let is_head = request.starts_with("head ");
    behaviour.asked.push(match from {
        0 if is_head => format!("HEAD {path}"),
        0 => path.clone(),
        _ => format!("{path} from {from}"),
    });
    let shown = header("authorization");
    behaviour.shown.push((path.clone(), shown));
    let reply = |status: &str, more: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\n{more}content-length: {}\r\n\r\n", body.len());
        [head.as_bytes(), body].concat()
    };
    // Whole addresses are for proxies, who want to see more.
    if path.starts_with("http://") && header("proxy-authorization").is_none() {
        return (reply("407 Proxy Authentication Required", "", b""), End::Proper);
    }
    let times = behaviour.asked.iter().filter(|asked| asked.trim_start_matches("HEAD ") == path).count();
    let (status, most, seconds) = behaviour.busy;
    if times <= most as usize {
        let why = br#"{"errors": [{"code": "TOO_MANY", "message": "Not now"}, {"code": "X"}]}"#;
        return (reply(status, &format!("retry-after: {seconds}\r\n"), why), End::Proper);
    }
    if let Some(elsewhere) = behaviour.tokens_at.clone().filter(|_| path.starts_with("/token")) {
        let more = format!("location: {elsewhere}/moved{path}\r\n");
        return (reply("307 Temporary Redirect", &more, b""), End::Proper);
    }
    if path.starts_with("/token") || path.starts_with("/moved/token") {
        // me:secret
        let is_known = header("authorization").is_some_and(|key| key == "basic bwu6c2vjcmv0")
            || (request.starts_with("post ") && request.ends_with("&refresh_token=who-i-am"));
        let body: &[u8] = br#"{"token": "let-me-in"}"#;
        return (
            if is_known { reply("200 OK", "", body) } else { reply("401 Unauthorized", "", b"") },
            End::Proper,
        );
    }
    if behaviour.wants_password && header("authorization").is_none_or(|key| key != "bearer let-me-in") {
        let more = format!(
            "www-authenticate: Negotiate\r\n\
             www-authenticate: Bearer realm=\"http://{host}/token?a=b\",service=\"fake\"\r\n\
             www-authenticate: Basic realm=\"fake\"\r\n"
        );
        return (reply("401 Unauthorized", &more, b""), End::Proper);
    }
    if let Some(elsewhere) = behaviour.sends_to.clone().filter(|_| path.contains("/blobs/")) {
        let more = format!("location: http://{elsewhere}{path}\r\n");
        return (reply("307 Temporary Redirect", &more, b""), End::Proper);
    }
    let path = path.split('?').next().unwrap_or_default().to_owned();
    let Some((_, body)) = behaviour.blobs.iter().find(|(name, _)| path.ends_with(name.as_str())).cloned()
    else {
        return (reply("404 Not Found", "", b"{}"), End::Proper);
    };
    if is_head {
        let digest = format!("docker-content-digest: {}\r\n", Digest::of(&body));
        return (reply("200 OK", if behaviour.tells_digests { &digest } else { "" }, b""), End::Proper);
    }
    let is_cut = path.contains("/blobs/") && body.len() - from > 1000 && behaviour.cuts > 0;
    behaviour.cuts -= u32::from(is_cut);
    let is_stalled = path.ends_with(&behaviour.stalls.0) && behaviour.stalls.1 > 0 && !is_cut;
    behaviour.stalls.1 -= u32::from(is_stalled);
    let end = match (is_cut, is_stalled) {
        (true, _) => End::Cut,
        (_, true) => End::Stalled,
        _ => End::Proper,
    };
    let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
    (reply(status, "", &body[from..]), end)
}

/// An image with one layer, behind an index for several machines.
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
    fake: &Fake,
    name: &str,
    credentials: Option<Credentials>,
) -> (tempfile::TempDir, Result<Image, PullError>) {
    pull_by(brisk, fake, name, credentials).await
}

/// Waits for something that happens elsewhere.
async fn until(is_so: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it never comes to that");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn pull_by(
    puller: impl Fn(Store) -> Puller,
    fake: &Fake,
    name: &str,
    credentials: Option<Credentials>,
) -> (tempfile::TempDir, Result<Image, PullError>) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let reference = Reference::parse(&format!("{}/{name}", fake.host)).unwrap();
    let pulled = puller(store.clone()).pull(&reference, credentials.as_ref()).await;
    if pulled.is_err() {
        assert_eq!(store.images().unwrap(), []);
        // What was being written elsewhere goes as soon as it is.
        until(|| std::fs::read_dir(directory.path().join("tmp")).unwrap().count() == 0).await;
    }
    (directory, pulled)
}

/// Tries again soon.
fn brisk(store: Store) -> Puller {
    let patience = Patience { pause: Duration::from_millis(5), ..Patience::default() };
    Puller { patience, ..Puller::new(store, Settings::default()) }
}

/// Does not wait for long either. Still longer than a busy machine takes for what is not meant to take any time.
fn impatient(store: Store) -> Puller {
    let puller = brisk(store);
    Puller { patience: Patience { more: Duration::from_secs(1), ..puller.patience }, ..puller }
}

fn can_unpack() -> bool {
    rustix::process::geteuid().is_root()
}

#[tokio::test]
async fn an_image_for_this_machine_comes_in_pieces() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let fake = Fake::start(Behaviour { blobs: image(false), cuts: 2, ..Behaviour::default() }).await;
    let (_directory, pulled) = pull(&fake, "team/app:v1", None).await;
    let pulled = pulled.unwrap();
    assert_eq!(pulled.tags.iter().next().unwrap(), &format!("{}/team/app:v1", fake.host));
    let asked = fake.asked();
    assert!(asked.iter().any(|path| path.contains(" from ")), "{asked:?}");
    assert_eq!(asked.iter().filter(|path| path.ends_with("manifests/v1")).count(), 1);
}

/// Somebody who says nothing any more is asked again for what is missing, but not for ever.
#[tokio::test]
async fn silence_is_no_answer() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let layer = image(false).pop().unwrap().0;
    for (path, times, expected) in [
        (&*layer, 2, None),
        (&*layer, 99, Some(format!("/v2/app/blobs/{layer}\": nothing came for 1s"))),
        ("manifests/v1", 1, None),
        ("manifests/v1", 99, Some("/v2/app/manifests/v1\": nothing came for 1s".to_owned())),
    ] {
        let behaviour =
            Behaviour { blobs: image(false), stalls: (path.to_owned(), times), ..Behaviour::default() };
        let fake = Fake::start(behaviour).await;
        let (_directory, pulled) = pull_by(impatient, &fake, "app:v1", None).await;
        let said = pulled.err().map(|error| error.to_string());
        let start = format!("failed to do request: GET \"http://{}", fake.host);
        assert_eq!(said, expected.map(|end| start + &end), "{path} {times}");
        let is_taken_up = fake.asked().iter().any(|path| path.contains(" from "));
        assert_eq!(is_taken_up, path == layer, "what has come is not fetched again");
    }
}

/// Room is made also while something is being pulled, and not by what that needs.
#[tokio::test]
async fn a_pull_keeps_only_what_it_needs() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let pieces = image(false);
    let [config, layer] = [2, 3].map(|at| Digest::parse(&pieces[at].0).unwrap());
    let fake =
        Fake::start(Behaviour { blobs: pieces, stalls: (layer.to_string(), 1), ..Behaviour::default() })
            .await;
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let reference = Reference::parse(&format!("{}/app:v1", fake.host)).unwrap();
    let puller = impatient(store.clone());
    let pulling = tokio::spawn(async move { puller.pull(&reference, None).await });
    until(|| store.has(&config, true) && fake.asked().iter().any(|path| path.ends_with(layer.hex()))).await;
    let nobodys = Digest::of(b"nobody's");
    store.add_blob(&nobodys, &b"nobody's"[..]).unwrap();
    assert!(store.collect(|| Ok(Default::default()), |_, _| false).unwrap() > Some(0));
    assert!(!store.has(&nobodys, false) && store.has(&config, true));
    let pulled = pulling.await.unwrap().unwrap();
    assert!(store.layer(&pulled.layers[0]).exists() && store.manifest(&pulled).is_ok());
    assert_eq!(fake.asked().iter().filter(|path| path.ends_with(config.hex())).count(), 1);
}

/// Pods that begin together have one image to fetch.
#[tokio::test]
async fn pulls_of_one_image_fetch_it_once() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let pieces = image(false);
    let layer = pieces[3].0.clone();
    // The first falls silent over the layer, and whoever gives up on it lets another fetch it.
    for is_given_up in [false, true] {
        let stalls = (layer.clone(), if is_given_up { 1 } else { 0 });
        let fake = Fake::start(Behaviour { blobs: pieces.clone(), stalls, ..Behaviour::default() }).await;
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let begin = || {
            let (puller, reference) = (brisk(store.clone()), format!("{}/app:v1", fake.host));
            let reference = Reference::parse(&reference).unwrap();
            tokio::spawn(async move { puller.pull(&reference, None).await })
        };
        let fetched = || fake.asked().iter().filter(|path| path.ends_with(&layer)).count();
        let first = begin();
        until(|| !is_given_up || fetched() > 0).await;
        let others: Vec<_> = (0..5).map(|_| begin()).collect();
        if is_given_up {
            first.abort();
        }
        for other in others {
            other.await.unwrap().unwrap();
        }
        assert!(first.await.is_ok_and(|pulled| pulled.is_ok()) || is_given_up);
        assert_eq!(fetched(), if is_given_up { 2 } else { 1 });
    }
}

/// A disk that takes its time keeps nobody else waiting, and each of these threads has many to serve.
#[tokio::test]
async fn writing_is_for_other_threads() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let pipe = directory.path().join("slow");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    // Takes nothing before somebody reads, once it is full.
    let opened = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let mut reader = opened.try_clone().unwrap();
    let path = tempfile::TempPath::try_from_path(&pipe).unwrap();
    let file = tempfile::NamedTempFile::from_parts(opened, path);
    let part = Part { file, hash: Sha256::new(), got: 0 };
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

/// Registries count who fetches manifests, and not who asks whether they are others by now.
#[tokio::test]
async fn what_is_here_already_is_not_fetched_again() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let mut pieces = image(false);
    pieces.push(("manifests/v2".to_owned(), pieces[0].1.clone()));
    let other = Digest::of(b"other");
    pieces.push((other.to_string(), pieces[0].1.clone()));
    let fake = Fake::start(Behaviour { blobs: pieces, tells_digests: true, ..Behaviour::default() }).await;
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let pull = async |tag: &str| {
        let reference = Reference::parse(&format!("{}/app:{tag}", fake.host)).unwrap();
        let before = fake.asked().len();
        let image = brisk(store.clone()).pull(&reference, None).await.unwrap();
        (image, fake.asked().split_off(before))
    };
    let (first, asked) = pull("v1").await;
    assert_eq!(asked.len(), 4);
    assert_eq!(pull("v1").await, (first.clone(), vec!["HEAD /v2/app/manifests/v1".to_owned()]));
    let (second, asked) = pull("v2").await;
    assert_eq!(asked, ["HEAD /v2/app/manifests/v2"]);
    assert_eq!((second.id, second.tags.len()), (first.id.clone(), 2));
    assert_eq!(store.images().unwrap()[0].tags, second.tags);
    // What is not whole is mended.
    for broken in [store.blob(&first.id), store.blob(&first.manifest)] {
        std::fs::write(broken, "").unwrap();
        assert!(pull("v1").await.1.len() > 2);
    }
    std::fs::remove_dir_all(store.layer(&first.layers[0])).unwrap();
    assert!(pull("v1").await.1.len() > 2 && store.layer(&first.layers[0]).exists());
    // Who names a digest gets that or nothing.
    let reference = Reference::parse(&format!("{}/app@{other}", fake.host)).unwrap();
    let pulled = brisk(store.clone()).pull(&reference, None).await;
    assert!(matches!(pulled, Err(PullError::Store(Error::WrongDigest { .. }))), "{pulled:?}");
    fake.behaviour.lock().unwrap().tells_digests = false;
    assert_eq!(pull("v1").await.1.len(), 3);
}

/// What was pulled is found by all that it could have been asked for.
#[tokio::test]
async fn an_image_is_known_by_its_index() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let mut pieces = image(false);
    let (index, manifest) = (Digest::of(&pieces[0].1), pieces[1].0.clone());
    pieces.push((index.to_string(), pieces[0].1.clone()));
    let fake = Fake::start(Behaviour { blobs: pieces, ..Behaviour::default() }).await;
    let place = format!("{}/app", fake.host);
    let by_index = format!("{place}@{index}");
    for (asked, tags) in [
        (format!("app@{index}"), vec![]),
        (format!("app:v1@{index}"), vec![]),
        ("app:v1".to_owned(), vec![format!("{place}:v1")]),
    ] {
        let (directory, pulled) = pull(&fake, &asked, None).await;
        let pulled = pulled.unwrap();
        assert!(pulled.digests.iter().eq([&by_index]), "{asked}: {:?}", pulled.digests);
        assert_eq!(Vec::from_iter(pulled.tags.clone()), tags, "{asked}");
        let store = Store::open(directory.path()).unwrap();
        for name in [&by_index, &format!("{place}@{manifest}"), &format!("{place}:v9@{index}")] {
            assert_eq!(store.find(name).unwrap().as_ref(), Some(&pulled), "{name}");
        }
        for name in [format!("{}/other@{index}", fake.host), format!("{}/other@{manifest}", fake.host)] {
            assert_eq!(store.find(&name).unwrap(), None, "{name}");
        }
    }
}

#[tokio::test]
async fn who_may_is_asked_for() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let fake =
        Fake::start(Behaviour { blobs: image(false), wants_password: true, ..Behaviour::default() }).await;
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

/// Nobody asks for a configuration that cannot be held.
#[tokio::test]
async fn a_configuration_of_no_sensible_size_is_refused() {
    for size in [0, LARGEST + 1] {
        let digest = Digest::of(b"config");
        let config = format!(r#"{{"digest": "{digest}", "size": {size}}}"#);
        let manifest = format!(r#"{{"schemaVersion": 2, "config": {config}, "layers": []}}"#);
        let blobs = vec![("manifests/v1".to_owned(), manifest.into_bytes())];
        let fake = Fake::start(Behaviour { blobs, ..Behaviour::default() }).await;
        let (_directory, pulled) = pull(&fake, "app:v1", None).await;
        let said = pulled.unwrap_err().to_string();
        assert!(
            said.ends_with(&format!("its configuration {digest} is said to have {size} bytes")),
            "{said}"
        );
        assert_eq!(fake.asked().len(), 1);
    }
}

#[tokio::test]
async fn lies_and_absence_are_noticed() {
    let fake = Fake::start(Behaviour { blobs: image(true), ..Behaviour::default() }).await;
    let (_directory, pulled) = pull(&fake, "app:v1", None).await;
    assert!(matches!(pulled, Err(PullError::Store(Error::WrongDigest { .. }))), "{pulled:?}");
    let (_directory, pulled) = pull(&fake, "app:v2", None).await;
    let name = format!("{}/app:v2", fake.host);
    assert_eq!(
        pulled.unwrap_err().to_string(),
        format!("failed to resolve reference {name:?}: {name}: not found")
    );
    let nobody = Fake { host: "127.0.0.1:1".to_owned(), behaviour: Arc::default() };
    let (_directory, pulled) = pull(&nobody, "app:v1", None).await;
    let expected = "failed to do request: GET \"http://127.0.0.1:1/v2/app/manifests/v1\": Connection refused (os error 111)";
    assert_eq!(pulled.unwrap_err().to_string(), expected);
}

#[tokio::test]
async fn mirrors_are_asked_first() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let fake = Fake::start(Behaviour { blobs: image(false), ..Behaviour::default() }).await;
    // The first does not answer, the second does; the registry itself is never asked.
    let endpoints = format!("[\"http://127.0.0.1:1\", \"http://{}\"]", fake.host);
    let text = format!("mirrors:\n  registry.invalid:\n    endpoint: {endpoints}\n");
    let settings: Settings = schema::yaml::read(&text).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let puller = Puller::new(Store::open(directory.path()).unwrap(), settings);
    let reference = Reference::parse("registry.invalid/team/app:v1").unwrap();
    let pulled = puller.pull(&reference, None).await.unwrap();
    assert_eq!(pulled.tags.iter().next().unwrap(), "registry.invalid/team/app:v1");
    assert!(
        fake.asked().contains(&"/v2/team/app/manifests/v1?ns=registry.invalid".to_owned()),
        "{:?}",
        fake.asked()
    );
}

#[tokio::test]
async fn a_registry_that_has_too_much_to_do_is_asked_again() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    for (busy, wants_password, is_good) in [
        (("429 Too Many Requests", 4, "0"), false, true),
        // So has the one who gives out tokens.
        (("429 Too Many Requests", 2, "0"), true, true),
        (("408 Request Timeout", 4, "tomorrow"), false, true),
        (("503 Service Unavailable", 1, ""), false, true),
        (("429 Too Many Requests", 99, "0"), false, false),
        (("400 Bad Request", 1, "0"), false, false),
    ] {
        let behaviour = Behaviour { blobs: image(false), wants_password, busy, ..Behaviour::default() };
        let fake = Fake::start(behaviour).await;
        let key = Credentials::from_auth("bWU6c2VjcmV0");
        let (_directory, pulled) = pull(&fake, "app:v1", key).await;
        assert_eq!(pulled.is_ok(), is_good, "{busy:?}: {pulled:?}");
        if let Err(error) = pulled {
            let said = error.to_string();
            let start = "unexpected status from GET request to http://";
            let end = format!("/v2/app/manifests/v1: {}\ntoo many: Not now\nx: ", busy.0);
            assert!(said.starts_with(start) && said.ends_with(&end), "{said}");
        }
    }
}

#[test]
fn how_long_a_registry_is_left_alone() {
    let patience = Patience::default();
    for (after, tries, expected) in
        [(None, 0, 250), (None, 3, 2_000), (Some(7), 0, 7_000), (Some(0), 1, 500), (Some(86_400), 1, 60_000)]
    {
        let after = after.map(Duration::from_secs);
        let (url, said, status) = (String::new(), String::new(), StatusCode::TOO_MANY_REQUESTS);
        let error = PullError::Status { method: "GET", url, status, said, after };
        assert_eq!(error.pause(patience, tries), Duration::from_millis(expected), "{after:?}");
    }
}

/// Whoever a registry sends us to is not told who we are, whatever he asks.
#[tokio::test]
async fn what_lets_us_in_is_shown_to_nobody_else() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    for asks_too in [false, true] {
        let elsewhere = Behaviour { blobs: image(false), wants_password: asks_too, ..Behaviour::default() };
        let elsewhere = Fake::start(elsewhere).await;
        let sends_to = Some(elsewhere.host.clone());
        let behaviour =
            Behaviour { blobs: image(false), wants_password: true, sends_to, ..Behaviour::default() };
        let fake = Fake::start(behaviour).await;
        let (_directory, pulled) = pull(&fake, "app:v1", Credentials::from_auth("bWU6c2VjcmV0")).await;
        assert_eq!(pulled.is_ok(), !asks_too, "{pulled:?}");
        let shown = elsewhere.behaviour.lock().unwrap().shown.clone();
        assert!(!shown.is_empty() && shown.iter().all(|(_, key)| key.is_none()), "{shown:?}");
        assert!(shown.iter().all(|(path, _)| path.contains("/blobs/")), "{shown:?}");
        let shown = fake.behaviour.lock().unwrap().shown.clone();
        let asked_for = |start: &str| shown.iter().filter(|(path, _)| path.starts_with(start)).count();
        assert_eq!(asked_for("/token?a=b&scope=repository:app:pull&service=fake"), 1, "{shown:?}");
    }
}

/// So it is with whoever gives out tokens, who may also be elsewhere on the same host.
#[tokio::test]
async fn tokens_are_followed_without_the_password() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let other = Fake::start(Behaviour::default()).await;
    for (tokens_at, is_good) in [(String::new(), true), (format!("http://{}", other.host), false)] {
        let tokens_at = Some(tokens_at);
        let behaviour =
            Behaviour { blobs: image(false), wants_password: true, tokens_at, ..Behaviour::default() };
        let fake = Fake::start(behaviour).await;
        let (_directory, pulled) = pull(&fake, "app:v1", Credentials::from_auth("bWU6c2VjcmV0")).await;
        assert_eq!(pulled.is_ok(), is_good, "{pulled:?}");
    }
    let shown = other.behaviour.lock().unwrap().shown.clone();
    assert!(shown.iter().all(|(path, key)| path.starts_with("/moved/token") && key.is_none()), "{shown:?}");
    assert_eq!(shown.len(), 1);
}

/// A proxy that plays the registry as well. Behind a tunnel it speaks TLS.
async fn proxy(stream: TcpStream, behaviour: Arc<Mutex<Behaviour>>, tls: tokio_rustls::TlsAcceptor) {
    let mut start = [0; 7];
    while stream.peek(&mut start).await.is_ok_and(|count| count < start.len()) {
        tokio::task::yield_now().await;
    }
    if &start != b"CONNECT" {
        return serve(stream, behaviour, String::new()).await;
    }
    let (mut stream, mut head) = (stream, Vec::new());
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let is_known = head.contains("Proxy-Authorization: Basic bWU6c2VjcmV0\r\n");
    let to = head.split(' ').nth(1).unwrap().to_owned();
    behaviour.lock().unwrap().asked.push(format!("CONNECT {to}"));
    let status = if is_known { "200 Connection established" } else { "407 Proxy Authentication Required" };
    stream.write_all(format!("HTTP/1.1 {status}\r\nx: y\r\n\r\n").as_bytes()).await.unwrap();
    if let (true, Ok(stream)) = (is_known, tls.accept(stream).await) {
        serve(stream, behaviour, String::new()).await;
    }
}

#[tokio::test]
async fn registries_are_reached_through_proxies() {
    if !can_unpack() {
        return eprintln!("skipped: needs root");
    }
    let params = rcgen::CertificateParams::new(vec!["registry.invalid".to_owned()]).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let issued =
        pki::Issued { cert_pem: params.self_signed(&key).unwrap().pem(), key_pem: key.serialize_pem() };
    let tls = Arc::new(pki::server_config(pki::Serving::new(&issued).unwrap(), &[]).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let behaviour = Arc::new(Mutex::new(Behaviour { blobs: image(false), ..Behaviour::default() }));
    let known = behaviour.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(proxy(stream, known.clone(), tls.clone().into()));
        }
    });
    let with_key = format!("http://me:secret@{host}");
    let refused = format!("proxy {host}: 407 Proxy Authentication Required");
    let unusable = "the address of the proxy cannot be used: it has to be http://host:port";
    for (endpoint, proxy, asked, expected) in [
        ("http://registry.invalid", &with_key, "http://registry.invalid/v2/app/manifests/v1", None),
        ("https://registry.invalid:8443", &with_key, "CONNECT registry.invalid:8443", None),
        ("https://registry.invalid", &with_key, "CONNECT registry.invalid:443", None),
        ("https://registry.invalid", &host, "CONNECT registry.invalid:443", Some(refused.as_str())),
        ("https://registry.invalid", &"socks5://x".to_owned(), "", Some(unusable)),
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
        let settings: Settings = schema::yaml::read(&text).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        let (settings, proxies) = (
            Arc::new(settings.mirrors_only(true)),
            Proxies::new(|name| name.starts_with("HTTP").then(|| proxy.clone())),
        );
        let puller = Puller { settings, proxies: Arc::new(proxies), ..brisk(store) };
        behaviour.lock().unwrap().asked.clear();
        let pulled = puller.pull(&Reference::parse("registry.invalid/app:v1").unwrap(), None).await;
        match (expected, pulled) {
            (None, pulled) => assert!(pulled.is_ok(), "{endpoint}: {pulled:?}"),
            (Some(why), pulled) => {
                let said = pulled.unwrap_err().to_string();
                assert!(said.ends_with(&format!(": {why}")), "{said}");
            }
        }
        let heard = behaviour.lock().unwrap().asked.clone();
        assert!(
            asked.is_empty() || heard.iter().any(|heard| heard == &asked.to_lowercase() || heard == asked),
            "{heard:?}"
        );
    }
}

//! Against a registry of our own that cuts connections, asks for passwords and tells lies.

use std::sync::Mutex;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// What the registry has and how it behaves.
#[derive(Default)]
struct Behaviour {
    blobs: Vec<(String, Vec<u8>)>,
    wants_password: bool,
    /// Cuts this many answers in the middle.
    cuts: u32,
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

async fn serve(mut stream: TcpStream, behaviour: Arc<Mutex<Behaviour>>, host: String) {
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
        let (answer, is_cut) = answer(&text, &behaviour, &host);
        let end = if is_cut { answer.len() - 300 } else { answer.len() };
        if stream.write_all(&answer[..end]).await.is_err() || is_cut {
            return;
        }
    }
}

fn answer(request: &str, behaviour: &Mutex<Behaviour>, host: &str) -> (Vec<u8>, bool) {
    let mut behaviour = behaviour.lock().unwrap();
    let path = request.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let header = |name: &str| {
        request.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")).map(str::to_owned))
    };
    let from: usize = header("range")
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
        .unwrap_or(0);
    behaviour.asked.push(if from > 0 { format!("{path} from {from}") } else { path.clone() });
    let reply = |status: &str, more: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\n{more}content-length: {}\r\n\r\n", body.len());
        [head.as_bytes(), body].concat()
    };
    if path.starts_with("/token") {
        // me:secret
        let is_known = header("authorization").is_some_and(|key| key == "basic bwu6c2vjcmv0")
            || (request.starts_with("post ") && request.ends_with("&refresh_token=who-i-am"));
        let body: &[u8] = br#"{"token": "let-me-in"}"#;
        return (
            if is_known { reply("200 OK", "", body) } else { reply("401 Unauthorized", "", b"") },
            false,
        );
    }
    if behaviour.wants_password && header("authorization").is_none_or(|key| key != "bearer let-me-in") {
        let more = format!("www-authenticate: Bearer realm=\"http://{host}/token\",service=\"fake\"\r\n");
        return (reply("401 Unauthorized", &more, b""), false);
    }
    let Some((_, body)) = behaviour.blobs.iter().find(|(name, _)| path.ends_with(name.as_str())).cloned()
    else {
        return (reply("404 Not Found", "", b"{}"), false);
    };
    let is_cut = path.contains("/blobs/") && body.len() - from > 1000 && behaviour.cuts > 0;
    behaviour.cuts -= u32::from(is_cut);
    let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
    (reply(status, "", &body[from..]), is_cut)
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
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let puller = Puller::new(store.clone(), Settings::default());
    let reference = Reference::parse(&format!("{}/{name}", fake.host)).unwrap();
    let pulled = puller.pull(&reference, credentials.as_ref()).await;
    if pulled.is_err() {
        assert_eq!(store.images().unwrap(), []);
        assert_eq!(std::fs::read_dir(directory.path().join("tmp")).unwrap().count(), 0);
    }
    (directory, pulled)
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
    assert!(fake.asked().iter().any(|path| path.contains("/v2/team/app/manifests/v1")), "{:?}", fake.asked());
}

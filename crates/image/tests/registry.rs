//! Pulls from a real registry, Debian's `docker-registry`, over TLS, with a password, and over
//! connections that are interrupted.
//!
//! Needs root, docker-registry, curl and busybox. Skipped if one of them is missing.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use image::pull::{Credentials, PullError, Puller, RegistrySettings};
use image::{Image, Reference, Store};
use jiff::Timestamp;
use pki::{Authority, Leaf, Usage};
use serde_json::Value;
use testkit::Process;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const STARTUP_TIMEOUT: Duration = Duration::from_secs(60);
/// The bcrypt hash of `secret`, as htpasswd writes it.
const PASSWORD: &str = "me:$2b$04$8I3v.znQQkWimKpNbcvx/up.KTVNqTx/pTqH8Z/EGK/3lxUvGxxvG\n";

/// A registry that contains the image `team/app:v1`.
struct Registry {
    dir: tempfile::TempDir,
    host: String,
    /// The total size of all blobs of the image.
    size: u64,
    _process: Process,
}

impl Registry {
    fn start() -> Option<Registry> {
        Registry::start_with("")
    }

    /// Starts a registry with additional TLS settings. `client` is a certificate issued by its CA.
    fn start_with(tls: &str) -> Option<Registry> {
        let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
        let can = has("docker-registry") && has("curl") && Path::new("/bin/busybox").exists();
        if !can || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root, docker-registry, curl and busybox-static");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let authority = Authority::load_or_create(&at("tls"), "ca", Timestamp::now()).unwrap();
        let leaf = Leaf {
            common_name: "registry".to_owned(),
            organizations: Vec::new(),
            dns_names: Vec::new(),
            ips: vec![[127, 0, 0, 1].into()],
            usage: Usage::Server,
            lifetime: Duration::from_secs(86_400),
        };
        pki::load_or_issue(&at("tls"), "registry", &authority, &leaf, Timestamp::now()).unwrap();
        let client = Leaf { common_name: "client".to_owned(), usage: Usage::Client, ips: Vec::new(), ..leaf };
        pki::load_or_issue(&at("tls"), "client", &authority, &client, Timestamp::now()).unwrap();
        std::fs::write(at("ca.pem"), authority.pem()).unwrap();
        std::fs::write(at("htpasswd"), PASSWORD).unwrap();
        let config = format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {data}}}}}\n\
             http:\n  addr: 127.0.0.1:0\n  tls: {{certificate: {tls}/registry.crt, key: {tls}/registry.key{more}}}\n\
             auth: {{htpasswd: {{realm: test, path: {passwords}}}}}\n",
            data = at("data").display(),
            tls = at("tls").display(),
            more = tls.replace("DIR", &dir.path().display().to_string()),
            passwords = at("htpasswd").display(),
        );
        std::fs::write(at("config.yml"), config).unwrap();
        let mut command = Command::new("docker-registry");
        let mut process = Process::spawn(command.arg("serve").arg(at("config.yml"))).unwrap();
        let parse_port = |log: &str| {
            let (_, behind) = log.split_once("listening on 127.0.0.1:")?;
            let port: String = behind.chars().take_while(char::is_ascii_digit).collect();
            behind.contains(',').then_some(port)
        };
        let port = process.wait_until_log(STARTUP_TIMEOUT, parse_port).unwrap();
        let mut registry = Registry { host: format!("127.0.0.1:{port}"), dir, size: 0, _process: process };
        registry.size = registry.push();
        Some(registry)
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Sends a request with an optional body. Returns the response headers and body.
    fn http_request(&self, method: &str, url: &str, content: Option<(&str, &[u8])>) -> String {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--fail-with-body", "--user", "me:secret", "--cacert"]);
        command.arg(self.ca()).args(["-D", "-", "-X", method, url]);
        let own = |name: &str| self.dir.path().join("tls").join(name);
        command.arg("--cert").arg(own("client.crt")).arg("--key").arg(own("client.key"));
        if let Some((kind, bytes)) = content {
            let file = self.dir.path().join("content");
            std::fs::write(&file, bytes).unwrap();
            command.args([
                "-H",
                &format!("Content-Type: {kind}"),
                "--data-binary",
                &format!("@{}", file.display()),
            ]);
        }
        let output = command.output().unwrap();
        let response = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{method} {url}: {response}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        response
    }

    /// Pushes an image from an archive. Returns the total size of its blobs.
    fn push(&self) -> u64 {
        let archive = testkit::busybox_image(self.dir.path(), "team/app:v1").unwrap();
        let store = Store::open(&self.dir.path().join("pushed")).unwrap();
        image::import(&store, std::fs::File::open(archive).unwrap()).unwrap();
        let mut archive_bytes = Vec::new();
        image::export(&store, &["team/app:v1".to_owned()], &mut archive_bytes).unwrap();
        let (mut index, mut pieces) = (Value::Null, Vec::new());
        for entry in tar::Archive::new(&archive_bytes[..]).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            match name.strip_prefix("blobs/sha256/") {
                Some(hex) => pieces.push((format!("sha256:{hex}"), bytes)),
                None if name == "index.json" => index = serde_json::from_slice(&bytes).unwrap(),
                None => {}
            }
        }
        let repository = format!("https://{}/v2/team/app", self.host);
        let described = &index["manifests"][0];
        let (manifests, pieces): (Vec<_>, Vec<_>) =
            pieces.into_iter().partition(|(digest, _)| described["digest"] == **digest);
        for (digest, bytes) in &pieces {
            let upload = self.http_request("POST", &format!("{repository}/blobs/uploads/"), Some(("", &[])));
            let location = upload.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("location").then(|| value.trim().to_owned())
            });
            let location = location.unwrap_or_else(|| panic!("no Location header: {upload}"));
            let content = ("application/octet-stream", &bytes[..]);
            self.http_request("PUT", &format!("{location}&digest={digest}"), Some(content));
        }
        let kind = described["mediaType"].as_str().unwrap();
        self.http_request("PUT", &format!("{repository}/manifests/v1"), Some((kind, &manifests[0].1)));
        pieces.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    fn settings(&self, host: &str, tls: &str) -> RegistrySettings {
        let path = self.dir.path().join("registries.yaml");
        std::fs::write(&path, format!("configs:\n  '{host}':\n    tls: {{{tls}}}\n")).unwrap();
        RegistrySettings::read(&path).unwrap()
    }

    /// Pulls into an empty store in this directory. A failed pull must leave no files behind.
    async fn pull(&self, dir: &Path, host: &str, name: &str, key: Option<&str>) -> Result<Image, PullError> {
        let store = Store::open(dir).unwrap();
        let settings = self.settings(host, &format!("ca_file: {}", self.ca().display()));
        let puller = Puller::new(store.clone(), settings);
        let reference = Reference::parse(&format!("{host}/{name}")).unwrap();
        let key = key.map(credentials);
        let pulled = puller.pull(&reference, key.as_ref()).await;
        if pulled.is_err() {
            assert_eq!(store.images().unwrap(), []);
            assert_eq!(std::fs::read_dir(dir.join("tmp")).unwrap().count(), 0);
        }
        pulled
    }
}

fn credentials(password: &str) -> Credentials {
    Credentials { username: "me".to_owned(), password: password.to_owned(), ..Credentials::default() }
}

/// A TCP proxy for the registry that closes connections after a number of bytes.
struct DisconnectProxy {
    host: String,
    passed: Arc<AtomicU64>,
    disconnect_count: Arc<AtomicUsize>,
}

impl DisconnectProxy {
    async fn disconnect_after(registry: &Registry, disconnect_count: usize, after: u64) -> DisconnectProxy {
        DisconnectProxy::start(registry, disconnect_count, after, u64::MAX).await
    }

    /// Forwards a number of bytes and then blocks.
    async fn block_after(registry: &Registry, after: u64) -> DisconnectProxy {
        DisconnectProxy::start(registry, 0, u64::MAX, after).await
    }

    async fn start(registry: &Registry, disconnect_count: usize, after: u64, most: u64) -> DisconnectProxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let (passed, disconnect_count) =
            (Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(disconnect_count)));
        let (to, counted, left) = (registry.host.clone(), passed.clone(), disconnect_count.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let upstream = TcpStream::connect(&to).await.unwrap();
                tokio::spawn(pass(client, upstream, counted.clone(), left.clone(), after, most));
            }
        });
        DisconnectProxy { host, passed, disconnect_count }
    }
}

async fn pass(
    client: TcpStream,
    upstream: TcpStream,
    passed: Arc<AtomicU64>,
    disconnect_count: Arc<AtomicUsize>,
    after: u64,
    most: u64,
) {
    let (mut client_reader, mut client_writer) = client.into_split();
    let (mut upstream_reader, mut upstream_writer) = upstream.into_split();
    let up = tokio::spawn(async move { tokio::io::copy(&mut client_reader, &mut upstream_writer).await });
    let (mut sent, mut buffer) = (0, vec![0; 16 << 10]);
    while let Ok(count @ 1..) = upstream_reader.read(&mut buffer).await {
        sent += count as u64;
        let is_last = sent > after
            && disconnect_count
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
                .is_ok();
        if is_last || client_writer.write_all(&buffer[..count]).await.is_err() {
            break;
        }
        if passed.fetch_add(count as u64, Ordering::SeqCst) + count as u64 >= most {
            std::future::pending::<()>().await;
        }
    }
    up.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn pulls_over_tls_with_a_password() {
    let Some(registry) = Registry::start() else { return };
    let host = registry.host.clone();
    let dir = tempfile::tempdir().unwrap();
    let pulled = registry.pull(&dir.path().join("good"), &host, "team/app:v1", Some("secret")).await.unwrap();
    assert_eq!(pulled.tags.iter().next().unwrap(), &format!("{host}/team/app:v1"));
    let layer = dir.path().join("good/layers").join(&pulled.layers[0]);
    assert!(layer.join("bin/busybox").exists());
    let by_digest = format!("team/app@{}", pulled.digests.iter().next().unwrap().rsplit_once('@').unwrap().1);
    let again = registry.pull(&dir.path().join("digest"), &host, &by_digest, Some("secret")).await.unwrap();
    assert_eq!((again.id, again.layers), (pulled.id, pulled.layers));

    let denied = |name: &str, why: &str| {
        format!(
            "failed to resolve reference {name:?}: pull access denied, repository does not exist or may require authorization: {why}"
        )
    };
    let missing = |name: &str| format!("failed to resolve reference {name:?}: {name}: not found");
    let name = |rest: &str| format!("{host}/{rest}");
    for (wanted, key, expected) in [
        ("team/app:v1", None, denied(&name("team/app:v1"), "no basic auth credentials")),
        ("team/app:v1", Some("wrong"), denied(&name("team/app:v1"), "authorization failed")),
        ("team/app:v2", Some("secret"), missing(&name("team/app:v2"))),
        ("team/none:v1", Some("secret"), missing(&name("team/none:v1"))),
    ] {
        let failed = registry.pull(&dir.path().join("bad"), &host, wanted, key).await.unwrap_err();
        assert_eq!(failed.to_string(), expected);
    }
    // A registry with an unknown CA is rejected.
    let store = Store::open(&dir.path().join("stranger")).unwrap();
    let puller_without_ca = Puller::new(store, registry.settings(&host, ""));
    let failed =
        puller_without_ca.pull(&Reference::parse(&name("team/app:v1")).unwrap(), None).await.unwrap_err();
    assert!(failed.to_string().contains("invalid peer certificate"), "{failed}");
    // Unless verification is disabled.
    let store = Store::open(&dir.path().join("careless")).unwrap();
    let insecure_puller = Puller::new(store, registry.settings(&host, "insecure_skip_verify: true"));
    let key = credentials("secret");
    let pulled =
        insecure_puller.pull(&Reference::parse(&name("team/app:v1")).unwrap(), Some(&key)).await.unwrap();
    assert_eq!(pulled.tags.iter().next().unwrap(), &name("team/app:v1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_an_interrupted_pull() {
    let Some(registry) = Registry::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let proxy = DisconnectProxy::disconnect_after(&registry, 3, registry.size / 5).await;
    let pulled = registry.pull(dir.path(), &proxy.host, "team/app:v1", Some("secret")).await.unwrap();
    assert_eq!(proxy.disconnect_count.load(Ordering::SeqCst), 0, "all planned disconnects happened");
    let layer = dir.path().join("layers").join(&pulled.layers[0]);
    let content = std::fs::read(layer.join("bin/busybox")).unwrap();
    assert!(content == std::fs::read("/bin/busybox").unwrap(), "pulled content equals pushed content");
    // Received data is not fetched again. Each interruption loses a little.
    let passed = proxy.passed.load(Ordering::SeqCst);
    assert!(passed < registry.size + registry.size / 2, "{passed} bytes for {}", registry.size);
}

/// The environment variable with the arguments of the child process: store directory, registry
/// host, settings file.
const PULL_ARGS_ENV: &str = "SKIFF_TEST_PULLS";

/// Not a test by itself: the child process that [`killed_pull_leaves_no_partial_image`] kills.
#[tokio::test(flavor = "multi_thread")]
async fn pulls_until_killed() {
    let Ok(pull_args) = std::env::var(PULL_ARGS_ENV) else { return };
    let [dir, host, settings] = pull_args.split(' ').collect::<Vec<_>>()[..] else { panic!("{pull_args}") };
    let puller = Puller::new(
        Store::open(Path::new(dir)).unwrap(),
        RegistrySettings::read(Path::new(settings)).unwrap(),
    );
    let key = credentials("secret");
    let reference = Reference::parse(&format!("{host}/team/app:v1")).unwrap();
    let pulled = puller.pull(&reference, Some(&key)).await;
    panic!("the pull was not killed: {pulled:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_pull_leaves_no_partial_image() {
    let Some(registry) = Registry::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    // The proxy blocks in the middle of the layer.
    let proxy = DisconnectProxy::block_after(&registry, registry.size / 2).await;
    registry.settings(&proxy.host, &format!("ca_file: {}", registry.ca().display()));
    let settings = registry.dir.path().join("registries.yaml");
    let pull_args = format!("{} {} {}", dir.path().display(), proxy.host, settings.display());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "pulls_until_killed"]).env(PULL_ARGS_ENV, pull_args);
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = tokio::time::Instant::now();
    let has_part = || std::fs::read_dir(dir.path().join("tmp")).is_ok_and(|mut files| files.next().is_some());
    while proxy.passed.load(Ordering::SeqCst) < registry.size / 2 || !has_part() {
        assert!(
            started.elapsed() < STARTUP_TIMEOUT && child.try_wait().unwrap().is_none(),
            "the child did not reach the middle of the layer"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert_eq!(store.images().unwrap(), []);
    assert_eq!(std::fs::read_dir(dir.path().join("layers")).unwrap().count(), 0);
    store.clean();
    let pulled = registry.pull(dir.path(), &registry.host, "team/app:v1", Some("secret")).await.unwrap();
    let content =
        std::fs::read(dir.path().join("layers").join(&pulled.layers[0]).join("bin/busybox")).unwrap();
    assert!(content == std::fs::read("/bin/busybox").unwrap(), "pulled content equals pushed content");
    assert_eq!(std::fs::read_dir(dir.path().join("tmp")).unwrap().count(), 0);
}

/// A small tmpfs that is unmounted on drop.
struct SmallFilesystem(tempfile::TempDir);

impl SmallFilesystem {
    fn mount() -> Option<SmallFilesystem> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(dir.path()).status();
        mounted.is_ok_and(|status| status.success()).then_some(SmallFilesystem(dir))
    }
}

impl Drop for SmallFilesystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_error_names_the_path() {
    let Some(registry) = Registry::start() else { return };
    let Some(small) = SmallFilesystem::mount() else { return eprintln!("skipped: cannot mount") };
    let at = small.0.path();
    let failed = registry.pull(at, &registry.host, "team/app:v1", Some("secret")).await.unwrap_err();
    let cause = std::error::Error::source(&failed).map(ToString::to_string).unwrap_or_default();
    assert!(cause.contains("No space left on device"), "{failed}: {cause}");
    assert!(failed.to_string().contains(&at.display().to_string()), "{failed}");
}

/// A self-signed certificate is accepted only if exactly this certificate is configured.
#[tokio::test(flavor = "multi_thread")]
async fn accepts_only_the_configured_self_signed_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let own = |name: &str| {
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    };
    let (shown, other, misnamed) = (own("127.0.0.1"), own("127.0.0.1"), own("registry.example"));
    for (served, trusted, is_good) in
        [(&shown, &shown, true), (&shown, &other, false), (&misnamed, &misnamed, false)]
    {
        let certificate = pki::CertKeyPair { cert_pem: served.0.clone(), key_pem: served.1.clone() };
        let tls = pki::server_config(pki::ServingCertificate::new(&certificate).unwrap(), &[]).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let tls_server = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
            while let Ok((connection, _)) = listener.accept().await {
                let Ok(mut stream) = tls_server.accept(connection).await else { continue };
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await;
                let _ = stream.shutdown().await;
            }
        });
        let (file, authority) = (dir.path().join("registries.yaml"), dir.path().join("ca.pem"));
        std::fs::write(&authority, &trusted.0).unwrap();
        let text = format!("configs:\n  '{host}':\n    tls: {{ca_file: {}}}\n", authority.display());
        std::fs::write(&file, text).unwrap();
        let store = Store::open(&dir.path().join("images")).unwrap();
        let puller = Puller::new(store, RegistrySettings::read(&file).unwrap());
        let name = Reference::parse(&format!("{host}/team/app:v1")).unwrap();
        let failed = puller.pull(&name, None).await.unwrap_err().to_string();
        let expected = if is_good { "not found" } else { "invalid peer certificate" };
        assert!(failed.contains(expected), "{failed}");
    }
}

/// All settings of `registries.yaml`: a mirror with another host name, rewritten repository names,
/// a client certificate and a password.
#[tokio::test(flavor = "multi_thread")]
async fn uses_mirrors_with_rewrite_and_client_certificate() {
    let Some(registry) = Registry::start_with(", clientcas: [DIR/ca.pem]") else { return };
    let (host, at) = (&registry.host, |name: &str| registry.dir.path().join(name).display().to_string());
    let dir = tempfile::tempdir().unwrap();
    let attempts = std::cell::Cell::new(0);
    let pull = async |mirror: &str, tls: &str, auth: &str| {
        attempts.set(attempts.get() + 1);
        let text = format!(
            "mirrors:\n  registry.invalid:\n    endpoint: ['{mirror}']\n    rewrite: {{'^other/(.*)$': 'team/$1'}}\n\
             configs:\n  '{host}':\n    tls: {{{tls}}}\n    auth: {{{auth}}}\n"
        );
        let path = dir.path().join("registries.yaml");
        std::fs::write(&path, text).unwrap();
        let store = Store::open(&dir.path().join(attempts.get().to_string())).unwrap();
        let puller = Puller::new(store, RegistrySettings::read(&path).unwrap());
        puller.pull(&Reference::parse("registry.invalid/other/app:v1").unwrap(), None).await
    };
    let known = format!("ca_file: {}", at("ca.pem"));
    let client_cert = format!("cert_file: {}, key_file: {}", at("tls/client.crt"), at("tls/client.key"));
    let both = format!("{known}, {client_cert}");
    let password = "username: me, password: secret";
    for (tls, auth) in [
        (&both, password),
        (&both, "auth: bWU6c2VjcmV0"),
        (&format!("insecure_skip_verify: true, {client_cert}"), password),
    ] {
        let pulled = pull(&format!("https://{host}"), tls, auth).await.unwrap();
        assert_eq!(pulled.tags.iter().next().unwrap(), "registry.invalid/other/app:v1");
    }
    // A mirror URL may include the path `/v2/`. With a wrong path, the mirror does not have the
    // image.
    assert!(pull(&format!("https://{host}/v2/"), &both, password).await.is_ok());
    let place = |path: &str| format!("https://{host}{path}");
    for (mirror, tls, auth) in [
        (place(""), &known, password),
        (place(""), &both, "username: me, password: wrong"),
        (place(""), &client_cert, password),
        (place("/elsewhere"), &both, password),
    ] {
        // The registry itself is tried last; its host does not exist.
        let failed = pull(&mirror, tls, auth).await.unwrap_err().to_string();
        assert!(failed.contains("https://registry.invalid/v2/other/app/manifests/v1"), "{failed}");
    }
    let missing = format!("{known}, cert_file: {}, key_file: /no/such", at("tls/client.crt"));
    let failed = pull(&place(""), &missing, password).await.unwrap_err();
    assert!(failed.to_string().contains("/no/such"), "{failed}");
}

use reconcile::{Client, Clock};
use tokio::sync::watch;

use super::*;

/// A plugin directory whose only plugin is the shell.
fn plugin_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::symlink("/bin/sh", dir.path().join("sh")).expect("a shell");
    dir
}

fn provider(script: &str) -> Value {
    json!({
        "name": "sh", "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "matchImages": ["*.example:5000"],
        "defaultCacheDuration": "10m", "args": ["-c", script], "env": [{"name": "WORD", "value": "sesame"}],
    })
}

/// Appends each request to a file as one line and prints this response.
fn recording_script(dir: &Path, answer: &str) -> String {
    let log = dir.join("asked");
    format!("cat >> {0}; echo >> {0}; cat <<END\n{answer}\nEND\n", log.display())
}

fn answer(kind: &str, more: &str) -> String {
    format!(
        r#"{{"kind": "CredentialProviderResponse", "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
           "cacheKeyType": "{kind}", {more} "auth": {{"a.example:5000": {{"username": "me", "password": "$WORD"}}}}}}"#
    )
}

fn recorded_requests(dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("asked")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn providers(dir: &Path, provider: Value) -> Providers {
    Providers::new(Config { plugin_dir: dir.to_owned(), providers: vec![provider] })
}

#[tokio::test]
async fn responses_are_cached_by_cache_key_type_and_duration() {
    let check = async |kind: &str, more: &str, expected: usize| {
        let dir = plugin_dir();
        let provider = provider(&recording_script(dir.path(), &answer(kind, more)));
        let all = providers(dir.path(), provider);
        for image in ["a.example:5000/x", "a.example:5000/x", "a.example:5000/y", "b.example:5000/x"] {
            let found = all
                .fetch_credentials(&all.config.providers[0], &all.caches[0], image, &PullIdentity::default())
                .await;
            let found = found.expect("an answer");
            assert_eq!(found, json!({"a.example:5000": {"username": "me", "password": "sesame"}}));
        }
        let requests = recorded_requests(dir.path());
        assert_eq!(requests.len(), expected, "{kind} {more}: {requests:?}");
        let version = "credentialprovider.kubelet.k8s.io/v1";
        let first =
            json!({"kind": "CredentialProviderRequest", "apiVersion": version, "image": "a.example:5000/x"});
        assert_eq!(requests[0], first);
    };
    check("Image", "", 3).await;
    check("Registry", "", 2).await;
    check("Global", "", 1).await;
    check("Registry", r#""cacheDuration": "1h0m0s","#, 2).await;
    check("Global", r#""cacheDuration": "0s","#, 4).await;
}

#[tokio::test]
async fn errors_do_not_contain_credentials() {
    let check = async |script: &str, expected: &str| {
        let dir = plugin_dir();
        let all = providers(dir.path(), provider(script));
        let identity = PullIdentity::default();
        let response =
            all.fetch_credentials(&all.config.providers[0], &all.caches[0], "a.example:5000/x", &identity);
        let error = response.await.expect_err("a failure");
        assert!(error.contains(expected) && !error.contains("sesame"), "{error}");
    };
    check("echo no luck >&2; exit 3", "plugin sh for image a.example:5000/x: exit status: 3: no luck").await;
    check("echo '{\"password\": \"sesame\"'", "error decoding credential provider plugin response").await;
    check(&format!("cat <<END\n{}\nEND", answer("Moon", "")), "not return a valid cacheKeyType: Moon").await;
    let other = answer("Image", "").replace("k8s.io/v1", "k8s.io/v1beta1");
    check(&format!("cat <<END\n{other}\nEND"), "actual apiVersion:credentialprovider.kubelet.k8s.io/v1beta1")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn service_account_tokens_are_cached_by_account_or_token() {
    let dir = plugin_dir();
    let (_stop, shutdown) = watch::channel(false);
    let server =
        apiserver::start_in_directory(&dir.path().join("server"), shutdown.clone()).await.expect("a server");
    let client = Client::new(server.local(), "kubelet");
    let ctx = Ctx::new(client.clone(), Clock::default(), shutdown);
    let metadata = |name: &str| json!({"name": name, "namespace": "default", "annotations": {"example.com/role": "reader"}});
    let account: ServiceAccount =
        serde_json::from_value(json!({"metadata": metadata("own")})).expect("an account");
    let account = client.create(&account).await.expect("created");
    let pod = json!({
        "metadata": metadata("web"),
        "spec": {
            "serviceAccountName": "own", "automountServiceAccountToken": false,
            "containers": [{"name": "main", "image": "a.example:5000/x"}],
        }
    });
    let pod: Pod = client.create(&serde_json::from_value(pod).expect("a pod")).await.expect("created");
    let mut provider = provider(&recording_script(dir.path(), &answer("Image", "")));
    let attributes = |required: &str, cache: &str| {
        json!({
            "serviceAccountTokenAudience": "registry", "requireServiceAccount": true, "cacheType": cache,
            "requiredServiceAccountAnnotationKeys": [required], "optionalServiceAccountAnnotationKeys": ["none"],
        })
    };
    provider["tokenAttributes"] = attributes("example.com/role", "ServiceAccount");
    let all = providers(dir.path(), provider.clone());
    for _ in 0..2 {
        let keys = all.keys(&ctx, &pod, "a.example:5000/x:1").await;
        let [key] = &keys[..] else { panic!("expected one credential, got {}", keys.len()) };
        assert_eq!((key.auth.username.as_str(), key.auth.password.as_str()), ("me", "sesame"));
        assert_eq!(key.source, Some(PullSecret::account("default", "own", account.uid())));
    }
    // A different port, host or image: no provider matches.
    for image in ["a.example/x", "busybox", "b.a.example:5000/x"] {
        assert!(all.keys(&ctx, &pod, image).await.is_empty(), "{image}");
    }
    let requests = recorded_requests(dir.path());
    assert_eq!(requests.len(), 1, "the response is cached for the account");
    assert_eq!(requests[0]["serviceAccountAnnotations"], json!({"example.com/role": "reader"}));
    assert_eq!(text(&requests[0], "serviceAccountToken").split('.').count(), 3, "a token");

    // With cache type `Token`, every new token has its own cache entry.
    provider["tokenAttributes"] = attributes("example.com/role", "Token");
    let all = providers(dir.path(), provider.clone());
    let now = ctx.clock.now().as_second();
    assert_eq!(all.keys(&ctx, &pod, "a.example:5000/x:1").await.len(), 1, "{now}");
    assert_eq!(recorded_requests(dir.path()).len(), 2);
    // A service account without the required annotation gets no credentials.
    provider["tokenAttributes"] = attributes("example.com/other", "Token");
    let all = providers(dir.path(), provider.clone());
    assert!(all.keys(&ctx, &pod, "a.example:5000/x:1").await.is_empty());
    // The token may be returned as the password only with cache type `Token`.
    let echo = r#"token=$(sed 's/.*"serviceAccountToken":"\([^"]*\)".*/\1/'); cat <<END
{"kind": "CredentialProviderResponse", "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "cacheKeyType": "Image",
 "auth": {"a.example:5000": {"username": "me", "password": "$token"}}}
END"#;
    for (cache, expected) in [("ServiceAccount", 0), ("Token", 1)] {
        provider["args"] = json!(["-c", echo]);
        provider["tokenAttributes"] = attributes("example.com/role", cache);
        let all = providers(dir.path(), provider.clone());
        assert_eq!(all.keys(&ctx, &pod, "a.example:5000/x:1").await.len(), expected, "{cache}");
    }
}

#[test]
fn invalid_provider_config_is_rejected() {
    let dir = plugin_dir();
    let file = dir.path().join("config.yaml");
    let read = |providers: Value| {
        let config = json!({"kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1", "providers": providers});
        std::fs::write(&file, config.to_string()).expect("written");
        Config::read(&file, dir.path()).map(|config| config.providers.len())
    };
    assert_eq!(read(json!([provider("")])), Ok(1));
    let check = |field: &str, value: Value, expected: &str| {
        let mut provider = provider("");
        provider[field] = value;
        let error = read(json!([provider])).expect_err("a mistake");
        assert!(error.contains(expected), "{error}");
    };
    check("name", json!("a/b"), "providers.name: Invalid value: \"a/b\": provider name cannot contain '/'");
    check("name", json!("none"), "plugin binary executable");
    check("apiVersion", json!("v1"), "providers.apiVersion: Unsupported value: \"v1\"");
    check("matchImages", json!([]), "providers.matchImages: Required value");
    check("defaultCacheDuration", json!("-1s"), "providers.defaultCacheDuration");
    check(
        "tokenAttributes",
        json!({}),
        "providers.tokenAttributes.serviceAccountTokenAudience: Required value",
    );
    let attributes = json!({"serviceAccountTokenAudience": "a", "requireServiceAccount": true});
    check("tokenAttributes", attributes, "providers.tokenAttributes.cacheType: Unsupported value: \"\"");
    let twice = read(json!([provider(""), provider("")])).expect_err("a mistake");
    assert!(twice.ends_with("providers.name: Duplicate value: \"sh\""), "{twice}");
    assert!(read(json!([])).expect_err("a mistake").contains("at least 1 item in plugins"));
    std::fs::write(&file, "kind: Pod\n").expect("written");
    assert!(
        Config::read(&file, dir.path())
            .expect_err("a mistake")
            .contains("expected kind CredentialProviderConfig")
    );
    let none = Config::read(&file, &dir.path().join("none")).expect_err("a mistake");
    assert!(none.starts_with("plugin binary directory"), "{none}");
    // All configuration files of a directory, sorted by name.
    std::fs::remove_file(&file).expect("removed");
    std::fs::create_dir(dir.path().join("configs")).expect("made");
    let config = json!({"kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1", "providers": [provider("")]});
    std::fs::write(dir.path().join("configs/a.json"), config.to_string()).expect("written");
    std::fs::write(dir.path().join("configs/notes"), "none").expect("written");
    let read = Config::read(&dir.path().join("configs"), dir.path());
    assert_eq!(read.expect("read").providers, [provider("")]);
}

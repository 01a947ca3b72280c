use super::*;

fn secret(text: &str) -> PullSecret {
    let mut words = text.split('/').map(str::to_owned);
    let mut next = || words.next().unwrap_or_default();
    PullSecret { namespace: next(), name: next(), uid: next(), hash: next() }
}

fn pulled_image(text: &str) -> PulledImage {
    let mut record = json!({});
    match text {
        "" => return PulledImage::default(),
        "pulling" => return PulledImage { is_pulling: true, record: None },
        "unknown" => {}
        "all" => drop(record_secret(&mut record, "r.example/a:9", None)),
        "full" => {
            for i in 0..MAX_RECORDED_SECRETS {
                record_secret(&mut record, "r.example/a", Some(&secret(&format!("ns/many/{i}/h{i}"))));
            }
        }
        secrets => {
            for one in secrets.split(' ') {
                record_secret(&mut record, "r.example/a@sha256:1", Some(&secret(one)));
            }
        }
    }
    PulledImage { record: Some(record), is_pulling: false }
}

#[track_caller]
fn check(text: &str, secrets: &str, expected: &str) {
    let secrets: Vec<PullSecret> = secrets.split_whitespace().map(secret).collect();
    let found =
        match evaluate_access(&VerificationPolicy::default(), "r.example/a:1", &pulled_image(text), &secrets)
        {
            PullDecision::Allowed => "usable".to_owned(),
            PullDecision::MustPull => "unproven".to_owned(),
            PullDecision::AllowedBy(one) => {
                format!("by {}/{}/{}/{}", one.namespace, one.name, one.uid, one.hash)
            }
        };
    assert_eq!(found, expected, "{text} {secrets:?}");
}

#[test]
fn present_image_requires_a_matching_pull_secret() {
    // Preloaded, or pulled without credentials.
    check("", "", "usable");
    check("all", "", "usable");
    // Pulled by this node with unknown credentials.
    check("pulling", "ns/s/1/h", "unproven");
    check("unknown", "ns/s/1/h", "unproven");
    check("ns/s/1/h", "", "unproven");
    check("ns/s/1/h", "ns/s/1/h", "usable");
    // Another secret with the same credentials; the same secret with new credentials; another
    // secret of that name.
    check("ns/s/1/h", "ns/other/2/h", "by ns/other/2/h");
    check("ns/s/1/h", "else/s/3/h", "by else/s/3/h");
    check("ns/s/1/h", "ns/s/1/new", "by ns/s/1/new");
    check("ns/s/1/h", "ns/s/2/new", "unproven");
    check("ns/s/1/h", "ns/a/4/x ns/b/5/y ns/s/1/h", "usable");
    check("ns/s/1/h ns/t/2/i", "ns/t/2/i", "usable");
    // Missing hashes are not equal.
    check("ns/s/1/", "ns/t/2/", "unproven");
    // Service accounts are not secrets. They match by namespace, name and UID.
    check("ns/a/1/", "ns/a/1/", "usable");
    check("ns/a/1/", "ns/a/2/", "unproven");
    check("ns/a/1/", "ns/a/1/h", "unproven");
    check("ns/a/1/h", "ns/a/1/", "unproven");
    check("ns/a/1/ ns/s/2/h", "ns/s/2/h", "usable");
    check("full", "ns/other/x/h7", "usable");
    check("full", "ns/many/7/new", "unproven");
}

#[test]
fn image_names_are_verified_one_by_one() {
    let known = pulled_image("all");
    let policy = VerificationPolicy::default();
    assert_eq!(evaluate_access(&policy, "r.example/a:2", &known, &[]), PullDecision::Allowed);
    assert_eq!(evaluate_access(&policy, "r.example/b:1", &known, &[]), PullDecision::MustPull);
    let always = VerificationPolicy { verify: CredentialVerification::Always, ..policy };
    assert_eq!(
        evaluate_access(&always, "r.example/b:1", &PulledImage::default(), &[]),
        PullDecision::MustPull
    );
}

#[test]
fn records_remain_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let policy = VerificationPolicy::default();
    let now: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
    let auth = AuthConfig { username: "me".into(), password: "sesame".into(), ..AuthConfig::default() };
    let own = PullSecret { hash: credential_hash(&auth), ..secret("ns/s/1") };
    let (image, id) = ("r.example/a:1", "sha256:1");
    let may = |secrets: &[PullSecret]| {
        ImagePullRecords::open(dir.path()).is_access_allowed(&policy, image, id, secrets, now)
    };

    assert!(may(&[]), "the image was preloaded");
    let pulled = ImagePullRecords::open(dir.path());
    pulled.record_pull_intent(image).unwrap();
    pulled.record_pull_intent(image).unwrap();
    assert!(!may(&[]), "the image is being pulled");
    pulled.cancel_pull(image);
    assert!(!may(&[]), "another pull is in progress");
    pulled.cancel_pull(image);
    assert!(!may(&[]), "a canceled pull may still complete");
    pulled.record_pull_intent(image).unwrap();
    pulled.record_pull_result(image, Some((id, Some(&own))), now);
    assert!(!may(&[]) && may(std::slice::from_ref(&own)));
    assert_eq!(pulled.read_files("pulling"), []);

    let files = pulled.read_files("pulled");
    expect_test::expect![[r#"{"apiVersion":"kubelet.config.k8s.io/v1beta1","credentialMapping":{"r.example/a":{"kubernetesSecrets":[{"credentialHash":"HASH","name":"s","namespace":"ns","uid":"1"}]}},"imageRef":"sha256:1","kind":"ImagePulledRecord","lastUpdatedTime":"2026-01-02T03:04:05Z"}"#]]
    .assert_eq(&files[0].1.to_string().replace(&own.hash, "HASH"));
    assert!(!files[0].1.to_string().contains("sesame"));

    // A pod that used the image is recorded.
    let same_credential = PullSecret { hash: own.hash.clone(), ..secret("else/t/2") };
    assert!(may(std::slice::from_ref(&same_credential)));
    let changed = PullSecret { hash: "other".into(), ..same_credential };
    assert!(may(std::slice::from_ref(&changed)));

    // A record that cannot be read grants no access.
    for broken in ["{", r#"{"credentialMapping": []}"#, r#"{"credentialMapping": {"r.example/a": 1}}"#] {
        std::fs::write(&files[0].0, broken).unwrap();
        assert!(!may(std::slice::from_ref(&own)), "{broken}");
        pulled.record_pull_intent(image).unwrap();
        pulled.record_pull_result(image, Some((id, None)), now);
        assert!(may(&[]));
    }

    pulled.prune(&[id], now + jiff::SignedDuration::from_secs(1));
    assert_eq!(pulled.read_files("pulled").len(), 1);
    pulled.prune(&[], now);
    assert_eq!(pulled.read_files("pulled").len(), 1, "the record is newer than the list of images");
    pulled.prune(&[], now + jiff::SignedDuration::from_millis(999));
    assert_eq!(pulled.read_files("pulled").len(), 1, "the record may be newer");
    pulled.prune(&[], now + jiff::SignedDuration::from_secs(1));
    assert_eq!(pulled.read_files("pulled"), []);
}

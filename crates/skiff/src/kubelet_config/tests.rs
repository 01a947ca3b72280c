use super::*;

#[test]
fn any_shutdown_field_clears_the_default() {
    let check = |arguments: &[&str], expected: &[(i32, i64)], is_default: bool| {
        let mut config = config();
        config.settings.shutdown = kubelet::periods(10, 5);
        config.settings.is_shutdown_default = true;
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        apply(&arguments, &mut config).expect("applied");
        let settings = &config.settings;
        let found: Vec<_> = settings.shutdown.iter().map(|one| (one.priority, one.seconds)).collect();
        assert_eq!((&found[..], settings.is_shutdown_default), (expected, is_default), "{arguments:?}");
    };
    check(&[], &[(0, 5), (2_000_000_000, 5)], true);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kubelet.yaml");
    let file = |fields: &str| {
        let head = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\n";
        std::fs::write(&path, format!("{head}{fields}")).expect("written");
        format!("config={}", path.display())
    };
    check(&[&file("shutdownGracePeriod: 30s\n")], &[(0, 30), (2_000_000_000, 0)], false);
    check(&[&file("shutdownGracePeriod: 0s\n")], &[], false);
    check(
        &[&file("shutdownGracePeriodByPodPriority: [{priority: 7, shutdownGracePeriodSeconds: 3}]\n")],
        &[(7, 3)],
        false,
    );
}

fn config() -> Config {
    Config {
        settings: kubelet::Settings {
            node_name: "here".into(),
            node_ip: crate::address::fixed(None),
            second_ip: None,
            pods: PathBuf::new(),
            root: PathBuf::new(),
            logs: kubelet::PodLogs::within(PathBuf::new()),
            cluster_domain: String::new(),
            cluster_dns: Vec::new(),
            resolver: kubelet::ResolverConfig::Host,
            memory: 8 << 30,
            kubelet_config: kubelet::KubeletConfig::default(),
            shutdown: Vec::new(),
            is_shutdown_default: false,
            manifests: None,
            proxied: false,
        },
        presentation: kubelet::NodeRegistration::default(),
        api: None,
        object_manager: None,
        host_shutdown: kubelet::HostShutdown::default(),
    }
}

#[test]
fn flags_override_the_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kubelet.yaml");
    let text = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nmaxPods: 5\n\
        staticPodPath: /etc/pods\nevictionHard:\n  memory.available: 200Mi\n  nodefs.available: 7%\n\
        imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages\n\
        preloadedImagesVerificationAllowlist: [registry.example/*]\ncontainerLogMaxSize: 1Mi\nimageMinimumGCAge: 1m30s\nimageMaximumGCAge: 24h\n\
        shutdownGracePeriod: 1m30s\nshutdownGracePeriodCriticalPods: 10s\nsystemReserved:\n  cpu: 500m\n  memory: 1Gi\n\
        kubeReserved:\n  memory: 1Gi\nenforceNodeAllocatable: [none]\nseccompDefault: false\n\
        resolvConf: ''\n";
    std::fs::write(&path, text).expect("written");
    let mut config = config();
    let arguments = [
        "max-pods=7",
        "register-node=false",
        "register-with-taints=a=b:NoSchedule,c:NoExecute",
        "node-labels=x=y",
        "seccomp-default=true",
        "resolv-conf=/first",
        "resolv-conf=/last",
        "cloud-provider=external",
        "eviction-soft=nodefs.available<1Gi",
        "eviction-soft-grace-period=nodefs.available=1m30s",
        "eviction-max-pod-grace-period=20",
        "eviction-pressure-transition-period=1m",
        "node-status-update-frequency=1m",
        "pod-max-pids=100",
        "eviction-minimum-reclaim=nodefs.available=500Mi,memory.available=5%",
        "serialize-image-pulls=true",
        "provider-id=cloud://1",
        "kube-reserved=memory=1Mi,pid=5",
    ];
    let mut arguments: Vec<String> = arguments.map(str::to_owned).to_vec();
    arguments.push(format!("config={}", path.display()));
    apply(&arguments, &mut config).expect("understood");
    let presentation = &config.presentation;
    let taints: Vec<_> =
        presentation.taints.iter().map(|taint| (&*taint.key, taint.value.as_deref())).collect();
    assert_eq!(taints, [("a", Some("b")), ("c", None)]);
    assert!(
        presentation.is_registered_externally
            && presentation.has_external_cloud_provider
            && presentation.labels["x"] == "y"
    );
    assert_eq!(
        (
            presentation.provider_id.as_str(),
            presentation.status_update_frequency.map(|pause| pause.as_secs())
        ),
        ("cloud://1", Some(60))
    );
    assert_eq!(config.settings.kubelet_config.pod_pids_limit, 100);
    assert!(config.settings.kubelet_config.seccomp_default);
    assert_eq!(config.settings.resolver, kubelet::ResolverConfig::File("/last".into()));
    assert_eq!(config.presentation.max_pods, 7);
    assert_eq!(config.settings.manifests, Some(PathBuf::from("/etc/pods")));
    let limits = &config.settings.kubelet_config.hard_eviction;
    use kubelet::ThresholdValue::{Number, Percent};
    assert_eq!((limits.memory, limits.disk, limits.inodes), (Number(200 << 20), Percent(7), Number(0)));
    let soft = &config.settings.kubelet_config.soft_eviction;
    assert_eq!((soft.limits.disk, soft.grace_by_signal["nodefs.available"].as_secs()), (Number(1 << 30), 90));
    assert_eq!(
        (soft.max_pod_grace_seconds, config.settings.kubelet_config.pressure_transition_period.as_secs()),
        (20, 60)
    );
    let reclaim = &config.settings.kubelet_config.minimum_reclaim;
    assert_eq!((reclaim.disk, reclaim.memory, reclaim.inodes), (Number(500 << 20), Percent(5), Number(0)));
    assert_eq!(config.settings.kubelet_config.max_parallel_image_pulls, Some(1));
    assert_eq!(config.settings.kubelet_config.max_log_bytes, 1 << 20);
    let expected_policy = kubelet::PullPolicy {
        verify: kubelet::CredentialVerification::NotAllowed,
        allowed: vec!["registry.example/*".to_owned()],
    };
    assert_eq!(config.settings.kubelet_config.pull_policy, expected_policy);
    let images = &config.settings.kubelet_config.image_gc;
    assert_eq!((images.min_age.as_secs(), images.max_age.as_secs()), (90, 86_400));
    let shutdown: Vec<_> =
        config.settings.shutdown.iter().map(|period| (period.priority, period.seconds)).collect();
    assert_eq!(shutdown, [(0, 80), (2_000_000_000, 10)]);
    let reserved = &config.presentation.reserved;
    let reserved_values = ["cpu", "memory", "pid"].map(|name| reserved.of(name));
    assert_eq!(reserved_values, [500, (1 << 30) + (1 << 20), 5]);
    assert_eq!(reserved.enforced.as_deref(), Some(&["none".to_owned()][..]));
}

/// Upstream's rule: setting one threshold clears the others, unless the file merges them with the
/// defaults.
#[test]
fn setting_one_threshold_clears_the_others() {
    use kubelet::ThresholdValue::{Number, Percent};
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kubelet.yaml");
    let head = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\n";
    let limits = |fields: &str, flags: &[&str]| {
        std::fs::write(&path, format!("{head}{fields}")).expect("written");
        let file = format!("config={}", path.display());
        let arguments: Vec<String> =
            [&*file].iter().chain(flags).map(|argument| (*argument).to_owned()).collect();
        let mut config = config();
        apply(&arguments, &mut config).expect("understood");
        let limits = config.settings.kubelet_config.hard_eviction;
        (limits.memory, limits.disk)
    };
    let (usual_memory, usual_disk) = (Number(100 << 20), Percent(10));
    let file = "evictionHard: {nodefs.available: 7%}\n";
    let merged = "evictionHard: {nodefs.available: 7%}\nmergeDefaultEvictionSettings: true\n";
    assert_eq!(limits("", &[]), (usual_memory, usual_disk));
    assert_eq!(limits(file, &[]), (Number(0), Percent(7)));
    assert_eq!(limits(merged, &[]), (usual_memory, Percent(7)));
    assert_eq!(limits(file, &["eviction-hard=memory.available<5"]), (Number(5), Number(0)));
    assert_eq!(limits(merged, &["eviction-hard=memory.available<5"]), (Number(5), Number(0)));
    let twice = ["eviction-hard=memory.available<5", "eviction-hard=nodefs.available<1%"];
    assert_eq!(limits("", &twice), (Number(5), Percent(1)));
}

/// The signals of upstream's defaults, and those that upstream accepts and ignores.
#[test]
fn accepts_all_upstream_eviction_signals() {
    use kubelet::ThresholdValue::{Number, Percent};
    let mut config = config();
    let all = "eviction-hard=memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<4%,imagefs.available<15%,\
        imagefs.inodesFree<3%,containerfs.available<2%,containerfs.inodesFree<1%,pid.available<10,\
        allocatableMemory.available<1Ki";
    apply(&[all.to_owned()], &mut config).expect("understood");
    let expected = kubelet::EvictionThresholds {
        inodes: Percent(4),
        image_inodes: Percent(3),
        processes: Number(10),
        pods_memory: Number(1024),
        ..kubelet::EvictionThresholds::default()
    };
    assert_eq!(config.settings.kubelet_config.hard_eviction, expected);
}

#[test]
fn applies_crash_loop_back_off_and_cpu_quota() {
    let check = |value: Value, expected: Result<i64, &str>| {
        let mut config = config();
        let done = set_field(&mut config, "crashLoopBackOff", &value).map_err(|error| error.to_string());
        let found = done.map(|()| config.settings.kubelet_config.max_restart_backoff.as_secs());
        assert_eq!(found, expected.map_err(str::to_owned));
    };
    let period = |text: &str| serde_json::json!({"maxContainerRestartPeriod": text});
    check(Value::Object(Default::default()), Ok(300));
    check(period("1m"), Ok(60));
    check(
        serde_json::json!({"maxContainerRestartPeriod": 60}),
        Err("maxContainerRestartPeriod must be a string such as 300s"),
    );
    check(period("0s"), Err("maxContainerRestartPeriod (got: 0 seconds) must be set between 1s and 300s"));
    check(period("6m"), Err("maxContainerRestartPeriod (got: 360 seconds) must be set between 1s and 300s"));
    let mut config = config();
    apply(&["cpu-cfs-quota=false".to_owned()], &mut config).expect("understood");
    assert!(!config.settings.kubelet_config.cpu_cfs_quota);
}

#[test]
fn validates_pod_logs_dir() {
    let check = |path: &str, expected: Result<&str, &str>| {
        let mut config = config();
        let done =
            set_field(&mut config, "podLogsDir", &Value::from(path)).map_err(|error| error.to_string());
        let found = done.map(|()| config.settings.logs.dir);
        assert_eq!(found, expected.map(PathBuf::from).map_err(str::to_owned));
    };
    check("/logs/pods", Ok("/logs/pods"));
    check("logs", Err("pod logs path \"logs\" must be absolute path"));
    check("/logs/../x", Err("pod logs path \"/logs/../x\" must be normalized"));
    check("/logs/", Err("pod logs path \"/logs/\" must be normalized"));
    check("/\u{e9}", Err("pod logs path \"/\u{e9}\" mut contains ASCII characters only"));
}

#[test]
fn reads_certificate_and_runtime_settings() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kubelet.yaml");
    let text = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nrotateCertificates: true\n\
        authentication: {x509: {clientCAFile: /ca}}\ntlsCertFile: /c\ntlsPrivateKeyFile: /k\n\
        containerRuntimeEndpoint: unix:///run/x.sock\npodsPerCore: 1\nnodeStatusMaxImages: -1\n\
        nodeLeaseDurationSeconds: 20\nnodeStatusReportFrequency: 1m\nmaxParallelImagePulls: 3\n";
    std::fs::write(&path, text).expect("written");
    let arguments = [format!("config={}", path.display()), "rotate-server-certificates=true".to_owned()];
    let expected = CertificateSettings {
        rotate_client: Some(true),
        request_serving: Some(true),
        client_ca: Some("/ca".into()),
        serving_files: Some(("/c".into(), "/k".into())),
    };
    assert_eq!(certificates(&arguments).expect("understood"), expected);
    assert_eq!(endpoint(&arguments).expect("understood").as_deref(), Some("unix:///run/x.sock"));
    let mut config = config();
    config.presentation.max_pods = 110;
    apply(&arguments, &mut config).expect("understood");
    let cores = u32::try_from(std::thread::available_parallelism().map_or(1, usize::from)).expect("few");
    let presentation = &config.presentation;
    assert_eq!((presentation.max_pods, presentation.max_reported_images), (cores.min(110), Some(-1)));
    assert_eq!(
        (presentation.lease_seconds, presentation.status_report_frequency.map(|every| every.as_secs())),
        (Some(20), Some(60))
    );
    assert_eq!(config.settings.kubelet_config.max_parallel_image_pulls, Some(3));
}

#[test]
fn reports_invalid_arguments() {
    let check = |argument: &str, expected: &str| {
        let error = apply(&[argument.to_owned()], &mut config()).expect_err("a mistake");
        assert!(format!("{error:#}").contains(expected), "{error:#}");
    };
    check("register-with-taints=a=b", "invalid taint effect: \"\"");
    check("cloud-provider=aws", "\"aws\" is not supported: only `external` is");
    check("node-labels=a", "\"a\" must be name=value");
    check("allowed-unsafe-sysctls=net.*,kernel.panic", "\"kernel.panic\" are not known to be namespaced");
    check("max-pods", "must be name=value");
    check("colour=red", "is not supported; supported names: allowed-unsafe-sysctls");
    check("max-pods=many", "--kubelet-arg maxPods: must be a number, got \"many\"");
    check("seccomp-default=yes", "must be true or false, got \"yes\"");
    check("eviction-hard=moon.phase<3%", "unknown eviction signal");
    check(
        "eviction-soft=memory.available<1Gi",
        "grace period must be specified for the soft eviction threshold",
    );
    check("container-log-max-size=x", "is not a quantity");
    check("minimum-image-ttl-duration=soon", "is not a duration such as 2m0s");
    check("image-gc-high-threshold=50", "80 must be less than imageGCHighThresholdPercent");
    check("enforce-node-allocatable=system-reserved", "(--system-reserved-cgroup) must be specified when");
    check("kube-reserved=example.com/gpu=1", "cannot reserve \"example.com/gpu\" resource");
    check("system-reserved=cpu=-1", "resource quantity for \"cpu\" cannot be negative: -1");
    check("system-reserved=memory=8Gi", "Resource \"memory\" has a reservation of 8589934592 but capacity");
    check(
        "image-credential-provider-config=/x",
        "and image-credential-provider-bin-dir must be set together",
    );
    check("config=/not/there", "cannot read /not/there");
}

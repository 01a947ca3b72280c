use super::*;

fn translate_container(config: &ContainerConfig, image: &ImageProcess) -> Result<spec::Container, String> {
    let pod = PodSandboxConfig {
        hostname: "web".into(),
        log_directory: "/logs".into(),
        linux: Some(LinuxPodSandboxConfig { cgroup_parent: "/skiff/pod1".into(), ..Default::default() }),
        ..Default::default()
    };
    let parts = ContainerInputs {
        id: "c1",
        image,
        layers_dir: "/layers".into(),
        layers: vec!["a".into()],
        directory: Path::new("/pod"),
        seccomp_dir: Path::new("/profiles"),
        volumes: &BTreeMap::from([("data:1".to_owned(), vec!["b".to_owned()])]),
        modules: &SecurityModules::default(),
    };
    container(config, &pod, parts)
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[track_caller]
fn check(command: &str, args: &str, expected: Result<&str, &str>) {
    let image = ImageProcess {
        entrypoint: Some(words("/entry -x")),
        cmd: Some(words("default")),
        ..ImageProcess::default()
    };
    let config = ContainerConfig { command: words(command), args: words(args), ..Default::default() };
    let found = translate_container(&config, &image).map(|spec| spec.args.join(" "));
    assert_eq!(found.as_deref().map_err(String::as_str), expected);
}

#[test]
fn command_and_args_override_the_image() {
    check("", "", Ok("/entry -x default"));
    check("", "mine", Ok("/entry -x mine"));
    check("sh -c", "", Ok("sh -c"));
    check("sh -c", "echo", Ok("sh -c echo"));
    let nothing = translate_container(&ContainerConfig::default(), &ImageProcess::default());
    assert_eq!(nothing.unwrap_err(), "no command specified");
}

#[test]
fn mounts_override_image_volumes() {
    let volumes = ["/b/", "/a", "a/../c", "/../c", "/mounted/", "/mounted/below"];
    let volumes = volumes.map(|path| (path.to_owned(), serde_json::json!({}))).into();
    let image = ImageProcess { cmd: Some(words("x")), volumes: Some(volumes), ..ImageProcess::default() };
    let mount = Mount { container_path: "/mounted".into(), host_path: "/x".into(), ..Default::default() };
    let config = ContainerConfig { mounts: vec![mount], ..Default::default() };
    assert_eq!(translate_container(&config, &image).unwrap().volumes, ["/c", "/a", "/b", "/mounted/below"]);
    let all = [("..".to_owned(), serde_json::json!({}))].into();
    let image = ImageProcess { cmd: Some(words("x")), volumes: Some(all), ..ImageProcess::default() };
    let error = translate_container(&config, &image).unwrap_err();
    assert_eq!(error, "the image declares the volume \"..\", which would hide its whole filesystem");
}

#[test]
fn resource_update_keeps_unset_fields() {
    let huge = |size: &str, limit| HugepageLimit { page_size: size.into(), limit };
    let present = LinuxContainerResources {
        cpu_shares: 512,
        memory_limit_in_bytes: 5,
        cpuset_cpus: "0-1".into(),
        hugepage_limits: vec![huge("2MB", 1), huge("1GB", 2)],
        unified: [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())].into(),
        ..Default::default()
    };
    let change = LinuxContainerResources {
        memory_limit_in_bytes: 7,
        hugepage_limits: vec![huge("2MB", 9)],
        unified: [("b".to_owned(), "3".to_owned())].into(),
        ..Default::default()
    };
    let expected = LinuxContainerResources {
        memory_limit_in_bytes: 7,
        hugepage_limits: vec![huge("1GB", 2), huge("2MB", 9)],
        unified: [("a".to_owned(), "1".to_owned()), ("b".to_owned(), "3".to_owned())].into(),
        ..present.clone()
    };
    assert_eq!(merge_resources(&present, &change), expected);
    assert_eq!(merge_resources(&present, &LinuxContainerResources::default()), present);
}

#[test]
fn environment_order_matches_containerd() {
    let image = ImageProcess {
        env: Some(words("Z=1 PATH=/bin B=2 A=1")),
        cmd: Some(words("x")),
        ..ImageProcess::default()
    };
    let pair = |key: &str, value: &str| KeyValue { key: key.into(), value: value.into() };
    let with = |envs: Vec<KeyValue>, tty: bool| {
        let config = ContainerConfig { envs, tty, ..Default::default() };
        translate_container(&config, &image).unwrap().env
    };
    let expected = ["PATH=/bin", "TERM=xterm", "HOSTNAME=web", "B=2", "A=1", "Z=3", "C=4"];
    assert_eq!(with(vec![pair("Z", "3"), pair("C", "4")], true), expected);
    let expected = ["PATH=/bin", "HOSTNAME=mine", "Z=1", "B=2", "A=1"];
    assert_eq!(with(vec![pair("HOSTNAME", "mine")], false), expected);
    let expected = ["PATH=/bin", "HOSTNAME=web", "Z=1", "A=1", "Y=2", "B=3"];
    assert_eq!(with(vec![pair("B", "1"), pair("Y", "2"), pair("B", "3")], false), expected);
}

#[test]
fn mounts_override_pod_files() {
    let image = ImageProcess { cmd: Some(words("x")), ..ImageProcess::default() };
    let own =
        Mount { container_path: "/etc/resolv.conf/".into(), host_path: "/mine".into(), ..Default::default() };
    let spec = translate_container(
        &ContainerConfig { mounts: vec![own], log_path: "c/0.log".into(), ..Default::default() },
        &image,
    )
    .unwrap();
    let mounts: Vec<_> =
        spec.mounts.iter().map(|mount| (mount.source.to_str().unwrap(), mount.target.as_str())).collect();
    let expected =
        [("/pod/hostname", "/etc/hostname"), ("/pod/hosts", "/etc/hosts"), ("/mine", "/etc/resolv.conf/")];
    assert_eq!(mounts, expected);
    assert_eq!((spec.cgroup.as_str(), spec.log), ("/skiff/pod1/c1", Some("/logs/c/0.log".into())));
}

#[test]
fn rejects_profile_paths_outside_the_directory() {
    let image = ImageProcess { cmd: Some(words("x")), ..ImageProcess::default() };
    let with = |reference: &str| {
        let seccomp = Some(SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: reference.into(),
        });
        let security_context = Some(LinuxContainerSecurityContext { seccomp, ..Default::default() });
        let linux = Some(LinuxContainerConfig { security_context, ..Default::default() });
        translate_container(&ContainerConfig { linux, ..Default::default() }, &image).map(|spec| spec.seccomp)
    };
    assert_eq!(with("a/b.json"), Ok(spec::Seccomp::File("/profiles/a/b.json".into())));
    assert_eq!(with("../x").unwrap_err(), "\"../x\" is not a seccomp profile of this node");
}

#[test]
fn writes_resolv_conf_in_order() {
    let dns = DnsConfig { servers: words("10.0.0.1 ::1"), searches: words("a b"), options: words("ndots:5") };
    assert_eq!(resolv_conf(&dns), "search a b\nnameserver 10.0.0.1\nnameserver ::1\noptions ndots:5\n");
    assert_eq!(resolv_conf(&DnsConfig::default()), "");
}

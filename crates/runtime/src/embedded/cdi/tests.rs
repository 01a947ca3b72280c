use super::*;

const VENDOR: &str = r#"
cdiVersion: "0.6.0"
kind: example.com/gpu
containerEdits:
  env: [ALL=yes]
devices:
- name: "0"
  containerEdits:
    env: [GPU=0, MODE=a=b]
    deviceNodes:
    - path: /dev/gpu0
      hostPath: /dev/null
    - {path: /dev/gpuctl, type: c, major: 195, minor: 255, permissions: rw, fileMode: 384, uid: 5, gid: 6}
    mounts:
    - {hostPath: /usr/lib/gpu, containerPath: /usr/lib/gpu, options: [ro, nosuid, nodev, rbind, rslave]}
    additionalGids: [0, 44]
- name: "1"
  containerEdits: {env: [GPU=1]}
- name: hooked
  containerEdits:
    hooks: [{hookName: createContainer, path: /bin/true, args: ["true", "x"], env: [A=b], timeout: 5}]
- name: mistaken
  containerEdits:
    hooks: [{hookName: afterLunch, path: /bin/true}]
- name: strange
  containerEdits:
    mounts: [{hostPath: tmpfs, containerPath: /tmp, type: tmpfs}]
"#;

fn directories() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["low", "high"] {
        std::fs::create_dir(dir.path().join(name)).expect("a directory");
    }
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("written");
    let json = |device: &str, env: &str| {
        serde_json::json!({"cdiVersion": "0.5.0", "kind": "example.com/net", "devices": [
            {"name": device, "containerEdits": {"env": [env]}},
        ]})
        .to_string()
    };
    write("low/vendor.yaml", VENDOR);
    write("low/net.json", &json("a", "FROM=low"));
    write("high/net.json", &json("a", "FROM=high"));
    write("low/one.json", &json("twice", "X=1"));
    write("low/two.json", &json("twice", "X=2"));
    write("low/broken.json", "{");
    write("low/readme.txt", VENDOR);
    dir
}

fn found(names: &str) -> Result<ContainerEdits, String> {
    let dir = directories();
    let (low, high, none) = (dir.path().join("low"), dir.path().join("high"), dir.path().join("none"));
    let requested: Vec<_> =
        names.split_whitespace().map(|name| CdiDevice { name: name.to_owned() }).collect();
    resolve_devices(&[&none, &low, &high], &requested)
}

#[track_caller]
fn check(names: &str, expected: Result<&str, &str>) {
    let env = found(names).map(|container_edits| container_edits.env.join(" "));
    assert_eq!(env.as_deref().map_err(String::as_str), expected);
}

#[test]
fn resolves_devices_by_name() {
    check("", Ok(""));
    check("example.com/gpu=0", Ok("ALL=yes GPU=0 MODE=a=b"));
    check("example.com/gpu=1 example.com/gpu=0 example.com/gpu=1", Ok("ALL=yes GPU=1 GPU=0 MODE=a=b"));
    check("example.com/net=a", Ok("FROM=high"));
    check("example.com/net=twice", Err("unresolvable CDI devices example.com/net=twice"));
    check(
        "example.com/gpu=0 example.com/gpu=7 nonsense",
        Err("unresolvable CDI devices example.com/gpu=7, nonsense"),
    );
    check("example.com/gpu=hooked", Ok("ALL=yes"));
    check("example.com/gpu=mistaken", Err("example.com/gpu=mistaken: hooks: unknown hook \"afterLunch\""));
    check(
        "example.com/gpu=strange",
        Err("example.com/gpu=strange: mounts: file systems of type \"tmpfs\" are not supported"),
    );
}

#[test]
fn applies_device_changes_to_a_container() {
    let container_edits = found("example.com/gpu=0").expect("edits");
    let mut config = ContainerConfig::default();
    container_edits.apply(&mut config);
    let security = config.linux.expect("linux").security_context.expect("security");
    assert_eq!(security.supplemental_groups, [44]);
    let mount = &config.mounts[0];
    assert_eq!((mount.container_path.as_str(), mount.readonly), ("/usr/lib/gpu", true));
    assert_eq!(mount.propagation(), MountPropagation::HostToContainer);
    let mut container = spec::Container {
        devices: vec![spec::Device { target: "/dev/gpu0".into(), ..Default::default() }],
        env: ["Z=1", "GPU=none", "A=2"].map(str::to_owned).into(),
        ..Default::default()
    };
    container_edits.apply_to_spec(&mut container);
    assert_eq!(container.env, ["Z=1", "GPU=0", "A=2", "ALL=yes", "MODE=a=b"]);
    let device_node = |numbers, mode, uid, gid| Some(spec::DeviceNode { numbers, mode, uid, gid });
    let expected = [
        spec::Device {
            source: "/dev/null".into(),
            target: "/dev/gpu0".into(),
            access: "rwm".into(),
            made: device_node(None, 0o666, 0, 0),
        },
        spec::Device {
            source: "/dev/gpuctl".into(),
            target: "/dev/gpuctl".into(),
            access: "rw".into(),
            made: device_node(Some((false, 195, 255)), 0o600, 5, 6),
        },
    ];
    assert_eq!(container.devices, expected);
    found("example.com/gpu=hooked").expect("edits").apply_to_spec(&mut container);
    let hook = spec::Hook {
        stage: spec::Stage::CreateContainer,
        path: "/bin/true".into(),
        args: vec!["true".into(), "x".into()],
        env: vec!["A=b".into()],
        timeout: Some(5),
    };
    assert_eq!(container.hooks, [hook]);
}

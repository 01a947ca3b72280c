use serde_json::json;

use super::*;

#[test]
fn plain_directory_is_not_a_mount_point() {
    let dir = tempfile::tempdir().expect("a directory");
    assert!(is_mount(Path::new("/proc")) && !is_mount(Path::new("/proc/1")));
    assert!(!is_mount(&dir.path().join("none")));
    std::fs::create_dir(dir.path().join("some")).expect("made");
    assert!(!is_mount(&dir.path().join("some")), "a plain directory is not a mount point");
}

#[test]
fn recursive_read_only_requires_runtime_support() {
    let check = |how: Option<&str>, is_supported, expected: Result<bool, &str>| {
        let mount = VolumeMount {
            name: "v".to_owned(),
            read_only: Some(true),
            recursive_read_only: how.map(str::to_owned),
            ..VolumeMount::default()
        };
        assert_eq!(
            is_recursive_read_only(&mount, is_supported),
            expected.map_err(str::to_owned),
            "{how:?} {is_supported}"
        );
    };
    check(None, true, Ok(false));
    check(Some("Disabled"), true, Ok(false));
    check(Some("IfPossible"), true, Ok(true));
    check(Some("IfPossible"), false, Ok(false));
    check(Some("Enabled"), true, Ok(true));
    let not = "volume \"v\" requested recursive read-only mount, but it is not supported by the runtime";
    check(Some("Enabled"), false, Err(not));
}

fn pod(spec: serde_json::Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"uid": "1"}, "spec": spec})).expect("a pod")
}

#[test]
fn only_used_volumes_are_set_up() {
    let mounts = |name: &str| json!([{"name": name, "mountPath": "/x"}]);
    let volumes = ["none", "main", "init", "look", "disk"].map(|name| json!({"name": name}));
    let pod = pod(json!({
        "initContainers": [{"name": "a", "volumeMounts": mounts("init")}],
        "containers": [
            {"name": "b", "volumeMounts": mounts("main")},
            {"name": "c", "volumeDevices": [{"name": "disk", "devicePath": "/dev/x"}]},
        ],
        "ephemeralContainers": [{"name": "d", "volumeMounts": mounts("look")}],
        "volumes": volumes,
    }));
    let names: Vec<&str> = used_volumes(&pod).map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["main", "init", "look", "disk"]);
}

#[test]
fn memory_volume_has_the_smallest_limit() {
    let check = |limits: [Option<&str>; 2], size_limit: Option<&str>, expected: i64| {
        let one = |limit: &Option<&str>| match limit {
            Some(limit) => json!({"name": "c", "resources": {"limits": {"memory": limit}}}),
            None => json!({"name": "c"}),
        };
        let pod = pod(json!({"containers": limits.iter().map(one).collect::<Vec<_>>()}));
        let empty = serde_json::from_value(json!({"medium": "Memory", "sizeLimit": size_limit}));
        assert_eq!(
            memory_size_limit(&pod, &empty.expect("a volume"), 1 << 30),
            expected,
            "{limits:?} {size_limit:?}"
        );
    };
    check([None, None], None, 1 << 30);
    check([Some("64Mi"), Some("32Mi")], None, 96 << 20);
    // A container without a limit may use all memory.
    check([Some("64Mi"), None], None, 1 << 30);
    check([Some("2Gi"), Some("2Gi")], None, 1 << 30);
    check([Some("64Mi"), Some("32Mi")], Some("1Mi"), 1 << 20);
    check([Some("64Mi"), Some("32Mi")], Some("0"), 96 << 20);
    check([Some("64Mi"), Some("32Mi")], Some("1Gi"), 96 << 20);
    check([None, None], Some("2Gi"), 1 << 30);
}

#[test]
fn every_container_has_a_hosts_file() {
    let check = |host_network: bool, own: Option<&str>, expected: &str| {
        let mounts: Vec<_> = own.iter().map(|path| json!({"name": "v", "mountPath": path})).collect();
        let container = json!({"name": "c", "volumeMounts": mounts});
        let pod = pod(json!({"hostNetwork": host_network, "containers": [container]}));
        let volume_path = VolumeHostPath { path: "/v".into(), read_only: false, is_block: false };
        let volume_paths = VolumePaths::from([("v".to_owned(), volume_path)]);
        let mounted =
            MountContext { attempt: 0, volume_paths: &volume_paths, images: &VolumeImages::new(), env: &[] };
        let settings = Settings::for_tests(Path::new("/node"));
        let found = mounts_of(&pod, &mounted, &settings);
        let at: Vec<&cri::Mount> =
            found.iter().filter(|mount| mount.container_path == "/etc/hosts").collect();
        assert_eq!(at.len(), 1, "{host_network} {own:?}");
        assert_eq!(at[0].host_path, expected, "{host_network} {own:?}");
    };
    for host_network in [false, true] {
        check(host_network, None, "/node/own/1/etc-hosts");
        check(host_network, Some("/etc/hosts"), "/v");
    }
}

#[test]
fn default_kubelet_directory_is_the_nodes_own() {
    let check = |root: &str, path: &str, expected: &str| {
        let settings = Settings { root: root.into(), ..Settings::for_tests(Path::new("/node")) };
        assert_eq!(settings.host_path(Path::new(path)), Path::new(expected));
    };
    check("/node", "/var/lib/kubelet", "/node");
    check("/node/", "/var/lib/kubelet/", "/node");
    check("/node", "/var/lib/kubelet/pods", "/node/pods");
    check("/node", "/var/lib/kubelet//plugins/disk/csi.sock", "/node/plugins/disk/csi.sock");
    check("/node", "/var/lib/kubelet/../x", "/var/lib/kubelet/../x");
    check("/node", "/var/lib/kubelet-other", "/var/lib/kubelet-other");
    check("/node", "/var/lib", "/var/lib");
    check("/var/lib/kubelet", "/var/lib/kubelet/pods", "/var/lib/kubelet/pods");
    let dir = tempfile::tempdir().expect("a directory");
    let settings = Settings::for_tests(dir.path());
    let pods = dir.path().join("pods");
    let missing = "hostPath type check failed: /var/lib/kubelet/pods is not a directory".to_owned();
    assert_eq!(host_path("/var/lib/kubelet/pods", "Directory", &settings), Err(missing));
    assert_eq!(host_path("/var/lib/kubelet/pods", "DirectoryOrCreate", &settings).as_ref(), Ok(&pods));
    assert_eq!(host_path("/var/lib/kubelet/pods", "Directory", &settings).as_ref(), Ok(&pods));
}

#[test]
fn kubelet_directory_has_both_its_paths_in_a_container() {
    let check = |root: &str, host_path: &str, mounts: &[&str], expected: &[&str]| {
        let settings = Settings { root: root.into(), ..Settings::for_tests(Path::new("/node")) };
        let path = settings.host_path(Path::new(host_path));
        let volume_path = VolumeHostPath { path, read_only: false, is_block: false };
        let volume_paths = VolumePaths::from([("v".to_owned(), volume_path)]);
        let mounts = mounts
            .iter()
            .map(|path| json!({"name": "v", "mountPath": path, "mountPropagation": "Bidirectional"}));
        let container = json!({"name": "c", "volumeMounts": mounts.collect::<Vec<_>>()});
        let pod = pod(json!({"containers": [container]}));
        let mounted =
            MountContext { attempt: 0, volume_paths: &volume_paths, images: &VolumeImages::new(), env: &[] };
        let found = mounts_of(&pod, &mounted, &settings);
        let found: Vec<String> = found
            .iter()
            .filter(|mount| mount.propagation() == cri::MountPropagation::Bidirectional)
            .map(|mount| format!("{} {}", mount.host_path, mount.container_path))
            .collect();
        assert_eq!(found, expected, "{root} {host_path}");
    };
    let default = "/var/lib/kubelet/pods";
    check("/node", default, &[default], &["/node/pods /var/lib/kubelet/pods", "/node/pods /node/pods"]);
    // Volume paths of the host are not valid if the directory is mounted elsewhere.
    check("/node", default, &["/pods"], &["/node/pods /pods"]);
    check(
        "/node",
        default,
        &[default, "/node/pods"],
        &["/node/pods /var/lib/kubelet/pods", "/node/pods /node/pods"],
    );
    check("/node", "/data", &[default], &["/data /var/lib/kubelet/pods"]);
    check("/var/lib/kubelet", default, &[default], &["/var/lib/kubelet/pods /var/lib/kubelet/pods"]);
}

fn mounts_of(pod: &Pod, mounted: &MountContext<'_>, settings: &Settings) -> Vec<cri::Mount> {
    let container = &crate::pod::containers(pod)[0];
    mounts(pod, container, mounted, false, settings).expect("mounts")
}

#[test]
fn group_is_set_on_all_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let mode_of = |name: &str| fs::metadata(at(name)).expect("there").permissions().mode() & 0o7777;
    fs::create_dir(at("inner")).expect("made");
    for (name, mode) in [("inner/key", 0o600), ("program", 0o755), ("", 0o700), ("inner", 0o700)] {
        if !at(name).exists() {
            fs::write(at(name), "").expect("written");
        }
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).expect("set");
    }
    std::os::unix::fs::symlink("/nowhere", at("link")).expect("made");
    let group = rustix::process::getegid().as_raw();
    let check = |mode: u32, expected: [u32; 4]| {
        set_group_of_tree(dir.path(), group, mode).expect("given");
        assert_eq!(["", "inner", "inner/key", "program"].map(mode_of), expected);
    };
    check(GROUP_READ_MODE, [0o2750, 0o2750, 0o640, 0o755]);
    check(GROUP_WRITE_MODE, [0o2770, 0o2770, 0o660, 0o775]);
}

#[test]
fn files_with_fixed_group_are_ignored() {
    use std::os::unix::fs::MetadataExt as _;
    // Files in procfs have a fixed owner, and may disappear.
    let proc_dir = Path::new("/proc/self/fdinfo");
    let before = fs::metadata(proc_dir).expect("there").gid();
    set_group_of_tree(proc_dir, before.wrapping_add(1), GROUP_READ_MODE)
        .expect("files that cannot be changed are skipped");
    assert_eq!(fs::metadata(proc_dir).expect("there").gid(), before);
    let missing = tempfile::tempdir().expect("a directory").path().join("gone");
    set_group_of_tree(&missing, 0, GROUP_READ_MODE).expect_err("the directory does not exist");
}

#[tokio::test(flavor = "multi_thread")]
async fn group_of_deep_volume_is_set_on_a_worker_thread() {
    let dir = tempfile::tempdir().expect("a directory");
    let group = rustix::process::getegid().as_raw();
    let deep = (0..500).fold(dir.path().to_owned(), |path, _| path.join("d"));
    fs::create_dir_all(&deep).expect("made");
    set_group_of_tree(dir.path(), group, GROUP_WRITE_MODE).expect("given");
    assert_eq!(fs::metadata(&deep).expect("there").permissions().mode() & 0o2770, 0o2770);
}

#[test]
fn rejects_sub_path_expressions_outside_the_volume() {
    let mount = VolumeMount { sub_path_expr: Some("$(WHERE)".to_owned()), ..VolumeMount::default() };
    let check = |value: &str, expected: Result<&str, &str>| {
        let found = sub_path_of(&mount, &[("WHERE".to_owned(), value.to_owned())]);
        let found = found.map(|part| part.expect("a part"));
        assert_eq!(found.as_deref().map_err(String::as_str), expected, "{value}");
    };
    check("pod-1", Ok("pod-1"));
    check("/tmp", Err("error SubPath `/tmp` must not be an absolute path"));
    check("a/../..", Err("unable to provision SubPath `a/../..`: must not contain '..'"));
}

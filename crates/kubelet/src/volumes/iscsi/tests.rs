//! A script in place of `iscsiadm` simulates a target, whose disk is a file on this host.
//! Filesystems, mounts and cleanup are real. Needs root and loop devices.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use expect_test::{Expect, expect};
use serde_json::json;

use super::*;

const IQN: &str = "iqn.2026-01.example:disk";
const PASSWORD: &str = "open sesame 1234";

/// Keeps records as the real tool does, and creates and removes sessions and disks as the kernel
/// would.
const SCRIPT: &str = r#"#!/bin/sh
echo "$@" >> DIR/log
mode= portal= iface= op= name= value=
while [ $# -gt 0 ]; do
    case $1 in
        -m) mode=$2; shift ;; -p) portal=$2; shift ;; -I) iface=$2; shift ;; -o) op=$2; shift ;;
        -n) name=$2; shift ;; -v) value=$2; shift ;; --*) op=$1 ;;
    esac
    shift
done
host=${portal%:*} port=${portal##*:}
session=DIR/sys/class/iscsi_host/host7/device/session1
target=DIR/records/nodes/IQN/$host,$port,1
case $mode$op in
    ifaceshow) [ "$iface" = default ] || exit 21
        printf '# BEGIN RECORD\niface.iscsi_ifacename = default\niface.transport_name = tcp\niface.mtu = 0\niface.ipaddress = <empty>\n# END RECORD\n' ;;
    discoverydbnew) mkdir -p DIR/records/send_targets/$host,$port
        echo '# END RECORD' > DIR/records/send_targets/$host,$port/st_config ;;
    discoverydb--discover) [ "$host" = 192.0.2.9 ] && { echo "iscsiadm: cannot make connection" >&2; exit 4; }
        mkdir -p "$target"; echo '# END RECORD' > "$target/$iface" ;;
    node--login) [ -e DIR/chap ] && ! grep -q 'auth.password = open sesame 1234' "$target/$iface" && {
            echo "iscsiadm: initiator reported error (24 - iSCSI login failed due to authorization failure)" >&2; exit 24; }
        mkdir -p $session/iscsi_session/session1 $session/connection1:0/iscsi_connection/connection1:0
        echo IQN > $session/iscsi_session/session1/targetname
        for file in address persistent_address; do echo $host > $session/connection1:0/iscsi_connection/connection1:0/$file; done
        for file in port persistent_port; do echo $port > $session/connection1:0/iscsi_connection/connection1:0/$file; done
        ln -s $(cat DIR/loop) DIR/by-path/ip-$portal-iscsi-IQN-lun-0 ;;
    node--logout) [ -e $session ] || exit 21
        rm -r $session DIR/by-path/ip-$portal-iscsi-IQN-lun-0 ;;
    nodedelete) rm -rf "$target" ;;
esac
"#;

struct FakeIscsi {
    dir: tempfile::TempDir,
    drivers: csi::Drivers,
}

impl FakeIscsi {
    /// `None` without root or loop devices.
    fn start() -> Option<FakeIscsi> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            eprintln!("skipped: needs root and loop devices");
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["by-path", "sys/class/scsi_host/host7", "sys/block"] {
            std::fs::create_dir_all(dir.path().join(name)).expect("made");
        }
        let script = SCRIPT.replace("DIR", &dir.path().display().to_string()).replace("IQN", IQN);
        let program = dir.path().join("iscsiadm");
        std::fs::write(&program, script).expect("written");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("executable");
        let image = dir.path().join("image");
        std::fs::File::create(&image).and_then(|file| file.set_len(32 << 20)).expect("a file");
        let output =
            Command::new("losetup").args(["--find", "--show"]).arg(&image).output().expect("losetup");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::write(dir.path().join("loop"), output.stdout).expect("written");
        Some(FakeIscsi { dir, drivers: csi::Drivers::default() })
    }

    fn disks(&self) -> DiskManager<'_> {
        let dir = self.dir.path();
        let host = IscsiHost {
            program: dir.join("iscsiadm"),
            sys: dir.join("sys"),
            by_path: dir.join("by-path"),
            records: vec![dir.join("elsewhere"), dir.join("records")],
        };
        DiskManager { host, root: dir.join(GLOBAL_MOUNT_DIR), pods: dir, drivers: &self.drivers }
    }

    async fn set_up(
        &self,
        pod: &str,
        request: &DiskRequest,
        chap: &ChapCredentials,
    ) -> Result<PathBuf, String> {
        match self.disks().set_up(pod, request, chap).await {
            Ok(ready) => Ok(ready.path),
            Err(SetUpError::Failed { operation, message }) => Err(format!("{operation}: {message}")),
            Err(SetUpError::Waiting) => Err("waits".to_owned()),
        }
    }

    /// Detaches the disks of a pod. It is retried, because other processes may hold mounts of this
    /// host for a moment.
    async fn detach_with_retry(&self, pod: &str) {
        let start = std::time::Instant::now();
        while let Err(error) = self.disks().detach_pod(pod).await {
            assert!(start.elapsed() < std::time::Duration::from_secs(60), "{error}");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Checks the commands since the last check.
    #[track_caller]
    fn assert_commands(&self, expected: Expect) {
        let path = self.dir.path().join("log");
        expected.assert_eq(&std::fs::read_to_string(&path).unwrap_or_default());
        let _ = std::fs::remove_file(path);
    }

    /// The remaining mounts, records and disks.
    fn remaining(&self) -> Vec<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let mount_points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        let mounts = mount_points.filter(|mount_point| mount_point.starts_with(self.dir.path()));
        mounts
            .chain(self.disks().recorded_disks())
            .chain(read_dir_paths(&self.dir.path().join("by-path")))
            .collect()
    }
}

impl Drop for FakeIscsi {
    fn drop(&mut self) {
        for mount_point in self.remaining().iter().rev() {
            let _ = rustix::mount::unmount(mount_point, rustix::mount::UnmountFlags::DETACH);
        }
        let device = std::fs::read_to_string(self.dir.path().join("loop")).unwrap_or_default();
        let _ = Command::new("losetup").args(["--detach", device.trim()]).status();
    }
}

/// A volume of a pod with the disk and additional fields.
fn disk_request(more: Value) -> DiskRequest {
    let mut source = json!({"targetPortal": "192.0.2.1", "iqn": IQN, "lun": 0, "iscsiInterface": "default"});
    source.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    DiskRequest::from("data", "default", &source)
}

#[tokio::test]
async fn disk_is_detached_after_its_last_pod() {
    let Some(fake) = FakeIscsi::start() else { return };
    let (request, chap) = (disk_request(json!({})), ChapCredentials::default());
    let one = fake.set_up("one", &request, &chap).await.expect("a disk");
    fake.assert_commands(expect![[r#"
        -m iface -I default -o show
        -m discoverydb -t sendtargets -p 192.0.2.1:3260 -I default -o new
        -m discoverydb -t sendtargets -p 192.0.2.1:3260 -I default --discover
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default -o update -n node.session.scan -v manual
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default --login
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -o update -n node.startup -v manual
    "#]]);
    let scan = std::fs::read_to_string(fake.dir.path().join("sys/class/scsi_host/host7/scan"));
    assert_eq!(scan.expect("a scan"), "0 0 0");
    std::fs::write(one.join("note"), "kept").expect("written");
    // Again, and for another pod: no command is needed.
    assert_eq!(fake.set_up("one", &request, &chap).await.as_ref(), Ok(&one));
    let two = fake.set_up("two", &request, &chap).await.expect("a disk");
    assert_eq!(std::fs::read_to_string(two.join("note")).expect("the same disk"), "kept");
    fake.detach_with_retry("one").await;
    fake.assert_commands(expect![""]);
    assert_eq!(std::fs::read_to_string(two.join("note")).expect("still there"), "kept");

    // A file on the disk is open.
    let open_file = std::fs::File::open(two.join("note")).expect("a file");
    let error = fake.disks().detach_pod("two").await.expect_err("it is in use");
    assert!(error.ends_with("is still in use"), "{error}");
    drop(open_file);
    fake.detach_with_retry("two").await;
    fake.assert_commands(expect![[r#"
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default --logout
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default -o delete
    "#]]);
    assert_eq!(fake.remaining(), Vec::<PathBuf>::new());

    // The content of the disk stays, also with a read-only mount.
    let read_only = DiskRequest { read_only: true, ..request };
    let three = fake.set_up("three", &read_only, &chap).await.expect("a disk");
    assert_eq!(std::fs::read_to_string(three.join("note")).expect("kept"), "kept");
    assert!(std::fs::write(three.join("note"), "changed").is_err());
    fake.detach_with_retry("three").await;
    assert_eq!(fake.remaining(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn attached_volume_is_in_use_until_no_pod_uses_it() {
    let Some(fake) = FakeIscsi::start() else { return };
    let name = "kubernetes.io/iscsi/192.0.2.1:iqn:0";
    let request = DiskRequest { unique_volume_name: Some(name.to_owned()), ..disk_request(json!({})) };
    let volumes_in_use = || in_use(fake.dir.path());
    // One pod is removed while it waits, the other one gets the disk.
    for pod in ["one", "two"] {
        fake.drivers.set_in_use(name, true);
        assert!(fake.disks().record_user(pod, &request).await.is_ok());
    }
    fake.set_up("two", &request, &ChapCredentials::default()).await.expect("a disk");
    assert_eq!(volumes_in_use(), [name]);
    fake.detach_with_retry("one").await;
    assert_eq!(fake.drivers.in_use(), [name]);
    fake.detach_with_retry("two").await;
    assert_eq!(fake.drivers.in_use(), [""; 0]);
    assert_eq!(volumes_in_use(), [""; 0]);
    // The disk was never attached.
    fake.drivers.set_in_use(name, true);
    assert!(fake.disks().record_user("three", &request).await.is_ok());
    fake.detach_with_retry("three").await;
    assert_eq!(fake.drivers.in_use(), [""; 0]);
}

#[tokio::test]
async fn disk_mounted_by_an_older_version_is_in_use() {
    let Some(fake) = FakeIscsi::start() else { return };
    let name = format!("kubernetes.io/iscsi/192.0.2.1:{IQN}:0");
    let inline = disk_request(json!({}));
    let given = DiskRequest { unique_volume_name: Some(name.clone()), ..disk_request(json!({})) };
    let mount_point = fake.set_up("one", &inline, &ChapCredentials::default()).await.expect("a disk");
    assert_eq!(in_use(fake.dir.path()), [""; 0]);
    // That version did not record the name of the volume.
    let record = fake.disks().disk_dir(&inline).join(RECORD_FILE);
    let mut known: Value =
        serde_json::from_slice(&std::fs::read(&record).expect("a record")).expect("it is one");
    known.as_object_mut().expect("an object").remove("givenAs").expect("a name");
    std::fs::write(&record, known.to_string()).expect("written");
    let either = [format!("kubernetes.io/iscsi/192.0.2.1:3260:{IQN}:0"), name.clone()];
    assert_eq!(in_use(fake.dir.path()), either);
    in_use(fake.dir.path()).iter().for_each(|name| fake.drivers.set_in_use(name, true));
    // A pod that defines the disk itself does not know the name either.
    assert!(fake.disks().record_user("two", &inline).await.is_ok());
    assert_eq!(in_use(fake.dir.path()), either);
    fake.detach_with_retry("two").await;
    assert_eq!(fake.drivers.in_use(), either);
    let found = fake.disks().reuse("one", &given).await;
    assert_eq!(found.ok().flatten(), Some(mount_point));
    assert_eq!(in_use(fake.dir.path()), [name]);
    fake.detach_with_retry("one").await;
    assert_eq!(fake.drivers.in_use(), [""; 0]);
    assert_eq!(fake.remaining(), Vec::<PathBuf>::new());
    // A new pod has no disk yet.
    assert!(fake.disks().reuse("one", &given).await.is_ok_and(|found| found.is_none()));
    assert_eq!(fake.drivers.in_use(), [""; 0]);
}

#[tokio::test]
async fn unique_name_remains_until_the_disk_is_detached() {
    let Some(fake) = FakeIscsi::start() else { return };
    let name = format!("kubernetes.io/iscsi/192.0.2.1:{IQN}:0");
    let given = DiskRequest { unique_volume_name: Some(name.clone()), ..disk_request(json!({})) };
    // It cannot be detached at once, because its mount directory is not empty.
    let below = fake.disks().disk_dir(&given).join("mount/note");
    std::fs::create_dir_all(below.parent().expect("a directory")).expect("made");
    std::fs::write(&below, "").expect("written");
    fake.drivers.set_in_use(&name, true);
    fake.set_up("one", &given, &ChapCredentials::default()).await.expect("a disk");
    fake.set_up("two", &disk_request(json!({})), &ChapCredentials::default()).await.expect("a disk");
    assert_eq!(in_use(fake.dir.path()), [name.as_str()]);
    fake.detach_with_retry("one").await;
    assert_eq!(fake.drivers.in_use(), [name.as_str()]);
    let start = std::time::Instant::now();
    loop {
        let error = fake.disks().detach_pod("two").await.expect_err("something is left");
        if error.contains("not empty") {
            break;
        }
        assert!(start.elapsed() < std::time::Duration::from_secs(60), "{error}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(fake.drivers.in_use(), [name.as_str()]);
    std::fs::remove_file(below).expect("removed");
    fake.detach_with_retry("two").await;
    assert_eq!(fake.drivers.in_use(), [""; 0]);
    assert_eq!(fake.remaining(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn secrets_are_not_in_commands() {
    let Some(fake) = FakeIscsi::start() else { return };
    std::fs::write(fake.dir.path().join("chap"), "").expect("written");
    let request = disk_request(json!({"chapAuthDiscovery": true, "chapAuthSession": true}));
    let chap = |password: &str| ChapCredentials {
        discovery: true,
        session: true,
        secrets: ["discovery.sendtargets.auth.password", "node.session.auth.password"]
            .map(|name| (name.to_owned(), password.to_owned()))
            .into(),
    };
    let error = fake.set_up("one", &request, &chap("wrong")).await.expect_err("refused");
    let expected = "MountVolume.WaitForAttach: failed to get any path for iscsi disk, last err seen:\niscsi: failed to \
        attach disk: Error: iscsiadm: initiator reported error (24 - iSCSI login failed due to authorization failure) \
        (exit status 24)";
    assert_eq!(error, expected);
    fake.set_up("one", &request, &chap(PASSWORD)).await.expect("a disk");
    let log = std::fs::read_to_string(fake.dir.path().join("log")).expect("a log");
    assert!(log.contains("-n node.session.auth.authmethod -v CHAP"), "{log}");
    assert!(!log.contains(PASSWORD) && !log.contains("wrong"), "{log}");
    let discovery = fake.dir.path().join("records/send_targets/192.0.2.1,3260/st_config");
    let discovery = std::fs::read_to_string(discovery).expect("a record");
    assert_eq!(discovery, format!("discovery.sendtargets.auth.password = {PASSWORD}\n# END RECORD\n"));
    fake.detach_with_retry("one").await;
    assert_eq!(fake.remaining(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn block_device_can_have_its_own_initiator() {
    let Some(fake) = FakeIscsi::start() else { return };
    let initiator = json!({"initiatorName": "iqn.2026-01.example:me"});
    let request = DiskRequest { is_block: true, ..disk_request(initiator) };
    let device = fake.set_up("one", &request, &ChapCredentials::default()).await.expect("a device");
    let known = std::fs::read_to_string(fake.dir.path().join("loop")).expect("a device");
    assert_eq!(device.display().to_string(), known.trim());
    assert_eq!(fake.set_up("one", &request, &ChapCredentials::default()).await, Ok(device));
    fake.detach_with_retry("one").await;
    fake.assert_commands(expect![[r#"
        -m iface -I default -o show
        -m iface -I 192.0.2.1:3260:data -o new
        -m iface -I 192.0.2.1:3260:data -o update -n iface.initiatorname -v iqn.2026-01.example:me
        -m iface -I 192.0.2.1:3260:data -o update -n iface.mtu -v 0
        -m iface -I 192.0.2.1:3260:data -o update -n iface.transport_name -v tcp
        -m discoverydb -t sendtargets -p 192.0.2.1:3260 -I 192.0.2.1:3260:data -o new
        -m discoverydb -t sendtargets -p 192.0.2.1:3260 -I 192.0.2.1:3260:data --discover
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I 192.0.2.1:3260:data -o update -n node.session.scan -v manual
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I 192.0.2.1:3260:data --login
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -o update -n node.startup -v manual
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I 192.0.2.1:3260:data --logout
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I 192.0.2.1:3260:data -o delete
        -m iface -I 192.0.2.1:3260:data -o delete
    "#]]);
    assert_eq!(fake.remaining(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn failed_attach_is_reported_and_leaves_nothing() {
    let Some(fake) = FakeIscsi::start() else { return };
    let check = async |request: DiskRequest, expected: &str| {
        assert_eq!(fake.set_up("one", &request, &ChapCredentials::default()).await, Err(expected.to_owned()));
        fake.detach_with_retry("one").await;
        assert_eq!(fake.remaining(), Vec::<PathBuf>::new());
    };
    let device = std::fs::read_to_string(fake.dir.path().join("loop")).expect("a device");
    check(
        disk_request(json!({"readOnly": true})),
        &format!(
            "MountVolume.MountDevice: cannot mount unformatted disk {} as we are manipulating it in read-only mode",
            device.trim()
        ),
    )
    .await;
    check(
        disk_request(json!({"targetPortal": "192.0.2.9"})),
        "MountVolume.WaitForAttach: failed to get any path for iscsi disk, last err seen:\niscsi: failed to sendtargets to \
         portal 192.0.2.9:3260 output: iscsiadm: cannot make connection (exit status 4)",
    )
    .await;
    check(
        disk_request(json!({"iqn": "iqn.2026-01.example:../../etc"})),
        "MountVolume.NewMounter initialization: \"iqn.2026-01.example:../../etc\" is not a valid name of a target, portal or \
         interface",
    )
    .await;
    std::fs::remove_file(fake.dir.path().join("iscsiadm")).expect("removed");
    check(
        disk_request(json!({})),
        "MountVolume.WaitForAttach: exec: \"iscsiadm\": executable file not found in $PATH: install open-iscsi (Debian) \
         or iscsi-initiator-utils (Fedora)",
    )
    .await;
}

#[test]
fn reads_iscsi_volume_source() {
    let volume = json!({"metadata": {"name": "pv"}, "spec": {
        "volumeMode": "Block", "mountOptions": ["noatime"],
        "iscsi": {
            "targetPortal": "192.0.2.1:3261", "portals": ["192.0.2.2", "192.0.2.1:3261", "[fd00::1]:3260"],
            "iqn": IQN, "lun": 3, "fsType": "xfs", "chapAuthSession": true, "secretRef": {"name": "chap"},
        },
    }});
    let volume: PersistentVolume = serde_json::from_value(volume).expect("a volume");
    let pod: Pod = serde_json::from_value(json!({"metadata": {"namespace": "team"}})).expect("a pod");
    let request = DiskRequest::persistent(&pod, &volume, true).expect("iscsi");
    assert_eq!(request.target.portals, ["192.0.2.1:3261", "192.0.2.2:3260", "[fd00::1]:3260"]);
    assert_eq!((request.target.interface.as_str(), request.target.lun), ("default", 3));
    assert_eq!(request.secret, Some(("team".to_owned(), "chap".to_owned())));
    assert!(request.is_block && request.read_only && request.session_chap && !request.discovery_chap);
    let dir = tempfile::tempdir().expect("a directory");
    record_user(dir.path(), &request, "one").expect("written");
    assert_eq!(Target::read(dir.path()), Some(request.target));
}

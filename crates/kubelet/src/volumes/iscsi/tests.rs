//! A target that is played by a script in the place of `iscsiadm`, with a disk that is a file of this host; the rest is
//! real: file systems, mounts, what is left behind. Needs root and loop devices.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use expect_test::{Expect, expect};
use serde_json::json;

use super::*;

const IQN: &str = "iqn.2026-01.example:disk";
const PASSWORD: &str = "open sesame 1234";

/// Keeps records as the real one does, and lets a session and its disk appear and vanish where the kernel would.
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

struct Played {
    dir: tempfile::TempDir,
    busy: csi::Drivers,
}

impl Played {
    /// `None` where there can be no disks.
    fn start() -> Option<Played> {
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
        let made = Command::new("losetup").args(["--find", "--show"]).arg(&image).output().expect("losetup");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        std::fs::write(dir.path().join("loop"), made.stdout).expect("written");
        Some(Played { dir, busy: csi::Drivers::default() })
    }

    fn disks(&self) -> Disks<'_> {
        let dir = self.dir.path();
        let host = Host {
            program: dir.join("iscsiadm"),
            sys: dir.join("sys"),
            by_path: dir.join("by-path"),
            records: vec![dir.join("elsewhere"), dir.join("records")],
        };
        Disks { host, root: dir.join(PLACE), pods: dir, busy: &self.busy }
    }

    async fn set_up(&self, pod: &str, wanted: &Wanted, chap: &Chap) -> Result<PathBuf, String> {
        match self.disks().set_up(pod, wanted, chap).await {
            Ok(ready) => Ok(ready.path),
            Err(Trouble::Failed { operation, message }) => Err(format!("{operation}: {message}")),
            Err(Trouble::Waits) => Err("waits".to_owned()),
        }
    }

    /// As it is when a pod is over, once whoever looked at the mounts of this host meanwhile has let go of them, too.
    async fn until_gone(&self, pod: &str) {
        let begun = std::time::Instant::now();
        while let Err(why) = self.disks().let_go(pod).await {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{why}");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// What the tool was told since this was last asked.
    #[track_caller]
    fn told(&self, expected: Expect) {
        let path = self.dir.path().join("log");
        expected.assert_eq(&std::fs::read_to_string(&path).unwrap_or_default());
        let _ = std::fs::remove_file(path);
    }

    /// What is mounted, and what is written down of it.
    fn left(&self) -> Vec<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        let mounts = places.filter(|place| place.starts_with(self.dir.path()));
        mounts.chain(self.disks().all()).chain(children(&self.dir.path().join("by-path"))).collect()
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        for place in self.left().iter().rev() {
            let _ = rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH);
        }
        let device = std::fs::read_to_string(self.dir.path().join("loop")).unwrap_or_default();
        let _ = Command::new("losetup").args(["--detach", device.trim()]).status();
    }
}

/// A volume of a pod with the disk, and with what is said besides.
fn wanted(more: Value) -> Wanted {
    let mut source = json!({"targetPortal": "192.0.2.1", "iqn": IQN, "lun": 0, "iscsiInterface": "default"});
    source.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    Wanted::from("data", "default", &source)
}

#[tokio::test]
async fn a_disk_is_had_by_several_pods_and_leaves_with_the_last() {
    let Some(played) = Played::start() else { return };
    let (wanted, chap) = (wanted(json!({})), Chap::default());
    let one = played.set_up("one", &wanted, &chap).await.expect("a disk");
    played.told(expect![[r#"
        -m iface -I default -o show
        -m discoverydb -t sendtargets -p 192.0.2.1:3260 -I default -o new
        -m discoverydb -t sendtargets -p 192.0.2.1:3260 -I default --discover
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default -o update -n node.session.scan -v manual
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default --login
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -o update -n node.startup -v manual
    "#]]);
    let scanned = std::fs::read_to_string(played.dir.path().join("sys/class/scsi_host/host7/scan"));
    assert_eq!(scanned.expect("a scan"), "0 0 0");
    std::fs::write(one.join("note"), "kept").expect("written");
    // Once more, and for another pod: nobody has to be asked.
    assert_eq!(played.set_up("one", &wanted, &chap).await.as_ref(), Ok(&one));
    let two = played.set_up("two", &wanted, &chap).await.expect("a disk");
    assert_eq!(std::fs::read_to_string(two.join("note")).expect("the same disk"), "kept");
    played.until_gone("one").await;
    played.told(expect![""]);
    assert_eq!(std::fs::read_to_string(two.join("note")).expect("still there"), "kept");

    // Somebody has a file open there.
    let held = std::fs::File::open(two.join("note")).expect("a file");
    let why = played.disks().let_go("two").await.expect_err("it is in use");
    assert!(why.ends_with("is still in use"), "{why}");
    drop(held);
    played.until_gone("two").await;
    played.told(expect![[r#"
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default --logout
        -m node -p 192.0.2.1:3260 -T iqn.2026-01.example:disk -I default -o delete
    "#]]);
    assert_eq!(played.left(), Vec::<PathBuf>::new());

    // What is on it stays, also where it may only be read.
    let read_only = Wanted { read_only: true, ..wanted };
    let three = played.set_up("three", &read_only, &chap).await.expect("a disk");
    assert_eq!(std::fs::read_to_string(three.join("note")).expect("kept"), "kept");
    assert!(std::fs::write(three.join("note"), "changed").is_err());
    played.until_gone("three").await;
    assert_eq!(played.left(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn what_this_node_was_given_is_in_use_until_nobody_has_it() {
    let Some(played) = Played::start() else { return };
    let name = "kubernetes.io/iscsi/192.0.2.1:iqn:0";
    let wanted = Wanted { given_as: Some(name.to_owned()), ..wanted(json!({})) };
    let remembered = || in_use(played.dir.path());
    // One goes away while it waits, the other gets it.
    for pod in ["one", "two"] {
        played.busy.use_of(name, true);
        assert!(played.disks().note(pod, &wanted).await.is_ok());
    }
    played.set_up("two", &wanted, &Chap::default()).await.expect("a disk");
    assert_eq!(remembered(), [name]);
    played.until_gone("one").await;
    assert_eq!(played.busy.in_use(), [name]);
    played.until_gone("two").await;
    assert_eq!(played.busy.in_use(), [""; 0]);
    assert_eq!(remembered(), [""; 0]);
    // Nobody has ever had it.
    played.busy.use_of(name, true);
    assert!(played.disks().note("three", &wanted).await.is_ok());
    played.until_gone("three").await;
    assert_eq!(played.busy.in_use(), [""; 0]);
}

#[tokio::test]
async fn a_disk_that_a_skiff_before_this_one_mounted_is_in_use() {
    let Some(played) = Played::start() else { return };
    let name = format!("kubernetes.io/iscsi/192.0.2.1:{IQN}:0");
    let inline = wanted(json!({}));
    let given = Wanted { given_as: Some(name.clone()), ..wanted(json!({})) };
    let place = played.set_up("one", &inline, &Chap::default()).await.expect("a disk");
    assert_eq!(in_use(played.dir.path()), [""; 0]);
    // It did not write down what the disk is called.
    let record = played.disks().dir(&inline).join(RECORD);
    let mut known: Value =
        serde_json::from_slice(&std::fs::read(&record).expect("a record")).expect("it is one");
    known.as_object_mut().expect("an object").remove("givenAs").expect("a name");
    std::fs::write(&record, known.to_string()).expect("written");
    let either = [format!("kubernetes.io/iscsi/192.0.2.1:3260:{IQN}:0"), name.clone()];
    assert_eq!(in_use(played.dir.path()), either);
    in_use(played.dir.path()).iter().for_each(|name| played.busy.use_of(name, true));
    // One that names it itself does not know either.
    assert!(played.disks().note("two", &inline).await.is_ok());
    assert_eq!(in_use(played.dir.path()), either);
    played.until_gone("two").await;
    assert_eq!(played.busy.in_use(), either);
    let found = played.disks().had("one", &given).await;
    assert_eq!(found.ok().flatten(), Some(place));
    assert_eq!(in_use(played.dir.path()), [name]);
    played.until_gone("one").await;
    assert_eq!(played.busy.in_use(), [""; 0]);
    assert_eq!(played.left(), Vec::<PathBuf>::new());
    // A new one is.
    assert!(played.disks().had("one", &given).await.is_ok_and(|found| found.is_none()));
    assert_eq!(played.busy.in_use(), [""; 0]);
}

#[tokio::test]
async fn what_a_disk_is_called_is_kept_until_it_has_left() {
    let Some(played) = Played::start() else { return };
    let name = format!("kubernetes.io/iscsi/192.0.2.1:{IQN}:0");
    let given = Wanted { given_as: Some(name.clone()), ..wanted(json!({})) };
    // It cannot leave at once: something else is where it is mounted.
    let below = played.disks().dir(&given).join("mount/note");
    std::fs::create_dir_all(below.parent().expect("a directory")).expect("made");
    std::fs::write(&below, "").expect("written");
    played.busy.use_of(&name, true);
    played.set_up("one", &given, &Chap::default()).await.expect("a disk");
    played.set_up("two", &wanted(json!({})), &Chap::default()).await.expect("a disk");
    assert_eq!(in_use(played.dir.path()), [name.as_str()]);
    played.until_gone("one").await;
    assert_eq!(played.busy.in_use(), [name.as_str()]);
    let begun = std::time::Instant::now();
    loop {
        let why = played.disks().let_go("two").await.expect_err("something is left");
        if why.contains("not empty") {
            break;
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{why}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(played.busy.in_use(), [name.as_str()]);
    std::fs::remove_file(below).expect("removed");
    played.until_gone("two").await;
    assert_eq!(played.busy.in_use(), [""; 0]);
    assert_eq!(played.left(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn secrets_are_told_without_being_shown() {
    let Some(played) = Played::start() else { return };
    std::fs::write(played.dir.path().join("chap"), "").expect("written");
    let wanted = wanted(json!({"chapAuthDiscovery": true, "chapAuthSession": true}));
    let chap = |password: &str| Chap {
        discovery: true,
        session: true,
        secrets: ["discovery.sendtargets.auth.password", "node.session.auth.password"]
            .map(|name| (name.to_owned(), password.to_owned()))
            .into(),
    };
    let why = played.set_up("one", &wanted, &chap("wrong")).await.expect_err("refused");
    let expected = "MountVolume.WaitForAttach: failed to get any path for iscsi disk, last err seen:\niscsi: failed to \
        attach disk: Error: iscsiadm: initiator reported error (24 - iSCSI login failed due to authorization failure) \
        (exit status 24)";
    assert_eq!(why, expected);
    played.set_up("one", &wanted, &chap(PASSWORD)).await.expect("a disk");
    let told = std::fs::read_to_string(played.dir.path().join("log")).expect("a log");
    assert!(told.contains("-n node.session.auth.authmethod -v CHAP"), "{told}");
    assert!(!told.contains(PASSWORD) && !told.contains("wrong"), "{told}");
    let discovery = played.dir.path().join("records/send_targets/192.0.2.1,3260/st_config");
    let discovery = std::fs::read_to_string(discovery).expect("a record");
    assert_eq!(discovery, format!("discovery.sendtargets.auth.password = {PASSWORD}\n# END RECORD\n"));
    played.until_gone("one").await;
    assert_eq!(played.left(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn a_disk_may_be_a_device_and_have_an_initiator_of_its_own() {
    let Some(played) = Played::start() else { return };
    let initiator = json!({"initiatorName": "iqn.2026-01.example:me"});
    let wanted = Wanted { is_block: true, ..wanted(initiator) };
    let device = played.set_up("one", &wanted, &Chap::default()).await.expect("a device");
    let known = std::fs::read_to_string(played.dir.path().join("loop")).expect("a device");
    assert_eq!(device.display().to_string(), known.trim());
    assert_eq!(played.set_up("one", &wanted, &Chap::default()).await, Ok(device));
    played.until_gone("one").await;
    played.told(expect![[r#"
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
    assert_eq!(played.left(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn what_cannot_be_had_is_said_and_leaves_nothing() {
    let Some(played) = Played::start() else { return };
    let check = async |wanted: Wanted, expected: &str| {
        assert_eq!(played.set_up("one", &wanted, &Chap::default()).await, Err(expected.to_owned()));
        played.until_gone("one").await;
        assert_eq!(played.left(), Vec::<PathBuf>::new());
    };
    let device = std::fs::read_to_string(played.dir.path().join("loop")).expect("a device");
    check(
        wanted(json!({"readOnly": true})),
        &format!(
            "MountVolume.MountDevice: cannot mount unformatted disk {} as we are manipulating it in read-only mode",
            device.trim()
        ),
    )
    .await;
    check(
        wanted(json!({"targetPortal": "192.0.2.9"})),
        "MountVolume.WaitForAttach: failed to get any path for iscsi disk, last err seen:\niscsi: failed to sendtargets to \
         portal 192.0.2.9:3260 output: iscsiadm: cannot make connection (exit status 4)",
    )
    .await;
    check(
        wanted(json!({"iqn": "iqn.2026-01.example:../../etc"})),
        "MountVolume.NewMounter initialization: \"iqn.2026-01.example:../../etc\" is no name of a target, portal or \
         interface",
    )
    .await;
    std::fs::remove_file(played.dir.path().join("iscsiadm")).expect("removed");
    check(
        wanted(json!({})),
        "MountVolume.WaitForAttach: exec: \"iscsiadm\": executable file not found in $PATH: install open-iscsi (Debian) \
         or iscsi-initiator-utils (Fedora)",
    )
    .await;
}

#[test]
fn what_a_volume_says() {
    let volume = json!({"metadata": {"name": "pv"}, "spec": {
        "volumeMode": "Block", "mountOptions": ["noatime"],
        "iscsi": {
            "targetPortal": "192.0.2.1:3261", "portals": ["192.0.2.2", "192.0.2.1:3261", "[fd00::1]:3260"],
            "iqn": IQN, "lun": 3, "fsType": "xfs", "chapAuthSession": true, "secretRef": {"name": "chap"},
        },
    }});
    let volume: PersistentVolume = serde_json::from_value(volume).expect("a volume");
    let pod: Pod = serde_json::from_value(json!({"metadata": {"namespace": "team"}})).expect("a pod");
    let wanted = Wanted::persistent(&pod, &volume, true).expect("iscsi");
    assert_eq!(wanted.target.portals, ["192.0.2.1:3261", "192.0.2.2:3260", "[fd00::1]:3260"]);
    assert_eq!((wanted.target.interface.as_str(), wanted.target.lun), ("default", 3));
    assert_eq!(wanted.secret, Some(("team".to_owned(), "chap".to_owned())));
    assert!(wanted.is_block && wanted.read_only && wanted.session_chap && !wanted.discovery_chap);
    let dir = tempfile::tempdir().expect("a directory");
    note(dir.path(), &wanted, "one").expect("written");
    assert_eq!(Target::read(dir.path()), Some(wanted.target));
}

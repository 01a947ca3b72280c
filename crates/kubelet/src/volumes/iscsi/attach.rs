//! Logs in to iSCSI targets and out of them, and finds the disks that appear.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{ChapCredentials, InterfaceCopy, Target, read_dir_paths, records};
use crate::volumes::host_commands::{CommandError, CommandOutput, run};

/// How long a disk may take to appear after a login to its target.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the kernel may take to combine several paths to a disk (multipath).
const MULTIPATH_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often logins to failed portals are repeated, as long as at least one has succeeded.
const MAX_LOGIN_ROUNDS: usize = 5;
/// From this round on, two paths to a disk are sufficient.
const MIN_MULTIPATH_ROUNDS: usize = 2;
/// Exit codes of `iscsiadm`: no such session, and no such object.
const NOT_FOUND_CODES: [i32; 2] = [2, 21];
const EXISTS_CODE: i32 = 15;

/// Programs and directories of this host.
pub struct IscsiHost {
    pub program: PathBuf,
    pub sys: PathBuf,
    pub by_path: PathBuf,
    /// The directories where `iscsiadm` keeps its records, which differ between distributions.
    pub records: Vec<PathBuf>,
}

impl Default for IscsiHost {
    fn default() -> IscsiHost {
        IscsiHost {
            program: "iscsiadm".into(),
            sys: "/sys".into(),
            by_path: "/dev/disk/by-path".into(),
            records: vec!["/etc/iscsi".into(), "/var/lib/iscsi".into()],
        }
    }
}

/// Logs in to a target through all its portals and waits for the disk.
pub async fn attach(host: &IscsiHost, target: &Target, chap: &ChapCredentials) -> Result<PathBuf, String> {
    let base =
        target.interface_copy.as_ref().map_or(&target.interface, |interface_copy| &interface_copy.from);
    let interface_settings =
        host.run(&["-m", "iface", "-I", base, "-o", "show"]).await.map_err(|failure| match failure {
            CommandError::NotFound(_) => {
                format!("{failure}: install open-iscsi (Debian) or iscsi-initiator-utils (Fedora)")
            }
            failure => failure.to_string(),
        })?;
    let interface_settings = interface_settings
        .success_output()
        .map_err(|why| format!("iscsi: could not read iface {base} error: {why}"))?;
    if let Some(interface_copy) = &target.interface_copy {
        copy_interface(host, target, interface_copy, &interface_settings).await?;
    }
    let mut found: BTreeMap<usize, PathBuf> = BTreeMap::new();
    let mut last = String::new();
    for round in 1..=MAX_LOGIN_ROUNDS {
        for (at, portal) in target.portals.iter().enumerate() {
            if found.contains_key(&at) {
                continue;
            }
            match attach_portal(host, target, portal, chap).await {
                Ok(device) => drop(found.insert(at, device)),
                Err(why) => last = why,
            }
        }
        if found.is_empty() {
            if target.interface_copy.is_some() {
                let _ = host.run(&["-m", "iface", "-I", &target.interface, "-o", "delete"]).await;
            }
            return Err(format!("failed to get any path for iscsi disk, last err seen:\n{last}"));
        }
        if found.len() == target.portals.len() || found.len() > 1 && round >= MIN_MULTIPATH_ROUNDS {
            break;
        }
    }
    let timeout = if target.portals.len() > 1 { MULTIPATH_TIMEOUT } else { Duration::ZERO };
    let multipath =
        poll_until(timeout, || found.values().find_map(|device| host.multipath_device(device))).await;
    let first = multipath.or_else(|| found.into_values().next()).ok_or("no disk")?;
    std::fs::canonicalize(&first).map_err(|error| format!("{}: {error}", first.display()))
}

/// Detaches a disk from this node, and logs out if no other disk of the target is in use.
pub async fn detach(
    host: &IscsiHost,
    target: &Target,
    device: Option<&Path>,
    others: &[Target],
) -> Result<(), String> {
    if let Some(device) = device.filter(|device| is_busy(device)) {
        return Err(format!("{} is still in use", device.display()));
    }
    for disk in target.portals.iter().filter_map(|portal| host.disk(target, portal)) {
        if let Some(multipath) = host.multipath_device(&disk) {
            let _ = run("multipath", &["-f".as_ref(), multipath.as_os_str()]).await;
        }
        if let Some(name) = device_name(&disk) {
            let _ = std::fs::write(host.sys.join("block").join(name).join("device/delete"), "1");
        }
    }
    let is_used = |portal: &&String| {
        let is_same = |other: &&Target| other.iqn == target.iqn && other.interface == target.interface;
        others.iter().filter(is_same).any(|other| other.portals.contains(portal))
    };
    for portal in target.portals.iter().filter(|portal| !is_used(portal)) {
        for args in log_out_commands(target, portal) {
            run_if_present(host, &args).await?;
        }
    }
    match target.interface_copy {
        Some(_) => run_if_present(host, &["-m", "iface", "-I", &target.interface, "-o", "delete"]).await,
        None => Ok(()),
    }
}

/// Runs a cleanup command. It succeeds if the program or the object does not exist.
async fn run_if_present(host: &IscsiHost, args: &[&str]) -> Result<(), String> {
    match host.run(args).await {
        Err(CommandError::NotFound(_)) => Ok(()),
        Ok(done) if NOT_FOUND_CODES.contains(&done.code) => Ok(()),
        Ok(done) => done.success_output().map(drop),
        Err(failure) => Err(failure.to_string()),
    }
}

fn log_out_commands<'a>(target: &'a Target, portal: &'a str) -> [Vec<&'a str>; 2] {
    let (iqn, interface) = (&target.iqn, &target.interface);
    let args = ["-m", "node", "-p", portal, "-T", iqn, "-I", interface];
    [[&args[..], &["--logout"]].concat(), [&args[..], &["-o", "delete"]].concat()]
}

/// Logs in through one portal, unless there is a session already, and waits for the disk.
async fn attach_portal(
    host: &IscsiHost,
    target: &Target,
    portal: &str,
    chap: &ChapCredentials,
) -> Result<PathBuf, String> {
    let session = || host.session_hosts(&target.iqn).get(portal).cloned();
    let number = match session() {
        Some(number) => number,
        None => {
            login(host, target, portal, chap).await?;
            session().ok_or_else(|| {
                format!("Could not get SCSI host number for portal {portal} after logging in")
            })?
        }
    };
    // Scans for this disk only. Another disk may not be meant for this node, and may disappear at
    // any time.
    let scan = host.sys.join("class/scsi_host").join(format!("host{number}")).join("scan");
    std::fs::write(&scan, format!("0 0 {}", target.lun))
        .map_err(|error| format!("{}: {error}", scan.display()))?;
    poll_until(DISK_TIMEOUT, || host.disk(target, portal)).await.ok_or_else(|| {
        let path = host.by_path.join(by_path_name(target, portal));
        format!("Timed out waiting for device at path {} after {}s", path.display(), DISK_TIMEOUT.as_secs())
    })
}

async fn login(
    host: &IscsiHost,
    target: &Target,
    portal: &str,
    chap: &ChapCredentials,
) -> Result<(), String> {
    let (iqn, interface) = (target.iqn.as_str(), target.interface.as_str());
    let targets = ["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", interface];
    let node = ["-m", "node", "-p", portal, "-T", iqn, "-I", interface];
    let execute = async |args: &[&str], more: &[&str]| -> Result<String, String> {
        let done = host.run(&[args, more].concat()).await.map_err(|failure| failure.to_string())?;
        done.success_output()
    };
    let _ = execute(&targets, &["-o", "new"]).await;
    if chap.discovery {
        let failed =
            |error: String| format!("iscsi: failed to update discoverydb to portal {portal} error: {error}");
        execute(&targets, &["-o", "update", "-n", "discovery.sendtargets.auth.authmethod", "-v", "CHAP"])
            .await
            .map_err(failed)?;
        records::write_secrets(
            &records::discovery_records(&host.records, portal),
            "discovery.sendtargets.auth.",
            &chap.secrets,
        )
        .map_err(failed)?;
    }
    if let Err(error) = execute(&targets, &["--discover"]).await {
        let _ = execute(&targets, &["-o", "delete"]).await;
        return Err(format!("iscsi: failed to sendtargets to portal {portal} output: {error}"));
    }
    // Otherwise all disks of the target would appear. Old versions do not know this setting.
    if let Err(error) = execute(&node, &["-o", "update", "-n", "node.session.scan", "-v", "manual"]).await {
        tracing::warn!(error, iqn, "cannot disable automatic scans of a target, its other disks may appear");
    }
    if chap.session {
        let failed =
            |error: String| format!("iscsi: failed to update iscsi node to portal {portal} error: {error}");
        execute(&node, &["-o", "update", "-n", "node.session.auth.authmethod", "-v", "CHAP"])
            .await
            .map_err(failed)?;
        records::write_secrets(
            &records::node_records(&host.records, iqn, portal, interface),
            "node.session.auth.",
            &chap.secrets,
        )
        .map_err(failed)?;
    }
    if let Err(error) = execute(&node, &["--login"]).await {
        let _ = execute(&node, &["-o", "delete"]).await;
        return Err(format!("iscsi: failed to attach disk: Error: {error}"));
    }
    // A host must not wait for this target when it boots.
    let start = ["-m", "node", "-p", portal, "-T", iqn, "-o", "update", "-n", "node.startup", "-v", "manual"];
    if let Err(error) = execute(&start, &[]).await {
        tracing::warn!(error, iqn, "cannot set the login of a target to manual");
    }
    Ok(())
}

/// Creates a copy of an interface with another initiator name.
async fn copy_interface(
    host: &IscsiHost,
    target: &Target,
    interface_copy: &InterfaceCopy,
    interface_settings: &str,
) -> Result<(), String> {
    let interface = target.interface.as_str();
    let created = host.run(&["-m", "iface", "-I", interface, "-o", "new"]).await;
    let created = created.map_err(|failure| failure.to_string())?;
    if created.code != EXISTS_CODE {
        created.success_output().map_err(|error| format!("iscsi: failed to create new iface: {error}"))?;
    }
    let mut settings = settings_to_copy(interface_settings);
    settings.insert("iface.initiatorname", &interface_copy.initiator);
    for (name, value) in settings {
        let args = ["-m", "iface", "-I", interface, "-o", "update", "-n", name, "-v", value];
        let done = host.run(&args).await.map_err(|failure| failure.to_string())?;
        if let Err(error) = done.success_output() {
            let _ = host.run(&["-m", "iface", "-I", interface, "-o", "delete"]).await;
            return Err(format!("iscsi: failed to update iface records: {error}"));
        }
    }
    Ok(())
}

/// The settings of an interface that a copy needs.
fn settings_to_copy(interface_settings: &str) -> BTreeMap<&str, &str> {
    let pairs = interface_settings.lines().filter_map(|line| line.split_once(" = "));
    let is_copied = |(name, value): &(&str, &str)| {
        name.starts_with("iface.") && *name != "iface.iscsi_ifacename" && !value.contains("<empty>")
    };
    pairs.map(|(name, value)| (name.trim(), value.trim())).filter(is_copied).collect()
}

impl IscsiHost {
    async fn run(&self, args: &[&str]) -> Result<CommandOutput, CommandError> {
        run(&self.program, args).await
    }

    /// The SCSI host numbers of the sessions with a target, by portal.
    fn session_hosts(&self, iqn: &str) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        for host in read_dir_paths(&self.sys.join("class/iscsi_host")) {
            let Some(number) = name(&host).strip_prefix("host").map(str::to_owned) else { continue };
            for session in read_dir_paths(&host.join("device")) {
                if read(session.join("iscsi_session").join(name(&session)).join("targetname")) != iqn {
                    continue;
                }
                let connections = read_dir_paths(&session).into_iter();
                for connection in connections.filter(|path| name(path).starts_with("connection")) {
                    let known = connection.join("iscsi_connection").join(name(&connection));
                    for (address, port) in [("address", "port"), ("persistent_address", "persistent_port")] {
                        let (address, port) = (read(known.join(address)), read(known.join(port)));
                        let portal = match address.contains(':') {
                            true => format!("[{address}]:{port}"),
                            false => format!("{address}:{port}"),
                        };
                        found.insert(portal, number.clone());
                    }
                }
            }
        }
        found
    }

    /// The disk, if it has appeared. With a hardware adapter, the name of its link has a prefix
    /// with the adapter's PCI address.
    fn disk(&self, target: &Target, portal: &str) -> Option<PathBuf> {
        let link_name = by_path_name(target, portal);
        let by_adapter = format!("-{link_name}");
        read_dir_paths(&self.by_path).into_iter().find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            (name == *link_name || name.starts_with("pci-") && name.ends_with(&by_adapter)) && path.exists()
        })
    }

    /// The multipath device that combines several paths to a disk.
    fn multipath_device(&self, disk: &Path) -> Option<PathBuf> {
        let name = device_name(disk)?;
        let devices = read_dir_paths(&self.sys.join("block"));
        let device = devices.into_iter().find(|device| device.join("slaves").join(&name).exists())?;
        let device = device.file_name()?.to_str()?.to_owned();
        device.starts_with("dm-").then(|| Path::new("/dev").join(device))
    }
}

/// The name of the disk's link in `/dev/disk/by-path`.
fn by_path_name(target: &Target, portal: &str) -> String {
    format!("ip-{}-iscsi-{}-lun-{}", portal.replace(['[', ']'], ""), target.iqn, target.lun)
}

fn device_name(disk: &Path) -> Option<String> {
    Some(std::fs::canonicalize(disk).ok()?.file_name()?.to_str()?.to_owned())
}

/// Whether the disk is mounted, under any name: an exclusive open of a block device fails then.
fn is_busy(device: &Path) -> bool {
    use rustix::fs::{Mode, OFlags, open};
    let result = open(device, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    result.is_err_and(|error| error == rustix::io::Errno::BUSY)
}

/// Polls until there is a result or the timeout has passed, but at least once.
async fn poll_until<T>(timeout: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        let found = look();
        if found.is_some() || start.elapsed() >= timeout {
            return found;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

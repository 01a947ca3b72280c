//! Logging in to targets and out again, and the disks that turn up by it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Chap, Copied, Target, children, records};
use crate::volumes::tools::{Done, Failure, run};

/// How long a disk may take to turn up after its target is logged in to.
const DISK: Duration = Duration::from_secs(30);
/// How long the kernel may take to join several ways to one disk.
const JOINED: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(100);
/// How often portals that do not answer are asked, as long as at least one does.
const ROUNDS: usize = 5;
/// From then on two ways to a disk are enough.
const ENOUGH_FROM: usize = 2;
/// `iscsiadm`: there is no such session, or nothing at all of that name.
const NOT_THERE: [i32; 2] = [2, 21];
const EXISTS: i32 = 15;

/// Where things are on this host.
pub struct Host {
    pub program: PathBuf,
    pub sys: PathBuf,
    pub by_path: PathBuf,
    /// Where `iscsiadm` keeps what it knows, which differs between distributions.
    pub records: Vec<PathBuf>,
}

impl Default for Host {
    fn default() -> Host {
        Host {
            program: "iscsiadm".into(),
            sys: "/sys".into(),
            by_path: "/dev/disk/by-path".into(),
            records: vec!["/etc/iscsi".into(), "/var/lib/iscsi".into()],
        }
    }
}

/// Logs in to a target by all its portals, and waits for the disk.
pub async fn attach(host: &Host, target: &Target, chap: &Chap) -> Result<PathBuf, String> {
    let base = target.copied.as_ref().map_or(&target.interface, |copied| &copied.from);
    let shown =
        host.run(&["-m", "iface", "-I", base, "-o", "show"]).await.map_err(|failure| match failure {
            Failure::Missing(_) => {
                format!("{failure}: install open-iscsi (Debian) or iscsi-initiator-utils (Fedora)")
            }
            failure => failure.to_string(),
        })?;
    let shown = shown.content().map_err(|why| format!("iscsi: could not read iface {base} error: {why}"))?;
    if let Some(copied) = &target.copied {
        copy_interface(host, target, copied, &shown).await?;
    }
    let mut found: BTreeMap<usize, PathBuf> = BTreeMap::new();
    let mut last = String::new();
    for round in 1..=ROUNDS {
        for (at, portal) in target.portals.iter().enumerate() {
            if found.contains_key(&at) {
                continue;
            }
            match by_portal(host, target, portal, chap).await {
                Ok(device) => drop(found.insert(at, device)),
                Err(why) => last = why,
            }
        }
        if found.is_empty() {
            if target.copied.is_some() {
                let _ = host.run(&["-m", "iface", "-I", &target.interface, "-o", "delete"]).await;
            }
            return Err(format!("failed to get any path for iscsi disk, last err seen:\n{last}"));
        }
        if found.len() == target.portals.len() || found.len() > 1 && round >= ENOUGH_FROM {
            break;
        }
    }
    let patience = if target.portals.len() > 1 { JOINED } else { Duration::ZERO };
    let joined = until(patience, || found.values().find_map(|device| host.joined(device))).await;
    let first = joined.or_else(|| found.into_values().next()).ok_or("no disk")?;
    std::fs::canonicalize(&first).map_err(|error| format!("{}: {error}", first.display()))
}

/// Takes a disk from this node, and logs out where nothing else is had from the target.
pub async fn detach(
    host: &Host,
    target: &Target,
    device: Option<&Path>,
    others: &[Target],
) -> Result<(), String> {
    if let Some(device) = device.filter(|device| is_busy(device)) {
        return Err(format!("{} is still in use", device.display()));
    }
    for disk in target.portals.iter().filter_map(|portal| host.disk(target, portal)) {
        if let Some(joined) = host.joined(&disk) {
            let _ = run("multipath", &["-f".as_ref(), joined.as_os_str()]).await;
        }
        if let Some(name) = name_of(&disk) {
            let _ = std::fs::write(host.sys.join("block").join(name).join("device/delete"), "1");
        }
    }
    let is_used = |portal: &&String| {
        let is_same = |other: &&Target| other.iqn == target.iqn && other.interface == target.interface;
        others.iter().filter(is_same).any(|other| other.portals.contains(portal))
    };
    for portal in target.portals.iter().filter(|portal| !is_used(portal)) {
        for words in leave(target, portal) {
            end(host, &words).await?;
        }
    }
    match target.copied {
        Some(_) => end(host, &["-m", "iface", "-I", &target.interface, "-o", "delete"]).await,
        None => Ok(()),
    }
}

/// Where nothing is there any more, or never was, this is as good as done.
async fn end(host: &Host, words: &[&str]) -> Result<(), String> {
    match host.run(words).await {
        Err(Failure::Missing(_)) => Ok(()),
        Ok(done) if NOT_THERE.contains(&done.code) => Ok(()),
        Ok(done) => done.content().map(drop),
        Err(failure) => Err(failure.to_string()),
    }
}

fn leave<'a>(target: &'a Target, portal: &'a str) -> [Vec<&'a str>; 2] {
    let (iqn, interface) = (&target.iqn, &target.interface);
    let words = ["-m", "node", "-p", portal, "-T", iqn, "-I", interface];
    [[&words[..], &["--logout"]].concat(), [&words[..], &["-o", "delete"]].concat()]
}

/// Logs in by one portal unless that was done before, and waits for the disk.
async fn by_portal(host: &Host, target: &Target, portal: &str, chap: &Chap) -> Result<PathBuf, String> {
    let session = || host.sessions(&target.iqn).get(portal).cloned();
    let number = match session() {
        Some(number) => number,
        None => {
            log_in(host, target, portal, chap).await?;
            session().ok_or_else(|| {
                format!("Could not get SCSI host number for portal {portal} after logging in")
            })?
        }
    };
    // This disk alone: one that is not meant for this node may vanish without a word.
    let scan = host.sys.join("class/scsi_host").join(format!("host{number}")).join("scan");
    std::fs::write(&scan, format!("0 0 {}", target.lun))
        .map_err(|error| format!("{}: {error}", scan.display()))?;
    until(DISK, || host.disk(target, portal)).await.ok_or_else(|| {
        let path = host.by_path.join(link(target, portal));
        format!("Timed out waiting for device at path {} after {}s", path.display(), DISK.as_secs())
    })
}

async fn log_in(host: &Host, target: &Target, portal: &str, chap: &Chap) -> Result<(), String> {
    let (iqn, interface) = (target.iqn.as_str(), target.interface.as_str());
    let targets = ["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", interface];
    let node = ["-m", "node", "-p", portal, "-T", iqn, "-I", interface];
    let tell = async |words: &[&str], more: &[&str]| -> Result<String, String> {
        let done = host.run(&[words, more].concat()).await.map_err(|failure| failure.to_string())?;
        done.content()
    };
    let _ = tell(&targets, &["-o", "new"]).await;
    if chap.discovery {
        let failed =
            |why: String| format!("iscsi: failed to update discoverydb to portal {portal} error: {why}");
        tell(&targets, &["-o", "update", "-n", "discovery.sendtargets.auth.authmethod", "-v", "CHAP"])
            .await
            .map_err(failed)?;
        records::put(
            &records::of_discovery(&host.records, portal),
            "discovery.sendtargets.auth.",
            &chap.secrets,
        )
        .map_err(failed)?;
    }
    if let Err(why) = tell(&targets, &["--discover"]).await {
        let _ = tell(&targets, &["-o", "delete"]).await;
        return Err(format!("iscsi: failed to sendtargets to portal {portal} output: {why}"));
    }
    // Otherwise all disks of the target would turn up. Old ones do not know it.
    if let Err(why) = tell(&node, &["-o", "update", "-n", "node.session.scan", "-v", "manual"]).await {
        tracing::warn!(why, iqn, "disks of a target that nobody asked for may turn up");
    }
    if chap.session {
        let failed =
            |why: String| format!("iscsi: failed to update iscsi node to portal {portal} error: {why}");
        tell(&node, &["-o", "update", "-n", "node.session.auth.authmethod", "-v", "CHAP"])
            .await
            .map_err(failed)?;
        records::put(
            &records::of_node(&host.records, iqn, portal, interface),
            "node.session.auth.",
            &chap.secrets,
        )
        .map_err(failed)?;
    }
    if let Err(why) = tell(&node, &["--login"]).await {
        let _ = tell(&node, &["-o", "delete"]).await;
        return Err(format!("iscsi: failed to attach disk: Error: {why}"));
    }
    // A host that starts must not wait for it.
    let start = ["-m", "node", "-p", portal, "-T", iqn, "-o", "update", "-n", "node.startup", "-v", "manual"];
    if let Err(why) = tell(&start, &[]).await {
        tracing::warn!(why, iqn, "cannot set the login of a target to manual");
    }
    Ok(())
}

/// Makes an interface like another but for the name of the initiator.
async fn copy_interface(host: &Host, target: &Target, copied: &Copied, shown: &str) -> Result<(), String> {
    let interface = target.interface.as_str();
    let made = host.run(&["-m", "iface", "-I", interface, "-o", "new"]).await;
    let made = made.map_err(|failure| failure.to_string())?;
    if made.code != EXISTS {
        made.content().map_err(|why| format!("iscsi: failed to create new iface: {why}"))?;
    }
    let mut settings = settings_of(shown);
    settings.insert("iface.initiatorname", &copied.initiator);
    for (name, value) in settings {
        let words = ["-m", "iface", "-I", interface, "-o", "update", "-n", name, "-v", value];
        let done = host.run(&words).await.map_err(|failure| failure.to_string())?;
        if let Err(why) = done.content() {
            let _ = host.run(&["-m", "iface", "-I", interface, "-o", "delete"]).await;
            return Err(format!("iscsi: failed to update iface records: {why}"));
        }
    }
    Ok(())
}

/// What an interface has that a copy needs, too.
fn settings_of(shown: &str) -> BTreeMap<&str, &str> {
    let pairs = shown.lines().filter_map(|line| line.split_once(" = "));
    let is_copied = |(name, value): &(&str, &str)| {
        name.starts_with("iface.") && *name != "iface.iscsi_ifacename" && !value.contains("<empty>")
    };
    pairs.map(|(name, value)| (name.trim(), value.trim())).filter(is_copied).collect()
}

impl Host {
    async fn run(&self, words: &[&str]) -> Result<Done, Failure> {
        run(&self.program, words).await
    }

    /// The numbers of the kernel's hosts that are logged in to a target, by portal.
    fn sessions(&self, iqn: &str) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        for host in children(&self.sys.join("class/iscsi_host")) {
            let Some(number) = name(&host).strip_prefix("host").map(str::to_owned) else { continue };
            for session in children(&host.join("device")) {
                if read(session.join("iscsi_session").join(name(&session)).join("targetname")) != iqn {
                    continue;
                }
                let connections = children(&session).into_iter();
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

    /// The disk, if it has turned up. Hosts with an adapter of its own for this put its place first.
    fn disk(&self, target: &Target, portal: &str) -> Option<PathBuf> {
        let wanted = link(target, portal);
        let by_adapter = format!("-{wanted}");
        children(&self.by_path).into_iter().find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            (name == *wanted || name.starts_with("pci-") && name.ends_with(&by_adapter)) && path.exists()
        })
    }

    /// The device that joins several ways to one disk.
    fn joined(&self, disk: &Path) -> Option<PathBuf> {
        let name = name_of(disk)?;
        let devices = children(&self.sys.join("block"));
        let device = devices.into_iter().find(|device| device.join("slaves").join(&name).exists())?;
        let device = device.file_name()?.to_str()?.to_owned();
        device.starts_with("dm-").then(|| Path::new("/dev").join(device))
    }
}

/// How the disk is called by its way.
fn link(target: &Target, portal: &str) -> String {
    format!("ip-{}-iscsi-{}-lun-{}", portal.replace(['[', ']'], ""), target.iqn, target.lun)
}

fn name_of(disk: &Path) -> Option<String> {
    Some(std::fs::canonicalize(disk).ok()?.file_name()?.to_str()?.to_owned())
}

/// Whether something is mounted from a disk, by any name.
fn is_busy(device: &Path) -> bool {
    use rustix::fs::{Mode, OFlags, open};
    let opened = open(device, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    opened.is_err_and(|error| error == rustix::io::Errno::BUSY)
}

/// Looks until there is something, at least once.
async fn until<T>(patience: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        let found = look();
        if found.is_some() || begun.elapsed() >= patience {
            return found;
        }
        tokio::time::sleep(LOOK).await;
    }
}

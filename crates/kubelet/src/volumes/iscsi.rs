//! iSCSI: the host's `iscsiadm` logs in to a target, and the disk that turns up is mounted once for all pods of the node.
//!
//! What is here of a disk is written beside where it is mounted, together with the pods that have it, before anything is
//! done: whoever is last takes it away again, whoever was restarted in between.

mod attach;
mod records;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{PersistentVolume, Pod, Volume};
use reconcile::Object as _;
use serde_json::{Value, json};

use super::tools::is_mounted;
use super::{Materials, disk, secret_data};
use crate::config::Settings;
use crate::csi::{self, volume::Trouble};
use attach::Host;

const RECORD: &str = "iscsi.json";
const USERS: &str = "users";
const PORT: &str = "3260";
/// Where disks are mounted for all pods.
const PLACE: &str = "plugins/kubernetes.io/iscsi";
/// Where they are for a pod, in its directory.
const OF_POD: &str = "volumes/kubernetes.io~iscsi";

/// A disk behind a target, and how to get there. This is what is written down of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    portals: Vec<String>,
    iqn: String,
    lun: i64,
    /// The way of this host to it, as `iscsiadm` calls it.
    interface: String,
    /// The one that this is a copy of, with another name of the initiator.
    copied: Option<Copied>,
}

#[derive(Clone, Debug, PartialEq)]
struct Copied {
    from: String,
    initiator: String,
}

/// What a pod wants of a disk.
pub struct Wanted {
    target: Target,
    /// The name of the volume, or of the one in the pod.
    name: String,
    fs_type: String,
    pub read_only: bool,
    pub is_block: bool,
    mount_options: Vec<String>,
    discovery_chap: bool,
    session_chap: bool,
    /// Namespace and name.
    secret: Option<(String, String)>,
    /// What statuses of nodes call it, where they tell who may use it.
    given_as: Option<String>,
}

/// What both sides say to prove who they are; never shown to anybody.
#[derive(Default)]
pub struct Chap {
    discovery: bool,
    session: bool,
    secrets: BTreeMap<String, String>,
}

/// A disk that is there.
pub struct Ready {
    pub path: PathBuf,
    /// It was not, until now.
    pub is_fresh: bool,
}

impl Wanted {
    /// One that the pod names itself.
    pub fn inline(pod: &Pod, volume: &Volume) -> Option<Wanted> {
        let source = json!(volume.iscsi.as_ref()?);
        Some(Wanted::from(&volume.name, pod.namespace(), &source))
    }

    /// One that its claim leads to.
    pub fn persistent(pod: &Pod, volume: &PersistentVolume, read_only: bool) -> Option<Wanted> {
        let spec = volume.spec.as_ref()?;
        let disk = spec.iscsi.as_ref()?;
        let wanted = Wanted::from(volume.name(), pod.namespace(), &json!(disk));
        Some(Wanted {
            given_as: Some(unique_name(&disk.target_portal, &disk.iqn, disk.lun.into())),
            read_only: read_only || wanted.read_only,
            is_block: spec.volume_mode.as_deref() == Some("Block"),
            mount_options: spec.mount_options.clone().unwrap_or_default(),
            ..wanted
        })
    }

    fn from(name: &str, namespace: &str, source: &Value) -> Wanted {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let or = |value: String, other: &str| if value.is_empty() { other.to_owned() } else { value };
        let portals =
            [&source["targetPortal"]].into_iter().chain(source["portals"].as_array().into_iter().flatten());
        let mut portals: Vec<String> = portals.map(|portal| with_port(&text(portal))).collect();
        let mut seen = std::collections::BTreeSet::new();
        portals.retain(|portal| seen.insert(portal.clone()));
        let base = or(text(&source["iscsiInterface"]), "default");
        let initiator = source["initiatorName"].as_str().filter(|name| !name.is_empty());
        let copied = initiator.map(|name| Copied { from: base.clone(), initiator: name.to_owned() });
        let interface = if copied.is_some() { format!("{}:{name}", portals[0]) } else { base };
        let secret = source["secretRef"]["name"].as_str().filter(|name| !name.is_empty());
        let secret =
            secret.map(|name| (or(text(&source["secretRef"]["namespace"]), namespace), name.to_owned()));
        let (iqn, lun) = (text(&source["iqn"]), source["lun"].as_i64().unwrap_or_default());
        Wanted {
            target: Target { portals, iqn, lun, interface, copied },
            name: name.to_owned(),
            fs_type: text(&source["fsType"]),
            read_only: source["readOnly"] == true,
            is_block: false,
            mount_options: Vec::new(),
            discovery_chap: source["chapAuthDiscovery"] == true,
            session_chap: source["chapAuthSession"] == true,
            secret,
            given_as: None,
        }
    }

    fn failed(&self, step: &str, message: impl ToString) -> Trouble {
        let operation = match (step, self.is_block) {
            ("begin", false) => "MountVolume.NewMounter initialization",
            ("begin", true) => "MapVolume.NewBlockVolumeMapper initialization",
            ("attach", false) => "MountVolume.WaitForAttach",
            ("attach", true) => "MapVolume.WaitForAttach",
            ("device", _) => "MountVolume.MountDevice",
            _ => "MountVolume.SetUp",
        };
        Trouble::Failed { operation, message: message.to_string() }
    }
}

/// Makes a disk be there for a pod; may be repeated.
pub async fn set_up(materials: &Materials<'_>, pod: &Pod, wanted: &Wanted) -> Result<Ready, Trouble> {
    let disks = Disks::new(materials.settings, materials.csi);
    if let Some(path) = disks.had(pod.uid(), wanted).await? {
        return Ok(Ready { path, is_fresh: false });
    }
    if let Some(name) = &wanted.given_as {
        // Before anything is said: whoever goes away meanwhile takes it back.
        disks.note(pod.uid(), wanted).await?;
        csi::volume::may_be_used(materials, name)?;
    }
    let mut chap = Chap { discovery: wanted.discovery_chap, session: wanted.session_chap, ..Chap::default() };
    if let Some((namespace, name)) = wanted.secret.as_ref().filter(|_| chap.discovery || chap.session) {
        chap.secrets = secret_data(materials, namespace, name).await.map_err(|why| {
            wanted.failed("begin", format!("couldn't get secret {namespace}/{name} error: {why}"))
        })?;
    }
    disks.set_up(pod.uid(), wanted, &chap).await
}

/// Takes all disks away from a pod that is over, after the parts of them that its containers had; those nobody has any
/// more leave the node.
pub async fn let_go(busy: &csi::Drivers, settings: &Settings, pod: &str) -> Result<(), String> {
    Disks::new(settings, busy).let_go(pod).await
}

/// Takes all disks away from pods of which none is left.
pub async fn let_all_go(root: &Path, pods: &Path) -> Result<(), String> {
    let busy = csi::Drivers::default();
    let disks = Disks { host: Host::default(), root: root.join(PLACE), pods, busy: &busy };
    let mut outcome = Ok(());
    for pod in disks.users() {
        outcome = outcome.and(disks.let_go(&pod).await);
    }
    outcome
}

/// The disks that this node was given, as statuses of nodes call them.
pub fn in_use(root: &Path) -> Vec<String> {
    let had = all(&root.join(PLACE)).into_iter().filter(|dir| !children(&dir.join(USERS)).is_empty());
    had.flat_map(|dir| names(&dir)).collect()
}

/// The pods that have disks, or had them when somebody was interrupted.
pub fn users(busy: &csi::Drivers, settings: &Settings) -> BTreeSet<String> {
    Disks::new(settings, busy).users()
}

/// The disks of this node.
struct Disks<'a> {
    host: Host,
    /// Where disks are mounted for all pods.
    root: PathBuf,
    pods: &'a Path,
    busy: &'a csi::Drivers,
}

impl<'a> Disks<'a> {
    fn new(settings: &'a Settings, busy: &'a csi::Drivers) -> Disks<'a> {
        let root = settings.root.join(PLACE);
        Disks { host: Host::default(), root, pods: &settings.pods, busy }
    }

    /// One login or logout at a time for each target.
    async fn alone(&self, target: &Target) -> impl Drop + use<> {
        self.busy.busy.alone(&format!("kubernetes.io/iscsi/{}", target.iqn)).await
    }

    fn dir(&self, wanted: &Wanted) -> PathBuf {
        let Target { portals, iqn, lun, interface, .. } = &wanted.target;
        let root = if wanted.is_block { self.root.join("volumeDevices") } else { self.root.clone() };
        root.join(format!("iface-{interface}")).join(format!("{}-{iqn}-lun-{lun}", portals[0]))
    }

    fn place(&self, pod: &str, wanted: &Wanted) -> PathBuf {
        self.pods.join(pod).join(OF_POD).join(&wanted.name)
    }

    /// Where a disk is that the pod has already.
    fn found(&self, pod: &str, wanted: &Wanted) -> Option<PathBuf> {
        if wanted.is_block {
            let dir = self.dir(wanted);
            let device = std::fs::read_link(dir.join("device")).ok()?;
            return (dir.join(USERS).join(pod).exists() && device.exists()).then_some(device);
        }
        Some(self.place(pod, wanted)).filter(|place| is_mounted(place))
    }

    /// The same, which is said again: whoever mounted it may not have known that it has to be.
    async fn had(&self, pod: &str, wanted: &Wanted) -> Result<Option<PathBuf>, Trouble> {
        let Some(path) = self.found(pod, wanted) else { return Ok(None) };
        if let Some(name) = &wanted.given_as {
            self.note(pod, wanted).await?;
            self.busy.use_of(name, true);
        }
        Ok(Some(path))
    }

    /// Writes down that a pod is to have a disk.
    async fn note(&self, pod: &str, wanted: &Wanted) -> Result<(), Trouble> {
        wanted.target.check().map_err(|why| wanted.failed("begin", why))?;
        let _alone = self.alone(&wanted.target).await;
        note(&self.dir(wanted), wanted, pod).map_err(|error| wanted.failed("attach", error))
    }

    async fn set_up(&self, pod: &str, wanted: &Wanted, chap: &Chap) -> Result<Ready, Trouble> {
        let target = &wanted.target;
        target.check().map_err(|why| wanted.failed("begin", why))?;
        let dir = self.dir(wanted);
        let _alone = self.alone(target).await;
        if let Some(path) = self.found(pod, wanted) {
            return Ok(Ready { path, is_fresh: false });
        }
        note(&dir, wanted, pod).map_err(|error| wanted.failed("attach", error))?;
        let shared = dir.join("mount");
        let ready = |path: PathBuf| Ready { path, is_fresh: true };
        if wanted.is_block || !is_mounted(&shared) {
            let device = attach::attach(&self.host, target, chap).await;
            let device = device.map_err(|why| wanted.failed("attach", why))?;
            let link = dir.join("device");
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(&device, &link).map_err(|error| wanted.failed("attach", error))?;
            if wanted.is_block {
                return Ok(ready(device));
            }
            disk::mount(&device, &shared, &wanted.fs_type, &wanted.mount_options, wanted.read_only)
                .await
                .map_err(|why| wanted.failed("device", why))?;
        }
        let place = self.place(pod, wanted);
        let bound = std::fs::create_dir_all(&place)
            .and_then(|()| rustix::mount::mount_bind(&shared, &place).map_err(Into::into));
        bound.map_err(|error| wanted.failed("set up", format!("mount failed: {error}")))?;
        Ok(ready(place))
    }

    async fn let_go(&self, pod: &str) -> Result<(), String> {
        for place in children(&self.pods.join(pod).join(OF_POD)) {
            if is_mounted(&place) {
                let _ = rustix::mount::unmount(&place, rustix::mount::UnmountFlags::DETACH);
            }
            // Whatever else is in there is somebody's data.
            let _ = std::fs::remove_dir(place);
        }
        for dir in self.all().into_iter().filter(|dir| dir.join(USERS).join(pod).exists()) {
            let Some(target) = Target::read(&dir) else { continue };
            let _alone = self.alone(&target).await;
            if children(&dir.join(USERS)).iter().all(|user| user.ends_with(pod)) {
                let told = |error: &dyn std::fmt::Display| format!("{}: {error}", dir.display());
                let shared = dir.join("mount");
                if is_mounted(&shared) {
                    let none = rustix::mount::UnmountFlags::empty();
                    rustix::mount::unmount(&shared, none).map_err(|error| told(&error))?;
                }
                let others: Vec<Target> = self
                    .all()
                    .iter()
                    .filter(|other| **other != dir)
                    .filter_map(|dir| Target::read(dir))
                    .collect();
                let device = std::fs::read_link(dir.join("device")).ok();
                attach::detach(&self.host, &target, device.as_deref(), &others)
                    .await
                    .map_err(|why| told(&why))?;
                // Nothing of a disk is in here any more, or this fails and is tried again, for which it has to be known.
                match std::fs::remove_dir(&shared) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(told(&error)),
                    _ => {}
                }
                let elsewhere: Vec<String> =
                    self.all().iter().filter(|other| **other != dir).flat_map(|dir| names(dir)).collect();
                // Whoever was here before may have known it by another name.
                for name in names(&dir).iter().chain(&target.names()) {
                    if !elsewhere.contains(name) {
                        self.busy.use_of(name, false);
                    }
                }
                for name in ["device", &*format!("{USERS}/{pod}"), RECORD] {
                    let _ = std::fs::remove_file(dir.join(name));
                }
                let _ = std::fs::remove_dir(dir.join(USERS));
                let _ = std::fs::remove_dir(&dir);
                let _ = dir.parent().map(std::fs::remove_dir);
            } else {
                let _ = std::fs::remove_file(dir.join(USERS).join(pod));
            }
        }
        Ok(())
    }

    fn users(&self) -> BTreeSet<String> {
        let users = self.all().into_iter().flat_map(|dir| children(&dir.join(USERS)));
        users.filter_map(|user| Some(user.file_name()?.to_str()?.to_owned())).collect()
    }

    /// Where each disk is written down.
    fn all(&self) -> Vec<PathBuf> {
        all(&self.root)
    }
}

fn all(root: &Path) -> Vec<PathBuf> {
    let interfaces = children(root).into_iter().chain(children(&root.join("volumeDevices")));
    let dirs = interfaces.filter(|dir| !dir.ends_with("volumeDevices")).flat_map(|dir| children(&dir));
    dirs.filter(|dir| dir.join(RECORD).exists()).collect()
}

fn recorded(dir: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(dir.join(RECORD)).ok()?).ok()
}

/// What statuses of nodes call a disk that this node was given. Those that a skiff mounted which did not write that down may
/// be called either way.
fn names(dir: &Path) -> Vec<String> {
    match recorded(dir).as_ref().map(|known| known.get("givenAs")) {
        Some(Some(name)) => name.as_str().map(str::to_owned).into_iter().collect(),
        Some(None) => Target::read(dir).map(|target| target.names()).unwrap_or_default(),
        None => Vec::new(),
    }
}

fn unique_name(portal: &str, iqn: &str, lun: i64) -> String {
    format!("kubernetes.io/iscsi/{portal}:{iqn}:{lun}")
}

impl Target {
    /// What statuses of nodes may call it: its volume need not say the port.
    fn names(&self) -> Vec<String> {
        let portal = self.portals.first().map_or("", String::as_str);
        let short = portal.strip_suffix(PORT).and_then(|portal| portal.strip_suffix(':'));
        [Some(portal), short]
            .into_iter()
            .flatten()
            .map(|portal| unique_name(portal, &self.iqn, self.lun))
            .collect()
    }

    /// Names become those of directories and files.
    fn check(&self) -> Result<(), String> {
        let names = self.portals.iter().chain([&self.iqn, &self.interface]);
        let names = names.chain(self.copied.iter().map(|copied| &copied.from));
        match names.into_iter().find(|name| name.contains('/') || name.contains("..")) {
            Some(name) => Err(format!("{name:?} is no name of a target, portal or interface")),
            None => Ok(()),
        }
    }

    fn read(dir: &Path) -> Option<Target> {
        let value = recorded(dir)?;
        let text = |name: &str| value[name].as_str().map(str::to_owned);
        let portals = value["portals"].as_array()?.iter();
        let copied = text("initiatorName")
            .map(|initiator| Copied { from: text("initIface").unwrap_or_default(), initiator });
        Some(Target {
            portals: portals.filter_map(|portal| portal.as_str().map(str::to_owned)).collect(),
            iqn: text("iqn")?,
            lun: value["lun"].as_i64()?,
            interface: text("iface")?,
            copied,
        })
    }
}

/// Writes down that a pod is to have a disk.
fn note(dir: &Path, wanted: &Wanted, pod: &str) -> std::io::Result<()> {
    let Target { portals, iqn, lun, interface, copied } = &wanted.target;
    let before = recorded(dir);
    let mut record = json!({
        "portals": portals, "iqn": iqn, "lun": lun, "iface": interface,
        "initIface": copied.as_ref().map(|copied| &copied.from),
        "initiatorName": copied.as_ref().map(|copied| &copied.initiator),
    });
    // A pod that names the disk itself takes it from nobody who was given it.
    match (&wanted.given_as, &before) {
        (None, Some(before)) => {
            if let Some(name) = before.get("givenAs") {
                record["givenAs"] = name.clone();
            }
        }
        (name, _) => record["givenAs"] = json!(name),
    }
    std::fs::create_dir_all(dir.join(USERS))?;
    std::fs::write(dir.join(USERS).join(pod), "")?;
    if before.as_ref() == Some(&record) {
        return Ok(());
    }
    std::fs::write(dir.join(RECORD), record.to_string())
}

fn with_port(portal: &str) -> String {
    if portal.contains(':') { portal.to_owned() } else { format!("{portal}:{PORT}") }
}

fn children(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

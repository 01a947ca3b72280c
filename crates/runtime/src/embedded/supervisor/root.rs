//! The root filesystem of a container: layers, mounts, devices, masked and read-only paths.
//!
//! Runs in the process that becomes the container. The kernel resolves every path within the
//! container's root, so that symlinks of an image never lead to the host. Mounts are attached by
//! descriptor, so that nothing can be swapped between lookup and mount.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, OpenTreeFlags, UnmountFlags,
};
use rustix::process::{chdir, fchdir, pivot_root};
use sys::mounts::{self, Attributes};

use super::Failure;
use super::hooks::Hooks;
use super::layers;
use super::spawn::SpawnContext;
use super::users::PodUsers;
use super::volumes::{self, Volume};
use crate::embedded::spec::{Container, Device, Mount, Propagation};

/// The default devices of every container: name, major and minor number.
const DEFAULT_DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
const DEV_LINKS: [(&str, &str); 6] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("core", PROC_CORE_PATH),
    ("ptmx", "pts/ptmx"),
];
const PROC_CORE_PATH: &str = "/proc/kcore";
/// Entries of `/dev` that privileged containers have themselves instead of the host's.
const PRIVATE_DEV_ENTRIES: [&str; 7] = ["pts", "shm", "fd", "mqueue", "console", "ptmx", "tty"];
/// The GID of the group `tty`, which owns terminals.
const TTY_GID: u32 = 5;
/// `PROC_SUPER_MAGIC`
const PROC_SUPER_MAGIC: i64 = 0x9fa0;

/// Files of `/proc` about the machine that a mount may cover with those of the container, as LXCFS
/// does.
const ALLOWED_PROC_MOUNTS: [&str; 10] = [
    "cpuinfo",
    "diskstats",
    "meminfo",
    "stat",
    "swaps",
    "uptime",
    "loadavg",
    "slabinfo",
    "sys/kernel/ns_last_pid",
    "sys/crypto/fips_enabled",
];

/// Whether a file is on procfs.
pub fn is_procfs(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type == PROC_SUPER_MAGIC)
}

/// The sources of a container's mounts, opened in the mount namespaces where they are visible.
pub struct MountSources {
    /// Volumes by target, nested targets after their parents.
    mounts: Vec<(String, Volume)>,
    shm: OwnedFd,
    /// On cgroup v1, the container's cgroups with the names of their hierarchies. On v2, the host's
    /// hierarchy for a privileged container.
    cgroups: Vec<(String, OwnedFd)>,
}

impl MountSources {
    /// /dev/shm is opened in the pod's mount namespace, everything else in the host's, which this
    /// process enters.
    pub fn open(spec: &Container, context: &SpawnContext<'_>) -> Result<MountSources, Failure> {
        let cgroups = context.cgroups;
        let shm = mounts::copy_mount(context.shm).map_err(Failure::during("open the pod's /dev/shm"))?;
        rustix::thread::move_into_link_name_space(context.host_mount_namespace, None)
            .map_err(Failure::during("enter the host's mount namespace"))?;
        // The sort below is stable, so volumes of the image come before mounts of the same depth.
        // Symlinks may make both the same place, and the mount has to be on top.
        let own = spec.volumes.iter().map(|target| (target.clone(), Volume::Own));
        let mut mount_list: Vec<(String, Volume)> = own.collect();
        for mount in &spec.mounts {
            let volume = match &mount.image {
                Some(image) => Volume::Image(image.clone()),
                None => {
                    let tree = open_mount(mount)?;
                    if let Some(users) = context.users.filter(|_| mount.maps_owners) {
                        users.map(&tree, &mount.source)?;
                    }
                    Volume::Tree(tree)
                }
            };
            if let Some(label) = spec.selinux.as_deref().filter(|_| mount.is_labelled) {
                let action = || format!("label the files of {:?}", mount.target);
                layers::label_tree(&mount.source, label).map_err(|error| Failure::during(action())(error))?;
            }
            mount_list.push((mount.target.clone(), volume));
        }
        // Nested targets are mounted after their parents.
        mount_list.sort_by_key(|(target, _)| Path::new(target).components().count());
        let mut own = Vec::new();
        if !cgroups.is_v2() {
            for directory in cgroups.directories(&spec.cgroup) {
                let depth = Path::new(spec.cgroup.trim_matches('/')).components().count();
                let mount_name = directory.ancestors().nth(depth).and_then(Path::file_name);
                let name = mount_name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                let tree =
                    mounts::copy_mount(&directory).map_err(Failure::during("open the container cgroup"))?;
                own.push((name, tree));
            }
        } else if spec.privileged {
            // A privileged container stays in the host's cgroup namespace. Mounting cgroup2 there again
            // would change the options of the host's mount.
            let attributes = Attributes {
                no_suid: true,
                no_dev: true,
                no_exec: true,
                recursive: true,
                ..Attributes::default()
            };
            for directory in cgroups.directories("") {
                let tree = mounts::copy_tree(&directory)
                    .and_then(|tree| mounts::set_mount_attributes(&tree, attributes).map(|()| tree))
                    .map_err(Failure::during("open the host's cgroups"))?;
                own.push((String::new(), tree));
            }
        }
        Ok(MountSources { mounts: mount_list, shm, cgroups: own })
    }
}

fn open_mount(mount: &Mount) -> Result<OwnedFd, Failure> {
    let failed = |what: &str| Failure::during(format!("{what} {:?} for {:?}", mount.source, mount.target));
    if !mount.source.exists() {
        std::fs::create_dir_all(&mount.source).map_err(failed("create"))?;
    }
    let tree = mounts::copy_tree(&mount.source).map_err(failed("mount"))?;
    let propagation = match mount.propagation {
        Propagation::Private => mounts::Propagation::Private,
        Propagation::HostToContainer => mounts::Propagation::Slave,
        // The clone is in the peer group of its source, so mounts propagate in both directions.
        Propagation::Bidirectional => mounts::Propagation::Unchanged,
    };
    let recursive_attributes = Attributes { recursive: true, propagation, ..Attributes::default() };
    if propagation != mounts::Propagation::Unchanged {
        mounts::set_mount_attributes(&tree, recursive_attributes).map_err(failed("mount"))?;
    }
    if mount.read_only {
        let attributes = Attributes {
            read_only: true,
            recursive: mount.recursive_read_only,
            propagation: mounts::Propagation::Unchanged,
            ..Attributes::default()
        };
        mounts::set_mount_attributes(&tree, attributes).map_err(failed("make read-only"))?;
    }
    Ok(tree)
}

/// Sets up the container's root filesystem and moves into it. `directory` has the container's writable
/// layer.
pub fn enter(
    spec: &Container,
    directory: &Path,
    mut trees: MountSources,
    context: &SpawnContext<'_>,
    hooks: &Hooks<'_>,
) -> Result<(), Failure> {
    // Later mounts of the host still propagate to slave volumes; nothing propagates to the host.
    rustix::mount::mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(Failure::during("change the propagation of the host's mounts"))?;
    let root = Root { fd: layers::mount_root(spec, directory, context.users)?, users: context.users };
    // While the root contains nothing but the image.
    let builder = volumes::VolumeBuilder {
        root: root.fd.as_fd(),
        directory,
        layers_dir: &spec.layers_dir,
        label: spec.selinux.as_deref(),
        users: context.users,
    };
    let mut volumes = Vec::new();
    for (at, (target, volume)) in std::mem::take(&mut trees.mounts).into_iter().enumerate() {
        volumes.push((builder.open_volume(at, &target, volume)?, target));
    }
    root.mount_kernel_filesystems(spec, context.cgroups.is_v2(), &trees)?;
    root.devices(spec)?;
    // Opened before a volume can be mounted in their place.
    let null = root.null().map_err(Failure::during("open /dev/null"))?;
    let proc = root.open(Path::new("/proc")).map_err(Failure::during("open /proc"))?;
    for (tree, target) in &volumes {
        let failed = |error: io::Error| Failure::during(format!("mount on {target:?}"))(error);
        let is_directory = file_type(tree).map_err(failed)?.is_dir();
        let place = match allowed_proc_mount(target) {
            Some(name) => open_without_symlinks(&proc, name).map_err(failed)?,
            None => {
                let place = root.ensure_target(target, is_directory).map_err(failed)?;
                if is_procfs(&place) {
                    return Err(Failure(format!("{target:?} cannot be mounted because it is inside /proc")));
                }
                place
            }
        };
        mounts::attach(tree, &place).map_err(failed)?;
    }
    if !spec.privileged {
        root.mask_paths(spec, &null)?;
    }
    hooks.run_create_hooks(context)?;
    change_root(&root.fd)?;
    if spec.read_only {
        let root_fd = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let attributes = Attributes {
            read_only: true,
            propagation: mounts::Propagation::Unchanged,
            ..Attributes::default()
        };
        root_fd
            .map_err(io::Error::from)
            .and_then(|root| mounts::set_mount_attributes(root, attributes))
            .map_err(Failure::during("make the root read-only"))?;
    }
    Ok(())
}

/// The name in `/proc` of a target that may be covered.
fn allowed_proc_mount(target: &str) -> Option<&Path> {
    let name = Path::new(target).strip_prefix("/proc").ok()?;
    ALLOWED_PROC_MOUNTS.iter().any(|known| Path::new(known) == name).then_some(name)
}

/// Opens an entry of the mount itself: no symlinks, and nothing that is mounted in it.
fn open_without_symlinks(directory: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve)?)
}

fn change_root(root: &OwnedFd) -> Result<(), Failure> {
    fn failed<E: Into<io::Error>>(error: E) -> Failure {
        Failure::during("move into the container root")(error)
    }
    let old = rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(failed)?;
    fchdir(root).map_err(failed)?;
    pivot_root(".", ".").map_err(failed)?;
    // pivot_root(".", ".") has stacked the old root on top of the new one. Unmount it.
    fchdir(&old).map_err(failed)?;
    rustix::mount::mount_change(".", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(failed)?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(failed)?;
    chdir("/").map_err(failed)
}

/// Creates an instance of a kernel filesystem.
fn new_filesystem(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (name, value) in options {
        match *value {
            "" => rustix::mount::fsconfig_set_flag(&context, *name)?,
            value => rustix::mount::fsconfig_set_string(&context, *name, value)?,
        }
    }
    rustix::mount::fsconfig_create(&context)?;
    Ok(rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// An empty filesystem of size 0 that is mounted nowhere.
pub fn empty_filesystem() -> io::Result<OwnedFd> {
    new_filesystem("tmpfs", &[("size", "0")], MountAttrFlags::MOUNT_ATTR_RDONLY)
}

fn file_type(fd: impl AsFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode))
}

/// The container's root while it is set up.
struct Root<'a> {
    fd: OwnedFd,
    users: Option<&'a PodUsers>,
}

impl Root<'_> {
    /// Changes the owner of a created file to the pod's root user.
    fn set_owner(&self, directory: impl AsFd, name: &OsStr) -> rustix::io::Result<()> {
        let Some((uid, gid)) = self.users.map(PodUsers::root) else { return Ok(()) };
        rustix::fs::chownat(directory, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
    }

    fn open(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        crate::embedded::open_in_root(&self.fd, path)
    }

    /// Opens the file or directory to mount on, and creates it if it does not exist. For a dangling
    /// symlink, its target is created.
    fn ensure_target(&self, target: &str, is_directory: bool) -> io::Result<OwnedFd> {
        // The kernel's limit of symlinks in a path.
        const MAX_SYMLINKS: usize = 40;
        if Path::new(target).components().any(|part| part == Component::ParentDir) {
            return Err(io::Error::other("the path contains .."));
        }
        let mut path = PathBuf::from("/");
        let mut current = self.open(&path)?;
        let mut links = 0;
        // The remaining components in reverse order.
        let mut rest = path_components(Path::new(target));
        while let Some(name) = rest.pop() {
            path.push(&name);
            current = match self.open(&path) {
                Err(Errno::NOENT) => {
                    if let Ok(link) = rustix::fs::readlinkat(&current, &name, Vec::new()) {
                        links += 1;
                        if links > MAX_SYMLINKS {
                            return Err(Errno::LOOP.into());
                        }
                        path.pop();
                        rest.extend(path_components(Path::new(OsStr::from_bytes(link.as_bytes()))));
                        continue;
                    }
                    if rest.is_empty() && !is_directory {
                        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                        drop(rustix::fs::openat(&current, &name, flags, Mode::from_raw_mode(0o644))?);
                    } else {
                        rustix::fs::mkdirat(&current, &name, Mode::from_raw_mode(0o755))?;
                    }
                    self.set_owner(&current, &name)?;
                    self.open(&path)?
                }
                found => found?,
            };
        }
        Ok(current)
    }

    /// Mounts a filesystem that the container and this process rely on. A symlink would let a volume
    /// take its place.
    fn mount_without_symlinks(&self, target: &str, tree: io::Result<OwnedFd>) -> Result<(), Failure> {
        let name = target.trim_start_matches('/');
        let is_link = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|found| !FileType::from_raw_mode(found.st_mode).is_dir());
        if is_link {
            return Err(Failure(format!("{target} must be mounted on ordinary directory")));
        }
        self.mount(target, tree)
    }

    fn mount(&self, target: &str, tree: io::Result<OwnedFd>) -> Result<(), Failure> {
        let done = tree.and_then(|tree| mounts::attach(tree, self.ensure_target(target, true)?));
        done.map_err(Failure::during(format!("mount {target}")))
    }

    fn mount_kernel_filesystems(
        &self,
        spec: &Container,
        is_v2: bool,
        trees: &MountSources,
    ) -> Result<(), Failure> {
        let safe = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NOEXEC
            | MountAttrFlags::MOUNT_ATTR_NODEV;
        let mut sys = safe;
        if !spec.privileged {
            sys |= MountAttrFlags::MOUNT_ATTR_RDONLY;
        }
        self.mount_without_symlinks("/proc", new_filesystem("proc", &[], safe))?;
        let (root, terminals) = match self.users {
            Some(users) => (users.root(), users.outside(0, TTY_GID)),
            None => ((Uid::ROOT, Gid::ROOT), (Uid::ROOT, Gid::from_raw(TTY_GID))),
        };
        let (uid, gid) = (root.0.as_raw().to_string(), root.1.as_raw().to_string());
        let dev = [("mode", "755"), ("size", "65536k"), ("uid", &uid), ("gid", &gid)];
        let strict = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_STRICTATIME;
        self.mount("/dev", new_filesystem("tmpfs", &dev, strict))?;
        let gid = terminals.1.as_raw().to_string();
        let pts = [("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620"), ("gid", &gid)];
        let no_suid = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        self.mount("/dev/pts", new_filesystem("devpts", &pts, no_suid))?;
        let shm = self.ensure_target("/dev/shm", true).and_then(|place| mounts::attach(&trees.shm, place));
        shm.map_err(Failure::during("mount /dev/shm"))?;
        self.mount("/dev/mqueue", new_filesystem("mqueue", &[], safe))?;
        self.mount_without_symlinks("/sys", new_filesystem("sysfs", &[], sys))?;
        if is_v2 {
            let of_host = trees.cgroups.first().map(|(_, tree)| tree.try_clone());
            return self
                .mount("/sys/fs/cgroup", of_host.unwrap_or_else(|| new_filesystem("cgroup2", &[], sys)));
        }
        let groups = [("mode", "755")];
        self.mount("/sys/fs/cgroup", new_filesystem("tmpfs", &groups, safe))?;
        for (name, tree) in &trees.cgroups {
            let target = format!("/sys/fs/cgroup/{name}");
            let attributes = Attributes {
                read_only: !spec.privileged,
                no_suid: true,
                no_dev: true,
                no_exec: true,
                ..Attributes::default()
            };
            let done = mounts::set_mount_attributes(tree, attributes)
                .and_then(|()| mounts::attach(tree, self.ensure_target(&target, true)?));
            done.map_err(Failure::during(format!("mount {target}")))?;
            // Controllers that are mounted together are also found under each single name.
            for controller in name.split(',').filter(|controller| controller != name) {
                let groups = self
                    .ensure_target("/sys/fs/cgroup", true)
                    .map_err(Failure::during("open /sys/fs/cgroup"))?;
                let _ = rustix::fs::symlinkat(name.as_str(), &groups, controller);
            }
        }
        let place =
            self.ensure_target("/sys/fs/cgroup", true).map_err(Failure::during("open /sys/fs/cgroup"))?;
        let attributes = Attributes {
            read_only: !spec.privileged,
            propagation: mounts::Propagation::Unchanged,
            ..Attributes::default()
        };
        mounts::set_mount_attributes(place, attributes)
            .map_err(Failure::during("make /sys/fs/cgroup read-only"))
    }

    fn devices(&self, spec: &Container) -> Result<(), Failure> {
        let dev = self.ensure_target("/dev", true).map_err(Failure::during("open /dev"))?;
        let mode = Mode::from_raw_mode(0o666);
        for (name, major, minor) in DEFAULT_DEVICES {
            let device = rustix::fs::makedev(major, minor);
            rustix::fs::mknodat(&dev, name, FileType::CharacterDevice, mode, device)
                .and_then(|()| self.set_owner(&dev, name.as_ref()))
                .map_err(Failure::during(format!("create /dev/{name}")))?;
        }
        for (name, target) in DEV_LINKS {
            // Not every kernel has /proc/kcore.
            if target == PROC_CORE_PATH && self.open(Path::new(PROC_CORE_PATH)).is_err() {
                continue;
            }
            rustix::fs::symlinkat(target, &dev, name)
                .and_then(|()| self.set_owner(&dev, name.as_ref()))
                .map_err(Failure::during(format!("create /dev/{name}")))?;
        }
        if spec.privileged {
            self.copy_devices(Path::new("/dev"), 0);
        }
        for device in &spec.devices {
            self.make_device(device)
                .map_err(Failure::during(format!("create the device {:?}", device.target)))?;
        }
        Ok(())
    }

    /// Copies the host's device nodes, best effort.
    fn copy_devices(&self, directory: &Path, depth: usize) {
        const MAX_DEV_DEPTH: usize = 4;
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let Ok(kind) = entry.file_type() else { continue };
            use std::os::unix::fs::FileTypeExt as _;
            if depth == 0 && PRIVATE_DEV_ENTRIES.iter().any(|known| *known == name) {
                continue;
            }
            if kind.is_dir() && depth < MAX_DEV_DEPTH {
                self.copy_devices(&path, depth + 1);
            } else if kind.is_block_device() || kind.is_char_device() {
                let _ = self.copy_device(&path, &path.display().to_string());
            }
        }
    }

    fn copy_device(&self, source: &Path, target: &str) -> io::Result<()> {
        let found = rustix::fs::stat(source)?;
        let (parent, name) = target.rsplit_once('/').ok_or(io::ErrorKind::InvalidInput)?;
        let parent = self.ensure_target(parent, true)?;
        let mode = Mode::from_raw_mode(found.st_mode);
        let kind = FileType::from_raw_mode(found.st_mode);
        if !kind.is_char_device() && !kind.is_block_device() {
            return Err(io::Error::other(format!("{} is not a device", source.display())));
        }
        match rustix::fs::mknodat(&parent, name, kind, mode, found.st_rdev) {
            Err(Errno::EXIST) => return Ok(()),
            other => other?,
        }
        // Some devices belong to a group that the container's user may be in.
        let owner = (Some(Uid::from_raw(found.st_uid)), Some(Gid::from_raw(found.st_gid)));
        Ok(rustix::fs::chownat(&parent, name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    fn make_device(&self, device: &Device) -> io::Result<()> {
        let Some(node) = &device.made else { return self.copy_device(&device.source, &device.target) };
        let (kind, number) = match node.numbers {
            Some((is_block, major, minor)) => {
                let kind = if is_block { FileType::BlockDevice } else { FileType::CharacterDevice };
                (kind, rustix::fs::makedev(major, minor))
            }
            None => {
                let found = rustix::fs::stat(&device.source)?;
                (FileType::from_raw_mode(found.st_mode), found.st_rdev)
            }
        };
        if !kind.is_char_device() && !kind.is_block_device() {
            return Err(io::Error::other(format!("{} is not a device", device.source.display())));
        }
        let (parent, name) = device.target.rsplit_once('/').ok_or(io::ErrorKind::InvalidInput)?;
        let parent = self.ensure_target(parent, true)?;
        match rustix::fs::mknodat(&parent, name, kind, Mode::from_raw_mode(node.mode), number) {
            Err(Errno::EXIST) => return Ok(()),
            other => other?,
        }
        if (node.uid, node.gid) != (0, 0) {
            let (uid, gid) = (rustix::fs::Uid::from_raw(node.uid), rustix::fs::Gid::from_raw(node.gid));
            rustix::fs::chownat(&parent, name, Some(uid), Some(gid), rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    /// Opens /dev/null and verifies that it is the device and no other file.
    fn null(&self) -> io::Result<OwnedFd> {
        let found = self.open(Path::new("/dev/null"))?;
        let device = rustix::fs::fstat(&found)?;
        let is_null = file_type(&found)?.is_char_device() && device.st_rdev == rustix::fs::makedev(1, 3);
        is_null.then_some(found).ok_or_else(|| io::Error::other("it is not the null device"))
    }

    /// Applies the masked and read-only paths.
    fn mask_paths(&self, spec: &Container, null: &OwnedFd) -> Result<(), Failure> {
        for path in &spec.masked {
            let failed = |error: io::Error| Failure::during(format!("mask {path}"))(error);
            let place = match self.open(Path::new(path)) {
                Ok(place) => place,
                Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(error) => return Err(failed(error.into())),
            };
            let cover = match file_type(&place).map_err(failed)? {
                FileType::Directory => empty_filesystem().map_err(failed)?,
                _ => clone_mount(null).map_err(failed)?,
            };
            mounts::attach(cover, place).map_err(failed)?;
        }
        for path in &spec.read_only_paths {
            let failed = |error: io::Error| Failure::during(format!("make read-only {path}"))(error);
            let place = match self.open(Path::new(path)) {
                Ok(place) => place,
                Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(error) => return Err(failed(error.into())),
            };
            let copy = clone_mount(&place).map_err(failed)?;
            let attributes = Attributes {
                read_only: true,
                recursive: true,
                propagation: mounts::Propagation::Unchanged,
                ..Attributes::default()
            };
            mounts::set_mount_attributes(&copy, attributes).map_err(failed)?;
            mounts::attach(copy, place).map_err(failed)?;
        }
        Ok(())
    }
}

/// The components of a path in reverse order. The root is one of them, and restarts a lookup at the
/// root.
fn path_components(path: &Path) -> Vec<OsString> {
    path.components().rev().map(|part| part.as_os_str().to_owned()).collect()
}

/// Clones the mount at this descriptor with everything below.
pub fn clone_mount(place: impl AsFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(rustix::mount::open_tree(place, "", flags)?)
}

/// Creates the working directory of a process, inside the container.
pub fn make_directory(path: &str) -> io::Result<()> {
    match rustix::fs::statat(CWD, path, rustix::fs::AtFlags::empty()) {
        Ok(_) => Ok(()),
        Err(_) => std::fs::create_dir_all(path),
    }
}

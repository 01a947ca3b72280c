//! Sub-paths of volumes. A sub-path must not lead out of its volume, although containers can create
//! symlinks there. The kernel resolves the path beneath the volume (`openat2`) and follows no
//! symlink out of it, also while missing directories are created.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

/// The directory of mounted sub-paths in a pod's directory.
const SUB_PATHS_DIR: &str = "volume-subpaths";

/// Mounts the sub-path `part` of a volume at `at`. Missing directories of the sub-path are created.
///
/// It is mounted from an open descriptor and not from its path, because a container could exchange
/// what is at the path before the runtime mounts it. An earlier mount at `at` is replaced; running
/// containers have their own copy of it.
pub fn bind(volume: &Path, part: &str, at: &Path) -> Result<PathBuf, String> {
    let subpath_error =
        |reason: String| format!("failed to prepare subPath for volumeMount {part:?}: {reason}");
    let found = open_beneath(volume, part).map_err(subpath_error)?;
    bind_mount(&found, at).map_err(|error| subpath_error(error.to_string()))?;
    Ok(at.to_owned())
}

/// Unmounts all sub-paths of a pod without running containers.
pub fn unmount_all(pod: &Path) -> std::io::Result<()> {
    let below = |dirs: Vec<PathBuf>| -> Vec<PathBuf> {
        let entries = dirs.into_iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten().flatten());
        entries.map(|entry| entry.path()).collect()
    };
    // By volume, container and index of the mount.
    for at in below(below(below(vec![pod.join(SUB_PATHS_DIR)]))) {
        loop {
            match rustix::mount::unmount(&at, UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                // Not a mount point (any more).
                Err(Errno::INVAL | Errno::NOENT) => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn bind_mount(found: &OwnedFd, at: &Path) -> std::io::Result<()> {
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(found)?.st_mode);
    while rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
    match std::fs::symlink_metadata(at) {
        Ok(left) if left.is_dir() => std::fs::remove_dir(at)?,
        Ok(_) => std::fs::remove_file(at)?,
        Err(_) => {}
    }
    if let Some(parent) = at.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match kind {
        rustix::fs::FileType::Directory => std::fs::create_dir(at)?,
        _ => drop(std::fs::File::create_new(at)?),
    }
    Ok(rustix::mount::mount_bind(format!("/proc/self/fd/{}", found.as_raw_fd()), at)?)
}

/// Opens a sub-path one component at a time. Missing directories are created with the mode of the
/// volume's root.
fn open_beneath(volume: &Path, part: &str) -> Result<OwnedFd, String> {
    const OUTSIDE_ERROR: &str = "the path leads out of the volume";
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = rustix::fs::open(volume, flags, Mode::empty()).map_err(|error| error.to_string())?;
    let mode = rustix::fs::fstat(&root).map_err(|error| error.to_string())?.st_mode;
    let mode = Mode::from_raw_mode(mode & 0o7777);
    let mut relative = PathBuf::new();
    let mut last: Option<OwnedFd> = None;
    for component in Path::new(part).components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::CurDir | Component::RootDir => continue,
            _ => return Err(OUTSIDE_ERROR.to_owned()),
        };
        relative.push(name);
        let try_open = || open_resolved(&root, &relative, flags, ResolveFlags::BENEATH);
        let found = match try_open() {
            Err(Errno::NOENT) => {
                let parent = last.as_ref().map_or(root.as_fd(), AsFd::as_fd);
                create_dir(parent, name, mode).and_then(|()| try_open())
            }
            found => found,
        };
        last = Some(found.map_err(|error| match error {
            Errno::XDEV => OUTSIDE_ERROR.to_owned(),
            error => error.to_string(),
        })?);
    }
    Ok(last.unwrap_or(root))
}

/// Creates a directory with the mode of the volume. Another process may have created it meanwhile.
fn create_dir(parent: BorrowedFd<'_>, name: &OsStr, mode: Mode) -> rustix::io::Result<()> {
    match rustix::fs::mkdirat(parent, name, mode) {
        Err(Errno::EXIST) => return Ok(()),
        made => made?,
    }
    // The umask has removed bits from the mode. The path may be another directory of the volume by
    // now, but `O_NOFOLLOW` rejects a symlink.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::fchmod(rustix::fs::openat(parent, name, flags, Mode::empty())?, mode)
}

/// Opens a file of a volume for reading. Symlinks are resolved as if the volume were the root
/// directory.
pub fn open_file(volume: &Path, part: &str) -> std::io::Result<std::fs::File> {
    let root = rustix::fs::open(volume, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    // The open of a pipe must not block.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = std::fs::File::from(open_resolved(&root, Path::new(part), flags, ResolveFlags::IN_ROOT)?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(std::io::Error::other("not a regular file")),
    }
}

/// Opens a path below a directory.
fn open_resolved(
    root: &OwnedFd,
    relative: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    /// The kernel fails with `EAGAIN` if a path contains `..` and anything is mounted or renamed at
    /// the same time.
    const MAX_OPEN_ATTEMPTS: usize = 1000;
    let open = || rustix::fs::openat2(root, relative, flags, Mode::empty(), resolve);
    let mut attempts = (0..MAX_OPEN_ATTEMPTS).map(|_| open());
    attempts.find(|found| !matches!(found, Err(Errno::AGAIN))).unwrap_or(Err(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_sub_paths_outside_the_volume() {
        let dir = tempfile::tempdir().expect("a directory");
        let volume = dir.path().canonicalize().expect("a path").join("volume");
        std::fs::create_dir_all(volume.join("a/b")).expect("made");
        let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, volume.join(at)).expect("linked");
        link("/etc", "out");
        link("..", "up");
        link("../a/b", "a/in");
        let find = |part: &str| {
            let found = open_beneath(&volume, part).expect("found");
            std::fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd())).expect("a path")
        };
        assert_eq!(find("a/b"), volume.join("a/b"));
        assert_eq!(find("a/in"), volume.join("a/b"));
        assert_eq!(find("./new/deep"), volume.join("new/deep"));
        assert!(volume.join("new/deep").is_dir());
        for part in ["out", "out/passwd", "out/new", "up", "../x", "a/../../x"] {
            assert_eq!(
                open_beneath(&volume, part).map(drop),
                Err("the path leads out of the volume".to_owned()),
                "{part}"
            );
        }
    }

    #[test]
    fn created_directories_have_the_volume_mode() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().expect("a directory");
        let at = |part: &str| dir.path().join("volume").join(part);
        let set = |part: &str, mode| {
            std::fs::set_permissions(at(part), std::fs::Permissions::from_mode(mode)).expect("set")
        };
        let mode = |part: &str| std::fs::metadata(at(part)).expect("there").permissions().mode() & 0o7777;
        for volume in [0o777, 0o2777, 0o1777, 0o700] {
            std::fs::create_dir_all(at("there")).expect("made");
            set("there", 0o750);
            set("", volume);
            open_beneath(&at(""), "there/new/deep").expect("made");
            assert_eq!(["there", "there/new", "there/new/deep"].map(mode), [0o750, volume, volume]);
            std::fs::remove_dir_all(at("")).expect("removed");
        }
    }

    #[test]
    fn only_files_of_the_volume_can_be_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let volume = dir.path().join("volume");
        std::fs::create_dir_all(volume.join("etc")).expect("made");
        std::fs::write(volume.join("etc/hostname"), "mine").expect("written");
        std::fs::write(dir.path().join("secret"), "theirs").expect("written");
        for (to, at) in [("/etc/hostname", "absolute"), ("../secret", "up"), ("/etc", "dir")] {
            std::os::unix::fs::symlink(to, volume.join(at)).expect("linked");
        }
        let pipe = volume.join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RWXU).expect("made");
        let text = |part: &str| open_file(&volume, part).and_then(std::io::read_to_string).ok();
        for part in ["etc/hostname", "/etc/hostname", "absolute", "dir/hostname", "../etc/hostname"] {
            assert_eq!(text(part).as_deref(), Some("mine"), "{part}");
        }
        for part in ["up", "../secret", "dir", "pipe", "none", ""] {
            assert_eq!(text(part), None, "{part}");
        }
    }

    /// Another thread exchanges the sub-path with a symlink all the time while it is mounted.
    #[test]
    fn concurrent_exchange_does_not_escape_the_volume() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().canonicalize().expect("a path");
        let volume = root.join("volume");
        std::fs::create_dir_all(volume.join("part/inner")).expect("made");
        std::fs::write(volume.join("part/inner/mine"), "").expect("written");
        std::fs::create_dir_all(root.join("host/inner")).expect("made");
        std::os::unix::fs::symlink(root.join("host"), volume.join("link")).expect("linked");
        let at = root.join("pod/volume-subpaths/v/c/0");
        if let Err(error) = bind(&volume, "part/inner", &at) {
            return eprintln!("skipped: needs root: {error}");
        }
        let over = AtomicBool::new(false);
        let (mut bound, mut rejected) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                let (cwd, one, other) = (rustix::fs::CWD, volume.join("part"), volume.join("link"));
                while !over.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(cwd, &one, cwd, &other, exchange).expect("exchanged");
                }
            });
            let start = std::time::Instant::now();
            // The other thread may not be scheduled for a while.
            let is_incomplete = |bound, rejected| bound == 0 || rejected == 0;
            while bound + rejected < 2000 || is_incomplete(bound, rejected) && start.elapsed().as_secs() < 60
            {
                match bind(&volume, "part/inner", &at) {
                    Ok(_) => {
                        assert!(at.join("mine").exists(), "the mount shows a directory outside the volume");
                        bound += 1;
                    }
                    Err(_) => rejected += 1,
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        assert!(bound > 0 && rejected > 0, "{bound} {rejected}");
        // Processes that read the mounts of this host hold them for a moment.
        let start = std::time::Instant::now();
        while let Err(error) = unmount_all(&root.join("pod")) {
            assert!(
                error.kind() == std::io::ErrorKind::ResourceBusy && start.elapsed().as_secs() < 60,
                "{error}"
            );
            std::thread::yield_now();
        }
        assert!(at.is_dir() && !at.join("mine").exists(), "the sub-path is still mounted");
        unmount_all(&root.join("pod")).expect("nothing to do");
        unmount_all(&root.join("none")).expect("nothing to do");
    }

    /// A symlink with `..` is resolved although unrelated files are renamed at the same time, which
    /// the kernel cannot distinguish from relevant renames.
    #[test]
    fn concurrent_rename_does_not_fail_the_open() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let dir = tempfile::tempdir().expect("a directory");
        let volume = dir.path().join("volume");
        std::fs::create_dir_all(volume.join("a/b")).expect("made");
        std::os::unix::fs::symlink("../a/../a/b", volume.join("a/in")).expect("linked");
        let over = AtomicBool::new(false);
        let names = [dir.path().join("one"), dir.path().join("two")];
        std::fs::write(&names[0], "").expect("written");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::fs::rename(&names[0], &names[1]).expect("renamed");
                    std::fs::rename(&names[1], &names[0]).expect("renamed");
                }
            });
            let failed = (0..5000).find_map(|_| open_beneath(&volume, "a/in").err());
            over.store(true, Ordering::Relaxed);
            assert_eq!(failed, None);
        });
    }

    #[test]
    fn sub_path_can_be_a_file_and_change() {
        let dir = tempfile::tempdir().expect("a directory");
        let volume = dir.path().canonicalize().expect("a path").join("volume");
        std::fs::create_dir_all(&volume).expect("made");
        std::fs::write(volume.join("file"), "text").expect("written");
        let at = dir.path().join("at");
        if let Err(error) = bind(&volume, "file", &at) {
            return eprintln!("skipped: needs root: {error}");
        }
        assert_eq!(std::fs::read_to_string(&at).expect("read"), "text");
        bind(&volume, "directory", &at).expect("bound");
        assert!(at.is_dir());
        while rustix::mount::unmount(&at, UnmountFlags::DETACH).is_ok() {}
        assert_eq!(std::fs::read_dir(&at).expect("empty").count(), 0);
    }
}

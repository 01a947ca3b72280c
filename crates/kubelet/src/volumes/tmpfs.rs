//! Keeps Secrets, tokens and downward API files in memory (tmpfs), and never on a disk.
//!
//! All volumes of a type that a pod has share one tmpfs: new content is created beside a volume and
//! moved into it by the atomic writer, which requires the same filesystem, and there are fewer
//! mounts. It has no size limit, because only the kubelet writes to it. A runtime that does not
//! share the mounts of the kubelet (`Runtime::shares_mount_namespace`) cannot pass them to
//! containers, and the files stay on disk.

use std::fs;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount};

use super::host_commands::is_mounted;

/// The first kernel version that supports ID-mapped tmpfs mounts.
const MIN_KERNEL_FOR_MAPPED_OWNERS: (u32, u32) = (6, 3);

/// Mounts a tmpfs at the directory of a volume type, unless it has content: a pod that was started
/// by an earlier version keeps its volumes on disk. `has_user_namespace` requires a kernel with
/// ID-mapped tmpfs.
pub fn mount_tmpfs(dir: &Path, has_user_namespace: bool) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    if is_mounted(dir)
        || fs::read_dir(dir)?.next().is_some()
        || (has_user_namespace && !supports_mapped_owners(&kernel_release()))
    {
        return Ok(());
    }
    let mount = |options: &std::ffi::CStr| mount("tmpfs", dir, "tmpfs", MountFlags::empty(), options);
    // Swapped pages would be on disk, too, but older kernels do not know `noswap`.
    let done = match mount(c"mode=0755,noswap") {
        Err(Errno::INVAL) => mount(c"mode=0755"),
        done => done,
    };
    if let Err(error) = done {
        tracing::warn!(%error, dir = %dir.display(), "cannot mount a tmpfs, secrets are kept on disk");
    }
    Ok(())
}

/// Releases the memory of a terminated pod. Only these tmpfs are mounted at directories of volume
/// types.
pub fn release(pod: &Path) {
    let kinds = fs::read_dir(pod.join("volumes")).into_iter().flatten().flatten().map(|kind| kind.path());
    for kind in kinds.filter(|kind| is_mounted(kind)) {
        let _ = rustix::mount::unmount(kind, UnmountFlags::DETACH);
    }
}

fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn supports_mapped_owners(release: &str) -> bool {
    let mut numbers =
        release.split(|letter: char| !letter.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= MIN_KERNEL_FOR_MAPPED_OWNERS
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn mapped_owners_require_a_recent_kernel() {
        for (release, expected) in [
            ("6.3", true),
            ("6.2.16-x", false),
            ("5.15.0-91-generic", false),
            ("6.18.44-fc", true),
            ("7", true),
            ("", false),
        ] {
            assert_eq!(supports_mapped_owners(release), expected, "{release}");
        }
    }

    #[test]
    fn existing_volumes_remain_on_disk() {
        let dir = tempfile::tempdir().expect("a directory");
        let [fresh, old] = ["fresh", "old"].map(|name| dir.path().join("volumes").join(name));
        let is_in_memory = |place: &Path| {
            fs::metadata(place).expect("there").dev() != fs::metadata(dir.path()).expect("there").dev()
        };
        fs::create_dir_all(old.join("volume")).expect("made");
        mount_tmpfs(&old, false).expect("left alone");
        assert!(!is_in_memory(&old) && old.join("volume").is_dir());
        mount_tmpfs(&fresh, false).expect("made");
        if !is_in_memory(&fresh) {
            eprintln!("skipped: needs the permission to mount");
            return;
        }
        fs::write(fresh.join("a"), "1").expect("written");
        mount_tmpfs(&fresh, false).expect("there already");
        let content = fs::read_to_string(fresh.join("a")).ok();
        release(dir.path());
        assert_eq!(content.as_deref(), Some("1"), "a mounted tmpfs is not mounted again");
        // As after a reboot.
        assert!(fs::read_dir(&fresh).expect("there").next().is_none());
    }
}

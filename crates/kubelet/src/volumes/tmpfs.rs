//! Secrets, tokens and what pods tell of themselves are kept in memory, never on a disk that somebody may carry away.
//!
//! All volumes of a kind that a pod has are in one file system, not each in its own: what is made beside a volume to be
//! moved into it (`payload`) has to be in the same one, and nobody has more mounts than needed. No size is set, since
//! nobody but the node writes there. A runtime that sees other mounts than the node (`Runtime::sees_mounts`) cannot give
//! them to containers; there they stay on disk.

use std::fs;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount};

use super::host_commands::is_mounted;

/// Since when the kernel can show the owners of files in memory as others see them.
const MIN_KERNEL_FOR_MAPPED_OWNERS: (u32, u32) = (6, 3);

/// Makes the directory of a kind of volumes one in memory, unless it holds something already: a pod that began under an
/// older skiff has it on disk, and goes on so. `is_mapped` says that the pod has users of its own.
pub fn mount_tmpfs(dir: &Path, has_user_namespace: bool) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    if is_mounted(dir)
        || fs::read_dir(dir)?.next().is_some()
        || (has_user_namespace && !supports_mapped_owners(&kernel_release()))
    {
        return Ok(());
    }
    let mount = |options: &std::ffi::CStr| mount("tmpfs", dir, "tmpfs", MountFlags::empty(), options);
    // What is swapped out is on a disk, too, but older kernels cannot keep it from that.
    let done = match mount(c"mode=0755,noswap") {
        Err(Errno::INVAL) => mount(c"mode=0755"),
        done => done,
    };
    if let Err(error) = done {
        tracing::warn!(%error, dir = %dir.display(), "what is secret is kept on disk");
    }
    Ok(())
}

/// Gives back the memory of a pod that is over. Nothing but that is mounted in the place of a kind of volumes.
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
            eprintln!("skipped: whoever runs this may not mount anything");
            return;
        }
        fs::write(fresh.join("a"), "1").expect("written");
        mount_tmpfs(&fresh, false).expect("there already");
        let content = fs::read_to_string(fresh.join("a")).ok();
        release(dir.path());
        assert_eq!(content.as_deref(), Some("1"), "it was mounted once");
        // As after a restart of the machine.
        assert!(fs::read_dir(&fresh).expect("there").next().is_none());
    }
}

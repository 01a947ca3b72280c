//! A part of a volume, which must not lead out of it: whoever writes to the volume may put links there. The kernel
//! resolves the path below the volume and follows no link out of it, also while what is not there yet is made.

use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Where `part` of the volume at `place` is; directories that are not there are made.
pub fn find(place: &Path, part: &str) -> Result<PathBuf, String> {
    let told = |why: String| format!("failed to prepare subPath for volumeMount {part:?}: {why}");
    let found = open(place, part).map_err(told)?;
    std::fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
        .map_err(|error| told(error.to_string()))
}

fn open(place: &Path, part: &str) -> Result<OwnedFd, String> {
    const OUT: &str = "it leads out of the volume";
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = rustix::fs::open(place, flags, Mode::empty()).map_err(|error| error.to_string())?;
    let mut way = PathBuf::new();
    let mut last: Option<OwnedFd> = None;
    for component in Path::new(part).components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::CurDir | Component::RootDir => continue,
            _ => return Err(OUT.to_owned()),
        };
        way.push(name);
        let look = || rustix::fs::openat2(&root, &way, flags, Mode::empty(), ResolveFlags::BENEATH);
        let found = match look() {
            Err(Errno::NOENT) => {
                let parent = last.as_ref().map_or(root.as_fd(), AsFd::as_fd);
                match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o750)) {
                    Ok(()) | Err(Errno::EXIST) => look(),
                    Err(error) => Err(error),
                }
            }
            found => found,
        };
        last = Some(found.map_err(|error| match error {
            Errno::XDEV => OUT.to_owned(),
            error => error.to_string(),
        })?);
    }
    Ok(last.unwrap_or(root))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_leads_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let volume = dir.path().canonicalize().expect("a path").join("volume");
        std::fs::create_dir_all(volume.join("a/b")).expect("made");
        let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, volume.join(at)).expect("linked");
        link("/etc", "out");
        link("..", "up");
        link("../a/b", "a/in");
        assert_eq!(find(&volume, "a/b"), Ok(volume.join("a/b")));
        assert_eq!(find(&volume, "a/in"), Ok(volume.join("a/b")));
        assert_eq!(find(&volume, "./new/deep"), Ok(volume.join("new/deep")));
        assert!(volume.join("new/deep").is_dir());
        for part in ["out", "out/passwd", "out/new", "up", "../x", "a/../../x"] {
            assert_eq!(open(&volume, part).map(drop), Err("it leads out of the volume".to_owned()), "{part}");
        }
    }
}

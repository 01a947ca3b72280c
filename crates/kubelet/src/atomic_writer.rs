//! Atomic updates of volumes made from API objects, the counterpart of upstream's `AtomicWriter`
//! (`pkg/volume/util/atomic_writer.go`).
//!
//! The files are in a directory of their own, `..data` is a symlink to it, and the visible names
//! are symlinks through `..data`. An update creates a new directory and replaces the one symlink,
//! so that readers never see a mix of old and new files.
//!
//! Containers mount these volumes read-only, but containers started by an earlier version may still
//! write to them. So a directory is filled beside the volume and moved into it when it is complete,
//! and no symlink in the volume is trusted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Component, Path, PathBuf};

/// Files by path relative to the volume.
pub type Payload = BTreeMap<String, FileProjection>;

/// Content and mode of a file, and its owner if that is not root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileProjection {
    pub bytes: Vec<u8>,
    pub mode: u32,
    pub owner: Option<u32>,
}

const DATA_DIR: &str = "..data";

/// Makes the volume at `dir` contain `payload`. `finish` runs on the new files before they become
/// visible. Does nothing if the volume is up to date.
pub fn write(
    dir: &Path,
    payload: &Payload,
    finish: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<(), String> {
    if let Some(path) = payload.keys().find(|path| !is_inside(path)) {
        return Err(format!("{path:?} is outside the volume"));
    }
    let failed = |error: io::Error| error.to_string();
    fs::create_dir_all(dir).map_err(failed)?;
    if is_up_to_date(dir, payload) {
        return Ok(());
    }
    let fresh = write_payload(dir, payload).map_err(failed)?;
    finish(&fresh)?;
    replace_data_dir(dir, &fresh, payload).map_err(failed)
}

/// Writes the files to a new directory beside the volume.
fn write_payload(dir: &Path, payload: &Payload) -> io::Result<PathBuf> {
    let volume = dir.file_name().unwrap_or_default().to_string_lossy();
    let fresh = dir.with_file_name(format!("..{volume}"));
    // Left over from a killed process.
    let _ = fs::remove_dir_all(&fresh);
    fs::create_dir(&fresh)?;
    for (path, file) in payload {
        let target = fresh.join(path);
        fs::create_dir_all(target.parent().unwrap_or(&fresh))?;
        fs::write(&target, &file.bytes)?;
        fs::set_permissions(&target, fs::Permissions::from_mode(file.mode))?;
        if file.owner.is_some() {
            chown(&target, file.owner, None)?;
        }
    }
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
    copy_selinux_label(dir, &fresh, payload)?;
    Ok(fresh)
}

/// Copies the SELinux label of the volume to the new files. Containers with that label have access
/// to nothing else, and a rename keeps the label of a file.
fn copy_selinux_label(dir: &Path, fresh: &Path, payload: &Payload) -> io::Result<()> {
    const SELINUX_XATTR: &str = "security.selinux";
    let mut label = [0; 256];
    let Ok(length) = rustix::fs::getxattr(dir, SELINUX_XATTR, &mut label[..]) else { return Ok(()) };
    let within = |path: &Path| path.ancestors().map(|part| fresh.join(part)).collect::<Vec<_>>();
    let all: BTreeSet<PathBuf> = payload.keys().flat_map(|path| within(Path::new(path))).collect();
    for path in all {
        rustix::fs::setxattr(path, SELINUX_XATTR, &label[..length], rustix::fs::XattrFlags::empty())?;
    }
    Ok(())
}

/// Moves the new directory into the volume and switches `..data` to it with one rename. Then it
/// updates the visible symlinks and deletes the old directory.
fn replace_data_dir(dir: &Path, fresh: &Path, payload: &Payload) -> io::Result<()> {
    let old = fs::read_link(dir.join(DATA_DIR)).ok();
    let name = unused_dir_name(dir);
    fs::rename(fresh, dir.join(&name))?;
    let new_link = dir.join("..data_tmp");
    let _ = fs::remove_file(&new_link);
    symlink(&name, &new_link)?;
    fs::rename(&new_link, dir.join(DATA_DIR))?;
    let top_level: BTreeSet<&str> = payload.keys().filter_map(|path| path.split('/').next()).collect();
    for top in &top_level {
        if fs::symlink_metadata(dir.join(top)).is_err() {
            symlink(Path::new(DATA_DIR).join(top), dir.join(top))?;
        }
    }
    for entry in fs::read_dir(dir)?.flatten() {
        let entry_name = entry.file_name();
        let known = entry_name.to_string_lossy();
        if !known.starts_with("..") && !top_level.contains(&*known) {
            fs::remove_file(entry.path())?;
        }
    }
    match old.as_deref().and_then(Path::to_str).filter(|old| is_data_dir_name(old)) {
        Some(old) => fs::remove_dir_all(dir.join(old)),
        None => Ok(()),
    }
}

/// Whether `name` is one of our directory names. Anything else must not be deleted, since a
/// container may have replaced the symlink it was read from.
fn is_data_dir_name(name: &str) -> bool {
    name.strip_prefix("..").is_some_and(|number| number.parse::<u32>().is_ok())
}

fn is_inside(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

fn unused_dir_name(dir: &Path) -> String {
    (0u32..)
        .map(|number| format!("..{number}"))
        .find(|name| fs::symlink_metadata(dir.join(name)).is_err())
        .expect("fewer than 2^32 directories exist")
}

fn is_up_to_date(dir: &Path, payload: &Payload) -> bool {
    let data = dir.join(DATA_DIR);
    let same = |path: &String, file: &FileProjection| {
        let target = data.join(path);
        let is_same = |known: fs::Metadata| {
            known.is_file()
                && known.len() == file.bytes.len() as u64
                && known.mode() & 0o7777 == file.mode
                && file.owner.is_none_or(|owner| known.uid() == owner)
        };
        fs::metadata(&target).is_ok_and(is_same) && fs::read(&target).is_ok_and(|bytes| bytes == file.bytes)
    };
    fs::read_link(&data).is_ok()
        && payload.iter().all(|(path, file)| same(path, file))
        && count_files(&data) == payload.len()
}

fn count_files(dir: &Path) -> usize {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries.flatten().map(|entry| if entry.path().is_dir() { count_files(&entry.path()) } else { 1 }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(files: &[(&str, &str)]) -> Payload {
        let file = |text: &str| FileProjection { bytes: text.as_bytes().to_vec(), mode: 0o644, owner: None };
        files.iter().map(|(path, text)| ((*path).to_owned(), file(text))).collect()
    }

    fn write(dir: &Path, payload: &Payload) -> Result<(), String> {
        super::write(dir, payload, |_| Ok(()))
    }

    fn visible_files(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.retain(|name| !name.starts_with(".."));
        names.sort();
        names
            .into_iter()
            .map(|name| format!("{name}={}", fs::read_to_string(dir.join(&name)).unwrap_or_default()))
            .collect()
    }

    #[test]
    fn atomic_update_leaves_no_old_files() {
        let dir = tempfile::tempdir().unwrap();
        let dir = &dir.path().join("volume");
        write(dir, &payload(&[("a", "1"), ("b", "2")])).unwrap();
        assert_eq!(visible_files(dir), ["a=1", "b=2"]);
        let before = fs::read_link(dir.join(DATA_DIR)).unwrap();
        write(dir, &payload(&[("a", "1"), ("b", "2")])).unwrap();
        assert_eq!(
            fs::read_link(dir.join(DATA_DIR)).unwrap(),
            before,
            "an identical payload changes nothing"
        );
        write(dir, &payload(&[("a", "3"), ("deep/c", "4")])).unwrap();
        assert_eq!(visible_files(dir), ["a=3", "deep="]);
        assert_eq!(fs::read_to_string(dir.join("deep/c")).unwrap(), "4");
        write(dir, &payload(&[("a", "3")])).unwrap();
        assert_eq!(visible_files(dir), ["a=3"]);
        assert_eq!(fs::read_dir(dir).unwrap().count(), 3, "..data, its directory and the symlink");
    }

    #[test]
    fn rejects_paths_outside_the_volume() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["../x", "/etc/x", "a/../../x", ""] {
            let error = write(&dir.path().join("volume"), &payload(&[(path, "1")])).unwrap_err();
            assert!(error.ends_with("is outside the volume"), "{error}");
        }
    }

    /// Containers of an earlier version may have replaced the symlink.
    #[test]
    fn deletes_nothing_outside_the_volume() {
        let around = tempfile::tempdir().unwrap();
        let dir = &around.path().join("volume");
        let victim = around.path().join("victim");
        fs::create_dir_all(victim.join("deep")).unwrap();
        for (at, target) in
            [victim.clone(), "../victim".into(), "..".into(), "..7/../../victim".into()].iter().enumerate()
        {
            write(dir, &payload(&[("a", "1")])).unwrap();
            fs::remove_file(dir.join(DATA_DIR)).unwrap();
            symlink(target, dir.join(DATA_DIR)).unwrap();
            symlink(&victim, dir.join("..9")).unwrap();
            write(dir, &payload(&[("a", &format!("changed {at}"))])).unwrap();
            assert_eq!(visible_files(dir), [format!("a=changed {at}")]);
            assert!(victim.join("deep").is_dir(), "{}", target.display());
            fs::remove_file(dir.join("..9")).unwrap();
        }
    }

    #[test]
    fn files_are_complete_before_the_volume_changes() {
        let around = tempfile::tempdir().unwrap();
        let dir = &around.path().join("volume");
        let finish = |fresh: &Path| {
            assert!(fresh.join("a").is_file() && !fresh.starts_with(dir));
            Err("no".to_owned())
        };
        assert_eq!(super::write(dir, &payload(&[("a", "1")]), finish), Err("no".to_owned()));
        assert!(visible_files(dir).is_empty());
        write(dir, &payload(&[("a", "1")])).unwrap();
        assert_eq!(visible_files(dir), ["a=1"]);
        assert_eq!(fs::read_dir(around.path()).unwrap().count(), 1);
    }
}

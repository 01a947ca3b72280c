//! Atomic writes of private files, and directories that only the owner can access.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use crate::Error;

/// Replaces `path` atomically and gives it this mode. Readers and crashes see either the old or the new
/// file.
pub fn write_file(path: &Path, contents: &[u8], mode: u32) -> Result<(), Error> {
    replace(path, contents, mode).map_err(|source| Error::Write { path: path.to_owned(), source })
}

/// Creates the directory if it is missing and sets its mode to 0700 in any case.
pub(crate) fn private_dir(dir: &Path) -> Result<(), Error> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    let closed = created.and_then(|()| fs::set_permissions(dir, Permissions::from_mode(0o700)));
    closed.map_err(|source| Error::Write { path: dir.to_owned(), source })
}

/// Reads a text file; `None` if it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path: path.to_owned(), source }),
    }
}

/// Reads a text file that must exist.
pub(crate) fn read_present(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })
}

fn replace(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.tmp", std::process::id()));
    let temporary = dir.join(hidden);
    let written = write_new(&temporary, contents, mode).and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        // The first error is the one to return. A temporary file that remains is overwritten by the
        // next attempt.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    File::open(dir)?.sync_all()
}

fn write_new(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    // The umask may have cleared bits of the requested mode.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(contents)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn write_is_atomic_and_sets_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        write_file(&path, b"one, and long", 0o600).unwrap();
        write_file(&path, b"two", 0o644).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(mode(&path), 0o644);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn failed_write_reports_path_and_keeps_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
        let error = write_file(&path, b"new", 0o600).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot write {}", path.display()));
        assert!(path.join("inside").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn directory_permissions_are_restricted() {
        let dir = tempfile::tempdir().unwrap();
        let open = dir.path().join("a/b");
        fs::create_dir_all(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o755)).unwrap();
        private_dir(&open).unwrap();
        assert_eq!(mode(&open), 0o700);
    }
}

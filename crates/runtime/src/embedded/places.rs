//! Where something is mounted in every container, as a layer below those of its image.
//!
//! An image may lack these places. They would then be made among the changes of each of its containers, which costs more
//! than what is mounted there: every file of an overlay is made aside and moved.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// In the directory of the runtime.
const DIRECTORY: &str = "places";
/// The same, as seen from the directory of all layers.
pub const LAYER: &str = "../../places";

const DIRECTORIES: [&str; 5] = ["", "dev", "etc", "proc", "sys"];
const FILES: [&str; 3] = ["etc/hostname", "etc/hosts", "etc/resolv.conf"];

/// Makes what is not there yet.
pub fn make(root: &Path) -> io::Result<()> {
    let here = root.join(DIRECTORY);
    for name in DIRECTORIES {
        fs::create_dir_all(here.join(name))?;
    }
    for name in FILES {
        File::options().append(true).create(true).open(here.join(name))?;
    }
    // As containers see them, whatever this process leaves out of new files.
    let modes = DIRECTORIES.map(|name| (name, 0o755)).into_iter().chain(FILES.map(|name| (name, 0o644)));
    for (name, mode) in modes {
        fs::set_permissions(here.join(name), Permissions::from_mode(mode))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_may_look_at_them() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("places/etc")).unwrap();
        fs::set_permissions(dir.path().join("places/etc"), Permissions::from_mode(0o700)).unwrap();
        for _ in 0..2 {
            make(dir.path()).unwrap();
            let mode =
                |name: &str| fs::metadata(dir.path().join("places").join(name)).unwrap().permissions().mode();
            assert_eq!(DIRECTORIES.map(|name| mode(name) & 0o777), [0o755; 5]);
            assert_eq!(FILES.map(|name| mode(name) & 0o777), [0o644; 3]);
        }
    }
}

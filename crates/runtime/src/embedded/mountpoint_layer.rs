//! Layers with the mount points that nearly every container needs, stacked below the layers of its
//! image.
//!
//! An image may lack these mount points. They would then be created in the upper layer of each of its
//! containers, which costs more than the mounts themselves: overlayfs creates every file in its work
//! directory and renames it.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Where the service account token is mounted by default.
const TOKEN_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The layers by their names in the runtime's data directory, and whether each has the mount point of
/// the token.
/// Earlier versions called them `places` and `places-with-token`. These stay, because containers that were
/// created by such a version refer to them.
const LAYERS: [(&str, bool); 2] = [("mountpoints", false), ("mountpoints-with-token", true)];
const DIRECTORIES: [&str; 5] = ["", "dev", "etc", "proc", "sys"];
const FILES: [&str; 3] = ["etc/hostname", "etc/hosts", "etc/resolv.conf"];

/// The layer for a container with these mount targets, relative to the directory of all layers.
pub fn layer_name<'a>(mut mounts: impl Iterator<Item = &'a str>) -> String {
    let has_token = mounts.any(|target| target == TOKEN_DIR);
    let (name, _) = LAYERS[usize::from(has_token)];
    format!("../../{name}")
}

/// Creates the layers that are missing.
pub fn create(root: &Path) -> io::Result<()> {
    // Sets the mode explicitly, independent of this process's umask.
    let set_mode = |path: &Path, mode: u32| fs::set_permissions(path, Permissions::from_mode(mode));
    for (name, has_token) in LAYERS {
        let layer_dir = root.join(name);
        let to_token =
            TOKEN_DIR.match_indices('/').skip(1).map(|(at, _)| &TOKEN_DIR[1..at]).chain([&TOKEN_DIR[1..]]);
        for name in DIRECTORIES.into_iter().chain(to_token.filter(|_| has_token)) {
            fs::create_dir_all(layer_dir.join(name))?;
            set_mode(&layer_dir.join(name), 0o755)?;
        }
        for name in FILES {
            File::options().append(true).create(true).open(layer_dir.join(name))?;
            set_mode(&layer_dir.join(name), 0o644)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creates_world_readable_directories() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("mountpoints/etc")).unwrap();
        fs::set_permissions(dir.path().join("mountpoints/etc"), Permissions::from_mode(0o700)).unwrap();
        for _ in 0..2 {
            create(dir.path()).unwrap();
            let mode = |name: &str| {
                fs::metadata(dir.path().join(name)).map(|found| found.permissions().mode() & 0o777)
            };
            for (layer, has_token) in LAYERS {
                let modes = |names: &[&str]| -> Vec<u32> {
                    names.iter().map(|name| mode(&format!("{layer}/{name}")).unwrap()).collect()
                };
                assert_eq!(modes(&DIRECTORIES), [0o755; 5]);
                assert_eq!(modes(&FILES), [0o644; 3]);
                for above in Path::new(TOKEN_DIR).ancestors().filter(|above| *above != Path::new("/")) {
                    let place = format!("{layer}{}", above.display());
                    assert_eq!(mode(&place).ok(), has_token.then_some(0o755), "{place}");
                }
            }
        }
    }

    #[test]
    fn layers_of_earlier_versions_stay() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("places/dev")).unwrap();
        create(dir.path()).unwrap();
        assert!(dir.path().join("places/dev").is_dir());
    }

    #[test]
    fn select_the_layer_by_token_mount() {
        assert_eq!(layer_name([TOKEN_DIR, "/etc/hosts"].into_iter()), "../../mountpoints-with-token");
        assert_eq!(layer_name(["/var/run", "/etc/hosts"].into_iter()), "../../mountpoints");
    }
}

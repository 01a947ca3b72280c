//! Where something is mounted in every container, as a layer below those of its image.
//!
//! An image may lack these places. They would then be made among the changes of each of its containers, which costs more
//! than what is mounted there: every file of an overlay is made aside and moved.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// In the directory of the runtime.
pub const DIRECTORY: &str = "places";
/// The same, as seen from the directory of all layers.
pub const LAYER: &str = "../../places";

const DIRECTORIES: [&str; 5] = ["", "dev", "etc", "proc", "sys"];
const FILES: [&str; 3] = ["etc/hostname", "etc/hosts", "etc/resolv.conf"];

/// Makes what is not there yet.
pub fn make(root: &Path) -> io::Result<()> {
    let here = root.join(DIRECTORY);
    for name in DIRECTORIES {
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(here.join(name))?;
    }
    for name in FILES {
        let mut options = std::fs::File::options();
        options.append(true).create(true).mode(0o644).open(here.join(name))?;
    }
    Ok(())
}

//! Container log rotation: large logs are renamed and reopened, older ones are compressed, the
//! oldest are removed. Upstream: `pkg/kubelet/logs`.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;

use crate::config::log_path;
use crate::observed::CONTAINER_NAME;
use crate::{Node, pod_of};

/// Rotates the logs of all running containers that have grown too large.
pub async fn rotate_all(node: &Node) {
    for container in super::running(node).await {
        let Some((key, uid)) = pod_of(&container.labels) else { continue };
        let Some(name) = container.labels.get(CONTAINER_NAME) else { continue };
        let attempt = container.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
        let log = node.settings.log_dir(&key, &uid).join(log_path(name, attempt));
        let size = std::fs::metadata(&log).map_or(0, |found| found.len());
        if size <= node.settings.kubelet_config.max_log_bytes {
            continue;
        }
        if let Err(error) = rotate(node, &log, &container.id).await {
            tracing::warn!(%error, log = %log.display(), "failed to rotate a container log");
        }
    }
}

async fn rotate(node: &Node, log: &Path, id: &str) -> io::Result<()> {
    let max_files = node.settings.kubelet_config.max_log_files;
    prune(log, max_files)?;
    let rotated = rotated_path(log, &node.ctx.clock.now());
    std::fs::rename(log, &rotated)?;
    if let Err(error) = node.runtime.reopen_log(id).await {
        // The runtime keeps writing to the renamed file, so restore its name.
        std::fs::rename(&rotated, log)?;
        return Err(io::Error::other(error.to_string()));
    }
    Ok(())
}

fn rotated_path(log: &Path, now: &Timestamp) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(format!(".{}", now.strftime("%Y%m%d-%H%M%S")));
    PathBuf::from(name)
}

/// Prunes rotated logs before one is added: compresses uncompressed ones and removes the oldest.
fn prune(log: &Path, max_files: usize) -> io::Result<()> {
    let dir = log.parent().unwrap_or(Path::new("/"));
    let prefix = format!("{}.", log.file_name().unwrap_or_default().to_string_lossy());
    let mut old = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            old.push(entry.path());
        }
    }
    // The names end in the time of rotation.
    old.sort();
    // The current log and the one about to be rotated count as well.
    let spare = max_files.saturating_sub(2);
    let remove_count = old.len().saturating_sub(spare);
    for path in old.drain(..remove_count) {
        std::fs::remove_file(path)?;
    }
    for path in old.iter().filter(|path| path.extension().is_none_or(|extension| extension != "gz")) {
        compress(path)?;
    }
    Ok(())
}

fn compress(path: &Path) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".gz");
    let temporary = path.with_extension("tmp");
    let mut encoder = GzEncoder::new(File::create(&temporary)?, Compression::fast());
    io::copy(&mut File::open(path)?, &mut encoder)?;
    encoder.finish()?;
    std::fs::rename(&temporary, &name)?;
    std::fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_logs_are_compressed_and_the_oldest_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("0.log");
        for name in [
            "0.log",
            "0.log.20260101-000001.gz",
            "0.log.20260101-000002.gz",
            "0.log.20260101-000003",
            "1.log",
        ] {
            std::fs::write(dir.path().join(name), name).expect("written");
        }
        prune(&log, 4).expect("tidied");
        let mut left: Vec<String> = std::fs::read_dir(dir.path())
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        left.sort();
        assert_eq!(left, ["0.log", "0.log.20260101-000002.gz", "0.log.20260101-000003.gz", "1.log"]);
        let now = "2026-01-01T00:00:04Z".parse().expect("a time");
        assert_eq!(rotated_path(&log, &now), dir.path().join("0.log.20260101-000004"));
    }
}

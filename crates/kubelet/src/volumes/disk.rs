//! Disks with a filesystem: formatted if they are empty, checked if they are not, and mounted, with
//! the host's tools. Upstream's `SafeFormatAndMount`.

use std::path::Path;

use super::host_commands::{self, CommandError, run};

/// The format of a disk with a partition table, as upstream names it. Such a disk is never
/// formatted.
const PARTITION_TABLE: &str = "unknown data, probably partitions";
const FSCK_ERRORS_NOT_CORRECTED: i32 = 4;

/// Mounts a disk. An empty one is formatted first, unless it is read-only.
pub async fn mount(
    device: &Path,
    dir: &Path,
    fs_type: &str,
    options: &[String],
    read_only: bool,
) -> Result<(), String> {
    let fs_type = if fs_type.is_empty() { "ext4" } else { fs_type };
    let device_path = device.display().to_string();
    let current_format = disk_format(&device_path).await;
    let current_format = current_format
        .map_err(|error| format!("failed to get disk format of disk {device_path}: {error}"))?;
    match current_format.as_str() {
        "" if read_only => {
            return Err(format!(
                "cannot mount unformatted disk {device_path} as we are manipulating it in read-only mode"
            ));
        }
        "" => format_disk(&device_path, fs_type).await?,
        current_format => {
            if current_format != fs_type {
                tracing::warn!(
                    device = device_path,
                    wanted = fs_type,
                    current_format,
                    "the filesystem of a disk differs from the requested one"
                );
            }
            if !read_only {
                check_filesystem(&device_path).await?;
            }
        }
    }
    let mut options = options.to_vec();
    options.extend(read_only.then(|| "ro".to_owned()));
    options.push("defaults".to_owned());
    host_commands::mount(
        &["-t".to_owned(), fs_type.to_owned(), "-o".to_owned(), options.join(","), device_path],
        dir,
    )
    .await
}

/// The filesystem on a disk; empty if there is none.
async fn disk_format(device: &str) -> Result<String, String> {
    let args = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device];
    let done = run("blkid", &args).await.map_err(|failure| failure.to_string())?;
    if done.code == 2 {
        return Ok(String::new());
    }
    Ok(parse_format(&done.success_output()?))
}

fn parse_format(output: &str) -> String {
    let value = |name: &str| {
        output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default()
    };
    if value("PTTYPE").is_empty() { value("TYPE").to_owned() } else { PARTITION_TABLE.to_owned() }
}

async fn format_disk(device: &str, fs_type: &str) -> Result<(), String> {
    let args: &[&str] = match fs_type {
        "ext3" | "ext4" => &["-F", "-m0", device],
        "xfs" => &["-f", device],
        _ => &[device],
    };
    let done = run(format!("mkfs.{fs_type}"), args).await.map_err(|failure| failure.to_string());
    let error = match done.map(|done| done.success_output()) {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) | Err(error) => error,
    };
    Err(format!("format of disk {device:?} failed: type:({fs_type:?}) {error}"))
}

/// Repairs errors of the filesystem, if possible.
async fn check_filesystem(device: &str) -> Result<(), String> {
    match run("fsck", &["-a", device]).await {
        Ok(done) if done.code == FSCK_ERRORS_NOT_CORRECTED => {
            Err(format!("'fsck' found errors on device {device} but could not correct them: {}", done.output))
        }
        Ok(done) => {
            if done.code != 0 {
                tracing::info!(device, code = done.code, said = done.output, "fsck");
            }
            Ok(())
        }
        Err(failure @ CommandError::NotFound(_)) => {
            tracing::warn!(device, %failure, "cannot check the filesystem of a disk");
            Ok(())
        }
        Err(failure) => Err(failure.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_disk_format() {
        let check = |output: &str, expected: &str| assert_eq!(parse_format(output), expected, "{output:?}");
        check("DEVNAME=/dev/loop0\nTYPE=ext4\n", "ext4");
        check("DEVNAME=/dev/loop0\nPTTYPE=gpt\n", PARTITION_TABLE);
        check("TYPE=vfat\nPTTYPE=dos\n", PARTITION_TABLE);
        check("", "");
    }
}

//! Disks with a file system: made where there is none, looked over where there is, and mounted, by the host's tools.

use std::path::Path;

use super::tools::{self, Failure, run};

/// What a disk is said to hold that is divided into others; never made anew.
const DIVIDED: &str = "unknown data, probably partitions";
const FSCK_COULD_NOT: i32 = 4;

/// Mounts a disk; one that is empty is given a file system first, unless it may only be read.
pub async fn mount(
    device: &Path,
    dir: &Path,
    fs_type: &str,
    options: &[String],
    read_only: bool,
) -> Result<(), String> {
    let fs_type = if fs_type.is_empty() { "ext4" } else { fs_type };
    let shown = device.display().to_string();
    let holds = content(&shown).await;
    let holds = holds.map_err(|why| format!("failed to get disk format of disk {shown}: {why}"))?;
    match holds.as_str() {
        "" if read_only => {
            return Err(format!(
                "cannot mount unformatted disk {shown} as we are manipulating it in read-only mode"
            ));
        }
        "" => make(&shown, fs_type).await?,
        holds => {
            if holds != fs_type {
                tracing::warn!(device = shown, wanted = fs_type, holds, "a disk has another file system");
            }
            if !read_only {
                look_over(&shown).await?;
            }
        }
    }
    let mut options = options.to_vec();
    options.extend(read_only.then(|| "ro".to_owned()));
    options.push("defaults".to_owned());
    tools::mount(&["-t".to_owned(), fs_type.to_owned(), "-o".to_owned(), options.join(","), shown], dir).await
}

/// The file system on a disk, empty where there is none.
async fn content(device: &str) -> Result<String, String> {
    let words = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device];
    let done = run("blkid", &words).await.map_err(|failure| failure.to_string())?;
    if done.code == 2 {
        return Ok(String::new());
    }
    Ok(holds(&done.content()?))
}

fn holds(said: &str) -> String {
    let value = |name: &str| {
        said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default()
    };
    if value("PTTYPE").is_empty() { value("TYPE").to_owned() } else { DIVIDED.to_owned() }
}

async fn make(device: &str, fs_type: &str) -> Result<(), String> {
    let words: &[&str] = match fs_type {
        "ext3" | "ext4" => &["-F", "-m0", device],
        "xfs" => &["-f", device],
        _ => &[device],
    };
    let done = run(format!("mkfs.{fs_type}"), words).await.map_err(|failure| failure.to_string());
    let why = match done.map(|done| done.content()) {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(why)) | Err(why) => why,
    };
    Err(format!("format of disk {device:?} failed: type:({fs_type:?}) {why}"))
}

/// Has what can be mended mended.
async fn look_over(device: &str) -> Result<(), String> {
    match run("fsck", &["-a", device]).await {
        Ok(done) if done.code == FSCK_COULD_NOT => {
            Err(format!("'fsck' found errors on device {device} but could not correct them: {}", done.said))
        }
        Ok(done) => {
            if done.code != 0 {
                tracing::info!(device, code = done.code, said = done.said, "fsck");
            }
            Ok(())
        }
        Err(failure @ Failure::Missing(_)) => {
            tracing::warn!(device, %failure, "a disk is not looked over");
            Ok(())
        }
        Err(failure) => Err(failure.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_holds() {
        let check = |said: &str, expected: &str| assert_eq!(holds(said), expected, "{said:?}");
        check("DEVNAME=/dev/loop0\nTYPE=ext4\n", "ext4");
        check("DEVNAME=/dev/loop0\nPTTYPE=gpt\n", DIVIDED);
        check("TYPE=vfat\nPTTYPE=dos\n", DIVIDED);
        check("", "");
    }
}

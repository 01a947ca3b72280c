//! NFS volumes, mounted by the host's tools.

use std::path::Path;

use k8s_openapi::api::core::v1::NFSVolumeSource;

use super::host_commands::{self, is_mounted};

const MOUNT_NFS_PATHS: [&str; 3] = ["/sbin/mount.nfs", "/usr/sbin/mount.nfs", "/usr/bin/mount.nfs"];

/// Mounts an export at `dir`, unless it is mounted already.
pub async fn mount(source: &NFSVolumeSource, options: &[String], dir: &Path) -> Result<(), String> {
    if is_mounted(dir) {
        return Ok(());
    }
    if !MOUNT_NFS_PATHS.iter().any(|tool| Path::new(tool).exists()) {
        let message =
            "mount.nfs is not installed on this node: install nfs-common (Debian) or nfs-utils (Fedora)";
        return Err(message.to_owned());
    }
    host_commands::mount(&arguments(source, options), dir).await.map_err(|message| {
        let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        message + kernel_hint(&known)
    })
}

/// A hint if the kernel does not support NFS. `mount` has tried to load the module before that.
fn kernel_hint(filesystems: &str) -> &'static str {
    let is_known = filesystems.split_whitespace().any(|name| name == "nfs" || name == "nfs4");
    if is_known { "" } else { " (this node's kernel has no NFS: load its module by `modprobe nfs`)" }
}

fn arguments(source: &NFSVolumeSource, options: &[String]) -> Vec<String> {
    let mut options = options.to_vec();
    if source.read_only == Some(true) {
        options.push("ro".to_owned());
    }
    let mut args = vec!["-t".to_owned(), "nfs".to_owned()];
    if !options.is_empty() {
        args.extend(["-o".to_owned(), options.join(",")]);
    }
    let server = match source.server.contains(':') && !source.server.starts_with('[') {
        true => format!("[{}]", source.server),
        false => source.server.clone(),
    };
    args.push(format!("{server}:{}", source.path));
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_nfs_module_is_detected() {
        assert!(kernel_hint("nodev\tsysfs\n\text4\nnodev\tnfsd\n").contains("modprobe nfs"));
        assert_eq!(kernel_hint("nodev\tsysfs\nnodev\tnfs\n\text4\n"), "");
    }

    #[test]
    fn mount_arguments_include_options_and_source() {
        let check = |server: &str, read_only, options: &[&str], expected: &str| {
            let source = NFSVolumeSource { path: "/exports".into(), read_only, server: server.into() };
            let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
            assert_eq!(arguments(&source, &options).join(" "), expected);
        };
        check("files", None, &[], "-t nfs files:/exports");
        check("fd00::1", Some(true), &["nfsvers=4.1"], "-t nfs -o nfsvers=4.1,ro [fd00::1]:/exports");
    }
}

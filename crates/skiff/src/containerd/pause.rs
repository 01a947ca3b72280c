//! The pause image for containerd. The program is generated here, so that a node needs no registry to
//! start its first pod.

use sha2::{Digest as _, Sha256};

/// Name of the image.
pub const IMAGE: &str = "skiff.invalid/pause:1";
/// Whether the program exists for this architecture.
pub const IS_SUPPORTED: bool = cfg!(target_arch = "x86_64");

const LOAD_ADDRESS: u64 = 0x40_0000;
const HEADER_BYTES: u64 = 64 + 56;

/// `rt_sigaction(SIGCHLD, &ignore, NULL, 8)`, so that no zombies remain in pods with a shared PID
/// namespace; then `pause()` in a loop. The data after the code is `ignore`: SIG_IGN with SA_NOCLDWAIT.
const CODE: &[u8] = &[
    0xb8, 0x0d, 0, 0, 0, // mov eax, 13
    0xbf, 0x11, 0, 0, 0, // mov edi, 17
    0x48, 0x8d, 0x35, 0x17, 0, 0, 0, // lea rsi, [rip + 23]
    0x31, 0xd2, // xor edx, edx
    0x41, 0xba, 0x08, 0, 0, 0, // mov r10d, 8
    0x0f, 0x05, // syscall
    0xb8, 0x22, 0, 0, 0, // mov eax, 34
    0x0f, 0x05, // syscall
    0xeb, 0xf7, // jmp to the last mov
    0, 0, 0, 0, //
    1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// A `docker save` archive with the image under this name. `None` if the architecture is not supported;
/// the image must then be pulled.
pub fn archive(name: &str) -> anyhow::Result<Option<Vec<u8>>> {
    if !IS_SUPPORTED {
        return Ok(None);
    }
    let mut layer = Vec::new();
    append_file(&mut layer, "pause", 0o755, &elf_program());
    append_trailer(&mut layer);
    let digest: String = Sha256::digest(&layer).iter().map(|byte| format!("{byte:02x}")).collect();
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
        "history": [],
    });
    let manifest =
        serde_json::json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
    let mut archive = Vec::new();
    append_file(&mut archive, "layer.tar", 0o644, &layer);
    append_file(&mut archive, "config.json", 0o644, config.to_string().as_bytes());
    append_file(&mut archive, "manifest.json", 0o644, manifest.to_string().as_bytes());
    append_trailer(&mut archive);
    Ok(Some(archive))
}

/// An ELF executable with one segment.
fn elf_program() -> Vec<u8> {
    let size = HEADER_BYTES + CODE.len() as u64;
    let mut out = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let short = |out: &mut Vec<u8>, values: &[u16]| values.iter().for_each(|v| out.extend(v.to_le_bytes()));
    let long = |out: &mut Vec<u8>, values: &[u64]| values.iter().for_each(|v| out.extend(v.to_le_bytes()));
    short(&mut out, &[2, 62]); // an executable, for x86-64
    out.extend(1u32.to_le_bytes());
    long(&mut out, &[LOAD_ADDRESS + HEADER_BYTES, 64, 0]); // where it begins, where the segments are listed
    out.extend(0u32.to_le_bytes());
    short(&mut out, &[64, 56, 1, 0, 0, 0]);
    out.extend(1u32.to_le_bytes()); // to be loaded
    out.extend(5u32.to_le_bytes()); // to be read and executed
    long(&mut out, &[0, LOAD_ADDRESS, LOAD_ADDRESS, size, size, 0x1000]);
    out.extend(CODE);
    out
}

/// Adds a file to a tar archive.
fn append_file(archive: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) {
    let mut header = [0u8; 512];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, &format!("{mode:07o}"));
    put(108, "0000000");
    put(116, "0000000");
    put(124, &format!("{:011o}", data.len()));
    put(136, "00000000000");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    archive.extend(header);
    archive.extend(data);
    archive.resize(archive.len().next_multiple_of(512), 0);
}

fn append_trailer(archive: &mut Vec<u8>) {
    archive.resize(archive.len() + 1024, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_program_waits() {
        use std::os::unix::fs::PermissionsExt as _;
        if !IS_SUPPORTED {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pause");
        std::fs::write(&path, elf_program()).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("set");
        let mut child = std::process::Command::new(&path).spawn().expect("started");
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("a process");
            stat.rsplit_once(')').and_then(|(_, rest)| rest.trim().chars().next())
        };
        while state() == Some('R') {
            std::thread::yield_now();
        }
        assert_eq!(state(), Some('S'));
        child.kill().expect("killed");
        child.wait().expect("an end");
    }

    #[test]
    fn tar_can_list_the_archive() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pause.tar");
        let Some(archive) = archive(IMAGE).expect("an archive") else { return };
        std::fs::write(&path, archive).expect("written");
        let listed = std::process::Command::new("tar").arg("-tf").arg(&path).output().expect("tar");
        assert_eq!(String::from_utf8_lossy(&listed.stdout), "layer.tar\nconfig.json\nmanifest.json\n");
    }
}

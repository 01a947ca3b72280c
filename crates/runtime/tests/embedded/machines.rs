//! Executables of other architectures that the kernel also runs, under seccomp filters.

use runtime::cri::*;

use crate::kit::{TestNode, security, with};

/// A 32-bit executable: prints a message, makes a syscall that the default profile denies (and that the
/// kernel does not accept in this form), and exits with its errno.
#[cfg(target_arch = "x86_64")]
fn elf_program() -> Vec<u8> {
    const LOAD_ADDRESS: u32 = 0x0804_8000;
    const HEADER_BYTES: u32 = 52 + 32;
    let set = |register: u8, value: u32| [&[0xb8 + register][..], &value.to_le_bytes()].concat();
    let call = vec![0xcd, 0x80];
    let code = |message: u32| {
        // write(1, message, 4); keyctl(0xffff); ebx = -eax; exit(ebx)
        let write_message = [set(0, 4), set(3, 1), set(1, message), set(2, 4), call.clone()].concat();
        let call_socket = [set(0, 288), set(3, 0xffff), call.clone()].concat();
        [write_message, call_socket, vec![0x89, 0xc3, 0xf7, 0xdb], set(0, 1), call.clone()].concat()
    };
    let length = u32::try_from(code(0).len()).unwrap();
    let mut body = code(LOAD_ADDRESS + HEADER_BYTES + length);
    body.extend(b"ran\n");
    let size = HEADER_BYTES + length + 4;
    let mut file = b"\x7fELF\x01\x01\x01".to_vec();
    file.resize(16, 0);
    let half = |numbers: &[u16]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let word = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    file.extend(half(&[2, 3]));
    file.extend(word(&[1, LOAD_ADDRESS + HEADER_BYTES, 52, 0, 0]));
    file.extend(half(&[52, 32, 1, 0, 0, 0]));
    file.extend(word(&[1, 0, LOAD_ADDRESS, LOAD_ADDRESS, size, size, 5, 0x1000]));
    file.extend(body);
    file
}

#[cfg(not(target_arch = "x86_64"))]
pub async fn programs_for_32_bits(_: &TestNode) {
    println!("skipped: the executable of this test is for another architecture");
}

#[cfg(target_arch = "x86_64")]
pub async fn runs_a_32_bit_executable(node: &TestNode) {
    use std::os::unix::fs::PermissionsExt as _;
    const KILLED: i32 = 128 + 31;
    const NOT_SUPPORTED: i32 = 95;
    let place = node.dir.path().join("programs");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::write(place.join("old"), elf_program()).unwrap();
    std::fs::set_permissions(place.join("old"), std::fs::Permissions::from_mode(0o755)).unwrap();
    if std::process::Command::new(place.join("old")).output().is_err() {
        return println!("skipped: this kernel does not run executables with 32 bits");
    }
    let profiles = node.dir.path().join("seccomp");
    std::fs::create_dir_all(&profiles).unwrap();
    let profile = |more: &str| {
        format!(
            r#"{{"defaultAction": "SCMP_ACT_ALLOW", {more}
            "syscalls": [{{"names": ["keyctl"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13}}]}}"#
        )
    };
    std::fs::write(profiles.join("own.json"), profile("")).unwrap();
    std::fs::write(profiles.join("both.json"), profile(r#""architectures": ["SCMP_ARCH_X86"],"#)).unwrap();
    let pod = node.pod("machines").await;
    for (kind, name, code, said) in [
        (ProfileType::RuntimeDefault, "", 1, "ran\n"),
        (ProfileType::Unconfined, "", NOT_SUPPORTED, "ran\n"),
        (ProfileType::Localhost, "both.json", 13, "ran\n"),
        (ProfileType::Localhost, "own.json", KILLED, ""),
    ] {
        let mut security = security();
        security.seccomp = Some(SecurityProfile { profile_type: kind.into(), localhost_ref: name.into() });
        let mut config = with(security, "");
        config.command = vec!["/programs/old".into()];
        config.mounts = vec![Mount {
            container_path: "/programs".into(),
            host_path: place.display().to_string(),
            ..Mount::default()
        }];
        assert_eq!(pod.finish(&config).await, (code, said.to_owned()), "{kind:?} {name}");
    }
}

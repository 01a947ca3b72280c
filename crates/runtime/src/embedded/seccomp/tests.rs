use super::*;

/// Runs a filter as the kernel would.
fn judge(program: &[Instruction], call: &str, arguments: &[u64]) -> u32 {
    let number = number(call).unwrap_or_else(|| panic!("{call} has no number"));
    let mut data =
        [number, if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 }, 0, 0].to_vec();
    for at in 0..6 {
        let value = arguments.get(at).copied().unwrap_or(0);
        data.extend([value as u32, (value >> 32) as u32]);
    }
    let (mut at, mut accumulator) = (0usize, 0u32);
    loop {
        let one = program[at];
        at += 1;
        let mut branch = |holds: bool| at += usize::from(if holds { one.yes } else { one.no });
        match one.code {
            0x20 => accumulator = data[one.value as usize / 4],
            0x54 => accumulator &= one.value,
            0x15 => branch(accumulator == one.value),
            0x25 => branch(accumulator > one.value),
            0x35 => branch(accumulator >= one.value),
            0x05 => at += one.value as usize,
            0x06 => return one.value,
            code => panic!("instruction {code:#x}"),
        }
    }
}

const ALLOW: u32 = 0x7fff_0000;
const DENY: u32 = 0x0005_0001;

#[track_caller]
fn check(capabilities: &[u8], call: &str, arguments: &[u64], expected: u32) {
    assert_eq!(judge(&default_filter(capabilities), call, arguments), expected, "{call} {arguments:x?}");
}

#[test]
fn the_default_profile() {
    for call in ["read", "write", "openat", "execve", "exit_group", "futex", "statx", "mseal", "setuid"] {
        check(&[], call, &[], ALLOW);
    }
    for call in [
        "mount",
        "umount2",
        "unshare",
        "setns",
        "bpf",
        "keyctl",
        "reboot",
        "kexec_load",
        "io_uring_setup",
        "chroot",
    ] {
        check(&[], call, &[], DENY);
    }
    for call in ["mount", "unshare", "clone3", "bpf"] {
        check(&[SYS_ADMIN], call, &[], ALLOW);
    }
    check(&[18], "chroot", &[], ALLOW);
    check(&[], "clone3", &[], 0x0005_0026);
    check(&[], "clone", &[0x11], ALLOW);
    for namespace in [0x2_0000u64, 0x0400_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000] {
        check(&[], "clone", &[namespace | 0x11], DENY);
        check(&[SYS_ADMIN], "clone", &[namespace], ALLOW);
    }
    check(&[], "socket", &[2], ALLOW);
    check(&[], "socket", &[VSOCK], DENY);
    check(&[], "socket", &[1 << 32 | VSOCK], ALLOW);
    check(&[], "personality", &[0x0008], ALLOW);
    check(&[], "personality", &[0x0004_0000], DENY);
}

#[test]
fn a_foreign_machine_ends() {
    let program = default_filter(&[]);
    assert_eq!(program[2].value, 0x8000_0000);
    assert!(program.len() < 1500, "{} instructions", program.len());
}

#[test]
fn profiles_from_files() {
    let text = br#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["mkdir", "mkdirat", "not_a_call"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13},
        {"names": ["lseek"], "action": "SCMP_ACT_KILL", "args": [{"index": 1, "value": 4294967296, "op": "SCMP_CMP_GT"}]},
        {"names": ["sync"], "action": "SCMP_ACT_LOG", "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["write"], "action": "SCMP_ACT_TRAP", "args": [{"index": 0, "value": 9, "op": "SCMP_CMP_LE"}]}
    ]}"#;
    let program = from_profile(text, &[]).unwrap();
    let judged = |call, arguments: &[u64]| judge(&program, call, arguments);
    assert_eq!(judged("mkdirat", &[]), 0x0005_000d);
    assert_eq!(judged("read", &[]), ALLOW);
    assert_eq!(judged("sync", &[]), 0x7ffc_0000);
    assert_eq!(
        [
            judged("lseek", &[0, 1 << 32]),
            judged("lseek", &[0, (1 << 32) + 1]),
            judged("lseek", &[0, 1 << 33])
        ],
        [ALLOW, 0, 0]
    );
    assert_eq!(
        [judged("write", &[9]), judged("write", &[10]), judged("write", &[1 << 40])],
        [0x0003_0000, ALLOW, ALLOW]
    );
    assert_eq!(judge(&from_profile(text, &[SYS_ADMIN]).unwrap(), "sync", &[]), ALLOW);
    for bad in ["", "{}", r#"{"defaultAction": "SCMP_ACT_DANCE"}"#] {
        assert!(from_profile(bad.as_bytes(), &[]).is_err(), "{bad}");
    }
}

use super::*;

/// Runs a filter for a native syscall, as the kernel does.
fn run_syscall(program: &[SockFilter], call: &str, arguments: &[u64]) -> u32 {
    run_syscall_on(Arch::Own, program, call, arguments)
}

/// Runs a filter for a syscall of another architecture.
fn run_syscall_on(machine: Arch, program: &[SockFilter], call: &str, arguments: &[u64]) -> u32 {
    let number = machine.syscall_number(call).unwrap_or_else(|| panic!("{call} has no number"));
    run(program, machine.audit_arch(), number, arguments)
}

fn run(program: &[SockFilter], token: u32, number: u32, arguments: &[u64]) -> u32 {
    let mut data = [number, token, 0, 0].to_vec();
    for at in 0..6 {
        let value = arguments.get(at).copied().unwrap_or(0);
        data.extend([value as u32, (value >> 32) as u32]);
    }
    let (mut at, mut accumulator) = (0usize, 0u32);
    loop {
        let one = program[at];
        at += 1;
        let mut branch = |holds: bool| at += usize::from(if holds { one.jump_true } else { one.jump_false });
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
const KILL: u32 = 0x8000_0000;

#[track_caller]
fn check(capabilities: &[u8], call: &str, arguments: &[u64], expected: u32) {
    assert_eq!(
        run_syscall(&default_filter(capabilities), call, arguments),
        expected,
        "{call} {arguments:x?}"
    );
}

#[test]
fn default_profile_limits_syscalls() {
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
fn unknown_arch_is_killed() {
    let program = default_filter(&[]);
    // The value of s390x.
    assert_eq!(run(&program, 0x8000_0016, 1, &[]), KILL);
    let limit = 4096;
    let all: Vec<u8> = (0..=40).collect();
    for capabilities in [&[][..], &all] {
        let length = default_filter(capabilities).len();
        assert!(length < limit, "{length} instructions, of which the kernel takes {limit}");
    }
}

#[test]
fn compat_arch_has_the_same_default_rules() {
    for (_, machine) in Arch::ALL {
        let program = default_filter(&[]);
        let check = |call: &str, arguments: &[u64], expected: u32| {
            assert_eq!(run_syscall_on(*machine, &program, call, arguments), expected, "{machine:?} {call}");
        };
        for call in ["read", "write", "openat", "execve", "exit_group", "futex", "ioctl", "rt_sigreturn"] {
            check(call, &[], ALLOW);
        }
        for call in ["mount", "unshare", "setns", "bpf", "keyctl", "kexec_load"] {
            check(call, &[], DENY);
        }
        check("clone", &[0x11], ALLOW);
        check("clone", &[0x1000_0011], DENY);
        check("clone3", &[], 0x0005_0026);
        check("socket", &[2], ALLOW);
        check("socket", &[VSOCK], DENY);
        check("personality", &[0xffff_ffff], ALLOW);
        assert_eq!(run_syscall_on(*machine, &default_filter(&[SYS_ADMIN]), "mount", &[]), ALLOW);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn handles_x86_and_x32_syscalls() {
    let program = default_filter(&[]);
    for call in ["socketcall", "mmap2", "_llseek", "fcntl64", "clock_gettime64", "waitpid", "set_thread_area"]
    {
        assert_eq!(run_syscall_on(Arch::X86, &program, call, &[]), ALLOW, "{call}");
    }
    for call in ["umount", "vm86", "uselib", "stime"] {
        assert_eq!(run_syscall_on(Arch::X86, &program, call, &[]), DENY, "{call}");
    }
    // The same number is different syscalls: 165 is `mount` on x86_64 and `getresuid` on i386.
    let (own, old) = (Arch::Own.audit_arch(), Arch::X86.audit_arch());
    assert_eq!((run(&program, own, 165, &[]), run(&program, old, 165, &[])), (DENY, ALLOW));
    // Where x32 has numbers of its own, the native ones are denied for it, and its own are denied
    // without the x32 bit.
    assert_eq!(run(&program, own, 0x4000_0000 | 520, &[]), ALLOW);
    assert_eq!(run(&program, own, 520, &[]), DENY);
    assert_eq!(run(&program, own, 0x4000_0000 | 59, &[]), DENY);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn profile_applies_to_its_arch() {
    let profile = |more: &str| {
        let text = format!(
            r#"{{"defaultAction": "SCMP_ACT_ALLOW", {more} "syscalls": [
                {{"names": ["mkdir"], "action": "SCMP_ACT_ERRNO"}},
                {{"names": ["sync"], "action": "SCMP_ACT_ERRNO", "includes": {{"arches": ["s390x"]}}}},
                {{"names": ["umask"], "action": "SCMP_ACT_ERRNO", "excludes": {{"arches": ["amd64"]}}}},
                {{"names": ["alarm"], "action": "SCMP_ACT_ERRNO", "includes": {{"arches": ["amd64", "x32"]}}}}
            ]}}"#
        );
        from_profile(text.as_bytes(), &[])
    };
    let check_profile = |more: &str| {
        let program = profile(more).unwrap();
        let of = |machine: Arch| {
            run(&program, machine.audit_arch(), machine.syscall_number("mkdir").unwrap(), &[])
        };
        assert_eq!([run_syscall(&program, "sync", &[]), run_syscall(&program, "umask", &[])], [ALLOW, ALLOW]);
        assert_eq!(run_syscall(&program, "alarm", &[]), DENY);
        [of(Arch::Own), of(Arch::X86), of(Arch::X32)]
    };
    let none = 0x0005_0026;
    assert_eq!(check_profile(""), [DENY, KILL, none]);
    assert_eq!(check_profile(r#""architectures": ["SCMP_ARCH_X86"],"#), [DENY, DENY, none]);
    let all =
        r#""architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32", "SCMP_ARCH_S390X"],"#;
    assert_eq!(check_profile(all), [DENY, DENY, DENY]);
    let map = r#""archMap": [
        {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]},
        {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_X32"]}],"#;
    assert_eq!(check_profile(map), [DENY, DENY, none]);
    assert_eq!(check_profile(r#""architectures": null, "archMap": [],"#), [DENY, KILL, none]);
    let bad = profile(r#""architectures": ["SCMP_ARCH_ABACUS"],"#).unwrap_err();
    assert_eq!(bad, "string SCMP_ARCH_ABACUS is not a valid arch for seccomp");
    assert!(profile(&format!("{all}{map}")).unwrap_err().starts_with("both 'architectures' and 'archMap'"));
}

#[test]
fn loads_profiles_from_files() {
    let text = br#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["mkdir", "mkdirat", "not_a_call"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13},
        {"names": ["lseek"], "action": "SCMP_ACT_KILL", "args": [{"index": 1, "value": 4294967296, "op": "SCMP_CMP_GT"}]},
        {"names": ["sync"], "action": "SCMP_ACT_LOG", "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["write"], "action": "SCMP_ACT_TRAP", "args": [{"index": 0, "value": 9, "op": "SCMP_CMP_LE"}]}
    ]}"#;
    let program = from_profile(text, &[]).unwrap();
    let syscall_result = |call, arguments: &[u64]| run_syscall(&program, call, arguments);
    assert_eq!(syscall_result("mkdirat", &[]), 0x0005_000d);
    assert_eq!(syscall_result("read", &[]), ALLOW);
    assert_eq!(syscall_result("sync", &[]), 0x7ffc_0000);
    assert_eq!(
        [
            syscall_result("lseek", &[0, 1 << 32]),
            syscall_result("lseek", &[0, (1 << 32) + 1]),
            syscall_result("lseek", &[0, 1 << 33])
        ],
        [ALLOW, 0, 0]
    );
    assert_eq!(
        [syscall_result("write", &[9]), syscall_result("write", &[10]), syscall_result("write", &[1 << 40])],
        [0x0003_0000, ALLOW, ALLOW]
    );
    assert_eq!(run_syscall(&from_profile(text, &[SYS_ADMIN]).unwrap(), "sync", &[]), ALLOW);
    for bad in ["", "{}", r#"{"defaultAction": "SCMP_ACT_DANCE"}"#] {
        assert!(from_profile(bad.as_bytes(), &[]).is_err(), "{bad}");
    }
}

#[test]
fn profiles_match_runc() {
    let text = br#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [
            {"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}, {"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]},
        {"names": ["lseek"], "action": "SCMP_ACT_ALLOW", "args": [
            {"index": 0, "value": 3, "op": "SCMP_CMP_EQ"}, {"index": 1, "value": 8, "op": "SCMP_CMP_EQ"}]},
        {"names": ["socket"], "action": "SCMP_ACT_ERRNO"},
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 2, "op": "SCMP_CMP_EQ"}]},
        {"names": ["sync"], "action": "SCMP_ACT_LOG", "args": [{"index": 0, "value": 2, "op": "SCMP_CMP_EQ"}]},
        {"names": ["sync"], "action": "SCMP_ACT_ALLOW"}
    ]}"#;
    let program = from_profile(text, &[]).unwrap();
    let check = |call, arguments: &[u64], expected| {
        assert_eq!(run_syscall(&program, call, arguments), expected, "{call} {arguments:?}");
    };
    // Conditions on one argument are alternatives; conditions on several arguments must all hold.
    check("personality", &[0], ALLOW);
    check("personality", &[8], ALLOW);
    check("personality", &[9], DENY);
    check("lseek", &[3, 8], ALLOW);
    check("lseek", &[3, 9], DENY);
    // A rule with the default action is ignored.
    check("socket", &[2], ALLOW);
    check("socket", &[3], DENY);
    // A rule without conditions replaces those with conditions.
    check("sync", &[2], ALLOW);
}

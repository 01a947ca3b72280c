use super::*;

#[track_caller]
fn rules(text: &str) -> Vec<DeviceRule> {
    text.split(", ").map(|rule| rule.parse().unwrap_or_else(|_| panic!("{rule}"))).collect()
}

/// Runs a program as the kernel does, limited to the instructions that [`program`] generates.
fn run(program: &[Instruction], question: [u32; 3]) -> u32 {
    let mut regs = [0u32; 11];
    let mut at = 0;
    loop {
        let step = &program[at];
        let (target, source) = ((step.regs & 15) as usize, (step.regs >> 4) as usize);
        let value = step.value.cast_unsigned();
        at += 1;
        match step.code {
            0x61 => regs[target] = question[step.offset as usize / 4],
            0xbc => regs[target] = regs[source],
            0x54 => regs[target] &= value,
            0x74 => regs[target] >>= value,
            0xb4 => regs[target] = value,
            0x56 if regs[target] != value => at += step.offset as usize,
            0x56 => {}
            0x95 => return regs[0],
            code => panic!("{code:#x}"),
        }
    }
}

#[track_caller]
fn check(allowed: &str, request: &str, expected: bool) {
    let request = rules(request)[0];
    let kind = request.kind.unwrap() as u32;
    let access = request.access().cast_unsigned();
    let question = [kind | access << 16, request.major.unwrap(), request.minor.unwrap()];
    let answer = run(&program(&rules(allowed)), question);
    assert_eq!(answer == 1, expected, "{allowed}: {request}");
}

#[test]
fn allows_only_devices_with_a_matching_rule() {
    let default_rules = "c *:* m, b *:* m, c 1:3 rwm, c 136:* rwm";
    check(default_rules, "c 1:3 rw", true);
    check(default_rules, "c 1:3 m", true);
    check(default_rules, "c 1:5 r", false);
    check(default_rules, "b 1:3 r", false);
    check(default_rules, "b 254:0 m", true);
    check(default_rules, "b 254:0 rm", false);
    check(default_rules, "c 136:77 rwm", true);
    check("b 8:0 r", "b 8:0 r", true);
    check("b 8:0 r", "b 8:0 w", false);
    check("b 8:0 r", "b 8:0 rw", false);
    check("b 8:0 r", "b 8:1 r", false);
    check("a", "b 8:1 rwm", true);
    check("a *:* r", "c 8:1 r", true);
    check("a *:* r", "c 8:1 w", false);
    check("c 4294967295:4294967295 r", "c 4294967295:4294967295 r", true);
    assert_eq!(run(&program(&[]), [2, 1, 3]), 0);
}

#[test]
fn device_rules_round_trip() {
    let text = "c *:* m, b 8:1 rw, a *:* rwm";
    let written: Vec<_> = rules(text).iter().map(DeviceRule::to_string).collect();
    assert_eq!(written.join(", "), text);
    assert_eq!(rules("a"), [DeviceRule::ALL]);
    for wrong in ["", "x 1:2 r", "c 1 r", "c 1:2 x", "c 1:2", "c 1:-2 r", "c 1:2 ", "c 1:2 r w"] {
        assert_eq!(wrong.parse::<DeviceRule>(), Err(ParseDeviceRuleError), "{wrong}");
    }
}

/// The kernel's decision in a v2 group. On v1 hosts a cgroup2 hierarchy is mounted as well.
#[test]
fn kernel_enforces_the_device_program() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let root = mounts.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words.get(2) == Some(&"cgroup2")).then(|| std::path::PathBuf::from(words[1]))
    });
    let Some(root) = root else { return eprintln!("skipped: needs cgroup v2") };
    let groups = Cgroups::V2 { root: root.clone() };
    let group = format!("/skiff-devices-{}", std::process::id());
    if groups.create(&group).is_err() {
        return eprintln!("skipped: needs root");
    }
    let path = root.join(group.trim_matches('/'));
    let allowed = groups.allow_devices(&group, &rules("c 1:3 rw, c 1:5 r"));
    let script = format!(
        "echo 0 >{}/cgroup.procs; echo x >/dev/null && echo null; head -c 1 /dev/zero >/dev/null && echo zero; \
         (echo x >/dev/zero) 2>/dev/null || echo not into zero; head -c 1 /dev/urandom 2>/dev/null || echo not random",
        path.display()
    );
    let output = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
    groups.remove(&group).unwrap();
    allowed.unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "null\nzero\nnot into zero\nnot random\n",
        "{output:?}"
    );
}

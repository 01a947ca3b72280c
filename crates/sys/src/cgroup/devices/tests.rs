use super::*;

#[track_caller]
fn rules(text: &str) -> Vec<DeviceRule> {
    text.split(", ").map(|rule| rule.parse().unwrap_or_else(|_| panic!("{rule}"))).collect()
}

/// Runs a program as the kernel would; only what [`program`] uses of the language.
fn run(program: &[Instruction], question: [u32; 3]) -> u32 {
    let mut registers = [0u32; 11];
    let mut at = 0;
    loop {
        let step = &program[at];
        let (target, source) = ((step.registers & 15) as usize, (step.registers >> 4) as usize);
        let value = step.value.cast_unsigned();
        at += 1;
        match step.code {
            0x61 => registers[target] = question[step.offset as usize / 4],
            0xbc => registers[target] = registers[source],
            0x54 => registers[target] &= value,
            0x74 => registers[target] >>= value,
            0xb4 => registers[target] = value,
            0x56 if registers[target] != value => at += step.offset as usize,
            0x56 => {}
            0x95 => return registers[0],
            code => panic!("{code:#x}"),
        }
    }
}

#[track_caller]
fn check(allowed: &str, asked: &str, expected: bool) {
    let asked = rules(asked)[0];
    let kind = asked.kind.unwrap() as u32;
    let access = asked.access().cast_unsigned();
    let question = [kind | access << 16, asked.major.unwrap(), asked.minor.unwrap()];
    let answer = run(&program(&rules(allowed)), question);
    assert_eq!(answer == 1, expected, "{allowed}: {asked}");
}

#[test]
fn only_what_a_rule_names_is_allowed() {
    let usual = "c *:* m, b *:* m, c 1:3 rwm, c 136:* rwm";
    check(usual, "c 1:3 rw", true);
    check(usual, "c 1:3 m", true);
    check(usual, "c 1:5 r", false);
    check(usual, "b 1:3 r", false);
    check(usual, "b 254:0 m", true);
    check(usual, "b 254:0 rm", false);
    check(usual, "c 136:77 rwm", true);
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
fn rules_are_written_as_the_kernel_reads_them() {
    let text = "c *:* m, b 8:1 rw, a *:* rwm";
    let written: Vec<_> = rules(text).iter().map(DeviceRule::to_string).collect();
    assert_eq!(written.join(", "), text);
    assert_eq!(rules("a"), [DeviceRule::ALL]);
    for wrong in ["", "x 1:2 r", "c 1 r", "c 1:2 x", "c 1:2", "c 1:-2 r", "c 1:2 ", "c 1:2 r w"] {
        assert_eq!(wrong.parse::<DeviceRule>(), Err(NotARule), "{wrong}");
    }
}

/// The kernel's own judgement, in a group of the second version; hosts of the first have its hierarchy beside it.
#[test]
fn the_kernel_asks_the_program() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let root = mounts.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words.get(2) == Some(&"cgroup2")).then(|| std::path::PathBuf::from(words[1]))
    });
    let Some(root) = root else { return eprintln!("skipped: no cgroups of the second version") };
    let groups = Cgroups::V2 { root: root.clone() };
    let group = format!("/skiff-devices-{}", std::process::id());
    if groups.create(&group).is_err() {
        return eprintln!("skipped: needs root");
    }
    let place = root.join(group.trim_matches('/'));
    let allowed = groups.allow_devices(&group, &rules("c 1:3 rw, c 1:5 r"));
    let script = format!(
        "echo 0 >{}/cgroup.procs; echo x >/dev/null && echo null; head -c 1 /dev/zero >/dev/null && echo zero; \
         (echo x >/dev/zero) 2>/dev/null || echo not into zero; head -c 1 /dev/urandom 2>/dev/null || echo not random",
        place.display()
    );
    let said = std::process::Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
    groups.remove(&group).unwrap();
    allowed.unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "null\nzero\nnot into zero\nnot random\n", "{said:?}");
}

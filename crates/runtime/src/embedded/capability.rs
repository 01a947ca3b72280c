//! Linux capabilities by name.

/// Indexed by capability number.
const CAPABILITY_NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];
/// The capabilities of containers that specify none; the same as containerd's.
const DEFAULT_CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// The number of a capability, case-insensitive, with or without the prefix `CAP_`.
pub fn number(name: &str) -> Option<u8> {
    let name = name.to_ascii_uppercase();
    let name = name.strip_prefix("CAP_").unwrap_or(&name);
    CAPABILITY_NAMES.iter().position(|known| *known == name).and_then(|at| u8::try_from(at).ok())
}

/// The numbers of all capabilities.
pub fn all() -> Vec<u8> {
    (0..=40).collect()
}

/// The default capabilities plus `add`, minus `drop`; `ALL` stands for all capabilities.
pub fn select_capabilities(add: &[String], drop: &[String]) -> Result<Vec<u8>, String> {
    let is_all = |name: &String| name.eq_ignore_ascii_case("ALL");
    let numbers = |names: &[String]| -> Result<Vec<u8>, String> {
        let unknown = |name: &String| format!("unknown capability {name:?}");
        let named = names.iter().filter(|name| !is_all(name));
        named.map(|name| number(name).ok_or_else(|| unknown(name))).collect()
    };
    let mut selected: Vec<u8> = DEFAULT_CAPABILITIES.iter().filter_map(|name| number(name)).collect();
    // `ALL` is applied first, so that dropping `ALL` and adding one capability leaves that one.
    if add.iter().any(is_all) {
        selected = all();
    }
    if drop.iter().any(is_all) {
        selected.clear();
    }
    let (added, dropped) = (numbers(add)?, numbers(drop)?);
    selected.extend(added);
    selected.retain(|number| !dropped.contains(number));
    selected.sort_unstable();
    selected.dedup();
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_capability_names() {
        assert_eq!(
            [number("CHOWN"), number("cap_sys_admin"), number("BPF"), number("FLY")],
            [Some(0), Some(21), Some(39), None]
        );
    }

    #[test]
    fn adds_and_drops_capabilities() {
        let choose = |add: &[&str], drop: &[&str]| {
            let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
            select_capabilities(&owned(add), &owned(drop))
        };
        assert_eq!(choose(&[], &[]).unwrap().len(), 14);
        assert_eq!(choose(&[], &["ALL"]).unwrap(), [] as [u8; 0]);
        assert_eq!(choose(&["NET_ADMIN"], &["ALL"]).unwrap(), [12]);
        assert_eq!(choose(&["ALL"], &["SYS_ADMIN"]).unwrap().len(), 40);
        assert_eq!(choose(&["FLY"], &[]).unwrap_err(), "unknown capability \"FLY\"");
    }
}

//! Which sysctls pods may set: only namespaced ones, and of these only safe ones unless the node
//! allows more.

use k8s_openapi::api::core::v1::Pod;

use crate::admission::AdmissionFailure;

/// Sysctls that have no effect on other pods.
const SAFE_SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
];

/// The name with dots as separators; slashes are accepted, too.
pub fn normalize_name(name: &str) -> String {
    match name.find(['.', '/']).map(|at| name.as_bytes()[at]) {
        Some(b'/') => name
            .chars()
            .map(|letter| match letter {
                '.' => '/',
                '/' => '.',
                other => other,
            })
            .collect(),
        _ => name.to_owned(),
    }
}

/// Why a pod is rejected because of its sysctls. `extra_allowed` are allowed in addition to the
/// safe ones; a trailing `*` matches all with that prefix.
pub fn forbidden_sysctl(pod: &Pod, extra_allowed: &[String]) -> Option<AdmissionFailure> {
    let spec = pod.spec.as_ref()?;
    let requested = spec.security_context.as_ref()?.sysctls.as_ref()?;
    let reason = requested.iter().find_map(|sysctl| {
        let name = normalize_name(&sysctl.name);
        let is_allowed = |pattern: &str| match pattern.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == pattern,
        };
        if !SAFE_SYSCTLS.iter().copied().chain(extra_allowed.iter().map(String::as_str)).any(is_allowed) {
            return Some(format!("{name:?} not allowlisted"));
        }
        let (host, space) = match name.starts_with("net.") {
            true => (spec.host_network, "Net"),
            false => (spec.host_ipc, "IPC"),
        };
        (host == Some(true)).then(|| format!("{name:?} not allowed with host {space} enabled"))
    })?;
    Some(AdmissionFailure {
        reason: "SysctlForbidden".to_owned(),
        message: format!("forbidden sysctl: {reason}"),
    })
}

/// Whether a sysctl or a pattern of sysctls is namespaced. Others cannot be allowed.
pub fn is_namespaced(pattern: &str) -> bool {
    let (name, all) = match pattern.strip_suffix('*') {
        Some(beginning) => (beginning.trim_end_matches('.'), true),
        None => (pattern, false),
    };
    let ipc = ["kernel.sem", "kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced"];
    let messages = ["kernel.msgmax", "kernel.msgmnb", "kernel.msgmni"];
    let group = all && ["kernel.shm", "kernel.msg", "net", "fs.mqueue"].contains(&name);
    group
        || ipc.contains(&name)
        || messages.contains(&name)
        || ["net.", "fs.mqueue."].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rejects_sysctls_that_are_not_allowed() {
        let check = |name: &str, extra_allowed: &[&str], host: bool, expected: Option<&str>| {
            let sysctls = json!([{"name": name, "value": "1"}]);
            let spec = json!({"containers": [], "hostNetwork": host, "hostIPC": host, "securityContext": {"sysctls": sysctls}});
            let pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            let extra_allowed: Vec<String> = extra_allowed.iter().map(|name| (*name).to_owned()).collect();
            let found = forbidden_sysctl(&pod, &extra_allowed).map(|refusal| refusal.message);
            let expected = expected.map(|reason| format!("forbidden sysctl: {reason}"));
            assert_eq!(found, expected, "{name}");
        };
        check("net.ipv4.tcp_syncookies", &[], false, None);
        check("net/ipv4/tcp_syncookies", &[], false, None);
        check(
            "kernel.shm_rmid_forced",
            &[],
            true,
            Some("\"kernel.shm_rmid_forced\" not allowed with host IPC enabled"),
        );
        check(
            "net.ipv4.ping_group_range",
            &[],
            true,
            Some("\"net.ipv4.ping_group_range\" not allowed with host Net enabled"),
        );
        check("kernel.core_pattern", &[], false, Some("\"kernel.core_pattern\" not allowlisted"));
        check(
            "kernel/core_pattern",
            &["kernel.msg*"],
            false,
            Some("\"kernel.core_pattern\" not allowlisted"),
        );
        check("net.core.somaxconn", &[], false, Some("\"net.core.somaxconn\" not allowlisted"));
        check("net.core.somaxconn", &["net.core.*"], false, None);
        check("kernel.msgmax", &["kernel.msg*"], false, None);
        check("net.ipv4.conf.eth0/1.rp_filter", &["net.*"], false, None);
    }

    #[test]
    fn only_namespaced_sysctls_can_be_allowed() {
        for own in ["net.*", "net.core.somaxconn", "kernel.shm*", "kernel.msgmax", "fs.mqueue.*"] {
            assert!(is_namespaced(own), "{own}");
        }
        for other in ["*", "kernel.*", "kernel.core_pattern", "vm.swappiness", "fs.file-max", "network.x"] {
            assert!(!is_namespaced(other), "{other}");
        }
    }
}

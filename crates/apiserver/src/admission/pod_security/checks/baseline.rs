//! Checks of the baseline level.

use std::collections::BTreeSet;

use api::field::quote;
use api::json::JsonExt as _;
use serde_json::Value;

use super::{Pod, Violation, containers, format_subjects, list, plural, violation};

pub fn app_armor(pod: &Pod<'_>) -> Option<Violation> {
    const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
    let mut values = BTreeSet::new();
    let mut bad = |context: &Value| {
        let profile = context.at("appArmorProfile");
        let bad = !profile.is_null() && !matches!(profile.text("type"), "RuntimeDefault" | "Localhost");
        if bad {
            values.insert(profile.text("type").to_owned());
        }
        bad
    };
    let on_pod = bad(pod.context());
    let named = pod.contexts_where(bad);
    let mut by = Vec::from_iter(format_subjects(on_pod, &named));
    let annotations = pod.metadata.entries("annotations").filter_map(|(key, value)| {
        let value = value.as_str().unwrap_or("");
        let good = value.is_empty() || value == "runtime/default" || value.starts_with("localhost/");
        (key.starts_with(ANNOTATION) && !good).then(|| format!("{key}={}", quote(value)))
    });
    let mut annotations: Vec<String> = annotations.collect();
    annotations.sort();
    if !annotations.is_empty() {
        by.push(plural(annotations.len(), "annotation", "annotations").to_owned());
    }
    if by.is_empty() {
        return None;
    }
    let all: Vec<String> = values.into_iter().chain(annotations).collect();
    let reason = plural(all.len(), "forbidden AppArmor profile", "forbidden AppArmor profiles");
    violation(reason, format!("{} must not set AppArmor profile type to {}", by.join(" and "), list(all)))
}

/// The forbidden capabilities that containers add, as the detail of a violation.
pub fn forbidden_capabilities<'a>(pod: &Pod<'a>, allowed: &[&str]) -> Option<String> {
    let mut forbidden: BTreeSet<&str> = BTreeSet::new();
    let names = pod.contexts_where(|context| {
        let added = context.at("capabilities").items("add").iter().filter_map(Value::as_str);
        let bad: Vec<&'a str> = added.filter(|name| !allowed.contains(name)).collect();
        forbidden.extend(&bad);
        !bad.is_empty()
    });
    (!names.is_empty()).then(|| {
        format!(
            "{} must not include {} in securityContext.capabilities.add",
            containers(&names),
            list(forbidden)
        )
    })
}

pub fn default_capabilities(pod: &Pod<'_>) -> Option<Violation> {
    const DEFAULT: &[&str] = &[
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    ];
    violation("non-default capabilities", forbidden_capabilities(pod, DEFAULT)?)
}

pub fn host_namespaces(pod: &Pod<'_>) -> Option<Violation> {
    let shared = ["hostNetwork", "hostPID", "hostIPC"].into_iter().filter(|field| pod.spec.flag(field));
    let shared: Vec<String> = shared.map(|field| format!("{field}=true")).collect();
    if shared.is_empty() { None } else { violation("host namespaces", shared.join(", ")) }
}

pub fn host_paths(pod: &Pod<'_>) -> Option<Violation> {
    let volumes = pod.spec.items("volumes").iter().filter(|volume| volume.has("hostPath"));
    let names: Vec<&str> = volumes.map(|volume| volume.text("name")).collect();
    if names.is_empty() {
        return None;
    }
    violation("hostPath volumes", format!("{} {}", plural(names.len(), "volume", "volumes"), list(names)))
}

pub fn host_ports(pod: &Pod<'_>) -> Option<Violation> {
    let mut ports = BTreeSet::new();
    let names = pod.containers_where(|container| {
        let own = container.items("ports").iter().filter_map(|port| port.int("hostPort"));
        let own: Vec<String> = own.filter(|port| *port != 0).map(|port| port.to_string()).collect();
        let bad = !own.is_empty();
        ports.extend(own);
        bad
    });
    if names.is_empty() {
        return None;
    }
    let (use_, word) = (plural(names.len(), "uses", "use"), plural(ports.len(), "hostPort", "hostPorts"));
    let ports = Vec::from_iter(ports).join(", ");
    violation("hostPort", format!("{} {use_} {word} {ports}", containers(&names)))
}

pub fn probe_hosts(pod: &Pod<'_>) -> Option<Violation> {
    const HANDLERS: [&str; 5] =
        ["livenessProbe", "readinessProbe", "startupProbe", "lifecycle.postStart", "lifecycle.preStop"];
    let mut hosts: BTreeSet<&str> = BTreeSet::new();
    let names = pod.containers_where(|container| {
        let handlers = HANDLERS.iter().map(|path| container.path(path));
        let own =
            handlers.flat_map(|handler| ["httpGet", "tcpSocket"].map(|kind| handler.at(kind).text("host")));
        let own: Vec<&str> = own.filter(|host| !host.is_empty()).collect();
        hosts.extend(&own);
        !own.is_empty()
    });
    if names.is_empty() {
        return None;
    }
    let names = Vec::from_iter(BTreeSet::from_iter(names));
    let use_ = plural(names.len(), "uses", "use");
    let word = plural(hosts.len(), "probe or lifecycle host", "probe or lifecycle hosts");
    violation("probe or lifecycle host", format!("{} {use_} {word} {}", containers(&names), list(hosts)))
}

pub fn privileged(pod: &Pod<'_>) -> Option<Violation> {
    let names = pod.contexts_where(|context| context.flag("privileged"));
    if names.is_empty() {
        return None;
    }
    violation("privileged", format!("{} must not set securityContext.privileged=true", containers(&names)))
}

pub fn proc_mount(pod: &Pod<'_>) -> Option<Violation> {
    let mut kinds = BTreeSet::new();
    let names = pod.contexts_where(|context| {
        let kind = context.at("procMount").as_str().filter(|kind| *kind != "Default");
        kinds.extend(kind);
        kind.is_some()
    });
    if names.is_empty() {
        return None;
    }
    let detail = format!("{} must not set securityContext.procMount to {}", containers(&names), list(kinds));
    violation("procMount", detail)
}

pub const SE_LINUX_TYPES: &[&str] = &["", "container_t", "container_init_t", "container_kvm_t"];

pub fn se_linux(pod: &Pod<'_>, allowed: &[&str]) -> Option<Violation> {
    let mut types = BTreeSet::new();
    let (mut user, mut role) = (false, false);
    let mut bad = |context: &Value| {
        let options = context.at("seLinuxOptions");
        let kind = options.text("type");
        if !allowed.contains(&kind) {
            types.insert(kind.to_owned());
        }
        let (own_user, own_role) = (!options.text("user").is_empty(), !options.text("role").is_empty());
        user |= own_user;
        role |= own_role;
        !allowed.contains(&kind) || own_user || own_role
    };
    let on_pod = bad(pod.context());
    let names = pod.contexts_where(bad);
    let by = format_subjects(on_pod, &names)?;
    let mut what = Vec::new();
    if !types.is_empty() {
        what.push(format!("{} {}", plural(types.len(), "type", "types"), list(types)));
    }
    what.extend(user.then(|| "user may not be set".to_owned()));
    what.extend(role.then(|| "role may not be set".to_owned()));
    let what = what.join("; ");
    violation("seLinuxOptions", format!("{by} set forbidden securityContext.seLinuxOptions: {what}"))
}

/// Versions before 1.19 configure seccomp by annotations.
pub fn seccomp_annotations(pod: &Pod<'_>) -> Option<Violation> {
    let keys = std::iter::once("seccomp.security.alpha.kubernetes.io/pod".to_owned()).chain(
        pod.containers()
            .map(|one| format!("container.seccomp.security.alpha.kubernetes.io/{}", one.text("name"))),
    );
    let annotations = pod.metadata.at("annotations");
    let forbidden = keys.filter_map(|key| {
        let value = annotations.at(&key).as_str()?;
        let good = matches!(value, "runtime/default" | "docker/default") || value.starts_with("localhost/");
        (!good).then(|| format!("{key}={}", quote(value)))
    });
    let forbidden = Vec::from_iter(BTreeSet::from_iter(forbidden));
    if forbidden.is_empty() {
        return None;
    }
    let word = plural(forbidden.len(), "annotation", "annotations");
    violation("seccompProfile", format!("forbidden {word} {}", forbidden.join(", ")))
}

pub fn is_allowed_seccomp(context: &Value) -> Option<bool> {
    let profile = context.at("seccompProfile");
    (!profile.is_null()).then(|| matches!(profile.text("type"), "RuntimeDefault" | "Localhost"))
}

pub fn seccomp(pod: &Pod<'_>) -> Option<Violation> {
    let mut values = BTreeSet::new();
    let mut bad = |context: &Value| {
        let bad = is_allowed_seccomp(context) == Some(false);
        if bad {
            values.insert(context.at("seccompProfile").text("type").to_owned());
        }
        bad
    };
    let on_pod = bad(pod.context());
    let names = pod.contexts_where(bad);
    let by = format_subjects(on_pod, &names)?;
    let values = list(values);
    violation("seccompProfile", format!("{by} must not set securityContext.seccompProfile.type to {values}"))
}

/// Sysctls with the minor version since which they are allowed.
const SAFE_SYSCTLS: &[(&str, u32)] = &[
    ("kernel.shm_rmid_forced", 0),
    ("net.ipv4.ip_local_port_range", 0),
    ("net.ipv4.ip_local_reserved_ports", 27),
    ("net.ipv4.ip_unprivileged_port_start", 0),
    ("net.ipv4.ping_group_range", 0),
    ("net.ipv4.tcp_fin_timeout", 29),
    ("net.ipv4.tcp_keepalive_intvl", 29),
    ("net.ipv4.tcp_keepalive_probes", 29),
    ("net.ipv4.tcp_keepalive_time", 29),
    ("net.ipv4.tcp_rmem", 32),
    ("net.ipv4.tcp_syncookies", 0),
    ("net.ipv4.tcp_wmem", 32),
];

pub fn sysctls(pod: &Pod<'_>, version: u32) -> Option<Violation> {
    let safe = |name: &str| SAFE_SYSCTLS.iter().any(|(safe, since)| *safe == name && *since <= version);
    let set = pod.context().items("sysctls").iter().map(|sysctl| sysctl.text("name"));
    let forbidden: Vec<&str> = set.filter(|name| !safe(name)).collect();
    if forbidden.is_empty() { None } else { violation("forbidden sysctls", forbidden.join(", ")) }
}

pub fn host_process(pod: &Pod<'_>) -> Option<Violation> {
    let bad = |context: &Value| context.at("windowsOptions").flag("hostProcess");
    let by = format_subjects(bad(pod.context()), &pod.contexts_where(bad))?;
    violation("hostProcess", format!("{by} must not set securityContext.windowsOptions.hostProcess=true"))
}

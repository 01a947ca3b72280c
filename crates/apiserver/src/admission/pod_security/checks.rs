//! The Pod Security Standards: one row per check, with the versions since which each form of it applies.

use std::collections::BTreeSet;

use api::field::quoted;
use api::json::Json as _;
use serde_json::Value;

use super::policy::{Level, Strictness, Version};

/// A pod, or the template of one.
#[derive(Clone, Copy)]
pub struct Pod<'a> {
    pub metadata: &'a Value,
    pub spec: &'a Value,
}

/// What a pod does that it should not.
#[derive(Debug, PartialEq, Eq)]
pub struct Violation {
    pub reason: &'static str,
    pub detail: String,
}

struct Check {
    name: &'static str,
    level: Level,
    /// The minor version since which each form applies.
    since: &'static [(u32, Form)],
    /// The check of the level below that this one makes superfluous.
    instead_of: &'static str,
}

type Form = fn(&Pod<'_>) -> Option<Violation>;

const fn baseline(name: &'static str, since: &'static [(u32, Form)]) -> Check {
    Check { name, level: Level::Baseline, since, instead_of: "" }
}

const fn restricted(name: &'static str, since: &'static [(u32, Form)], instead_of: &'static str) -> Check {
    Check { name, level: Level::Restricted, since, instead_of }
}

/// By level and name, which is the order of the complaints.
const CHECKS: &[Check] = &[
    baseline("appArmorProfile", &[(0, app_armor)]),
    baseline("capabilities_baseline", &[(0, default_capabilities)]),
    baseline("hostNamespaces", &[(0, host_namespaces)]),
    baseline("hostPathVolumes", &[(0, host_paths)]),
    baseline("hostPorts", &[(0, host_ports)]),
    baseline("hostProbesAndHostLifecycle", &[(34, probed_hosts)]),
    baseline("privileged", &[(0, privileged)]),
    baseline("procMount", &[(0, proc_mount), (35, |pod| pod.unless_own_users(proc_mount))]),
    baseline(
        "seLinuxOptions",
        &[
            (0, |pod| se_linux(pod, SE_LINUX_TYPES)),
            (31, |pod| se_linux(pod, &[SE_LINUX_TYPES, &["container_engine_t"]].concat())),
        ],
    ),
    baseline("seccompProfile_baseline", &[(0, seccomp_annotations), (19, seccomp)]),
    baseline(
        "sysctls",
        &[
            (0, |pod| sysctls(pod, 0)),
            (27, |pod| sysctls(pod, 27)),
            (29, |pod| sysctls(pod, 29)),
            (32, |pod| sysctls(pod, 32)),
        ],
    ),
    baseline("windowsHostProcess", &[(0, host_process)]),
    restricted(
        "allowPrivilegeEscalation",
        &[(8, escalation), (25, |pod| pod.unless_windows(escalation))],
        "",
    ),
    restricted(
        "capabilities_restricted",
        &[(22, no_capabilities), (25, |pod| pod.unless_windows(no_capabilities))],
        "capabilities_baseline",
    ),
    restricted("procMount_restricted", &[(35, proc_mount)], "procMount"),
    restricted("restrictedVolumes", &[(0, volume_types)], "hostPathVolumes"),
    restricted("runAsNonRoot", &[(0, non_root), (35, |pod| pod.unless_own_users(non_root))], ""),
    restricted("runAsUser", &[(23, user_zero), (35, |pod| pod.unless_own_users(user_zero))], ""),
    restricted(
        "seccompProfile_restricted",
        &[(19, seccomp_required), (25, |pod| pod.unless_windows(seccomp_required))],
        "seccompProfile_baseline",
    ),
];

/// All that a pod does against a level.
pub fn violations(strictness: Strictness, pod: &Pod<'_>) -> Vec<Violation> {
    let minor = match strictness.version {
        Version::Latest => u32::MAX,
        Version::Minor(minor) => minor,
    };
    let form =
        |check: &Check| check.since.iter().rev().find(|(since, _)| *since <= minor).map(|(_, form)| *form);
    let applies = |check: &&Check| check.level <= strictness.level && form(check).is_some();
    let replaced: Vec<&str> = CHECKS.iter().filter(applies).map(|check| check.instead_of).collect();
    let checks = CHECKS.iter().filter(applies).filter(|check| !replaced.contains(&check.name));
    checks.filter_map(|check| form(check)?(pod)).collect()
}

const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

impl<'a> Pod<'a> {
    fn containers(&self) -> impl Iterator<Item = &'a Value> {
        let spec = self.spec;
        CONTAINERS.iter().flat_map(|list| spec.items(list))
    }

    /// The names of the containers for which something is true.
    fn containers_where(&self, is: impl FnMut(&&'a Value) -> bool) -> Vec<&'a str> {
        self.containers().filter(is).map(|container| container.text("name")).collect()
    }

    /// The same by their security context.
    fn contexts_where(&self, mut is: impl FnMut(&'a Value) -> bool) -> Vec<&'a str> {
        self.containers_where(|container| is(container.at("securityContext")))
    }

    fn context(&self) -> &'a Value {
        self.spec.at("securityContext")
    }

    /// On Windows some settings do not exist.
    fn unless_windows(&self, form: Form) -> Option<Violation> {
        if self.spec.at("os").text("name") == "windows" { None } else { form(self) }
    }

    /// In a user namespace, root is nobody outside.
    fn unless_own_users(&self, form: Form) -> Option<Violation> {
        if self.spec.at("hostUsers").as_bool() == Some(false) { None } else { form(self) }
    }
}

fn violation(reason: &'static str, detail: String) -> Option<Violation> {
    Some(Violation { reason, detail })
}

fn list<T: AsRef<str>>(items: impl IntoIterator<Item = T>) -> String {
    let quoted: Vec<String> = items.into_iter().map(|item| format!("\"{}\"", item.as_ref())).collect();
    quoted.join(", ")
}

fn plural(count: usize, one: &'static str, many: &'static str) -> &'static str {
    if count == 1 { one } else { many }
}

/// `container "a"` or `containers "a", "b"`.
fn containers(names: &[&str]) -> String {
    format!("{} {}", plural(names.len(), "container", "containers"), list(names))
}

/// `pod and container "a"`; `None` where nobody is to blame.
fn setters(pod: bool, names: &[&str]) -> Option<String> {
    let mut setters = Vec::new();
    if pod {
        setters.push("pod".to_owned());
    }
    if !names.is_empty() {
        setters.push(containers(names));
    }
    (!setters.is_empty()).then(|| setters.join(" and "))
}

fn app_armor(pod: &Pod<'_>) -> Option<Violation> {
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
    let mut by = Vec::from_iter(setters(on_pod, &named));
    let annotations = pod.metadata.entries("annotations").filter_map(|(key, value)| {
        let value = value.as_str().unwrap_or("");
        let good = value.is_empty() || value == "runtime/default" || value.starts_with("localhost/");
        (key.starts_with(ANNOTATION) && !good).then(|| format!("{key}={}", quoted(value)))
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

/// The capabilities that a container adds and may not, and who they are.
fn added<'a>(pod: &Pod<'a>, allowed: &[&str]) -> Option<String> {
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

fn default_capabilities(pod: &Pod<'_>) -> Option<Violation> {
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
    violation("non-default capabilities", added(pod, DEFAULT)?)
}

fn no_capabilities(pod: &Pod<'_>) -> Option<Violation> {
    let keeping = pod
        .contexts_where(|context| !context.at("capabilities").items("drop").iter().any(|name| name == "ALL"));
    let kept = (!keeping.is_empty())
        .then(|| format!("{} must set securityContext.capabilities.drop=[\"ALL\"]", containers(&keeping)));
    let details: Vec<String> = kept.into_iter().chain(added(pod, &["NET_BIND_SERVICE"])).collect();
    if details.is_empty() { None } else { violation("unrestricted capabilities", details.join("; ")) }
}

fn host_namespaces(pod: &Pod<'_>) -> Option<Violation> {
    let shared = ["hostNetwork", "hostPID", "hostIPC"].into_iter().filter(|field| pod.spec.flag(field));
    let shared: Vec<String> = shared.map(|field| format!("{field}=true")).collect();
    if shared.is_empty() { None } else { violation("host namespaces", shared.join(", ")) }
}

fn host_paths(pod: &Pod<'_>) -> Option<Violation> {
    let volumes = pod.spec.items("volumes").iter().filter(|volume| volume.has("hostPath"));
    let names: Vec<&str> = volumes.map(|volume| volume.text("name")).collect();
    if names.is_empty() {
        return None;
    }
    violation("hostPath volumes", format!("{} {}", plural(names.len(), "volume", "volumes"), list(names)))
}

fn host_ports(pod: &Pod<'_>) -> Option<Violation> {
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

fn probed_hosts(pod: &Pod<'_>) -> Option<Violation> {
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

fn privileged(pod: &Pod<'_>) -> Option<Violation> {
    let names = pod.contexts_where(|context| context.flag("privileged"));
    if names.is_empty() {
        return None;
    }
    violation("privileged", format!("{} must not set securityContext.privileged=true", containers(&names)))
}

fn proc_mount(pod: &Pod<'_>) -> Option<Violation> {
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

const SE_LINUX_TYPES: &[&str] = &["", "container_t", "container_init_t", "container_kvm_t"];

fn se_linux(pod: &Pod<'_>, allowed: &[&str]) -> Option<Violation> {
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
    let by = setters(on_pod, &names)?;
    let mut what = Vec::new();
    if !types.is_empty() {
        what.push(format!("{} {}", plural(types.len(), "type", "types"), list(types)));
    }
    what.extend(user.then(|| "user may not be set".to_owned()));
    what.extend(role.then(|| "role may not be set".to_owned()));
    let what = what.join("; ");
    violation("seLinuxOptions", format!("{by} set forbidden securityContext.seLinuxOptions: {what}"))
}

/// Before seccomp was a field, it was annotations.
fn seccomp_annotations(pod: &Pod<'_>) -> Option<Violation> {
    let keys = std::iter::once("seccomp.security.alpha.kubernetes.io/pod".to_owned()).chain(
        pod.containers()
            .map(|one| format!("container.seccomp.security.alpha.kubernetes.io/{}", one.text("name"))),
    );
    let annotations = pod.metadata.at("annotations");
    let forbidden = keys.filter_map(|key| {
        let value = annotations.at(&key).as_str()?;
        let good = matches!(value, "runtime/default" | "docker/default") || value.starts_with("localhost/");
        (!good).then(|| format!("{key}={}", quoted(value)))
    });
    let forbidden = Vec::from_iter(BTreeSet::from_iter(forbidden));
    if forbidden.is_empty() {
        return None;
    }
    let word = plural(forbidden.len(), "annotation", "annotations");
    violation("seccompProfile", format!("forbidden {word} {}", forbidden.join(", ")))
}

fn good_seccomp(context: &Value) -> Option<bool> {
    let profile = context.at("seccompProfile");
    (!profile.is_null()).then(|| matches!(profile.text("type"), "RuntimeDefault" | "Localhost"))
}

fn seccomp(pod: &Pod<'_>) -> Option<Violation> {
    let mut values = BTreeSet::new();
    let mut bad = |context: &Value| {
        let bad = good_seccomp(context) == Some(false);
        if bad {
            values.insert(context.at("seccompProfile").text("type").to_owned());
        }
        bad
    };
    let on_pod = bad(pod.context());
    let names = pod.contexts_where(bad);
    let by = setters(on_pod, &names)?;
    let values = list(values);
    violation("seccompProfile", format!("{by} must not set securityContext.seccompProfile.type to {values}"))
}

fn seccomp_required(pod: &Pod<'_>) -> Option<Violation> {
    if let Some(violation) = seccomp(pod) {
        return Some(violation);
    }
    if good_seccomp(pod.context()) == Some(true) {
        return None;
    }
    let names = pod.contexts_where(|context| good_seccomp(context).is_none());
    if names.is_empty() {
        return None;
    }
    violation(
        "seccompProfile",
        format!(
            "pod or {} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\"",
            containers(&names)
        ),
    )
}

/// Each with the version since which it is harmless.
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

fn sysctls(pod: &Pod<'_>, version: u32) -> Option<Violation> {
    let safe = |name: &str| SAFE_SYSCTLS.iter().any(|(safe, since)| *safe == name && *since <= version);
    let set = pod.context().items("sysctls").iter().map(|sysctl| sysctl.text("name"));
    let forbidden: Vec<&str> = set.filter(|name| !safe(name)).collect();
    if forbidden.is_empty() { None } else { violation("forbidden sysctls", forbidden.join(", ")) }
}

fn host_process(pod: &Pod<'_>) -> Option<Violation> {
    let bad = |context: &Value| context.at("windowsOptions").flag("hostProcess");
    let by = setters(bad(pod.context()), &pod.contexts_where(bad))?;
    violation("hostProcess", format!("{by} must not set securityContext.windowsOptions.hostProcess=true"))
}

fn escalation(pod: &Pod<'_>) -> Option<Violation> {
    let names = pod.contexts_where(|context| context.at("allowPrivilegeEscalation").as_bool() != Some(false));
    if names.is_empty() {
        return None;
    }
    violation(
        "allowPrivilegeEscalation != false",
        format!("{} must set securityContext.allowPrivilegeEscalation=false", containers(&names)),
    )
}

fn volume_types(pod: &Pod<'_>) -> Option<Violation> {
    const ALLOWED: [&str; 9] = [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    const KNOWN: [&str; 21] = [
        "hostPath",
        "gcePersistentDisk",
        "awsElasticBlockStore",
        "gitRepo",
        "nfs",
        "iscsi",
        "glusterfs",
        "rbd",
        "flexVolume",
        "cinder",
        "cephfs",
        "flocker",
        "fc",
        "azureFile",
        "vsphereVolume",
        "quobyte",
        "azureDisk",
        "photonPersistentDisk",
        "portworxVolume",
        "scaleIO",
        "storageos",
    ];
    let volumes = pod.spec.items("volumes").iter();
    let bad: Vec<&Value> = volumes.filter(|volume| !ALLOWED.iter().any(|kind| volume.has(kind))).collect();
    if bad.is_empty() {
        return None;
    }
    let kind = |volume: &&Value| KNOWN.into_iter().find(|kind| volume.has(kind)).unwrap_or("unknown");
    let kinds: BTreeSet<&str> = bad.iter().map(kind).collect();
    violation(
        "restricted volume types",
        format!(
            "{} {} {} {} {}",
            plural(bad.len(), "volume", "volumes"),
            list(bad.iter().map(|volume| volume.text("name"))),
            plural(bad.len(), "uses", "use"),
            plural(kinds.len(), "restricted volume type", "restricted volume types"),
            list(kinds)
        ),
    )
}

fn non_root(pod: &Pod<'_>) -> Option<Violation> {
    const REASON: &str = "runAsNonRoot != true";
    let said = |context: &Value| context.at("runAsNonRoot").as_bool();
    let names = pod.contexts_where(|context| said(context) == Some(false));
    if let Some(by) = setters(said(pod.context()) == Some(false), &names) {
        return violation(REASON, format!("{by} must not set securityContext.runAsNonRoot=false"));
    }
    if said(pod.context()) == Some(true) {
        return None;
    }
    let names = pod.contexts_where(|context| said(context).is_none());
    if names.is_empty() {
        return None;
    }
    violation(REASON, format!("pod or {} must set securityContext.runAsNonRoot=true", containers(&names)))
}

fn user_zero(pod: &Pod<'_>) -> Option<Violation> {
    let bad = |context: &Value| context.int("runAsUser") == Some(0);
    let by = setters(bad(pod.context()), &pod.contexts_where(bad))?;
    violation("runAsUser=0", format!("{by} must not set runAsUser=0"))
}

#[cfg(test)]
mod tests;

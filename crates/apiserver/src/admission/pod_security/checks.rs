//! The checks of the Pod Security Standards: one row per check, with each version of it.

mod baseline;
mod restricted;
#[cfg(test)]
mod tests;

use api::json::JsonExt as _;
use serde_json::Value;

use super::policy::{Level, LevelVersion, Version};
use baseline::*;
use restricted::*;

/// A pod or a pod template.
#[derive(Clone, Copy)]
pub struct Pod<'a> {
    pub metadata: &'a Value,
    pub spec: &'a Value,
}

/// A violated check.
#[derive(Debug, PartialEq, Eq)]
pub struct Violation {
    pub reason: &'static str,
    pub detail: String,
}

struct Check {
    name: &'static str,
    level: Level,
    /// Minor versions of Kubernetes and the version of the check that applies since then.
    since: &'static [(u32, CheckPodFn)],
    /// The check of the baseline level that this check replaces.
    override_check: &'static str,
}

type CheckPodFn = fn(&Pod<'_>) -> Option<Violation>;

const fn baseline(name: &'static str, since: &'static [(u32, CheckPodFn)]) -> Check {
    Check { name, level: Level::Baseline, since, override_check: "" }
}

const fn restricted(
    name: &'static str,
    since: &'static [(u32, CheckPodFn)],
    instead_of: &'static str,
) -> Check {
    Check { name, level: Level::Restricted, since, override_check: instead_of }
}

/// Sorted by level and name: the order of the violations in messages.
const CHECKS: &[Check] = &[
    baseline("appArmorProfile", &[(0, app_armor)]),
    baseline("capabilities_baseline", &[(0, default_capabilities)]),
    baseline("hostNamespaces", &[(0, host_namespaces)]),
    baseline("hostPathVolumes", &[(0, host_paths)]),
    baseline("hostPorts", &[(0, host_ports)]),
    baseline("hostProbesAndHostLifecycle", &[(34, probe_hosts)]),
    baseline("privileged", &[(0, privileged)]),
    baseline("procMount", &[(0, proc_mount), (35, |pod| pod.skip_in_user_namespace(proc_mount))]),
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
        &[(8, escalation), (25, |pod| pod.skip_on_windows(escalation))],
        "",
    ),
    restricted(
        "capabilities_restricted",
        &[(22, no_capabilities), (25, |pod| pod.skip_on_windows(no_capabilities))],
        "capabilities_baseline",
    ),
    restricted("procMount_restricted", &[(35, proc_mount)], "procMount"),
    restricted("restrictedVolumes", &[(0, volume_types)], "hostPathVolumes"),
    restricted("runAsNonRoot", &[(0, non_root), (35, |pod| pod.skip_in_user_namespace(non_root))], ""),
    restricted("runAsUser", &[(23, user_zero), (35, |pod| pod.skip_in_user_namespace(user_zero))], ""),
    restricted(
        "seccompProfile_restricted",
        &[(19, seccomp_required), (25, |pod| pod.skip_on_windows(seccomp_required))],
        "seccompProfile_baseline",
    ),
];

/// All violations of a level and version.
pub fn run_checks(level_version: LevelVersion, pod: &Pod<'_>) -> Vec<Violation> {
    let minor = match level_version.version {
        Version::Latest => u32::MAX,
        Version::Minor(minor) => minor,
    };
    let check_fn = |check: &Check| {
        check.since.iter().rev().find(|(since, _)| *since <= minor).map(|(_, check_fn)| *check_fn)
    };
    let applies = |check: &&Check| check.level <= level_version.level && check_fn(check).is_some();
    let replaced: Vec<&str> = CHECKS.iter().filter(applies).map(|check| check.override_check).collect();
    let checks = CHECKS.iter().filter(applies).filter(|check| !replaced.contains(&check.name));
    checks.filter_map(|check| check_fn(check)?(pod)).collect()
}

const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

impl<'a> Pod<'a> {
    fn containers(&self) -> impl Iterator<Item = &'a Value> {
        let spec = self.spec;
        CONTAINERS.iter().flat_map(|list| spec.items(list))
    }

    /// The names of the containers that match.
    fn containers_where(&self, is: impl FnMut(&&'a Value) -> bool) -> Vec<&'a str> {
        self.containers().filter(is).map(|container| container.text("name")).collect()
    }

    /// The same, by the security context of the container.
    fn contexts_where(&self, mut is: impl FnMut(&'a Value) -> bool) -> Vec<&'a str> {
        self.containers_where(|container| is(container.at("securityContext")))
    }

    fn context(&self) -> &'a Value {
        self.spec.at("securityContext")
    }

    /// Fields that do not exist on Windows are not checked there.
    fn skip_on_windows(&self, check_fn: CheckPodFn) -> Option<Violation> {
        if self.spec.at("os").text("name") == "windows" { None } else { check_fn(self) }
    }

    /// Root in a user namespace has no privileges on the host.
    fn skip_in_user_namespace(&self, check_fn: CheckPodFn) -> Option<Violation> {
        if self.spec.at("hostUsers").as_bool() == Some(false) { None } else { check_fn(self) }
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

/// `pod and container "a"`; `None` if neither is affected.
fn format_subjects(pod: bool, names: &[&str]) -> Option<String> {
    let mut subjects = Vec::new();
    if pod {
        subjects.push("pod".to_owned());
    }
    if !names.is_empty() {
        subjects.push(containers(names));
    }
    (!subjects.is_empty()).then(|| subjects.join(" and "))
}

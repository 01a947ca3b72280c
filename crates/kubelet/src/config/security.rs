//! Translates security contexts to CRI.

use std::collections::BTreeMap;

use super::Settings;
use k8s_openapi::api::core::v1::{Container, Pod, PodSecurityContext, SeccompProfile, SecurityContext};
use runtime::cri::{
    Capability, Int64Value, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, ProfileType, SecurityProfile, SelinuxOption, SupplementalGroupsPolicy,
};

/// Kernel files that containers must not read. The defaults of upstream's runtimes.
const MASKED_PATHS: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// Kernel files that containers must not write.
const READONLY_PATHS: &[&str] = &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

pub fn sandbox(pod: &Pod) -> LinuxSandboxSecurityContext {
    let context = pod_context(pod);
    let privileged =
        pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let privileged =
        privileged.into_iter().any(|container| container_context(container).privileged == Some(true));
    LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(pod)),
        run_as_user: context.run_as_user.map(|value| Int64Value { value }),
        run_as_group: context.run_as_user.and(context.run_as_group).map(|value| Int64Value { value }),
        supplemental_groups: groups(&context),
        supplemental_groups_policy: groups_policy(&context),
        privileged,
        seccomp: Some(SecurityProfile {
            profile_type: ProfileType::RuntimeDefault.into(),
            ..SecurityProfile::default()
        }),
        ..LinuxSandboxSecurityContext::default()
    }
}

pub fn sysctls(pod: &Pod) -> BTreeMap<String, String> {
    let context = pod_context(pod);
    context
        .sysctls
        .into_iter()
        .flatten()
        .map(|sysctl| (crate::sysctls::normalize_name(&sysctl.name), sysctl.value))
        .collect()
}

pub fn container(pod: &Pod, container: &Container, settings: &Settings) -> LinuxContainerSecurityContext {
    let (context, own) = (pod_context(pod), container_context(container));
    let privileged = own.privileged == Some(true);
    let user = own.run_as_user.or(context.run_as_user);
    let group = own.run_as_group.or(context.run_as_group);
    let has_raw_proc = privileged || own.proc_mount.as_deref() == Some("Unmasked");
    let paths =
        |list: &[&str]| list.iter().filter(|_| !has_raw_proc).map(|path| (*path).to_owned()).collect();
    let capabilities = own.capabilities.clone().unwrap_or_default();
    let selinux = own.se_linux_options.clone().or(context.se_linux_options.clone());
    LinuxContainerSecurityContext {
        capabilities: Some(Capability {
            add_capabilities: capabilities.add.unwrap_or_default(),
            drop_capabilities: capabilities.drop.unwrap_or_default(),
            ..Capability::default()
        }),
        privileged,
        namespace_options: Some(namespaces(pod)),
        selinux_options: selinux.map(|options| SelinuxOption {
            user: options.user.unwrap_or_default(),
            role: options.role.unwrap_or_default(),
            type_: options.type_.unwrap_or_default(),
            level: options.level.unwrap_or_default(),
        }),
        run_as_user: user.map(|value| Int64Value { value }),
        run_as_group: group.map(|value| Int64Value { value }),
        readonly_rootfs: own.read_only_root_filesystem == Some(true),
        supplemental_groups: groups(&context),
        supplemental_groups_policy: groups_policy(&context),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        masked_paths: paths(MASKED_PATHS),
        readonly_paths: paths(READONLY_PATHS),
        apparmor: crate::apparmor::security_profile(pod, container),
        seccomp: Some(seccomp(
            own.seccomp_profile.as_ref().or(context.seccomp_profile.as_ref()),
            privileged,
            settings,
        )),
        ..LinuxContainerSecurityContext::default()
    }
}

fn pod_context(pod: &Pod) -> PodSecurityContext {
    pod.spec.as_ref().and_then(|spec| spec.security_context.clone()).unwrap_or_default()
}

fn container_context(container: &Container) -> SecurityContext {
    container.security_context.clone().unwrap_or_default()
}

fn groups(context: &PodSecurityContext) -> Vec<i64> {
    context.fs_group.into_iter().chain(context.supplemental_groups.iter().flatten().copied()).collect()
}

/// Whether the supplemental groups of the image's user apply as well.
fn groups_policy(context: &PodSecurityContext) -> i32 {
    match context.supplemental_groups_policy.as_deref() {
        Some("Strict") => SupplementalGroupsPolicy::Strict.into(),
        _ => SupplementalGroupsPolicy::Merge.into(),
    }
}

fn namespaces(pod: &Pod) -> NamespaceOption {
    let spec = pod.spec.clone().unwrap_or_default();
    let mode = |host: Option<bool>, otherwise: NamespaceMode| match host {
        Some(true) => NamespaceMode::Node.into(),
        _ => otherwise.into(),
    };
    let pid = match spec.share_process_namespace {
        Some(true) => NamespaceMode::Pod,
        _ => NamespaceMode::Container,
    };
    NamespaceOption {
        network: mode(spec.host_network, NamespaceMode::Pod),
        pid: mode(spec.host_pid, pid),
        ipc: mode(spec.host_ipc, NamespaceMode::Pod),
        ..NamespaceOption::default()
    }
}

fn seccomp(profile: Option<&SeccompProfile>, privileged: bool, settings: &Settings) -> SecurityProfile {
    let default_profile =
        if settings.kubelet_config.seccomp_default { "RuntimeDefault" } else { "Unconfined" };
    let profile_type = match profile.map_or(default_profile, |profile| profile.type_.as_str()) {
        "RuntimeDefault" if !privileged => ProfileType::RuntimeDefault,
        "Localhost" => ProfileType::Localhost,
        _ => ProfileType::Unconfined,
    };
    let name = profile.and_then(|profile| profile.localhost_profile.as_deref());
    let path =
        name.filter(|_| profile_type == ProfileType::Localhost).map(|name| settings.seccomp_profile(name));
    let localhost_ref = path.map(|path| path.display().to_string()).unwrap_or_default();
    SecurityProfile { profile_type: profile_type.into(), localhost_ref }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seccomp_default_and_localhost_profile_paths() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut settings = super::super::tests::settings(dir.path());
        let [root, before] = [&settings.root, dir.path()].map(|dir| dir.join("seccomp"));
        for (dir, name) in [(&root, "both.json"), (&before, "both.json"), (&before, "old.json")] {
            std::fs::create_dir_all(dir).expect("a directory");
            std::fs::write(dir.join(name), "{}").expect("written");
        }
        let mut check =
            |profile_type: &str, seccomp_default: bool, privileged: bool, expected: ProfileType| {
                settings.kubelet_config.seccomp_default = seccomp_default;
                let profile = SeccompProfile { type_: profile_type.to_owned(), ..SeccompProfile::default() };
                let profile = Some(&profile).filter(|_| !profile_type.is_empty());
                let found = seccomp(profile, privileged, &settings);
                assert_eq!(found.profile_type(), expected, "{profile_type} {seccomp_default} {privileged}");
            };
        check("", false, false, ProfileType::Unconfined);
        check("", true, false, ProfileType::RuntimeDefault);
        check("", true, true, ProfileType::Unconfined);
        check("Unconfined", true, false, ProfileType::Unconfined);
        check("RuntimeDefault", false, false, ProfileType::RuntimeDefault);
        let check = |name: &str, expected: std::path::PathBuf| {
            let (type_, localhost_profile) = ("Localhost".to_owned(), Some(name.to_owned()));
            let found = seccomp(Some(&SeccompProfile { type_, localhost_profile }), false, &settings);
            assert_eq!(found.localhost_ref, expected.display().to_string());
        };
        check("both.json", root.join("both.json"));
        check("old.json", before.join("old.json"));
        check("a/none.json", root.join("a/none.json"));
    }
}

//! Node allocatable: limits all pods together to the capacity of the node minus the reservations.
//! The cgroups of system and kube components can be limited to their reservations, too, if they are
//! configured.
//!
//! Hard eviction thresholds are not subtracted from the limit. Otherwise pods would be OOM-killed
//! before the eviction manager sees the threshold crossed.
//!
//! Upstream: `pkg/kubelet/cm/node_container_manager_linux.go`.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use reconcile::{EventType, Key};
use sys::cgroup::{Cgroups, Limits};

use super::{ROOT_CGROUP, cpu_weight_limits, host_cgroups, node_cgroup};
use crate::{Node, stats};

/// A limit below the current usage fails. It is retried after this long, since pods may have ended
/// meanwhile.
const ENFORCE_RETRY: Duration = Duration::from_secs(60);
const PODS: &str = "pods";
const NONE: &str = "none";
/// The components with a reservation: their option value, their name in events, and their field
/// prefix in the configuration.
const RESERVED_COMPONENTS: [(&str, &str, &str); 2] = [
    ("system-reserved", "System Reserved", "systemReserved"),
    ("kube-reserved", "Kube Reserved", "kubeReserved"),
];

/// CPU in millicores, memory in bytes, number of processes; by resource name.
pub type ResourceValues = BTreeMap<String, i64>;

/// The reserved resources and which of them are enforced.
#[derive(Clone, Debug, Default)]
pub struct NodeReservation {
    /// System reserved and kube reserved.
    pub values: [ResourceValues; 2],
    /// The cgroups of these components. Empty if not configured.
    pub groups: [String; 2],
    /// `enforceNodeAllocatable`. `None` means `pods` only.
    pub enforced: Option<Vec<String>>,
}

impl NodeReservation {
    /// The total reservation of a resource.
    pub fn of(&self, resource: &str) -> i64 {
        self.values
            .iter()
            .filter_map(|values| values.get(resource))
            .fold(0, |sum, more| sum.saturating_add(*more))
    }

    /// Fails if more is reserved than the machine has.
    pub fn validate_capacity(&self, capacity: &[(&str, i64)]) -> Result<(), String> {
        for (resource, has) in capacity {
            let reserved = self.of(resource);
            if reserved > *has {
                return Err(format!(
                    "invalid Node Allocatable configuration. Resource {resource:?} has a reservation of {reserved} \
                     but capacity of {has}. Expected capacity >= reservation."
                ));
            }
        }
        Ok(())
    }

    fn enforces(&self, target: &str) -> bool {
        self.enforced.as_ref().map_or(target == PODS, |all| all.iter().any(|one| one == target))
    }

    /// Whether the limits of a component are enforced: `Some(true)` for its CPU weight only,
    /// `Some(false)` for all resources.
    fn enforces_component(&self, at: usize) -> Option<bool> {
        let (option, ..) = RESERVED_COMPONENTS[at];
        let cpu_only = self.enforces(&format!("{option}-compressible"));
        (cpu_only || self.enforces(option)).then_some(cpu_only)
    }

    /// Validates the combination of options. The messages are upstream's.
    pub fn validate(&self) -> Result<(), String> {
        let flag = "enforceNodeAllocatable (--enforce-node-allocatable)";
        let named = self.enforced.as_deref().unwrap_or_default();
        let others = RESERVED_COMPONENTS
            .iter()
            .flat_map(|(option, ..)| [option.to_string(), format!("{option}-compressible")]);
        let valid: Vec<String> =
            [PODS.to_owned()].into_iter().chain(others).chain([NONE.to_owned()]).collect();
        for (at, one) in named.iter().enumerate() {
            if named[..at].contains(one) {
                return Err(format!("duplicated enforcements {one:?} in {flag}"));
            }
            if !valid.contains(one) {
                let valid: Vec<String> = valid.iter().map(|valid| format!("{valid:?}")).collect();
                return Err(format!(
                    "option {one:?} specified for {flag}. Valid options are {}",
                    valid.join(", ")
                ));
            }
            if one == NONE && named.len() > 1 {
                return Err(format!(
                    "{flag} may not contain additional enforcements when {one:?} is specified"
                ));
            }
        }
        for (at, (option, _, field)) in RESERVED_COMPONENTS.iter().enumerate() {
            let both = [option.to_string(), format!("{option}-compressible")];
            if both.iter().all(|one| self.enforces(one)) {
                return Err(format!(
                    "both {:?} and {:?} cannot be specified together in {flag}",
                    both[0], both[1]
                ));
            }
            if self.enforces_component(at).is_none() {
                continue;
            }
            let (group, cgroup) = (&self.groups[at], format!("{field}Cgroup (--{option}-cgroup)"));
            if group.is_empty() {
                let [one, other] = &both;
                return Err(format!(
                    "{cgroup} must be specified when {one:?} or {other:?} included in {flag}"
                ));
            }
            let exists = |groups: &Cgroups| groups.directories(group).iter().any(|place| place.is_dir());
            if !host_cgroups().is_ok_and(exists) {
                return Err(format!("{cgroup}: there is no cgroup {group:?}"));
            }
        }
        Ok(())
    }
}

/// Sets the limits and records the result as node events.
pub(super) async fn enforce(node: &Node) {
    let reserved = &node.presentation.reserved;
    let nodes = node.ctx.caches.nodes();
    let key = Key::new("", &node.settings.node_name);
    let record_event = async |result: Result<String, String>| {
        while nodes.wait_until("this node", || nodes.get(&key).is_some()).await.is_err() {}
        let Some(own) = nodes.get(&key) else { return };
        let (severity, reason, message) = match result {
            Ok(message) => (EventType::Normal, "NodeAllocatableEnforced", message),
            Err(message) => (EventType::Warning, "FailedNodeAllocatableEnforcement", message),
        };
        node.ctx.events.record(reconcile::reference(&*own), severity, reason, message);
    };
    for (at, (_, title, _)) in RESERVED_COMPONENTS.iter().enumerate() {
        let Some(cpu_only) = reserved.enforces_component(at) else { continue };
        let group = &reserved.groups[at];
        let done =
            host_cgroups().and_then(|cgroups| set_limits(cgroups, group, &reserved.values[at], cpu_only));
        let kind = if cpu_only { " Compressible" } else { "" };
        record_event(match done {
            Ok(()) => Ok(format!("Updated limits on {} cgroup {group}", title.to_lowercase())),
            Err(why) => Err(format!("Failed to enforce {title}{kind} Cgroup Limits on {group:?}: {why}")),
        })
        .await;
    }
    let values = allocatable(node);
    let group = node_cgroup(&node.settings.pods);
    loop {
        let done = host_cgroups().and_then(|cgroups| set_pods_limits(cgroups, &group, &values));
        let retry = done.is_err();
        record_event(match done {
            Ok(()) => Ok("Updated Node Allocatable limit across pods".to_owned()),
            Err(why) => {
                Err(format!("Failed to update Node Allocatable Limits {:?}: {why}", format!("/{group}")))
            }
        })
        .await;
        if !retry {
            return;
        }
        tokio::time::sleep(ENFORCE_RETRY).await;
    }
}

/// The limits for all pods. The whole capacity if `pods` is not enforced.
fn allocatable(node: &Node) -> ResourceValues {
    let reserved = &node.presentation.reserved;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let all = [
        ("cpu", i64::try_from(cpus).unwrap_or(1).saturating_mul(1000)),
        ("memory", node.settings.memory),
        ("pid", stats::max_processes().unwrap_or(0)),
    ];
    let reserved_value = |name: &str| if reserved.enforces(PODS) { reserved.of(name) } else { 0 };
    all.map(|(name, amount)| (name.to_owned(), amount.saturating_sub(reserved_value(name)).max(0))).into()
}

fn set_pods_limits(cgroups: &Cgroups, group: &str, values: &ResourceValues) -> io::Result<()> {
    cgroups.create(group)?;
    // The root cgroup competes with other cgroups of the machine by its CPU weight.
    let parent_result = set_limits(cgroups, ROOT_CGROUP, values, true);
    set_limits(cgroups, group, values, false).and(parent_result)
}

/// Sets the limits of a cgroup. An error on one limit does not prevent the others.
fn set_limits(cgroups: &Cgroups, group: &str, values: &ResourceValues, cpu_only: bool) -> io::Result<()> {
    let mut result = Ok(());
    for (name, amount) in values.iter().filter(|(name, _)| !cpu_only || *name == "cpu") {
        let limits = match name.as_str() {
            "cpu" => cpu_weight_limits(*amount),
            // Swap is limited per container.
            "memory" => Limits { memory: *amount, memory_and_swap: -1, ..Limits::default() },
            "pid" => Limits { pids: *amount, ..Limits::default() },
            _ => continue,
        };
        result = result.and(cgroups.limit(group, &limits));
    }
    result
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn values(of: &[(&str, i64)]) -> ResourceValues {
        of.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
    }

    /// The control files of a cgroup, which a kernel would create.
    fn files(place: &Path, names: &[&str]) {
        fs::create_dir_all(place).expect("made");
        names.iter().for_each(|name| fs::write(place.join(name), "").expect("written"));
    }

    fn read(place: &Path, names: &[&str]) -> Vec<String> {
        names.iter().map(|name| fs::read_to_string(place.join(name)).unwrap_or_default()).collect()
    }

    #[test]
    fn sets_limits_in_both_cgroup_versions() {
        let dir = tempfile::tempdir().expect("a directory");
        let values = values(&[("cpu", 1500), ("ephemeral-storage", 5), ("memory", 1 << 30), ("pid", 1000)]);
        let v2 = Cgroups::V2 { root: dir.path().join("v2") };
        let names = ["cpu.weight", "memory.max", "memory.swap.max", "memory.oom.group", "pids.max"];
        for group in ["v2/skiff", "v2/skiff/node-1"] {
            files(&dir.path().join(group), &names);
        }
        set_pods_limits(&v2, "skiff/node-1", &values).expect("set");
        // `memory.oom.group` must stay unset: one OOM kill must not end all pods.
        let found = read(&dir.path().join("v2/skiff/node-1"), &names);
        assert_eq!(found, ["59", "1073741824", "max", "", "1000"]);
        assert_eq!(read(&dir.path().join("v2/skiff"), &names), ["59", "", "", "", ""]);

        let hierarchies = ["cpu", "memory", "pids"].map(|name| (name.to_owned(), dir.path().join(name)));
        let v1 = Cgroups::V1 { hierarchies: hierarchies.to_vec() };
        let names = ["cpu.shares", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max"];
        for group in ["cpu/a", "memory/a", "pids/a"] {
            files(&dir.path().join(group), &names);
        }
        set_limits(&v1, "/a", &values, false).expect("set");
        assert_eq!(read(&dir.path().join("cpu/a"), &names), ["1536", "", "", ""]);
        assert_eq!(read(&dir.path().join("memory/a"), &names), ["", "1073741824", "-1", ""]);
        assert_eq!(read(&dir.path().join("pids/a"), &names), ["", "", "", "1000"]);
    }

    #[test]
    fn error_on_one_limit_does_not_prevent_others() {
        let dir = tempfile::tempdir().expect("a directory");
        let v2 = Cgroups::V2 { root: dir.path().to_owned() };
        files(&dir.path().join("a"), &["pids.max"]);
        let error =
            set_limits(&v2, "a", &values(&[("memory", 1 << 20), ("pid", 7)]), false).expect_err("no memory");
        assert!(error.to_string().contains("memory.max"), "{error}");
        assert_eq!(read(&dir.path().join("a"), &["pids.max"]), ["7"]);
    }

    #[test]
    fn validation_reports_invalid_options() {
        let check = |enforced: &[&str], groups: [&str; 2], expected: &str| {
            let reserved = NodeReservation {
                enforced: Some(enforced.iter().map(|one| (*one).to_owned()).collect()),
                groups: groups.map(str::to_owned),
                ..NodeReservation::default()
            };
            let found = reserved.validate().err().unwrap_or_default();
            assert!(found.starts_with(expected) && found.is_empty() == expected.is_empty(), "{found}");
        };
        check(&[], ["", ""], "");
        check(&["none"], ["", ""], "");
        check(&["pods"], ["/not/there", ""], "");
        check(
            &["pods", "none"],
            ["", ""],
            "enforceNodeAllocatable (--enforce-node-allocatable) may not contain",
        );
        check(&["pods", "pods"], ["", ""], "duplicated enforcements \"pods\"");
        check(&["all"], ["", ""], "option \"all\" specified for enforceNodeAllocatable");
        check(
            &["system-reserved"],
            ["", "/a"],
            "systemReservedCgroup (--system-reserved-cgroup) must be specified",
        );
        check(
            &["kube-reserved-compressible"],
            ["", "/not/there"],
            "kubeReservedCgroup (--kube-reserved-cgroup): there is no cgroup \"/not/there\"",
        );
        let both = ["kube-reserved", "kube-reserved-compressible"];
        check(&both, ["", "/a"], "both \"kube-reserved\" and \"kube-reserved-compressible\" cannot");
        assert!(
            NodeReservation::default().enforces(PODS)
                && NodeReservation::default().enforces_component(0).is_none()
        );
    }

    #[test]
    fn system_and_kube_reserved_are_added() {
        let both = [values(&[("memory", 1), ("cpu", 5)]), values(&[("memory", i64::MAX)])];
        let reserved = NodeReservation { values: both, ..NodeReservation::default() };
        assert_eq!(["memory", "cpu", "pid"].map(|name| reserved.of(name)), [i64::MAX, 5, 0]);
    }
}

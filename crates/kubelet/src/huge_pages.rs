//! Huge pages: the page sizes of this node, container limits, and emptyDir volumes backed by huge
//! pages.

use std::path::Path;

use k8s_openapi::api::core::v1::{Container, Pod};
use runtime::cri::HugepageLimit;
use schema::quantity::Quantity;

const RESOURCE_PREFIX: &str = "hugepages-";
const POOLS_DIR: &str = "/sys/kernel/mm/hugepages";
/// The medium without a page size. With a size it is `HugePages-<size>`.
const MEDIUM_WITHOUT_SIZE: &str = "HugePages";

/// The huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HugePagePool {
    /// The page size in bytes.
    size: u64,
    count: u64,
}

/// The huge page sizes of this node, smallest first.
pub fn pools() -> Vec<HugePagePool> {
    pools_in(Path::new(POOLS_DIR))
}

fn pools_in(dir: &Path) -> Vec<HugePagePool> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let pool = |entry: std::fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let size_kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let count = std::fs::read_to_string(entry.path().join("nr_hugepages")).ok()?;
        Some(HugePagePool { size: size_kib.checked_mul(1024)?, count: count.trim().parse().ok()? })
    };
    let mut pools: Vec<HugePagePool> = entries.filter_map(pool).collect();
    pools.sort_unstable();
    pools
}

impl HugePagePool {
    /// The node resource name and capacity.
    pub fn resource(self) -> (String, String) {
        let bytes = self.size.saturating_mul(self.count);
        let amount = if bytes == 0 { "0".to_owned() } else { format!("{}i", format_size(bytes)) };
        (format!("{RESOURCE_PREFIX}{}i", format_size(self.size)), amount)
    }

    /// The page size in the name of the cgroup file, such as `2MB`.
    pub fn cgroup_page_size(self) -> String {
        format!("{}B", format_size(self.size))
    }
}

/// Formats a size such as `2M`, with the largest unit that divides it.
fn format_size(size: u64) -> String {
    let unit = [(1 << 30, "G"), (1 << 20, "M")].into_iter().find(|(unit, _)| size.is_multiple_of(*unit));
    let (unit, letter) = unit.unwrap_or((1 << 10, "K"));
    format!("{}{letter}", size / unit)
}

/// The limit per page size: that of the container, else that of the pod, else zero.
pub fn limits(pod: &Pod, container: &Container) -> Vec<HugepageLimit> {
    limits_of(&pools(), pod, container)
}

fn limits_of(pools: &[HugePagePool], pod: &Pod, container: &Container) -> Vec<HugepageLimit> {
    let own = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.limits.as_ref());
    let limit = |pool: &HugePagePool| {
        let amount = [own, of_pod].into_iter().flatten().find_map(|limits| {
            let named = |name: &str| size_of(name, RESOURCE_PREFIX) == Some(pool.size);
            let (_, amount) = limits.iter().find(|(name, _)| named(name))?;
            Quantity::parse(&amount.0).ok()
        });
        let limit = amount.and_then(|amount| u64::try_from(amount.value()).ok()).unwrap_or(0);
        HugepageLimit { page_size: pool.cgroup_page_size(), limit }
    };
    pools.iter().map(limit).collect()
}

fn size_of(name: &str, prefix: &str) -> Option<u64> {
    let size = Quantity::parse(name.strip_prefix(prefix)?).ok()?;
    u64::try_from(size.value()).ok()
}

/// Whether an emptyDir medium is huge pages.
pub fn is_medium(medium: &str) -> bool {
    medium == MEDIUM_WITHOUT_SIZE || medium.starts_with("HugePages-")
}

/// The page size of an emptyDir volume, which the pod must request.
pub fn page_size(medium: &str, pod: &Pod) -> Result<u64, String> {
    let spec = pod.spec.as_ref();
    let of_pod = spec.and_then(|spec| spec.resources.as_ref()).and_then(|own| own.requests.as_ref());
    let containers = spec.into_iter().flat_map(|spec| {
        spec.containers.iter().chain(spec.init_containers.iter().flatten()).filter_map(|container| {
            container.resources.as_ref().and_then(|resources| resources.requests.as_ref())
        })
    });
    let names = of_pod.into_iter().chain(containers).flat_map(|requests| requests.keys());
    let mut sizes: Vec<u64> = names.filter_map(|name| size_of(name, RESOURCE_PREFIX)).collect();
    if medium != MEDIUM_WITHOUT_SIZE {
        let requested_size = size_of(medium, "HugePages-");
        sizes.retain(|size| Some(*size) == requested_size);
    }
    sizes.sort_unstable();
    sizes.dedup();
    match sizes[..] {
        [size] => Ok(size),
        [] => Err(format!(
            "medium {medium}: hugePages storage requested, but there is no resource request for huge pages"
        )),
        _ => Err(format!("medium: {medium} can't be used if container requests multiple huge page sizes")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(of_pod: Value, own: Value) -> Pod {
        let container = json!({"name": "main", "resources": {"limits": own, "requests": own}});
        let spec = json!({"containers": [container], "resources": {"limits": of_pod, "requests": of_pod}});
        serde_json::from_value(json!({"spec": spec})).expect("a pod")
    }

    #[track_caller]
    fn check(of_pod: Value, own: Value, expected: &str) {
        let pools = [
            HugePagePool { size: 64 << 10, count: 1 },
            HugePagePool { size: 2 << 20, count: 1 },
            HugePagePool { size: 1 << 30, count: 0 },
        ];
        let pod = pod(of_pod, own);
        let container = &pod.spec.as_ref().expect("made so").containers[0];
        let limits = limits_of(&pools, &pod, container);
        let formatted: Vec<String> =
            limits.iter().map(|one| format!("{} {}", one.page_size, one.limit)).collect();
        assert_eq!(formatted.join(", "), expected);
    }

    #[test]
    fn pages_without_limit_are_zero() {
        check(json!({}), json!({}), "64KB 0, 2MB 0, 1GB 0");
        check(json!({}), json!({"hugepages-2Mi": "4Mi", "memory": "1Gi"}), "64KB 0, 2MB 4194304, 1GB 0");
        check(
            json!({"hugepages-1Gi": "2Gi"}),
            json!({"hugepages-2048Ki": "2Mi"}),
            "64KB 0, 2MB 2097152, 1GB 2147483648",
        );
        check(json!({"hugepages-2Mi": "8Mi"}), json!({"hugepages-2Mi": "2Mi"}), "64KB 0, 2MB 2097152, 1GB 0");
    }

    #[test]
    fn pools_become_node_resources() {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, count) in [("hugepages-1048576kB", "1\n"), ("hugepages-2048kB", "4\n"), ("other", "")] {
            std::fs::create_dir(dir.path().join(name)).expect("made");
            std::fs::write(dir.path().join(name).join("nr_hugepages"), count).expect("written");
        }
        let resources: Vec<_> = pools_in(dir.path()).into_iter().map(HugePagePool::resource).collect();
        let expected = [("hugepages-2Mi", "8Mi"), ("hugepages-1Gi", "1Gi")];
        assert_eq!(resources, expected.map(|(name, amount)| (name.to_owned(), amount.to_owned())));
        assert_eq!(HugePagePool { size: 2 << 20, count: 0 }.resource().1, "0");
        assert_eq!(pools_in(&dir.path().join("none")), []);
    }

    #[test]
    fn volume_page_size_requires_resource_request() {
        let two = pod(json!({}), json!({"hugepages-2Mi": "4Mi"}));
        assert_eq!(page_size("HugePages", &two), Ok(2 << 20));
        assert_eq!(page_size("HugePages-2Mi", &two), Ok(2 << 20));
        let missing = "medium HugePages-1Gi: hugePages storage requested, but there is no resource request for huge pages";
        assert_eq!(page_size("HugePages-1Gi", &two), Err(missing.to_owned()));
        let both = pod(json!({}), json!({"hugepages-2Mi": "4Mi", "hugepages-1Gi": "1Gi"}));
        let many = "medium: HugePages can't be used if container requests multiple huge page sizes";
        assert_eq!(page_size("HugePages", &both), Err(many.to_owned()));
        assert_eq!(page_size("HugePages-1Gi", &both), Ok(1 << 30));
        assert!(is_medium("HugePages-2Mi") && is_medium("HugePages") && !is_medium("Memory"));
    }
}

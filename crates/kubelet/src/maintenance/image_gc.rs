//! Image garbage collection: decides which unused images are removed, and removes them. [`plan_gc`]
//! does no I/O.
//!
//! As upstream, images unused for longer than the maximum age are removed first. If the disk usage
//! exceeds the high threshold, the least recently used images follow, until their sizes add up to
//! the required amount.
//!
//! Upstream: `pkg/kubelet/images/image_gc_manager.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use runtime::cri::ImageSpec;

use super::eviction;
use crate::Node;

/// The image garbage collection policy. Defaults are upstream's.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageGcPolicy {
    /// The disk usage in percent that starts the collection, and the one to reach.
    pub high_threshold_percent: u64,
    pub low_threshold_percent: u64,
    /// The minimum age of an image since it was first detected.
    pub min_age: SignedDuration,
    /// Images unused for longer are always removed. Zero disables this.
    pub max_age: SignedDuration,
}

impl Default for ImageGcPolicy {
    fn default() -> ImageGcPolicy {
        ImageGcPolicy {
            high_threshold_percent: 85,
            low_threshold_percent: 80,
            min_age: SignedDuration::from_secs(120),
            max_age: SignedDuration::ZERO,
        }
    }
}

/// When images were detected and used, from earlier runs.
#[derive(Default)]
pub struct ImageRecords {
    /// The time of the first run.
    first_sync: Option<Timestamp>,
    /// When each image was first detected and last used, by ID.
    images: BTreeMap<String, (Timestamp, Timestamp)>,
}

/// An image that no container or volume uses.
#[derive(Clone, Debug, PartialEq)]
struct UnusedImage {
    id: String,
    bytes: u64,
    first_detected: Timestamp,
    last_used: Timestamp,
}

/// The filesystem of the images.
#[derive(Clone, Copy, Debug)]
struct ImageFs {
    available: u64,
    capacity: u64,
}

impl ImageFs {
    fn percent_used(self) -> u64 {
        let left = u128::from(self.available.min(self.capacity)) * 100;
        100 - u64::try_from(left.checked_div(u128::from(self.capacity)).unwrap_or(100)).unwrap_or(100)
    }
}

/// The result of a collection run.
#[derive(Debug, Default, PartialEq)]
struct GcPlan {
    /// The IDs of the images to remove, in this order.
    remove: Vec<String>,
    /// Not enough bytes are freed, although all candidates are removed.
    is_insufficient: bool,
    /// The bytes that images removed for disk usage free.
    reclaim_bytes: u64,
}

/// `unused` is sorted by last use.
fn plan_gc(
    unused: &[UnusedImage],
    policy: &ImageGcPolicy,
    disk: ImageFs,
    first_sync: Timestamp,
    now: Timestamp,
) -> GcPlan {
    let mut plan = GcPlan::default();
    // Ages are known only since the kubelet started. Before it has run for the maximum age, no
    // image counts as old.
    let max_age_applies = !policy.max_age.is_zero() && now.duration_since(first_sync) > policy.max_age;
    let is_old =
        |image: &&UnusedImage| max_age_applies && now.duration_since(image.last_used) > policy.max_age;
    plan.remove = unused.iter().filter(is_old).map(|image| image.id.clone()).collect();
    if disk.capacity == 0 || disk.percent_used() < policy.high_threshold_percent {
        return plan;
    }
    let required_bytes =
        u128::from(disk.capacity) * u128::from(100 - policy.low_threshold_percent.min(100)) / 100;
    let required_bytes = u64::try_from(required_bytes).unwrap_or(u64::MAX).saturating_sub(disk.available);
    let is_old_enough = |image: &&UnusedImage| now.duration_since(image.first_detected) >= policy.min_age;
    for image in unused.iter().filter(|image| !is_old(image)).filter(is_old_enough) {
        if plan.reclaim_bytes >= required_bytes {
            break;
        }
        plan.remove.push(image.id.clone());
        plan.reclaim_bytes = plan.reclaim_bytes.saturating_add(image.bytes);
    }
    plan.is_insufficient = plan.reclaim_bytes < required_bytes;
    plan
}

/// Removes unused images by age and disk usage.
pub async fn garbage_collect(node: &Arc<Node>) {
    let now = node.ctx.clock.now();
    let Some((unused, first_sync)) = detect_images(node, now).await else { return };
    let disk = eviction::image_fs_stats(node).await.unwrap_or_default().disk;
    let disk = ImageFs { available: disk.available, capacity: disk.capacity };
    let plan = plan_gc(&unused, &node.settings.kubelet_config.image_gc, disk, first_sync, now);
    remove(node, &plan.remove).await;
    if plan.is_insufficient {
        let message = format!(
            "Insufficient free disk space on the node's image filesystem ({}% of {} used). \
             Failed to free sufficient space by deleting unused images (freed {} bytes). \
             Investigate disk usage, as it could be used by active images, logs, volumes, or other data.",
            disk.percent_used(),
            format_bytes(disk.capacity),
            plan.reclaim_bytes
        );
        tracing::warn!("{message}");
        let own = node.ctx.caches.nodes().get(&reconcile::Key::new("", &node.settings.node_name));
        if let Some(own) = own {
            node.ctx.events.warning(&*own, "FreeDiskSpaceFailed", message);
        }
    }
}

/// Removes all unused images that are old enough, for an eviction. Returns whether any was removed.
pub async fn remove_all(node: &Arc<Node>) -> bool {
    let now = node.ctx.clock.now();
    let Some((unused, _)) = detect_images(node, now).await else { return false };
    let min_age = node.settings.kubelet_config.image_gc.min_age;
    let old_enough = unused.into_iter().filter(|image| now.duration_since(image.first_detected) >= min_age);
    remove(node, &old_enough.map(|image| image.id).collect::<Vec<_>>()).await
}

/// The unused images sorted by last use, and the time of the first run.
async fn detect_images(node: &Node, now: Timestamp) -> Option<(Vec<UnusedImage>, Timestamp)> {
    let (images, containers) = (node.runtime.images().await.ok()?, node.runtime.containers(&[]).await.ok()?);
    let ids: Vec<&str> = images.iter().map(|image| image.id.as_str()).collect();
    node.pulled.prune(&ids, now);
    // No container refers to the sandbox image.
    let sandbox = sandbox_image(node).await;
    let mounted = mounted_images(node).await?;
    let used: BTreeSet<&str> = containers
        .iter()
        .flat_map(|container| {
            [
                Some(container.image_ref.as_str()),
                Some(container.image_id.as_str()),
                container.image.as_ref().map(|image| image.image.as_str()),
            ]
        })
        .flatten()
        .chain(mounted.iter().map(String::as_str))
        .collect();
    let mut state = node.maintenance.state.lock();
    let first_sync = *state.image_records.first_sync.get_or_insert(now);
    state.image_records.images.retain(|id, _| images.iter().any(|image| image.id == *id));
    let mut unused = Vec::new();
    for image in &images {
        let names = image.repo_tags.iter().chain(&image.repo_digests).chain([&image.id]);
        let is_used = names.into_iter().any(|name| used.contains(name.as_str()) || *name == sandbox);
        // A new image counts as never used, as upstream.
        let (first_detected, last_used) =
            state.image_records.images.entry(image.id.clone()).or_insert((now, Timestamp::UNIX_EPOCH));
        if is_used {
            *last_used = now;
        } else if !image.pinned {
            unused.push(UnusedImage {
                id: image.id.clone(),
                bytes: image.size,
                first_detected: *first_detected,
                last_used: *last_used,
            });
        }
    }
    unused.sort_by(|one, other| {
        (one.last_used, one.first_detected, &one.id).cmp(&(other.last_used, other.first_detected, &other.id))
    });
    Some((unused, first_sync))
}

/// The IDs of the images that pods of this node mount as volumes.
async fn mounted_images(node: &Node) -> Option<Vec<String>> {
    let mut ids = Vec::new();
    for pod in node.pods() {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        for name in volumes.filter_map(|volume| volume.image.as_ref()?.reference.clone()) {
            let spec = ImageSpec { image: name, ..ImageSpec::default() };
            ids.extend(node.runtime.image(&spec).await.ok()?.map(|image| image.id));
        }
    }
    Some(ids)
}

async fn remove(node: &Node, ids: &[String]) -> bool {
    let mut any = false;
    for id in ids {
        let spec = ImageSpec { image: id.clone(), ..ImageSpec::default() };
        match node.runtime.remove_image(&spec).await {
            Ok(()) => any = true,
            Err(error) => tracing::warn!(%error, id, "failed to remove an image"),
        }
    }
    any
}

async fn sandbox_image(node: &Node) -> String {
    let details = node.runtime.details().await.unwrap_or_default();
    let config = details.get("config").and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    config.and_then(|config| config["sandboxImage"].as_str().map(str::to_owned)).unwrap_or_default()
}

/// Formats bytes with a binary unit.
fn format_bytes(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|(bits, _)| bytes >> bits > 0);
    unit.map_or_else(
        || format!("{bytes} B"),
        |(bits, name)| format!("{:.1} {name}", bytes as f64 / 2f64.powi(bits)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks what is removed. Images are `name:bytes:first detected:last used`, with times in
    /// minutes ago.
    #[track_caller]
    fn check(images: &str, used: u64, oldest: i64, expected: &str) {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let minutes_before = |minutes: &str| now - SignedDuration::from_mins(minutes.parse().unwrap());
        let unused: Vec<UnusedImage> = images
            .split_whitespace()
            .map(|text| {
                let parts: Vec<&str> = text.split(':').collect();
                UnusedImage {
                    id: parts[0].to_owned(),
                    bytes: parts[1].parse().unwrap(),
                    first_detected: minutes_before(parts[2]),
                    last_used: minutes_before(parts[3]),
                }
            })
            .collect();
        let policy = ImageGcPolicy { max_age: SignedDuration::from_mins(oldest), ..ImageGcPolicy::default() };
        let disk = ImageFs { available: 1000 - used, capacity: 1000 };
        let plan = plan_gc(&unused, &policy, disk, minutes_before("60"), now);
        let short = if plan.is_insufficient { " and not enough" } else { "" };
        assert_eq!(format!("{}{short}", plan.remove.join(" ")), expected);
    }

    #[test]
    fn unused_images_are_removed_by_age_and_disk_usage() {
        let three = "a:60:50:40 b:70:50:30 c:500:50:20";
        check(three, 840, 0, "");
        // The usage in percent is rounded up.
        check(three, 841, 0, "a");
        // 850 of 1000 are used, so 50 must be freed.
        check(three, 850, 0, "a");
        check(three, 900, 0, "a b");
        check(three, 1000, 0, "a b c");
        check("a:60:50:40 b:70:50:30", 1000, 0, "a b and not enough");
        check("", 900, 0, " and not enough");
        // Younger than the minimum age.
        check("young:60:1:99 b:70:50:30", 850, 0, "b");
        // Older than the maximum age, whatever the disk usage. Their bytes do not count as freed.
        check(three, 100, 35, "a");
        check(three, 850, 35, "a b");
        // Not before the kubelet has run for the maximum age.
        check(three, 100, 60, "");
    }

    #[test]
    fn byte_sizes_have_binary_units() {
        let formatted = [0, 1023, 1024, 3 << 20, 5 << 30, 7 << 40].map(format_bytes);
        assert_eq!(formatted, ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "5.0 GiB", "7.0 TiB"]);
        assert_eq!(ImageFs { available: 5, capacity: 0 }.percent_used(), 0);
        assert_eq!(ImageFs { available: u64::MAX, capacity: u64::MAX }.percent_used(), 0);
        assert_eq!(ImageFs { available: 0, capacity: 7 }.percent_used(), 100);
    }
}

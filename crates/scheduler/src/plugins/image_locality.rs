//! ImageLocality: prefers nodes that have the pod's images, weighted by size and by the share of nodes with
//! the image.

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{Cycle, MAX_SCORE, Plugin, PreScore, PreScoreResult, Score};
use crate::state::{NodeId, NodeInfo};

pub const NAME: &str = "ImageLocality";

const MB: i64 = 1024 * 1024;
/// Images below this total score 0 (upstream's `minThreshold`).
const MIN_THRESHOLD: i64 = 23 * MB;
/// Upper limit per container (upstream's `maxContainerThreshold`).
const MAX_CONTAINER_THRESHOLD: i64 = 1000 * MB;

struct ImageLocality;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    Ok(Plugin::new(NAME).pre_score(Arc::new(ImageLocality)))
}

impl PreScore for ImageLocality {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        let total = cycle.state.order().len().max(1) as f64;
        let spread = |image: &'c Arc<str>| (&**image, f64::from(cycle.state.nodes_with_image(image)) / total);
        let images: Vec<_> =
            cycle.pod.images.iter().map(spread).filter(|(_, spread)| *spread > 0.0).collect();
        // Without any image on any node all scores are equal.
        if images.is_empty() {
            return PreScoreResult::Skip;
        }
        PreScoreResult::Score(Box::new(ImageScore {
            images,
            max_threshold: MAX_CONTAINER_THRESHOLD * cycle.pod.containers as i64,
        }))
    }
}

struct ImageScore<'c> {
    /// Each image with the share of nodes that have it.
    images: Vec<(&'c str, f64)>,
    max_threshold: i64,
}

impl Score for ImageScore<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let sizes = self.images.iter().filter_map(|(image, spread)| Some((node.image(image)?, spread)));
        let sum: i64 = sizes.map(|(size, spread)| (size as f64 * spread) as i64).sum();
        MAX_SCORE * (sum.clamp(MIN_THRESHOLD, self.max_threshold) - MIN_THRESHOLD)
            / (self.max_threshold - MIN_THRESHOLD)
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use crate::testing::test_cluster;

    #[track_caller]
    fn check(pod: &str, expected: Expect) {
        let mut cluster = test_cluster(
            "
            node a image=web:v1@524288000
            node b image=web:v1@524288000 image=db:latest@262144000
            node c",
        );
        expected.assert_eq(&cluster.score(&super::make(&serde_json::Value::Null).unwrap(), pod));
    }

    #[test]
    fn scores_present_images_by_size_and_spread() {
        check("pod p image=missing/has", expect!["skip\n"]);
        // 500 MB on two of three nodes: 333.3 MB, of (1000-23) MB above 23: (333.3-23)/977 = 31%.
        check(
            "pod p image=web:v1",
            expect![[r#"
            a: 31 -> 31
            b: 31 -> 31
            c: 0 -> 0
        "#]],
        );
        // The default tag is added; 250 MB on one of three nodes: 83.3 MB: 6%.
        check(
            "pod p image=db",
            expect![[r#"
            a: 0 -> 0
            b: 6 -> 6
            c: 0 -> 0
        "#]],
        );
    }
}

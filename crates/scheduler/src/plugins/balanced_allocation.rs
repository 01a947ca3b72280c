//! NodeResourcesBalancedAllocation: prefers nodes whose resources are used in equal proportions.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::node_resources_fit::{ResourceSpec, resources_with_weights};
use super::parse_args;
use crate::framework::{Cycle, MAX_SCORE, Plugin, PreScore, PreScoreResult, Score};
use crate::state::resources::{ResourceName, is_scalar};
use crate::state::{NodeId, NodeInfo};

pub const NAME: &str = "NodeResourcesBalancedAllocation";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    resources: Vec<ResourceSpec>,
}

struct BalancedAllocation {
    resources: Vec<ResourceName>,
}

/// Creates the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = parse_args(args)?;
    if args.resources.iter().any(|spec| spec.weight > 1) {
        return Err("resource weights must be 1".to_owned());
    }
    let resources = resources_with_weights(&args.resources)?.into_iter().map(|(name, _)| name).collect();
    Ok(Plugin::new(NAME).pre_score(Arc::new(BalancedAllocation { resources })))
}

impl PreScore for BalancedAllocation {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        let requests = self.resources.iter().map(|name| (name, cycle.pod.requests.exact.get(name)));
        let requests: Vec<_> = requests.collect();
        if requests.iter().all(|(_, amount)| *amount == 0) {
            return PreScoreResult::Skip;
        }
        let is_included = |(name, amount): &(&ResourceName, i64)| {
            *amount != 0 || !matches!(name, ResourceName::Scalar(name) if is_scalar(name))
        };
        PreScoreResult::Score(Box::new(Balance(requests.into_iter().filter(is_included).collect())))
    }
}

struct Balance<'c>(Vec<(&'c ResourceName, i64)>);

impl Score for Balance<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let with = self.balance_score(node, true);
        let without = self.balance_score(node, false);
        MAX_SCORE / 2 + (MAX_SCORE / 2 + with - without) / 2
    }
}

impl Balance<'_> {
    /// 100 if all resources are used in the same proportion, less the higher the standard deviation. With the
    /// pod added or without it.
    fn balance_score(&self, node: &NodeInfo, with_pod: bool) -> i64 {
        let (mut count, mut sum, mut first, mut second) = (0, 0.0, 0.0, 0.0);
        for fraction in self.fractions(node, with_pod) {
            count += 1;
            sum += fraction;
            (first, second) = (second, fraction);
        }
        let deviation = match count {
            0 | 1 => 0.0,
            2 => f64::abs((first - second) / 2.0),
            _ => {
                let mean = sum / f64::from(count);
                let spread: f64 = self
                    .fractions(node, with_pod)
                    .map(|fraction| (fraction - mean) * (fraction - mean))
                    .sum();
                (spread / f64::from(count)).sqrt()
            }
        };
        ((1.0 - deviation) * MAX_SCORE as f64) as i64
    }

    fn fractions(&self, node: &NodeInfo, with_pod: bool) -> impl Iterator<Item = f64> {
        self.0.iter().filter_map(move |(name, request)| {
            let capacity = node.allocatable.get(name);
            let used = node.requested.get(name) + if with_pod { *request } else { 0 };
            (capacity != 0).then(|| (used as f64 / capacity as f64).min(1.0))
        })
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
            node a cpu=4 memory=8Gi
            node b cpu=4 memory=8Gi
            pod x on=a cpu=2
            pod y on=b memory=4Gi",
        );
        expected.assert_eq(&cluster.score(&super::make(&serde_json::Value::Null).unwrap(), pod));
    }

    #[test]
    fn balanced_allocation_wins() {
        check("pod p", expect!["skip\n"]);
        // a: cpu 2/4 -> 4/4 with memory 0: deviation .25 -> .5, so 50 + (50+50-75)/2 = 62.
        // b: cpu 0 -> 2/4 with memory 4/8: deviation .25 -> 0, so 50 + (50+100-75)/2 = 87.
        check(
            "pod p cpu=2",
            expect![[r#"
            a: 62 -> 62
            b: 87 -> 87
        "#]],
        );
        // Balanced on a: memory 0 -> 4/8 with cpu 2/4.
        check(
            "pod p memory=4Gi",
            expect![[r#"
            a: 87 -> 87
            b: 62 -> 62
        "#]],
        );
    }
}

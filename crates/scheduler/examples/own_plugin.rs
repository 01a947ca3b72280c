//! A scheduler with an out-of-tree plugin.
//!
//! A plugin is a [`Plugin`] that registers its extension points, and a [`RegistryEntry`] that names it. This
//! one filters out nodes that are too warm and prefers the coolest, by an annotation that an agent writes to
//! the nodes. The configuration below enables it in one profile; pods select the profile with `schedulerName:
//! cool`.
//!
//! ```text
//! cargo run -p scheduler --example own_plugin -- KUBECONFIG
//! ```

use std::sync::Arc;

use reconcile::{Clock, Ctx};
use scheduler::config::Config;
use scheduler::framework::registry::RegistryEntry;
use scheduler::framework::{
    ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, PreScore, PreScoreResult, Requeue,
    Score, Status, default_normalize_score,
};
use scheduler::state::{NodeId, NodeInfo, PodInfo, State};
use serde_json::Value;

const CONFIG: &str = "
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: cool
  plugins:
    multiPoint:
      enabled:
      - name: Temperature
        weight: 5
  pluginConfig:
  - name: Temperature
    args:
      limit: 70
";

/// Not enabled by default: only in profiles that name it.
const TEMPERATURE: RegistryEntry =
    RegistryEntry { name: "Temperature", factory: make, weight: 1, default: false };

struct Temperature {
    limit: i64,
}

/// Creates the plugin from its arguments. The error for an invalid limit names the profile and the plugin.
fn make(arguments: &Value) -> Result<Plugin, String> {
    let limit = match &arguments["limit"] {
        Value::Null => 80,
        given => given.as_i64().ok_or("limit: must be a whole number of degrees")?,
    };
    let plugin = Arc::new(Temperature { limit });
    Ok(Plugin::new("Temperature").pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

/// The value of the annotation; 0 if there is none.
fn degrees(node: &NodeInfo) -> i64 {
    let annotations = node.object.as_ref().and_then(|node| node.metadata.annotations.as_ref());
    annotations.and_then(|all| all.get("example.com/degrees")).and_then(|text| text.parse().ok()).unwrap_or(0)
}

impl PreFilter for Temperature {
    fn pre_filter<'c>(&'c self, _: &Cycle<'c>) -> PreFilterResult<'c> {
        PreFilterResult::Filter(Box::new(FnFilter(|node: &NodeInfo| {
            if degrees(node) > self.limit {
                return Status::unresolvable("node(s) were too warm");
            }
            Status::success()
        })))
    }
}

impl PreScore for Temperature {
    fn pre_score<'c>(&'c self, _: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        PreScoreResult::Score(Box::new(Coolness))
    }
}

struct Coolness;

impl Score for Coolness {
    fn score(&self, node: &NodeInfo) -> i64 {
        degrees(node)
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        // Reversed: the warmest node gets score 0.
        default_normalize_score(scores, true);
    }
}

/// The queueing hint. Without it every event would requeue the pods that the plugin has rejected.
impl Requeue for Temperature {
    fn is_schedulable_after_change(&self, _: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        matches!(change, ClusterEvent::Node(pair) if pair.new.is_some_and(|node| degrees(node) <= self.limit))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: own_plugin KUBECONFIG")?;
    let kubeconfig = client::Kubeconfig::read(path.as_ref())?;
    let connection = Arc::new(client::remote::Remote::new(&kubeconfig)?);
    let (_stop, shutdown) = tokio::sync::watch::channel(false);
    let ctx = Ctx::new(client::Client::new(connection, "cool-scheduler"), Clock::default(), shutdown);
    scheduler::run::run(ctx, Config::read(CONFIG)?, &[TEMPERATURE]).await?;
    Ok(())
}

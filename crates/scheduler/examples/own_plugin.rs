//! A scheduler with an algorithm of one's own.
//!
//! A plugin is a value of [`Plugin`] that says where it takes part, and a [`Row`] that names it. This one
//! keeps pods off nodes that are too warm, and prefers the coolest, by an annotation that some agent writes
//! on the nodes. Switched on for one profile by the configuration below; pods ask for it by `schedulerName:
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

/// Not part of any profile that does not name it.
const TEMPERATURE: RegistryEntry =
    RegistryEntry { name: "Temperature", factory: make, weight: 1, default: false };

struct Temperature {
    limit: i64,
}

/// Makes the plugin from its arguments. A limit that is no number is a mistake the scheduler names.
fn make(arguments: &Value) -> Result<Plugin, String> {
    let limit = match &arguments["limit"] {
        Value::Null => 80,
        given => given.as_i64().ok_or("limit: must be a whole number of degrees")?,
    };
    let plugin = Arc::new(Temperature { limit });
    Ok(Plugin::new("Temperature").pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

/// What the agent wrote; cold if it wrote nothing.
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
        // The warmest gets nothing.
        default_normalize_score(scores, true);
    }
}

/// Without this, every change would wake the pods the plugin has turned away.
impl Requeue for Temperature {
    fn is_schedulable_after_change(&self, _: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        matches!(change, ClusterEvent::Node(pair) if pair.new.is_some_and(|node| degrees(node) <= self.limit))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("name a kubeconfig")?;
    let kubeconfig = client::Kubeconfig::read(path.as_ref())?;
    let connection = Arc::new(client::remote::Remote::new(&kubeconfig)?);
    let (_stop, shutdown) = tokio::sync::watch::channel(false);
    let ctx = Ctx::new(client::Client::new(connection, "cool-scheduler"), Clock::default(), shutdown);
    scheduler::run::run(ctx, Config::read(CONFIG)?, &[TEMPERATURE]).await?;
    Ok(())
}

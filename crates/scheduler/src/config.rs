//! `KubeSchedulerConfiguration` v1, the scheduler's configuration file.

#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::framework::registry::RegistryEntry;
use crate::framework::{Profile, ProfileError};

/// `KubeSchedulerConfiguration`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Config {
    pub profiles: Vec<ProfileConfig>,
    /// Percentage of the nodes to find before scoring; 0 adapts to the number of nodes.
    pub percentage_of_nodes_to_score: i32,
    pub pod_initial_backoff_seconds: u64,
    pub pod_max_backoff_seconds: u64,
    pub extenders: Vec<ExtenderConfig>,
    pub leader_election: LeaderElection,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            profiles: Vec::new(),
            percentage_of_nodes_to_score: 0,
            pod_initial_backoff_seconds: 1,
            pod_max_backoff_seconds: 10,
            extenders: Vec::new(),
            leader_election: LeaderElection::default(),
        }
    }
}

/// `KubeSchedulerProfile`.
#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ProfileConfig {
    pub scheduler_name: String,
    pub percentage_of_nodes_to_score: Option<i32>,
    pub plugins: Plugins,
    pub plugin_config: Vec<PluginConfig>,
}

/// Enabled and disabled plugins by extension point.
#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Plugins {
    pub pre_enqueue: PluginSet,
    pub queue_sort: PluginSet,
    pub pre_filter: PluginSet,
    pub filter: PluginSet,
    pub post_filter: PluginSet,
    pub pre_score: PluginSet,
    pub score: PluginSet,
    pub reserve: PluginSet,
    pub permit: PluginSet,
    pub pre_bind: PluginSet,
    pub bind: PluginSet,
    pub post_bind: PluginSet,
    pub multi_point: PluginSet,
}

impl Plugins {
    /// The sets of all extension points except `multiPoint`.
    pub fn sets(&self) -> [&PluginSet; 12] {
        [
            &self.pre_enqueue,
            &self.queue_sort,
            &self.pre_filter,
            &self.filter,
            &self.post_filter,
            &self.pre_score,
            &self.score,
            &self.reserve,
            &self.permit,
            &self.pre_bind,
            &self.bind,
            &self.post_bind,
        ]
    }
}

/// Plugins enabled and disabled at an extension point.
#[derive(Clone, Debug, Deserialize, Default)]
#[serde(default)]
pub struct PluginSet {
    pub enabled: Vec<PluginEntry>,
    pub disabled: Vec<PluginEntry>,
}

/// A plugin's name and weight.
#[derive(Clone, Debug, Deserialize)]
pub struct PluginEntry {
    pub name: String,
    #[serde(default)]
    pub weight: Option<i32>,
}

/// Arguments of a plugin.
#[derive(Clone, Debug, Deserialize)]
pub struct PluginConfig {
    pub name: String,
    #[serde(default)]
    pub args: Value,
}

/// An HTTP extender.
#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ExtenderConfig {
    pub url_prefix: String,
    pub filter_verb: String,
    pub preempt_verb: String,
    pub prioritize_verb: String,
    pub bind_verb: String,
    pub weight: i64,
    #[serde(rename = "enableHTTPS")]
    pub enable_https: bool,
    pub tls_config: Option<ExtenderTls>,
    /// Duration such as `30s`.
    pub http_timeout: Option<String>,
    pub node_cache_capable: bool,
    pub managed_resources: Vec<ManagedResource>,
    pub ignorable: bool,
}

/// TLS client configuration of an extender.
#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ExtenderTls {
    pub insecure: bool,
    pub server_name: String,
    pub cert_file: String,
    pub key_file: String,
    pub ca_file: String,
}

/// An extended resource that an extender manages.
#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagedResource {
    pub name: String,
    pub ignored_by_scheduler: bool,
}

/// Leader election between schedulers.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaderElection {
    pub leader_elect: bool,
    pub lease_duration: String,
    pub renew_deadline: String,
    pub retry_period: String,
    pub resource_name: String,
    pub resource_namespace: String,
}

impl Default for LeaderElection {
    fn default() -> LeaderElection {
        LeaderElection {
            leader_elect: true,
            lease_duration: "15s".to_owned(),
            renew_deadline: "10s".to_owned(),
            retry_period: "2s".to_owned(),
            resource_name: "kube-scheduler".to_owned(),
            resource_namespace: "kube-system".to_owned(),
        }
    }
}

/// Why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the scheduler's configuration")]
    Syntax(#[source] schema::yaml::Error),
    #[error("no kind {kind:?} is registered for version {version:?}")]
    Kind { kind: String, version: String },
    #[error("{0}")]
    Invalid(String),
    #[error("profile {name:?}: {source}")]
    Profile { name: String, source: ProfileError },
}

impl Config {
    /// Parses and validates a configuration file.
    pub fn read(text: &str) -> Result<Config, ConfigError> {
        let value = schema::yaml::parse(text).map_err(ConfigError::Syntax)?;
        let field = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (version, kind) = (field("apiVersion"), field("kind"));
        if version != "kubescheduler.config.k8s.io/v1" || kind != "KubeSchedulerConfiguration" {
            return Err(ConfigError::Kind { kind, version });
        }
        let mut config: Config = schema::yaml::from_str(text).map_err(ConfigError::Syntax)?;
        config.set_defaults();
        config.validate()?;
        Ok(config)
    }

    /// The configuration without a configuration file.
    pub fn with_defaults() -> Config {
        let mut config = Config::default();
        config.set_defaults();
        config
    }

    fn set_defaults(&mut self) {
        if self.profiles.is_empty() {
            self.profiles.push(ProfileConfig::default());
        }
        if let [only] = &mut self.profiles[..]
            && only.scheduler_name.is_empty()
        {
            only.scheduler_name = "default-scheduler".to_owned();
        }
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let invalid = |message: &str| Err(ConfigError::Invalid(message.to_owned()));
        let percentages = self.profiles.iter().filter_map(|profile| profile.percentage_of_nodes_to_score);
        if percentages.chain([self.percentage_of_nodes_to_score]).any(|share| !(0..=100).contains(&share)) {
            return invalid("percentageOfNodesToScore: not in valid range [0-100]");
        }
        if self.pod_initial_backoff_seconds == 0 {
            return invalid("podInitialBackoffSeconds: must be greater than 0");
        }
        if self.pod_max_backoff_seconds < self.pod_initial_backoff_seconds {
            return invalid(
                "podMaxBackoffSeconds: must be greater than or equal to PodInitialBackoffSeconds",
            );
        }
        for (i, profile) in self.profiles.iter().enumerate() {
            if profile.scheduler_name.is_empty() {
                return invalid(&format!("profiles[{i}].schedulerName: Required value"));
            }
            if self.profiles[..i].iter().any(|other| other.scheduler_name == profile.scheduler_name) {
                return invalid(&format!("profiles[{i}].schedulerName: Duplicate value"));
            }
        }
        if self.extenders.iter().filter(|extender| !extender.bind_verb.is_empty()).count() > 1 {
            return invalid("extenders: only one extender can implement bind");
        }
        if self.extenders.iter().any(|one| !one.prioritize_verb.is_empty() && one.weight <= 0) {
            return invalid("extenders: prioritizer extender must have a positive weight applied to it");
        }
        Ok(())
    }

    /// Builds the profiles with these plugins.
    pub fn profiles(&self, rows: &[RegistryEntry]) -> Result<Vec<Profile>, ConfigError> {
        let make = |profile: &ProfileConfig| {
            let name = profile.scheduler_name.clone();
            Profile::new(profile, rows).map_err(|source| ConfigError::Profile { name, source })
        };
        self.profiles.iter().map(make).collect()
    }

    /// Initial and maximum backoff of a pod.
    pub fn backoff(&self) -> (Duration, Duration) {
        let seconds = Duration::from_secs;
        (seconds(self.pod_initial_backoff_seconds), seconds(self.pod_max_backoff_seconds))
    }
}

//! Scheduling profiles. Counterpart of upstream's `frameworkImpl`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use super::registry::RegistryEntry;
use super::{
    Bind, Permit, Plugin, PostBind, PostFilter, PreBind, PreEnqueue, PreFilter, PreScore, QueueSort, Requeue,
    Reserve,
};
use crate::config::{PluginSet, ProfileConfig};

/// The plugins of an extension point with their names, in order.
type PluginList<T> = Vec<(&'static str, Arc<T>)>;

/// The plugins that schedule the pods with one scheduler name.
pub struct Profile {
    pub scheduler_name: Arc<str>,
    /// `percentageOfNodesToScore` of the profile; `None` for the global value.
    pub percentage: Option<i32>,
    pub pre_enqueue: PluginList<dyn PreEnqueue>,
    pub queue_sort: Arc<dyn QueueSort>,
    pub pre_filter: PluginList<dyn PreFilter>,
    pub post_filter: PluginList<dyn PostFilter>,
    pub scorers: Vec<Scorer>,
    pub reserve: PluginList<dyn Reserve>,
    pub permit: PluginList<dyn Permit>,
    pub pre_bind: PluginList<dyn PreBind>,
    pub bind: PluginList<dyn Bind>,
    pub post_bind: PluginList<dyn PostBind>,
    pub requeue: HashMap<&'static str, Arc<dyn Requeue>>,
    /// Evaluation counts of the filters and scorers, in their order.
    pub filter_counts: Box<[EvaluationCounts]>,
    pub score_counts: Box<[EvaluationCounts]>,
}

/// Number of pods for which a plugin returned a filter or score function, and of the nodes it evaluated.
#[derive(Default)]
pub struct EvaluationCounts {
    pub pods: AtomicU64,
    pub nodes: AtomicU64,
}

impl EvaluationCounts {
    /// Creates zero counts for a number of plugins.
    fn zero(plugins: usize) -> Box<[EvaluationCounts]> {
        std::iter::repeat_with(EvaluationCounts::default).take(plugins).collect()
    }

    /// Adds to the counts.
    pub fn add(&self, pods: u64, nodes: u64) {
        self.pods.fetch_add(pods, Ordering::Relaxed);
        self.nodes.fetch_add(nodes, Ordering::Relaxed);
    }
}

/// A scoring plugin with its weight.
pub struct Scorer {
    pub plugin: &'static str,
    pub weight: i64,
    pub score: Arc<dyn PreScore>,
}

/// Why a profile is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ProfileError {
    #[error("plugin {0:?} is not known")]
    Unknown(String),
    #[error("initializing plugin {plugin:?}: {words}")]
    Arguments { plugin: String, words: String },
    #[error("plugin {0:?} is enabled twice")]
    Twice(String),
    #[error("profile {0:?} needs one queue sort plugin")]
    QueueSort(String),
    #[error("profile {0:?} needs at least one bind plugin")]
    NoBind(String),
    #[error("score plugin {0:?} is not configured with a positive weight")]
    Weight(String),
}

impl Profile {
    /// Returns extension point, plugin and number of evaluations.
    pub fn evaluations(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        let filters = self.pre_filter.iter().map(|(name, _)| ("PreFilter", "Filter", *name));
        let scorers = self.scorers.iter().map(|scorer| ("PreScore", "Score", scorer.plugin));
        let all = filters.zip(&self.filter_counts).chain(scorers.zip(&self.score_counts));
        all.flat_map(|((before, after, plugin), counts)| {
            let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
            [(before, plugin, count(&counts.pods)), (after, plugin, count(&counts.nodes))]
        })
    }

    /// Builds a profile from its configuration and the registry.
    pub fn new(config: &ProfileConfig, registry: &[RegistryEntry]) -> Result<Profile, ProfileError> {
        let multi_point_plugins = expand_multi_point_plugins(config, registry);
        let mut plugins: BTreeMap<String, (Plugin, i64)> = BTreeMap::new();
        let named = config.plugins.sets().into_iter().flat_map(|set| set.enabled.iter());
        for enabled in multi_point_plugins
            .iter()
            .map(|(name, _)| name.as_str())
            .chain(named.map(|enabled| &*enabled.name))
        {
            if plugins.contains_key(enabled) {
                continue;
            }
            let registered = registry.iter().find(|registered| registered.name == enabled);
            let registered = registered.ok_or_else(|| ProfileError::Unknown(enabled.to_owned()))?;
            let arguments = config.plugin_config.iter().find(|entry| entry.name == enabled);
            let arguments = arguments.map_or(&Value::Null, |entry| &entry.args);
            let plugin = (registered.factory)(arguments)
                .map_err(|words| ProfileError::Arguments { plugin: enabled.to_owned(), words })?;
            plugins.insert(enabled.to_owned(), (plugin, registered.weight));
        }
        Builder { multi_point_plugins, plugins, config }.build()
    }
}

/// The plugins enabled at all their extension points, with their weights: the defaults plus `multiPoint`.
fn expand_multi_point_plugins(config: &ProfileConfig, registry: &[RegistryEntry]) -> Vec<(String, i64)> {
    let set = &config.plugins.multi_point;
    let disabled = |name: &str| set.disabled.iter().any(|entry| entry.name == "*" || entry.name == name);
    let custom = |name: &str| set.enabled.iter().find(|entry| entry.name == name);
    let mut multi_point_plugins = Vec::new();
    for registered in registry.iter().filter(|registered| registered.default && !disabled(registered.name)) {
        let weight = custom(registered.name)
            .map_or(registered.weight, |entry| entry.weight.unwrap_or_default().into());
        multi_point_plugins.push((registered.name.to_owned(), weight));
    }
    for entry in &set.enabled {
        if !multi_point_plugins.iter().any(|(name, _)| *name == entry.name) {
            multi_point_plugins.push((entry.name.clone(), entry.weight.unwrap_or_default().into()));
        }
    }
    multi_point_plugins
}

struct Builder<'a> {
    multi_point_plugins: Vec<(String, i64)>,
    plugins: BTreeMap<String, (Plugin, i64)>,
    config: &'a ProfileConfig,
}

impl Builder<'_> {
    fn build(self) -> Result<Profile, ProfileError> {
        let sets = &self.config.plugins;
        let name = self.config.scheduler_name.clone();
        let queue_sort_plugins =
            self.plugins_for_point(&[&sets.queue_sort], |plugin| plugin.queue_sort.clone())?;
        let [(_, queue_sort)] = &queue_sort_plugins[..] else { return Err(ProfileError::QueueSort(name)) };
        let bind = self.plugins_for_point(&[&sets.bind], |plugin| plugin.bind.clone())?;
        if bind.is_empty() {
            return Err(ProfileError::NoBind(name));
        }
        let requeue =
            self.plugins.values().filter_map(|(plugin, _)| Some((plugin.name, plugin.requeue.clone()?)));
        let pre_filter =
            self.plugins_for_point(&[&sets.pre_filter, &sets.filter], |plugin| plugin.pre_filter.clone())?;
        let scorers = self.scorers()?;
        Ok(Profile {
            filter_counts: EvaluationCounts::zero(pre_filter.len()),
            score_counts: EvaluationCounts::zero(scorers.len()),
            percentage: self.config.percentage_of_nodes_to_score,
            pre_enqueue: self.plugins_for_point(&[&sets.pre_enqueue], |plugin| plugin.pre_enqueue.clone())?,
            queue_sort: queue_sort.clone(),
            pre_filter,
            post_filter: self.plugins_for_point(&[&sets.post_filter], |plugin| plugin.post_filter.clone())?,
            scorers,
            reserve: self.plugins_for_point(&[&sets.reserve], |plugin| plugin.reserve.clone())?,
            permit: self.plugins_for_point(&[&sets.permit], |plugin| plugin.permit.clone())?,
            pre_bind: self.plugins_for_point(&[&sets.pre_bind], |plugin| plugin.pre_bind.clone())?,
            bind,
            post_bind: self.plugins_for_point(&[&sets.post_bind], |plugin| plugin.post_bind.clone())?,
            requeue: requeue.collect(),
            scheduler_name: name.into(),
        })
    }

    /// The plugins of one extension point, in upstream's order: first the multi-point plugins that the
    /// point's own set names, in the order of that set, then the other multi-point plugins, then the rest of
    /// the point's own set.
    fn plugins_for_point<T: ?Sized>(
        &self,
        sets: &[&PluginSet],
        part: impl Fn(&Plugin) -> Option<Arc<T>>,
    ) -> Result<PluginList<T>, ProfileError> {
        let mut named: Vec<&str> = Vec::new();
        for set in sets {
            for (i, entry) in set.enabled.iter().enumerate() {
                if set.enabled[..i].iter().any(|other| other.name == entry.name) {
                    return Err(ProfileError::Twice(entry.name.clone()));
                }
                if !named.contains(&&*entry.name) {
                    named.push(&entry.name);
                }
            }
        }
        let disabled = |name: &str| {
            let mut all = sets.iter().flat_map(|set| &set.disabled);
            all.any(|entry| entry.name == "*" || entry.name == name)
        };
        let is_multi_point = |name: &str| self.multi_point_plugins.iter().any(|(known, _)| known == name);
        let (overriding, own): (Vec<&str>, Vec<&str>) =
            named.iter().partition(|name| is_multi_point(name) && !disabled(name));
        let others = self.multi_point_plugins.iter().map(|(name, _)| &**name);
        let others = others.filter(|name| !disabled(name) && !named.contains(name));
        let order = overriding.iter().copied().chain(others).chain(own.iter().copied());
        Ok(order
            .filter_map(|name| {
                let (plugin, _) = self.plugins.get(name)?;
                Some((plugin.name, part(plugin)?))
            })
            .collect())
    }

    fn scorers(&self) -> Result<Vec<Scorer>, ProfileError> {
        let sets = &self.config.plugins;
        let plugins =
            self.plugins_for_point(&[&sets.score, &sets.pre_score], |plugin| plugin.pre_score.clone())?;
        let mut scorers = Vec::new();
        for (plugin, score) in plugins {
            let own = sets.score.enabled.iter().find(|entry| entry.name == plugin);
            let multi_point_weight =
                self.multi_point_plugins.iter().find(|(name, _)| name == plugin).map(|(_, weight)| *weight);
            let weight =
                own.and_then(|entry| entry.weight.map(i64::from)).or(multi_point_weight).unwrap_or_default();
            let weight = if weight == 0 { 1 } else { weight };
            if weight < 0 {
                return Err(ProfileError::Weight(plugin.to_owned()));
            }
            scorers.push(Scorer { plugin, weight, score });
        }
        Ok(scorers)
    }
}

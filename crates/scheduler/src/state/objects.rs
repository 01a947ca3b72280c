//! Other objects that plugins read: namespaces, volumes, workloads, PodDisruptionBudgets.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use api::selector::LabelSelector;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::api::storage::v1 as storage;

use super::labels::Labels;
use super::pod::PodInfo;
use super::selection::{selector, selector_of_set};

/// Objects by `namespace/name`; cluster-scoped ones by name.
pub type ByKey<T> = HashMap<String, Arc<T>>;

/// Objects other than nodes and pods.
#[derive(Default)]
pub struct Objects {
    namespaces: BTreeMap<Arc<str>, Labels>,
    /// By namespace, then name.
    services: HashMap<String, BTreeMap<String, LabelSelector>>,
    /// The selectors of ReplicaSets, ReplicationControllers and StatefulSets, by kind and key.
    workloads: HashMap<(Workload, String), LabelSelector>,
    pub volume_claims: ByKey<core::PersistentVolumeClaim>,
    pub volumes: ByKey<core::PersistentVolume>,
    pub storage_classes: ByKey<storage::StorageClass>,
    pub csi_nodes: ByKey<storage::CSINode>,
    pub csi_drivers: ByKey<storage::CSIDriver>,
    pub capacities: ByKey<storage::CSIStorageCapacity>,
    pub attachments: ByKey<storage::VolumeAttachment>,
    pub resource_claims: ByKey<resource::ResourceClaim>,
    pub device_classes: ByKey<resource::DeviceClass>,
    pub resource_slices: ByKey<resource::ResourceSlice>,
    budgets: HashMap<String, Budget>,
}

/// A kind of controller whose selector identifies similar pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Workload {
    ReplicaSet,
    ReplicationController,
    StatefulSet,
}

/// The fields of a PodDisruptionBudget that preemption uses.
#[derive(Clone, Debug)]
pub struct Budget {
    pub namespace: String,
    pub selector: LabelSelector,
    pub allowed: i32,
    /// Names of pods whose eviction is already subtracted from `allowed` (`status.disruptedPods`).
    pub disrupted: Vec<String>,
}

/// Prefix of implicit extended resources, which refer to a device class by name.
const DEVICE_CLASS_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// `namespace/name`.
pub fn key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

impl Objects {
    /// Returns the device class for an extended resource: the most recently created one, if several have the
    /// name.
    pub fn device_class_for(&self, resource: &str) -> Option<&Arc<resource::DeviceClass>> {
        if let Some(name) = resource.strip_prefix(DEVICE_CLASS_PREFIX) {
            return self.device_classes.get(name);
        }
        let named = |class: &&Arc<resource::DeviceClass>| {
            class.spec.extended_resource_name.as_deref() == Some(resource)
        };
        let age =
            |class: &resource::DeviceClass| class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        self.device_classes
            .values()
            .filter(named)
            .max_by(|a, b| age(a).cmp(&age(b)).then_with(|| b.metadata.name.cmp(&a.metadata.name)))
    }

    /// Sets the labels of a namespace; `None` deletes it.
    pub fn set_namespace(&mut self, name: &str, labels: Option<Labels>) {
        match labels {
            Some(labels) => drop(self.namespaces.insert(name.into(), labels)),
            None => drop(self.namespaces.remove(name)),
        }
    }

    /// Returns the labels of a namespace; empty if it is unknown.
    pub fn namespace(&self, name: &str) -> &Labels {
        static NONE: std::sync::LazyLock<Labels> = std::sync::LazyLock::new(Labels::default);
        self.namespaces.get(name).unwrap_or(&NONE)
    }

    /// Returns the namespaces that match a selector, sorted.
    pub fn namespaces(&self, selector: &LabelSelector) -> Vec<Arc<str>> {
        let matching = self.namespaces.iter().filter(|(_, labels)| labels.matched_by(selector));
        matching.map(|(name, _)| name.clone()).collect()
    }

    /// Sets a Service; `None` deletes it.
    pub fn set_service(&mut self, namespace: &str, name: &str, service: Option<&core::Service>) {
        let labels = service.and_then(|service| service.spec.as_ref()?.selector.as_ref());
        let of_namespace = self.services.entry(namespace.to_owned()).or_default();
        match labels.filter(|labels| !labels.is_empty()) {
            Some(labels) => drop(of_namespace.insert(name.to_owned(), selector_of_set(Some(labels)))),
            None => drop(of_namespace.remove(name)),
        }
        if of_namespace.is_empty() {
            self.services.remove(namespace);
        }
    }

    /// Sets the selector of a workload; `None` deletes it.
    pub fn set_workload(&mut self, kind: Workload, key: &str, selector: Option<LabelSelector>) {
        match selector {
            Some(selector) => drop(self.workloads.insert((kind, key.to_owned()), selector)),
            None => drop(self.workloads.remove(&(kind, key.to_owned()))),
        }
    }

    /// Returns the selector of the pod's Services and controller combined (upstream's `DefaultSelector`).
    /// Matches everything if there are none.
    pub fn default_selector(&self, pod: &PodInfo) -> LabelSelector {
        let services = self.services.get(&*pod.namespace).into_iter().flat_map(BTreeMap::values);
        let mut requirements = Vec::new();
        for service in services.filter(|selector| pod.labels.matched_by(selector)) {
            requirements.extend(service.requirements().iter().cloned());
        }
        if let Some(owner) = &pod.owner {
            let kind = match (&*owner.api_version, &*owner.kind) {
                ("apps/v1", "ReplicaSet") => Some(Workload::ReplicaSet),
                ("v1", "ReplicationController") => Some(Workload::ReplicationController),
                ("apps/v1", "StatefulSet") => Some(Workload::StatefulSet),
                _ => None,
            };
            let owned = kind.and_then(|kind| self.workloads.get(&(kind, key(&pod.namespace, &owner.name))));
            if let Some(selector) = owned.filter(|selector| !selector.is_nothing()) {
                requirements.extend(selector.requirements().iter().cloned());
            }
        }
        let mut seen = Vec::new();
        for requirement in requirements {
            if !seen.contains(&requirement) {
                seen.push(requirement);
            }
        }
        LabelSelector::new(seen)
    }

    /// Sets a PodDisruptionBudget; `None` deletes it.
    pub fn set_budget(&mut self, key: &str, budget: Option<&PodDisruptionBudget>) {
        let Some(budget) = budget else {
            self.budgets.remove(key);
            return;
        };
        let status = budget.status.as_ref();
        let spec = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        let disrupted = status.and_then(|status| status.disrupted_pods.as_ref());
        self.budgets.insert(
            key.to_owned(),
            Budget {
                namespace: budget.metadata.namespace.clone().unwrap_or_default(),
                selector: selector(spec).unwrap_or_else(|_| LabelSelector::nothing()),
                allowed: status.and_then(|status| status.disruptions_allowed).unwrap_or_default(),
                disrupted: disrupted.into_iter().flatten().map(|(name, _)| name.clone()).collect(),
            },
        );
    }

    /// All PodDisruptionBudgets.
    pub fn budgets(&self) -> impl Iterator<Item = &Budget> {
        self.budgets.values()
    }

    /// Returns the storage class of a claim; empty if it has none.
    pub fn storage_class_of(claim: &core::PersistentVolumeClaim) -> &str {
        let annotations = claim.metadata.annotations.as_ref();
        let old = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/storage-class"));
        let named = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_ref());
        old.or(named).map(String::as_str).unwrap_or_default()
    }
}

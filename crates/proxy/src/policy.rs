//! NetworkPolicies on this node: tracks which policies and pods must be synced after a change.

pub mod plan;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use nft::{Fragment, IpFamily, Name, Ruleset};
use reconcile::{Caches, Key, Object as _};

use plan::ClusterView;

/// The policies and pods that must be synced.
#[derive(Debug, Default)]
pub struct PendingPolicies {
    pub policies: BTreeSet<Key>,
    pub pods: BTreeSet<Key>,
    /// The labels of a namespace have changed, so all policies must be synced.
    pub all: bool,
}

/// Watches all objects that policies depend on. `notify` is called with what has to be synced.
pub fn listen(
    caches: &Arc<Caches>,
    node: &str,
    mark: impl Fn(&dyn Fn(&mut PendingPolicies)) + Clone + Send + Sync + 'static,
) {
    let policies = caches.network_policies().clone();
    let (notify, own, known) = (mark.clone(), node.to_owned(), policies.clone());
    caches.pods().listen(move |changed| {
        if changed.before.map(|pod| policy_inputs(pod)) == changed.after.map(|pod| policy_inputs(pod)) {
            return;
        }
        let pods = || [changed.before, changed.after].into_iter().flatten();
        let affected: Vec<Key> = match known.is_empty() {
            true => Vec::new(),
            false => {
                let all = known.all().into_iter();
                let affected = all.filter(|policy| pods().any(|pod| plan::may_reference(policy, pod)));
                affected.map(|policy| policy.key()).collect()
            }
        };
        let is_here = pods().any(|pod| is_on_node(pod, &own));
        if is_here || !affected.is_empty() {
            let key = changed.latest().key();
            notify(&|dirty| {
                dirty.policies.extend(affected.iter().cloned());
                if is_here {
                    dirty.pods.insert(key.clone());
                }
            });
        }
    });
    let notify = mark.clone();
    caches.namespaces().listen(move |changed| {
        let labels = |namespace: &Arc<Namespace>| namespace.metadata.labels.clone();
        if changed.before.map(labels) != changed.after.map(labels) {
            notify(&|dirty| dirty.all = true);
        }
    });
    let (pods, own) = (caches.pods().clone(), node.to_owned());
    policies.listen(move |changed| {
        let key = changed.latest().key();
        let local = pods.indexed("node", &own);
        let local: Vec<Key> =
            local.iter().filter(|pod| *pod.namespace() == *key.namespace).map(|pod| pod.key()).collect();
        mark(&|dirty| {
            dirty.policies.insert(key.clone());
            dirty.pods.extend(local.iter().cloned());
        });
    });
}

/// The properties of a pod that policies depend on.
fn policy_inputs(pod: &Pod) -> impl PartialEq {
    let addresses: Vec<_> = plan::addresses(pod).collect();
    (pod.metadata.labels.clone(), addresses, pod.uid().to_owned(), plan::has_network(pod))
}

pub fn is_on_node(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
}

/// Updates the fragments of changed policies and pods. Does not start a cache if there are none.
pub fn apply(
    caches: &Arc<Caches>,
    mut dirty: PendingPolicies,
    node: &str,
    families: &[IpFamily],
    rules: &mut Ruleset,
) {
    if dirty.all {
        dirty.policies.extend(caches.network_policies().all().iter().map(|policy| policy.key()));
    }
    for key in &dirty.policies {
        let policy = caches.network_policies().get(key);
        let fragment =
            policy.map_or_else(Fragment::default, |policy| plan::policy(&policy, &Cluster(caches), families));
        rules.put(&fragment_owner("policy", key), fragment);
    }
    for key in &dirty.pods {
        let pod = caches.pods().get(key).filter(|pod| is_on_node(pod, node));
        let fragment = pod.map_or_else(Fragment::default, |pod| {
            let policies = caches.network_policies().in_namespace(&key.namespace);
            plan::pod(&pod, &policies, families)
        });
        rules.put(&fragment_owner("pod", key), fragment);
    }
}

pub fn fragment_owner(kind: &str, key: &Key) -> Name {
    format!("{kind}/{key}").into()
}

struct Cluster<'a>(&'a Arc<Caches>);

impl ClusterView for Cluster<'_> {
    fn pods(&self, namespace: &str) -> Vec<Arc<Pod>> {
        self.0.pods().in_namespace(namespace)
    }

    fn namespaces(&self) -> Vec<Arc<Namespace>> {
        self.0.namespaces().all()
    }
}

//! NetworkPolicies on this node: which of them, and which pods, have to be looked at again after a change.

pub mod plan;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use nft::{Fragment, Ip, Name, Ruleset};
use reconcile::{Caches, Key, Object as _};

use plan::View;

/// What has to be looked at.
#[derive(Debug, Default)]
pub struct Dirty {
    pub policies: BTreeSet<Key>,
    pub pods: BTreeSet<Key>,
    /// A namespace has other labels now.
    pub all: bool,
}

/// Listens to everything policies depend on; `tell` gets what to look at.
pub fn listen(
    caches: &Arc<Caches>,
    node: &str,
    tell: impl Fn(&dyn Fn(&mut Dirty)) + Clone + Send + Sync + 'static,
) {
    let policies = caches.network_policies().clone();
    let (news, own, known) = (tell.clone(), node.to_owned(), policies.clone());
    caches.pods().listen(move |changed| {
        if changed.before.map(|pod| seen(pod)) == changed.after.map(|pod| seen(pod)) {
            return;
        }
        let pods = || [changed.before, changed.after].into_iter().flatten();
        let concerned: Vec<Key> = match known.is_empty() {
            true => Vec::new(),
            false => {
                let all = known.all().into_iter();
                let concerned = all.filter(|policy| pods().any(|pod| plan::mentions(policy, pod)));
                concerned.map(|policy| policy.key()).collect()
            }
        };
        let is_here = pods().any(|pod| is_on(pod, &own));
        if is_here || !concerned.is_empty() {
            let key = changed.newest().key();
            news(&|dirty| {
                dirty.policies.extend(concerned.iter().cloned());
                if is_here {
                    dirty.pods.insert(key.clone());
                }
            });
        }
    });
    let news = tell.clone();
    caches.namespaces().listen(move |changed| {
        let labels = |namespace: &Arc<Namespace>| namespace.metadata.labels.clone();
        if changed.before.map(labels) != changed.after.map(labels) {
            news(&|dirty| dirty.all = true);
        }
    });
    let (pods, own) = (caches.pods().clone(), node.to_owned());
    policies.listen(move |changed| {
        let key = changed.newest().key();
        let here = pods.indexed("node", &own);
        let here: Vec<Key> =
            here.iter().filter(|pod| *pod.namespace() == *key.namespace).map(|pod| pod.key()).collect();
        tell(&|dirty| {
            dirty.policies.insert(key.clone());
            dirty.pods.extend(here.iter().cloned());
        });
    });
}

/// What of a pod policies can see.
fn seen(pod: &Pod) -> impl PartialEq {
    let addresses: Vec<_> = plan::addresses(pod).collect();
    (pod.metadata.labels.clone(), addresses, pod.uid().to_owned(), plan::has_network(pod))
}

pub fn is_on(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
}

/// Puts into the table what has changed. Begins no cache as long as nothing has.
pub fn apply(caches: &Arc<Caches>, mut dirty: Dirty, node: &str, families: &[Ip], rules: &mut Ruleset) {
    if dirty.all {
        dirty.policies.extend(caches.network_policies().all().iter().map(|policy| policy.key()));
    }
    for key in &dirty.policies {
        let policy = caches.network_policies().get(key);
        let fragment =
            policy.map_or_else(Fragment::default, |policy| plan::policy(&policy, &Cluster(caches), families));
        rules.put(&owner("policy", key), fragment);
    }
    for key in &dirty.pods {
        let pod = caches.pods().get(key).filter(|pod| is_on(pod, node));
        let fragment = pod.map_or_else(Fragment::default, |pod| {
            let policies = caches.network_policies().in_namespace(&key.namespace);
            plan::pod(&pod, &policies, families)
        });
        rules.put(&owner("pod", key), fragment);
    }
}

pub fn owner(kind: &str, key: &Key) -> Name {
    format!("{kind}/{key}").into()
}

struct Cluster<'a>(&'a Arc<Caches>);

impl View for Cluster<'_> {
    fn pods(&self, namespace: &str) -> Vec<Arc<Pod>> {
        self.0.pods().in_namespace(namespace)
    }

    fn namespaces(&self) -> Vec<Arc<Namespace>> {
        self.0.namespaces().all()
    }
}

//! The shared informers of a process: one cache for each kind that a controller in it reads, and filtered
//! caches for controllers that need only a few objects of a kind with many.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use client::{Client, Object, collection_path};
use k8s_openapi::api::{
    admissionregistration::v1 as admission, apps::v1 as apps, autoscaling::v2 as autoscaling,
    batch::v1 as batch, certificates::v1 as certificates, coordination::v1 as coordination, core::v1 as core,
    discovery::v1 as discovery, networking::v1 as networking, policy::v1 as policy, rbac::v1 as rbac,
    resource::v1 as resource, scheduling::v1 as scheduling, storage::v1 as storage,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::cache::indexer::Indexer;
use crate::cache::{Cache, Index, ORPHANS};

/// Delay before a failed watch is restarted.
const WATCH_RETRY: Duration = Duration::from_secs(1);

/// How long controllers wait for a cache that lacks a write of this process, after the writer has timed out.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(60);

/// A kind that has a cache and possibly filtered caches.
pub trait Cached: Object {
    /// The unfiltered cache, if a controller in this process uses it.
    fn cache(caches: &Caches) -> Option<&Arc<Cache<Self>>>;

    /// Calls back with every filtered cache that a controller in this process uses, and with its filter.
    fn for_each_filtered<'a>(
        caches: &'a Caches,
        found: &mut dyn FnMut(&'a Arc<Cache<Self>>, Predicate<Self>),
    );
}

/// Whether a filtered cache contains an object.
type Predicate<T> = fn(&T) -> bool;

macro_rules! caches {
    ($($name:ident: $kind:ty = $indexes:expr $(, $narrow:ident only $query:literal that $holds:expr)*;)*) => {
        /// All caches. Each one is started on first use.
        pub struct Caches {
            client: Client,
            shutdown: watch::Receiver<bool>,
            /// Whether each started cache has synced.
            synced: Mutex<Vec<watch::Receiver<bool>>>,
            /// Caches that lack a write of this process, with the revision of that write.
            pending_writes: Mutex<Vec<(Arc<Indexer>, u64)>>,
            $(
                $name: OnceLock<Arc<Cache<$kind>>>,
                $($narrow: OnceLock<Arc<Cache<$kind>>>,)*
            )*
        }

        impl Caches {
            pub fn new(client: Client, shutdown: watch::Receiver<bool>) -> Arc<Caches> {
                Arc::new(Caches {
                    client,
                    shutdown,
                    synced: Mutex::default(),
                    pending_writes: Mutex::default(),
                    $($name: OnceLock::new(), $($narrow: OnceLock::new(),)*)*
                })
            }

            $(
                #[doc = concat!("All of kind `", stringify!($kind), "`.")]
                pub fn $name(&self) -> &Arc<Cache<$kind>> {
                    self.$name.get_or_init(|| self.start_informer($indexes, ""))
                }

                $(
                    #[doc = concat!("Of kind `", stringify!($kind), "` only those with `", $query, "`.")]
                    pub fn $narrow(&self) -> &Arc<Cache<$kind>> {
                        self.$narrow.get_or_init(|| self.start_informer(&[], $query))
                    }
                )*
            )*
        }

        $(
            impl Cached for $kind {
                fn cache(caches: &Caches) -> Option<&Arc<Cache<$kind>>> {
                    caches.$name.get()
                }

                #[allow(unused_variables, reason = "most kinds have no filtered cache")]
                fn for_each_filtered<'a>(caches: &'a Caches, found: &mut dyn FnMut(&'a Arc<Cache<$kind>>, Predicate<$kind>)) {
                    $(
                        if let Some(cache) = caches.$narrow.get() {
                            found(cache, $holds);
                        }
                    )*
                }
            }
        )*
    };
}

caches! {
    pods: core::Pod =
        &[Index { name: "node", values: pod_node }, Index { name: "claim", values: pod_claims }, orphans()];
    nodes: core::Node = &[];
    namespaces: core::Namespace = &[];
    services: core::Service = &[Index { name: "ip", values: service_ips }];
    endpoints: core::Endpoints = &[];
    service_accounts: core::ServiceAccount = &[];
    secrets: core::Secret = &[],
        bootstrap_tokens only "fieldSelector=type%3Dbootstrap.kubernetes.io/token" that
            |secret| secret.type_.as_deref() == Some("bootstrap.kubernetes.io/token"),
        account_tokens only "fieldSelector=type%3Dkubernetes.io/service-account-token" that
            |secret| secret.type_.as_deref() == Some("kubernetes.io/service-account-token"),
        tls_secrets only "fieldSelector=type%3Dkubernetes.io/tls" that
            |secret| secret.type_.as_deref() == Some("kubernetes.io/tls");
    config_maps: core::ConfigMap = &[],
        root_certificates only "fieldSelector=metadata.name%3Dkube-root-ca.crt" that
            |map| map.name() == "kube-root-ca.crt",
        cluster_infos only "fieldSelector=metadata.name%3Dcluster-info,metadata.namespace%3Dkube-public" that
            |map| map.name() == "cluster-info" && map.namespace() == "kube-public";
    replication_controllers: core::ReplicationController = &[];
    resource_quotas: core::ResourceQuota = &[];
    limit_ranges: core::LimitRange = &[];
    persistent_volumes: core::PersistentVolume = &[Index { name: "claim", values: volume_claim }];
    persistent_volume_claims: core::PersistentVolumeClaim = &[];
    pod_templates: core::PodTemplate = &[];
    deployments: apps::Deployment = &[];
    replica_sets: apps::ReplicaSet = &[orphans()];
    stateful_sets: apps::StatefulSet = &[];
    daemon_sets: apps::DaemonSet = &[];
    controller_revisions: apps::ControllerRevision = &[orphans()];
    jobs: batch::Job = &[];
    cron_jobs: batch::CronJob = &[];
    autoscalers: autoscaling::HorizontalPodAutoscaler = &[];
    disruption_budgets: policy::PodDisruptionBudget = &[];
    endpoint_slices: discovery::EndpointSlice =
        &[Index { name: "service", values: slice_service }, Index { name: "address", values: slice_addresses }];
    leases: coordination::Lease = &[];
    signing_requests: certificates::CertificateSigningRequest = &[];
    cluster_roles: rbac::ClusterRole = &[];
    cluster_role_bindings: rbac::ClusterRoleBinding = &[];
    roles: rbac::Role = &[];
    role_bindings: rbac::RoleBinding = &[];
    storage_classes: storage::StorageClass = &[];
    volume_attachments: storage::VolumeAttachment = &[Index { name: "node", values: attachment_node }];
    volume_attributes_classes: storage::VolumeAttributesClass = &[];
    csi_nodes: storage::CSINode = &[];
    csi_drivers: storage::CSIDriver = &[];
    csi_storage_capacities: storage::CSIStorageCapacity = &[];
    priority_classes: scheduling::PriorityClass = &[];
    ingresses: networking::Ingress = &[];
    ingress_classes: networking::IngressClass = &[];
    network_policies: networking::NetworkPolicy = &[];
    ip_addresses: networking::IPAddress = &[];
    service_cidrs: networking::ServiceCIDR = &[];
    resource_claims: resource::ResourceClaim = &[];
    resource_claim_templates: resource::ResourceClaimTemplate = &[];
    resource_slices: resource::ResourceSlice = &[];
    device_classes: resource::DeviceClass = &[];
    validating_policies: admission::ValidatingAdmissionPolicy = &[];
}

/// Index by namespace of the objects without a controlling owner, for controllers that adopt.
fn orphans<T: Object>() -> Index<T> {
    let values = |object: &T, found: &mut dyn FnMut(&str)| {
        if object.controller().is_none() {
            found(object.namespace());
        }
    };
    Index { name: ORPHANS, values }
}

fn pod_node(pod: &core::Pod, found: &mut dyn FnMut(&str)) {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).into_iter().for_each(found);
}

/// The names of the claims that a pod uses, including those of its generic ephemeral volumes.
pub fn claims_of(pod: &core::Pod) -> impl Iterator<Item = String> + '_ {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{}-{}", pod.name(), volume.name)),
        _ => None,
    })
}

/// `namespace/name` of the claims that a pod uses.
fn pod_claims(pod: &core::Pod, found: &mut dyn FnMut(&str)) {
    claims_of(pod).for_each(|name| found(&format!("{}/{name}", pod.namespace())));
}

/// `namespace/name` of the claim in a volume's claimRef.
fn volume_claim(volume: &core::PersistentVolume, found: &mut dyn FnMut(&str)) {
    if let Some(claim) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        found(&format!("{}/{}", part(&claim.namespace), part(&claim.name)));
    }
}

fn attachment_node(attachment: &storage::VolumeAttachment, found: &mut dyn FnMut(&str)) {
    found(&attachment.spec.node_name);
}

/// The cluster IPs of a Service, in canonical form.
fn service_ips(service: &core::Service, found: &mut dyn FnMut(&str)) {
    let ips = service.spec.as_ref().and_then(|spec| spec.cluster_ips.as_ref()).into_iter().flatten();
    ips.filter_map(|ip| ip.parse::<std::net::IpAddr>().ok()).for_each(|ip| found(&ip.to_string()));
}

/// The addresses of a slice's endpoints, in canonical form.
fn slice_addresses(slice: &discovery::EndpointSlice, found: &mut dyn FnMut(&str)) {
    let addresses = slice.endpoints.iter().flatten().flat_map(|endpoint| &endpoint.addresses);
    addresses
        .filter_map(|address| address.parse::<std::net::IpAddr>().ok())
        .for_each(|address| found(&address.to_string()));
}

/// `namespace/name` of the slice's Service.
fn slice_service(slice: &discovery::EndpointSlice, found: &mut dyn FnMut(&str)) {
    if let Some(service) = slice.label("kubernetes.io/service-name") {
        found(&format!("{}/{service}", slice.namespace()));
    }
}

impl Caches {
    /// Records a write that did not appear in the cache before the writer's timeout.
    pub(crate) fn add_pending_write(&self, indexer: &Arc<Indexer>, revision: u64) {
        self.pending_writes.lock().push((indexer.clone(), revision));
    }

    /// Waits until every cache contains the writes of this process. A controller that plans from an older
    /// state would repeat actions that are already done.
    pub(crate) async fn wait_for_pending_writes(&self) {
        loop {
            let Some((indexer, revision)) = self.pending_writes.lock().last().cloned() else { return };
            if tokio::time::timeout(CATCH_UP_TIMEOUT, indexer.wait_for_revision(revision)).await.is_err() {
                let seconds = CATCH_UP_TIMEOUT.as_secs();
                tracing::warn!(
                    revision,
                    seconds,
                    "cache did not catch up with writes of this process, controllers continue without it"
                );
            }
            self.pending_writes
                .lock()
                .retain(|(other, later)| !Arc::ptr_eq(other, &indexer) || *later > revision);
        }
    }

    /// Waits until every cache started so far has synced.
    pub async fn wait_for_sync(&self) {
        let synced_list = self.synced.lock().clone();
        for mut synced in synced_list {
            let _ = synced.wait_for(|synced| *synced).await;
        }
    }

    /// `query` is the field or label selector of a filtered cache; empty for all objects.
    fn start_informer<T: Object>(&self, indexes: &[Index<T>], query: &str) -> Arc<Cache<T>> {
        let cache = Cache::new(indexes);
        let path = collection_path::<T>("");
        let path = if query.is_empty() { path } else { format!("{path}?{query}") };
        self.spawn_reflector(cache.indexer.clone(), path);
        cache
    }

    /// Spawns a task that lists and watches `path` into the indexer until shutdown.
    fn spawn_reflector(&self, indexer: Arc<Indexer>, path: String) {
        let (synced, synced_receiver) = watch::channel(false);
        self.synced.lock().push(synced_receiver);
        let watch_task = list_and_watch(indexer.clone(), self.client.clone(), path);
        let mut shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            tokio::join!(
                async {
                    tokio::select! {
                        () = watch_task => {}
                        () = indexer.run_garbage_collector() => {}
                        _ = shutdown.wait_for(|stop| *stop) => {}
                    }
                },
                async {
                    indexer.wait_for_sync().await;
                    synced.send_replace(true);
                }
            )
        });
    }
}

async fn list_and_watch(indexer: Arc<Indexer>, client: Client, path: String) {
    loop {
        let result = match client.connection().watch(&path).await {
            Ok(mut watcher) => indexer.run_watch(&mut *watcher).await,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            tracing::warn!(error = &error as &dyn std::error::Error, path, "watch failed, retrying");
        }
        tokio::time::sleep(WATCH_RETRY).await;
    }
}

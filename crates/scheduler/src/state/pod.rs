//! The parsed form of a pod: small, parsed once, shared. Counterpart of upstream's `PodInfo`.
//!
//! Pods on nodes are kept in this form only. Unscheduled pods keep their object, too, for out-of-tree plugins
//! and extenders.

use std::sync::Arc;

use api::selector::{LabelSelector, Operator, Requirement};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;

use super::labels::{Labels, StringPool};
use super::resources::{Requests, is_sidecar};
use super::selection::{NodeSelection, Toleration, selector};

/// A parsed pod.
#[derive(Clone, Debug, PartialEq)]
pub struct PodInfo {
    pub uid: Arc<str>,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    pub generation: i64,
    pub labels: Labels,
    pub scheduler_name: Arc<str>,
    /// `spec.nodeName`.
    pub node_name: Option<Arc<str>>,
    /// `status.nominatedNodeName`.
    pub nominated: Option<Arc<str>>,
    pub priority: i32,
    /// `preemptionPolicy: Never`.
    pub preemption_disabled: bool,
    /// Has a deletion timestamp.
    pub terminating: bool,
    /// Succeeded or failed: uses no resources any more.
    pub finished: bool,
    /// `status.startTime`, for the order of preemption victims.
    pub started: Option<Timestamp>,
    /// Is being preempted: has the scheduler's `DisruptionTarget` condition.
    pub preempted: bool,
    pub requests: Requests,
    pub tolerations: Box<[Toleration]>,
    pub nodes: NodeSelection,
    pub ports: Box<[HostPort]>,
    /// Images of containers and image volumes, with tags.
    pub images: Box<[Arc<str>]>,
    /// Number of containers including init containers.
    pub containers: usize,
    /// `None` for most pods.
    pub affinity: Option<Box<PodAffinity>>,
    pub spread: Box<[SpreadConstraint]>,
    /// Why affinity or spread constraints could not be parsed.
    pub parse_error: Option<Box<str>>,
    pub volumes: Box<[Volume]>,
    pub claims: Box<[ResourceClaimRef]>,
    /// Requests of the containers, init containers first. Empty unless the pod requests scalar resources.
    pub container_requests: Box<[ContainerRequests]>,
    pub gates: Box<[Arc<str>]>,
    /// The controlling owner.
    pub owner: Option<Owner>,
}

/// The requests of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerRequests {
    pub name: Arc<str>,
    /// An init container that is not a sidecar: it ends before the next one starts.
    pub is_regular_init: bool,
    /// By resource name.
    pub requests: Box<[(Arc<str>, i64)]>,
}

/// A host port of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// `0.0.0.0` for all addresses.
    pub ip: Arc<str>,
    pub protocol: Arc<str>,
    pub port: i32,
}

impl HostPort {
    /// Whether the ports conflict: same port and protocol, and the same address or one on all addresses.
    pub fn conflicts_with(&self, other: &HostPort) -> bool {
        self.port == other.port
            && self.protocol == other.protocol
            && (&*self.ip == "0.0.0.0" || &*other.ip == "0.0.0.0" || self.ip == other.ip)
    }
}

/// Pod affinity and anti-affinity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodAffinity {
    pub required: Vec<Arc<AffinityTerm>>,
    pub required_anti: Vec<Arc<AffinityTerm>>,
    pub preferred: Vec<(i32, Arc<AffinityTerm>)>,
    pub preferred_anti: Vec<(i32, Arc<AffinityTerm>)>,
}

/// A parsed affinity term.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AffinityTerm {
    /// Sorted.
    pub namespaces: Vec<Arc<str>>,
    pub namespace_selector: LabelSelector,
    pub selector: LabelSelector,
    pub topology_key: Arc<str>,
}

impl AffinityTerm {
    /// Whether the term matches a pod, whose namespace has these labels.
    pub fn matches(&self, pod: &PodInfo, namespace: &Labels) -> bool {
        (self.namespaces.contains(&pod.namespace) || namespace.matched_by(&self.namespace_selector))
            && pod.labels.matched_by(&self.selector)
    }
}

/// A parsed topology spread constraint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpreadConstraint {
    pub max_skew: i32,
    pub topology_key: Arc<str>,
    /// `DoNotSchedule`.
    pub hard: bool,
    /// With `matchLabelKeys` merged in.
    pub selector: LabelSelector,
    pub min_domains: i32,
    /// Exclude nodes that do not match the pod's node affinity.
    pub honor_affinity: bool,
    /// Exclude nodes with taints that the pod does not tolerate.
    pub honor_taints: bool,
}

/// The volumes that matter to the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Volume {
    Claim {
        name: Arc<str>,
    },
    /// A generic ephemeral volume, whose claim a controller creates.
    Ephemeral {
        name: Arc<str>,
    },
    GcePersistentDisk {
        name: Box<str>,
        read_only: bool,
    },
    AwsElasticBlockStore {
        id: Box<str>,
    },
    Iscsi {
        iqn: Box<str>,
        read_only: bool,
    },
    Rbd {
        monitors: Box<[String]>,
        pool: Box<str>,
        image: Box<str>,
        read_only: bool,
    },
}

impl Volume {
    /// The name of the volume's claim.
    pub fn claim(&self) -> Option<&Arc<str>> {
        match self {
            Volume::Claim { name } | Volume::Ephemeral { name } => Some(name),
            _ => None,
        }
    }
}

/// A reference of a pod to a ResourceClaim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceClaimRef {
    /// The name within the pod.
    pub name: Arc<str>,
    /// The name of the ResourceClaim; `None` until it is created, `Some("")` if none is needed.
    pub claim: Option<Arc<str>>,
    /// Whether the claim is created from a template.
    pub is_from_template: bool,
}

/// The controlling owner of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub api_version: Arc<str>,
    pub kind: Arc<str>,
    pub name: Arc<str>,
}

impl PodInfo {
    /// Parses a pod.
    pub fn new(pod: &core::Pod, strings: &mut StringPool) -> PodInfo {
        let nothing = core::PodSpec::default();
        let (meta, spec) = (&pod.metadata, pod.spec.as_ref().unwrap_or(&nothing));
        let status = pod.status.as_ref();
        let namespace = strings.get_or_insert(meta.namespace.as_deref().unwrap_or_default());
        let labels = strings.labels(meta.labels.as_ref());
        let filled = |text: Option<&String>, strings: &mut StringPool| {
            text.filter(|text| !text.is_empty()).map(|text| strings.get_or_insert(text))
        };
        let mut parse_error = None;
        let affinity = affinity(spec, &namespace, strings).unwrap_or_else(|message| {
            parse_error = Some(message.into());
            None
        });
        let spread = spread(spec, &labels, strings).unwrap_or_else(|message| {
            parse_error = Some(message.into());
            Box::default()
        });
        let phase = status.and_then(|status| status.phase.as_deref());
        let requests = Requests::of(pod, strings);
        PodInfo {
            uid: meta.uid.as_deref().unwrap_or_default().into(),
            name: meta.name.as_deref().unwrap_or_default().into(),
            generation: meta.generation.unwrap_or_default(),
            scheduler_name: strings
                .get_or_insert(spec.scheduler_name.as_deref().unwrap_or("default-scheduler")),
            node_name: filled(spec.node_name.as_ref(), strings),
            nominated: filled(status.and_then(|status| status.nominated_node_name.as_ref()), strings),
            priority: spec.priority.unwrap_or_default(),
            preemption_disabled: spec.preemption_policy.as_deref() == Some("Never"),
            terminating: meta.deletion_timestamp.is_some(),
            finished: matches!(phase, Some("Succeeded" | "Failed")),
            started: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            preempted: is_preempted(status),
            container_requests: if requests.exact.scalar.is_empty() {
                Box::default()
            } else {
                container_requests(spec, strings)
            },
            requests,
            tolerations: spec.tolerations.iter().flatten().filter_map(Toleration::read).collect(),
            nodes: NodeSelection::of(spec),
            ports: ports(spec, strings),
            images: images(spec, strings),
            containers: spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len),
            affinity,
            spread,
            parse_error,
            volumes: volumes(spec, meta.name.as_deref().unwrap_or_default(), strings),
            claims: claims(spec, status, strings),
            gates: spec
                .scheduling_gates
                .iter()
                .flatten()
                .map(|gate| strings.get_or_insert(&gate.name))
                .collect(),
            owner: owner(pod, strings),
            namespace,
            labels,
        }
    }

    /// `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Terms of required pod affinity.
    pub fn required(&self) -> &[Arc<AffinityTerm>] {
        self.affinity.as_deref().map_or(&[], |affinity| &affinity.required)
    }

    /// Terms of required pod anti-affinity.
    pub fn required_anti(&self) -> &[Arc<AffinityTerm>] {
        self.affinity.as_deref().map_or(&[], |affinity| &affinity.required_anti)
    }

    /// The names of the PersistentVolumeClaims in the pod's volumes, without generic ephemeral volumes.
    pub fn named_claims(&self) -> impl Iterator<Item = &Arc<str>> {
        self.volumes.iter().filter_map(|volume| match volume {
            Volume::Claim { name } => Some(name),
            _ => None,
        })
    }
}

fn is_preempted(status: Option<&core::PodStatus>) -> bool {
    let conditions = status.and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| {
        condition.type_ == "DisruptionTarget"
            && condition.status == "True"
            && condition.reason.as_deref() == Some("PreemptionByScheduler")
    })
}

fn ports(spec: &core::PodSpec, strings: &mut StringPool) -> Box<[HostPort]> {
    let sidecars = spec.init_containers.iter().flatten().filter(|container| is_sidecar(container));
    let ports = sidecars.chain(&spec.containers).flat_map(|container| container.ports.iter().flatten());
    let mut found = Vec::new();
    for port in ports {
        let Some(number) = port.host_port.filter(|number| *number > 0) else { continue };
        let or = |text: Option<&String>, default: &'static str, strings: &mut StringPool| {
            strings.get_or_insert(text.map(String::as_str).filter(|text| !text.is_empty()).unwrap_or(default))
        };
        found.push(HostPort {
            ip: or(port.host_ip.as_ref(), "0.0.0.0", strings),
            protocol: or(port.protocol.as_ref(), "TCP", strings),
            port: number,
        });
    }
    found.into()
}

fn images(spec: &core::PodSpec, strings: &mut StringPool) -> Box<[Arc<str>]> {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let of_containers = containers.filter_map(|container| container.image.as_deref());
    let volumes = spec.volumes.iter().flatten();
    let of_volumes = volumes.filter_map(|volume| volume.image.as_ref()?.reference.as_deref());
    of_containers
        .chain(of_volumes)
        .map(|image| strings.get_or_insert(&normalized_image_name(image)))
        .collect()
}

/// Adds the default tag `latest` to an image name without a tag.
fn normalized_image_name(image: &str) -> std::borrow::Cow<'_, str> {
    if image.rfind(':') > image.rfind('/') { image.into() } else { format!("{image}:latest").into() }
}

fn affinity(
    spec: &core::PodSpec,
    namespace: &Arc<str>,
    strings: &mut StringPool,
) -> Result<Option<Box<PodAffinity>>, String> {
    let Some(object) = &spec.affinity else { return Ok(None) };
    let mut affinity = PodAffinity::default();
    if let Some(pods) = &object.pod_affinity {
        let required = pods.required_during_scheduling_ignored_during_execution.as_deref();
        affinity.required = terms(required.unwrap_or_default(), namespace, strings)
            .map_err(|message| format!("requiredAffinityTerms: {message}"))?;
        let preferred = pods.preferred_during_scheduling_ignored_during_execution.as_deref();
        affinity.preferred = weighted_terms(preferred.unwrap_or_default(), namespace, strings)
            .map_err(|message| format!("preferredAffinityTerms: {message}"))?;
    }
    if let Some(pods) = &object.pod_anti_affinity {
        let required = pods.required_during_scheduling_ignored_during_execution.as_deref();
        affinity.required_anti = terms(required.unwrap_or_default(), namespace, strings)
            .map_err(|message| format!("requiredAntiAffinityTerms: {message}"))?;
        let preferred = pods.preferred_during_scheduling_ignored_during_execution.as_deref();
        affinity.preferred_anti = weighted_terms(preferred.unwrap_or_default(), namespace, strings)
            .map_err(|message| format!("preferredAntiAffinityTerms: {message}"))?;
    }
    Ok((affinity != PodAffinity::default()).then(|| Box::new(affinity)))
}

type AffinityTerms = Vec<Arc<AffinityTerm>>;

fn terms(
    object: &[core::PodAffinityTerm],
    own: &Arc<str>,
    strings: &mut StringPool,
) -> Result<AffinityTerms, String> {
    object.iter().map(|object| term(object, own, strings)).collect()
}

fn weighted_terms(
    object: &[core::WeightedPodAffinityTerm],
    own: &Arc<str>,
    strings: &mut StringPool,
) -> Result<Vec<(i32, Arc<AffinityTerm>)>, String> {
    object.iter().map(|object| Ok((object.weight, term(&object.pod_affinity_term, own, strings)?))).collect()
}

fn term(
    object: &core::PodAffinityTerm,
    own: &Arc<str>,
    strings: &mut StringPool,
) -> Result<Arc<AffinityTerm>, String> {
    let named = object.namespaces.as_deref().unwrap_or_default();
    let mut namespaces: Vec<_> = named.iter().map(|name| strings.get_or_insert(name)).collect();
    if namespaces.is_empty() && object.namespace_selector.is_none() {
        namespaces.push(own.clone());
    }
    namespaces.sort();
    Ok(Arc::new(AffinityTerm {
        namespaces,
        namespace_selector: selector(object.namespace_selector.as_ref())?,
        selector: selector(object.label_selector.as_ref())?,
        topology_key: strings.get_or_insert(&object.topology_key),
    }))
}

fn spread(
    spec: &core::PodSpec,
    labels: &Labels,
    strings: &mut StringPool,
) -> Result<Box<[SpreadConstraint]>, String> {
    let object = spec.topology_spread_constraints.iter().flatten();
    object.map(|object| spread_constraint(object, labels, strings)).collect()
}

/// Parses a constraint for a pod with these labels.
pub fn spread_constraint(
    object: &core::TopologySpreadConstraint,
    labels: &Labels,
    strings: &mut StringPool,
) -> Result<SpreadConstraint, String> {
    let mut selector = selector(object.label_selector.as_ref())?;
    let keys = object.match_label_keys.as_deref().unwrap_or_default();
    if !selector.is_nothing() && !keys.is_empty() {
        let mut requirements = selector.requirements().to_vec();
        for key in keys {
            let Some(value) = labels.get(key) else { continue };
            let known = requirements.iter().any(|requirement| {
                requirement.key == *key && requirement.values.len() == 1 && requirement.values[0] == value
            });
            if !known {
                let values = vec![value.to_owned()];
                requirements.push(Requirement { key: key.clone(), operator: Operator::In, values });
            }
        }
        selector = LabelSelector::new(requirements);
    }
    Ok(SpreadConstraint {
        max_skew: object.max_skew,
        topology_key: strings.get_or_insert(&object.topology_key),
        hard: object.when_unsatisfiable == "DoNotSchedule",
        selector,
        min_domains: object.min_domains.unwrap_or(1),
        honor_affinity: object.node_affinity_policy.as_deref() != Some("Ignore"),
        honor_taints: object.node_taints_policy.as_deref() == Some("Honor"),
    })
}

fn volumes(spec: &core::PodSpec, pod: &str, strings: &mut StringPool) -> Box<[Volume]> {
    let read = |volume: &core::Volume| {
        if let Some(claim) = &volume.persistent_volume_claim {
            return Some(Volume::Claim { name: strings.get_or_insert(&claim.claim_name) });
        }
        if volume.ephemeral.is_some() {
            return Some(Volume::Ephemeral {
                name: strings.get_or_insert(&format!("{pod}-{}", volume.name)),
            });
        }
        if let Some(disk) = &volume.gce_persistent_disk {
            let read_only = disk.read_only.unwrap_or_default();
            return Some(Volume::GcePersistentDisk { name: (&*disk.pd_name).into(), read_only });
        }
        if let Some(disk) = &volume.aws_elastic_block_store {
            return Some(Volume::AwsElasticBlockStore { id: (&*disk.volume_id).into() });
        }
        if let Some(disk) = &volume.iscsi {
            let read_only = disk.read_only.unwrap_or_default();
            return Some(Volume::Iscsi { iqn: (&*disk.iqn).into(), read_only });
        }
        volume.rbd.as_ref().map(|disk| Volume::Rbd {
            monitors: disk.monitors.clone().into(),
            pool: disk.pool.as_deref().unwrap_or("rbd").into(),
            image: (&*disk.image).into(),
            read_only: disk.read_only.unwrap_or_default(),
        })
    };
    spec.volumes.iter().flatten().filter_map(read).collect()
}

fn claims(
    spec: &core::PodSpec,
    status: Option<&core::PodStatus>,
    strings: &mut StringPool,
) -> Box<[ResourceClaimRef]> {
    let known = status.and_then(|status| status.resource_claim_statuses.as_deref()).unwrap_or_default();
    let mut read = |claim: &core::PodResourceClaim| {
        let claim_status = known.iter().find(|status| status.name == claim.name);
        let name = match claim_status {
            Some(status) => Some(status.resource_claim_name.as_deref().unwrap_or_default()),
            None => claim.resource_claim_name.as_deref(),
        };
        ResourceClaimRef {
            name: strings.get_or_insert(&claim.name),
            claim: name.map(|name| strings.get_or_insert(name)),
            is_from_template: claim.resource_claim_template_name.is_some(),
        }
    };
    spec.resource_claims.iter().flatten().map(&mut read).collect()
}

fn container_requests(spec: &core::PodSpec, strings: &mut StringPool) -> Box<[ContainerRequests]> {
    let before = spec.init_containers.iter().flatten().map(|container| (container, true));
    let all = before.chain(spec.containers.iter().map(|container| (container, false)));
    all.map(|(container, init)| {
        let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        let amount = |text: &str| schema::quantity::Quantity::parse(text).map_or(0, |amount| amount.value());
        ContainerRequests {
            name: container.name.as_str().into(),
            is_regular_init: init && container.restart_policy.as_deref() != Some("Always"),
            requests: requests
                .into_iter()
                .flatten()
                .map(|(name, text)| (strings.get_or_insert(name), amount(&text.0)))
                .collect(),
        }
    })
    .collect()
}

fn owner(pod: &core::Pod, strings: &mut StringPool) -> Option<Owner> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let owner = owners.iter().find(|owner| owner.controller == Some(true))?;
    Some(Owner {
        api_version: strings.get_or_insert(&owner.api_version),
        kind: strings.get_or_insert(&owner.kind),
        name: strings.get_or_insert(&owner.name),
    })
}

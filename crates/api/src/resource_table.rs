//! The table of built-in resources. Routes, discovery, OpenAPI paths, storage keys, RBAC names and
//! printer columns are derived from it.

use crate::custom::CrdHandle;
use crate::strategy::RestStrategy;
use crate::{
    admissionregistration, apiextensions, apiregistration, apps, authentication, authorization, autoscaling,
    batch, certificates, coordination, core, discovery, events, flowcontrol, networking, node, policy, rbac,
    resource, scheduling, storage,
};

/// A row: a resource in one group and version.
pub struct Resource {
    /// `""` for the core group.
    pub group: &'static str,
    pub version: &'static str,
    pub kind: &'static str,
    pub plural: &'static str,
    pub short_names: &'static [&'static str],
    pub categories: &'static [&'static str],
    pub namespaced: bool,
    pub verbs: Verbs,
    pub subresources: &'static [Subresource],
    /// Where objects are stored. Resources that share a stored kind (Events, HorizontalPodAutoscalers)
    /// are converted on reads and writes.
    pub storage: Storage,
    /// Whether `metadata.generation` counts changes outside of metadata and status.
    pub generation: bool,
    pub strategy: &'static dyn RestStrategy,
    /// The CRD of a custom resource; `None` for built-in ones.
    pub custom: Option<&'static CrdHandle>,
}

/// The verbs of the main resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbs {
    /// create delete deletecollection get list patch update watch
    All,
    /// All but deletecollection (namespaces, services before 1.23).
    NoDeleteCollection,
    /// Only create, without storage: reviews.
    CreateOnly,
    /// componentstatuses
    GetList,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subresource {
    pub name: &'static str,
    /// The group and version of `kind` if they differ from those of the row, as for `autoscaling/v1` Scale.
    pub group_version: Option<(&'static str, &'static str)>,
    pub kind: &'static str,
    pub verbs: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Under `/registry/<group?>/<plural>/`, in this version.
    Own,
    /// Stored as another row: (group, version, plural).
    StoredAs(&'static str, &'static str, &'static str),
    /// Never stored (reviews).
    None,
}

pub(crate) const STATUS: Subresource = subresource("status", "", &["get", "patch", "update"]);
const FINALIZE: Subresource = subresource("finalize", "", &["update"]);
const APPROVAL: Subresource = subresource("approval", "", &["get", "patch", "update"]);
const EPHEMERAL_CONTAINERS: Subresource = subresource("ephemeralcontainers", "", &["get", "patch", "update"]);
const RESIZE: Subresource = subresource("resize", "", &["get", "patch", "update"]);
const LOG: Subresource = subresource("log", "", &["get"]);
const BINDING: Subresource = subresource("binding", "Binding", &["create"]);
const EVICTION: Subresource =
    subresource("eviction", "Eviction", &["create"]).with_group_version("policy", "v1");
const TOKEN: Subresource =
    subresource("token", "TokenRequest", &["create"]).with_group_version("authentication.k8s.io", "v1");
pub(crate) const SCALE: Subresource =
    subresource("scale", "Scale", &["get", "patch", "update"]).with_group_version("autoscaling", "v1");
const ATTACH: Subresource = subresource("attach", "PodAttachOptions", &["create", "get"]);
const EXEC: Subresource = subresource("exec", "PodExecOptions", &["create", "get"]);
const PORT_FORWARD: Subresource = subresource("portforward", "PodPortForwardOptions", &["create", "get"]);
const POD_PROXY: Subresource = subresource("proxy", "PodProxyOptions", PROXY_VERBS);
const SERVICE_PROXY: Subresource = subresource("proxy", "ServiceProxyOptions", PROXY_VERBS);
const NODE_PROXY: Subresource = subresource("proxy", "NodeProxyOptions", PROXY_VERBS);
const PROXY_VERBS: &[&str] = &["create", "delete", "get", "patch", "update"];

/// In upstream's order of groups, then by name.
#[rustfmt::skip]
pub static RESOURCES: &[Resource] = &[
    new_resource("", "v1", "Binding", "bindings", &core::binding::Binding).verbs(Verbs::CreateOnly).storage(Storage::None),
    new_resource("", "v1", "ComponentStatus", "componentstatuses", &core::component_status::ComponentStatus).cluster_scoped().short_names(&["cs"]).verbs(Verbs::GetList).storage(Storage::None),
    new_resource("", "v1", "ConfigMap", "configmaps", &core::config_map::ConfigMap).short_names(&["cm"]),
    new_resource("", "v1", "Endpoints", "endpoints", &core::endpoints::Endpoints).short_names(&["ep"]),
    new_resource("", "v1", "Event", "events", &core::event::Event).short_names(&["ev"]),
    new_resource("", "v1", "LimitRange", "limitranges", &core::limit_range::LimitRange).short_names(&["limits"]),
    new_resource("", "v1", "Namespace", "namespaces", &core::namespace::Namespace).cluster_scoped().short_names(&["ns"]).verbs(Verbs::NoDeleteCollection).subresources(&[FINALIZE, STATUS]),
    new_resource("", "v1", "Node", "nodes", &core::node::Node).cluster_scoped().short_names(&["no"]).subresources(&[NODE_PROXY, STATUS]),
    new_resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", &core::persistent_volume_claim::PersistentVolumeClaim).short_names(&["pvc"]).subresources(&[STATUS]),
    new_resource("", "v1", "PersistentVolume", "persistentvolumes", &core::persistent_volume::PersistentVolume).cluster_scoped().short_names(&["pv"]).subresources(&[STATUS]),
    new_resource("", "v1", "Pod", "pods", &core::pod::Pod).short_names(&["po"]).categories(&["all"]).subresources(&[ATTACH, BINDING, EPHEMERAL_CONTAINERS, EVICTION, EXEC, LOG, PORT_FORWARD, POD_PROXY, RESIZE, STATUS]).generation(),
    new_resource("", "v1", "PodTemplate", "podtemplates", &core::pod_template::PodTemplate).generation(),
    new_resource("", "v1", "ReplicationController", "replicationcontrollers", &core::replication_controller::ReplicationController).short_names(&["rc"]).categories(&["all"]).subresources(&[SCALE, STATUS]).generation(),
    new_resource("", "v1", "ResourceQuota", "resourcequotas", &core::resource_quota::ResourceQuota).short_names(&["quota"]).subresources(&[STATUS]),
    new_resource("", "v1", "Secret", "secrets", &core::secret::Secret),
    new_resource("", "v1", "ServiceAccount", "serviceaccounts", &core::service_account::ServiceAccount).short_names(&["sa"]).subresources(&[TOKEN]),
    new_resource("", "v1", "Service", "services", &core::service::Service).short_names(&["svc"]).categories(&["all"]).subresources(&[SERVICE_PROXY, STATUS]),
    new_resource("admissionregistration.k8s.io", "v1", "MutatingAdmissionPolicy", "mutatingadmissionpolicies", &admissionregistration::mutating_admission_policy::MutatingAdmissionPolicy).cluster_scoped().categories(&["api-extensions"]).generation(),
    new_resource("admissionregistration.k8s.io", "v1", "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", &admissionregistration::mutating_admission_policy_binding::MutatingAdmissionPolicyBinding).cluster_scoped().categories(&["api-extensions"]).generation(),
    new_resource("admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", &admissionregistration::mutating_webhook_configuration::MutatingWebhookConfiguration).cluster_scoped().categories(&["api-extensions"]).generation(),
    new_resource("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", &admissionregistration::validating_admission_policy::ValidatingAdmissionPolicy).cluster_scoped().categories(&["api-extensions"]).subresources(&[STATUS]).generation(),
    new_resource("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", &admissionregistration::validating_admission_policy_binding::ValidatingAdmissionPolicyBinding).cluster_scoped().categories(&["api-extensions"]).generation(),
    new_resource("admissionregistration.k8s.io", "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", &admissionregistration::validating_webhook_configuration::ValidatingWebhookConfiguration).cluster_scoped().categories(&["api-extensions"]).generation(),
    new_resource("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", &apiextensions::custom_resource_definition::CustomResourceDefinition).cluster_scoped().short_names(&["crd", "crds"]).categories(&["api-extensions"]).subresources(&[STATUS]).generation(),
    new_resource("apiregistration.k8s.io", "v1", "APIService", "apiservices", &apiregistration::api_service::APIService).cluster_scoped().categories(&["api-extensions"]).subresources(&[STATUS]),
    new_resource("apps", "v1", "ControllerRevision", "controllerrevisions", &apps::controller_revision::ControllerRevision),
    new_resource("apps", "v1", "DaemonSet", "daemonsets", &apps::daemon_set::DaemonSet).short_names(&["ds"]).categories(&["all"]).subresources(&[STATUS]).generation(),
    new_resource("apps", "v1", "Deployment", "deployments", &apps::deployment::Deployment).short_names(&["deploy"]).categories(&["all"]).subresources(&[SCALE, STATUS]).generation(),
    new_resource("apps", "v1", "ReplicaSet", "replicasets", &apps::replica_set::ReplicaSet).short_names(&["rs"]).categories(&["all"]).subresources(&[SCALE, STATUS]).generation(),
    new_resource("apps", "v1", "StatefulSet", "statefulsets", &apps::stateful_set::StatefulSet).short_names(&["sts"]).categories(&["all"]).subresources(&[SCALE, STATUS]).generation(),
    new_resource("authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews", &authentication::self_subject_review::SelfSubjectReview).cluster_scoped().verbs(Verbs::CreateOnly).storage(Storage::None),
    new_resource("authentication.k8s.io", "v1", "TokenReview", "tokenreviews", &authentication::token_review::TokenReview).cluster_scoped().verbs(Verbs::CreateOnly).storage(Storage::None),
    new_resource("authorization.k8s.io", "v1", "LocalSubjectAccessReview", "localsubjectaccessreviews", &authorization::local_subject_access_review::LocalSubjectAccessReview).verbs(Verbs::CreateOnly).storage(Storage::None),
    new_resource("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", &authorization::self_subject_access_review::SelfSubjectAccessReview).cluster_scoped().verbs(Verbs::CreateOnly).storage(Storage::None),
    new_resource("authorization.k8s.io", "v1", "SelfSubjectRulesReview", "selfsubjectrulesreviews", &authorization::self_subject_rules_review::SelfSubjectRulesReview).cluster_scoped().verbs(Verbs::CreateOnly).storage(Storage::None),
    new_resource("authorization.k8s.io", "v1", "SubjectAccessReview", "subjectaccessreviews", &authorization::subject_access_review::SubjectAccessReview).cluster_scoped().verbs(Verbs::CreateOnly).storage(Storage::None),
    new_resource("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", &autoscaling::horizontal_pod_autoscaler::HorizontalPodAutoscaler).short_names(&["hpa"]).categories(&["all"]).subresources(&[STATUS]),
    new_resource("autoscaling", "v1", "HorizontalPodAutoscaler", "horizontalpodautoscalers", &autoscaling::horizontal_pod_autoscaler::HorizontalPodAutoscaler).short_names(&["hpa"]).categories(&["all"]).subresources(&[STATUS]).storage(Storage::StoredAs("autoscaling", "v2", "horizontalpodautoscalers")),
    new_resource("batch", "v1", "CronJob", "cronjobs", &batch::cron_job::CronJob).short_names(&["cj"]).categories(&["all"]).subresources(&[STATUS]).generation(),
    new_resource("batch", "v1", "Job", "jobs", &batch::job::Job).categories(&["all"]).subresources(&[STATUS]).generation(),
    new_resource("certificates.k8s.io", "v1", "CertificateSigningRequest", "certificatesigningrequests", &certificates::certificate_signing_request::CertificateSigningRequest).cluster_scoped().short_names(&["csr"]).subresources(&[APPROVAL, STATUS]),
    new_resource("coordination.k8s.io", "v1", "Lease", "leases", &coordination::lease::Lease),
    new_resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", &discovery::endpoint_slice::EndpointSlice).generation(),
    new_resource("events.k8s.io", "v1", "Event", "events", &events::event::Event).short_names(&["ev"]).storage(Storage::StoredAs("", "v1", "events")),
    new_resource("flowcontrol.apiserver.k8s.io", "v1", "FlowSchema", "flowschemas", &flowcontrol::flow_schema::FlowSchema).cluster_scoped().subresources(&[STATUS]).generation(),
    new_resource("flowcontrol.apiserver.k8s.io", "v1", "PriorityLevelConfiguration", "prioritylevelconfigurations", &flowcontrol::priority_level_configuration::PriorityLevelConfiguration).cluster_scoped().subresources(&[STATUS]).generation(),
    new_resource("networking.k8s.io", "v1", "IngressClass", "ingressclasses", &networking::ingress_class::IngressClass).cluster_scoped().generation(),
    new_resource("networking.k8s.io", "v1", "Ingress", "ingresses", &networking::ingress::Ingress).short_names(&["ing"]).subresources(&[STATUS]).generation(),
    new_resource("networking.k8s.io", "v1", "IPAddress", "ipaddresses", &networking::ip_address::IPAddress).cluster_scoped().short_names(&["ip"]),
    new_resource("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", &networking::network_policy::NetworkPolicy).short_names(&["netpol"]).generation(),
    new_resource("networking.k8s.io", "v1", "ServiceCIDR", "servicecidrs", &networking::service_cidr::ServiceCIDR).cluster_scoped().subresources(&[STATUS]),
    new_resource("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses", &node::runtime_class::RuntimeClass).cluster_scoped(),
    new_resource("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", &policy::pod_disruption_budget::PodDisruptionBudget).short_names(&["pdb"]).subresources(&[STATUS]).generation(),
    new_resource("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", &rbac::cluster_role_binding::ClusterRoleBinding).cluster_scoped(),
    new_resource("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", &rbac::cluster_role::ClusterRole).cluster_scoped(),
    new_resource("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings", &rbac::role_binding::RoleBinding),
    new_resource("rbac.authorization.k8s.io", "v1", "Role", "roles", &rbac::role::Role),
    new_resource("resource.k8s.io", "v1", "DeviceClass", "deviceclasses", &resource::device_class::DeviceClass).cluster_scoped().generation(),
    new_resource("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims", &resource::resource_claim::ResourceClaim).subresources(&[STATUS]),
    new_resource("resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates", &resource::resource_claim_template::ResourceClaimTemplate),
    new_resource("resource.k8s.io", "v1", "ResourceSlice", "resourceslices", &resource::resource_slice::ResourceSlice).cluster_scoped().generation(),
    new_resource("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", &scheduling::priority_class::PriorityClass).cluster_scoped().short_names(&["pc"]).generation(),
    new_resource("storage.k8s.io", "v1", "CSIDriver", "csidrivers", &storage::csi_driver::CSIDriver).cluster_scoped(),
    new_resource("storage.k8s.io", "v1", "CSINode", "csinodes", &storage::csi_node::CSINode).cluster_scoped(),
    new_resource("storage.k8s.io", "v1", "CSIStorageCapacity", "csistoragecapacities", &storage::csi_storage_capacity::CSIStorageCapacity),
    new_resource("storage.k8s.io", "v1", "StorageClass", "storageclasses", &storage::storage_class::StorageClass).cluster_scoped().short_names(&["sc"]),
    new_resource("storage.k8s.io", "v1", "VolumeAttachment", "volumeattachments", &storage::volume_attachment::VolumeAttachment).cluster_scoped().subresources(&[STATUS]),
    new_resource("storage.k8s.io", "v1", "VolumeAttributesClass", "volumeattributesclasses", &storage::volume_attributes_class::VolumeAttributesClass).cluster_scoped().short_names(&["vac"]),
];

const fn new_resource(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    strategy: &'static dyn RestStrategy,
) -> Resource {
    Resource {
        group,
        version,
        kind,
        plural,
        short_names: &[],
        categories: &[],
        namespaced: true,
        verbs: Verbs::All,
        subresources: &[],
        storage: Storage::Own,
        generation: false,
        strategy,
        custom: None,
    }
}

/// Finds a row by its resource.
pub fn find_resource(group: &str, version: &str, plural: &str) -> Option<&'static Resource> {
    RESOURCES.iter().find(|row| row.plural == plural && row.group == group && row.version == version)
}

/// Finds a row by its kind.
pub fn find_kind(group: &str, version: &str, kind: &str) -> Option<&'static Resource> {
    RESOURCES.iter().find(|row| row.kind == kind && row.group == group && row.version == version)
}

impl Resource {
    /// The row in whose version objects are stored; `None` if they are not stored.
    pub fn storage_resource(&'static self) -> Option<&'static Resource> {
        match self.storage {
            Storage::Own => Some(self),
            Storage::StoredAs(group, version, plural) => find_resource(group, version, plural),
            Storage::None => None,
        }
    }

    pub fn subresource(&self, name: &str) -> Option<&Subresource> {
        self.subresources.iter().find(|sub| sub.name == name)
    }

    pub fn has_status(&self) -> bool {
        self.subresource("status").is_some()
    }

    /// `apps/v1`, or `v1` for the core group.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    pub fn list_kind(&self) -> String {
        self.custom.map_or_else(|| format!("{}List", self.kind), |handle| handle.list_kind.to_owned())
    }

    pub fn singular(&self) -> String {
        self.custom.map_or_else(|| self.kind.to_lowercase(), |handle| handle.singular.to_owned())
    }

    /// The verbs of the main resource, sorted.
    pub fn verb_names(&self) -> &'static [&'static str] {
        match self.verbs {
            Verbs::All => {
                &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
            }
            Verbs::NoDeleteCollection => &["create", "delete", "get", "list", "patch", "update", "watch"],
            Verbs::CreateOnly => &["create"],
            Verbs::GetList => &["get", "list"],
        }
    }

    const fn cluster_scoped(mut self) -> Resource {
        self.namespaced = false;
        self
    }

    const fn short_names(mut self, names: &'static [&'static str]) -> Resource {
        self.short_names = names;
        self
    }

    const fn categories(mut self, categories: &'static [&'static str]) -> Resource {
        self.categories = categories;
        self
    }

    const fn verbs(mut self, verbs: Verbs) -> Resource {
        self.verbs = verbs;
        self
    }

    const fn subresources(mut self, subresources: &'static [Subresource]) -> Resource {
        self.subresources = subresources;
        self
    }

    const fn generation(mut self) -> Resource {
        self.generation = true;
        self
    }

    const fn storage(mut self, storage: Storage) -> Resource {
        self.storage = storage;
        self
    }
}

/// An empty `kind` stands for the kind of the row.
const fn subresource(name: &'static str, kind: &'static str, verbs: &'static [&'static str]) -> Subresource {
    Subresource { name, group_version: None, kind, verbs }
}

impl Subresource {
    const fn with_group_version(mut self, group: &'static str, version: &'static str) -> Subresource {
        self.group_version = Some((group, version));
        self
    }
}

#[cfg(test)]
mod tests;

//! The columns of every kind in upstream's order. Only data.

mod docs;

use super::CellSource::{
    Age, Compute, ComputeAge, ComputeString, Count, Flag, FlagOrTrue, Int, IntOr, Text, TextOr,
};
use super::{CellSource, Column, admission, batch, cluster, network, pod, storage, text};
use crate::json::JsonExt as _;

/// Columns of kinds without their own.
pub static DEFAULT_COLUMNS: &[Column] = &[
    NAME,
    Column { kind: "date", ..string("Created At", AGE_DESCRIPTION, ComputeString(cluster::created_at)) },
];

/// `(group, plural, columns)`.
#[rustfmt::skip]
pub static TABLES: &[(&str, &str, &[Column])] = &[
    ("", "componentstatuses", &[
        NAME,
        string("Status", "Status of the component conditions", ComputeString(cluster::component_status)),
        string("Message", "Message of the component conditions", ComputeString(cluster::component_message)),
        string("Error", "Error of the component conditions", ComputeString(cluster::component_error)),
    ]),
    ("", "configmaps", &[NAME, string("Data", docs::CONFIG_MAP_DATA, Compute(cluster::config_map_entries)), AGE]),
    ("", "endpoints", &[NAME, string("Endpoints", docs::ENDPOINTS_SUBSETS, ComputeString(network::endpoints)), AGE]),
    ("", "events", EVENTS),
    ("events.k8s.io", "events", EVENTS),
    ("", "namespaces", &[NAME, string("Status", "The status of the namespace", Text("status.phase")), AGE]),
    ("", "nodes", &[
        NAME,
        string("Status", "The status of the node", ComputeString(cluster::node_status)),
        string("Roles", "The roles of the node", ComputeString(cluster::node_roles)),
        AGE,
        string("Version", docs::NODE_SYSTEM_INFO_KUBELET_VERSION, Text("status.nodeInfo.kubeletVersion")),
        wide("Internal-IP", docs::NODE_STATUS_ADDRESSES, ComputeString(cluster::internal_ip)),
        wide("External-IP", docs::NODE_STATUS_ADDRESSES, ComputeString(cluster::external_ip)),
        wide("OS-Image", docs::NODE_SYSTEM_INFO_OS_IMAGE, TextOr("status.nodeInfo.osImage", "<unknown>")),
        wide("Kernel-Version", docs::NODE_SYSTEM_INFO_KERNEL_VERSION, ComputeString(cluster::kernel)),
        wide("Container-Runtime", docs::NODE_SYSTEM_INFO_CONTAINER_RUNTIME_VERSION, TextOr("status.nodeInfo.containerRuntimeVersion", "<unknown>")),
    ]),
    ("", "persistentvolumeclaims", &[
        NAME,
        string("Status", docs::PERSISTENT_VOLUME_CLAIM_STATUS_PHASE, ComputeString(storage::phase)),
        string("Volume", docs::PERSISTENT_VOLUME_CLAIM_SPEC_VOLUME_NAME, Text("spec.volumeName")),
        string("Capacity", docs::PERSISTENT_VOLUME_CLAIM_STATUS_CAPACITY, ComputeString(storage::claim_capacity)),
        string("Access Modes", docs::PERSISTENT_VOLUME_CLAIM_STATUS_ACCESS_MODES, ComputeString(storage::claim_modes)),
        string("StorageClass", "StorageClass of the pvc", ComputeString(storage::class)),
        string("VolumeAttributesClass", "VolumeAttributesClass of the pvc", TextOr("spec.volumeAttributesClassName", "<unset>")),
        AGE,
        wide("VolumeMode", docs::PERSISTENT_VOLUME_CLAIM_SPEC_VOLUME_MODE, TextOr("spec.volumeMode", "<unset>")),
    ]),
    ("", "persistentvolumes", &[
        NAME,
        string("Capacity", docs::PERSISTENT_VOLUME_SPEC_CAPACITY, ComputeString(storage::volume_capacity)),
        string("Access Modes", docs::PERSISTENT_VOLUME_SPEC_ACCESS_MODES, ComputeString(storage::volume_modes)),
        string("Reclaim Policy", docs::PERSISTENT_VOLUME_SPEC_PERSISTENT_VOLUME_RECLAIM_POLICY, Text("spec.persistentVolumeReclaimPolicy")),
        string("Status", docs::PERSISTENT_VOLUME_STATUS_PHASE, ComputeString(storage::phase)),
        string("Claim", docs::PERSISTENT_VOLUME_SPEC_CLAIM_REF, ComputeString(storage::volume_claim)),
        string("StorageClass", "StorageClass of the pv", ComputeString(storage::class)),
        string("VolumeAttributesClass", "VolumeAttributesClass of the pv", TextOr("spec.volumeAttributesClassName", "<unset>")),
        string("Reason", docs::PERSISTENT_VOLUME_STATUS_REASON, Text("status.reason")),
        AGE,
        wide("VolumeMode", docs::PERSISTENT_VOLUME_SPEC_VOLUME_MODE, TextOr("spec.volumeMode", "<unset>")),
    ]),
    ("", "pods", &[
        NAME,
        string("Ready", "The aggregate readiness state of this pod for accepting traffic.", ComputeString(pod::ready)),
        string("Status", "The aggregate status of the containers in this pod.", ComputeString(pod::status)),
        string("Restarts", "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted.", ComputeAge(pod::restarts)),
        AGE,
        wide("IP", docs::POD_STATUS_POD_IP, ComputeString(pod::ip)),
        wide("Node", docs::POD_SPEC_NODE_NAME, TextOr("spec.nodeName", "<none>")),
        wide("Nominated Node", docs::POD_STATUS_NOMINATED_NODE_NAME, TextOr("status.nominatedNodeName", "<none>")),
        wide("Readiness Gates", docs::POD_SPEC_READINESS_GATES, ComputeString(pod::readiness_gates)),
    ]),
    ("", "podtemplates", &[
        NAME,
        string("Containers", CONTAINERS, ComputeString(|obj| text::join_field(obj.path("template.spec.containers"), "name"))),
        string("Images", IMAGES, ComputeString(|obj| text::join_field(obj.path("template.spec.containers"), "image"))),
        string("Pod Labels", "The labels for the pod template.", ComputeString(|obj| text::labels(obj.path("template.metadata.labels")))),
    ]),
    ("", "replicationcontrollers", &[
        NAME,
        integer("Desired", docs::REPLICATION_CONTROLLER_SPEC_REPLICAS, Int("spec.replicas")),
        integer("Current", docs::REPLICATION_CONTROLLER_STATUS_REPLICAS, Int("status.replicas")),
        integer("Ready", docs::REPLICATION_CONTROLLER_STATUS_READY_REPLICAS, Int("status.readyReplicas")),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
        wide("Selector", docs::REPLICATION_CONTROLLER_SPEC_SELECTOR, ComputeString(|obj| text::labels(obj.path("spec.selector")))),
    ]),
    ("", "resourcequotas", &[
        NAME,
        string("Request", "Request represents a minimum amount of cpu/memory that a container may consume.", ComputeString(cluster::quota_requests)),
        string("Limit", "Limits control the maximum amount of cpu/memory that a container may use independent of contention on the node.", ComputeString(cluster::quota_limits)),
        AGE,
    ]),
    ("", "secrets", &[
        NAME,
        string("Type", docs::SECRET_TYPE, Text("type")),
        string("Data", docs::SECRET_DATA, Count("data")),
        AGE,
    ]),
    ("", "serviceaccounts", &[NAME, AGE]),
    ("", "services", &[
        NAME,
        string("Type", docs::SERVICE_SPEC_TYPE, Text("spec.type")),
        string("Cluster-IP", docs::SERVICE_SPEC_CLUSTER_IP, ComputeString(network::cluster_ip)),
        string("External-IP", docs::SERVICE_SPEC_EXTERNAL_IPS, ComputeString(network::external_ip)),
        string("Port(s)", docs::SERVICE_SPEC_PORTS, ComputeString(network::ports)),
        AGE,
        wide("Selector", docs::SERVICE_SPEC_SELECTOR, ComputeString(|obj| text::labels(obj.path("spec.selector")))),
    ]),

    ("admissionregistration.k8s.io", "mutatingadmissionpolicies", &[
        NAME, integer("Mutations", "Mutation indicates the number of mutations rules defined in this configuration", Count("spec.mutations")), PARAM_KIND, AGE,
    ]),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings", POLICY_BINDINGS),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", WEBHOOKS),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies", &[
        NAME, integer("Validations", "Validations indicates the number of validation rules defined in this configuration", Count("spec.validations")), PARAM_KIND, AGE,
    ]),
    ("admissionregistration.k8s.io", "validatingadmissionpolicybindings", POLICY_BINDINGS),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", WEBHOOKS),

    ("apiregistration.k8s.io", "apiservices", &[
        NAME,
        string("Service", "The reference to the service that hosts this API endpoint.", ComputeString(cluster::api_service)),
        string("Available", "Whether this service is available.", ComputeString(cluster::api_service_available)),
        AGE,
    ]),

    ("apps", "controllerrevisions", &[
        NAME,
        string("Controller", "Controller of the object", ComputeString(batch::controller)),
        string("Revision", docs::CONTROLLER_REVISION_REVISION, Int("revision")),
        AGE,
    ]),
    ("apps", "daemonsets", &[
        NAME,
        integer("Desired", docs::DAEMON_SET_STATUS_DESIRED_NUMBER_SCHEDULED, Int("status.desiredNumberScheduled")),
        integer("Current", docs::DAEMON_SET_STATUS_CURRENT_NUMBER_SCHEDULED, Int("status.currentNumberScheduled")),
        integer("Ready", docs::DAEMON_SET_STATUS_NUMBER_READY, Int("status.numberReady")),
        integer("Up-to-date", docs::DAEMON_SET_STATUS_UPDATED_NUMBER_SCHEDULED, Int("status.updatedNumberScheduled")),
        integer("Available", docs::DAEMON_SET_STATUS_NUMBER_AVAILABLE, Int("status.numberAvailable")),
        string("Node Selector", docs::POD_SPEC_NODE_SELECTOR, ComputeString(|obj| text::labels(obj.path("spec.template.spec.nodeSelector")))),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
        wide("Selector", docs::DAEMON_SET_SPEC_SELECTOR, ComputeString(batch::label_selector)),
    ]),
    ("apps", "deployments", &[
        NAME,
        string("Ready", "Number of the pod with ready state", ComputeString(batch::ready)),
        string("Up-to-date", docs::DEPLOYMENT_STATUS_UPDATED_REPLICAS, Int("status.updatedReplicas")),
        string("Available", docs::DEPLOYMENT_STATUS_AVAILABLE_REPLICAS, Int("status.availableReplicas")),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
        wide("Selector", docs::DEPLOYMENT_SPEC_SELECTOR, ComputeString(batch::deployment_selector)),
    ]),
    ("apps", "replicasets", &[
        NAME,
        integer("Desired", docs::REPLICA_SET_SPEC_REPLICAS, Int("spec.replicas")),
        integer("Current", docs::REPLICA_SET_STATUS_REPLICAS, Int("status.replicas")),
        integer("Ready", docs::REPLICA_SET_STATUS_READY_REPLICAS, Int("status.readyReplicas")),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
        wide("Selector", docs::REPLICA_SET_SPEC_SELECTOR, ComputeString(batch::label_selector)),
    ]),
    ("apps", "statefulsets", &[
        NAME, string("Ready", "Number of the pod with ready state", ComputeString(batch::ready)), AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
    ]),

    ("autoscaling", "horizontalpodautoscalers", &[
        NAME,
        string("Reference", docs::HORIZONTAL_POD_AUTOSCALER_SPEC_SCALE_TARGET_REF, ComputeString(|obj| {
            let target = obj.path("spec.scaleTargetRef");
            format!("{}/{}", target.text("kind"), target.text("name"))
        })),
        string("Targets", docs::HORIZONTAL_POD_AUTOSCALER_SPEC_METRICS, ComputeString(batch::targets)),
        string("MinPods", docs::HORIZONTAL_POD_AUTOSCALER_SPEC_MIN_REPLICAS, TextOr("spec.minReplicas", "<unset>")),
        string("MaxPods", docs::HORIZONTAL_POD_AUTOSCALER_SPEC_MAX_REPLICAS, Int("spec.maxReplicas")),
        string("Replicas", docs::HORIZONTAL_POD_AUTOSCALER_STATUS_CURRENT_REPLICAS, Int("status.currentReplicas")),
        AGE,
    ]),
    // For `kubectl get --subresource=scale`.
    ("autoscaling", "scales", &[
        Column { format: "", ..NAME },
        integer("Desired", docs::SCALE_SPEC_REPLICAS, Int("spec.replicas")),
        integer("Available", docs::SCALE_STATUS_REPLICAS, Int("status.replicas")),
        AGE,
    ]),

    ("batch", "cronjobs", &[
        NAME,
        string("Schedule", docs::CRON_JOB_SPEC_SCHEDULE, Text("spec.schedule")),
        string("Timezone", docs::CRON_JOB_SPEC_TIME_ZONE, TextOr("spec.timeZone", "<none>")),
        Column { kind: "boolean", ..string("Suspend", docs::CRON_JOB_SPEC_SUSPEND, ComputeString(batch::suspend)) },
        integer("Active", docs::CRON_JOB_STATUS_ACTIVE, Count("status.active")),
        string("Last Schedule", docs::CRON_JOB_STATUS_LAST_SCHEDULE_TIME, ComputeAge(batch::last_schedule)),
        AGE,
        wide("Containers", CONTAINERS, ComputeString(|obj| text::join_field(obj.path("spec.jobTemplate.spec.template.spec.containers"), "name"))),
        wide("Images", IMAGES, ComputeString(|obj| text::join_field(obj.path("spec.jobTemplate.spec.template.spec.containers"), "image"))),
        wide("Selector", docs::JOB_SPEC_SELECTOR, ComputeString(|obj| text::selector_cell(obj.path("spec.jobTemplate.spec.selector")))),
    ]),
    ("batch", "jobs", &[
        NAME,
        string("Status", "Status of the job.", ComputeString(batch::job_status)),
        string("Completions", docs::JOB_STATUS_SUCCEEDED, ComputeString(batch::completions)),
        string("Duration", "Time required to complete the job.", ComputeAge(batch::duration)),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
        wide("Selector", docs::JOB_SPEC_SELECTOR, ComputeString(batch::label_selector)),
    ]),

    ("certificates.k8s.io", "certificatesigningrequests", &[
        NAME, AGE,
        string("SignerName", docs::CERTIFICATE_SIGNING_REQUEST_SPEC_SIGNER_NAME, TextOr("spec.signerName", "<none>")),
        string("Requestor", docs::CERTIFICATE_SIGNING_REQUEST_SPEC_REQUEST, Text("spec.username")),
        string("RequestedDuration", docs::CERTIFICATE_SIGNING_REQUEST_SPEC_EXPIRATION_SECONDS, ComputeString(admission::csr_duration)),
        string("Condition", docs::CERTIFICATE_SIGNING_REQUEST_STATUS_CONDITIONS, ComputeString(admission::csr_condition)),
    ]),

    ("coordination.k8s.io", "leases", &[NAME, string("Holder", docs::LEASE_SPEC_HOLDER_IDENTITY, Text("spec.holderIdentity")), AGE]),

    ("discovery.k8s.io", "endpointslices", &[
        NAME,
        string("AddressType", docs::ENDPOINT_SLICE_ADDRESS_TYPE, Text("addressType")),
        string("Ports", docs::ENDPOINT_SLICE_PORTS, ComputeString(network::slice_ports)),
        string("Endpoints", docs::ENDPOINT_SLICE_ENDPOINTS, ComputeString(network::slice_endpoints)),
        AGE,
    ]),

    ("flowcontrol.apiserver.k8s.io", "flowschemas", &[
        NAME,
        string("PriorityLevel", docs::PRIORITY_LEVEL_CONFIGURATION_REFERENCE_NAME, Text("spec.priorityLevelConfiguration.name")),
        string("MatchingPrecedence", docs::FLOW_SCHEMA_SPEC_MATCHING_PRECEDENCE, Int("spec.matchingPrecedence")),
        string("DistinguisherMethod", docs::FLOW_SCHEMA_SPEC_DISTINGUISHER_METHOD, TextOr("spec.distinguisherMethod.type", "<none>")),
        AGE,
        string("MissingPL", "references a broken or non-existent PriorityLevelConfiguration", ComputeString(cluster::dangling)),
    ]),
    ("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations", &[
        NAME,
        string("Type", docs::PRIORITY_LEVEL_CONFIGURATION_SPEC_TYPE, Text("spec.type")),
        string("NominalConcurrencyShares", docs::LIMITED_PRIORITY_LEVEL_CONFIGURATION_NOMINAL_CONCURRENCY_SHARES, IntOr("spec.limited.nominalConcurrencyShares", "<none>")),
        string("Queues", docs::QUEUING_CONFIGURATION_QUEUES, IntOr("spec.limited.limitResponse.queuing.queues", "<none>")),
        string("HandSize", docs::QUEUING_CONFIGURATION_HAND_SIZE, IntOr("spec.limited.limitResponse.queuing.handSize", "<none>")),
        string("QueueLengthLimit", docs::QUEUING_CONFIGURATION_QUEUE_LENGTH_LIMIT, IntOr("spec.limited.limitResponse.queuing.queueLengthLimit", "<none>")),
        AGE,
    ]),

    ("networking.k8s.io", "ingressclasses", &[
        Column { cell: ComputeString(network::ingress_class_name), ..NAME },
        string("Controller", "Controller that is responsible for handling this class", Text("spec.controller")),
        string("Parameters", "A reference to a resource with additional parameters", ComputeString(network::ingress_class_parameters)),
        AGE,
    ]),
    ("networking.k8s.io", "ingresses", &[
        NAME,
        string("Class", "The name of the IngressClass resource that should be used for additional configuration", TextOr("spec.ingressClassName", "<none>")),
        string("Hosts", "Hosts that incoming requests are matched against before the ingress rule", ComputeString(network::ingress_hosts)),
        string("Address", "Address is a list containing ingress points for the load-balancer", ComputeString(network::ingress_points)),
        string("Ports", "Ports of TLS configurations that open", ComputeString(network::ingress_ports)),
        AGE,
    ]),
    ("networking.k8s.io", "ipaddresses", &[NAME, string("ParentRef", docs::IP_ADDRESS_SPEC_PARENT_REF, ComputeString(network::parent))]),
    ("networking.k8s.io", "networkpolicies", &[
        NAME, string("Pod-Selector", docs::NETWORK_POLICY_SPEC_POD_SELECTOR, ComputeString(|obj| text::selector_cell(obj.path("spec.podSelector")))), AGE,
    ]),
    ("networking.k8s.io", "servicecidrs", &[NAME, string("CIDRs", docs::SERVICE_CIDR_SPEC_CIDRS, ComputeString(network::cidrs)), AGE]),

    // Upstream takes this description from metadata, which has no such field.
    ("node.k8s.io", "runtimeclasses", &[NAME, string("Handler", "", Text("handler")), AGE]),

    ("policy", "poddisruptionbudgets", &[
        NAME,
        string("Min Available", "The minimum number of pods that must be available.", TextOr("spec.minAvailable", "N/A")),
        string("Max Unavailable", "The maximum number of pods that may be unavailable.", TextOr("spec.maxUnavailable", "N/A")),
        integer("Allowed Disruptions", "Calculated number of pods that may be disrupted at this time.", Int("status.disruptionsAllowed")),
        AGE,
    ]),

    ("rbac.authorization.k8s.io", "clusterrolebindings", &[
        NAME,
        string("Role", docs::CLUSTER_ROLE_BINDING_ROLE_REF, ComputeString(admission::role)),
        AGE,
        wide("Users", "Users in the clusterRoleBinding", ComputeString(admission::users)),
        wide("Groups", "Groups in the clusterRoleBinding", ComputeString(admission::groups)),
        wide("ServiceAccounts", "ServiceAccounts in the clusterRoleBinding", ComputeString(admission::service_accounts)),
    ]),
    ("rbac.authorization.k8s.io", "rolebindings", &[
        NAME,
        string("Role", docs::ROLE_BINDING_ROLE_REF, ComputeString(admission::role)),
        AGE,
        wide("Users", "Users in the roleBinding", ComputeString(admission::users)),
        wide("Groups", "Groups in the roleBinding", ComputeString(admission::groups)),
        wide("ServiceAccounts", "ServiceAccounts in the roleBinding", ComputeString(admission::service_accounts)),
    ]),

    ("resource.k8s.io", "deviceclasses", &[NAME, AGE]),
    ("resource.k8s.io", "resourceclaims", &[
        NAME, string("State", "A summary of the current state (allocated, pending, reserved, etc.).", ComputeString(admission::claim_state)), AGE,
    ]),
    ("resource.k8s.io", "resourceclaimtemplates", &[NAME, AGE]),
    ("resource.k8s.io", "resourceslices", &[
        NAME,
        string("Node", docs::RESOURCE_SLICE_SPEC_NODE_NAME, Text("spec.nodeName")),
        string("Driver", docs::RESOURCE_SLICE_SPEC_DRIVER, Text("spec.driver")),
        string("Pool", docs::RESOURCE_POOL_NAME, Text("spec.pool.name")),
        AGE,
    ]),

    ("scheduling.k8s.io", "priorityclasses", &[
        NAME,
        integer("Value", docs::PRIORITY_CLASS_VALUE, Int("value")),
        boolean("Global-Default", docs::PRIORITY_CLASS_GLOBAL_DEFAULT, Flag("globalDefault")),
        AGE,
        string("PreemptionPolicy", docs::PRIORITY_CLASS_PREEMPTION_POLICY, Text("preemptionPolicy")),
    ]),

    ("storage.k8s.io", "csidrivers", &[
        NAME,
        boolean("AttachRequired", docs::CSI_DRIVER_SPEC_ATTACH_REQUIRED, FlagOrTrue("spec.attachRequired")),
        boolean("PodInfoOnMount", docs::CSI_DRIVER_SPEC_POD_INFO_ON_MOUNT, Flag("spec.podInfoOnMount")),
        boolean("StorageCapacity", docs::CSI_DRIVER_SPEC_STORAGE_CAPACITY, Flag("spec.storageCapacity")),
        string("TokenRequests", docs::CSI_DRIVER_SPEC_TOKEN_REQUESTS, ComputeString(storage::driver_token_requests)),
        boolean("RequiresRepublish", docs::CSI_DRIVER_SPEC_REQUIRES_REPUBLISH, Flag("spec.requiresRepublish")),
        string("Modes", docs::CSI_DRIVER_SPEC_VOLUME_LIFECYCLE_MODES, ComputeString(storage::driver_modes)),
        AGE,
    ]),
    ("storage.k8s.io", "csinodes", &[NAME, integer("Drivers", "Drivers indicates the number of CSI drivers registered on the node", Count("spec.drivers")), AGE]),
    ("storage.k8s.io", "storageclasses", &[
        Column { cell: ComputeString(storage::class_name), ..NAME },
        string("Provisioner", docs::STORAGE_CLASS_PROVISIONER, Text("provisioner")),
        string("ReclaimPolicy", docs::STORAGE_CLASS_RECLAIM_POLICY, TextOr("reclaimPolicy", "Delete")),
        string("VolumeBindingMode", docs::STORAGE_CLASS_VOLUME_BINDING_MODE, TextOr("volumeBindingMode", "Immediate")),
        string("AllowVolumeExpansion", docs::STORAGE_CLASS_ALLOW_VOLUME_EXPANSION, Flag("allowVolumeExpansion")),
        AGE,
    ]),
    ("storage.k8s.io", "volumeattachments", &[
        NAME,
        Column { format: "name", ..string("Attacher", docs::VOLUME_ATTACHMENT_SPEC_ATTACHER, Text("spec.attacher")) },
        string("PV", docs::VOLUME_ATTACHMENT_SOURCE_PERSISTENT_VOLUME_NAME, Text("spec.source.persistentVolumeName")),
        string("Node", docs::VOLUME_ATTACHMENT_SPEC_NODE_NAME, Text("spec.nodeName")),
        boolean("Attached", docs::VOLUME_ATTACHMENT_STATUS_ATTACHED, Flag("status.attached")),
        AGE,
    ]),
    ("storage.k8s.io", "volumeattributesclasses", &[NAME, string("DriverName", docs::VOLUME_ATTRIBUTES_CLASS_DRIVER_NAME, Text("driverName")), AGE]),
];

#[rustfmt::skip]
const EVENTS: &[Column] = &[
    string("Last Seen", docs::EVENT_LAST_TIMESTAMP, ComputeAge(cluster::event_last_seen)),
    string("Type", docs::EVENT_TYPE, Text("type")),
    string("Reason", docs::EVENT_REASON, Text("reason")),
    string("Object", docs::EVENT_INVOLVED_OBJECT, ComputeString(cluster::event_object)),
    wide("Subobject", docs::OBJECT_REFERENCE_FIELD_PATH, ComputeString(cluster::event_field_path)),
    wide("Source", docs::EVENT_SOURCE, ComputeString(cluster::event_source)),
    string("Message", docs::EVENT_MESSAGE, ComputeString(cluster::event_message)),
    wide("First Seen", docs::EVENT_FIRST_TIMESTAMP, ComputeAge(cluster::event_first_seen)),
    wide("Count", docs::EVENT_COUNT, Compute(cluster::event_count)),
    Column { priority: 1, ..NAME },
];

const WEBHOOKS: &[Column] = &[
    NAME,
    integer(
        "Webhooks",
        "Webhooks indicates the number of webhooks registered in this configuration",
        Count("webhooks"),
    ),
    AGE,
];

const POLICY_BINDINGS: &[Column] = &[
    NAME,
    string(
        "PolicyName",
        "PolicyName indicates the policy definition which the policy binding binded to",
        Text("spec.policyName"),
    ),
    string(
        "ParamRef",
        "ParamRef indicates the param resource which sets the configuration param",
        ComputeString(admission::param_ref),
    ),
    AGE,
];

const NAME: Column = Column { format: "name", ..string("Name", NAME_DESCRIPTION, Text("metadata.name")) };
const AGE: Column = string("Age", AGE_DESCRIPTION, Age("metadata.creationTimestamp"));
const PARAM_KIND: Column = string(
    "ParamKind",
    "ParamKind specifies the kind of resources used to parameterize this policy",
    ComputeString(admission::param_kind),
);
const TEMPLATE_CONTAINERS: Column = wide(
    "Containers",
    CONTAINERS,
    ComputeString(|obj| text::join_field(obj.path("spec.template.spec.containers"), "name")),
);
const TEMPLATE_IMAGES: Column = wide(
    "Images",
    IMAGES,
    ComputeString(|obj| text::join_field(obj.path("spec.template.spec.containers"), "image")),
);

const CONTAINERS: &str = "Names of each container in the template.";
const IMAGES: &str = "Images referenced by each container in the template.";
/// The published descriptions of `metadata.name` and `metadata.creationTimestamp`. Clients see them.
pub(super) const NAME_DESCRIPTION: &str = "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a client to request the generation of an appropriate name automatically. Name is primarily intended for creation idempotence and configuration definition. Cannot be updated. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names";
pub(super) const AGE_DESCRIPTION: &str = "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";

const fn string(name: &'static str, description: &'static str, cell: CellSource) -> Column {
    Column { name, kind: "string", format: "", description, priority: 0, cell }
}

const fn wide(name: &'static str, description: &'static str, cell: CellSource) -> Column {
    Column { name, kind: "string", format: "", description, priority: 1, cell }
}

const fn integer(name: &'static str, description: &'static str, cell: CellSource) -> Column {
    Column { name, kind: "integer", format: "", description, priority: 0, cell }
}

const fn boolean(name: &'static str, description: &'static str, cell: CellSource) -> Column {
    Column { name, kind: "boolean", format: "", description, priority: 0, cell }
}

//! The columns of every kind, in upstream's order. Only data.

use super::CellSource::{
    Age, Compute, ComputeAge, ComputeString, Count, Flag, FlagOrTrue, Int, IntOr, Text, TextOr,
};
use super::{CellSource, Column, admission, batch, cluster, network, pod, storage, text};
use crate::json::JsonExt as _;

/// For kinds without columns of their own.
pub static DEFAULT_COLUMNS: &[Column] = &[
    NAME,
    Column { kind: "date", ..string("Created At", AGE_DESCRIPTION, ComputeString(cluster::created_at)) },
];

/// `(group, plural, columns)`.
#[rustfmt::skip]
pub static TABLES: &[(&str, &str, &[Column])] = &[
    ("", "componentstatuses", &[
        NAME,
        string("Status", "Whether the component is healthy", ComputeString(cluster::component_status)),
        string("Message", "What the component says about its health", ComputeString(cluster::component_message)),
        string("Error", "What is wrong with the component", ComputeString(cluster::component_error)),
    ]),
    ("", "configmaps", &[NAME, string("Data", "Number of entries", Compute(cluster::config_map_entries)), AGE]),
    ("", "endpoints", &[NAME, string("Endpoints", "Addresses and ports that are ready", ComputeString(network::endpoints)), AGE]),
    ("", "events", EVENTS),
    ("events.k8s.io", "events", EVENTS),
    ("", "namespaces", &[NAME, string("Status", "Active or Terminating", Text("status.phase")), AGE]),
    ("", "nodes", &[
        NAME,
        string("Status", "Whether the node is ready and takes pods", ComputeString(cluster::node_status)),
        string("Roles", "The roles in the node's labels", ComputeString(cluster::node_roles)),
        AGE,
        string("Version", "Version of the kubelet", Text("status.nodeInfo.kubeletVersion")),
        wide("Internal-IP", "The node's address within the cluster", ComputeString(cluster::internal_ip)),
        wide("External-IP", "The node's address from outside", ComputeString(cluster::external_ip)),
        wide("OS-Image", "The node's operating system", TextOr("status.nodeInfo.osImage", "<unknown>")),
        wide("Kernel-Version", "The node's kernel and architecture", ComputeString(cluster::kernel)),
        wide("Container-Runtime", "The node's container runtime", TextOr("status.nodeInfo.containerRuntimeVersion", "<unknown>")),
    ]),
    ("", "persistentvolumeclaims", &[
        NAME,
        string("Status", "Phase of the claim", ComputeString(storage::phase)),
        string("Volume", "The volume bound to the claim", Text("spec.volumeName")),
        string("Capacity", "Size of the bound volume", ComputeString(storage::claim_capacity)),
        string("Access Modes", "Access modes of the bound volume", ComputeString(storage::claim_modes)),
        string("StorageClass", "StorageClass of the pvc", ComputeString(storage::class)),
        string("VolumeAttributesClass", "VolumeAttributesClass of the pvc", TextOr("spec.volumeAttributesClassName", "<unset>")),
        AGE,
        wide("VolumeMode", "Filesystem or Block", TextOr("spec.volumeMode", "<unset>")),
    ]),
    ("", "persistentvolumes", &[
        NAME,
        string("Capacity", "Size of the volume", ComputeString(storage::volume_capacity)),
        string("Access Modes", "How the volume can be mounted", ComputeString(storage::volume_modes)),
        string("Reclaim Policy", "What happens to the volume after its claim", Text("spec.persistentVolumeReclaimPolicy")),
        string("Status", "Phase of the volume", ComputeString(storage::phase)),
        string("Claim", "The claim bound to the volume", ComputeString(storage::volume_claim)),
        string("StorageClass", "StorageClass of the pv", ComputeString(storage::class)),
        string("VolumeAttributesClass", "VolumeAttributesClass of the pv", TextOr("spec.volumeAttributesClassName", "<unset>")),
        string("Reason", "Why the volume is in its phase", Text("status.reason")),
        AGE,
        wide("VolumeMode", "Filesystem or Block", TextOr("spec.volumeMode", "<unset>")),
    ]),
    ("", "pods", &[
        NAME,
        string("Ready", "Containers that are ready, of all", ComputeString(pod::ready)),
        string("Status", "What the containers are doing, in a word", ComputeString(pod::status)),
        string("Restarts", "How often containers were restarted, and when last", ComputeAge(pod::restarts)),
        AGE,
        wide("IP", "The pod's address", ComputeString(pod::ip)),
        wide("Node", "The node the pod runs on", TextOr("spec.nodeName", "<none>")),
        wide("Nominated Node", "The node where pods are being evicted for this one", TextOr("status.nominatedNodeName", "<none>")),
        wide("Readiness Gates", "Extra conditions that are true, of all", ComputeString(pod::readiness_gates)),
    ]),
    ("", "podtemplates", &[
        NAME,
        string("Containers", CONTAINERS, ComputeString(|obj| text::join_field(obj.path("template.spec.containers"), "name"))),
        string("Images", IMAGES, ComputeString(|obj| text::join_field(obj.path("template.spec.containers"), "image"))),
        string("Pod Labels", "Labels of the pods", ComputeString(|obj| text::labels(obj.path("template.metadata.labels")))),
    ]),
    ("", "replicationcontrollers", &[
        NAME, DESIRED, CURRENT, READY, AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
        wide("Selector", SELECTOR, ComputeString(|obj| text::labels(obj.path("spec.selector")))),
    ]),
    ("", "resourcequotas", &[
        NAME,
        string("Request", "Used and allowed amounts of requests and counts", ComputeString(cluster::quota_requests)),
        string("Limit", "Used and allowed amounts of limits", ComputeString(cluster::quota_limits)),
        AGE,
    ]),
    ("", "secrets", &[
        NAME,
        string("Type", "What kind of data the secret holds", Text("type")),
        string("Data", "Number of entries", Count("data")),
        AGE,
    ]),
    ("", "serviceaccounts", &[NAME, AGE]),
    ("", "services", &[
        NAME,
        string("Type", "How the service is exposed", Text("spec.type")),
        string("Cluster-IP", "The service's address within the cluster", ComputeString(network::cluster_ip)),
        string("External-IP", "The service's addresses from outside", ComputeString(network::external_ip)),
        string("Port(s)", "The service's ports", ComputeString(network::ports)),
        AGE,
        wide("Selector", SELECTOR, ComputeString(|obj| text::labels(obj.path("spec.selector")))),
    ]),

    ("admissionregistration.k8s.io", "mutatingadmissionpolicies", &[
        NAME, integer("Mutations", "Number of mutations", Count("spec.mutations")), PARAM_KIND, AGE,
    ]),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings", POLICY_BINDINGS),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", WEBHOOKS),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies", &[
        NAME, integer("Validations", "Number of validations", Count("spec.validations")), PARAM_KIND, AGE,
    ]),
    ("admissionregistration.k8s.io", "validatingadmissionpolicybindings", POLICY_BINDINGS),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", WEBHOOKS),

    ("apiregistration.k8s.io", "apiservices", &[
        NAME,
        string("Service", "The service that answers for this API", ComputeString(cluster::api_service)),
        string("Available", "Whether the API answers", ComputeString(cluster::api_service_available)),
        AGE,
    ]),

    ("apps", "controllerrevisions", &[
        NAME,
        string("Controller", "Controller of the object", ComputeString(batch::controller)),
        string("Revision", "The number of the revision", Int("revision")),
        AGE,
    ]),
    ("apps", "daemonsets", &[
        NAME,
        integer("Desired", "Nodes that should run the pod", Int("status.desiredNumberScheduled")),
        integer("Current", "Nodes that should run the pod and do", Int("status.currentNumberScheduled")),
        integer("Ready", "Nodes where the pod is ready", Int("status.numberReady")),
        integer("Up-to-date", "Nodes with a pod from the current template", Int("status.updatedNumberScheduled")),
        integer("Available", "Nodes where the pod is available", Int("status.numberAvailable")),
        string("Node Selector", "Labels of the nodes to run on", ComputeString(|obj| text::labels(obj.path("spec.template.spec.nodeSelector")))),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES, LABEL_SELECTOR,
    ]),
    ("apps", "deployments", &[
        NAME,
        string("Ready", "Number of the pod with ready state", ComputeString(batch::ready)),
        string("Up-to-date", "Pods from the current template", Int("status.updatedReplicas")),
        string("Available", "Pods that are available", Int("status.availableReplicas")),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
        wide("Selector", SELECTOR, ComputeString(batch::deployment_selector)),
    ]),
    ("apps", "replicasets", &[NAME, DESIRED, CURRENT, READY, AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES, LABEL_SELECTOR]),
    ("apps", "statefulsets", &[
        NAME, string("Ready", "Number of the pod with ready state", ComputeString(batch::ready)), AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES,
    ]),

    ("autoscaling", "horizontalpodautoscalers", &[
        NAME,
        string("Reference", "What is scaled", ComputeString(|obj| {
            let target = obj.path("spec.scaleTargetRef");
            format!("{}/{}", target.text("kind"), target.text("name"))
        })),
        string("Targets", "Metrics, current and wanted", ComputeString(batch::targets)),
        string("MinPods", "Least number of pods", TextOr("spec.minReplicas", "<unset>")),
        string("MaxPods", "Greatest number of pods", Int("spec.maxReplicas")),
        string("Replicas", "Pods there are", Int("status.currentReplicas")),
        AGE,
    ]),
    // What `kubectl get --subresource=scale` shows.
    ("autoscaling", "scales", &[
        Column { format: "", ..NAME },
        integer("Desired", "Wanted number of pods", Int("spec.replicas")),
        integer("Available", "Pods there are", Int("status.replicas")),
        AGE,
    ]),

    ("batch", "cronjobs", &[
        NAME,
        string("Schedule", "When jobs start, in cron's notation", Text("spec.schedule")),
        string("Timezone", "The schedule's time zone", TextOr("spec.timeZone", "<none>")),
        Column { kind: "boolean", ..string("Suspend", "Whether no jobs start", ComputeString(batch::suspend)) },
        integer("Active", "Jobs that run now", Count("status.active")),
        string("Last Schedule", "When a job last started", ComputeAge(batch::last_schedule)),
        AGE,
        wide("Containers", CONTAINERS, ComputeString(|obj| text::join_field(obj.path("spec.jobTemplate.spec.template.spec.containers"), "name"))),
        wide("Images", IMAGES, ComputeString(|obj| text::join_field(obj.path("spec.jobTemplate.spec.template.spec.containers"), "image"))),
        wide("Selector", SELECTOR, ComputeString(|obj| text::selector_cell(obj.path("spec.jobTemplate.spec.selector")))),
    ]),
    ("batch", "jobs", &[
        NAME,
        string("Status", "Status of the job.", ComputeString(batch::job_status)),
        string("Completions", "Pods that succeeded, of those wanted", ComputeString(batch::completions)),
        string("Duration", "How long the job took so far", ComputeAge(batch::duration)),
        AGE, TEMPLATE_CONTAINERS, TEMPLATE_IMAGES, LABEL_SELECTOR,
    ]),

    ("certificates.k8s.io", "certificatesigningrequests", &[
        NAME, AGE,
        string("SignerName", "Who is asked to sign", TextOr("spec.signerName", "<none>")),
        string("Requestor", "Who asks", Text("spec.username")),
        string("RequestedDuration", "How long the certificate should last", ComputeString(admission::csr_duration)),
        string("Condition", "What has become of the request", ComputeString(admission::csr_condition)),
    ]),

    ("coordination.k8s.io", "leases", &[NAME, string("Holder", "Who holds the lease", Text("spec.holderIdentity")), AGE]),

    ("discovery.k8s.io", "endpointslices", &[
        NAME,
        string("AddressType", "IPv4, IPv6 or FQDN", Text("addressType")),
        string("Ports", "Ports of the endpoints", ComputeString(network::slice_ports)),
        string("Endpoints", "Addresses of the endpoints", ComputeString(network::slice_endpoints)),
        AGE,
    ]),

    ("flowcontrol.apiserver.k8s.io", "flowschemas", &[
        NAME,
        string("PriorityLevel", "The priority level of matching requests", Text("spec.priorityLevelConfiguration.name")),
        string("MatchingPrecedence", "Lower numbers are matched first", Int("spec.matchingPrecedence")),
        string("DistinguisherMethod", "How flows are told apart", TextOr("spec.distinguisherMethod.type", "<none>")),
        AGE,
        string("MissingPL", "Whether the priority level does not exist", ComputeString(cluster::dangling)),
    ]),
    ("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations", &[
        NAME,
        string("Type", "Whether requests are limited", Text("spec.type")),
        string("NominalConcurrencyShares", "This level's share of concurrency", IntOr("spec.limited.nominalConcurrencyShares", "<none>")),
        string("Queues", "Number of queues", IntOr("spec.limited.limitResponse.queuing.queues", "<none>")),
        string("HandSize", "Queues a flow may use", IntOr("spec.limited.limitResponse.queuing.handSize", "<none>")),
        string("QueueLengthLimit", "Requests that may wait in a queue", IntOr("spec.limited.limitResponse.queuing.queueLengthLimit", "<none>")),
        AGE,
    ]),

    ("networking.k8s.io", "ingressclasses", &[
        Column { cell: ComputeString(network::ingress_class_name), ..NAME },
        string("Controller", "Who serves ingresses of this class", Text("spec.controller")),
        string("Parameters", "More settings for the controller", ComputeString(network::ingress_class_parameters)),
        AGE,
    ]),
    ("networking.k8s.io", "ingresses", &[
        NAME,
        string("Class", "The ingress class", TextOr("spec.ingressClassName", "<none>")),
        string("Hosts", "Hosts with rules", ComputeString(network::ingress_hosts)),
        string("Address", "Where the load balancer answers", ComputeString(network::ingress_points)),
        string("Ports", "Ports that are open", ComputeString(network::ingress_ports)),
        AGE,
    ]),
    ("networking.k8s.io", "ipaddresses", &[NAME, string("ParentRef", "What the address belongs to", ComputeString(network::parent))]),
    ("networking.k8s.io", "networkpolicies", &[
        NAME, string("Pod-Selector", "Labels of the pods it applies to", ComputeString(|obj| text::selector_cell(obj.path("spec.podSelector")))), AGE,
    ]),
    ("networking.k8s.io", "servicecidrs", &[NAME, string("CIDRs", "Ranges of service addresses", ComputeString(network::cidrs)), AGE]),

    ("node.k8s.io", "runtimeclasses", &[NAME, string("Handler", "What the runtime calls this class", Text("handler")), AGE]),

    ("policy", "poddisruptionbudgets", &[
        NAME,
        string("Min Available", "Pods that must stay available", TextOr("spec.minAvailable", "N/A")),
        string("Max Unavailable", "Pods that may be unavailable", TextOr("spec.maxUnavailable", "N/A")),
        integer("Allowed Disruptions", "Pods that may be disrupted now", Int("status.disruptionsAllowed")),
        AGE,
    ]),

    ("rbac.authorization.k8s.io", "clusterrolebindings", ROLE_BINDINGS),
    ("rbac.authorization.k8s.io", "rolebindings", ROLE_BINDINGS),

    ("resource.k8s.io", "deviceclasses", &[NAME, AGE]),
    ("resource.k8s.io", "resourceclaims", &[
        NAME, string("State", "Whether the claim is pending, allocated or reserved", ComputeString(admission::claim_state)), AGE,
    ]),
    ("resource.k8s.io", "resourceclaimtemplates", &[NAME, AGE]),
    ("resource.k8s.io", "resourceslices", &[
        NAME,
        string("Node", "The node with the devices", Text("spec.nodeName")),
        string("Driver", "The driver of the devices", Text("spec.driver")),
        string("Pool", "The pool of the devices", Text("spec.pool.name")),
        AGE,
    ]),

    ("scheduling.k8s.io", "priorityclasses", &[
        NAME,
        integer("Value", "The priority", Int("value")),
        boolean("Global-Default", "Whether pods without a class get this one", Flag("globalDefault")),
        AGE,
        string("PreemptionPolicy", "Whether these pods evict others", Text("preemptionPolicy")),
    ]),

    ("storage.k8s.io", "csidrivers", &[
        NAME,
        boolean("AttachRequired", "Whether volumes are attached before mounting", FlagOrTrue("spec.attachRequired")),
        boolean("PodInfoOnMount", "Whether the driver is told about the pod", Flag("spec.podInfoOnMount")),
        boolean("StorageCapacity", "Whether the driver publishes its capacity", Flag("spec.storageCapacity")),
        string("TokenRequests", "Audiences of the tokens the driver gets", ComputeString(storage::driver_token_requests)),
        boolean("RequiresRepublish", "Whether volumes are published again and again", Flag("spec.requiresRepublish")),
        string("Modes", "Lifecycle modes of the volumes", ComputeString(storage::driver_modes)),
        AGE,
    ]),
    ("storage.k8s.io", "csinodes", &[NAME, integer("Drivers", "Number of drivers on the node", Count("spec.drivers")), AGE]),
    ("storage.k8s.io", "storageclasses", &[
        Column { cell: ComputeString(storage::class_name), ..NAME },
        string("Provisioner", "Who makes the volumes", Text("provisioner")),
        string("ReclaimPolicy", "What happens to a volume after its claim", TextOr("reclaimPolicy", "Delete")),
        string("VolumeBindingMode", "When a claim gets its volume", TextOr("volumeBindingMode", "Immediate")),
        string("AllowVolumeExpansion", "Whether volumes can grow", Flag("allowVolumeExpansion")),
        AGE,
    ]),
    ("storage.k8s.io", "volumeattachments", &[
        NAME,
        Column { format: "name", ..string("Attacher", "The driver that attaches", Text("spec.attacher")) },
        string("PV", "The volume", Text("spec.source.persistentVolumeName")),
        string("Node", "The node", Text("spec.nodeName")),
        boolean("Attached", "Whether the volume is attached", Flag("status.attached")),
        AGE,
    ]),
    ("storage.k8s.io", "volumeattributesclasses", &[NAME, string("DriverName", "The driver", Text("driverName")), AGE]),
];

#[rustfmt::skip]
const EVENTS: &[Column] = &[
    string("Last Seen", "When it last happened", ComputeAge(cluster::event_last_seen)),
    string("Type", "Normal or Warning", Text("type")),
    string("Reason", "Why it happened, in a word", Text("reason")),
    string("Object", "What it happened to", ComputeString(cluster::event_object)),
    wide("Subobject", "Which part of it", ComputeString(cluster::event_field)),
    wide("Source", "Who reports it", ComputeString(cluster::event_source)),
    string("Message", "What happened", ComputeString(cluster::event_message)),
    wide("First Seen", "When it first happened", ComputeAge(cluster::event_first_seen)),
    wide("Count", "How often it happened", Compute(cluster::event_count)),
    Column { priority: 1, ..NAME },
];

const ROLE_BINDINGS: &[Column] = &[
    NAME,
    string("Role", "The role that is granted", ComputeString(admission::role)),
    AGE,
    wide("Users", "Users who are granted it", ComputeString(admission::users)),
    wide("Groups", "Groups that are granted it", ComputeString(admission::groups)),
    wide(
        "ServiceAccounts",
        "Service accounts that are granted it",
        ComputeString(admission::service_accounts),
    ),
];

const WEBHOOKS: &[Column] = &[NAME, integer("Webhooks", "Number of webhooks", Count("webhooks")), AGE];

const POLICY_BINDINGS: &[Column] = &[
    NAME,
    string("PolicyName", "The policy that is bound", Text("spec.policyName")),
    string("ParamRef", "The policy's parameters", ComputeString(admission::param_ref)),
    AGE,
];

const NAME: Column = Column { format: "name", ..string("Name", NAME_DESCRIPTION, Text("metadata.name")) };
const AGE: Column = string("Age", AGE_DESCRIPTION, Age("metadata.creationTimestamp"));
const DESIRED: Column = integer("Desired", "Wanted number of pods", Int("spec.replicas"));
const CURRENT: Column = integer("Current", "Pods there are", Int("status.replicas"));
const READY: Column = integer("Ready", "Pods that are ready", Int("status.readyReplicas"));
const PARAM_KIND: Column =
    string("ParamKind", "Kind of the policy's parameters", ComputeString(admission::param_kind));
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
const LABEL_SELECTOR: Column =
    wide("Selector", SELECTOR, ComputeString(|obj| text::selector_cell(obj.path("spec.selector"))));

const CONTAINERS: &str = "Names of each container in the template.";
const IMAGES: &str = "Images referenced by each container in the template.";
const SELECTOR: &str = "Labels of the pods it selects";
/// The published descriptions of `metadata.name` and `metadata.creationTimestamp`, which clients see.
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

//! Defaults of groups with few rules.

use serde_json::{Value, json};

use super::DefaultRule::{Apply, Set};
use super::DefaultValue::{Flag, Int, List, Text};
use super::TypeDefaults;
use crate::json::JsonExt;

const RBAC: &str = "rbac.authorization.k8s.io";

pub(super) const TYPE_DEFAULTS: &[TypeDefaults] = &[
    TypeDefaults { ty: "authentication.v1.TokenRequestSpec", rules: &[Set("expirationSeconds", Int(3600))] },
    TypeDefaults {
        ty: "discovery.v1.EndpointPort",
        rules: &[Set("name", Text("")), Set("protocol", Text("TCP"))],
    },
    TypeDefaults { ty: "flowcontrol.v1.FlowSchemaSpec", rules: &[Set("matchingPrecedence", Int(1000))] },
    TypeDefaults {
        ty: "flowcontrol.v1.ExemptPriorityLevelConfiguration",
        rules: &[Set("nominalConcurrencyShares", Int(0)), Set("lendablePercent", Int(0))],
    },
    TypeDefaults {
        ty: "flowcontrol.v1.LimitedPriorityLevelConfiguration",
        rules: &[Set("nominalConcurrencyShares", Int(30)), Set("lendablePercent", Int(0))],
    },
    TypeDefaults {
        ty: "flowcontrol.v1.QueuingConfiguration",
        rules: &[Set("handSize", Int(8)), Set("queues", Int(64)), Set("queueLengthLimit", Int(50))],
    },
    TypeDefaults { ty: "networking.v1.NetworkPolicyPort", rules: &[Set("protocol", Text("TCP"))] },
    TypeDefaults { ty: "networking.v1.NetworkPolicySpec", rules: &[Apply(policy_types)] },
    TypeDefaults {
        ty: "networking.v1.IngressClassParametersReference",
        rules: &[Set("scope", Text("Cluster"))],
    },
    TypeDefaults { ty: "rbac.v1.RoleRef", rules: &[Set("apiGroup", Text(RBAC))] },
    TypeDefaults { ty: "rbac.v1.Subject", rules: &[Apply(subject)] },
    TypeDefaults { ty: "resource.v1.ExactDeviceRequest", rules: &[Apply(device_count)] },
    TypeDefaults { ty: "resource.v1.DeviceSubRequest", rules: &[Apply(device_count)] },
    TypeDefaults { ty: "resource.v1.DeviceToleration", rules: &[Set("operator", Text("Equal"))] },
    TypeDefaults {
        ty: "scheduling.v1.PriorityClass",
        rules: &[Set("preemptionPolicy", Text("PreemptLowerPriority"))],
    },
    TypeDefaults {
        ty: "storage.v1.StorageClass",
        rules: &[Set("reclaimPolicy", Text("Delete")), Set("volumeBindingMode", Text("Immediate"))],
    },
    TypeDefaults {
        ty: "storage.v1.CSIDriverSpec",
        rules: &[
            Set("attachRequired", Flag(true)),
            Set("podInfoOnMount", Flag(false)),
            Set("storageCapacity", Flag(false)),
            Set("fsGroupPolicy", Text("ReadWriteOnceWithFSType")),
            Set("volumeLifecycleModes", List(&["Persistent"])),
            Set("requiresRepublish", Flag(false)),
            Set("seLinuxMount", Flag(false)),
        ],
    },
];

fn policy_types(spec: &mut Value) {
    if spec.items("policyTypes").is_empty() {
        let egress = !spec.items("egress").is_empty();
        spec.set("policyTypes", if egress { json!(["Ingress", "Egress"]) } else { json!(["Ingress"]) });
    }
}

fn subject(subject: &mut Value) {
    if subject.text("apiGroup").is_empty() && matches!(subject.text("kind"), "User" | "Group") {
        subject.set("apiGroup", RBAC);
    }
}

fn device_count(request: &mut Value) {
    if request.text("allocationMode").is_empty() {
        request.set("allocationMode", "ExactCount");
    }
    if request.text("allocationMode") == "ExactCount" && request.int("count").unwrap_or(0) == 0 {
        request.set("count", 1);
    }
}

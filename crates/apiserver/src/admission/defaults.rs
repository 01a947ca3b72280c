//! Small mutating plugins: TaintNodesByCondition, DefaultTolerationSeconds, DefaultIngressClass,
//! PodTopologyLabels.

use api::Status;
use api::json::JsonExt as _;
use serde_json::{Value, json};

use super::service_account::push;
use super::{Cluster, Operation, Request};

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";

/// TaintNodesByCondition: taints new nodes so that no pod is scheduled to them before they are
/// ready.
pub fn not_ready_taint(request: &Request<'_>, node: &mut Value, _: &dyn Cluster) -> Result<(), Status> {
    if request.creates("", "nodes") {
        let same = |taint: &Value| taint.text("key") == NOT_READY && taint.text("effect") == "NoSchedule";
        if !node.at("spec").items("taints").iter().any(same) {
            node.object_mut("spec");
            push(&mut node["spec"], "taints", json!({"key": NOT_READY, "effect": "NoSchedule"}));
        }
    }
    Ok(())
}

/// DefaultTolerationSeconds: pods tolerate not-ready and unreachable nodes for five minutes by
/// default.
pub fn toleration_seconds(
    request: &Request<'_>,
    pod: &mut Value,
    cluster: &dyn Cluster,
) -> Result<(), Status> {
    if !request.is("", "pods") || request.operation == Operation::Delete {
        return Ok(());
    }
    for (key, seconds) in [NOT_READY, UNREACHABLE].into_iter().zip(cluster.settings().toleration_seconds) {
        let tolerates = |toleration: &Value| {
            (toleration.text("key") == key || toleration.text("key").is_empty())
                && matches!(toleration.text("effect"), "NoExecute" | "")
        };
        if !pod.at("spec").items("tolerations").iter().any(tolerates) {
            let toleration = json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
            pod.object_mut("spec");
            push(&mut pod["spec"], "tolerations", toleration);
        }
    }
    Ok(())
}

/// PodTopologyLabels: copies the region and zone labels of the node to the pod. The labels of a
/// Binding are copied to the pod when it is bound.
pub fn topology_labels(
    request: &Request<'_>,
    object: &mut Value,
    cluster: &dyn Cluster,
) -> Result<(), Status> {
    let pods = (request.row.group, request.row.plural) == ("", "pods");
    if !pods || request.operation != Operation::Create {
        return Ok(());
    }
    let target = object.at("target");
    let node = match request.subresource {
        "" => object.at("spec").text("nodeName"),
        "binding" if target.text("kind") == "Node" => target.text("name"),
        _ => "",
    };
    let Some(node) = cluster.get("", "nodes", "", node).filter(|_| !node.is_empty()) else { return Ok(()) };
    for name in ["topology.kubernetes.io/region", "topology.kubernetes.io/zone"] {
        if let Some(value) = node.label(name) {
            object.object_mut("metadata");
            object["metadata"].object_mut("labels").insert(name.into(), value.into());
        }
    }
    Ok(())
}

/// DefaultIngressClass.
pub fn ingress_class(
    request: &Request<'_>,
    ingress: &mut Value,
    cluster: &dyn Cluster,
) -> Result<(), Status> {
    const GROUP: &str = "networking.k8s.io";
    if !request.creates(GROUP, "ingresses")
        || ingress.at("spec").has("ingressClassName")
        || ingress.path("metadata.annotations").has("kubernetes.io/ingress.class")
    {
        return Ok(());
    }
    let default_annotations = &["ingressclass.kubernetes.io/is-default-class"];
    if let Some(name) = default_class_name(cluster, GROUP, "ingressclasses", default_annotations) {
        ingress.object_mut("spec").insert("ingressClassName".into(), name.into());
    }
    Ok(())
}

/// The newest object that one of `default_annotations` marks as default.
pub fn default_class_name(
    cluster: &dyn Cluster,
    group: &str,
    plural: &str,
    default_annotations: &[&str],
) -> Option<String> {
    let key = |class: &Value| {
        let metadata = class.at("metadata");
        // RFC 3339 timestamps in UTC sort as text. Of two equally new objects the first by name
        // wins.
        (metadata.text("creationTimestamp").to_owned(), std::cmp::Reverse(metadata.text("name").to_owned()))
    };
    let classes = cluster.list(group, plural, "");
    let values = classes.iter().map(|class| class.value());
    let defaults = values.filter(|class| {
        let annotations = class.at("metadata").at("annotations");
        default_annotations.iter().any(|annotation| annotations.text(annotation) == "true")
    });
    let latest = defaults.max_by_key(key)?;
    Some(latest.at("metadata").text("name").to_owned())
}

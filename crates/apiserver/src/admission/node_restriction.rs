//! NodeRestriction: a kubelet may only write its own Node, its pods and objects that belong to
//! them.
//!
//! Complements the node authorizer (`node_authorizer`), which decides without the object.

use std::collections::BTreeSet;

use api::Status;
use api::certificates::certificate_signing_request::common_names;
use api::field::quote;
use api::json::JsonExt as _;
use serde_json::Value;

use super::{Cluster, Operation, Request};
use crate::node_authorizer::references::{
    MIRROR_ANNOTATION, ephemeral_claims, forbidden_in_mirror, is_mirror,
};
use crate::node_authorizer::{NODE_LEASE_NAMESPACE, node_name_of};
use crate::rbac::Attributes;

pub fn admit(request: &Request<'_>, object: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let Some(user) = request.user else { return Ok(()) };
    let Some(node) = node_name_of(user) else { return Ok(()) };
    if node.is_empty() {
        return Err(request.forbidden(format!("could not determine node from user {}", quote(&user.name))));
    }
    let write = NodeWrite { request, object, cluster, node };
    match (request.row.group, request.row.plural, request.subresource) {
        ("", "pods", "") => write.admit_pod(),
        ("", "pods", "status") => write.admit_pod_status(),
        ("", "pods", "eviction") => write.admit_pod_eviction(),
        ("", "pods", other) => write.deny(format!(
            "unexpected pod subresource {}, only 'status' and 'eviction' are allowed",
            quote(other)
        )),
        ("", "nodes", _) => write.admit_node(),
        ("", "persistentvolumeclaims", "status") => write.admit_pvc_status(),
        ("", "persistentvolumeclaims", _) => write.deny("may only update PVC status"),
        ("", "serviceaccounts", "token") => write.admit_service_account_token(),
        ("coordination.k8s.io", "leases", _) => write.admit_lease(),
        ("storage.k8s.io", "csinodes", _) => {
            write.require_own_name("can only access CSINode with the same name as the requesting node")
        }
        ("resource.k8s.io", "resourceslices", _) => write.admit_resource_slice(),
        ("certificates.k8s.io", "certificatesigningrequests", _) => write.admit_csr(),
        _ => Ok(()),
    }
}

/// A write by a node.
struct NodeWrite<'a> {
    request: &'a Request<'a>,
    object: &'a Value,
    cluster: &'a dyn Cluster,
    node: &'a str,
}

type AdmitResult = Result<(), Status>;

impl NodeWrite<'_> {
    fn deny(&self, reason: impl AsRef<str>) -> AdmitResult {
        Err(self.request.forbidden(reason))
    }

    /// Replaces `{}` in the reason by the quoted node name.
    fn deny_with_node_name(&self, reason: &str) -> AdmitResult {
        self.deny(reason.replace("{}", &quote(self.node)))
    }

    fn unexpected(&self) -> AdmitResult {
        self.deny(format!("unexpected operation {}", quote(self.request.operation.as_str())))
    }

    fn old(&self) -> &Value {
        self.request.old.unwrap_or(&Value::Null)
    }

    fn operation(&self) -> Operation {
        self.request.operation
    }

    fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Result<Value, Status> {
        let found = self.cluster.get(group, plural, namespace, name);
        found.map(|object| object.value()).ok_or_else(|| Status::not_found(group, plural, name))
    }

    /// The name of the written object; empty if it is still to be generated.
    fn name(&self) -> &str {
        match self.operation() {
            Operation::Create => self.object.at("metadata").text("name"),
            _ => &self.request.name,
        }
    }

    fn require_own_name(&self, reason: &str) -> AdmitResult {
        if self.name() == self.node { Ok(()) } else { self.deny(reason) }
    }

    fn admit_pod(&self) -> AdmitResult {
        match self.operation() {
            Operation::Create => self.admit_mirror_pod(),
            Operation::Connect => Ok(()),
            Operation::Delete if self.old().at("spec").text("nodeName") == self.node => Ok(()),
            Operation::Delete => {
                self.deny_with_node_name("node {} can only delete pods with spec.nodeName set to itself")
            }
            Operation::Update => self.deny(format!(
                "unexpected operation \"UPDATE\", node {} can only create and delete mirror pods",
                quote(self.node)
            )),
        }
    }

    /// Nodes may only create mirror pods.
    fn admit_mirror_pod(&self) -> AdmitResult {
        let metadata = self.object.at("metadata");
        if !is_mirror(self.object) {
            return self.deny(format!(
                "pod does not have {} annotation, node {} can only create mirror pods",
                quote(MIRROR_ANNOTATION),
                quote(self.node)
            ));
        }
        if self.object.at("spec").text("nodeName") != self.node {
            return self.deny_with_node_name("node {} can only create pods with spec.nodeName set to itself");
        }
        let owner = match metadata.items("ownerReferences") {
            [owner] => owner,
            [] => {
                return self.deny_with_node_name(
                    "node {} can only create pods with an owner reference set to itself",
                );
            }
            _ => {
                return self.deny_with_node_name(
                    "node {} can only create pods with a single owner reference set to itself",
                );
            }
        };
        let (version, kind) = (owner.text("apiVersion"), owner.text("kind"));
        if (version, kind, owner.text("name")) != ("v1", "Node", self.node) {
            return self
                .deny_with_node_name("node {} can only create pods with an owner reference set to itself");
        }
        if !owner.flag("controller") {
            return self.deny_with_node_name(
                "node {} can only create pods with a controller owner reference set to itself",
            );
        }
        if owner.flag("blockOwnerDeletion") {
            return self.deny_with_node_name("node {} must not set blockOwnerDeletion on an owner reference");
        }
        let node = self.get("", "nodes", "", self.node)?;
        let (owner_uid, uid) = (owner.text("uid"), node.at("metadata").text("uid"));
        if owner_uid != uid {
            return self.deny(format!("node {} UID mismatch: expected {owner_uid} got {uid}", self.node));
        }
        match forbidden_in_mirror(self.object) {
            Ok(None) => Ok(()),
            Ok(Some(what)) => {
                let reason = format!("node {} can not create pods that reference {what}", quote(self.node));
                self.deny(reason)
            }
            Err(reason) => self.deny(format!("error checking mirror pod for API references: {reason}")),
        }
    }

    fn admit_pod_status(&self) -> AdmitResult {
        if self.operation() != Operation::Update {
            return self.unexpected();
        }
        let (new, old) = (self.object, self.old());
        if old.at("spec").text("nodeName") != self.node {
            return self.deny_with_node_name(
                "node {} can only update pod status for pods with spec.nodeName set to itself",
            );
        }
        let differs = |path: &str| !equal_or_both_empty(new.path(path), old.path(path));
        if differs("metadata.labels") {
            return self.deny_with_node_name("node {} cannot update labels through pod status");
        }
        if differs("status.resourceClaimStatuses") {
            return self.deny_with_node_name("node {} cannot update resource claim statues");
        }
        if differs("status.extendedResourceClaimStatus") {
            return self.deny_with_node_name("node {} cannot update extended resource claim status");
        }
        Ok(())
    }

    fn admit_pod_eviction(&self) -> AdmitResult {
        let request = self.request;
        if self.operation() != Operation::Create {
            return self.deny(format!("unexpected operation {}", self.operation().as_str()));
        }
        let pod = self.get("", "pods", request.namespace, &request.name)?;
        if pod.at("spec").text("nodeName") != self.node {
            let reason = format!("node {} can only evict pods with spec.nodeName set to itself", self.node);
            return self.deny(reason);
        }
        Ok(())
    }

    fn admit_pvc_status(&self) -> AdmitResult {
        if self.operation() != Operation::Update {
            return self.unexpected();
        }
        let rest = |claim: &Value| {
            let mut claim = claim.clone();
            let metadata = claim.object_mut("metadata");
            ["resourceVersion", "managedFields"].iter().for_each(|field| drop(metadata.remove(*field)));
            let status = claim.object_mut("status");
            for field in ["capacity", "conditions", "allocatedResources", "allocatedResourceStatuses"] {
                status.remove(field);
            }
            claim
        };
        let (new, old) = (rest(self.object), rest(self.old()));
        let fields = ["metadata", "spec", "status"].into_iter();
        let changed: Vec<&str> =
            fields.filter(|field| !equal_or_both_empty(new.at(field), old.at(field))).collect();
        if changed.is_empty() {
            return Ok(());
        }
        self.deny(format!(
            "node {} is not allowed to update fields other than status.quantity and status.conditions: {} changed",
            quote(self.node),
            changed.join(", ")
        ))
    }

    fn admit_node(&self) -> AdmitResult {
        if self.name() != self.node {
            return self.deny(format!(
                "node {} is not allowed to modify node {}",
                quote(self.node),
                quote(self.name())
            ));
        }
        let (new, old) = (self.object, self.old());
        let source = new.at("spec").at("configSource");
        let labels = forbidden_labels(new, old).join(", ");
        match self.operation() {
            Operation::Delete | Operation::Connect => Ok(()),
            Operation::Create if !source.is_null() => {
                self.deny_with_node_name("node {} is not allowed to create pods with a non-nil configSource")
            }
            Operation::Create if !labels.is_empty() => self.deny_with_node_name(&format!(
                "node {{}} is not allowed to set the following labels: {labels}"
            )),
            Operation::Create => Ok(()),
            Operation::Update => {
                let differs = |path: &str| !equal_or_both_empty(new.path(path), old.path(path));
                if !source.is_null() && differs("spec.configSource") {
                    let reason =
                        "node {} is not allowed to update configSource to a new non-nil configSource";
                    return self.deny_with_node_name(reason);
                }
                if differs("spec.taints") {
                    return self.deny_with_node_name("node {} is not allowed to modify taints");
                }
                if differs("metadata.ownerReferences") {
                    return self.deny_with_node_name("node {} is not allowed to modify ownerReferences");
                }
                if !labels.is_empty() {
                    return self.deny(format!("is not allowed to modify labels: {labels}"));
                }
                Ok(())
            }
        }
    }

    /// Kubelets may only request tokens that are bound to one of their pods.
    fn admit_service_account_token(&self) -> AdmitResult {
        if self.operation() != Operation::Create {
            return Ok(());
        }
        let reference = self.object.path("spec.boundObjectRef");
        let name = reference.text("name");
        if (reference.text("apiVersion"), reference.text("kind")) != ("v1", "Pod") || name.is_empty() {
            return self.deny("node requested token not bound to a pod");
        }
        let uid = reference.text("uid");
        if uid.is_empty() {
            return self.deny("node requested token with a pod binding without a uid");
        }
        let pod = self.get("", "pods", self.request.namespace, name)?;
        if pod.at("metadata").text("uid") != uid {
            return self.deny(format!(
                "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
            ));
        }
        if pod.at("spec").text("nodeName") != self.node {
            return self.deny("node requested token bound to a pod scheduled on a different node");
        }
        let audience = match self.object.at("spec").items("audiences") {
            [] => "",
            [one] => one.as_str().unwrap_or(""),
            _ => return self.deny("node may only request 0 or 1 audiences"),
        };
        match self.has_audience(&pod, audience) {
            Ok(true) => Ok(()),
            Ok(false) => self.authorize_audience(audience),
            Err(reason) => self.deny(format!("error validating audience {}: {reason}", quote(audience))),
        }
    }

    /// Whether a volume of the pod, or the CSI driver of one, requests tokens for the audience.
    fn has_audience(&self, pod: &Value, audience: &str) -> Result<bool, String> {
        let mut errors = Vec::new();
        let mut ephemeral = ephemeral_claims(pod);
        for volume in pod.at("spec").items("volumes") {
            let mut tokens = volume.at("projected").items("sources").iter();
            let matches_audience = |source: &Value| {
                source.has("serviceAccountToken")
                    && source.at("serviceAccountToken").text("audience") == audience
            };
            if tokens.any(matches_audience) {
                return Ok(true);
            }
            let claim = match volume.has("ephemeral") {
                true => ephemeral.next().unwrap_or_default(),
                false => volume.at("persistentVolumeClaim").text("claimName").to_owned(),
            };
            let driver = match claim.as_str() {
                "" => Ok(volume.at("csi").text("driver").to_owned()),
                claim => self.driver_of(claim),
            };
            let requested = driver.and_then(|driver| match driver.as_str() {
                "" => Ok(false),
                driver => {
                    let driver = self.get("storage.k8s.io", "csidrivers", "", driver)?;
                    let mut token_requests = driver.at("spec").items("tokenRequests").iter();
                    Ok(token_requests.any(|request| request.text("audience") == audience))
                }
            });
            match requested {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(status) => errors.push(status.message),
            }
        }
        if errors.is_empty() { Ok(false) } else { Err(crate::rbac::aggregate_errors(&errors)) }
    }

    fn driver_of(&self, claim: &str) -> Result<String, Status> {
        let claim = self.get("", "persistentvolumeclaims", self.request.namespace, claim)?;
        let volume = self.get("", "persistentvolumes", "", claim.at("spec").text("volumeName"))?;
        Ok(volume.path("spec.csi.driver").as_str().unwrap_or("").to_owned())
    }

    /// Any other audience requires the `request-serviceaccounts-token-audience` permission.
    fn authorize_audience(&self, audience: &str) -> AdmitResult {
        let Some(user) = self.request.user else { return Ok(()) };
        let attributes = Attributes::Resource {
            verb: "request-serviceaccounts-token-audience",
            group: "",
            resource: audience,
            subresource: "",
            namespace: self.request.namespace,
            name: &self.request.name,
            fields: None,
        };
        if self.cluster.allows(user, &attributes) {
            return Ok(());
        }
        self.deny(format!(
            "audience {} not found in pod spec volume, {} is not authorized to request tokens for this audience",
            quote(audience),
            user.name
        ))
    }

    fn admit_lease(&self) -> AdmitResult {
        if self.request.namespace != NODE_LEASE_NAMESPACE {
            return self.deny(format!(
                "can only access leases in the {} system namespace",
                quote(NODE_LEASE_NAMESPACE)
            ));
        }
        self.require_own_name("can only access node lease with the same name as the requesting node")
    }

    fn admit_resource_slice(&self) -> AdmitResult {
        let (slice, verb) = match self.operation() {
            Operation::Create => (self.object, "create"),
            Operation::Delete => (self.old(), "delete"),
            Operation::Update | Operation::Connect => return Ok(()),
        };
        if slice.at("spec").text("nodeName") == self.node {
            return Ok(());
        }
        self.deny(format!("can only {verb} ResourceSlice with the same NodeName as the requesting node"))
    }

    fn admit_csr(&self) -> AdmitResult {
        const SIGNERS: [&str; 2] =
            ["kubernetes.io/kubelet-serving", "kubernetes.io/kube-apiserver-client-kubelet"];
        let signer = self.object.at("spec").text("signerName");
        if self.operation() != Operation::Create || !SIGNERS.contains(&signer) {
            return Ok(());
        }
        let expected = format!("system:node:{}", self.node);
        match common_names(self.object) {
            Err(reason) => self.deny(format!("unable to parse csr: {reason}")),
            Ok(names) if names == [expected.as_str()] => Ok(()),
            Ok(_) => self.deny(format!("can only create a node CSR with CN={expected}")),
        }
    }
}

/// Labels under `kubernetes.io` and `k8s.io` that a kubelet may set on its node.
const KUBELET_LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];

/// Changed labels that could attract pods that are not meant for this node.
fn forbidden_labels(new: &Value, old: &Value) -> Vec<String> {
    let (new, old) = (new.at("metadata"), old.at("metadata"));
    let names: BTreeSet<&str> =
        new.entries("labels").chain(old.entries("labels")).map(|(name, _)| name).collect();
    let changed = names.into_iter().filter(|name| new.at("labels").get(name) != old.at("labels").get(name));
    changed.filter(|name| is_forbidden(name)).map(str::to_owned).collect()
}

fn is_forbidden(label: &str) -> bool {
    let domain = label.split_once('/').map_or("", |(domain, _)| domain);
    let within =
        |suffix: &str| domain.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    let own =
        KUBELET_LABELS.contains(&label) || within("kubelet.kubernetes.io") || within("node.kubernetes.io");
    within("node-restriction.kubernetes.io") || (within("kubernetes.io") || within("k8s.io")) && !own
}

/// Equality that treats null, empty objects and empty lists as absent.
fn equal_or_both_empty(a: &Value, b: &Value) -> bool {
    let empty = |value: &Value| match value {
        Value::Null => true,
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            x.keys().chain(y.keys()).all(|key| equal_or_both_empty(a.at(key), b.at(key)))
        }
        (Value::Array(x), Value::Array(y)) => {
            x.len() == y.len() && x.iter().zip(y).all(|(x, y)| equal_or_both_empty(x, y))
        }
        _ => a == b || empty(a) && empty(b),
    }
}

#[cfg(test)]
mod tests;

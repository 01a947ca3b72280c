//! Authorization of device allocation (DRA): admin access requires a label on the namespace,
//! changing allocation and reservation requires permission on `resourceclaims/binding`, changing
//! device status requires permission on `resourceclaims/driver`.
//!
//! Upstream does this in the registry strategies of the kinds and not in an admission plugin, so it
//! cannot be disabled.

use std::collections::{BTreeMap, BTreeSet};

use api::Status;
use api::field::{ErrorList, Path};
use api::json::JsonExt as _;
use serde_json::Value;

use super::{Cluster, Operation, Request};
use crate::access::User;
use crate::rbac::Attributes;

const GROUP: &str = "resource.k8s.io";
const CLAIMS: &str = "resourceclaims";
const ADMIN: &str = "resource.kubernetes.io/admin-access";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

pub fn validate(request: &Request<'_>, object: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if request.row.group != GROUP {
        return Ok(());
    }
    let mut errors = ErrorList::default();
    match (request.operation, request.row.plural, request.subresource) {
        (Operation::Create, CLAIMS, "") => admin_request(request, object.at("spec"), cluster, &mut errors),
        (Operation::Create, "resourceclaimtemplates", "") => {
            admin_request(request, object.path("spec.spec"), cluster, &mut errors);
        }
        (Operation::Update, CLAIMS, "status") => {
            let (new, old) = (object.at("status"), request.old.unwrap_or(&Value::Null).at("status"));
            admin_result(request, (new, old), cluster, &mut errors);
            if let Some(user) = request.user {
                let authorizer = ClaimAuthorizer { request, user, cluster };
                authorizer.check_binding((new, old), &mut errors);
                authorizer.check_drivers((new, old), &mut errors);
            }
        }
        _ => {}
    }
    if errors.is_empty() {
        return Ok(());
    }
    Err(Status::invalid(GROUP, request.row.kind, &request.name, &errors))
}

/// As upstream: checks the requests of the spec and reports the field path without `exactly`.
fn admin_request(request: &Request<'_>, spec: &Value, cluster: &dyn Cluster, errors: &mut ErrorList) {
    let requests = spec.at("devices").items("requests");
    if let Some(at) = requests.iter().position(|one| one.at("exactly").at("adminAccess") == true) {
        let path = Path::new("spec").child("devices").child("requests").index(at).child("adminAccess");
        check_admin_namespace(request, cluster, &path, errors);
    }
}

fn admin_result(
    request: &Request<'_>,
    (new, old): (&Value, &Value),
    cluster: &dyn Cluster,
    errors: &mut ErrorList,
) {
    let admin_result_index = |status: &Value| {
        let results = status.path("allocation.devices").items("results");
        results.iter().position(|one| one.at("adminAccess") == true)
    };
    if let (None, Some(at)) = (admin_result_index(old), admin_result_index(new)) {
        let results = Path::new("status").child("allocation").child("devices").child("results");
        check_admin_namespace(request, cluster, &results.index(at).child("adminAccess"), errors);
    }
}

fn check_admin_namespace(request: &Request<'_>, cluster: &dyn Cluster, path: &Path, errors: &mut ErrorList) {
    let namespace = cluster.get("", "namespaces", "", request.namespace);
    if namespace.is_none_or(|namespace| namespace.label(ADMIN) != Some("true")) {
        let reason =
            format!("admin access to devices requires the `{ADMIN}: true` label on the containing namespace");
        errors.forbidden(path, &reason);
    }
}

struct ClaimAuthorizer<'a> {
    request: &'a Request<'a>,
    user: &'a User,
    cluster: &'a dyn Cluster,
}

impl ClaimAuthorizer<'_> {
    fn verb(&self) -> &'static str {
        if self.request.is_patch { "patch" } else { "update" }
    }

    /// `None` if allowed, otherwise the reason.
    fn denied_reason(&self, verb: &str, subresource: &str, namespace: &str, name: &str) -> Option<String> {
        let (group, resource) = (GROUP, CLAIMS);
        let attributes =
            Attributes::Resource { verb, group, resource, subresource, namespace, name, fields: None };
        let allowed = self.cluster.allows(self.user, &attributes);
        (!allowed).then(|| attributes.forbidden_status(self.user, "").message)
    }

    /// Changing `allocation` or `reservedFor` requires permission on `resourceclaims/binding`.
    fn check_binding(&self, (new, old): (&Value, &Value), errors: &mut ErrorList) {
        let same = |field: &str| equal_or_both_empty(new.at(field), old.at(field));
        if same("allocation") && same("reservedFor") {
            return;
        }
        let verb = self.verb();
        if let Some(reason) = self.denied_reason(verb, "binding", "", "") {
            let reason = format!(
                "changing status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\", verb=\"{verb}\" permission: {reason}"
            );
            errors.forbidden(&Path::new("status").child("allocation"), &reason);
        }
    }

    /// Changing `status.devices` requires permission for the driver, on the node of the claim or on
    /// any node.
    fn check_drivers(&self, (new, old): (&Value, &Value), errors: &mut ErrorList) {
        if new.at("allocation").is_null() {
            return;
        }
        let any = format!("arbitrary-node:{}", self.verb());
        let verbs = match self.is_on_node(node_of(new.at("allocation"))) {
            true => vec![format!("associated-node:{}", self.verb()), any],
            false => vec![any],
        };
        for driver in changed_drivers(new, old) {
            let denied_reasons =
                verbs.iter().map(|verb| self.denied_reason(verb, "driver", self.request.namespace, driver));
            let denied_reasons: Option<Vec<String>> = denied_reasons.collect();
            if let Some(reason) = denied_reasons.and_then(|all| all.into_iter().next()) {
                let verbs = verbs.join(" ");
                let reason = format!(
                    "changing status.devices requires resource=\"resourceclaims/driver\", verb=\"[{verbs}]\" permission: {reason}"
                );
                errors.forbidden(&Path::new("status").child("devices"), &reason);
            }
        }
    }

    /// Whether the user is a service account whose token is bound to a pod on `node`.
    fn is_on_node(&self, node: &str) -> bool {
        let is_account = self.user.name.strip_prefix("system:serviceaccount:").is_some();
        let own = self.user.extra.get(NODE_NAME).map(Vec::as_slice).unwrap_or_default();
        is_account && !node.is_empty() && matches!(own, [own] if own == node)
    }
}

fn equal_or_both_empty(one: &Value, other: &Value) -> bool {
    let is_empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    one == other || is_empty(one) && is_empty(other)
}

/// The node of the allocation, if its devices are local to one node.
fn node_of(allocation: &Value) -> &str {
    let [term] = allocation.at("nodeSelector").items("nodeSelectorTerms") else { return "" };
    let ([], [field]) = (term.items("matchExpressions"), term.items("matchFields")) else { return "" };
    match field.items("values") {
        [node] if field.text("key") == "metadata.name" && field.text("operator") == "In" => {
            node.as_str().unwrap_or_default()
        }
        _ => "",
    }
}

fn changed_drivers<'a>(new: &'a Value, old: &'a Value) -> BTreeSet<&'a str> {
    let key = |device: &'a Value| ["driver", "pool", "device", "shareID"].map(|field| device.text(field));
    let mut before: BTreeMap<_, &Value> =
        old.items("devices").iter().map(|device| (key(device), device)).collect();
    let mut drivers = BTreeSet::new();
    for device in new.items("devices") {
        if before.remove(&key(device)) != Some(device) {
            drivers.insert(device.text("driver"));
        }
    }
    drivers.extend(before.values().map(|device| device.text("driver")));
    drivers
}

#[cfg(test)]
mod tests;

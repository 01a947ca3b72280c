//! NamespaceLifecycle: rejects creation in missing or terminating namespaces, and deletion of
//! protected namespaces.

use api::Status;
use api::status::StatusCause;
use serde_json::Value;

use super::{Cluster, Operation, Request};

/// Namespaces that may not be deleted.
const PROTECTED_NAMESPACES: &[&str] = &["default", "kube-system", "kube-public"];

pub fn admit(request: &Request<'_>, _: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if request.is("", "namespaces") {
        return match request.operation == Operation::Delete
            && PROTECTED_NAMESPACES.contains(&request.name.as_str())
        {
            true => Err(request.forbidden("this namespace may not be deleted")),
            false => Ok(()),
        };
    }
    let review = request.row.plural == "localsubjectaccessreviews";
    if request.namespace.is_empty() || request.operation != Operation::Create || review {
        return Ok(());
    }
    let name = request.namespace;
    let Some(namespace) = cluster.get("", "namespaces", "", name) else {
        return Err(Status::not_found("", "namespaces", name));
    };
    // The phase is read from the cached selector fields to avoid decoding the object.
    let rules = api::resource_table::find_resource("", "v1", "namespaces")
        .expect("namespaces are in the table")
        .strategy;
    let phase = namespace.fields(rules).iter().find(|(field, _)| *field == "status.phase");
    if phase.is_none_or(|(_, phase)| **phase != *"Terminating") {
        return Ok(());
    }
    let mut status = request.forbidden(format!(
        "unable to create new content in namespace {name} because it is being terminated"
    ));
    status.details.get_or_insert_default().causes.push(StatusCause {
        reason: "NamespaceTerminating".into(),
        message: format!("namespace {name} is being terminated"),
        field: "metadata.namespace".into(),
    });
    Err(status)
}

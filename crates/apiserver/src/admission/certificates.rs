//! The CertificateSigningRequest plugins: CertificateApproval, CertificateSigning,
//! CertificateSubjectRestriction.

use api::Status;
use api::certificates::certificate_signing_request::organizations;
use api::field::quote;
use api::json::JsonExt as _;
use serde_json::Value;

use super::{Cluster, Operation, Request};
use crate::rbac::Attributes;

const GROUP: &str = "certificates.k8s.io";
const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client";

/// CertificateApproval: the user must have `approve` permission for the signer.
pub fn approval(request: &Request<'_>, _: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    if changes(request, "approval") {
        let signer = signer(request);
        return authorize_signer(request, cluster, "approve", signer);
    }
    Ok(())
}

/// CertificateSigning: the user must have `sign` permission for the signer.
pub fn signing(request: &Request<'_>, csr: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let old = request.old.unwrap_or(&Value::Null);
    let differs = |field: &str| csr.at("status").get(field) != old.at("status").get(field);
    if changes(request, "status") && (differs("certificate") || differs("conditions")) {
        return authorize_signer(request, cluster, "sign", signer(request));
    }
    Ok(())
}

/// CertificateSubjectRestriction: no client certificates for `system:masters`.
pub fn subject(request: &Request<'_>, csr: &Value, _: &dyn Cluster) -> Result<(), Status> {
    if !request.creates(GROUP, "certificatesigningrequests")
        || csr.at("spec").text("signerName") != CLIENT_SIGNER
    {
        return Ok(());
    }
    let groups =
        organizations(csr).map_err(|reason| request.forbidden(format!("failed to parse CSR: {reason}")))?;
    if groups.iter().any(|group| group == "system:masters") {
        return Err(request
            .forbidden(format!("use of {CLIENT_SIGNER} signer with system:masters group is not allowed")));
    }
    Ok(())
}

fn changes(request: &Request<'_>, subresource: &str) -> bool {
    request.operation == Operation::Update
        && (request.row.group, request.row.plural) == (GROUP, "certificatesigningrequests")
        && request.subresource == subresource
}

/// The stored signer name: an update through a subresource cannot change it.
fn signer<'a>(request: &Request<'a>) -> &'a str {
    request.old.unwrap_or(&Value::Null).at("spec").text("signerName")
}

/// Permission may be granted for one signer (`domain/name`) or for all signers of a domain
/// (`domain/*`).
fn authorize_signer(
    request: &Request<'_>,
    cluster: &dyn Cluster,
    verb: &str,
    signer: &str,
) -> Result<(), Status> {
    // The server's own controllers need no permission.
    let Some(user) = request.user else { return Ok(()) };
    let domain = format!("{}/*", signer.split('/').next().unwrap_or(""));
    let allowed = [signer, &domain].into_iter().any(|name| {
        let (group, resource) = (GROUP, "signers");
        let attributes = Attributes::Resource {
            verb,
            group,
            resource,
            subresource: "",
            namespace: "",
            name,
            fields: None,
        };
        cluster.allows(user, &attributes)
    });
    if allowed {
        return Ok(());
    }
    Err(request.forbidden(format!("user not permitted to {verb} requests with signerName {}", quote(signer))))
}

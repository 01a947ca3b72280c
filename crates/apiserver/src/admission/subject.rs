//! CertificateSubjectRestriction: nobody asks for a certificate that would make them all-powerful.

use api::Status;
use api::certificates::certificate_signing_request::organizations;
use api::json::Json as _;
use serde_json::Value;

use super::{Cluster, Request};

const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client";

pub fn validate(request: &Request<'_>, csr: &Value, _: &dyn Cluster) -> Result<(), Status> {
    if !request.creates("certificates.k8s.io", "certificatesigningrequests")
        || csr.at("spec").text("signerName") != CLIENT_SIGNER
    {
        return Ok(());
    }
    let groups =
        organizations(csr).map_err(|why| request.forbidden(format!("failed to parse CSR: {why}")))?;
    if groups.iter().any(|group| group == "system:masters") {
        return Err(request
            .forbidden(format!("use of {CLIENT_SIGNER} signer with system:masters group is not allowed")));
    }
    Ok(())
}

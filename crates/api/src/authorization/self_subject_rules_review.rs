//! SelfSubjectRulesReview: what may I do in this namespace? Nothing about it can be invalid; a missing
//! namespace is a bad request.

use serde_json::Value;

use crate::Status;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct SelfSubjectRulesReview;

impl RestStrategy for SelfSubjectRulesReview {}

/// The namespace asked about.
#[allow(clippy::result_large_err, reason = "a refusal is rare, and callers hand it on as it is")]
pub fn namespace(review: &Value) -> Result<&str, Status> {
    match review.at("spec").text("namespace") {
        "" => Err(Status::bad_request("no namespace on request")),
        namespace => Ok(namespace),
    }
}

//! SelfSubjectRulesReview: lists the actions that the current user may perform in a namespace. It has
//! no validation; a missing namespace is a bad request.

use serde_json::Value;

use crate::Status;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct SelfSubjectRulesReview;

impl RestStrategy for SelfSubjectRulesReview {}

/// The namespace to review.
#[allow(clippy::result_large_err, reason = "errors are rare, and callers return them unchanged")]
pub fn namespace(review: &Value) -> Result<&str, Status> {
    match review.at("spec").text("namespace") {
        "" => Err(Status::bad_request("no namespace on request")),
        namespace => Ok(namespace),
    }
}

//! TokenReview: authenticates a token. It has no validation; a missing token is a bad request.

use serde_json::Value;

use crate::Status;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct TokenReview;

impl RestStrategy for TokenReview {}

/// The token to review.
#[allow(clippy::result_large_err, reason = "errors are rare, and callers return them unchanged")]
pub fn token(review: &Value) -> Result<&str, Status> {
    match review.at("spec").text("token") {
        "" => Err(Status::bad_request("token is required for TokenReview in authentication")),
        token => Ok(token),
    }
}

//! TokenReview: whose token is this? Nothing about it can be invalid; a missing token is a bad request.

use serde_json::Value;

use crate::Status;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct TokenReview;

impl RestStrategy for TokenReview {}

/// The token asked about.
#[allow(clippy::result_large_err, reason = "a refusal is rare, and callers hand it on as it is")]
pub fn token(review: &Value) -> Result<&str, Status> {
    match review.at("spec").text("token") {
        "" => Err(Status::bad_request("token is required for TokenReview in authentication")),
        token => Ok(token),
    }
}

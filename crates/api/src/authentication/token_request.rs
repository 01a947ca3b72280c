//! TokenRequest: the body of the `token` subresource of ServiceAccounts.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

const MIN_SECONDS: i64 = 10 * 60;
const MAX_SECONDS: i64 = 1 << 32;
const DEFAULT_SECONDS: i64 = 60 * 60;

/// The requested lifetime of the token. The default is one hour, as upstream.
pub fn expiration_seconds(request: &Value) -> i64 {
    request.at("spec").int("expirationSeconds").unwrap_or(DEFAULT_SECONDS)
}

pub fn validate(request: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec.expirationSeconds");
    let seconds = expiration_seconds(request);
    if seconds < MIN_SECONDS {
        errors.invalid(&path, seconds, "may not specify a duration less than 10 minutes");
    }
    if seconds > MAX_SECONDS {
        errors.invalid(&path, seconds, "may not specify a duration larger than 2^32 seconds");
    }
}

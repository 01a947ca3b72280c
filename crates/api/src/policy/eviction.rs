//! Eviction: the body of the `eviction` subresource of pods.

use serde_json::Value;

use crate::Status;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

/// Validates an Eviction of the pod `name` and returns the delete options. `dry_run` is the `dryRun`
/// parameter of the request.
#[allow(clippy::result_large_err, reason = "errors are rare, and callers return them unchanged")]
pub fn delete_options(eviction: &Value, name: &str, dry_run: &[&str]) -> Result<Value, Status> {
    if eviction.at("metadata").text("name") != name {
        return Err(Status::bad_request("name in URL does not match name in Eviction object"));
    }
    let mut options = eviction.at("deleteOptions").clone();
    let field = "ignoreStoreReadErrorWithClusterBreakingPotential";
    if options.flag(field) {
        let mut errors = ErrorList::default();
        errors.invalid(
            &Path::new("deleteOptions").child(field),
            true,
            "can not be set for pod eviction, try after removing the option",
        );
        return Err(Status::invalid("policy", "Eviction", name, &errors));
    }
    if options.is_null() {
        options = Value::Object(serde_json::Map::new());
    }
    let requested_dry_run: Vec<&str> = options.items("dryRun").iter().filter_map(Value::as_str).collect();
    if requested_dry_run.is_empty() {
        if !dry_run.is_empty() {
            options.set("dryRun", dry_run);
        }
    } else if !dry_run.is_empty() && requested_dry_run != dry_run {
        let (requested_dry_run, dry_run) = (requested_dry_run.join(" "), dry_run.join(" "));
        let message = format!(
            "Non-matching dry-run options in request and content: [{dry_run}] and [{requested_dry_run}]"
        );
        return Err(Status::failure(500, "InternalError", message));
    }
    Ok(options)
}

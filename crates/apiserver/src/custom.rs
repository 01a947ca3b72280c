//! Custom resources: what differs for them when requests are handled, and the controller for their
//! definitions.
//!
//! An object is stored in the storage version and with the schema of the time it was written.
//! Clients see it converted to the requested version and pruned and defaulted by the current schema
//! ([`versions`]). If that changes nothing, the stored bytes are served directly.

mod controller;
mod decode;
mod versions;
mod webhook;

use api::Status;

use crate::negotiate::{MediaType, OutputKind};
use crate::request::Target;
use crate::server::Call;

pub use controller::{Definitions, run_controller};
pub use decode::{NO_PROTOBUF, decode, normalize, not_acceptable};
pub use webhook::ConversionWebhooks;

/// Checks custom resource requests before anything else: there is no protobuf encoding.
pub fn check_request(call: &Call, verb: &str) -> Result<(), Status> {
    if call.format.media == MediaType::Protobuf
        && call.format.output_kind == OutputKind::Object
        && verb != "deletecollection"
    {
        return Err(not_acceptable());
    }
    Ok(())
}

/// Rejects new objects of a terminating definition.
pub fn check_creation(target: &Target, name: &str) -> Result<(), Status> {
    let row = target.resource;
    let terminating = row.custom.is_some_and(|crd| {
        api::custom::is_condition_true(&crd.definition().conditions, api::custom::TERMINATING_CONDITION)
    });
    if terminating {
        let reason = "create not allowed while custom resource definition is terminating";
        return Err(Status::forbidden(row.group, row.plural, name, reason));
    }
    Ok(())
}

//! Custom kinds: what differs for them on the way of a request, and the loop that follows their definitions.
//!
//! An object is stored in the version that was the storage version when it was written, and by the schema of
//! that time. What clients see and change is the object brought to the version they ask for and to the
//! schema as it is now ([`versions`]); where that changes nothing, its bytes are handed out like any others.

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

/// What is refused of custom kinds before anything else is looked at.
pub fn check_request(call: &Call, verb: &str) -> Result<(), Status> {
    if call.format.media == MediaType::Protobuf
        && call.format.output_kind == OutputKind::Object
        && verb != "deletecollection"
    {
        return Err(not_acceptable());
    }
    Ok(())
}

/// Of a kind that goes, nothing new is made.
pub fn check_creation(target: &Target, name: &str) -> Result<(), Status> {
    let row = target.resource;
    let terminating = row.custom.is_some_and(|crd| {
        api::custom::is_true(&crd.definition().conditions, api::custom::TERMINATING_CONDITION)
    });
    if terminating {
        let reason = "create not allowed while custom resource definition is terminating";
        return Err(Status::forbidden(row.group, row.plural, name, reason));
    }
    Ok(())
}

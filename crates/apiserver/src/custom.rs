//! Custom kinds: what differs for them on the way of a request, and the loop that follows their definitions.
//!
//! An object is stored in the version that was the storage version when it was written, and by the schema of
//! that time. What clients see and change is the object brought to the version they ask for and to the
//! schema as it is now ([`versions`]); where that changes nothing, its bytes are handed out like any others.

mod decode;
mod follow;
mod versions;

pub use decode::{NO_PROTOBUF, decode, normalize, not_acceptable};
pub use follow::{Definitions, keep};

use api::Status;

use crate::negotiate::{Form, Media};
use crate::request::Target;
use crate::server::Call;

/// What is refused of custom kinds before anything else is looked at.
pub fn check_request(call: &Call, target: &Target, verb: &str) -> Result<(), Status> {
    if call.format.media == Media::Protobuf && call.format.form == Form::Object && verb != "deletecollection"
    {
        return Err(not_acceptable());
    }
    let terminating = target
        .resource
        .custom
        .is_some_and(|slot| api::custom::is_true(&slot.definition().conditions, api::custom::TERMINATING));
    if terminating && verb == "create" {
        let why = "create not allowed while custom resource definition is terminating";
        return Err(Status::forbidden(target.resource.group, target.resource.plural, &target.name, why));
    }
    Ok(())
}

//! The kinds of the certificates group.

pub mod certificate_signing_request;

//! The kinds of the `certificates.k8s.io` group.

pub mod certificate_signing_request;

//! The kinds of the `authentication.k8s.io` group.

pub mod self_subject_review;
pub mod token_request;
pub mod token_review;

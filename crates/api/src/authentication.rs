//! The kinds of the authentication group.

pub mod self_subject_review;
pub mod token_request;
pub mod token_review;

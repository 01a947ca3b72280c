//! A pod's worker: what it needs next ([`plan`]), what is said about it ([`status`]).

pub mod plan;
pub mod status;

//! The kinds of the apiregistration group.

pub mod api_service;

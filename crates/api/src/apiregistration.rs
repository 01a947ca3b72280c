//! The kinds of the `apiregistration.k8s.io` group.

pub mod api_service;

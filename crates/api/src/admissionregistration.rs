//! The kinds of the `admissionregistration.k8s.io` group.

pub mod client_config;
pub mod expressions;
pub mod mutating_admission_policy;
pub mod mutating_admission_policy_binding;
pub mod mutating_webhook_configuration;
mod policy;
mod rule;
pub mod type_check;
pub mod validating_admission_policy;
pub mod validating_admission_policy_binding;
pub mod validating_webhook_configuration;
mod webhook;

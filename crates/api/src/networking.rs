//! The kinds of the `networking.k8s.io` group.

pub mod ingress;
pub mod ingress_class;
pub mod ip;
pub mod ip_address;
pub mod network_policy;
pub mod service_cidr;

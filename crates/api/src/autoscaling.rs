//! The kinds of the `autoscaling` group.

pub mod horizontal_pod_autoscaler;

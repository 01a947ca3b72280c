//! The kinds of the resource group.

pub mod device_class;
pub mod resource_claim;
pub mod resource_claim_template;
pub mod resource_slice;

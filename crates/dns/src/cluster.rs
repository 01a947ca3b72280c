//! A [`View`] on the caches of the process.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::{Caches, Key};

use crate::answer::View;

pub struct Cluster(pub Arc<Caches>);

impl Cluster {
    /// Starts the required caches.
    pub fn new(caches: &Arc<Caches>) -> Cluster {
        caches.services();
        caches.endpoint_slices();
        caches.namespaces();
        Cluster(caches.clone())
    }
}

impl View for Cluster {
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.0.services().get(&Key::new(namespace, name))
    }

    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>> {
        self.0.endpoint_slices().indexed("service", &format!("{namespace}/{service}"))
    }

    fn has_namespace(&self, name: &str) -> bool {
        self.0.namespaces().get(&Key::new("", name)).is_some()
    }

    fn services_by_ip(&self, address: IpAddr) -> Vec<Arc<Service>> {
        self.0.services().indexed("ip", &address.to_string())
    }

    fn slices_by_address(&self, address: IpAddr) -> Vec<Arc<EndpointSlice>> {
        self.0.endpoint_slices().indexed("address", &address.to_string())
    }

    fn serial(&self) -> u32 {
        let revision = self.0.services().revision().max(self.0.endpoint_slices().revision());
        // SOA serials are 32 bits and wrap around.
        (revision & u64::from(u32::MAX)) as u32
    }
}

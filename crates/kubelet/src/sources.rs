//! Cached objects that environment variables of pods refer to.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
use reconcile::{Ctx, Key};
use schema::quantity::Quantity;

use crate::env::Sources;

/// The cluster's objects from the caches of this node.
pub struct CachedSources<'a> {
    pub ctx: &'a Ctx,
    pub node_name: &'a str,
}

impl Sources for CachedSources<'_> {
    fn config_map(&self, namespace: &str, name: &str) -> Option<Arc<ConfigMap>> {
        self.ctx.caches.config_maps().get(&Key::new(namespace, name))
    }

    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.ctx.caches.secrets().get(&Key::new(namespace, name))
    }

    fn services(&self, namespace: &str) -> Vec<Arc<Service>> {
        let mut services = self.ctx.caches.services().in_namespace(namespace);
        if namespace != "default" {
            services.extend(self.ctx.caches.services().get(&Key::new("default", "kubernetes")));
        }
        services
    }

    fn allocatable(&self, resource: &str) -> Option<Quantity> {
        let node = self.ctx.caches.nodes().get(&Key::new("", self.node_name))?;
        let amount = node.status.as_ref()?.allocatable.as_ref()?.get(resource)?.0.clone();
        Quantity::parse(&amount).ok()
    }
}

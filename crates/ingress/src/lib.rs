//! Ingress controller: routes HTTP and HTTPS requests to Services by host and path.
//!
//! [`table`] selects the backend for a host and path without I/O. [`view`] builds that table from
//! the caches, and `status` keeps it up to date. `certificates` selects the certificate for a
//! server name, `forward` proxies requests to pods, and [`IngressServer`] owns the sockets.
//! Requests and responses are streamed, never buffered. Serves Ingresses whose class has
//! [`CONTROLLER`] as controller. All state comes from the caches of the process.

mod certificates;
mod forward;
mod metrics;
mod pool;
mod relay;
mod serve;
mod status;
pub mod table;
pub mod view;

use std::sync::Arc;
use std::sync::atomic::AtomicU16;

use k8s_openapi::api::networking::v1::{IngressClass, IngressClassSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

pub use metrics::Metrics;
pub use pool::direct_dialer;
pub use relay::relay;
pub use serve::IngressServer;
pub use status::Config;

/// The `spec.controller` of the IngressClass that is served here.
pub const CONTROLLER: &str = "skiff.dev/ingress";
/// The annotation of a node that relays Ingress connections to a node that serves them: `"true"`.
pub const RELAY_ANNOTATION: &str = "skiff.dev/ingress";
/// The annotation of the IngressClass for Ingresses without a class.
const DEFAULT_CLASS_ANNOTATION: &str = "ingressclass.kubernetes.io/is-default-class";

/// The IngressClass that exists by default.
pub fn ingress_class() -> IngressClass {
    IngressClass {
        metadata: ObjectMeta {
            name: Some("skiff".to_owned()),
            annotations: Some([(DEFAULT_CLASS_ANNOTATION.to_owned(), "true".to_owned())].into()),
            ..ObjectMeta::default()
        },
        spec: Some(IngressClassSpec { controller: Some(CONTROLLER.to_owned()), parameters: None }),
    }
}

/// State shared by all connections.
struct Shared {
    table: parking_lot::RwLock<Arc<table::RouteTable>>,
    certificates: Arc<certificates::Certificates>,
    pool: pool::Pool,
    /// The port of HTTPS, or 0 if it is not served.
    https_port: AtomicU16,
    metrics: Arc<Metrics>,
}

//! Ingress: the outside reaches Services by host and path, over HTTP and HTTPS.
//!
//! [`table`] says, purely, who answers for a host and path; [`view`] makes that table of what the caches show and keeps
//! it up to date, `certificates` has the certificate for each name, `forward` hands requests on to pods, and
//! [`Ingress`] has the sockets. Requests and answers are streamed, never held. Serves those Ingresses whose class names
//! [`CONTROLLER`]. Keeps no state beside the caches of the process.

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

/// What a class names as its controller to have its Ingresses served here.
pub const CONTROLLER: &str = "skiff.dev/ingress";
/// On a node that passes on what comes for Ingresses to one that serves them: `"true"`.
pub const RELAY_ANNOTATION: &str = "skiff.dev/ingress";
/// Marks the class of Ingresses that name none.
const DEFAULT_CLASS_ANNOTATION: &str = "ingressclass.kubernetes.io/is-default-class";

/// The class that is there from the start.
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

/// What the parts share.
struct Shared {
    table: parking_lot::RwLock<Arc<table::RouteTable>>,
    certificates: Arc<certificates::Certificates>,
    pool: pool::Pool,
    /// Where HTTPS is served; zero where it is not.
    https_port: AtomicU16,
    metrics: Arc<Metrics>,
}

//! The API client of all components: a [`Client`] over any [`Connection`].
//!
//! A connection sends requests and watches collections. Within the process of the API server it
//! calls the server directly (`apiserver::Local`), otherwise it uses HTTPS with a kubeconfig
//! ([`remote`]); the users of a `Client` do not know which. Caches and control loops are in
//! `reconcile`. Start with [`Connection`] and [`Client`].
//!
//! Counterpart upstream: `k8s.io/client-go`.

mod connection;
mod discovery;
mod error;
mod kubeconfig;
mod object;
pub mod remote;
mod requests;
pub mod review;

use std::sync::Arc;

pub use connection::{Connection, RawObject, Watch, WatchChange, WatchEvent};
pub use discovery::{ApiResource, ServerResources};
pub use error::{Cause, Details, Error, Failure};
pub use kubeconfig::{Kubeconfig, KubeconfigError};
pub use object::{Key, Object, Scope, collection_path, controller_of, object_path, revision_of};
pub use requests::{DeleteOptions, Patch};

/// A typed API client. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    connection: Arc<dyn Connection>,
    /// The `User-Agent`, which is also the default field manager in `managedFields`.
    agent: Arc<str>,
}

impl Client {
    /// `agent` is the upstream name of the component, such as `kube-controller-manager`.
    pub fn new(connection: Arc<dyn Connection>, agent: &str) -> Client {
        Client { connection, agent: agent.into() }
    }

    /// A client that impersonates the service account `name` in kube-system, if the connection
    /// supports it.
    pub fn impersonate(&self, name: &str) -> Client {
        Client {
            connection: self.connection.impersonate(name).unwrap_or_else(|| self.connection.clone()),
            agent: self.agent.clone(),
        }
    }

    pub fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }
}

//! How every role speaks to the API server: a [`Client`] over any [`Connection`].
//!
//! A connection answers requests and follows collections. In one process it is the API server itself
//! (`apiserver::Local`), apart it is HTTPS by a kubeconfig ([`remote`]); nothing that holds a `Client` knows
//! which. Owns no cache and no loop: those are `reconcile`'s. Read [`Connection`] and [`Client`] first.

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

/// Typed requests to an API server. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    connection: Arc<dyn Connection>,
    /// Names this client in `User-Agent`, and so in `managedFields`.
    agent: Arc<str>,
}

impl Client {
    /// `agent` is upstream's name of the component, such as `kube-controller-manager`.
    pub fn new(connection: Arc<dyn Connection>, agent: &str) -> Client {
        Client { connection, agent: agent.into() }
    }

    /// The same client acting as the service account `name` in kube-system, where the connection can.
    pub fn impersonate(&self, name: &str) -> Client {
        Client {
            connection: self.connection.impersonate(name).unwrap_or_else(|| self.connection.clone()),
            agent: self.agent.clone(),
        }
    }

    /// What carries the requests.
    pub fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }
}

//! The API server: every kind behind one pipeline, served from one cache over one store.
//!
//! A request is routed (`request`), authorized (`access`) and handled: reads come from the `cache`, writes
//! go through defaults, rules and `write` into the store, and the cache learns of them by watching it.
//! Knows no kind by name except where upstream's behaviour does (`special`, `services`, `delete`).
//! Read [`server::Server::answer`] first, then `create` and `watch`.

mod access;
mod admission;
mod authentication;
mod body;
mod bootstrap;
mod cache;
mod codec;
mod create;
mod delete;
mod discovery;
mod door;
mod eviction;
mod https;
mod metrics;
mod namespaces;
mod negotiate;
mod object;
mod openapi;
mod options;
mod other;
mod patching;
mod rbac;
mod read;
mod registry;
mod render;
mod request;
mod review;
mod serve;
mod server;
mod services;
mod special;
mod strategy;
mod subresource;
#[cfg(test)]
mod tests;
mod tokens;
mod update;
mod watch;
mod write;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use api::core::service::alloc::Ranges;
use api::networking::ip::{self, Cidr};
use store::Store;
use tokio::net::TcpListener;
use tokio::sync::watch as channel;

pub use admission::{
    Settings as AdmissionSettings, SettingsError as AdmissionSettingsError, SwitchError, Switches,
};
pub use authentication::{
    Anonymous, Error as AuthenticationError, FrontProxy, Options as Authentication, WebhookOptions,
};
pub use registry::RuntimeConfigError;

/// What the API server needs to know.
pub struct Config {
    pub listener: std::net::TcpListener,
    /// The address other machines and pods reach this server at, where there is one.
    pub advertise: Option<IpAddr>,
    pub service_cidrs: Vec<String>,
    pub node_ports: std::ops::RangeInclusive<u16>,
    /// `--runtime-config` entries.
    pub runtime_config: Vec<String>,
    /// Admission plugins switched on and off.
    pub admission: Switches,
    /// The certificate to show; may be replaced at any time.
    pub serving: Arc<pki::Serving>,
    /// The certificate of the authority that signed the serving certificate.
    pub ca_pem: String,
    pub authentication: Authentication,
    pub tokens: ServiceAccountTokens,
}

/// How service accounts' tokens are made and taken.
pub struct ServiceAccountTokens {
    pub keys: pki::token::Keys,
    /// Tokens are made in the name of the first and taken in the name of each.
    pub issuers: Vec<String>,
    /// Whom tokens must be for to be good here; empty stands for the issuers.
    pub audiences: Vec<String>,
    /// Where others find the keys, if not here.
    pub key_set_url: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    RuntimeConfig(#[from] RuntimeConfigError),
    #[error(transparent)]
    Admission(#[from] SwitchError),
    #[error("cannot set up authentication")]
    Authentication(#[from] AuthenticationError),
    #[error("cannot set up TLS")]
    Tls(#[from] pki::Error),
    #[error("service network {0:?} is not a CIDR with room for addresses")]
    ServiceCidr(String),
    #[error("cannot read the store")]
    Store(#[from] store::Error),
    #[error("cannot listen")]
    Listen(#[from] std::io::Error),
    #[error("cannot make the first objects: {0}")]
    FirstObjects(String),
}

/// Serves until `shutdown` turns true. `ready` turns true once clients can work.
pub async fn run(
    config: Config,
    store: Arc<dyn Store>,
    shutdown: channel::Receiver<bool>,
    ready: channel::Sender<bool>,
) -> Result<(), Error> {
    let registry = registry::Registry::new(&config.runtime_config)?;
    let (ranges, service_ip) = service_ranges(&config)?;
    let authenticators = authentication::Authenticators::new(config.authentication)?;
    let tls = pki::server_config(config.serving, &authenticators.authorities())?;
    let cache = cache::Cache::new();
    cache.start(store.clone(), shutdown.clone()).await?;
    let address: SocketAddr = config.listener.local_addr()?;
    let reached_at = SocketAddr::new(config.advertise.unwrap_or(address.ip()), address.port());
    let mut server = server::Server::new(
        store,
        cache,
        registry,
        services::Allocations::new(ranges),
        config.ca_pem,
        tokens::Tokens::new(config.tokens, &reached_at.to_string()),
        (shutdown.clone(), ready.subscribe()),
    );
    server.admission = admission::Chain::new(&config.admission)?;
    server.authenticators = authenticators;
    let server = Arc::new(server);
    config.listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(config.listener)?;
    let cluster = bootstrap::Cluster {
        address: config.advertise,
        port: address.port(),
        service_ip,
        service_cidrs: config.service_cidrs,
    };
    bootstrap::first_objects(&server, &cluster)
        .await
        .map_err(|status| Error::FirstObjects(status.message))?;
    authentication::publish(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    rbac::ensure_defaults(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    let aggregator = tokio::spawn(rbac::keep_aggregated(server.clone(), shutdown.clone()));
    let furnisher = tokio::spawn(bootstrap::furnish_namespaces(server.clone(), cluster, shutdown.clone()));
    let counter = tokio::spawn(admission::quota::keep_counts(server.clone(), shutdown.clone()));
    let emptier = tokio::spawn(namespaces::empty_namespaces(server.clone(), shutdown.clone()));
    ready.send_replace(true);
    serve::serve(server, listener, tls, shutdown).await;
    furnisher.abort();
    counter.abort();
    emptier.abort();
    aggregator.abort();
    Ok(())
}

/// The address of the `kubernetes` Service: the first of its network.
pub fn service_ip(cidr: &str) -> Option<IpAddr> {
    let network = Cidr::parse(cidr)?;
    let first = ip::from_number(ip::to_number(network.first()) + 1, network.is_v6());
    network.contains(first).then_some(first)
}

fn service_ranges(config: &Config) -> Result<(Ranges, IpAddr), Error> {
    let mut cidrs = Vec::new();
    for text in &config.service_cidrs {
        cidrs.push(Cidr::parse(text).ok_or_else(|| Error::ServiceCidr(text.clone()))?);
    }
    let first = config.service_cidrs.first().and_then(|cidr| service_ip(cidr));
    let service_ip = first.ok_or_else(|| Error::ServiceCidr(config.service_cidrs.join(",")))?;
    Ok((Ranges::new(cidrs, config.node_ports.clone()), service_ip))
}

//! The API server: every kind behind one pipeline, served from one cache over one store.
//!
//! A request is routed (`request`), authorized (`access`) and handled: reads come from the `cache`, writes
//! go through defaults, rules and `write` into the store, and the cache learns of them by watching it.
//! Knows no kind by name except where upstream's behaviour does (`special`, `services`, `delete`).
//! Read [`server::Server::answer`] first, then `create` and `watch`.

mod access;
mod admission;
mod aggregator;
mod audit;
mod authentication;
mod authorization;
mod body;
mod bootstrap;
mod cache;
mod callout;
mod codec;
mod connect;
mod create;
mod custom;
mod delete;
mod discovery;
mod door;
mod encryption;
mod endpoints;
mod eviction;
mod flow;
mod https;
mod kubelets;
mod local;
pub mod measured;
mod metrics;
mod negotiate;
mod nodes;
mod object;
mod openapi;
mod options;
mod other;
mod patching;
mod proxy;
mod rbac;
mod read;
mod registry;
mod reload;
mod remarks;
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
mod tunnels;
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
pub use audit::{
    AuditError, AuditOptions, AuditWebhookOptions, Batch as AuditBatch, LogOptions as AuditLogOptions,
    Mode as AuditMode,
};
pub use authentication::{
    Error as AuthenticationError, FrontProxy, Oidc, Options as Authentication, WebhookOptions,
};
pub use authorization::{
    Error as AuthorizationError, Options as Authorization, WebhookOptions as AuthorizationWebhookOptions,
};
pub use encryption::{Encrypted, Error as EncryptionError};
pub use flow::SEATS;
pub use local::Local;
pub use metrics::write_process;
pub use other::version;
pub use registry::RuntimeConfigError;
pub use serve::Accepted;
pub use server::EVENT_TTL;

/// What the API server needs to know.
pub struct Config {
    /// Where it will listen.
    pub listen: SocketAddr,
    /// The address other machines and pods reach this server at, where there is one. It may change.
    pub advertise: channel::Receiver<Option<IpAddr>>,
    pub service_cidrs: Vec<String>,
    pub node_ports: std::ops::RangeInclusive<u16>,
    /// How long Events are kept.
    pub event_ttl: std::time::Duration,
    /// `--runtime-config` entries.
    pub runtime_config: Vec<String>,
    /// Admission plugins switched on and off.
    pub admission: Switches,
    pub authentication: Authentication,
    /// What is written down about requests.
    pub audit: AuditOptions,
    /// How many requests are served at once, those of administrators aside.
    pub seats: u64,
    pub authorization: Authorization,
    /// Where a file says how values are encrypted and is to be followed.
    pub encryption: Option<Encrypted>,
    pub tokens: ServiceAccountTokens,
    /// How kubelets are spoken to; `None` has no logs and streams.
    pub dialing: Option<Arc<pki::Dialing>>,
    /// Who this server is to API servers behind it.
    pub proxy_client: Option<Arc<pki::Showing>>,
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
    /// How long tokens may live at most, in seconds; whoever asks for more gets this.
    pub max_seconds: Option<i64>,
    /// Pods whose programs may not know that tokens expire get some that live for a year.
    pub extend: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    RuntimeConfig(#[from] RuntimeConfigError),
    #[error(transparent)]
    Admission(#[from] SwitchError),
    #[error("cannot set up authentication")]
    Authentication(#[from] AuthenticationError),
    #[error("cannot set up auditing")]
    Audit(#[from] AuditError),
    #[error("cannot set up authorization")]
    Authorization(#[from] AuthorizationError),
    #[error("cannot set up keys and certificates")]
    Pki(#[from] pki::Error),
    #[error("service network {0:?} is not a CIDR with room for addresses")]
    ServiceCidr(String),
    #[error("cannot read the store")]
    Store(#[from] store::Error),
    #[error(transparent)]
    Open(#[from] store::log::OpenError),
    #[error("cannot listen")]
    Listen(#[from] std::io::Error),
    #[error("cannot make the first objects: {0}")]
    FirstObjects(String),
}

/// An API server that answers inside this process, until `shutdown` turns true.
pub struct Started {
    server: Arc<server::Server>,
    shutdown: channel::Receiver<bool>,
    ready: channel::Sender<bool>,
}

/// Starts an API server on a store; it listens once [`Started::serve`] is called.
pub async fn start(
    config: Config,
    store: Arc<dyn Store>,
    shutdown: channel::Receiver<bool>,
) -> Result<Started, Error> {
    let ready = channel::Sender::new(false);
    let registry = registry::Registry::new(&config.runtime_config)?;
    let (ranges, service_ip) = service_ranges(&config)?;
    let authentication_file = config.authentication.configuration.clone();
    let authenticators = authentication::Authenticators::new(config.authentication, &config.tokens.issuers)?;
    let cache = cache::Cache::new();
    cache.start(store.clone(), shutdown.clone()).await?;
    let reached_at =
        SocketAddr::new(config.advertise.borrow().unwrap_or(config.listen.ip()), config.listen.port());
    let mut server = server::Server::new(
        store,
        cache,
        registry,
        services::Allocations::new(ranges),
        tokens::Tokens::new(config.tokens, &reached_at.to_string()),
        (shutdown.clone(), ready.subscribe()),
    );
    server.admission = admission::Chain::new(&config.admission)?;
    server.authenticators = authenticators;
    server.dialing = config.dialing;
    server.aggregator.showing = config.proxy_client;
    server.audit = audit::Audit::new(&config.audit)?;
    server.flow = flow::Flow::new(config.seats);
    server.event_ttl = config.event_ttl;
    server.rbac.set_chain(authorization::Chain::new(&config.authorization)?);
    let server = Arc::new(server);
    let cluster = bootstrap::Cluster {
        address: config.advertise,
        port: config.listen.port(),
        service_ip,
        service_cidrs: config.service_cidrs,
    };
    let definitions = custom::Definitions::load(&server);
    bootstrap::first_objects(&server, &cluster)
        .await
        .map_err(|status| Error::FirstObjects(status.message))?;
    authentication::publish(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    rbac::ensure_defaults(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    flow::ensure_defaults(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    tokio::spawn(custom::keep(server.clone(), definitions, shutdown.clone()));
    follow_files(
        &server,
        authentication_file,
        config.authorization.configuration,
        config.encryption,
        &shutdown,
    );
    tokio::spawn(aggregator::keep_registered(server.clone(), shutdown.clone()));
    tokio::spawn(aggregator::keep_available(server.clone(), shutdown.clone()));
    tokio::spawn(flow::keep(server.clone(), shutdown.clone()));
    tokio::spawn(bootstrap::keep_first_objects(server.clone(), cluster, shutdown.clone()));
    tokio::spawn(services::repair_later(server.clone(), shutdown.clone()));
    Ok(Started { server, shutdown, ready })
}

/// Takes up the configuration files that may change while the server runs.
fn follow_files(
    server: &Arc<server::Server>,
    authentication: Option<std::path::PathBuf>,
    authorization: Option<std::path::PathBuf>,
    encryption: Option<Encrypted>,
    shutdown: &channel::Receiver<bool>,
) {
    let follow = |what, path, take: reload::Take| {
        let file = reload::File::watch(path);
        tokio::spawn(reload::follow(server.clone(), what, file, take, shutdown.clone()));
    };
    if let Some(path) = authentication {
        let server = server.clone();
        let take = move |text: String| server.authenticators.reload(&text);
        follow("authentication", path, Box::new(move |text| Box::pin(std::future::ready(take(text)))));
    }
    if let Some(path) = authorization {
        let (server, file) = (server.clone(), path.clone());
        let take = move |text: String| {
            let chain = authorization::configured_chain(&file, &text).map_err(|error| error.to_string())?;
            server.rbac.set_chain(chain);
            Ok(())
        };
        follow("authorization", path, Box::new(move |text| Box::pin(std::future::ready(take(text)))));
    }
    if let Some(encryption) = encryption {
        let path = encryption.path.clone();
        follow("encryption", path, Box::new(move |text| Box::pin(encryption.clone().reload(text))));
    }
}

/// Starts an API server on an own directory that listens nowhere: for tests, simulations and benchmarks.
pub async fn start_in(
    directory: &std::path::Path,
    shutdown: channel::Receiver<bool>,
) -> Result<Started, Error> {
    let store = store::log::LogStore::open(&directory.join("store"), store::log::Config::default())?;
    let tls = directory.join("tls");
    let ca = pki::Authority::load_or_create(&tls, "ca", jiff::Timestamp::now())?;
    let config = Config {
        listen: SocketAddr::from(([127, 0, 0, 1], 6443)),
        advertise: channel::channel(None).1,
        service_cidrs: vec!["10.43.0.0/16".into()],
        node_ports: 30000..=32767,
        event_ttl: EVENT_TTL,
        runtime_config: Vec::new(),
        admission: Switches::default(),
        authorization: Authorization::default(),
        encryption: None,
        authentication: Authentication { client_ca_pem: ca.pem().to_owned(), ..Authentication::default() },
        audit: AuditOptions::default(),
        seats: SEATS,
        tokens: ServiceAccountTokens {
            keys: pki::token::Keys::load_or_create(&tls)?,
            issuers: vec!["https://kubernetes.default.svc.cluster.local".into()],
            audiences: Vec::new(),
            key_set_url: None,
            max_seconds: None,
            extend: true,
        },
        dialing: None,
        proxy_client: None,
    };
    start(config, Arc::new(store), shutdown).await
}

impl Started {
    /// How many tunnels nodes elsewhere have left so far.
    pub fn tunnels(&self) -> channel::Receiver<u64> {
        self.server.tunnels.seen.subscribe()
    }

    /// Reaches nodes elsewhere and their pods as this server does: through the tunnels they have left.
    pub fn dial(&self) -> stream::Dial {
        let server = self.server.clone();
        Arc::new(move |to| {
            let server = server.clone();
            Box::pin(async move { tunnels::connect(&server, &to.ip().to_string(), to.port()).await })
        })
    }

    /// A connection for roles in this process.
    pub fn local(&self) -> Arc<Local> {
        Local::new(self.server.clone())
    }

    /// Shows what `write` appends, in Prometheus' text form, among the server's own metrics.
    pub fn also_count(&self, write: impl Fn(&mut String) + Send + Sync + 'static) {
        self.server.metrics.roles.lock().push(Box::new(write));
    }

    /// Turns true once clients can work.
    pub fn ready(&self) -> channel::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Serves clients until told to stop, also those of `more` connections. The certificate to show may be replaced at any
    /// time.
    pub async fn serve(
        self,
        listener: std::net::TcpListener,
        more: Option<tokio::sync::mpsc::Receiver<Accepted>>,
        serving: Arc<pki::Serving>,
    ) -> Result<(), Error> {
        let tls = pki::server_config(serving, &self.server.authenticators.authorities())?;
        listener.set_nonblocking(true)?;
        let connections = serve::Connections::new(TcpListener::from_std(listener)?, more);
        self.ready.send_replace(true);
        serve::serve(self.server.clone(), connections, tls, self.shutdown).await;
        if let Some(audit) = &self.server.audit {
            audit.flush().await;
        }
        Ok(())
    }
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

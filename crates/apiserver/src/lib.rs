//! The API server: all resources behind one request pipeline, served from one watch cache over one
//! store.
//!
//! A request is routed (`request`), authorized (`access`) and handled. Reads come from the `cache`.
//! Writes go through defaulting, validation and `write` into the store; the cache follows by
//! watching the store. The code knows no resource by name except where upstream's behaviour does
//! (`special`, `services`, `delete`).
//!
//! Read [`server::Server::handle_request`] first, then `create` and `watch`.

mod access;
mod admission;
mod aggregator;
mod audit;
mod authentication;
mod authorization;
pub mod bench_support;
mod body;
mod bootstrap;
mod cache;
mod codec;
mod connect;
mod create;
mod custom;
mod delete;
mod discovery;
mod encryption;
mod endpoints;
mod eviction;
mod flow;
mod https;
mod kubelets;
mod local;
mod metrics;
mod negotiate;
mod node_authorizer;
mod nonresource;
mod object;
mod openapi;
mod options;
mod patch_handler;
mod proxy;
mod rbac;
mod read;
mod registry;
mod reload;
mod render;
mod request;
mod review;
mod serve;
mod server;
mod services;
mod special;
mod strategy;
mod subresource;
mod subresource_view;
#[cfg(test)]
mod tests;
mod tokens;
mod tunnels;
mod update;
mod warning_recorder;
mod watch;
mod webhook_client;
mod write;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use api::core::service::alloc::AllocationRanges;
use api::networking::ip::{self, Cidr};
use store::Store;
use tokio::net::TcpListener;
use tokio::sync::watch as channel;

pub use admission::{
    AdmissionOptions, AdmissionOptionsError, Settings as AdmissionSettings,
    SettingsError as AdmissionSettingsError,
};
pub use audit::{
    AuditError, AuditOptions, AuditWebhookOptions, BatchOptions as AuditBatch, LogOptions as AuditLogOptions,
    Mode as AuditMode,
};
pub use authentication::{
    Error as AuthenticationError, FrontProxy, Oidc, Options as Authentication, WebhookOptions,
};
pub use authorization::{
    Error as AuthorizationError, Options as Authorization, WebhookOptions as AuthorizationWebhookOptions,
};
pub use encryption::{EncryptedStore, Error as EncryptionError};
pub use flow::DEFAULT_MAX_REQUESTS_INFLIGHT;
pub use local::LocalConnection;
pub use metrics::write_process;
pub use nonresource::version;
pub use registry::RuntimeConfigError;
pub use serve::AcceptedConnection;
pub use server::EVENT_TTL;

/// The configuration of the API server.
pub struct Config {
    /// The address to listen on. The caller binds it.
    pub listen: SocketAddr,
    /// The advertised address, at which other machines and pods reach this server; it may change.
    pub advertise: channel::Receiver<Option<IpAddr>>,
    pub service_cidrs: Vec<String>,
    pub node_ports: std::ops::RangeInclusive<u16>,
    /// The TTL of Events.
    pub event_ttl: std::time::Duration,
    /// `--runtime-config` entries.
    pub runtime_config: Vec<String>,
    /// Enabled and disabled admission plugins.
    pub admission: AdmissionOptions,
    pub authentication: Authentication,
    /// Audit policy and backends.
    pub audit: AuditOptions,
    /// The total concurrency limit of flow control; exempt requests do not count.
    pub max_requests_inflight: u64,
    pub authorization: Authorization,
    /// Encryption at rest. Its file is watched for changes.
    pub encryption: Option<EncryptedStore>,
    pub tokens: ServiceAccountTokenConfig,
    /// Client TLS for connections to kubelets. `None` disables logs and streams.
    pub kubelet_client_tls: Option<Arc<pki::ClientTls>>,
    /// The front proxy client certificate for aggregated API servers.
    pub proxy_client: Option<Arc<pki::ClientCertificate>>,
}

/// How service account tokens are issued and accepted.
pub struct ServiceAccountTokenConfig {
    pub keys: pki::token::Keys,
    /// Tokens are issued by the first and accepted from all.
    pub issuers: Vec<String>,
    /// The audiences of this server; empty means the issuers.
    pub audiences: Vec<String>,
    /// The published `jwks_uri`, if it is not this server's.
    pub key_set_url: Option<String>,
    /// The longest token lifetime in seconds; longer requests are shortened to it.
    pub max_expiration_seconds: Option<i64>,
    /// Extends the tokens of pods to a year, since their clients may not reload tokens. Upstream:
    /// `--service-account-extend-token-expiration`.
    pub extend_expiration: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    RuntimeConfig(#[from] RuntimeConfigError),
    #[error(transparent)]
    Admission(#[from] AdmissionOptionsError),
    #[error("invalid authentication configuration")]
    Authentication(#[from] AuthenticationError),
    #[error("invalid audit configuration")]
    Audit(#[from] AuditError),
    #[error("invalid authorization configuration")]
    Authorization(#[from] AuthorizationError),
    #[error("failed to load keys and certificates")]
    Pki(#[from] pki::Error),
    #[error("invalid service CIDR {0:?}")]
    ServiceCidr(String),
    #[error("failed to read the store")]
    Store(#[from] store::Error),
    #[error(transparent)]
    Open(#[from] store::log::OpenError),
    #[error("failed to listen")]
    Listen(#[from] std::io::Error),
    #[error("failed to create bootstrap objects: {0}")]
    FirstObjects(String),
}

/// An API server that serves requests of this process until `shutdown` is true.
pub struct RunningServer {
    server: Arc<server::Server>,
    shutdown: channel::Receiver<bool>,
    ready: channel::Sender<bool>,
}

/// Starts an API server on a store. It listens once [`RunningServer::serve`] is called.
pub async fn start(
    config: Config,
    store: Arc<dyn Store>,
    shutdown: channel::Receiver<bool>,
) -> Result<RunningServer, Error> {
    let ready = channel::Sender::new(false);
    let registry = registry::Registry::new(&config.runtime_config)?;
    let (ranges, service_ip) = service_ranges(&config)?;
    let authentication_file = config.authentication.configuration.clone();
    let authenticators = authentication::Authenticators::new(config.authentication, &config.tokens.issuers)?;
    let cache = cache::Cache::new();
    cache.start(store.clone(), shutdown.clone()).await?;
    let external_addr =
        SocketAddr::new(config.advertise.borrow().unwrap_or(config.listen.ip()), config.listen.port());
    let mut server = server::Server::new(
        store,
        cache,
        registry,
        services::ServiceAllocator::new(ranges),
        tokens::Tokens::new(config.tokens, &external_addr.to_string()),
        (shutdown.clone(), ready.subscribe()),
    );
    server.admission = admission::Chain::new(&config.admission)?;
    server.authenticators = authenticators;
    server.kubelet_client_tls = config.kubelet_client_tls;
    server.aggregator.client_certificate = config.proxy_client;
    server.audit = audit::Audit::new(&config.audit)?;
    server.flow = flow::FlowControl::new(config.max_requests_inflight);
    server.event_ttl = config.event_ttl;
    server.rbac.set_chain(authorization::AuthorizerChain::new(&config.authorization)?);
    let server = Arc::new(server);
    let cluster = bootstrap::ClusterNetworkConfig {
        address: config.advertise,
        port: config.listen.port(),
        service_ip,
        service_cidrs: config.service_cidrs,
    };
    let definitions = custom::Definitions::load(&server);
    bootstrap::ensure_default_objects(&server, &cluster)
        .await
        .map_err(|status| Error::FirstObjects(status.message))?;
    authentication::publish(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    rbac::ensure_defaults(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    flow::ensure_defaults(&server).await.map_err(|status| Error::FirstObjects(status.message))?;
    tokio::spawn(custom::run_controller(server.clone(), definitions, shutdown.clone()));
    watch_config_files(
        &server,
        authentication_file,
        config.authorization.configuration,
        config.encryption,
        &shutdown,
    );
    tokio::spawn(aggregator::keep_registered(server.clone(), shutdown.clone()));
    tokio::spawn(aggregator::keep_available(server.clone(), shutdown.clone()));
    tokio::spawn(flow::run(server.clone(), shutdown.clone()));
    tokio::spawn(bootstrap::run_default_objects_controller(server.clone(), cluster, shutdown.clone()));
    tokio::spawn(services::repair_after_grace_period(server.clone(), shutdown.clone()));
    Ok(RunningServer { server, shutdown, ready })
}

/// Watches the configuration files that may change while the server runs.
fn watch_config_files(
    server: &Arc<server::Server>,
    authentication: Option<std::path::PathBuf>,
    authorization: Option<std::path::PathBuf>,
    encryption: Option<EncryptedStore>,
    shutdown: &channel::Receiver<bool>,
) {
    let spawn_watcher = |what, path, apply: reload::ApplyConfig| {
        let file = reload::ConfigFile::watch(path);
        tokio::spawn(reload::watch_file(server.clone(), what, file, apply, shutdown.clone()));
    };
    if let Some(path) = authentication {
        let server = server.clone();
        let apply = move |text: String| server.authenticators.reload(&text);
        spawn_watcher(
            "authentication",
            path,
            Box::new(move |text| Box::pin(std::future::ready(apply(text)))),
        );
    }
    if let Some(path) = authorization {
        let (server, file) = (server.clone(), path.clone());
        let apply = move |text: String| {
            let chain = authorization::configured_chain(&file, &text).map_err(|error| error.to_string())?;
            server.rbac.set_chain(chain);
            Ok(())
        };
        spawn_watcher("authorization", path, Box::new(move |text| Box::pin(std::future::ready(apply(text)))));
    }
    if let Some(encryption) = encryption {
        let path = encryption.path.clone();
        spawn_watcher("encryption", path, Box::new(move |text| Box::pin(encryption.clone().reload(text))));
    }
}

/// Starts an API server on its own directory without a listener, for tests, simulations and
/// benchmarks.
pub async fn start_in_directory(
    directory: &std::path::Path,
    shutdown: channel::Receiver<bool>,
) -> Result<RunningServer, Error> {
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
        admission: AdmissionOptions::default(),
        authorization: Authorization::default(),
        encryption: None,
        authentication: Authentication { client_ca_pem: ca.pem().to_owned(), ..Authentication::default() },
        audit: AuditOptions::default(),
        max_requests_inflight: DEFAULT_MAX_REQUESTS_INFLIGHT,
        tokens: ServiceAccountTokenConfig {
            keys: pki::token::Keys::load_or_create(&tls)?,
            issuers: vec!["https://kubernetes.default.svc.cluster.local".into()],
            audiences: Vec::new(),
            key_set_url: None,
            max_expiration_seconds: None,
            extend_expiration: true,
        },
        kubelet_client_tls: None,
        proxy_client: None,
    };
    start(config, Arc::new(store), shutdown).await
}

impl RunningServer {
    /// Counts the tunnels that remote nodes have opened so far.
    pub fn tunnels(&self) -> channel::Receiver<u64> {
        self.server.tunnels.total_count.subscribe()
    }

    /// Dials remote nodes and their pods as this server does: through the tunnels they have opened.
    pub fn dial(&self) -> stream::Dialer {
        let server = self.server.clone();
        Arc::new(move |to| {
            let server = server.clone();
            Box::pin(async move { tunnels::connect(&server, &to.ip().to_string(), to.port()).await })
        })
    }

    /// A connection for components in this process, as an administrator.
    pub fn local(&self) -> Arc<LocalConnection> {
        LocalConnection::new(self.server.clone())
    }

    /// Adds the output of `write`, in Prometheus' text format, to the server's own metrics.
    pub fn add_metrics_writer(&self, write: impl Fn(&mut String) + Send + Sync + 'static) {
        self.server.metrics.extra_metrics.lock().push(Box::new(write));
    }

    /// True once the server accepts clients.
    pub fn ready(&self) -> channel::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Serves clients until shutdown, including those of `extra_connections`. The serving
    /// certificate may be replaced at any time.
    pub async fn serve(
        self,
        listener: std::net::TcpListener,
        extra_connections: Option<tokio::sync::mpsc::Receiver<AcceptedConnection>>,
        serving: Arc<pki::ServingCertificate>,
    ) -> Result<(), Error> {
        let tls = pki::server_config(serving, &self.server.authenticators.authorities())?;
        listener.set_nonblocking(true)?;
        let connections = serve::Connections::new(TcpListener::from_std(listener)?, extra_connections);
        self.ready.send_replace(true);
        serve::serve(self.server.clone(), connections, tls, self.shutdown).await;
        if let Some(audit) = &self.server.audit {
            audit.flush().await;
        }
        Ok(())
    }
}

/// The ClusterIP of the `kubernetes` Service: the first address of the service CIDR.
pub fn service_ip(cidr: &str) -> Option<IpAddr> {
    let network = Cidr::parse(cidr)?;
    let first = ip::from_number(ip::to_number(network.first()) + 1, network.is_v6());
    network.contains(first).then_some(first)
}

fn service_ranges(config: &Config) -> Result<(AllocationRanges, IpAddr), Error> {
    let mut cidrs = Vec::new();
    for text in &config.service_cidrs {
        cidrs.push(Cidr::parse(text).ok_or_else(|| Error::ServiceCidr(text.clone()))?);
    }
    let first = config.service_cidrs.first().and_then(|cidr| service_ip(cidr));
    let service_ip = first.ok_or_else(|| Error::ServiceCidr(config.service_cidrs.join(",")))?;
    Ok((AllocationRanges::new(cidrs, config.node_ports.clone()), service_ip))
}

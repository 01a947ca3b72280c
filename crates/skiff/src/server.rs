//! `skiff server`: starts the store, the API server, the controllers, the scheduler and the node of
//! this process, and writes the administrator's kubeconfig.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use client::Client;
use controllers::service_balancer::nodes::NodeBalancer;
use jiff::Timestamp;
use reconcile::cloud::CloudHandle;
use reconcile::{Clock, Ctx, Settings};
use store::Store;
use store::etcd::EtcdStore;
use store::log::LogStore;
use tokio::sync::watch;

use crate::address::{self, AddressReceiver};
use crate::apiserver_args::ApiserverArgs;
use crate::certificates::{AdminKubeconfig, Certificates};
use crate::cluster_info::ClusterInfo;
use crate::flags::{BackupFlags, ServerFlags};
use crate::init_system;
use crate::join_server;
use crate::kubeconfig;
use crate::node;
use crate::node_dns::{EndpointPublisher, NodeDns};
use crate::pod_access;
use crate::reset;
use crate::roles::{CONTROLLER_MANAGER, SCHEDULER, scheduler_config};
use crate::running;
use crate::services;
use crate::stop;
use crate::threads::runtime_builder;

/// How many tasks a busy worker thread runs before it polls for I/O. One step of a large list takes 50
/// µs, and with tokio's default a new request would wait for 61 of these.
const EVENT_INTERVAL: u32 = 8;
/// Time to end pods at a shutdown of the host, in addition to their grace periods.
const POD_SHUTDOWN_BUFFER: Duration = Duration::from_secs(5);
/// Upper limit for any configuration: by default systemd kills a service that takes longer than 90
/// seconds to stop.
const MAX_POD_SHUTDOWN: Duration = Duration::from_secs(80);

pub fn run(flags: ServerFlags) -> anyhow::Result<()> {
    let threads = runtime_builder().event_interval(EVENT_INTERVAL).build()?;
    // Runs on a worker thread: the main thread does not return memory when it is idle
    // (`on_thread_park`).
    threads.block_on(async { tokio::spawn(serve(flags)).await? })
}

async fn serve(flags: ServerFlags) -> anyhow::Result<()> {
    let bind = SocketAddr::new(flags.bind_address, flags.https_listen_port);
    // Binds first: a port in use is the most likely mistake.
    let listener = address::listen(bind)?;
    let listen = listener.local_addr()?;
    create_private_dir(&flags.node.data_dir)?;
    let arguments = ApiserverArgs::parse(&flags.kube_apiserver_arg)?;
    let mut store = open_store(&flags).await?;
    let _lock = reset::lock(&flags.node.data_dir)?;
    let mut encryption = None;
    if let Some(path) = arguments.path("encryption-provider-config") {
        let encrypted = apiserver::EncryptedStore::new(store, &path)?;
        store = encrypted.store();
        encryption = arguments.encryption_reload_enabled()?.then_some(encrypted);
    }
    let (node_ip, _) = node::node_ips(&flags.node)?;
    let advertise_ip = flags.advertise_address.or(node_ip).or_else(|| external_address(flags.bind_address));
    let advertise = match advertise_ip {
        Some(_) => address::fixed(advertise_ip),
        None => {
            address::follow(address::default_address(), || std::future::ready(address::default_address()))
        }
    };
    let node_address = node_ip.map_or_else(|| advertise.clone(), |ip| address::fixed(Some(ip)));
    let output = flags.write_kubeconfig.clone();
    let output = output.map(|path| kubeconfig::KubeconfigFile { path, mode: flags.write_kubeconfig_mode });
    let url = format!("https://{}", SocketAddr::new(local_client_address(flags.bind_address), listen.port()));
    let kubeconfig = AdminKubeconfig::new(&flags.node.data_dir, output, url);
    let url = kubeconfig.url.clone();
    let certificates = Certificates::new(&flags, advertise.clone(), kubeconfig, Timestamp::now())?;
    let ready_line = (url, certificates.kubeconfig().to_owned());
    let serving = certificates.serving();
    let cluster_info = ClusterInfo::from_flags(&flags, certificates.client_ca())?;
    let token = join_server::load_or_create_token(
        &flags.node.data_dir,
        flags.token.as_deref(),
        certificates.server_ca(),
    )?;
    let (stop, shutdown) = watch::channel(false);
    let settings = Settings {
        root_ca: certificates.server_ca().to_owned(),
        cluster_cidrs: flags.cluster_cidr.clone(),
        service_cidrs: flags.service_cidr.clone(),
        signers: certificates.signers(),
        account_tokens: Some(Arc::new(pki::token::Keys::load_or_create(&flags.node.data_dir.join("tls"))?)),
        local_storage: local_storage(&flags)?,
        cloud: cloud(&flags)?,
        node_monitor: flags.silence.settings(),
    };
    let config = apiserver::Config {
        listen,
        advertise: advertise.clone(),
        service_cidrs: flags.service_cidr.clone(),
        node_ports: flags.service_node_port_range.0.clone(),
        event_ttl: arguments.duration("event-ttl")?.unwrap_or(apiserver::EVENT_TTL),
        runtime_config: [flags.runtime_config.clone(), arguments.list("runtime-config")].concat(),
        admission: arguments.admission()?,
        authentication: arguments.authentication(&certificates)?,
        audit: arguments.audit()?,
        max_requests_inflight: arguments.max_inflight_requests()?,
        authorization: arguments.authorization()?,
        encryption,
        tokens: arguments.tokens(&flags)?,
        kubelet_client_tls: Some(certificates.kubelet_client_tls()),
        proxy_client: Some(arguments.proxy_client(&certificates)?),
    };
    let credentials = node::ServingCredentials {
        serving: certificates.kubelet_serving(),
        authority: certificates.client_authority()?,
    };
    tokio::spawn(certificates.keep_renewed(Timestamp::now));
    let hooks = ShutdownHooks::default();
    tokio::spawn(handle_shutdown(stop, hooks.clone()));
    let enabled_controllers = controllers::EnabledControllers::parse(&flags.controllers)?;
    let config_file = flags.scheduler_config.as_deref();
    let scheduling = (!flags.disable_scheduler).then(|| scheduler_config(config_file)).transpose()?;
    let started = apiserver::start(config, store, shutdown.clone()).await?;
    let ctx = Ctx::new(Client::new(started.local(), CONTROLLER_MANAGER), Clock::default(), shutdown);
    let ctx = ctx.with_settings(settings);
    let metrics = ctx.metrics.clone();
    started.add_metrics_writer(move |out| metrics.write(out));
    join_server::ensure_join_objects(&Client::new(started.local(), "skiff"), &token.bootstrap, &cluster_info)
        .await?;
    if !flags.disable_controller_manager {
        if !ctx.settings.local_storage.is_empty() {
            ensure_storage_class(&ctx.client).await?;
        }
        tokio::spawn(controllers::run(ctx.clone(), enabled_controllers));
    }
    if let Some(config) = scheduling {
        let user = Client::new(started.local(), SCHEDULER).impersonate("system:kube-scheduler");
        let ctx = Ctx { client: user, ..ctx.clone() };
        tokio::spawn(async move {
            if let Err(error) = scheduler::run::run(ctx, config, &[]).await {
                tracing::error!(error = &error as &dyn std::error::Error, "the scheduler failed");
            }
        });
    }
    if flags.simulate > 0 {
        tokio::spawn(simulate::run(ctx.clone(), simulate::Config { nodes: flags.simulate, events: true }));
    }
    if !flags.disable_agent
        && (flags.simulate == 0 || flags.node.container_runtime_endpoint.is_some())
        && node::can_run_pods(&flags.node)
    {
        running::register("server", Some(&flags.node.data_dir));
        let config = node::config(&flags.node, &cluster_info, node_address.clone(), credentials)?;
        hooks.set_node(&config);
        let name = format!("system:node:{}", config.settings.node_name);
        let client = Client::new(started.local(), "kubelet").impersonate(&name);
        let ports = watch::Sender::default();
        if !flags.node.disable_kube_proxy {
            let client = Client::new(started.local(), services::PROXY_AGENT);
            services::start_proxy(&ctx, client, &flags.node, &cluster_info, ports.subscribe())?;
        }
        if !services::is_disabled(&flags, "dns") {
            let publisher = EndpointPublisher::Service(Client::new(started.local(), "dns"));
            let node_dns = NodeDns::start(&ctx, publisher, &flags.node, &cluster_info, node_address.clone())?;
            let metrics = node_dns.metrics();
            started.add_metrics_writer(move |out| metrics.write(out));
            let _ = hooks.node_dns.set(node_dns);
        }
        if !services::is_disabled(&flags, "ingress") {
            let admin = Client::new(started.local(), "skiff-ingress");
            let dial = ingress::direct_dialer();
            let metrics = services::ingress(&ctx, admin, &flags, node_address.clone(), dial).await?;
            started.add_metrics_writer(move |out| metrics.write(out));
        }
        let ctx = Ctx { client, ..ctx.clone() };
        let flags = flags.node.clone();
        tokio::spawn(async move {
            match node::runtime(&flags, ports, ctx.shutdown.clone()).await {
                Ok(runtime) => kubelet::run(ctx, runtime, config).await,
                Err(error) => {
                    tracing::error!("the container runtime is unavailable, pods stay pending: {error:#}")
                }
            }
        });
    }
    let mut pod_connections = None;
    if flags.bind_address.is_loopback() && flags.advertise_address.is_none() && hooks.has_node() {
        let pods = services::parse_networks(&flags.cluster_cidr)?;
        pod_connections = Some(pod_access::listen(advertise, listen.port(), pods));
    }
    let data_dir = flags.node.data_dir.clone();
    if flags.disable_agent {
        let remote_node_services = RemoteNodeServices {
            ctx: ctx.clone(),
            flags: flags.clone(),
            cluster_info,
            address: node_address,
        };
        tokio::spawn(remote_node_services.start_after_first_node(
            started.tunnels(),
            started.local(),
            started.dial(),
        ));
    }
    let mut is_ready = started.ready();
    tokio::spawn(async move {
        if is_ready.wait_for(|ready| *ready).await.is_ok() {
            tracing::info!(url = ready_line.0, kubeconfig = %ready_line.1.display(), "ready");
        }
    });
    started.serve(listener, pod_connections, serving).await?;
    log_stopped(&data_dir);
    Ok(())
}

/// Logs the exit of this process and what keeps running.
pub fn log_stopped(data_dir: &Path) {
    match stop::remaining_pods(data_dir) {
        Some(remains) => tracing::info!("stopped; {remains}"),
        None => tracing::info!("stopped"),
    }
}

/// DNS and Ingress for the cluster's nodes, run by a server without a node of its own.
struct RemoteNodeServices {
    ctx: Ctx,
    flags: ServerFlags,
    cluster_info: ClusterInfo,
    address: AddressReceiver,
}

impl RemoteNodeServices {
    /// Starts both when the first node has connected. Pods are reached through the tunnels of their
    /// nodes.
    async fn start_after_first_node(
        self,
        mut nodes: watch::Receiver<u64>,
        local: Arc<apiserver::LocalConnection>,
        dial: stream::Dialer,
    ) {
        if nodes.wait_for(|seen| *seen > 0).await.is_err() {
            return;
        }
        let RemoteNodeServices { ctx, flags, cluster_info: facts, address } = self;
        if !services::is_disabled(&flags, "dns") {
            let publisher = EndpointPublisher::Service(Client::new(local.clone(), "dns"));
            if let Err(error) = NodeDns::start(&ctx, publisher, &flags.node, &facts, address.clone()) {
                tracing::error!("cannot start the cluster DNS: {error:#}");
            }
        }
        if !services::is_disabled(&flags, "ingress") {
            let admin = Client::new(local, "skiff-ingress");
            if let Err(error) = services::ingress(&ctx, admin, &flags, address, dial).await {
                tracing::error!("cannot start the Ingress controller: {error:#}");
            }
        }
    }
}

/// Directory of the built-in StorageClass' volumes; empty if that is disabled.
fn local_storage(flags: &ServerFlags) -> anyhow::Result<String> {
    if flags.disable.iter().any(|part| part == "local-storage") {
        return Ok(String::new());
    }
    let path =
        flags.default_local_storage_path.clone().unwrap_or_else(|| flags.node.data_dir.join("storage"));
    // Nodes use this path with other working directories.
    let path =
        std::path::absolute(&path).with_context(|| format!("no absolute path for {}", path.display()))?;
    path.into_os_string().into_string().map_err(|path| anyhow::anyhow!("{} is not UTF-8", path.display()))
}

fn cloud(flags: &ServerFlags) -> anyhow::Result<CloudHandle> {
    if flags.disable.iter().any(|part| part == "servicelb") {
        return Ok(CloudHandle::default());
    }
    Ok(CloudHandle(Some(Arc::new(NodeBalancer::with_pool(&flags.servicelb_pool)?))))
}

/// Creates the built-in StorageClass. An existing one may have been changed and is kept.
async fn ensure_storage_class(client: &Client) -> anyhow::Result<()> {
    match client.create(&controllers::local_storage::default_storage_class()).await {
        Err(error) if !error.is_already_exists() => Err(error).context("cannot create the StorageClass"),
        _ => Ok(()),
    }
}

async fn open_store(flags: &ServerFlags) -> anyhow::Result<Arc<dyn Store>> {
    if flags.datastore_endpoint.is_empty() {
        let dir = flags.node.data_dir.join("store");
        let config = store::log::Config { on_idle: sys::allocator::collect, ..store::log::Config::default() };
        return Ok(Arc::new(LogStore::open(&dir, config)?));
    }
    let options = store::etcd::Options { tls: etcd_tls(flags)?, ..store::etcd::Options::default() };
    let store = EtcdStore::connect(&flags.datastore_endpoint, options).await;
    Ok(Arc::new(
        store.with_context(|| format!("cannot reach etcd at {}", flags.datastore_endpoint.join(",")))?,
    ))
}

/// TLS settings for `https` endpoints of etcd.
fn etcd_tls(flags: &ServerFlags) -> anyhow::Result<Option<store::etcd::Tls>> {
    let read =
        |path: &PathBuf| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let Some(ca) = &flags.datastore_cafile else {
        let encrypted = flags.datastore_endpoint.iter().any(|url| url.starts_with("https://"));
        let is_optional = !encrypted && flags.datastore_certfile.is_none();
        anyhow::ensure!(is_optional, "etcd over TLS needs --datastore-cafile");
        return Ok(None);
    };
    let identity = match (&flags.datastore_certfile, &flags.datastore_keyfile) {
        (Some(certificate), Some(key)) => Some((read(certificate)?, read(key)?)),
        _ => None,
    };
    Ok(Some(store::etcd::Tls { ca: read(ca)?, identity }))
}

/// Writes the data of a stopped server to a file.
pub fn backup(flags: &BackupFlags) -> anyhow::Result<()> {
    let store = LogStore::open(&flags.data_dir.join("store"), store::log::Config::default())?;
    store.backup(&flags.file).with_context(|| format!("cannot write {}", flags.file.display()))?;
    println!("wrote {}", flags.file.display());
    Ok(())
}

/// Restores a backup into an empty data directory.
pub fn restore(flags: &BackupFlags) -> anyhow::Result<()> {
    create_private_dir(&flags.data_dir)?;
    store::log::restore(&flags.file, &flags.data_dir.join("store"))?;
    println!("restored {} into {}", flags.file.display(), flags.data_dir.display());
    Ok(())
}

pub fn create_private_dir(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.with_context(|| format!("cannot create {}", path.display()))
}

/// The address, if other hosts may be able to reach it.
pub fn external_address(ip: IpAddr) -> Option<IpAddr> {
    (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
}

/// The server's address for clients on this host.
fn local_client_address(bind: IpAddr) -> IpAddr {
    match bind {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    }
}

/// Work to be done before the server stops.
#[derive(Clone, Default)]
pub struct ShutdownHooks {
    /// The DNS server; it removes its endpoint from the Service.
    pub node_dns: Arc<OnceLock<Arc<NodeDns>>>,
    /// The node, which ends its pods if the host shuts down, and the time limit for that.
    node: Arc<OnceLock<(kubelet::HostShutdown, Duration)>>,
}

impl ShutdownHooks {
    pub fn set_node(&self, config: &kubelet::Config) {
        let seconds: i64 = config.settings.shutdown.iter().map(|period| period.seconds).sum();
        let limit = Duration::from_secs(u64::try_from(seconds).unwrap_or(0)) + POD_SHUTDOWN_BUFFER;
        let _ = self.node.set((config.host_shutdown.clone(), limit.min(MAX_POD_SHUTDOWN)));
    }

    fn has_node(&self) -> bool {
        self.node.get().is_some()
    }

    async fn run(&self) {
        // Pods outlive a restart of skiff, but not a shutdown of the host.
        if let Some((node, limit)) = self.node.get()
            && init_system::is_shutting_down().await
            && tokio::time::timeout(*limit, node.terminate_pods()).await.is_err()
        {
            tracing::warn!("pods did not terminate in time");
        }
        if let Some(node_dns) = self.node_dns.get() {
            node_dns.leave().await;
        }
    }
}

/// Waits for SIGTERM or SIGINT, runs the hooks and then signals `stop`. A second signal skips the
/// hooks, a third one exits.
pub async fn handle_shutdown(stop: watch::Sender<bool>, hooks: ShutdownHooks) {
    shutdown_signal().await;
    tokio::select! {
        () = hooks.run() => {}
        () = shutdown_signal() => {}
    }
    stop.send_replace(true);
    shutdown_signal().await;
    std::process::exit(1);
}

pub async fn shutdown_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

//! `skiff server`: certificates, store and API server, and the administrator's kubeconfig.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use jiff::Timestamp;
use pki::{Authority, Issued, Leaf, Usage};
use store::Store;
use store::etcd::EtcdStore;
use store::log::LogStore;
use tokio::sync::watch;

use crate::address;
use crate::flags::{BackupFlags, ServerFlags};

const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

pub fn run(flags: ServerFlags) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(flags))
}

async fn serve(flags: ServerFlags) -> anyhow::Result<()> {
    let bind = SocketAddr::new(flags.bind_address, flags.https_listen_port);
    // First of all: a port in use is the most likely mistake.
    let listener = TcpListener::bind(bind).with_context(|| format!("cannot listen on {bind}"))?;
    let port = listener.local_addr()?.port();
    private_dir(&flags.data_dir)?;
    let store = open_store(&flags).await?;
    let advertise = flags.advertise_address.or_else(|| reachable(flags.bind_address)).or_else(address::own);
    let certificates = certificates(&flags, advertise)?;
    let tls = pki::server_config(
        &certificates.serving.cert_pem,
        &certificates.serving.key_pem,
        &certificates.client_ca,
    )?;
    let (stop, shutdown) = watch::channel(false);
    let (ready, mut is_ready) = watch::channel(false);
    let arguments = Arguments::parse(&flags)?;
    let config = apiserver::Config {
        listener,
        advertise,
        service_cidrs: flags.service_cidr.clone(),
        node_ports: flags.service_node_port_range.0.clone(),
        runtime_config: arguments.runtime_config,
        admission: arguments.admission,
        tls,
        ca_pem: certificates.server_ca.clone(),
        issuer: format!("https://kubernetes.default.svc.{}", flags.cluster_domain),
        token_keys: pki::token::Keys::load_or_create(&flags.data_dir.join("tls"))?,
    };
    let kubeconfig =
        flags.write_kubeconfig.clone().unwrap_or_else(|| flags.data_dir.join("admin.kubeconfig"));
    let url = format!("https://{}", SocketAddr::new(local(flags.bind_address), port));
    let text = pki::kubeconfig(&url, &certificates.server_ca, &certificates.admin, "default");
    pki::write_file(&kubeconfig, text.as_bytes(), flags.write_kubeconfig_mode)?;
    if !flags.disable_agent {
        tracing::warn!("this build runs no node yet; pods stay pending (--disable-agent says so on purpose)");
    }
    tokio::spawn(async move {
        if is_ready.wait_for(|ready| *ready).await.is_ok() {
            tracing::info!(url, kubeconfig = %kubeconfig.display(), "ready");
        }
    });
    tokio::spawn(async move {
        told_to_stop().await;
        stop.send_replace(true);
        // A second signal is for the impatient.
        told_to_stop().await;
        std::process::exit(1);
    });
    apiserver::run(config, store, shutdown, ready).await?;
    tracing::info!("stopped");
    Ok(())
}

async fn open_store(flags: &ServerFlags) -> anyhow::Result<Arc<dyn Store>> {
    if flags.datastore_endpoint.is_empty() {
        let dir = flags.data_dir.join("store");
        return Ok(Arc::new(LogStore::open(&dir, store::log::Config::default())?));
    }
    let options = store::etcd::Options::default();
    let store = EtcdStore::connect(&flags.datastore_endpoint, options).await;
    Ok(Arc::new(
        store.with_context(|| format!("cannot reach etcd at {}", flags.datastore_endpoint.join(",")))?,
    ))
}

struct Certificates {
    server_ca: String,
    client_ca: String,
    serving: Issued,
    admin: Issued,
}

fn certificates(flags: &ServerFlags, advertise: Option<IpAddr>) -> anyhow::Result<Certificates> {
    let dir = flags.data_dir.join("tls");
    let now = Timestamp::now();
    let server_ca = Authority::load_or_create(&dir, "server-ca", now)?;
    let client_ca = Authority::load_or_create(&dir, "client-ca", now)?;
    let domain = &flags.cluster_domain;
    let mut dns_names: Vec<String> =
        ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
            .map(str::to_owned)
            .to_vec();
    dns_names.push(format!("kubernetes.default.svc.{domain}"));
    let mut ips = vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    ips.extend(reachable(flags.bind_address).or(Some(flags.bind_address)).filter(|ip| !ip.is_unspecified()));
    ips.extend(advertise);
    ips.extend(flags.service_cidr.iter().filter_map(|cidr| apiserver::service_ip(cidr)));
    for name in &flags.tls_san {
        match name.parse() {
            Ok(ip) => ips.push(ip),
            Err(_) => dns_names.push(name.clone()),
        }
    }
    let serving = Leaf {
        common_name: "skiff-apiserver".into(),
        organizations: Vec::new(),
        dns_names,
        ips,
        usage: Usage::Server,
        lifetime: YEAR,
    };
    let admin = Leaf {
        common_name: "system:admin".into(),
        organizations: vec!["system:masters".into()],
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: Usage::Client,
        lifetime: YEAR,
    };
    Ok(Certificates {
        serving: pki::load_or_issue(&dir, "serving", &server_ca, &serving, now)?,
        admin: pki::load_or_issue(&dir, "admin", &client_ca, &admin, now)?,
        server_ca: server_ca.pem().to_owned(),
        client_ca: client_ca.pem().to_owned(),
    })
}

/// What `--kube-apiserver-arg` can say.
struct Arguments {
    runtime_config: Vec<String>,
    admission: apiserver::Switches,
}

impl Arguments {
    fn parse(flags: &ServerFlags) -> anyhow::Result<Arguments> {
        let mut runtime_config = flags.runtime_config.clone();
        let mut admission = apiserver::Switches::default();
        for argument in &flags.kube_apiserver_arg {
            let (list, value) = match argument.trim_start_matches("--").split_once('=') {
                Some(("runtime-config", value)) => (&mut runtime_config, value),
                Some(("enable-admission-plugins", value)) => (&mut admission.enable, value),
                Some(("disable-admission-plugins", value)) => (&mut admission.disable, value),
                Some(("admission-control-config-file", path)) => {
                    admission.settings = apiserver::AdmissionSettings::load(Path::new(path))?;
                    continue;
                }
                _ => anyhow::bail!(
                    "--kube-apiserver-arg {argument:?} has no meaning here; only runtime-config=..., enable-admission-plugins=..., disable-admission-plugins=... and admission-control-config-file=... have"
                ),
            };
            list.extend(value.split(',').filter(|name| !name.is_empty()).map(str::to_owned));
        }
        Ok(Arguments { runtime_config, admission })
    }
}

/// Copies a stopped server's data into one file.
pub fn backup(flags: &BackupFlags) -> anyhow::Result<()> {
    let store = LogStore::open(&flags.data_dir.join("store"), store::log::Config::default())?;
    store.backup(&flags.file).with_context(|| format!("cannot write {}", flags.file.display()))?;
    println!("wrote {}", flags.file.display());
    Ok(())
}

/// Fills an empty data directory from a backup.
pub fn restore(flags: &BackupFlags) -> anyhow::Result<()> {
    private_dir(&flags.data_dir)?;
    store::log::restore(&flags.file, &flags.data_dir.join("store"))?;
    println!("restored {} into {}", flags.file.display(), flags.data_dir.display());
    Ok(())
}

fn private_dir(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| format!("cannot make {}", path.display()))
}

/// An address that others could use as it is.
fn reachable(ip: IpAddr) -> Option<IpAddr> {
    (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
}

/// The address for clients on this machine.
fn local(bind: IpAddr) -> IpAddr {
    match bind {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    }
}

async fn told_to_stop() {
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

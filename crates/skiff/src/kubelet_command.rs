//! `skiff kubelet`: a node alone, for any API server, who it is by a kubeconfig.
//!
//! The certificate it serves with is a file's, or asked for from the cluster; where nobody signs that, it vouches for
//! itself, as upstream's does.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use client::Client;
use client::remote::Remote;
use jiff::Timestamp;
use kubelet::ObjectManager;
use pki::{CertKeyPair, Leaf, ServingCertificate};
use reconcile::{Clock, Ctx};
use tokio::sync::watch;

use crate::agent;
use crate::bootstrap::ClientCertificateManager;
use crate::cluster_info::ClusterInfo;
use crate::flags::KubeletFlags;
use crate::join::{self, CertificateRequest, JoinConfig};
use crate::kubelet_config;
use crate::node;
use crate::reset;
use crate::running;
use crate::server::{ShutdownHooks, create_private_dir, handle_shutdown, log_stopped};
use crate::threads::runtime_builder;

/// How long somebody may take to sign a certificate before one is used that nobody has signed.
const INITIAL_CSR_TIMEOUT: Duration = Duration::from_secs(15);
/// How long it may take before another request is made.
const CSR_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// How long to wait before that, at first.
const CSR_RETRY: Duration = Duration::from_secs(5);
const SELF_SIGNED_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
const MAX_SLEEP: Duration = Duration::from_secs(3600);

pub fn run(flags: KubeletFlags) -> anyhow::Result<()> {
    runtime_builder().build()?.block_on(serve(flags))
}

async fn serve(flags: KubeletFlags) -> anyhow::Result<()> {
    anyhow::ensure!(node::can_run_pods(&flags.node), "this process cannot run pods");
    create_private_dir(&flags.node.data_dir)?;
    let _lock = reset::lock(&flags.node.data_dir)?;
    let node_ips = node::node_ips(&flags.node)?;
    let certificate_settings = kubelet_config::certificates(&flags.node.kubelet_arg)?;
    let certificate_manager = client_certificate_manager(&flags, certificate_settings.rotate_client);
    let kubeconfig = certificate_manager.initial_kubeconfig()?;
    let remote =
        Remote::new(&kubeconfig).with_context(|| format!("cannot use {}", flags.kubeconfig.display()))?;
    let server_addr = agent::server_addr(&kubeconfig.server)?;
    let (stop, shutdown) = watch::channel(false);
    let hooks = ShutdownHooks::default();
    tokio::spawn(handle_shutdown(stop, hooks.clone()));
    running::register("kubelet", Some(&flags.node.data_dir));
    let mut stopped = shutdown.clone();
    let first = tokio::select! {
        first = agent::first_address(node_ips.0, &server_addr) => first,
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    let address = agent::follow_address(node_ips.0, first, &server_addr);
    if certificate_manager.rotates || certificate_manager.bootstrap_kubeconfig.is_some() {
        tokio::spawn(certificate_manager.run(remote.clone()));
    }
    let object_manager = ObjectManager::new(Arc::new(remote));
    let ctx = Ctx::new(Client::new(object_manager.clone(), "kubelet"), Clock::default(), shutdown);
    let client_ca = match flags.client_ca_file.as_ref().or(certificate_settings.client_ca.as_ref()) {
        Some(path) => read(path)?,
        // In most clusters one authority vouches for everybody.
        None => String::from_utf8_lossy(&kubeconfig.ca_pem).into_owned(),
    };
    let serving_manager = ServingCertificateManager {
        join_config: JoinConfig {
            cert_dir: flags.node.data_dir.join("agent/tls"),
            server: kubeconfig.server.clone(),
            token: None,
            name: node::name(&flags.node),
            address: first,
            second_ip: node_ips.1,
        },
        client: ctx.client.clone(),
        retry_until_signed: flags.rotate_server_certificates
            || certificate_settings.request_serving == Some(true),
    };
    let serving_files = flags
        .tls_cert_file
        .clone()
        .zip(flags.tls_private_key_file.clone())
        .or(certificate_settings.serving_files);
    let serving = match serving_files {
        Some((certificate, key)) => {
            ServingCertificate::new(&CertKeyPair { cert_pem: read(&certificate)?, key_pem: read(&key)? })?
        }
        None => serving_manager.serving().await?,
    };
    let cluster_info = ClusterInfo {
        cluster_cidr: Vec::new(),
        service_cidr: Vec::new(),
        cluster_dns: flags.cluster_dns.clone(),
        cluster_domain: flags.cluster_domain.clone(),
        has_node_dns: false,
        client_ca,
        ingress_ports: [0, 0],
    };
    let authority = pki::ClientAuthority::new(&cluster_info.client_ca, "the authority for clients")?;
    let config =
        node::config(&flags.node, &cluster_info, address, node::ServingCredentials { serving, authority })?;
    let config = kubelet::Config { object_manager: Some(object_manager), ..config };
    hooks.set_node(&config);
    let runtime = node::runtime(&flags.node, watch::Sender::default(), ctx.shutdown.clone()).await?;
    tracing::info!(server = kubeconfig.server, node = config.settings.node_name, "a node is at work");
    kubelet::run(ctx, runtime, config).await;
    log_stopped(&flags.node.data_dir);
    Ok(())
}

/// Who this node is to its API server.
fn client_certificate_manager(flags: &KubeletFlags, rotates: Option<bool>) -> ClientCertificateManager {
    let by_default = flags.bootstrap_kubeconfig.is_some();
    ClientCertificateManager {
        kubeconfig: flags.kubeconfig.clone(),
        bootstrap_kubeconfig: flags.bootstrap_kubeconfig.clone(),
        cert_dir: flags
            .cert_dir
            .clone()
            .unwrap_or_else(|| node::kubelet_root(&flags.node.data_dir).join("pki")),
        leaf: join::client_leaf(&node::name(&flags.node)),
        rotates: flags.rotate_certificates || rotates.unwrap_or(by_default),
    }
}

/// Who this node is to those that ask it for something.
struct ServingCertificateManager {
    join_config: JoinConfig,
    client: Client,
    /// Whether a certificate is asked for until somebody signs it.
    retry_until_signed: bool,
}

impl ServingCertificateManager {
    /// The certificate to show, which is renewed when it is time.
    async fn serving(self) -> anyhow::Result<Arc<ServingCertificate>> {
        let leaf = self.join_config.serving_leaf();
        let stored = pki::load_certificate(&self.join_config.cert_dir, "serving", &leaf, Timestamp::now())?;
        // Nobody waits for long for what may take hours.
        let load_or_request = async {
            match stored {
                Some(stored) => Some(stored),
                None => tokio::time::timeout(INITIAL_CSR_TIMEOUT, self.request_certificate(&leaf))
                    .await
                    .ok()?
                    .ok(),
            }
        };
        let certificate = load_or_request.await;
        let serving = match &certificate {
            Some(certificate) => ServingCertificate::new(certificate)?,
            None => {
                tracing::warn!("this node serves with a certificate that vouches for itself");
                ServingCertificate::new(&self_signed(&leaf)?)?
            }
        };
        tokio::spawn(self.run(leaf, certificate, serving.clone()));
        Ok(serving)
    }

    /// Replaces the certificate when it is time, and one that nobody has signed as soon as somebody does.
    async fn run(self, leaf: Leaf, mut certificate: Option<CertKeyPair>, serving: Arc<ServingCertificate>) {
        let mut backoff = CSR_RETRY;
        loop {
            if let Some(certificate) = &certificate {
                let remaining = Timestamp::now().duration_until(certificate.renewal_time());
                let wait = Duration::try_from(remaining).unwrap_or_default().min(MAX_SLEEP);
                tokio::time::sleep(wait.max(Duration::from_secs(1))).await;
                if certificate.renewal_time() > Timestamp::now() {
                    continue;
                }
            } else {
                tokio::time::sleep(backoff).await;
                backoff = backoff.saturating_mul(2).min(MAX_SLEEP);
            }
            match self
                .request_certificate(&leaf)
                .await
                .and_then(|renewed| Ok((serving.replace(&renewed)?, renewed).1))
            {
                Ok(renewed) => {
                    tracing::info!("this node serves with a certificate that the cluster has signed");
                    certificate = Some(renewed);
                    backoff = CSR_RETRY;
                }
                // Where nobody signs such requests, the cluster does not want this node to have one.
                Err(CertificateError::NotSigned) if !self.retry_until_signed && certificate.is_none() => {
                    return renew_self_signed(&leaf, &serving).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "this node has no new certificate to serve with");
                    if certificate.is_some() {
                        tokio::time::sleep(backoff).await;
                        backoff = backoff.saturating_mul(2).min(MAX_SLEEP);
                    }
                }
            }
        }
    }

    async fn request_certificate(&self, leaf: &Leaf) -> Result<CertKeyPair, CertificateError> {
        let request =
            CertificateRequest::create(&self.client, leaf).await.map_err(CertificateError::RequestFailed)?;
        let signed = request.wait_for_certificate(&self.client, CSR_TIMEOUT).await;
        let certificate = signed.map_err(|error| {
            // Whoever could not be asked how it went may still sign it.
            if error.is::<client::Error>() {
                return CertificateError::RequestFailed(error);
            }
            tracing::debug!("{error:#}");
            CertificateError::NotSigned
        })?;
        pki::store_certificate(&self.join_config.cert_dir, "serving", &certificate)?;
        Ok(certificate)
    }
}

/// A certificate that vouches for itself.
fn self_signed(leaf: &Leaf) -> Result<CertKeyPair, pki::Error> {
    pki::self_signed(&Leaf { lifetime: SELF_SIGNED_LIFETIME, ..leaf.clone() }, Timestamp::now())
}

/// Serves with such certificates, one after the other.
async fn renew_self_signed(leaf: &Leaf, serving: &ServingCertificate) {
    loop {
        // Half of it, from whenever the one that is shown was made.
        tokio::time::sleep(SELF_SIGNED_LIFETIME / 2).await;
        if let Err(error) = self_signed(leaf).and_then(|renewed| serving.replace(&renewed)) {
            tracing::warn!(%error, "this node has no new certificate to serve with");
        }
    }
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
enum CertificateError {
    #[error("cannot ask for one: {0:#}")]
    RequestFailed(anyhow::Error),
    #[error("nobody has signed the request")]
    NotSigned,
    #[error(transparent)]
    Invalid(#[from] pki::Error),
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

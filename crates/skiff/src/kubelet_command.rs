//! `skiff kubelet`: a standalone kubelet for any API server, with a kubeconfig.
//!
//! The serving certificate is read from a file or requested from the cluster. If the request is not
//! signed, it is self-signed, as in upstream.

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

/// How long the start waits for a signed serving certificate before a self-signed one is used.
const INITIAL_CSR_TIMEOUT: Duration = Duration::from_secs(15);
/// How long to wait for a signature before a new CertificateSigningRequest is created.
const CSR_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Initial delay between such requests.
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
        // In most clusters, one CA signs both client and serving certificates.
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
    let authority = pki::ClientAuthority::new(&cluster_info.client_ca, "the client CA")?;
    let config =
        node::config(&flags.node, &cluster_info, address, node::ServingCredentials { serving, authority })?;
    let config = kubelet::Config { object_manager: Some(object_manager), ..config };
    hooks.set_node(&config);
    let runtime = node::runtime(&flags.node, watch::Sender::default(), ctx.shutdown.clone()).await?;
    tracing::info!(server = kubeconfig.server, node = config.settings.node_name, "kubelet started");
    kubelet::run(ctx, runtime, config).await;
    log_stopped(&flags.node.data_dir);
    Ok(())
}

/// The manager of this node's client certificate.
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

/// Manages the serving certificate of a standalone kubelet.
struct ServingCertificateManager {
    join_config: JoinConfig,
    client: Client,
    /// Whether requests are repeated until one is signed.
    retry_until_signed: bool,
}

impl ServingCertificateManager {
    /// Returns the serving certificate and renews it in the background.
    async fn serving(self) -> anyhow::Result<Arc<ServingCertificate>> {
        let leaf = self.join_config.serving_leaf();
        let stored = pki::load_certificate(&self.join_config.cert_dir, "serving", &leaf, Timestamp::now())?;
        // An approval may take hours, so the start does not wait for it.
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
                tracing::warn!("using a self-signed serving certificate");
                ServingCertificate::new(&self_signed(&leaf)?)?
            }
        };
        tokio::spawn(self.run(leaf, certificate, serving.clone()));
        Ok(serving)
    }

    /// Renews the serving certificate, and replaces a self-signed one when the cluster has signed a
    /// request.
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
                    tracing::info!("serving certificate issued");
                    certificate = Some(renewed);
                    backoff = CSR_RETRY;
                }
                // If requests are not signed, the cluster does not issue serving certificates, and the
                // node stays with a self-signed one.
                Err(CertificateError::NotSigned) if !self.retry_until_signed && certificate.is_none() => {
                    return renew_self_signed(&leaf, &serving).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot renew the serving certificate, retrying");
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
            // If the status could not be fetched, the request may still be signed.
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

/// A self-signed certificate.
fn self_signed(leaf: &Leaf) -> Result<CertKeyPair, pki::Error> {
    pki::self_signed(&Leaf { lifetime: SELF_SIGNED_LIFETIME, ..leaf.clone() }, Timestamp::now())
}

/// Serves with self-signed certificates, and replaces each before it expires.
async fn renew_self_signed(leaf: &Leaf, serving: &ServingCertificate) {
    loop {
        // Renews after half of the lifetime. The current certificate was issued shortly before.
        tokio::time::sleep(SELF_SIGNED_LIFETIME / 2).await;
        if let Err(error) = self_signed(leaf).and_then(|renewed| serving.replace(&renewed)) {
            tracing::warn!(%error, "cannot renew the serving certificate, retrying");
        }
    }
}

/// Why there is no signed certificate.
#[derive(Debug, thiserror::Error)]
enum CertificateError {
    #[error("certificate signing request failed: {0:#}")]
    RequestFailed(anyhow::Error),
    #[error("the certificate signing request was not signed")]
    NotSigned,
    #[error(transparent)]
    Invalid(#[from] pki::Error),
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

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
use kubelet::Referred;
use pki::{Issued, Leaf, Serving};
use reconcile::{Clock, Ctx};
use tokio::sync::watch;

use crate::agent;
use crate::bootstrap::Identity;
use crate::facts::Facts;
use crate::flags::KubeletFlags;
use crate::join::{self, Joining, Request};
use crate::kubelet_config;
use crate::node;
use crate::reset;
use crate::running;
use crate::server::{ShutdownHooks, log_stopped, private_dir, stop_when_told};
use crate::threads::threads;

/// How long somebody may take to sign a certificate before one is used that nobody has signed.
const SIGNED_WITHIN: Duration = Duration::from_secs(15);
/// How long it may take before another request is made.
const LONGEST_ASKED: Duration = Duration::from_secs(15 * 60);
/// How long to wait before that, at first.
const ASK_AGAIN: Duration = Duration::from_secs(5);
const SELF_SIGNED: Duration = Duration::from_secs(365 * 24 * 3600);
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

pub fn run(flags: KubeletFlags) -> anyhow::Result<()> {
    threads().build()?.block_on(serve(flags))
}

async fn serve(flags: KubeletFlags) -> anyhow::Result<()> {
    anyhow::ensure!(node::can_run_pods(&flags.node), "this process cannot run pods");
    private_dir(&flags.node.data_dir)?;
    let _lock = reset::lock(&flags.node.data_dir)?;
    let told = node::node_ips(&flags.node)?;
    let asked = kubelet_config::certificates(&flags.node.kubelet_arg)?;
    let identity = identity(&flags, asked.rotates);
    let known = identity.known()?;
    let remote = Remote::new(&known).with_context(|| format!("cannot use {}", flags.kubeconfig.display()))?;
    let place = agent::place(&known.server)?;
    let (stop, shutdown) = watch::channel(false);
    let hooks = ShutdownHooks::default();
    tokio::spawn(stop_when_told(stop, hooks.clone()));
    running::register("kubelet", Some(&flags.node.data_dir));
    let mut stopped = shutdown.clone();
    let first = tokio::select! {
        first = agent::first_address(told.0, &place) => first,
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    let address = agent::address(told.0, first, &place);
    if identity.rotates || identity.bootstrap.is_some() {
        tokio::spawn(identity.keep(remote.clone()));
    }
    let referred = Referred::new(Arc::new(remote));
    let ctx = Ctx::new(Client::new(referred.clone(), "kubelet"), Clock::default(), shutdown);
    let client_ca = match flags.client_ca_file.as_ref().or(asked.client_ca.as_ref()) {
        Some(path) => read(path)?,
        // In most clusters one authority vouches for everybody.
        None => String::from_utf8_lossy(&known.ca_pem).into_owned(),
    };
    let own = Own {
        joining: Joining {
            dir: flags.node.data_dir.join("agent/tls"),
            server: known.server.clone(),
            token: None,
            name: node::name(&flags.node),
            address: first,
            second: told.1,
        },
        client: ctx.client.clone(),
        insists: flags.rotate_server_certificates || asked.of_server == Some(true),
    };
    let served = flags.tls_cert_file.clone().zip(flags.tls_private_key_file.clone()).or(asked.served);
    let serving = match served {
        Some((certificate, key)) => {
            Serving::new(&Issued { cert_pem: read(&certificate)?, key_pem: read(&key)? })?
        }
        None => own.serving().await?,
    };
    let facts = Facts {
        cluster_cidr: Vec::new(),
        service_cidr: Vec::new(),
        cluster_dns: flags.cluster_dns.clone(),
        cluster_domain: flags.cluster_domain.clone(),
        own_dns: false,
        client_ca,
        ingress_ports: [0, 0],
    };
    let authority = pki::ClientAuthority::new(&facts.client_ca, "the authority for clients")?;
    let config = node::config(&flags.node, &facts, address, node::Credentials { serving, authority })?;
    let config = kubelet::Config { referred: Some(referred), ..config };
    hooks.set_node(&config);
    let runtime = node::runtime(&flags.node, watch::Sender::default(), ctx.shutdown.clone()).await?;
    tracing::info!(server = known.server, node = config.settings.node_name, "a node is at work");
    kubelet::run(ctx, runtime, config).await;
    log_stopped(&flags.node.data_dir);
    Ok(())
}

/// Who this node is to its API server.
fn identity(flags: &KubeletFlags, rotates: Option<bool>) -> Identity {
    let by_default = flags.bootstrap_kubeconfig.is_some();
    Identity {
        kubeconfig: flags.kubeconfig.clone(),
        bootstrap: flags.bootstrap_kubeconfig.clone(),
        dir: flags.cert_dir.clone().unwrap_or_else(|| node::kubelet_root(&flags.node.data_dir).join("pki")),
        leaf: join::client_leaf(&node::name(&flags.node)),
        rotates: flags.rotate_certificates || rotates.unwrap_or(by_default),
    }
}

/// Who this node is to those that ask it for something.
struct Own {
    joining: Joining,
    client: Client,
    /// Whether a certificate is asked for until somebody signs it.
    insists: bool,
}

impl Own {
    /// The certificate to show, which is renewed when it is time.
    async fn serving(self) -> anyhow::Result<Arc<Serving>> {
        let leaf = self.joining.serving_leaf();
        let kept = pki::kept(&self.joining.dir, "serving", &leaf, Timestamp::now())?;
        // Nobody waits for long for what may take hours.
        let asked = async {
            match kept {
                Some(kept) => Some(kept),
                None => tokio::time::timeout(SIGNED_WITHIN, self.ask(&leaf)).await.ok()?.ok(),
            }
        };
        let issued = asked.await;
        let serving = match &issued {
            Some(issued) => Serving::new(issued)?,
            None => {
                tracing::warn!("this node serves with a certificate that vouches for itself");
                Serving::new(&self_signed(&leaf)?)?
            }
        };
        tokio::spawn(self.keep(leaf, issued, serving.clone()));
        Ok(serving)
    }

    /// Replaces the certificate when it is time, and one that nobody has signed as soon as somebody does.
    async fn keep(self, leaf: Leaf, mut issued: Option<Issued>, shown: Arc<Serving>) {
        let mut pause = ASK_AGAIN;
        loop {
            if let Some(issued) = &issued {
                let left = Timestamp::now().duration_until(issued.renewal_due());
                let wait = Duration::try_from(left).unwrap_or_default().min(LONGEST_WAIT);
                tokio::time::sleep(wait.max(Duration::from_secs(1))).await;
                if issued.renewal_due() > Timestamp::now() {
                    continue;
                }
            } else {
                tokio::time::sleep(pause).await;
                pause = pause.saturating_mul(2).min(LONGEST_WAIT);
            }
            match self.ask(&leaf).await.and_then(|fresh| Ok((shown.replace(&fresh)?, fresh).1)) {
                Ok(fresh) => {
                    tracing::info!("this node serves with a certificate that the cluster has signed");
                    issued = Some(fresh);
                    pause = ASK_AGAIN;
                }
                // Where nobody signs such requests, the cluster does not want this node to have one.
                Err(Unsigned::ByNobody) if !self.insists && issued.is_none() => {
                    return stand_in(&leaf, &shown).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "this node has no new certificate to serve with");
                    if issued.is_some() {
                        tokio::time::sleep(pause).await;
                        pause = pause.saturating_mul(2).min(LONGEST_WAIT);
                    }
                }
            }
        }
    }

    async fn ask(&self, leaf: &Leaf) -> Result<Issued, Unsigned> {
        let request = Request::make(&self.client, leaf).await.map_err(Unsigned::Unasked)?;
        let signed = request.signed(&self.client, LONGEST_ASKED).await;
        let issued = signed.map_err(|why| {
            // Whoever could not be asked how it went may still sign it.
            if why.is::<client::Error>() {
                return Unsigned::Unasked(why);
            }
            tracing::debug!("{why:#}");
            Unsigned::ByNobody
        })?;
        pki::keep(&self.joining.dir, "serving", &issued)?;
        Ok(issued)
    }
}

/// A certificate that vouches for itself.
fn self_signed(leaf: &Leaf) -> Result<Issued, pki::Error> {
    pki::self_signed(&Leaf { lifetime: SELF_SIGNED, ..leaf.clone() }, Timestamp::now())
}

/// Serves with such certificates, one after the other.
async fn stand_in(leaf: &Leaf, shown: &Serving) {
    loop {
        // Half of it, from whenever the one that is shown was made.
        tokio::time::sleep(SELF_SIGNED / 2).await;
        if let Err(error) = self_signed(leaf).and_then(|fresh| shown.replace(&fresh)) {
            tracing::warn!(%error, "this node has no new certificate to serve with");
        }
    }
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
enum Unsigned {
    #[error("cannot ask for one: {0:#}")]
    Unasked(anyhow::Error),
    #[error("nobody has signed the request")]
    ByNobody,
    #[error(transparent)]
    Useless(#[from] pki::Error),
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

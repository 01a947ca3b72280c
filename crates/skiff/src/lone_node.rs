//! `skiff kubelet`: a node alone, for any API server, who it is by a kubeconfig.
//!
//! The certificate it serves with is a file's, or asked for from the cluster; where nobody signs that, it vouches for
//! itself, as upstream's does.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use client::remote::Remote;
use client::{Client, Kubeconfig};
use jiff::Timestamp;
use kubelet::Referred;
use pki::{Issued, Leaf, Serving};
use reconcile::{Clock, Ctx};
use tokio::sync::watch;

use crate::agent;
use crate::facts::Facts;
use crate::flags::KubeletFlags;
use crate::join::Joining;
use crate::node;
use crate::reset;
use crate::server::{private_dir, told_to_stop};
use crate::threads::threads;

/// How long somebody may take to sign a certificate before one is used that nobody has signed.
const SIGNED_WITHIN: Duration = Duration::from_secs(15);
const SELF_SIGNED: Duration = Duration::from_secs(365 * 24 * 3600);
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

pub fn run(flags: KubeletFlags) -> anyhow::Result<()> {
    threads().build()?.block_on(serve(flags))
}

async fn serve(flags: KubeletFlags) -> anyhow::Result<()> {
    anyhow::ensure!(node::can_run_pods(&flags.node), "this process cannot run pods");
    private_dir(&flags.node.data_dir)?;
    let _lock = reset::lock(&flags.node.data_dir)?;
    let known = Kubeconfig::read(&flags.kubeconfig)?;
    let remote = Remote::new(&known).with_context(|| format!("cannot use {}", flags.kubeconfig.display()))?;
    let told = node::node_ips(&flags.node)?;
    let place = agent::place(&known.server)?;
    let (stop, shutdown) = watch::channel(false);
    tokio::spawn(async move {
        told_to_stop().await;
        stop.send_replace(true);
        told_to_stop().await;
        std::process::exit(1);
    });
    let mut stopped = shutdown.clone();
    let first = tokio::select! {
        first = agent::first_address(told.0, &place) => first,
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    let address = agent::address(told.0, first, &place);
    let referred = Referred::new(Arc::new(remote));
    let ctx = Ctx::new(Client::new(referred.clone(), "kubelet"), Clock::default(), shutdown);
    let client_ca = match &flags.client_ca_file {
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
    };
    let serving = match flags.tls_cert_file.as_ref().zip(flags.tls_private_key_file.as_ref()) {
        Some((certificate, key)) => {
            Serving::new(&Issued { cert_pem: read(certificate)?, key_pem: read(key)? })?
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
    let runtime = node::runtime(&flags.node, watch::Sender::default(), ctx.shutdown.clone()).await?;
    tracing::info!(server = known.server, node = config.settings.node_name, "a node is at work");
    kubelet::run(ctx, runtime, config).await;
    tracing::info!("stopped");
    Ok(())
}

/// Who this node is to those that ask it for something.
struct Own {
    joining: Joining,
    client: Client,
}

impl Own {
    /// The certificate to show, which is renewed when it is time.
    async fn serving(self) -> anyhow::Result<Arc<Serving>> {
        let leaf = self.joining.serving_leaf();
        let kept = pki::kept(&self.joining.dir, "serving", &leaf, Timestamp::now())?;
        let mut issued = match kept {
            Some(kept) => kept,
            None => self.ask(&leaf).await?,
        };
        let serving = Serving::new(&issued)?;
        let shown = serving.clone();
        tokio::spawn(async move {
            loop {
                let left = Timestamp::now().duration_until(issued.renewal_due());
                let wait = Duration::try_from(left).unwrap_or_default().min(LONGEST_WAIT);
                tokio::time::sleep(wait.max(Duration::from_secs(1))).await;
                if issued.renewal_due() > Timestamp::now() {
                    continue;
                }
                match self.ask(&leaf).await.and_then(|fresh| Ok((shown.replace(&fresh)?, fresh).1)) {
                    Ok(fresh) => issued = fresh,
                    Err(error) => tracing::error!("cannot renew this node's certificate: {error:#}"),
                }
            }
        });
        Ok(serving)
    }

    async fn ask(&self, leaf: &Leaf) -> anyhow::Result<Issued> {
        let asked = self.joining.certificate(&self.client, "serving", leaf);
        let why = match tokio::time::timeout(SIGNED_WITHIN, asked).await {
            Ok(Ok(issued)) => return Ok(issued),
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => "nobody has signed the request".to_owned(),
        };
        tracing::warn!(why, "this node serves with a certificate that vouches for itself");
        Ok(pki::self_signed(&Leaf { lifetime: SELF_SIGNED, ..leaf.clone() }, Timestamp::now())?)
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

//! The node's side of joining: who the server is, certificates for the node, and what it must know of the cluster.
//! All of it is kept, so that a node that has joined starts without asking anybody, and certificates are renewed in
//! time.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use client::Client;
use client::remote::Remote;
use jiff::Timestamp;
use pki::join::{Fingerprint, JoinToken, PinnedAuthorityVerifier};
use pki::{CertKeyPair, ClientCertificate, Leaf, ServingCertificate, Usage};
use serde_json::{Value, json};

use crate::address::AddressReceiver;
use crate::cluster_info::ClusterInfo;
use crate::join_server::CLUSTER_INFO_PATH;

const CSR_PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
/// How long to wait before trying again to join, and to renew.
const JOIN_RETRY: Duration = Duration::from_secs(2);
const RENEWAL_RETRY: Duration = Duration::from_secs(600);
const ADDRESS_CHANGE_RETRY: Duration = Duration::from_secs(10);
/// A timer does not run while the machine sleeps, so that no wait is longer than this.
const MAX_SLEEP: Duration = Duration::from_secs(24 * 3600);
/// How often to look whether a request was signed, and for how long.
const CSR_POLL_INTERVAL: Duration = Duration::from_millis(100);
const CSR_TIMEOUT: Duration = Duration::from_secs(60);
/// How often once it has turned out that it takes longer.
const CSR_SLOW_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Who wants to join what.
pub struct JoinConfig {
    /// Where everything is kept.
    pub cert_dir: PathBuf,
    pub server: String,
    pub token: Option<JoinToken>,
    pub name: String,
    pub address: IpAddr,
    /// Its address of the other family, if it was given one.
    pub second_ip: Option<IpAddr>,
}

/// A node that has joined.
pub struct JoinedNode {
    pub pinned: Arc<PinnedAuthorityVerifier>,
    pub cluster_info: ClusterInfo,
    client_pair: CertKeyPair,
    serving_pair: CertKeyPair,
}

/// A failure that trying again does not mend.
#[derive(Debug, thiserror::Error)]
enum JoinError {
    #[error("the server does not accept the token: it is another cluster's, or has been replaced")]
    InvalidToken,
    #[error(
        "the server is not the one the token is for, or does not have this name in its certificate (--tls-san)"
    )]
    UnverifiedServer(#[source] client::Error),
    #[error("a token is needed to join: the server has it in the file `token` of its data directory")]
    MissingToken,
    #[error(
        "the token must say which authority to trust: take all of it from the file `token` of the server"
    )]
    TokenWithoutAuthority,
}

impl JoinConfig {
    /// Joins, however long it takes the server to be there.
    pub async fn join(&self) -> anyhow::Result<JoinedNode> {
        loop {
            match self.try_join().await {
                Ok(joined) => return Ok(joined),
                Err(error) if error.is::<JoinError>() => return Err(error),
                Err(error) => tracing::warn!(server = self.server, "cannot join yet: {error:#}"),
            }
            tokio::time::sleep(JOIN_RETRY).await;
        }
    }

    async fn try_join(&self) -> anyhow::Result<JoinedNode> {
        let now = Timestamp::now();
        let (authority, has_joined) = self.authority()?;
        let pinned = PinnedAuthorityVerifier::new(authority);
        let load_stored = |stem: &str, leaf: &Leaf| -> anyhow::Result<Option<CertKeyPair>> {
            Ok(if has_joined { pki::load_certificate(&self.cert_dir, stem, leaf, now)? } else { None })
        };
        let client = match load_stored("client", &self.client_leaf())? {
            Some(client) => client,
            None => self.request_client_certificate(&pinned).await?,
        };
        let node_client = self.client(&pinned, None, Some(ClientCertificate::new(&client)?))?;
        let cluster_info = self.fetch_cluster_info(&node_client).await?;
        let serving = match load_stored("serving", &self.serving_leaf())? {
            Some(serving) => serving,
            None => self.request_certificate(&node_client, "serving", &self.serving_leaf()).await?,
        };
        Ok(JoinedNode { pinned, cluster_info, client_pair: client, serving_pair: serving })
    }

    /// Whom to trust, and whether certificates that were kept are of that cluster.
    fn authority(&self) -> anyhow::Result<(Fingerprint, bool)> {
        let path = self.cert_dir.join("server-ca.crt");
        let known = std::fs::read_to_string(path).ok().and_then(|pem| Fingerprint::from_pem(&pem).ok());
        let token_authority = self.token.as_ref().and_then(|token| token.authority);
        match (token_authority, known) {
            (Some(token_authority), known) => Ok((token_authority, known == Some(token_authority))),
            (None, Some(known)) => Ok((known, true)),
            (None, None) if self.token.is_some() => Err(JoinError::TokenWithoutAuthority.into()),
            (None, None) => Err(JoinError::MissingToken.into()),
        }
    }

    fn client(
        &self,
        pinned: &Arc<PinnedAuthorityVerifier>,
        token: Option<&str>,
        client_certificate: Option<Arc<ClientCertificate>>,
    ) -> anyhow::Result<Client> {
        let remote = Remote::with_tls(&self.server, token, pinned.config(client_certificate)?);
        Ok(Client::new(Arc::new(remote), "kubelet"))
    }

    /// The certificate that the token is exchanged for.
    async fn request_client_certificate(
        &self,
        pinned: &Arc<PinnedAuthorityVerifier>,
    ) -> anyhow::Result<CertKeyPair> {
        let token = self.token.as_ref().ok_or(JoinError::MissingToken)?;
        let join_client = self.client(pinned, Some(&token.bootstrap.bearer()), None)?;
        let client = self.request_certificate(&join_client, "client", &self.client_leaf()).await?;
        let authority = pinned.authority().context("the server has shown no authority")?;
        pki::write_file(&self.cert_dir.join("server-ca.crt"), authority.as_bytes(), 0o600)?;
        Ok(client)
    }

    /// Asks for a certificate, waits until it is signed, and keeps it.
    pub async fn request_certificate(
        &self,
        client: &Client,
        stem: &str,
        leaf: &Leaf,
    ) -> anyhow::Result<CertKeyPair> {
        let certificate =
            CertificateRequest::create(client, leaf).await?.wait_for_certificate(client, CSR_TIMEOUT).await?;
        pki::store_certificate(&self.cert_dir, stem, &certificate)?;
        Ok(certificate)
    }

    /// What the server tells; what it has told before where it cannot be reached.
    async fn fetch_cluster_info(&self, client: &Client) -> anyhow::Result<ClusterInfo> {
        let path = self.cert_dir.join("cluster.json");
        match client.request(http::Method::GET, CLUSTER_INFO_PATH, None).await {
            Ok(map) => {
                let cluster_info = ClusterInfo::from_data(&map["data"])?;
                pki::write_file(&path, cluster_info.to_data().to_string().as_bytes(), 0o600)?;
                Ok(cluster_info)
            }
            Err(error @ client::Error::Unreachable(_)) => match std::fs::read(&path) {
                Ok(text) => ClusterInfo::from_data(&serde_json::from_slice(&text)?),
                Err(_) => Err(to_join_error(error)),
            },
            Err(error) => Err(error.into()),
        }
    }

    fn client_leaf(&self) -> Leaf {
        client_leaf(&self.name)
    }

    pub fn serving_leaf(&self) -> Leaf {
        Leaf {
            dns_names: vec![self.name.clone()],
            ips: [Some(self.address), self.second_ip].into_iter().flatten().collect(),
            usage: Usage::Server,
            ..self.client_leaf()
        }
    }
}

/// What the certificate of a node says by which it is known to the API server.
pub fn client_leaf(node: &str) -> Leaf {
    Leaf {
        common_name: format!("system:node:{node}"),
        organizations: vec!["system:nodes".into()],
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: Usage::Client,
        // The signer decides.
        lifetime: Duration::ZERO,
    }
}

/// A request for a certificate that was made.
pub struct CertificateRequest {
    path: String,
    key_pem: String,
}

impl CertificateRequest {
    pub async fn create(client: &Client, leaf: &Leaf) -> anyhow::Result<CertificateRequest> {
        let csr = pki::create_csr(leaf)?;
        let (signer, usage) = match leaf.usage {
            Usage::Client => ("kubernetes.io/kube-apiserver-client-kubelet", "client auth"),
            Usage::Server => ("kubernetes.io/kubelet-serving", "server auth"),
        };
        let request = json!({
            "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
            "metadata": {"generateName": "node-csr-"},
            "spec": {
                "signerName": signer, "usages": ["digital signature", usage],
                "request": STANDARD.encode(csr.request),
            },
        });
        let created =
            client.request(http::Method::POST, CSR_PATH, Some(&request)).await.map_err(to_join_error)?;
        let name = created.pointer("/metadata/name").and_then(Value::as_str);
        let path = format!("{CSR_PATH}/{}", name.context("a request without a name")?);
        Ok(CertificateRequest { path, key_pem: csr.key_pem })
    }

    /// Waits until it is signed, but not for ever: somebody may have to look at it first, or nobody does.
    pub async fn wait_for_certificate(
        &self,
        client: &Client,
        timeout: Duration,
    ) -> anyhow::Result<CertKeyPair> {
        let started = tokio::time::Instant::now();
        let name = self.path.rsplit('/').next().unwrap_or_default();
        while started.elapsed() < timeout {
            tokio::time::sleep(if started.elapsed() < CSR_TIMEOUT {
                CSR_POLL_INTERVAL
            } else {
                CSR_SLOW_POLL_INTERVAL
            })
            .await;
            let request = client.request(http::Method::GET, &self.path, None).await.map_err(to_join_error)?;
            let conditions = request.pointer("/status/conditions").and_then(Value::as_array);
            for condition in conditions.into_iter().flatten() {
                if matches!(condition["type"].as_str(), Some("Denied" | "Failed")) {
                    bail!("the request {name} for a certificate was refused: {}", condition["message"]);
                }
            }
            if let Some(text) = request.pointer("/status/certificate").and_then(Value::as_str) {
                let cert_pem = String::from_utf8(STANDARD.decode(text).context("no base64")?)?;
                return Ok(CertKeyPair { cert_pem, key_pem: self.key_pem.clone() });
            }
        }
        bail!("the request {name} for a certificate was not signed in time")
    }
}

/// Failures of the first words exchanged.
fn to_join_error(error: client::Error) -> anyhow::Error {
    if error.code() == 401 {
        return JoinError::InvalidToken.into();
    }
    let mut source: Option<&dyn std::error::Error> = Some(&error);
    while let Some(cause) = source {
        if cause.to_string().contains("invalid peer certificate") {
            return JoinError::UnverifiedServer(error).into();
        }
        source = cause.source();
    }
    error.into()
}

/// The node's certificates in use.
pub struct NodeCredentials {
    pub remote: Remote,
    pub client_certificate: Arc<ClientCertificate>,
    pub serving: Arc<ServingCertificate>,
}

impl NodeCredentials {
    /// Makes new connections to the server for what comes.
    fn refresh_tls(&self, joined: &JoinedNode) -> anyhow::Result<()> {
        self.remote.replace_tls(joined.pinned.config(Some(self.client_certificate.clone()))?);
        Ok(())
    }
}

impl JoinedNode {
    pub fn credentials(&self, server: &str) -> anyhow::Result<NodeCredentials> {
        let client_certificate = ClientCertificate::new(&self.client_pair)?;
        let remote = Remote::with_tls(server, None, self.pinned.config(Some(client_certificate.clone()))?);
        Ok(NodeCredentials {
            remote,
            client_certificate,
            serving: ServingCertificate::new(&self.serving_pair)?,
        })
    }
}

/// Renews certificates whenever it is time, and whenever this node is reached at another address. `clock` tells the
/// time.
pub async fn keep_renewed(
    mut join_config: JoinConfig,
    mut joined: JoinedNode,
    credentials: NodeCredentials,
    mut address: AddressReceiver,
    clock: impl Fn() -> Timestamp,
) {
    let mut address_changed = false;
    loop {
        let now = clock();
        if let Some(address) = *address.borrow_and_update()
            && address != join_config.address
        {
            join_config.address = address;
            address_changed = true;
            // What was on its way to the address before does not arrive.
            if let Err(error) = credentials.refresh_tls(&joined) {
                tracing::error!("cannot speak to the server anew: {error:#}");
            }
        }
        let renewal_time = joined.client_pair.renewal_time().min(joined.serving_pair.renewal_time());
        let mut wait = Duration::try_from(now.duration_until(renewal_time)).unwrap_or_default();
        if renewal_time <= now || address_changed {
            wait = match renew(&join_config, &mut joined, &credentials, now, address_changed).await {
                Ok(()) => {
                    address_changed = false;
                    Duration::ZERO
                }
                Err(error) => {
                    tracing::error!("cannot renew this node's certificates: {error:#}");
                    if address_changed { ADDRESS_CHANGE_RETRY } else { RENEWAL_RETRY }
                }
            };
        }
        tokio::select! {
            () = tokio::time::sleep(wait.min(MAX_SLEEP)) => {}
            Ok(()) = address.changed() => {}
        }
    }
}

async fn renew(
    join_config: &JoinConfig,
    joined: &mut JoinedNode,
    credentials: &NodeCredentials,
    now: Timestamp,
    address_changed: bool,
) -> anyhow::Result<()> {
    let NodeCredentials { remote, client_certificate: showing, serving } = credentials;
    let client = Client::new(Arc::new(remote.clone()), "kubelet");
    if joined.client_pair.renewal_time() <= now {
        joined.client_pair =
            join_config.request_certificate(&client, "client", &join_config.client_leaf()).await?;
        showing.replace(&joined.client_pair)?;
        // Connections go on as who they were; new ones are made.
        credentials.refresh_tls(joined)?;
        tracing::info!("this node's certificate as a client was renewed");
    }
    if address_changed || joined.serving_pair.renewal_time() <= now {
        joined.serving_pair =
            join_config.request_certificate(&client, "serving", &join_config.serving_leaf()).await?;
        serving.replace(&joined.serving_pair)?;
        tracing::info!("this node's certificate as a server was renewed");
    }
    Ok(())
}

//! The node's side of joining: verifies the server, requests the node's certificates and fetches the
//! cluster configuration. Everything is stored, so that a node that has joined can start without the
//! server. Certificates are renewed before they expire.

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
/// Delays before a retry: of joining, of a renewal, and of a renewal after an address change.
const JOIN_RETRY: Duration = Duration::from_secs(2);
const RENEWAL_RETRY: Duration = Duration::from_secs(600);
const ADDRESS_CHANGE_RETRY: Duration = Duration::from_secs(10);
/// Timers do not advance while the host is suspended, so no single sleep is longer than this.
const MAX_SLEEP: Duration = Duration::from_secs(24 * 3600);
/// How often to poll a CertificateSigningRequest, and how long to wait for the signature.
const CSR_POLL_INTERVAL: Duration = Duration::from_millis(100);
const CSR_TIMEOUT: Duration = Duration::from_secs(60);
/// Poll interval after the first minute.
const CSR_SLOW_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// What a node needs to join a server.
pub struct JoinConfig {
    /// Directory of the certificates and the cached cluster configuration.
    pub cert_dir: PathBuf,
    pub server: String,
    pub token: Option<JoinToken>,
    pub name: String,
    pub address: IpAddr,
    /// The node's address of the other IP family, if one was given.
    pub second_ip: Option<IpAddr>,
}

/// A node that has joined.
pub struct JoinedNode {
    pub pinned: Arc<PinnedAuthorityVerifier>,
    pub cluster_info: ClusterInfo,
    client_pair: CertKeyPair,
    serving_pair: CertKeyPair,
}

/// A failure that a retry cannot fix.
#[derive(Debug, thiserror::Error)]
enum JoinError {
    #[error("the server rejected the token: it belongs to another cluster or was replaced")]
    InvalidToken,
    #[error(
        "the server's certificate does not match the token or the host name (use --tls-san on the server)"
    )]
    UnverifiedServer(#[source] client::Error),
    #[error("a token is required to join: see the file `token` in the server's data directory")]
    MissingToken,
    #[error("the token has no CA fingerprint: use the complete token from the server's file `token`")]
    TokenWithoutAuthority,
}

impl JoinConfig {
    /// Joins the server. Retries until the server responds, and returns only errors that a retry cannot
    /// fix.
    pub async fn join(&self) -> anyhow::Result<JoinedNode> {
        loop {
            match self.try_join().await {
                Ok(joined) => return Ok(joined),
                Err(error) if error.is::<JoinError>() => return Err(error),
                Err(error) => tracing::warn!(server = self.server, "cannot join, retrying: {error:#}"),
            }
            tokio::time::sleep(JOIN_RETRY).await;
        }
    }

    async fn try_join(&self) -> anyhow::Result<JoinedNode> {
        let now = Timestamp::now();
        let (authority, has_joined) = self.authority()?;
        let pinned = PinnedAuthorityVerifier::new(authority);
        let load_stored = |base_name: &str, leaf: &Leaf| -> anyhow::Result<Option<CertKeyPair>> {
            Ok(if has_joined { pki::load_certificate(&self.cert_dir, base_name, leaf, now)? } else { None })
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

    /// The fingerprint of the CA to trust, and whether the stored certificates belong to that cluster.
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

    /// Requests the first client certificate; the token authenticates the request.
    async fn request_client_certificate(
        &self,
        pinned: &Arc<PinnedAuthorityVerifier>,
    ) -> anyhow::Result<CertKeyPair> {
        let token = self.token.as_ref().ok_or(JoinError::MissingToken)?;
        let join_client = self.client(pinned, Some(&token.bootstrap.bearer()), None)?;
        let client = self.request_certificate(&join_client, "client", &self.client_leaf()).await?;
        let authority = pinned.authority().context("the server has sent no CA certificate")?;
        pki::write_file(&self.cert_dir.join("server-ca.crt"), authority.as_bytes(), 0o600)?;
        Ok(client)
    }

    /// Requests a certificate, waits until it is signed, and stores it.
    pub async fn request_certificate(
        &self,
        client: &Client,
        base_name: &str,
        leaf: &Leaf,
    ) -> anyhow::Result<CertKeyPair> {
        let certificate =
            CertificateRequest::create(client, leaf).await?.wait_for_certificate(client, CSR_TIMEOUT).await?;
        pki::store_certificate(&self.cert_dir, base_name, &certificate)?;
        Ok(certificate)
    }

    /// Fetches the cluster configuration. If the server is unreachable, the stored copy is used.
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

/// Subject of a node's client certificate.
pub fn client_leaf(node: &str) -> Leaf {
    Leaf {
        common_name: format!("system:node:{node}"),
        organizations: vec!["system:nodes".into()],
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: Usage::Client,
        // The signer sets the lifetime.
        lifetime: Duration::ZERO,
    }
}

/// A CertificateSigningRequest that was created, and its private key.
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
        let path = format!("{CSR_PATH}/{}", name.context("the certificate signing request has no name")?);
        Ok(CertificateRequest { path, key_pem: csr.key_pem })
    }

    /// Waits until the request is signed, at most `timeout`. An administrator may have to approve it
    /// first.
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
                    bail!(
                        "certificate signing request {name} was denied or failed: {}",
                        condition["message"]
                    );
                }
            }
            if let Some(text) = request.pointer("/status/certificate").and_then(Value::as_str) {
                let cert_pem =
                    String::from_utf8(STANDARD.decode(text).context("status.certificate is not base64")?)?;
                return Ok(CertKeyPair { cert_pem, key_pem: self.key_pem.clone() });
            }
        }
        bail!("certificate signing request {name} was not signed in time")
    }
}

/// Maps errors of the first request to a [`JoinError`] if a retry cannot fix them.
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

/// The node's certificates in use; they follow renewals.
pub struct NodeCredentials {
    pub remote: Remote,
    pub client_certificate: Arc<ClientCertificate>,
    pub serving: Arc<ServingCertificate>,
}

impl NodeCredentials {
    /// Makes later requests use new connections.
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

/// Renews certificates when they are due, and when the address of this node changes. `clock` returns
/// the current time.
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
            // Responses on connections from the previous address do not arrive any more.
            if let Err(error) = credentials.refresh_tls(&joined) {
                tracing::error!("cannot replace the TLS configuration: {error:#}");
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
                    tracing::error!("cannot renew this node's certificates, retrying: {error:#}");
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
        // TLS connections keep the client certificate of their handshake, so new connections are
        // needed.
        credentials.refresh_tls(joined)?;
        tracing::info!("client certificate renewed");
    }
    if address_changed || joined.serving_pair.renewal_time() <= now {
        joined.serving_pair =
            join_config.request_certificate(&client, "serving", &join_config.serving_leaf()).await?;
        serving.replace(&joined.serving_pair)?;
        tracing::info!("serving certificate renewed");
    }
    Ok(())
}

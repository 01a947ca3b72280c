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
use pki::join::{Fingerprint, JoinToken, Pinned};
use pki::{Issued, Leaf, Serving, Showing, Usage};
use serde_json::{Value, json};

use crate::address::Address;
use crate::facts::Facts;
use crate::welcome::FACTS;

const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
/// How long to wait before trying again to join, and to renew.
const PAUSE: Duration = Duration::from_secs(2);
const RENEWAL_PAUSE: Duration = Duration::from_secs(600);
const MOVE_PAUSE: Duration = Duration::from_secs(10);
/// A timer does not run while the machine sleeps, so that no wait is longer than this.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);
/// How often to look whether a request was signed, and for how long.
const LOOK: Duration = Duration::from_millis(100);
const SIGNED_WITHIN: Duration = Duration::from_secs(60);
/// How often once it has turned out that it takes longer.
const LATER_LOOK: Duration = Duration::from_secs(5);

/// Who wants to join what.
pub struct Joining {
    /// Where everything is kept.
    pub dir: PathBuf,
    pub server: String,
    pub token: Option<JoinToken>,
    pub name: String,
    pub address: IpAddr,
    /// Its address of the other family, if it was given one.
    pub second: Option<IpAddr>,
}

/// A node that has joined.
pub struct Joined {
    pub pinned: Arc<Pinned>,
    pub facts: Facts,
    client: Issued,
    serving: Issued,
}

/// A failure that trying again does not mend.
#[derive(Debug, thiserror::Error)]
enum Final {
    #[error("the server does not accept the token: it is another cluster's, or has been replaced")]
    Token,
    #[error(
        "the server is not the one the token is for, or does not have this name in its certificate (--tls-san)"
    )]
    Stranger(#[source] client::Error),
    #[error("a token is needed to join: the server has it in the file `token` of its data directory")]
    NoToken,
    #[error(
        "the token must say which authority to trust: take all of it from the file `token` of the server"
    )]
    Unpinned,
}

impl Joining {
    /// Joins, however long it takes the server to be there.
    pub async fn join(&self) -> anyhow::Result<Joined> {
        loop {
            match self.attempt().await {
                Ok(joined) => return Ok(joined),
                Err(error) if error.is::<Final>() => return Err(error),
                Err(error) => tracing::warn!(server = self.server, "cannot join yet: {error:#}"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn attempt(&self) -> anyhow::Result<Joined> {
        let now = Timestamp::now();
        let (authority, has_joined) = self.authority()?;
        let pinned = Pinned::new(authority);
        let kept = |stem: &str, leaf: &Leaf| -> anyhow::Result<Option<Issued>> {
            Ok(if has_joined { pki::kept(&self.dir, stem, leaf, now)? } else { None })
        };
        let client = match kept("client", &self.client_leaf())? {
            Some(client) => client,
            None => self.first_certificate(&pinned).await?,
        };
        let as_node = self.client(&pinned, None, Some(Showing::new(&client)?))?;
        let facts = self.facts(&as_node).await?;
        let serving = match kept("serving", &self.serving_leaf())? {
            Some(serving) => serving,
            None => self.certificate(&as_node, "serving", &self.serving_leaf()).await?,
        };
        Ok(Joined { pinned, facts, client, serving })
    }

    /// Whom to trust, and whether certificates that were kept are of that cluster.
    fn authority(&self) -> anyhow::Result<(Fingerprint, bool)> {
        let path = self.dir.join("server-ca.crt");
        let known = std::fs::read_to_string(path).ok().and_then(|pem| Fingerprint::of(&pem).ok());
        let told = self.token.as_ref().and_then(|token| token.authority);
        match (told, known) {
            (Some(told), known) => Ok((told, known == Some(told))),
            (None, Some(known)) => Ok((known, true)),
            (None, None) if self.token.is_some() => Err(Final::Unpinned.into()),
            (None, None) => Err(Final::NoToken.into()),
        }
    }

    fn client(
        &self,
        pinned: &Arc<Pinned>,
        token: Option<&str>,
        showing: Option<Arc<Showing>>,
    ) -> anyhow::Result<Client> {
        let remote = Remote::with_tls(&self.server, token, pinned.config(showing)?);
        Ok(Client::new(Arc::new(remote), "kubelet"))
    }

    /// The certificate that the token is exchanged for.
    async fn first_certificate(&self, pinned: &Arc<Pinned>) -> anyhow::Result<Issued> {
        let token = self.token.as_ref().ok_or(Final::NoToken)?;
        let joining = self.client(pinned, Some(&token.bootstrap.bearer()), None)?;
        let client = self.certificate(&joining, "client", &self.client_leaf()).await?;
        let authority = pinned.authority().context("the server has shown no authority")?;
        pki::write_file(&self.dir.join("server-ca.crt"), authority.as_bytes(), 0o600)?;
        Ok(client)
    }

    /// Asks for a certificate, waits until it is signed, and keeps it.
    pub async fn certificate(&self, client: &Client, stem: &str, leaf: &Leaf) -> anyhow::Result<Issued> {
        let issued = Request::make(client, leaf).await?.signed(client, SIGNED_WITHIN).await?;
        pki::keep(&self.dir, stem, &issued)?;
        Ok(issued)
    }

    /// What the server tells; what it has told before where it cannot be reached.
    async fn facts(&self, client: &Client) -> anyhow::Result<Facts> {
        let path = self.dir.join("cluster.json");
        match client.request(http::Method::GET, FACTS, None).await {
            Ok(map) => {
                let facts = Facts::read(&map["data"])?;
                pki::write_file(&path, facts.data().to_string().as_bytes(), 0o600)?;
                Ok(facts)
            }
            Err(error @ client::Error::Unreachable(_)) => match std::fs::read(&path) {
                Ok(text) => Facts::read(&serde_json::from_slice(&text)?),
                Err(_) => Err(judge(error)),
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
            ips: [Some(self.address), self.second].into_iter().flatten().collect(),
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
pub struct Request {
    path: String,
    key_pem: String,
}

impl Request {
    pub async fn make(client: &Client, leaf: &Leaf) -> anyhow::Result<Request> {
        let asked = pki::ask(leaf)?;
        let (signer, usage) = match leaf.usage {
            Usage::Client => ("kubernetes.io/kube-apiserver-client-kubelet", "client auth"),
            Usage::Server => ("kubernetes.io/kubelet-serving", "server auth"),
        };
        let request = json!({
            "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
            "metadata": {"generateName": "node-csr-"},
            "spec": {
                "signerName": signer, "usages": ["digital signature", usage],
                "request": STANDARD.encode(asked.request),
            },
        });
        let made = client.request(http::Method::POST, REQUESTS, Some(&request)).await.map_err(judge)?;
        let name = made.pointer("/metadata/name").and_then(Value::as_str);
        let path = format!("{REQUESTS}/{}", name.context("a request without a name")?);
        Ok(Request { path, key_pem: asked.key_pem })
    }

    /// Waits until it is signed, but not for ever: somebody may have to look at it first, or nobody does.
    pub async fn signed(&self, client: &Client, within: Duration) -> anyhow::Result<Issued> {
        let begun = tokio::time::Instant::now();
        let name = self.path.rsplit('/').next().unwrap_or_default();
        while begun.elapsed() < within {
            tokio::time::sleep(if begun.elapsed() < SIGNED_WITHIN { LOOK } else { LATER_LOOK }).await;
            let seen = client.request(http::Method::GET, &self.path, None).await.map_err(judge)?;
            let conditions = seen.pointer("/status/conditions").and_then(Value::as_array);
            for condition in conditions.into_iter().flatten() {
                if matches!(condition["type"].as_str(), Some("Denied" | "Failed")) {
                    bail!("the request {name} for a certificate was refused: {}", condition["message"]);
                }
            }
            if let Some(text) = seen.pointer("/status/certificate").and_then(Value::as_str) {
                let cert_pem = String::from_utf8(STANDARD.decode(text).context("no base64")?)?;
                return Ok(Issued { cert_pem, key_pem: self.key_pem.clone() });
            }
        }
        bail!("the request {name} for a certificate was not signed in time")
    }
}

/// Failures of the first words exchanged.
fn judge(error: client::Error) -> anyhow::Error {
    if error.code() == 401 {
        return Final::Token.into();
    }
    let mut source: Option<&dyn std::error::Error> = Some(&error);
    while let Some(cause) = source {
        if cause.to_string().contains("invalid peer certificate") {
            return Final::Stranger(error).into();
        }
        source = cause.source();
    }
    error.into()
}

/// The node's certificates in use.
pub struct Credentials {
    pub remote: Remote,
    pub showing: Arc<Showing>,
    pub serving: Arc<Serving>,
}

impl Credentials {
    /// Makes new connections to the server for what comes.
    fn speak_anew(&self, joined: &Joined) -> anyhow::Result<()> {
        self.remote.replace_tls(joined.pinned.config(Some(self.showing.clone()))?);
        Ok(())
    }
}

impl Joined {
    pub fn credentials(&self, server: &str) -> anyhow::Result<Credentials> {
        let showing = Showing::new(&self.client)?;
        let remote = Remote::with_tls(server, None, self.pinned.config(Some(showing.clone()))?);
        Ok(Credentials { remote, showing, serving: Serving::new(&self.serving)? })
    }
}

/// Renews certificates whenever it is time, and whenever this node is reached at another address. `clock` tells the
/// time.
pub async fn keep_renewed(
    mut joining: Joining,
    mut joined: Joined,
    credentials: Credentials,
    mut address: Address,
    clock: impl Fn() -> Timestamp,
) {
    let mut moved = false;
    loop {
        let now = clock();
        if let Some(address) = *address.borrow_and_update()
            && address != joining.address
        {
            joining.address = address;
            moved = true;
            // What was on its way to the address before does not arrive.
            if let Err(error) = credentials.speak_anew(&joined) {
                tracing::error!("cannot speak to the server anew: {error:#}");
            }
        }
        let due = joined.client.renewal_due().min(joined.serving.renewal_due());
        let mut wait = Duration::try_from(now.duration_until(due)).unwrap_or_default();
        if due <= now || moved {
            wait = match renew(&joining, &mut joined, &credentials, now, moved).await {
                Ok(()) => {
                    moved = false;
                    Duration::ZERO
                }
                Err(error) => {
                    tracing::error!("cannot renew this node's certificates: {error:#}");
                    if moved { MOVE_PAUSE } else { RENEWAL_PAUSE }
                }
            };
        }
        tokio::select! {
            () = tokio::time::sleep(wait.min(LONGEST_WAIT)) => {}
            Ok(()) = address.changed() => {}
        }
    }
}

async fn renew(
    joining: &Joining,
    joined: &mut Joined,
    credentials: &Credentials,
    now: Timestamp,
    moved: bool,
) -> anyhow::Result<()> {
    let Credentials { remote, showing, serving } = credentials;
    let client = Client::new(Arc::new(remote.clone()), "kubelet");
    if joined.client.renewal_due() <= now {
        joined.client = joining.certificate(&client, "client", &joining.client_leaf()).await?;
        showing.replace(&joined.client)?;
        // Connections go on as who they were; new ones are made.
        credentials.speak_anew(joined)?;
        tracing::info!("this node's certificate as a client was renewed");
    }
    if moved || joined.serving.renewal_due() <= now {
        joined.serving = joining.certificate(&client, "serving", &joining.serving_leaf()).await?;
        serving.replace(&joined.serving)?;
        tracing::info!("this node's certificate as a server was renewed");
    }
    Ok(())
}

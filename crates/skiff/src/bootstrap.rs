//! Who a node alone is to its API server: what its kubeconfig says, or what it gets by another one that is good for
//! nothing but to ask (`--bootstrap-kubeconfig`). Files are upstream's, so that either kubelet takes over from the other:
//! certificate and key are in one file of the certificate directory, which the kubeconfig points to, and which is
//! replaced before the certificate ends.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use client::remote::Remote;
use client::{Client, Kubeconfig};
use jiff::Timestamp;
use pki::{Issued, Leaf};
use serde_json::json;

use crate::join::Request;

/// What the kubeconfig points to: the newest of the files beside it.
const CURRENT: &str = "kubelet-client-current.pem";
/// How long somebody may take to sign a request before another one is made.
const SIGNED_WITHIN: Duration = Duration::from_secs(15 * 60);
/// How long to wait before trying again, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A timer does not run while the machine sleeps, so that no wait is longer than this.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Where a node's identity is, and how it gets one.
pub struct Identity {
    pub kubeconfig: PathBuf,
    pub bootstrap: Option<PathBuf>,
    /// Where certificates are kept.
    pub dir: PathBuf,
    /// What it is to say.
    pub leaf: Leaf,
    /// Whether it is replaced before it ends.
    pub rotates: bool,
}

impl Identity {
    /// What there is to begin with. It may be good for nothing yet, where [`Identity::keep`] is about to get more.
    pub fn known(&self) -> anyhow::Result<Kubeconfig> {
        let known = match (self.usable(), &self.bootstrap) {
            (Ok(known), _) => known,
            (Err(why), Some(path)) => {
                tracing::info!("{why:#}: asking for a certificate by {}", path.display());
                Kubeconfig { certificate: None, token: None, ..Kubeconfig::read(path)? }
            }
            (Err(why), None) => return Err(why),
        };
        Ok(known)
    }

    /// The kubeconfig, if what it shows is good. A certificate of ours is newer than the one it has.
    fn usable(&self) -> anyhow::Result<Kubeconfig> {
        let mut known = Kubeconfig::read(&self.kubeconfig)?;
        if let Some(own) = self.current().filter(|_| self.rotates) {
            known.certificate = Some((own.cert_pem.into_bytes(), own.key_pem.into_bytes()));
        }
        if let Some((certificate, _)) = &known.certificate {
            let end = pki::ends(&String::from_utf8_lossy(certificate));
            let path = self.kubeconfig.display();
            let is_good = end.is_none_or(|end| end > Timestamp::now());
            anyhow::ensure!(is_good || self.bootstrap.is_none(), "the certificate of {path} has ended");
        }
        Ok(known)
    }

    /// The certificate that was asked for here, if it is still good.
    fn current(&self) -> Option<Issued> {
        let pem = std::fs::read_to_string(self.dir.join(CURRENT)).ok()?;
        let end = pki::ends(&pem)?;
        (end > Timestamp::now()).then(|| Issued { cert_pem: pem.clone(), key_pem: pem })
    }

    /// Gets a certificate where there is none, and another one before it ends; `remote` shows it from then on.
    pub async fn keep(self, remote: Remote) {
        let (mut pause, mut was_renewed) = (FIRST_PAUSE, false);
        loop {
            let usable = self.usable().ok();
            if usable.is_some() && !self.rotates {
                return;
            }
            let shown = usable.as_ref().map(|known| &known.certificate);
            let due = match shown {
                // Tokens are not ours to renew.
                Some(None) => return,
                Some(Some((certificate, _))) => {
                    let cert_pem = String::from_utf8_lossy(certificate).into_owned();
                    Issued { cert_pem, key_pem: String::new() }.renewal_due()
                }
                None => Timestamp::MIN,
            };
            let now = Timestamp::now();
            if due > now {
                was_renewed = false;
                let left = Duration::try_from(now.duration_until(due)).unwrap_or_default();
                tokio::time::sleep(left.min(LONGEST_WAIT).max(FIRST_PAUSE)).await;
                continue;
            }
            match self.renew(usable.is_some(), &remote).await {
                // One that is due as soon as it is signed, as by a clock that is wrong, is not asked for again and again.
                Ok(()) if was_renewed => {}
                Ok(()) => {
                    (was_renewed, pause) = (true, FIRST_PAUSE);
                    continue;
                }
                Err(error) => tracing::warn!("this node has no new certificate yet: {error:#}"),
            }
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
        }
    }

    /// Asks for a certificate, as who we are if that is known.
    async fn renew(&self, is_known: bool, remote: &Remote) -> anyhow::Result<()> {
        let (asker, by) = match &self.bootstrap {
            Some(path) if !is_known => {
                let by = Kubeconfig::read(path)?;
                (Remote::new(&by).with_context(|| format!("cannot use {}", path.display()))?, by)
            }
            _ => (remote.clone(), self.usable()?),
        };
        let client = Client::new(Arc::new(asker), "kubelet");
        let issued = Request::make(&client, &self.leaf).await?.signed(&client, SIGNED_WITHIN).await?;
        self.write(&issued, Timestamp::now())?;
        if !is_known {
            let text = kubeconfig(&by, &self.dir.join(CURRENT));
            if let Some(dir) = self.kubeconfig.parent() {
                std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
            }
            pki::write_file(&self.kubeconfig, text.as_bytes(), 0o600)?;
        }
        let certificate = Some((issued.cert_pem.into_bytes(), issued.key_pem.into_bytes()));
        remote.replace_tls(Remote::tls(&Kubeconfig { certificate, ..by })?);
        tracing::info!("this node has a new certificate as a client");
        Ok(())
    }

    /// Writes a file of its own, and points to that.
    fn write(&self, issued: &Issued, now: Timestamp) -> anyhow::Result<()> {
        use std::os::unix::fs::DirBuilderExt as _;
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.with_context(|| format!("cannot make {}", self.dir.display()))?;
        let name = format!("kubelet-client-{}.pem", now.strftime("%Y-%m-%d-%H-%M-%S"));
        let pem = format!("{}{}", issued.cert_pem, issued.key_pem);
        pki::write_file(&self.dir.join(&name), pem.as_bytes(), 0o600)?;
        let (link, fresh) = (self.dir.join(CURRENT), self.dir.join(format!(".{CURRENT}.new")));
        let _ = std::fs::remove_file(&fresh);
        let linked = std::os::unix::fs::symlink(self.dir.join(name), &fresh);
        linked
            .and_then(|()| std::fs::rename(&fresh, &link))
            .with_context(|| format!("cannot write {}", link.display()))
    }
}

/// As upstream's kubelet writes it.
fn kubeconfig(by: &Kubeconfig, pem: &Path) -> String {
    use base64::Engine as _;
    let authority = base64::engine::general_purpose::STANDARD.encode(&by.ca_pem);
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "default-context",
        "clusters": [{"name": "default-cluster", "cluster": {
            "server": by.server, "certificate-authority-data": authority,
        }}],
        "users": [{"name": "default-auth", "user": {"client-certificate": pem, "client-key": pem}}],
        "contexts": [{"name": "default-context", "context": {
            "cluster": "default-cluster", "namespace": "default", "user": "default-auth",
        }}],
    });
    // All JSON is YAML.
    format!("{config:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn issued(seconds: u64, now: Timestamp) -> Issued {
        let leaf = leaf();
        pki::self_signed(&Leaf { lifetime: Duration::from_secs(seconds), ..leaf }, now)
            .expect("a certificate")
    }

    fn leaf() -> Leaf {
        Leaf {
            common_name: "system:node:here".into(),
            organizations: vec!["system:nodes".into()],
            dns_names: Vec::new(),
            ips: Vec::new(),
            usage: pki::Usage::Client,
            lifetime: Duration::ZERO,
        }
    }

    #[test]
    fn what_is_shown_to_begin_with() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        let own = |bootstrap: bool, rotates: bool| Identity {
            kubeconfig: path("config"),
            bootstrap: bootstrap.then(|| path("bootstrap")),
            dir: path("pki"),
            leaf: leaf(),
            rotates,
        };
        let second = Kubeconfig {
            server: "https://second".to_owned(),
            ca_pem: b"CA".to_vec(),
            certificate: None,
            token: None,
        };
        let first = json!({
            "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {
                "server": "https://first", "certificate-authority-data": "Q0E=",
            }}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        });
        std::fs::write(path("bootstrap"), first.to_string()).expect("written");
        assert!(own(false, true).known().is_err(), "there is nothing");
        let known = own(true, true).known().expect("whom to ask");
        assert_eq!((known.server.as_str(), known.token, known.certificate), ("https://first", None, None));
        let now = Timestamp::now();
        let old = now.checked_sub(Duration::from_secs(7200)).expect("a time");
        let pem = path("pki").join(CURRENT);
        std::fs::write(path("config"), kubeconfig(&second, &pem)).expect("written");
        own(true, true).write(&issued(3600, old), old).expect("written");
        assert_eq!(own(true, true).known().expect("whom to ask").server, "https://first", "it has ended");
        assert_eq!(own(false, true).known().expect("a kubeconfig").server, "https://second");
        own(true, true).write(&issued(3600, now), now).expect("written");
        let known = own(true, true).known().expect("a kubeconfig");
        assert!(known.server == "https://second" && known.certificate.is_some());
        let files = std::fs::read_dir(path("pki")).expect("a directory").count();
        assert_eq!(files, 3, "one file for each, and what points to the newest");
        let mode = std::fs::metadata(&pem).expect("a file").permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
    }
}

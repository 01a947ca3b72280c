//! The client certificate of a standalone kubelet: from its kubeconfig, or requested with the bootstrap
//! kubeconfig (`--bootstrap-kubeconfig`). File names and formats are those of upstream, so that either
//! kubelet can take over from the other. Certificate and key are in one file in the certificate
//! directory. The kubeconfig refers to it by a symlink, which is replaced before the certificate
//! expires.
//!
//! Upstream: `pkg/kubelet/certificate/bootstrap` and `client-go/util/certificate`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use client::remote::Remote;
use client::{Client, Kubeconfig};
use jiff::Timestamp;
use pki::{CertKeyPair, Leaf};
use serde_json::json;

use crate::join::CertificateRequest;

/// Symlink to the newest certificate file in the same directory. The kubeconfig refers to it.
const CURRENT_CERTIFICATE: &str = "kubelet-client-current.pem";
/// How long to wait for a signature before a new CertificateSigningRequest is created.
const CSR_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// Delay before a retry: the first one, and the limit.
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Timers do not advance while the host is suspended, so no single sleep is longer than this.
const MAX_SLEEP: Duration = Duration::from_secs(3600);

/// Manages the client certificate of a kubelet.
pub struct ClientCertificateManager {
    pub kubeconfig: PathBuf,
    pub bootstrap_kubeconfig: Option<PathBuf>,
    /// Directory of the certificate files.
    pub cert_dir: PathBuf,
    /// Subject of the requested certificate.
    pub leaf: Leaf,
    /// Whether the certificate is renewed before it expires.
    pub rotates: bool,
}

impl ClientCertificateManager {
    /// The kubeconfig to start with. It may have no credentials yet; [`ClientCertificateManager::run`]
    /// then requests a certificate.
    pub fn initial_kubeconfig(&self) -> anyhow::Result<Kubeconfig> {
        let config = match (self.valid_kubeconfig(), &self.bootstrap_kubeconfig) {
            (Ok(config), _) => config,
            (Err(error), Some(path)) => {
                tracing::info!("{error:#}: requesting a client certificate with {}", path.display());
                Kubeconfig { certificate: None, token: None, ..Kubeconfig::read(path)? }
            }
            (Err(error), None) => return Err(error),
        };
        Ok(config)
    }

    /// The kubeconfig, if its certificate has not expired. With rotation, the certificate in `cert_dir`
    /// is newer than the one in the kubeconfig and is used instead.
    fn valid_kubeconfig(&self) -> anyhow::Result<Kubeconfig> {
        let mut config = Kubeconfig::read(&self.kubeconfig)?;
        if let Some(current) = self.current_certificate().filter(|_| self.rotates) {
            config.certificate = Some((current.cert_pem.into_bytes(), current.key_pem.into_bytes()));
        }
        if let Some((certificate, _)) = &config.certificate {
            let end = pki::expiry(&String::from_utf8_lossy(certificate));
            let path = self.kubeconfig.display();
            let is_good = end.is_none_or(|end| end > Timestamp::now());
            anyhow::ensure!(
                is_good || self.bootstrap_kubeconfig.is_none(),
                "the certificate of {path} has expired"
            );
        }
        Ok(config)
    }

    /// The certificate that was requested here, if it has not expired.
    fn current_certificate(&self) -> Option<CertKeyPair> {
        let pem = std::fs::read_to_string(self.cert_dir.join(CURRENT_CERTIFICATE)).ok()?;
        let end = pki::expiry(&pem)?;
        (end > Timestamp::now()).then(|| CertKeyPair { cert_pem: pem.clone(), key_pem: pem })
    }

    /// Requests a certificate if there is none, and renews it before it expires. `remote` uses each new
    /// certificate.
    pub async fn run(self, remote: Remote) {
        let (mut backoff, mut was_renewed) = (INITIAL_BACKOFF, false);
        loop {
            let usable = self.valid_kubeconfig().ok();
            if usable.is_some() && !self.rotates {
                return;
            }
            let credentials = usable.as_ref().map(|config| &config.certificate);
            let renewal_time = match credentials {
                // Tokens cannot be renewed here.
                Some(None) => return,
                Some(Some((certificate, _))) => {
                    let cert_pem = String::from_utf8_lossy(certificate).into_owned();
                    CertKeyPair { cert_pem, key_pem: String::new() }.renewal_time()
                }
                None => Timestamp::MIN,
            };
            let now = Timestamp::now();
            if renewal_time > now {
                was_renewed = false;
                let remaining = Duration::try_from(now.duration_until(renewal_time)).unwrap_or_default();
                tokio::time::sleep(remaining.min(MAX_SLEEP).max(INITIAL_BACKOFF)).await;
                continue;
            }
            match self.renew(usable.is_some(), &remote).await {
                // A new certificate that is due for renewal at once (by a wrong clock, for example)
                // must not cause a loop of requests. The second renewal in a row is followed by the
                // delay.
                Ok(()) if was_renewed => {}
                Ok(()) => {
                    (was_renewed, backoff) = (true, INITIAL_BACKOFF);
                    continue;
                }
                Err(error) => tracing::warn!("requesting a client certificate failed, retrying: {error:#}"),
            }
            tokio::time::sleep(backoff).await;
            backoff = backoff.saturating_mul(2).min(MAX_BACKOFF);
        }
    }

    /// Requests a certificate: with the current client certificate if there is one, else with the
    /// bootstrap kubeconfig.
    async fn renew(&self, has_certificate: bool, remote: &Remote) -> anyhow::Result<()> {
        let (requester, source_config) = match &self.bootstrap_kubeconfig {
            Some(path) if !has_certificate => {
                let source_config = Kubeconfig::read(path)?;
                (
                    Remote::new(&source_config).with_context(|| format!("cannot use {}", path.display()))?,
                    source_config,
                )
            }
            _ => (remote.clone(), self.valid_kubeconfig()?),
        };
        let client = Client::new(Arc::new(requester), "kubelet");
        let signed = CertificateRequest::create(&client, &self.leaf)
            .await?
            .wait_for_certificate(&client, CSR_TIMEOUT)
            .await?;
        self.write(&signed, Timestamp::now())?;
        if !has_certificate {
            let text = kubeconfig(&source_config, &self.cert_dir.join(CURRENT_CERTIFICATE));
            if let Some(dir) = self.kubeconfig.parent() {
                std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
            }
            pki::write_file(&self.kubeconfig, text.as_bytes(), 0o600)?;
        }
        let certificate = Some((signed.cert_pem.into_bytes(), signed.key_pem.into_bytes()));
        remote.replace_tls(Remote::tls(&Kubeconfig { certificate, ..source_config })?);
        tracing::info!("client certificate renewed");
        Ok(())
    }

    /// Writes a new certificate file and replaces the symlink atomically by `rename`.
    fn write(&self, certificate: &CertKeyPair, now: Timestamp) -> anyhow::Result<()> {
        use std::os::unix::fs::DirBuilderExt as _;
        let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.cert_dir);
        created.with_context(|| format!("cannot create {}", self.cert_dir.display()))?;
        let name = format!("kubelet-client-{}.pem", now.strftime("%Y-%m-%d-%H-%M-%S"));
        let pem = format!("{}{}", certificate.cert_pem, certificate.key_pem);
        pki::write_file(&self.cert_dir.join(&name), pem.as_bytes(), 0o600)?;
        let (link, temporary) = (
            self.cert_dir.join(CURRENT_CERTIFICATE),
            self.cert_dir.join(format!(".{CURRENT_CERTIFICATE}.new")),
        );
        let _ = std::fs::remove_file(&temporary);
        let linked = std::os::unix::fs::symlink(self.cert_dir.join(name), &temporary);
        linked
            .and_then(|()| std::fs::rename(&temporary, &link))
            .with_context(|| format!("cannot write {}", link.display()))
    }
}

/// The kubeconfig in the form that upstream's kubelet writes.
fn kubeconfig(source_config: &Kubeconfig, pem: &Path) -> String {
    use base64::Engine as _;
    let authority = base64::engine::general_purpose::STANDARD.encode(&source_config.ca_pem);
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "default-context",
        "clusters": [{"name": "default-cluster", "cluster": {
            "server": source_config.server, "certificate-authority-data": authority,
        }}],
        "users": [{"name": "default-auth", "user": {"client-certificate": pem, "client-key": pem}}],
        "contexts": [{"name": "default-context", "context": {
            "cluster": "default-cluster", "namespace": "default", "user": "default-auth",
        }}],
    });
    // JSON is valid YAML.
    format!("{config:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn issue(seconds: u64, now: Timestamp) -> CertKeyPair {
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
    fn initial_kubeconfig_uses_valid_certificate() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        let manager = |bootstrap: bool, rotates: bool| ClientCertificateManager {
            kubeconfig: path("config"),
            bootstrap_kubeconfig: bootstrap.then(|| path("bootstrap")),
            cert_dir: path("pki"),
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
        assert!(manager(false, true).initial_kubeconfig().is_err(), "no kubeconfig exists");
        let config = manager(true, true).initial_kubeconfig().expect("whom to ask");
        assert_eq!((config.server.as_str(), config.token, config.certificate), ("https://first", None, None));
        let now = Timestamp::now();
        let old = now.checked_sub(Duration::from_secs(7200)).expect("a time");
        let pem = path("pki").join(CURRENT_CERTIFICATE);
        std::fs::write(path("config"), kubeconfig(&second, &pem)).expect("written");
        manager(true, true).write(&issue(3600, old), old).expect("written");
        assert_eq!(
            manager(true, true).initial_kubeconfig().expect("whom to ask").server,
            "https://first",
            "the certificate has expired"
        );
        assert_eq!(manager(false, true).initial_kubeconfig().expect("a kubeconfig").server, "https://second");
        manager(true, true).write(&issue(3600, now), now).expect("written");
        let config = manager(true, true).initial_kubeconfig().expect("a kubeconfig");
        assert!(config.server == "https://second" && config.certificate.is_some());
        let files = std::fs::read_dir(path("pki")).expect("a directory").count();
        assert_eq!(files, 3, "one file per certificate, and the symlink to the newest");
        let mode = std::fs::metadata(&pem).expect("a file").permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
    }
}

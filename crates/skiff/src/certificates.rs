//! The certificates of the server and of the administrator: created at the first start and renewed
//! while the server runs. Connections are not interrupted by a renewal.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use pki::{
    Authority, CertKeyPair, ClientAuthority, ClientCertificate, ClientTls, Leaf, ServingCertificate, Usage,
};
use reconcile::Signers;

use crate::address::AddressReceiver;
use crate::flags::ServerFlags;
use crate::kubeconfig;
use crate::node;
use crate::server::external_address;

const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// Timers do not advance while the host is suspended and do not follow changes of the clock, so no
/// single sleep is longer than this.
const MAX_SLEEP: Duration = Duration::from_secs(24 * 3600);
/// Delay before a failed renewal (full disk, for example) is retried.
const RENEWAL_RETRY: Duration = Duration::from_secs(3600);

/// Common name of the API server's client certificate for kubelets.
pub const KUBELET_CLIENT: &str = "system:kube-apiserver";

/// Common name of the API server's client certificate for aggregated API servers.
pub const PROXY_CLIENT: &str = "system:auth-proxy";

/// Where the administrator's kubeconfig is written, and the server URL in it.
pub struct AdminKubeconfig {
    /// The file in the data directory, which skiff's own commands use.
    pub default_path: PathBuf,
    pub output: Option<kubeconfig::KubeconfigFile>,
    pub url: String,
}

impl AdminKubeconfig {
    pub fn new(data_dir: &Path, output: Option<kubeconfig::KubeconfigFile>, url: String) -> AdminKubeconfig {
        let default_path = data_dir.join("admin.kubeconfig");
        // The default file has no other entries, so nothing needs to be merged into it.
        AdminKubeconfig { output: output.filter(|output| output.path != default_path), default_path, url }
    }
}

pub struct Certificates {
    dir: PathBuf,
    server_ca: Arc<Authority>,
    client_ca: Arc<Authority>,
    /// Signs the serving certificates of kubelets. It is separate from the server CA, so that no
    /// certificate it signs is accepted as the API server's.
    kubelet_ca: Arc<Authority>,
    request_header_ca: Authority,
    server: Leaf,
    admin: Leaf,
    kubeconfig: AdminKubeconfig,
    is_output_written: bool,
    serving: Arc<ServingCertificate>,
    kubelet: Leaf,
    kubelet_serving: Arc<ServingCertificate>,
    kubelet_client: Leaf,
    kubelet_client_tls: Arc<ClientTls>,
    proxy_client: Leaf,
    proxy_client_tls: Arc<ClientCertificate>,
    /// When the next renewal is due.
    next_renewal: Timestamp,
    /// The address of this host. Serving certificates contain it.
    address: AddressReceiver,
}

impl Certificates {
    pub fn new(
        flags: &ServerFlags,
        address: AddressReceiver,
        kubeconfig: AdminKubeconfig,
        now: Timestamp,
    ) -> Result<Certificates, pki::Error> {
        let dir = flags.node.data_dir.join("tls");
        let server_ca = Arc::new(Authority::load_or_create(&dir, "server-ca", now)?);
        let server = server_leaf(flags);
        let kubelet = kubelet_leaf(flags);
        let current_address = *address.borrow();
        let with_current_address = |leaf: &Leaf| with_address(leaf, current_address);
        let serving_pair =
            pki::load_or_issue(&dir, "serving", &server_ca, &with_current_address(&server), now)?;
        let client_ca = Arc::new(Authority::load_or_create(&dir, "client-ca", now)?);
        let kubelet_ca = Arc::new(Authority::load_or_create(&dir, "kubelet-ca", now)?);
        let kubelet_pair =
            pki::load_or_issue(&dir, "kubelet", &kubelet_ca, &with_current_address(&kubelet), now)?;
        let kubelet_client = client_leaf(KUBELET_CLIENT, &[]);
        let kubelet_client_pair =
            pki::load_or_issue(&dir, "kubelet-client", &client_ca, &kubelet_client, now)?;
        let request_header_ca = Authority::load_or_create(&dir, "request-header-ca", now)?;
        let proxy_client = client_leaf(PROXY_CLIENT, &[]);
        let proxy_client_pair =
            pki::load_or_issue(&dir, "proxy-client", &request_header_ca, &proxy_client, now)?;
        let mut certificates = Certificates {
            proxy_client,
            proxy_client_tls: ClientCertificate::new(&proxy_client_pair)?,
            kubelet,
            kubelet_serving: ServingCertificate::new(&kubelet_pair)?,
            kubelet_client,
            kubelet_client_tls: ClientTls::new(kubelet_ca.pem(), &kubelet_client_pair)?,
            kubelet_ca,
            client_ca,
            request_header_ca,
            server,
            admin: client_leaf("system:admin", &["system:masters"]),
            kubeconfig,
            is_output_written: false,
            serving: ServingCertificate::new(&with_ca_chain(&serving_pair, &server_ca))?,
            next_renewal: now,
            address,
            server_ca,
            dir,
        };
        certificates.renew(now)?;
        Ok(certificates)
    }

    /// TLS configuration of the API server; follows renewals.
    pub fn serving(&self) -> Arc<ServingCertificate> {
        self.serving.clone()
    }

    /// Serving certificate of the kubelet in this process; follows renewals.
    pub fn kubelet_serving(&self) -> Arc<ServingCertificate> {
        self.kubelet_serving.clone()
    }

    /// TLS configuration for connections to kubelets; follows renewals.
    pub fn kubelet_client_tls(&self) -> Arc<ClientTls> {
        self.kubelet_client_tls.clone()
    }

    /// Client certificate for aggregated API servers; follows renewals.
    pub fn proxy_client_tls(&self) -> Arc<ClientCertificate> {
        self.proxy_client_tls.clone()
    }

    /// The administrator's kubeconfig: the file from `--write-kubeconfig` if it was written, else the
    /// one in the data directory.
    pub fn kubeconfig(&self) -> &Path {
        let AdminKubeconfig { default_path: own, output, .. } = &self.kubeconfig;
        output.as_ref().filter(|_| self.is_output_written).map_or(own, |output| &output.path)
    }

    /// The CA that client certificates are verified with.
    pub fn client_authority(&self) -> Result<ClientAuthority, pki::Error> {
        ClientAuthority::new(self.client_ca.pem(), "the client CA")
    }

    pub fn server_ca(&self) -> &str {
        self.server_ca.pem()
    }

    /// The CA of each CertificateSigningRequest signer. Client certificates are signed by one CA,
    /// serving certificates of kubelets by another.
    pub fn signers(&self) -> Signers {
        let rows = [
            ("kubernetes.io/kube-apiserver-client", &self.client_ca),
            ("kubernetes.io/kube-apiserver-client-kubelet", &self.client_ca),
            ("kubernetes.io/kubelet-serving", &self.kubelet_ca),
            ("kubernetes.io/legacy-unknown", &self.client_ca),
        ];
        Signers(rows.map(|(name, authority)| (name.to_owned(), authority.clone())).into())
    }

    pub fn client_ca(&self) -> &str {
        self.client_ca.pem()
    }

    pub fn request_header_ca(&self) -> &str {
        self.request_header_ca.pem()
    }

    /// Renews certificates when they are due, and when the address of this host changes. `clock`
    /// returns the current time.
    pub async fn keep_renewed(mut self, clock: impl Fn() -> Timestamp) {
        let mut address = self.address.clone();
        loop {
            let now = clock();
            if self.next_renewal <= now
                && let Err(error) = self.renew(now)
            {
                tracing::error!(%error, "cannot renew certificates, retrying");
                self.next_renewal = now + RENEWAL_RETRY;
            }
            let wait = Duration::try_from(now.duration_until(self.next_renewal)).unwrap_or_default();
            tokio::select! {
                () = tokio::time::sleep(wait.min(MAX_SLEEP)) => {}
                Ok(()) = address.changed() => self.next_renewal = clock(),
            }
        }
    }

    /// Issues certificates that are missing or due for renewal, and sets `next_renewal`.
    fn renew(&mut self, now: Timestamp) -> Result<(), pki::Error> {
        let address = *self.address.borrow();
        let server = with_address(&self.server, address);
        let server = pki::load_or_issue(&self.dir, "serving", &self.server_ca, &server, now)?;
        self.serving.replace(&with_ca_chain(&server, &self.server_ca))?;
        let admin = pki::load_or_issue(&self.dir, "admin", &self.client_ca, &self.admin, now)?;
        self.write_kubeconfig(&admin)?;
        let kubelet = with_address(&self.kubelet, address);
        let kubelet = pki::load_or_issue(&self.dir, "kubelet", &self.kubelet_ca, &kubelet, now)?;
        self.kubelet_serving.replace(&kubelet)?;
        let client =
            pki::load_or_issue(&self.dir, "kubelet-client", &self.client_ca, &self.kubelet_client, now)?;
        self.kubelet_client_tls.replace(&client)?;
        let proxy =
            pki::load_or_issue(&self.dir, "proxy-client", &self.request_header_ca, &self.proxy_client, now)?;
        self.proxy_client_tls.replace(&proxy)?;
        let next_renewal = [&server, &admin, &kubelet, &client, &proxy]
            .into_iter()
            .map(|certificate| certificate.renewal_time())
            .min();
        self.next_renewal = next_renewal.unwrap_or(now);
        tracing::debug!(due = %self.next_renewal, "certificates are valid");
        Ok(())
    }

    fn write_kubeconfig(&mut self, admin: &CertKeyPair) -> Result<(), pki::Error> {
        let AdminKubeconfig { default_path: own, output, url } = &self.kubeconfig;
        let text = pki::kubeconfig(url, self.server_ca.pem(), admin, kubeconfig::ENTRY_NAME);
        pki::write_file(own, text.as_bytes(), 0o600)?;
        // A failure is not fatal: the cluster works without this file.
        let Some(output) = output else { return Ok(()) };
        let written = output.write(&text);
        self.is_output_written = written.is_ok();
        if let Err(error) = written {
            let (output_path, fallback_path) = (output.path.display(), own.display());
            tracing::warn!(
                error = format!("{error:#}"),
                "cannot write the kubeconfig {output_path}; {fallback_path} has the same content"
            );
        }
        Ok(())
    }
}

/// The certificate chain with the CA. Joining nodes pin the CA by its fingerprint and need to receive
/// it in the handshake.
fn with_ca_chain(certificate: &CertKeyPair, authority: &Authority) -> CertKeyPair {
    CertKeyPair {
        cert_pem: format!("{}{}", certificate.cert_pem, authority.pem()),
        key_pem: certificate.key_pem.clone(),
    }
}

/// Adds an address to the certificate's subject alternative names.
fn with_address(leaf: &Leaf, address: Option<IpAddr>) -> Leaf {
    let mut leaf = leaf.clone();
    leaf.ips.extend(address.filter(|address| !leaf.ips.contains(address)));
    leaf
}

fn server_leaf(flags: &ServerFlags) -> Leaf {
    let mut dns_names: Vec<String> =
        ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
            .map(str::to_owned)
            .to_vec();
    dns_names.push(format!("kubernetes.default.svc.{}", flags.cluster_domain));
    let mut ips = vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    ips.extend(
        external_address(flags.bind_address).or(Some(flags.bind_address)).filter(|ip| !ip.is_unspecified()),
    );
    ips.extend(flags.service_cidr.iter().filter_map(|cidr| apiserver::service_ip(cidr)));
    for name in &flags.tls_san {
        match name.parse() {
            Ok(ip) => ips.push(ip),
            Err(_) => dns_names.push(name.clone()),
        }
    }
    Leaf {
        common_name: "skiff-apiserver".into(),
        organizations: Vec::new(),
        dns_names,
        ips,
        usage: Usage::Server,
        lifetime: CERTIFICATE_LIFETIME,
    }
}

/// The serving certificate of the kubelet in this process.
fn kubelet_leaf(flags: &ServerFlags) -> Leaf {
    let name = node::name(&flags.node);
    let mut ips = vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    ips.extend(&flags.node.node_ip);
    Leaf {
        common_name: format!("system:node:{name}"),
        organizations: vec!["system:nodes".into()],
        dns_names: vec![name, "localhost".into()],
        ips,
        usage: Usage::Server,
        lifetime: CERTIFICATE_LIFETIME,
    }
}

fn client_leaf(name: &str, groups: &[&str]) -> Leaf {
    Leaf {
        common_name: name.into(),
        organizations: groups.iter().map(ToString::to_string).collect(),
        dns_names: Vec::new(),
        ips: Vec::new(),
        usage: Usage::Client,
        lifetime: CERTIFICATE_LIFETIME,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::flags::{Command, Flags};

    const START: &str = "2026-11-15T12:00:00Z";
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn certificates(dir: &std::path::Path) -> Certificates {
        certificates_at(dir, crate::address::fixed(None))
    }

    fn certificates_at(dir: &std::path::Path, address: AddressReceiver) -> Certificates {
        let flags = Flags::parse_from(["skiff", "server", "--data-dir", dir.to_str().unwrap()]);
        let Command::Server(flags) = flags.command else { panic!("no server") };
        let kubeconfig = AdminKubeconfig::new(dir, None, "https://127.0.0.1:6443".into());
        Certificates::new(&flags, address, kubeconfig, START.parse().unwrap()).unwrap()
    }

    /// Days until the serving certificate and the administrator's client certificate expire.
    fn days_left(serving: &ServingCertificate, kubeconfig: &std::path::Path, now: Timestamp) -> (i64, i64) {
        let text = std::fs::read_to_string(kubeconfig).unwrap();
        let admin = testkit::kubeconfig::parse(&text).unwrap().cert_pem;
        let days = |end: Timestamp| now.duration_until(end).as_hours() / 24;
        let end = |der: &[u8]| days(pki::identity_of(der).unwrap().not_after);
        (end(&serving.certificate()), days(pki::expiry(&String::from_utf8(admin).unwrap()).unwrap()))
    }

    #[tokio::test(start_paused = true)]
    async fn certificates_stay_valid_for_two_years() {
        let dir = tempfile::tempdir().unwrap();
        let certificates = certificates(dir.path());
        let (serving, kubeconfig) = (certificates.serving(), dir.path().join("admin.kubeconfig"));
        let first = serving.certificate();
        let started = tokio::time::Instant::now();
        let clock = move || START.parse::<Timestamp>().unwrap() + started.elapsed();
        let renewal = tokio::spawn(certificates.keep_renewed(clock));
        let mut seen = Vec::new();
        for _ in 0..2 * 365 {
            tokio::time::sleep(DAY).await;
            let (server, admin) = days_left(&serving, &kubeconfig, clock());
            assert!(server >= 89 && admin >= 89, "{}: {server} and {admin} days left", clock());
            let now = serving.certificate();
            if seen.last() != Some(&now) {
                seen.push(now);
            }
        }
        assert_eq!(seen[0], first, "not renewed before it is due");
        assert_eq!(seen.len(), 3, "renewed after nine months each");
        renewal.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn keeps_old_certificate_and_retries_when_renewal_fails() {
        let dir = tempfile::tempdir().unwrap();
        let certificates = certificates(dir.path());
        let serving = certificates.serving();
        let first = serving.certificate();
        let started = tokio::time::Instant::now();
        let clock = move || START.parse::<Timestamp>().unwrap() + started.elapsed();
        let renewal = tokio::spawn(certificates.keep_renewed(clock));
        // Replacing a directory by a file fails, which simulates a write error.
        let key = dir.path().join("tls/serving.key");
        std::fs::remove_file(&key).unwrap();
        std::fs::create_dir_all(key.join("x")).unwrap();
        tokio::time::sleep(280 * DAY).await;
        assert_eq!(serving.certificate(), first);
        std::fs::remove_dir_all(&key).unwrap();
        tokio::time::sleep(DAY).await;
        assert_ne!(serving.certificate(), first);
        renewal.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn certificates_follow_address_changes() {
        let dir = tempfile::tempdir().unwrap();
        let (address_sender, address) = tokio::sync::watch::channel(Some("192.0.2.1".parse().unwrap()));
        let certificates = certificates_at(dir.path(), address);
        let (serving, kubelet) = (certificates.serving(), certificates.kubelet_serving());
        let before = (serving.certificate(), kubelet.certificate());
        let renewal = tokio::spawn(certificates.keep_renewed(|| START.parse().unwrap()));
        tokio::time::sleep(DAY).await;
        assert_eq!((serving.certificate(), kubelet.certificate()), before);
        address_sender.send_replace(Some("192.0.2.2".parse().unwrap()));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let names = |der: &[u8], octets: [u8; 4]| der.windows(4).any(|window| window == octets);
        for der in [serving.certificate(), kubelet.certificate()] {
            assert!(names(&der, [192, 0, 2, 2]) && !names(&der, [192, 0, 2, 1]));
        }
        renewal.abort();
    }
}

//! Parses the kubeconfig that skiff writes: one cluster, one user, all data inline.

use anyhow::{Context as _, Result};
use base64::Engine as _;

pub struct Kubeconfig {
    /// `host:port`.
    pub address: String,
    pub ca_pem: Vec<u8>,
    pub cert_pem: Vec<u8>,
    pub key_pem: Vec<u8>,
}

pub fn parse(text: &str) -> Result<Kubeconfig> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(": "));
        line.map(|value| value.trim_matches(['\'', '"']))
            .with_context(|| format!("the kubeconfig has no {name}"))
    };
    let data = |name: &str| {
        base64::engine::general_purpose::STANDARD
            .decode(field(name)?)
            .with_context(|| format!("the kubeconfig's {name} is not base64"))
    };
    let server = field("server")?;
    let address = server.strip_prefix("https://").with_context(|| format!("{server} is not https"))?;
    Ok(Kubeconfig {
        address: address.trim_end_matches('/').to_owned(),
        ca_pem: data("certificate-authority-data")?,
        cert_pem: data("client-certificate-data")?,
        key_pem: data("client-key-data")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_server_writes() {
        let client = pki::CertKeyPair { cert_pem: "CERT".to_owned(), key_pem: "KEY".to_owned() };
        let read = parse(&pki::kubeconfig("https://127.0.0.1:6443", "CA", &client, "default")).unwrap();
        assert_eq!(read.address, "127.0.0.1:6443");
        assert_eq!((read.ca_pem, read.cert_pem, read.key_pem), (b"CA".into(), b"CERT".into(), b"KEY".into()));
        let error = parse("").err().unwrap();
        assert_eq!(error.to_string(), "the kubeconfig has no server");
    }
}

//! Writes kubeconfig files with embedded client credentials.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::CertKeyPair;

/// A kubeconfig with one cluster, one user and one context, all called `name`. It contains a private
/// key: write it with mode 0600.
pub fn kubeconfig(server_url: &str, ca_pem: &str, client: &CertKeyPair, name: &str) -> String {
    let (server, name) = (scalar(server_url), scalar(name));
    let ca = STANDARD.encode(ca_pem);
    let cert = STANDARD.encode(&client.cert_pem);
    let key = STANDARD.encode(&client.key_pem);
    format!(
        "apiVersion: v1
kind: Config
clusters:
- name: {name}
  cluster:
    certificate-authority-data: {ca}
    server: {server}
users:
- name: {name}
  user:
    client-certificate-data: {cert}
    client-key-data: {key}
contexts:
- name: {name}
  context:
    cluster: {name}
    user: {name}
current-context: {name}
preferences: {{}}
"
    )
}

/// Quotes a YAML string, so that a name such as `no` or `1` stays a string.
fn scalar(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_everything_a_client_needs() {
        let client = CertKeyPair { cert_pem: "CERT".to_owned(), key_pem: "KEY".to_owned() };
        expect_test::expect![[r#"
            apiVersion: v1
            kind: Config
            clusters:
            - name: 'it''s'
              cluster:
                certificate-authority-data: Q0E=
                server: 'https://127.0.0.1:6443'
            users:
            - name: 'it''s'
              user:
                client-certificate-data: Q0VSVA==
                client-key-data: S0VZ
            contexts:
            - name: 'it''s'
              context:
                cluster: 'it''s'
                user: 'it''s'
            current-context: 'it''s'
            preferences: {}
        "#]]
        .assert_eq(&kubeconfig("https://127.0.0.1:6443", "CA", &client, "it's"));
    }
}

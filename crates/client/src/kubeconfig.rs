//! Reads the current context of a kubeconfig: server, CA and credentials.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use serde::Deserialize;

/// The current context of a kubeconfig, with the contents of referenced files.
pub struct Kubeconfig {
    pub server: String,
    /// The CA bundle in PEM.
    pub ca_pem: Vec<u8>,
    /// The client certificate and its key in PEM.
    pub certificate: Option<(Vec<u8>, Vec<u8>)>,
    pub token: Option<String>,
}

/// The reason why a kubeconfig is invalid.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot parse kubeconfig {path}")]
    Parse { path: PathBuf, source: schema::yaml::Error },
    #[error("{path} has no {what}")]
    Missing { path: PathBuf, what: String },
    #[error("the {what} in {path} is not base64")]
    Base64 { path: PathBuf, what: &'static str },
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    current_context: String,
    #[serde(default)]
    contexts: Vec<Context>,
    #[serde(default)]
    clusters: Vec<Cluster>,
    #[serde(default)]
    users: Vec<User>,
}

#[derive(Deserialize)]
struct Context {
    name: String,
    context: Pair,
}

#[derive(Deserialize)]
struct Pair {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct Cluster {
    name: String,
    cluster: ClusterEntry,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ClusterEntry {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
}

#[derive(Deserialize)]
struct User {
    name: String,
    user: UserEntry,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct UserEntry {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
}

impl Kubeconfig {
    pub fn read(path: &Path) -> Result<Kubeconfig, KubeconfigError> {
        let missing = |what: String| KubeconfigError::Missing { path: path.to_owned(), what };
        let text = read(path)?;
        let file: File = schema::yaml::from_str(&String::from_utf8_lossy(&text))
            .map_err(|source| KubeconfigError::Parse { path: path.to_owned(), source })?;
        let context = file.contexts.into_iter().find(|context| context.name == file.current_context);
        let Pair { cluster, user } = context.ok_or_else(|| missing("current context".into()))?.context;
        let found = file.clusters.into_iter().find(|entry| entry.name == cluster);
        let entry = found.ok_or_else(|| missing(format!("cluster {cluster:?}")))?.cluster;
        let found = file.users.into_iter().find(|entry| entry.name == user);
        let user = found.ok_or_else(|| missing(format!("user {user:?}")))?.user;
        let pem = |what: &'static str, data: Option<String>, file: Option<PathBuf>| match (data, file) {
            (Some(data), _) => match base64::engine::general_purpose::STANDARD.decode(data.trim()) {
                Ok(pem) => Ok(Some(pem)),
                Err(_) => Err(KubeconfigError::Base64 { path: path.to_owned(), what }),
            },
            // Relative paths are relative to the kubeconfig.
            (None, Some(file)) => read(&path.parent().unwrap_or(Path::new("")).join(file)).map(Some),
            (None, None) => Ok(None),
        };
        let ca =
            pem("certificate-authority-data", entry.certificate_authority_data, entry.certificate_authority)?;
        let cert = pem("client-certificate-data", user.client_certificate_data, user.client_certificate)?;
        let key = pem("client-key-data", user.client_key_data, user.client_key)?;
        let token = match (user.token, user.token_file) {
            (Some(token), _) => Some(token),
            (None, Some(file)) => Some(String::from_utf8_lossy(&read(&file)?).trim().to_owned()),
            (None, None) => None,
        };
        Ok(Kubeconfig {
            server: entry.server.trim_end_matches('/').to_owned(),
            ca_pem: ca.ok_or_else(|| missing("certificate-authority".into()))?,
            certificate: cert.zip(key),
            token,
        })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, KubeconfigError> {
    std::fs::read(path).map_err(|source| KubeconfigError::Read { path: path.to_owned(), source })
}

//! Webhooks are named by a kubeconfig: its current context's cluster and user.

use std::path::{Path, PathBuf};

use api::json::Json as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::{Client, ConfigError, Credentials};

impl Client {
    pub fn from_kubeconfig(path: &Path) -> Result<Client, ConfigError> {
        let text = read(path)?;
        let bad = |why| ConfigError::Kubeconfig { path: path.to_owned(), why };
        let file: Value = serde_saphyr::from_str(&text).map_err(|_| bad("it is not YAML"))?;
        let context = named(&file, "contexts", "context", file.text("current-context"));
        let context = context.ok_or_else(|| bad("it has no current context"))?;
        let cluster = named(&file, "clusters", "cluster", context.text("cluster"));
        let cluster = cluster.ok_or_else(|| bad("its current context has no cluster"))?;
        let user = named(&file, "users", "user", context.text("user")).unwrap_or(&Value::Null);
        if cluster.at("insecure-skip-tls-verify") == &Value::Bool(true) {
            return Err(bad("insecure-skip-tls-verify is not for servers that are trusted with decisions"));
        }
        if user.has("exec") || user.has("auth-provider") {
            return Err(bad("its user needs a program to log in, which is not run here"));
        }
        let part = |from: &Value, name: &'static str| content(path, from, name);
        let certificate = match (part(user, "client-certificate")?, part(user, "client-key")?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(bad("a client certificate and its key need each other")),
        };
        let token = match (user.text("token"), user.text("tokenFile")) {
            ("", "") => None,
            ("", file) => Some(read(&beside(path, file))?.trim().to_owned()),
            (token, _) => Some(token.to_owned()),
        };
        let basic = || {
            let (name, password) = (user.text("username"), user.text("password"));
            (!name.is_empty()).then(|| format!("Basic {}", STANDARD.encode(format!("{name}:{password}"))))
        };
        let server_name = cluster.text("tls-server-name");
        let credentials = Credentials {
            authorities: part(cluster, "certificate-authority")?,
            certificate,
            authorization: token.map(|token| format!("Bearer {token}")).or_else(basic),
            server_name: (!server_name.is_empty()).then(|| server_name.to_owned()),
        };
        Client::new(cluster.text("server"), credentials)
    }
}

fn named<'a>(file: &'a Value, list: &str, kind: &str, name: &str) -> Option<&'a Value> {
    let entry = file.items(list).iter().find(|entry| entry.text("name") == name)?;
    Some(entry.at(kind)).filter(|value| value.is_object())
}

/// What `<name>-data` holds in base64, or the file that `<name>` names.
fn content(path: &Path, from: &Value, name: &'static str) -> Result<Option<String>, ConfigError> {
    let bad = |why| ConfigError::Kubeconfig { path: path.to_owned(), why };
    match (from.text(&format!("{name}-data")), from.text(name)) {
        ("", "") => Ok(None),
        ("", file) => read(&beside(path, file)).map(Some),
        (data, _) => {
            let bytes = STANDARD.decode(data).map_err(|_| bad("some of its data is not base64"))?;
            String::from_utf8(bytes).map(Some).map_err(|_| bad("some of its data is not PEM"))
        }
    }
}

/// Relative paths start where the kubeconfig is.
fn beside(kubeconfig: &Path, file: &str) -> PathBuf {
    kubeconfig.parent().unwrap_or(Path::new("")).join(file)
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })
}

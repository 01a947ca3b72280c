//! Clients configured by a kubeconfig: the current context's cluster and user.

use std::path::{Path, PathBuf};

use api::json::JsonExt as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::{ConfigError, Credentials, HttpsClient};

impl HttpsClient {
    pub fn from_kubeconfig(path: &Path) -> Result<HttpsClient, ConfigError> {
        let text = read(path)?;
        let bad = |reason| ConfigError::Kubeconfig { path: path.to_owned(), reason };
        let file: Value = schema::yaml::parse(&text).map_err(|_| bad("not valid YAML"))?;
        let context = named(&file, "contexts", "context", file.text("current-context"));
        let context = context.ok_or_else(|| bad("no current context"))?;
        let cluster = named(&file, "clusters", "cluster", context.text("cluster"));
        let cluster = cluster.ok_or_else(|| bad("the current context has no cluster"))?;
        let user = named(&file, "users", "user", context.text("user")).unwrap_or(&Value::Null);
        if cluster.at("insecure-skip-tls-verify") == &Value::Bool(true) {
            return Err(bad("insecure-skip-tls-verify is not supported"));
        }
        let server_name = cluster.text("tls-server-name");
        let credentials = Credentials {
            authorities: data_or_file(path, cluster, "certificate-authority")?,
            server_name: (!server_name.is_empty()).then(|| server_name.to_owned()),
            ..user_credentials(path, user)?
        };
        HttpsClient::new(cluster.text("server"), credentials)
    }
}

/// Credentials for the webhooks of API objects: a kubeconfig whose users are named after servers.
/// Upstream: `NewDefaultAuthenticationInfoResolver`.
#[derive(Clone, PartialEq, Eq)]
pub struct AuthInfoResolver {
    path: PathBuf,
    file: Value,
}

/// Prints the path only: the content has secrets.
impl std::fmt::Debug for AuthInfoResolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Users").field(&self.path).finish()
    }
}

impl AuthInfoResolver {
    pub fn load(path: &Path) -> Result<AuthInfoResolver, ConfigError> {
        let bad = |reason| ConfigError::Kubeconfig { path: path.to_owned(), reason };
        let file: Value = serde_saphyr::from_str(&read(path)?).map_err(|_| bad("not valid YAML"))?;
        Ok(AuthInfoResolver { path: path.to_owned(), file })
    }

    /// The credentials for a server, `host:port`: the user of that name, of its domain
    /// (`*.domain`), of `*`, or of the current context. They contain no CAs: the webhook's object
    /// names those.
    pub fn credentials(&self, server: &str) -> Result<Credentials, ConfigError> {
        let without_port = server.strip_suffix(":443");
        let candidates = [Some(server), without_port].into_iter().flatten().flat_map(|server| {
            let domains = server.match_indices('.').map(|(at, _)| format!("*{}", &server[at..]));
            std::iter::once(server.to_owned()).chain(domains)
        });
        let user = |name: String| named(&self.file, "users", "user", &name);
        let current = || {
            let context = named(&self.file, "contexts", "context", self.file.text("current-context"))?;
            user(context.text("user").to_owned())
        };
        match candidates.chain(["*".to_owned()]).find_map(user).or_else(current) {
            Some(user) => user_credentials(&self.path, user),
            None => Ok(Credentials::default()),
        }
    }
}

/// The credentials of a kubeconfig user.
fn user_credentials(path: &Path, user: &Value) -> Result<Credentials, ConfigError> {
    let bad = |reason| ConfigError::Kubeconfig { path: path.to_owned(), reason };
    if user.has("exec") || user.has("auth-provider") {
        return Err(bad("exec and auth-provider users are not supported"));
    }
    let credential_data = |name: &'static str| data_or_file(path, user, name);
    let certificate = match (credential_data("client-certificate")?, credential_data("client-key")?) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(bad("a client certificate requires a client key and vice versa")),
    };
    let token = match (user.text("token"), user.text("tokenFile")) {
        ("", "") => None,
        ("", file) => Some(read(&resolve_relative(path, file))?.trim().to_owned()),
        (token, _) => Some(token.to_owned()),
    };
    let basic = || {
        let (name, password) = (user.text("username"), user.text("password"));
        (!name.is_empty()).then(|| format!("Basic {}", STANDARD.encode(format!("{name}:{password}"))))
    };
    let authorization = token.map(|token| format!("Bearer {token}")).or_else(basic);
    Ok(Credentials { certificate, authorization, ..Credentials::default() })
}

fn named<'a>(file: &'a Value, list: &str, kind: &str, name: &str) -> Option<&'a Value> {
    let entry = file.items(list).iter().find(|entry| entry.text("name") == name)?;
    Some(entry.at(kind)).filter(|value| value.is_object())
}

/// The decoded value of `<name>-data`, or the content of the file in `<name>`.
fn data_or_file(path: &Path, from: &Value, name: &'static str) -> Result<Option<String>, ConfigError> {
    let bad = |reason| ConfigError::Kubeconfig { path: path.to_owned(), reason };
    match (from.text(&format!("{name}-data")), from.text(name)) {
        ("", "") => Ok(None),
        ("", file) => read(&resolve_relative(path, file)).map(Some),
        (data, _) => {
            let bytes = STANDARD.decode(data).map_err(|_| bad("a -data field is not base64"))?;
            String::from_utf8(bytes).map(Some).map_err(|_| bad("a -data field is not UTF-8"))
        }
    }
}

/// Relative paths are relative to the kubeconfig.
fn resolve_relative(kubeconfig: &Path, file: &str) -> PathBuf {
    kubeconfig.parent().unwrap_or(Path::new("")).join(file)
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(server: &str, expected: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("users.yaml");
        let names = ["hook.ns.svc:8443", "a.ns.svc", "*.other.svc", "*.example.com:99", "mine"];
        let users = names.map(|name| format!("- name: '{name}'\n  user: {{token: 'of {name}'}}\n")).concat();
        let text =
            format!("users:\n{users}contexts: [{{name: c, context: {{user: mine}}}}]\ncurrent-context: c\n");
        std::fs::write(&path, text).unwrap();
        let found = AuthInfoResolver::load(&path).unwrap().credentials(server).unwrap();
        assert_eq!(found.authorization.unwrap(), format!("Bearer of {expected}"), "{server}");
    }

    #[test]
    fn resolves_credentials_by_server_name() {
        check("hook.ns.svc:8443", "hook.ns.svc:8443");
        check("hook.ns.svc:443", "mine");
        check("a.ns.svc:443", "a.ns.svc");
        check("a.ns.svc:8443", "mine");
        check("b.other.svc:443", "*.other.svc");
        check("x.y.other.svc:443", "*.other.svc");
        check("www.example.com:99", "*.example.com:99");
    }
}

//! Mirrors, TLS and credentials of registries, in the format of `registries.yaml` of k3s.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde::Deserialize;

use super::Credentials;

/// The entry for all registries without an entry of their own.
const ANY_REGISTRY: &str = "*";
const DOCKER_HUB: &str = "docker.io";
/// The API host of Docker Hub.
const DOCKER_HUB_HOST: &str = "registry-1.docker.io";

/// The content of `registries.yaml`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RegistrySettings {
    // Entries with a null value are valid and have no effect.
    mirrors: Option<BTreeMap<String, Option<Mirror>>>,
    configs: Option<BTreeMap<String, Option<RegistryConfig>>>,
    /// Do not contact a registry that has mirrors. Set by the caller, not by the file.
    #[serde(skip)]
    mirrors_only: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Mirror {
    /// Mirror URLs, tried in order before the registry itself.
    endpoint: Option<Vec<String>>,
    /// Rewrites repository names for the mirrors: regular expression to replacement.
    rewrite: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct RegistryConfig {
    auth: Option<Auth>,
    tls: Option<Tls>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Auth {
    username: String,
    password: String,
    /// `user:password` in base64, as in docker's configuration.
    auth: String,
    identity_token: String,
    token: String,
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Auth(…)")
    }
}

/// The TLS settings of a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Tls {
    /// A CA bundle or server certificate that is trusted in addition to the system CAs.
    pub ca_file: Option<PathBuf>,
    /// The client certificate and its key.
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// Do not verify the server certificate.
    pub insecure_skip_verify: bool,
}

/// The API endpoint of a repository on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryHost {
    pub scheme: &'static str,
    /// The host with an optional port.
    pub host: String,
    /// The path before the repository, usually `/v2`.
    pub path: String,
    pub repository: String,
    pub tls: Tls,
}

impl RegistrySettings {
    /// Reads the file. A missing file is an empty configuration.
    pub fn read(path: &Path) -> Result<RegistrySettings, String> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(RegistrySettings::default());
            }
            Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
        };
        if text.trim().is_empty() {
            return Ok(RegistrySettings::default());
        }
        let bad = |reason: String| format!("cannot parse {}: {reason}", path.display());
        let settings: RegistrySettings =
            schema::yaml::from_str(&text).map_err(|error| bad(error.to_string()))?;
        let mirrors = settings.mirrors.iter().flat_map(BTreeMap::values).flatten();
        let mut patterns = mirrors.flat_map(|mirror| mirror.rewrite.iter().flatten());
        match patterns.find_map(|(pattern, _)| Some((pattern, Regex::new(pattern).err()?))) {
            Some((pattern, error)) => Err(bad(format!("invalid rewrite pattern {pattern:?}: {error}"))),
            None => Ok(settings),
        }
    }

    /// Sets whether registries that have mirrors are not contacted themselves.
    pub fn mirrors_only(self, mirrors_only: bool) -> RegistrySettings {
        RegistrySettings { mirrors_only, ..self }
    }

    /// The hosts to try for a repository, in order: the mirrors, then the registry itself.
    pub fn registry_hosts(&self, registry: &str, repository: &str) -> Vec<RegistryHost> {
        let mirror = [registry, ANY_REGISTRY].into_iter().find_map(|name| {
            let mirror = self.mirrors.as_ref()?.get(name)?.as_ref();
            mirror.filter(|mirror| mirror.endpoint.iter().flatten().next().is_some())
        });
        let endpoints = mirror.iter().flat_map(|mirror| mirror.endpoint.iter().flatten());
        let mut registry_hosts: Vec<RegistryHost> = endpoints
            .map(|url| {
                let (scheme, rest) = match url.split_once("://") {
                    Some((scheme, rest)) => (Some(scheme), rest),
                    None => (None, url.as_str()),
                };
                let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
                let named =
                    mirror.map_or(repository.to_owned(), |mirror| mirror.rewrite_repository(repository));
                self.registry_host(scheme, host, path, named)
            })
            .collect();
        // A registry without mirrors is always contacted. Duplicates are removed.
        if registry_hosts.is_empty() || !self.mirrors_only {
            registry_hosts.push(self.registry_host(None, registry, "", repository.to_owned()));
        }
        let mut seen: Vec<RegistryHost> = Vec::new();
        registry_hosts.into_iter().for_each(|registry_host| {
            if !seen.contains(&registry_host) {
                seen.push(registry_host)
            }
        });
        seen
    }

    fn registry_host(
        &self,
        scheme: Option<&str>,
        host: &str,
        path: &str,
        repository: String,
    ) -> RegistryHost {
        let config = self.config(host);
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let is_local = ["localhost", "127.0.0.1", "[::1]"].contains(&name) && !host.ends_with(":443");
        // Plain HTTP is the default for registries on this host, unless TLS is configured for them.
        let has_tls = config.is_some_and(|config| config.tls.is_some());
        let scheme = match scheme {
            Some("http") => "http",
            None if is_local && !has_tls => "http",
            _ => "https",
        };
        // A configured path replaces the default `/v2`.
        let path = match path.trim_matches('/') {
            "" => "/v2".to_owned(),
            path => format!("/{path}"),
        };
        let host = if host == DOCKER_HUB { DOCKER_HUB_HOST } else { host };
        let tls = config.and_then(|config| config.tls.clone()).unwrap_or_default();
        RegistryHost { scheme, host: host.to_owned(), path, repository, tls }
    }

    /// The configuration of a host. `docker.io` and its API host are equivalent.
    fn config(&self, host: &str) -> Option<&RegistryConfig> {
        let other = match host {
            DOCKER_HUB => DOCKER_HUB_HOST,
            DOCKER_HUB_HOST => DOCKER_HUB,
            host => host,
        };
        [other, host, ANY_REGISTRY].into_iter().find_map(|name| self.configs.as_ref()?.get(name)?.as_ref())
    }

    /// The credentials for a host.
    pub fn credentials(&self, host: &str) -> Option<Credentials> {
        let auth = self.config(host)?.auth.clone()?;
        if auth.username.is_empty() && !auth.auth.is_empty() {
            return Credentials::from_auth(&auth.auth);
        }
        let Auth { username, password, identity_token, token, .. } = auth;
        Some(Credentials { username, password, token, identity_token })
    }
}

impl RegistryHost {
    /// Whether this host is not the registry itself.
    pub fn is_mirror_of(&self, registry: &str) -> bool {
        self.host != registry && (self.host.as_str(), registry) != (DOCKER_HUB_HOST, DOCKER_HUB)
    }
}

impl Mirror {
    /// The repository name on the mirror: the result of the first expression that changes it.
    fn rewrite_repository(&self, repository: &str) -> String {
        let new_name = self.rewrite.iter().flatten().find_map(|(pattern, with)| {
            let name = Regex::new(pattern).ok()?.replace_all(repository, with.as_str()).into_owned();
            (name != repository).then_some(name)
        });
        new_name.unwrap_or_else(|| repository.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
mirrors:
  docker.io:
    endpoint: ["http://mirror:5000", "https://other/v2", "harbor:8443/v2/proxy", "https://docker.io"]
    rewrite:
      "^rancher/(.*)": "mirrorproject/rancher-images/$1"
      "^library/": ""
  quiet.example:
  "*":
    endpoint: ["127.0.0.1:5001", "localhost:443"]
configs:
  mirror:5000: {auth: {username: me, password: secret}}
  safe:443: {tls: {ca_file: /ca, cert_file: /cert, key_file: /key, insecure_skip_verify: true}}
  docker.io: {auth: {auth: bWU6c2VjcmV0}}
  token: {auth: {identity_token: secret}}
  "*": {tls: {ca_file: /all}}
"#;

    #[track_caller]
    fn check(registry: &str, repository: &str, expected: &[&str]) {
        let settings: RegistrySettings = schema::yaml::from_str(TEXT).unwrap();
        let registry_hosts = settings.registry_hosts(registry, repository);
        let url = |registry_host: &RegistryHost| {
            format!(
                "{}://{}{}/{}",
                registry_host.scheme, registry_host.host, registry_host.path, registry_host.repository
            )
        };
        assert_eq!(registry_hosts.iter().map(url).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn reads_the_k3s_file_format() {
        check(
            "docker.io",
            "rancher/coredns",
            &[
                "http://mirror:5000/v2/mirrorproject/rancher-images/coredns",
                "https://other/v2/mirrorproject/rancher-images/coredns",
                "https://harbor:8443/v2/proxy/mirrorproject/rancher-images/coredns",
                "https://registry-1.docker.io/v2/mirrorproject/rancher-images/coredns",
                "https://registry-1.docker.io/v2/rancher/coredns",
            ],
        );
        check(
            "docker.io",
            "library/busybox",
            &[
                "http://mirror:5000/v2/busybox",
                "https://other/v2/busybox",
                "https://harbor:8443/v2/proxy/busybox",
                "https://registry-1.docker.io/v2/busybox",
                "https://registry-1.docker.io/v2/library/busybox",
            ],
        );
        check(
            "quiet.example",
            "a",
            &["https://127.0.0.1:5001/v2/a", "https://localhost:443/v2/a", "https://quiet.example/v2/a"],
        );
        // The wildcard config has TLS settings, so HTTPS is used.
        check(
            "quay.io",
            "a",
            &["https://127.0.0.1:5001/v2/a", "https://localhost:443/v2/a", "https://quay.io/v2/a"],
        );
        let without: RegistrySettings = schema::yaml::from_str("mirrors:\nconfigs:\n").unwrap();
        assert_eq!(without.registry_hosts("127.0.0.1:5000", "a")[0].scheme, "http");
    }

    #[test]
    fn mirrors_only_skips_the_registry_itself() {
        let text = "mirrors:\n  a.example: {endpoint: ['http://mirror:5000']}\n  b.example:\n";
        let settings: RegistrySettings = schema::yaml::from_str(text).unwrap();
        let hosts = |registry: &str, mirrors_only: bool| {
            let settings = settings.clone().mirrors_only(mirrors_only);
            settings
                .registry_hosts(registry, "x")
                .into_iter()
                .map(|registry_host| registry_host.host)
                .collect::<Vec<_>>()
        };
        assert_eq!(hosts("a.example", false), ["mirror:5000", "a.example"]);
        assert_eq!(hosts("a.example", true), ["mirror:5000"]);
        // A registry without mirrors is contacted despite `mirrors_only`.
        assert_eq!(hosts("b.example", true), ["b.example"]);
        assert_eq!(hosts("c.example", true), ["c.example"]);
    }

    #[test]
    fn select_credentials_and_tls_per_host() {
        let settings: RegistrySettings = schema::yaml::from_str(TEXT).unwrap();
        let credentials = |host: &str| settings.credentials(host).unwrap();
        assert_eq!(credentials("mirror:5000").password, "secret");
        assert_eq!(
            (credentials("docker.io"), credentials("registry-1.docker.io").username.as_str()),
            (credentials(DOCKER_HUB_HOST), "me")
        );
        assert_eq!(credentials("token").identity_token, "secret");
        assert!(settings.credentials("elsewhere").is_none());
        let tls = Tls {
            ca_file: Some("/ca".into()),
            cert_file: Some("/cert".into()),
            key_file: Some("/key".into()),
            insecure_skip_verify: true,
        };
        assert_eq!(settings.registry_hosts("safe:443", "a").last().unwrap().tls, tls);
        assert_eq!(
            settings.registry_hosts("elsewhere", "a").last().unwrap().tls.ca_file,
            Some("/all".into())
        );
        assert!(!format!("{settings:?}").contains("secret"));
    }

    #[test]
    fn errors_name_the_file_and_the_pattern() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("registries.yaml");
        std::fs::write(&path, "mirrors: {a: {rewrite: {'(': b}}}").unwrap();
        let error = RegistrySettings::read(&path).unwrap_err();
        assert!(
            error.contains("invalid rewrite pattern \"(\"") && error.contains("registries.yaml"),
            "{error}"
        );
        std::fs::write(&path, "mirrors: [").unwrap();
        assert!(RegistrySettings::read(&path).unwrap_err().starts_with("cannot parse "));
        std::fs::write(&path, "\n").unwrap();
        assert!(
            RegistrySettings::read(&path).is_ok() && RegistrySettings::read(&dir.path().join("none")).is_ok()
        );
    }
}

//! Where registries really are, and what they want; from a file as k3s has it, `registries.yaml`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Credentials;

/// What the administrator says about registries.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Settings {
    mirrors: BTreeMap<String, Mirror>,
    configs: BTreeMap<String, Config>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Mirror {
    /// URLs, tried in their order before the registry itself.
    endpoint: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    auth: Option<Auth>,
    tls: Option<Tls>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct Auth {
    username: String,
    password: String,
    token: String,
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Auth(…)")
    }
}

/// How a registry is known for the one it should be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Tls {
    /// Who vouches for it, besides those the system trusts.
    pub ca_file: Option<PathBuf>,
    /// Not at all.
    pub insecure_skip_verify: bool,
}

/// Where a registry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// `https` or `http`.
    pub scheme: &'static str,
    /// With its port.
    pub host: String,
    pub tls: Tls,
}

impl Settings {
    /// Reads the file; one that is not there says nothing.
    pub fn read(path: &Path) -> Result<Settings, String> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Settings::default()),
            Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
        };
        if text.trim().is_empty() {
            return Ok(Settings::default());
        }
        schema::yaml::read(&text).map_err(|error| format!("cannot understand {}: {error}", path.display()))
    }

    /// The places to try for a registry.
    pub fn places(&self, registry: &str) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        let mirror = self.mirrors.get(registry).or_else(|| self.mirrors.get("*"));
        for url in mirror.iter().flat_map(|mirror| &mirror.endpoint) {
            let (scheme, rest) = match url.split_once("://") {
                Some(("http", rest)) => ("http", rest),
                Some((_, rest)) => ("https", rest),
                None => ("https", url.as_str()),
            };
            let host = rest.split('/').next().unwrap_or(rest);
            places.push(self.place(scheme, host));
        }
        let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
        let is_local = ["localhost", "127.0.0.1", "[::1]"]
            .contains(&host.rsplit_once(':').map_or(host, |(host, _)| host));
        // A registry on this machine is as safe without; one with a certificate says so by its settings.
        let has_tls = self.configs.get(host).is_some_and(|config| config.tls.is_some());
        places.push(self.place(if is_local && !has_tls { "http" } else { "https" }, host));
        places
    }

    fn place(&self, scheme: &'static str, host: &str) -> Place {
        let tls = self.configs.get(host).and_then(|config| config.tls.clone());
        Place { scheme, host: host.to_owned(), tls: tls.unwrap_or_default() }
    }

    pub fn credentials(&self, host: &str) -> Option<Credentials> {
        let auth = self.configs.get(host)?.auth.clone()?;
        Some(Credentials { username: auth.username, password: auth.password, token: auth.token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_k3s() {
        let text = "mirrors:\n  docker.io:\n    endpoint: [\"http://mirror:5000\", \"https://other/v2\"]\n\
            configs:\n  mirror:5000:\n    auth: {username: me, password: secret}\n  safe:443:\n    tls: {ca_file: /ca}\n";
        let settings: Settings = schema::yaml::read(text).unwrap();
        let shown = |registry: &str| {
            let places = settings.places(registry);
            places
                .iter()
                .map(|place| format!("{}://{}", place.scheme, place.host))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(shown("docker.io"), "http://mirror:5000 https://other https://registry-1.docker.io");
        assert_eq!(shown("quay.io"), "https://quay.io");
        assert_eq!(shown("127.0.0.1:5000"), "http://127.0.0.1:5000");
        assert_eq!(settings.places("safe:443")[0].tls.ca_file, Some("/ca".into()));
        assert_eq!(settings.credentials("mirror:5000").unwrap().password, "secret");
        assert!(!format!("{settings:?}").contains("secret"));
    }
}

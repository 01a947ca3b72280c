//! Credentials for registries that the node has for all pods, in a file as docker writes it.

use std::path::{Path, PathBuf};

use runtime::cri::AuthConfig;

use crate::pull_secrets::{self, RegistryCredential};

/// What to show to the image's registry, of the first such file that can be read. It is read anew for every image that may
/// have to be pulled, so that a password can be changed while pods run.
pub fn credentials_for_image(root: &Path, home: Option<&Path>, image: &str) -> Vec<RegistryCredential> {
    let all = entries(root, home).into_iter();
    let all = all.map(|(place, auth)| (place, RegistryCredential { auth, source: None })).collect();
    pull_secrets::matching_credentials(all, image)
}

fn entries(root: &Path, home: Option<&Path>) -> Vec<(String, AuthConfig)> {
    for (path, name) in files(root, home) {
        let found = match std::fs::read(&path) {
            Ok(text) => pull_secrets::parse_docker_config(name, &text)
                .ok_or_else(|| "it is not as docker writes it".to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => Err(error.to_string()),
        };
        match found {
            Ok(found) => return found,
            // Not what is in it, of which parts may be passwords.
            Err(error) => {
                tracing::warn!(error, path = %path.display(), "credentials for registries are left out")
            }
        }
    }
    Vec::new()
}

/// The places upstream looks at, and which key of a Secret has the same form. Not where the process was started, which is
/// anywhere.
fn files(root: &Path, home: Option<&Path>) -> impl Iterator<Item = (PathBuf, &'static str)> {
    let top = Path::new("/");
    let docker_config = [root.join("config.json")].into_iter();
    let docker_config = docker_config
        .chain([home, Some(top)].into_iter().flatten().map(|dir| dir.join(".docker/config.json")));
    let legacy_config = [Some(root), home, Some(top)].into_iter().flatten().map(|dir| dir.join(".dockercfg"));
    docker_config
        .map(|path| (path, pull_secrets::DOCKER_CONFIG_JSON))
        .chain(legacy_config.map(|path| (path, pull_secrets::DOCKER_CFG)))
        .collect::<Vec<_>>()
        .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Users whose passwords are shown for an image, by files in the node's directory and at home.
    #[track_caller]
    fn check(files: &[(&str, &str)], image: &str, expected: &[&str]) {
        let dir = tempfile::tempdir().unwrap();
        let (root, home) = (dir.path().join("root"), dir.path().join("home"));
        for path in [&root, &home.join(".docker")] {
            std::fs::create_dir_all(path).unwrap();
        }
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let found = credentials_for_image(&root, Some(&home), image);
        assert!(found.iter().all(|one| one.source.is_none()), "what is the node's is for all pods");
        let users: Vec<_> = found.iter().map(|one| one.auth.username.as_str()).collect();
        assert_eq!(users, expected, "{files:?}");
    }

    #[test]
    fn uses_the_first_readable_file() {
        let config_for = |user: &str| {
            format!(
                r#"{{"auths": {{"r.example": {{"username": "{user}", "password": "x"}}}}, "credsStore": "y"}}"#
            )
        };
        let old = r#"{"r.example": {"auth": "b2xkOng="}, "other.example": {"auth": "b3RoZXI6eA=="}}"#;
        let (one, two) = (config_for("one"), config_for("two"));
        let (own, at_home) = (("root/config.json", one.as_str()), ("home/.docker/config.json", two.as_str()));
        check(&[], "r.example/a", &[]);
        check(&[own, at_home], "r.example/a:1", &["one"]);
        check(&[at_home, ("home/.dockercfg", old)], "r.example/a", &["two"]);
        check(&[("root/.dockercfg", old)], "r.example/a", &["old"]);
        check(&[("home/.dockercfg", old)], "other.example/a", &["other"]);
        check(&[own], "busybox", &[]);
        // One that cannot be read is left out.
        check(&[("root/config.json", "{"), at_home], "r.example/a", &["two"]);
        check(&[("root/config.json", "[]"), at_home], "r.example/a", &["two"]);
        // One that says nothing of registries is read all the same.
        check(&[("root/config.json", "{}"), at_home], "r.example/a", &[]);
    }
}

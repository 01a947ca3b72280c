//! Registry credentials of the node for all pods, in a docker configuration file.

use std::path::{Path, PathBuf};

use runtime::cri::AuthConfig;

use crate::pull_secrets::{self, RegistryCredential};

/// The credentials for an image, from the first readable file. The file is read for every image
/// pull, so that a password can be changed without a restart.
pub fn credentials_for_image(root: &Path, home: Option<&Path>, image: &str) -> Vec<RegistryCredential> {
    let all = entries(root, home).into_iter();
    let all = all.map(|(place, auth)| (place, RegistryCredential { auth, source: None })).collect();
    pull_secrets::matching_credentials(all, image)
}

fn entries(root: &Path, home: Option<&Path>) -> Vec<(String, AuthConfig)> {
    for (path, name) in files(root, home) {
        let found = match std::fs::read(&path) {
            Ok(text) => pull_secrets::parse_docker_config(name, &text)
                .ok_or_else(|| "not a valid docker configuration file".to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => Err(error.to_string()),
        };
        match found {
            Ok(found) => return found,
            // Not the content, which may include passwords.
            Err(error) => {
                tracing::warn!(error, path = %path.display(), "ignoring registry credentials that cannot be read")
            }
        }
    }
    Vec::new()
}

/// The files in upstream's order, each with the Secret key of the same format. Unlike upstream, the
/// working directory of the process is not searched, since it is arbitrary.
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

    /// Compares the users whose credentials match an image. Files are in the root or the home
    /// directory.
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
        assert!(found.iter().all(|one| one.source.is_none()), "node credentials apply to all pods");
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
        // An invalid file is skipped.
        check(&[("root/config.json", "{"), at_home], "r.example/a", &["two"]);
        check(&[("root/config.json", "[]"), at_home], "r.example/a", &["two"]);
        // A valid file without registries ends the search.
        check(&[("root/config.json", "{}"), at_home], "r.example/a", &[]);
    }
}

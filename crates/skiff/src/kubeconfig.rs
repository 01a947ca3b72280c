//! The administrator's kubeconfig: a file in the data directory, and the file of `--write-kubeconfig`,
//! which may contain other contexts.
//!
//! Merging follows kubectl and kind: entries of the same name are replaced, other entries are kept, and
//! `FILE.lock` prevents concurrent writes. Start at [`KubeconfigFile::write`].

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value, json};

/// Name of the cluster, user and context entries.
pub const ENTRY_NAME: &str = "skiff";

const PRIVATE_MODE: u32 = 0o600;
/// How long to wait for another program that writes the same file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// A lock is held for milliseconds; an older one was left by a program that was killed.
const LOCK_STALE_AFTER: Duration = Duration::from_secs(30);

/// The file of `--write-kubeconfig`.
#[derive(Clone, Debug)]
pub struct KubeconfigFile {
    pub path: PathBuf,
    /// `None` keeps the file's mode; a new file gets 0600.
    pub mode: Option<u32>,
}

impl KubeconfigFile {
    /// Adds or replaces the entries of `own`, a kubeconfig with one cluster. The file is replaced
    /// atomically. A file that is not a kubeconfig is not changed.
    pub fn write(&self, own: &str) -> anyhow::Result<()> {
        // Writes to the target of a symlink and keeps the link.
        let path = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        create_parent(&path)?;
        let _lock = KubeconfigLock::acquire(&path)?;
        let before = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).context("cannot read the file"),
        };
        let existing_metadata = fs::metadata(&path).ok();
        let mode =
            self.mode.or_else(|| Some(existing_metadata.as_ref()?.mode() & 0o777)).unwrap_or(PRIVATE_MODE);
        let Some(after) = merge_text(&before, own)? else {
            let changed = self.mode.is_some_and(|mode| {
                existing_metadata.is_some_and(|existing_metadata| existing_metadata.mode() & 0o777 != mode)
            });
            return match changed {
                true => fs::set_permissions(&path, Permissions::from_mode(mode))
                    .context("cannot set the file mode"),
                false => Ok(()),
            };
        };
        if after.needs_backup {
            let backup = backup_path(&path);
            pki::write_file(&backup, before.as_bytes(), mode & PRIVATE_MODE)?;
            preserve_owner(&backup, existing_metadata.as_ref())?;
            tracing::info!(kubeconfig = %path.display(), backup = %backup.display(), "kubeconfig merged");
        }
        pki::write_file(&path, after.text.as_bytes(), mode)?;
        preserve_owner(&path, existing_metadata.as_ref())
    }
}

/// The backup of the file, made before the cluster is added to it.
pub fn backup_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".before-skiff");
    name.into()
}

#[derive(Debug, PartialEq, Eq)]
struct MergedKubeconfig {
    text: String,
    /// Whether the cluster is new in a file with other content.
    needs_backup: bool,
}

/// The file's text with the entries of `own`; `None` if it contains them already.
fn merge_text(before: &str, own: &str) -> anyhow::Result<Option<MergedKubeconfig>> {
    let parse = |text: &str| {
        // The text may hold secrets, so the error must not quote it.
        schema::yaml::parse(text).map_err(|error| anyhow::anyhow!(error.without_values()))
    };
    let existing = match before.trim().is_empty() {
        true => Value::Null,
        false => parse(before).context("it is not a kubeconfig and is not changed")?,
    };
    if existing.is_null() {
        return Ok(Some(MergedKubeconfig { text: own.to_owned(), needs_backup: false }));
    }
    let own = parse(own)?;
    let was_known = cluster_ca(&existing).is_some_and(|ca| Some(ca) == cluster_ca(&own));
    let after = merge(existing.clone(), &own).context("it is not a kubeconfig and is not changed")?;
    if after == existing {
        return Ok(None);
    }
    let text = serde_saphyr::to_string(&after).context("cannot serialize it as YAML")?;
    ensure!(parse(&text)? == after, "cannot serialize it as YAML");
    Ok(Some(MergedKubeconfig { text, needs_backup: !was_known }))
}

fn merge(existing: Value, own: &Value) -> anyhow::Result<Value> {
    let Value::Object(mut file) = existing else { bail!("it is not a YAML mapping") };
    ensure!(file.get("kind").is_none_or(|kind| kind == "Config"), "its kind is not Config");
    let is_known = cluster_ca(own)
        .is_some_and(|ca| find_entry(file.get("clusters"), ENTRY_NAME).and_then(entry_ca) == Some(ca));
    for (list, field) in [("clusters", "cluster"), ("users", "user"), ("contexts", "context")] {
        let Some(mut entry) = find_entry(own.get(list), ENTRY_NAME).cloned() else {
            bail!("it has no {field}")
        };
        let entries = file.entry(list).or_insert_with(|| json!([]));
        if entries.is_null() {
            *entries = json!([]);
        }
        let Value::Array(entries) = entries else { bail!("{list} is not a list") };
        match entries.iter_mut().find(|entry| entry["name"] == ENTRY_NAME) {
            None => entries.push(entry),
            Some(before) => {
                // Keeps settings such as the namespace from `kubectl config set-context`.
                if list == "contexts" && is_known {
                    copy_missing(&mut entry[field], &before[field]);
                }
                *before = entry;
            }
        }
    }
    for name in ["apiVersion", "kind"] {
        file.entry(name).or_insert_with(|| own[name].clone());
    }
    let current = file.get("current-context").and_then(Value::as_str).unwrap_or_default();
    // A restart of the same cluster keeps the user's current context.
    if !is_known || current.is_empty() {
        file.insert("current-context".to_owned(), json!(ENTRY_NAME));
    }
    Ok(Value::Object(file))
}

fn copy_missing(target: &mut Value, before: &Value) {
    let (Value::Object(target), Value::Object(before)) = (target, before) else { return };
    let before: &Map<String, Value> = before;
    for (name, value) in before {
        target.entry(name).or_insert_with(|| value.clone());
    }
}

fn find_entry<'a>(entries: Option<&'a Value>, name: &str) -> Option<&'a Value> {
    entries?.as_array()?.iter().find(|entry| entry["name"] == name)
}

fn entry_ca(cluster: &Value) -> Option<&str> {
    cluster["cluster"]["certificate-authority-data"].as_str()
}

fn cluster_ca(config: &Value) -> Option<&str> {
    entry_ca(find_entry(config.get("clusters"), ENTRY_NAME)?)
}

fn create_parent(path: &Path) -> anyhow::Result<()> {
    let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) else { return Ok(()) };
    let created = DirBuilder::new().recursive(true).mode(0o700).create(parent);
    created.with_context(|| format!("cannot create {}", parent.display()))
}

/// Keeps the owner of the file: root may run skiff on behalf of another user.
fn preserve_owner(path: &Path, before: Option<&fs::Metadata>) -> anyhow::Result<()> {
    let Some(before) = before else { return Ok(()) };
    let now = fs::metadata(path)?;
    if (now.uid(), now.gid()) == (before.uid(), before.gid()) {
        return Ok(());
    }
    std::os::unix::fs::chown(path, Some(before.uid()), Some(before.gid()))
        .context("cannot preserve the file owner")
}

/// client-go's lock on a kubeconfig: a file next to it, created with O_EXCL.
struct KubeconfigLock(PathBuf);

impl KubeconfigLock {
    fn acquire(path: &Path) -> anyhow::Result<KubeconfigLock> {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let path = PathBuf::from(name);
        let started = Instant::now();
        loop {
            match File::options().write(true).create_new(true).mode(PRIVATE_MODE).open(&path) {
                Ok(_) => return Ok(KubeconfigLock(path)),
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(error).with_context(|| format!("cannot create {}", path.display()));
                }
                Err(_) if is_stale(&path) => drop(fs::remove_file(&path)),
                Err(_) if started.elapsed() < LOCK_TIMEOUT => std::thread::park_timeout(LOCK_RETRY),
                Err(_) => bail!("{} exists: another program is writing the kubeconfig", path.display()),
            }
        }
    }
}

impl Drop for KubeconfigLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn is_stale(path: &Path) -> bool {
    let modified = fs::metadata(path).and_then(|found| found.modified());
    modified.is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age > LOCK_STALE_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER_CONTEXTS: &str = "\
apiVersion: v1
kind: Config
clusters:
- name: prod
  cluster: {server: 'https://192.0.2.1:6443', certificate-authority-data: UFJPRA==}
contexts:
- name: prod
  context: {cluster: prod, user: alice, namespace: shop}
current-context: prod
preferences: {}
users:
- name: alice
  user: {token: 'no'}
";

    fn own(ca: &str, cert: &str) -> String {
        let client = pki::CertKeyPair { cert_pem: cert.to_owned(), key_pem: "KEY".to_owned() };
        pki::kubeconfig("https://127.0.0.1:6443", ca, &client, ENTRY_NAME)
    }

    fn output(path: PathBuf) -> KubeconfigFile {
        KubeconfigFile { path, mode: None }
    }

    fn parsed(path: &Path) -> Value {
        schema::yaml::parse(&fs::read_to_string(path).unwrap()).unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn creates_private_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".kube/config");
        output(path.clone()).write(&own("CA", "CERT")).unwrap();
        assert_eq!((mode(&dir.path().join(".kube")), mode(&path)), (0o700, 0o600));
        assert_eq!(fs::read_to_string(&path).unwrap(), own("CA", "CERT"));
        assert!(!backup_path(&path).exists());
    }

    #[test]
    fn merges_with_other_contexts_and_creates_backup() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        fs::write(&path, OTHER_CONTEXTS).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        output(path.clone()).write(&own("CA", "CERT")).unwrap();
        let (config, others) = (parsed(&path), schema::yaml::parse(OTHER_CONTEXTS).unwrap());
        for list in ["clusters", "contexts", "users"] {
            assert_eq!(config[list][0], others[list][0], "{list}");
            assert_eq!(config[list][1]["name"], ENTRY_NAME, "{list}");
        }
        assert_eq!(config["current-context"], ENTRY_NAME);
        assert_eq!(mode(&path), 0o640);
        assert_eq!(fs::read_to_string(backup_path(&path)).unwrap(), OTHER_CONTEXTS);
        assert_eq!(mode(&backup_path(&path)), 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file, no lock");
    }

    #[test]
    fn rewrite_preserves_user_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        fs::write(&path, OTHER_CONTEXTS).unwrap();
        output(path.clone()).write(&own("CA", "CERT")).unwrap();
        let mut config = parsed(&path);
        config["current-context"] = json!("prod");
        config["contexts"][1]["context"]["namespace"] = json!("mine");
        fs::write(&path, config.to_string()).unwrap();
        // Nothing changes, so nothing is written.
        output(path.clone()).write(&own("CA", "CERT")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), config.to_string());
        output(path.clone()).write(&own("CA", "RENEWED")).unwrap();
        let renewed = parsed(&path);
        assert_ne!(renewed["users"][1], config["users"][1]);
        config["users"][1] = renewed["users"][1].clone();
        assert_eq!(renewed, config);
        assert_eq!(
            fs::read_to_string(backup_path(&path)).unwrap(),
            OTHER_CONTEXTS,
            "the backup is unchanged"
        );
        // A cluster with another CA is a new cluster, even if its name is the same.
        output(path.clone()).write(&own("OTHER", "CERT")).unwrap();
        let other = parsed(&path);
        assert_eq!(other["current-context"], ENTRY_NAME);
        assert_eq!(other["contexts"][1]["context"], json!({"cluster": ENTRY_NAME, "user": ENTRY_NAME}));
    }

    #[test]
    fn rejects_file_that_is_not_a_kubeconfig() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        let check = |text: &str, expected: &str| {
            fs::write(&path, text).unwrap();
            let error = format!("{:#}", output(path.clone()).write(&own("CA", "CERT")).unwrap_err());
            assert_eq!(error, format!("it is not a kubeconfig and is not changed: {expected}"));
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        };
        check("users: [secret\n", "invalid YAML at line 1");
        check("just text\n", "it is not a YAML mapping");
        check("kind: Pod\n", "its kind is not Config");
        check("kind: Config\nusers: {a: b}\n", "users is not a list");
    }

    #[test]
    fn null_lists_count_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        // `kubectl config unset` leaves null lists.
        fs::write(&path, "apiVersion: v1\nclusters: null\ncontexts: null\ncurrent-context: \"\"\nkind: Config\nusers: null\n")
            .unwrap();
        output(path.clone()).write(&own("CA", "CERT")).unwrap();
        assert_eq!(parsed(&path)["contexts"][0]["name"], ENTRY_NAME);
    }

    #[test]
    fn follows_symlink_and_sets_requested_mode() {
        let dir = tempfile::tempdir().unwrap();
        let [real, link] = ["real", "config"].map(|name| dir.path().join(name));
        fs::write(&real, OTHER_CONTEXTS).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        KubeconfigFile { path: link.clone(), mode: Some(0o644) }.write(&own("CA", "CERT")).unwrap();
        assert!(link.is_symlink());
        assert_eq!((parsed(&real)["current-context"].as_str(), mode(&real)), (Some(ENTRY_NAME), 0o644));
        // The mode is set even if the content does not change.
        KubeconfigFile { path: link, mode: Some(0o600) }.write(&own("CA", "CERT")).unwrap();
        assert_eq!(mode(&real), 0o600);
    }

    #[test]
    fn ignores_stale_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        let lock = File::create(dir.path().join("config.lock")).unwrap();
        lock.set_modified(std::time::SystemTime::now() - 2 * LOCK_STALE_AFTER).unwrap();
        output(path.clone()).write(&own("CA", "CERT")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

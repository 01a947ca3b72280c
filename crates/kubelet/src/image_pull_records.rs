//! Access to images that are present on the node: a pod may use an image only if it could have
//! pulled it. Otherwise all pods on a node could run what others have pulled with their secrets.
//! Counterpart of upstream's image pull manager.
//!
//! The credentials that pulled an image are recorded in upstream's files and format. Of a secret
//! they contain only a hash. An image that this node has not pulled was preloaded by the
//! administrator and is available to all, unless the [`VerificationPolicy`] says otherwise.
//! [`evaluate_access`] is pure.

mod policy;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use parking_lot::Mutex;
use runtime::Runtime;
use runtime::cri::{AuthConfig, ImageSpec};
use serde_json::{Value, json};

pub use policy::{CredentialVerification, VerificationPolicy};

use crate::image_reference;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// The maximum number of secrets in a record, beyond which pods that use a present image add no
/// more.
const MAX_RECORDED_SECRETS: usize = 100;

/// A Secret with registry credentials and their hash, or a service account, which has no hash.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PullSecret {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The hash of the credentials.
    pub hash: String,
}

impl PullSecret {
    /// A service account for which a credential provider returned the credentials.
    pub fn account(namespace: &str, name: &str, uid: &str) -> PullSecret {
        let [namespace, name, uid] = [namespace, name, uid].map(str::to_owned);
        PullSecret { namespace, name, uid, hash: String::new() }
    }

    /// The list of a record's credential mapping that it belongs to.
    fn mapping_key(&self) -> &'static str {
        if self.hash.is_empty() { "kubernetesServiceAccounts" } else { "kubernetesSecrets" }
    }

    fn read(value: &Value) -> PullSecret {
        let text = |field: &str| value[field].as_str().unwrap_or_default().to_owned();
        PullSecret {
            namespace: text("namespace"),
            name: text("name"),
            uid: text("uid"),
            hash: text("credentialHash"),
        }
    }

    fn to_value(&self) -> Value {
        let PullSecret { namespace, name, uid, hash } = self;
        let mut value = json!({"uid": uid, "namespace": namespace, "name": name});
        if !hash.is_empty() {
            value["credentialHash"] = json!(hash);
        }
        value
    }

    fn is_same_object(&self, other: &PullSecret) -> bool {
        (&self.namespace, &self.name, &self.uid) == (&other.namespace, &other.name, &other.uid)
    }
}

/// The hash by which records identify credentials.
pub fn credential_hash(auth: &AuthConfig) -> String {
    let AuthConfig { username, password, auth, server_address, identity_token, registry_token } = auth;
    sha256_hex(json!([username, password, auth, server_address, identity_token, registry_token]).to_string())
}

pub fn sha256_hex(text: impl AsRef<[u8]>) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_ref());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is recorded of an image.
#[derive(Default)]
struct PulledImage {
    record: Option<Value>,
    /// It is being pulled, or was when the kubelet stopped.
    is_pulling: bool,
}

#[derive(Debug, PartialEq)]
enum PullDecision {
    /// The pod may use the image.
    Allowed,
    /// The pod may use the image because of this secret, which the record does not have in this
    /// form.
    AllowedBy(PullSecret),
    /// The registry has to verify the credentials.
    MustPull,
}

/// Whether a pod with these secrets may use an image that is present.
fn evaluate_access(
    policy: &VerificationPolicy,
    image: &str,
    known: &PulledImage,
    secrets: &[PullSecret],
) -> PullDecision {
    let pulled_by_node = known.record.is_some() || known.is_pulling;
    if !policy.requires_verification(image, pulled_by_node) {
        return PullDecision::Allowed;
    }
    let Some(record) = &known.record else { return PullDecision::MustPull };
    let by = &record["credentialMapping"][image_reference::without_tag(image)];
    if by["nodePodsAccessible"] == true {
        return PullDecision::Allowed;
    }
    let read = |list: &str| -> Vec<PullSecret> {
        by[list].as_array().into_iter().flatten().map(PullSecret::read).collect()
    };
    let recorded = read("kubernetesSecrets");
    let has_capacity = recorded.len() < MAX_RECORDED_SECRETS;
    for secret in secrets {
        if secret.hash.is_empty() {
            match read(secret.mapping_key()).contains(secret) {
                true => return PullDecision::Allowed,
                false => continue,
            }
        }
        for known in &recorded {
            let is_same = !known.hash.is_empty() && known.hash == secret.hash;
            match (is_same, known.is_same_object(secret)) {
                (true, true) => return PullDecision::Allowed,
                (true, false) if !has_capacity => return PullDecision::Allowed,
                // The same credentials in another object, or other credentials in the same object:
                // access is granted and recorded.
                (true, false) | (false, true) if has_capacity => {
                    return PullDecision::AllowedBy(secret.clone());
                }
                _ => {}
            }
        }
    }
    PullDecision::MustPull
}

/// Releases one pull of an image. Returns whether it was the last one.
fn release_pull(pulling: &mut HashMap<String, usize>, image: &str) -> bool {
    match pulling.get_mut(image) {
        Some(count) if *count > 1 => {
            *count -= 1;
            false
        }
        _ => {
            pulling.remove(image);
            true
        }
    }
}

/// Records a pull of an image; without a secret it is available to all pods. Returns whether the
/// record has changed.
fn record_secret(record: &mut Value, image: &str, secret: Option<&PullSecret>) -> bool {
    let by = &mut record["credentialMapping"][image_reference::without_tag(image)];
    if by["nodePodsAccessible"] == true {
        return false;
    }
    let Some(secret) = secret else {
        *by = json!({"nodePodsAccessible": true});
        return true;
    };
    let list = secret.mapping_key();
    let mut all: Vec<PullSecret> = by[list].as_array().into_iter().flatten().map(PullSecret::read).collect();
    if all.contains(secret) {
        return false;
    }
    all.retain(|known| !known.is_same_object(secret));
    all.push(secret.clone());
    all.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    by[list] = all.iter().map(PullSecret::to_value).collect();
    true
}

/// The pull records of this node.
pub struct ImagePullRecords {
    dir: PathBuf,
    /// The number of pulls in progress by image. The lock also protects the files.
    pulling: Mutex<HashMap<String, usize>>,
}

impl ImagePullRecords {
    pub fn open(root: &Path) -> ImagePullRecords {
        ImagePullRecords { dir: root.join("image_manager"), pulling: Mutex::default() }
    }

    /// Whether a pod with these secrets may use the present image with this ID.
    pub fn is_access_allowed(
        &self,
        policy: &VerificationPolicy,
        image: &str,
        id: &str,
        secrets: &[PullSecret],
        now: Timestamp,
    ) -> bool {
        let pulling = self.pulling.lock();
        let known = || -> io::Result<PulledImage> {
            let is_pulling = pulling.contains_key(image) || self.pulling_file(image).try_exists()?;
            Ok(PulledImage { record: self.read_record(id)?, is_pulling })
        };
        let decision = match known() {
            Ok(known) => evaluate_access(policy, image, &known, secrets),
            Err(error) => {
                tracing::warn!(%error, image, "cannot read the pull record of an image, pulling it again");
                PullDecision::MustPull
            }
        };
        match decision {
            PullDecision::Allowed => true,
            PullDecision::MustPull => false,
            PullDecision::AllowedBy(secret) => {
                self.write_record(image, id, Some(Some(&secret)), now);
                true
            }
        }
    }

    /// Records that a pull begins, so that the image counts as pulled by this node even if the
    /// kubelet stops meanwhile.
    pub fn record_pull_intent(&self, image: &str) -> Result<(), String> {
        let mut pulling = self.pulling.lock();
        let intent = json!({"kind": "ImagePullIntent", "apiVersion": API_VERSION, "image": image});
        self.write(&self.pulling_file(image), &intent)?;
        *pulling.entry(image.to_owned()).or_default() += 1;
        Ok(())
    }

    /// Records the end of a pull: the image ID and the secret that was used, or `None` if it
    /// failed.
    pub fn record_pull_result(
        &self,
        image: &str,
        pulled: Option<(&str, Option<&PullSecret>)>,
        now: Timestamp,
    ) {
        let mut pulling = self.pulling.lock();
        if let Some((id, secret)) = pulled
            && !self.write_record(image, id, Some(secret), now)
        {
            // The intent stays, so that the image does not count as preloaded.
            return;
        }
        if release_pull(&mut pulling, image)
            && let Err(error) = remove(&self.pulling_file(image))
        {
            tracing::warn!(%error, image, "cannot remove the pull intent of an image");
        }
    }

    /// Records that a pull was canceled. The runtime may complete it nevertheless, and the image
    /// counts as pulled by this node then. So the intent stays until another pull has succeeded, or
    /// until the next start.
    pub fn cancel_pull(&self, image: &str) {
        release_pull(&mut self.pulling.lock(), image);
    }

    /// Records images that are present and whose pull was interrupted by a restart. The secrets
    /// that pulled them are unknown.
    pub async fn recover(&self, runtime: &dyn Runtime, now: Timestamp) {
        for (path, intent) in self.read_files("pulling") {
            let Some(image) = intent["image"].as_str() else { continue };
            let spec = ImageSpec { image: image.to_owned(), ..ImageSpec::default() };
            let Ok(Some(found)) = runtime.image(&spec).await else { continue };
            let pulling = self.pulling.lock();
            if !pulling.contains_key(image) && self.write_record(image, &found.id, None, now) {
                let _ = remove(&path);
            }
        }
    }

    /// Removes the records of all images but these, which were present at the time `until`.
    pub fn prune(&self, ids: &[&str], until: Timestamp) {
        let _pulling = self.pulling.lock();
        // Records have a resolution of one second.
        let until = Timestamp::from_second(until.as_second()).unwrap_or(until);
        for (path, record) in self.read_files("pulled") {
            let written = record["lastUpdatedTime"].as_str().and_then(|text| text.parse::<Timestamp>().ok());
            let is_new = written.is_some_and(|written| written >= until);
            let is_there = record["imageRef"].as_str().is_some_and(|id| ids.contains(&id));
            if !is_new && !is_there {
                let _ = remove(&path);
            }
        }
    }

    /// Writes the record of a pulled image; `by` is the secret, if that is known. Returns whether
    /// the record is on disk.
    fn write_record(&self, image: &str, id: &str, by: Option<Option<&PullSecret>>, now: Timestamp) -> bool {
        let known = self.read_record(id).unwrap_or_default();
        let is_new = known.is_none();
        let mut record = known.unwrap_or_else(
            || json!({"kind": "ImagePulledRecord", "apiVersion": API_VERSION, "imageRef": id}),
        );
        let has_changed = by.is_some_and(|secret| record_secret(&mut record, image, secret));
        if !is_new && !has_changed {
            return true;
        }
        record["lastUpdatedTime"] = json!(format!("{now:.0}"));
        let written = self.write(&self.pulled_file(id), &record);
        written
            .inspect_err(|error| tracing::warn!(%error, image, "cannot write the pull record of an image"))
            .is_ok()
    }

    fn read_record(&self, id: &str) -> io::Result<Option<Value>> {
        match std::fs::read(self.pulled_file(id)) {
            Ok(bytes) => {
                let record: Value = serde_json::from_slice(&bytes)?;
                let by = &record["credentialMapping"];
                if !(by.is_null() || by.as_object().is_some_and(|by| by.values().all(Value::is_object))) {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                Ok(Some(record).filter(|record| record["imageRef"] == id))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn pulling_file(&self, image: &str) -> PathBuf {
        self.dir.join("pulling").join(format!("sha256-{}", sha256_hex(image)))
    }

    fn pulled_file(&self, id: &str) -> PathBuf {
        self.dir.join("pulled").join(format!("sha256-{}", sha256_hex(id)))
    }

    fn read_files(&self, kind: &str) -> Vec<(PathBuf, Value)> {
        let entries = std::fs::read_dir(self.dir.join(kind)).into_iter().flatten().flatten();
        let is_record =
            |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("sha256-");
        let read = |path: PathBuf| {
            let value = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
            Some((path, value))
        };
        entries.filter(is_record).filter_map(|entry| read(entry.path())).collect()
    }

    fn write(&self, path: &Path, value: &Value) -> Result<(), String> {
        use std::os::unix::fs::DirBuilderExt as _;
        let dir = path.parent().unwrap_or(&self.dir);
        let created = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        created.map_err(|error| format!("cannot create {}: {error}", dir.display()))?;
        let describe = |error: pki::Error| format!("{error}: {}", source_message(&error));
        pki::write_file(path, value.to_string().as_bytes(), 0o600).map_err(describe)
    }
}

fn source_message(error: &dyn std::error::Error) -> String {
    error.source().map(ToString::to_string).unwrap_or_default()
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;

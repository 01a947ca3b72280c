//! Keys that a key management service holds (KMS v2), asked over its gRPC socket.
//!
//! The service never sees values. This server makes up a seed, has the service encrypt it, and derives from
//! it a key of its own for every value; what the service made of the seed is kept beside each value. So a
//! write asks the service about once a minute (whether its key has changed), and a read once for each seed.

mod messages;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::RwLock;
use prost::Message as _;
use ring::aead::{AES_256_GCM, LessSafeKey, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::{digest, hkdf};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use super::aes;
use crate::grpc;
use messages::{
    DecryptRequest, DecryptResponse, EncryptRequest, EncryptResponse, EncryptedObject, StatusRequest,
    StatusResponse,
};

const PREFIX: &str = "k8s:enc:kms:v2:";
/// How often the service is asked for its state, while there is something to write.
const STATUS_EVERY: Duration = Duration::from_secs(60);
/// How long a seed is good for without the service being heard of.
const GOOD_FOR: Duration = Duration::from_secs(3 * 60);
const SEED: usize = 32;
const INFO: usize = 32;
/// The value's key is derived from a seed; 0 would mean that the seed is the key.
const DERIVED: i32 = 1;
const MAX_KEY_ID: usize = 1 << 10;
const MAX_SOURCE: usize = 1 << 10;
const MAX_ANNOTATIONS: usize = 32 << 10;
/// What gRPC allows unless told otherwise.
const LARGEST_ANSWER: usize = 4 << 20;
/// Seeds kept in memory.
const SEEDS: usize = 10_000;

/// A key management service.
pub struct Kms {
    name: String,
    channel: Channel,
    random: SystemRandom,
    state: Mutex<Option<State>>,
    /// The id of the service's key, as last heard.
    key_id: RwLock<Option<String>>,
    seeds: RwLock<HashMap<[u8; 32], Arc<Secret>>>,
}

/// What values are sealed with now.
#[derive(Clone)]
struct State {
    seed: Arc<Secret>,
    /// The seed as the service has encrypted it, and what else it wants back.
    sealed: EncryptResponse,
    heard: Instant,
    checked: Instant,
}

enum Secret {
    Seed(hkdf::Prk),
    Key(Box<LessSafeKey>),
}

/// Why the service is of no use. Tells nothing secret.
#[derive(Debug, thiserror::Error)]
pub enum KmsError {
    #[error("{0:?} is not the URL of a unix socket")]
    Endpoint(String),
    #[error("key management service {name}: {why}")]
    Service { name: String, why: String },
}

impl Kms {
    /// `endpoint` is `unix:///path`. Connects when it is first needed.
    pub fn new(name: &str, endpoint: &str, timeout: Duration) -> Result<Kms, KmsError> {
        let bad = || KmsError::Endpoint(endpoint.to_owned());
        if !endpoint.starts_with("unix:///") {
            return Err(bad());
        }
        let channel = Endpoint::from_shared(endpoint.to_owned()).map_err(|_| bad())?;
        let channel = channel.timeout(timeout).connect_timeout(timeout).connect_lazy();
        Ok(Kms {
            name: name.to_owned(),
            channel,
            random: SystemRandom::new(),
            state: Mutex::default(),
            key_id: RwLock::default(),
            seeds: RwLock::default(),
        })
    }

    pub async fn seal(&self, place: &str, plain: &[u8]) -> Result<Bytes, KmsError> {
        let state = self.current().await?;
        let no_randomness = || self.failure("no randomness");
        let mut data = vec![0; INFO];
        self.random.fill(&mut data).map_err(|_| no_randomness())?;
        let Secret::Seed(seed) = &*state.seed else { return Err(self.failure("its seed is none")) };
        let key = derived(seed, &data).ok_or_else(no_randomness)?;
        aes::seal_into(&key, &self.random, place.as_bytes(), plain, &mut data).ok_or_else(no_randomness)?;
        let EncryptResponse { ciphertext, key_id, annotations } = state.sealed;
        let object = EncryptedObject { data, key_id, source: ciphertext, annotations, source_type: DERIVED };
        let mut out = format!("{PREFIX}{}:", self.name).into_bytes();
        out.extend_from_slice(&object.encode_to_vec());
        Ok(out.into())
    }

    /// The plain value and whether it is sealed with the service's key of today. `None`: it is not ours.
    pub async fn open(&self, place: &str, sealed: &[u8]) -> Option<Result<(Bytes, bool), KmsError>> {
        let rest = sealed.strip_prefix(PREFIX.as_bytes())?.strip_prefix(self.name.as_bytes())?;
        Some(self.open_object(place, rest.strip_prefix(b":")?).await)
    }

    async fn open_object(&self, place: &str, bytes: &[u8]) -> Result<(Bytes, bool), KmsError> {
        let object = EncryptedObject::decode(bytes).map_err(|_| self.failure("the value is damaged"))?;
        let secret = self.secret_of(&object).await?;
        let plain = match &*secret {
            Secret::Key(key) => aes::open(key, place.as_bytes(), &object.data),
            Secret::Seed(seed) => object
                .data
                .split_at_checked(INFO)
                .and_then(|(info, body)| aes::open(&derived(seed, info)?, place.as_bytes(), body)),
        };
        let plain = plain.ok_or_else(|| self.failure("cipher: message authentication failed"))?;
        let mut today = self.key_id.read().clone();
        if today.is_none() {
            today = Some(self.current().await?.sealed.key_id);
        }
        Ok((plain, object.source_type == DERIVED && today.as_deref() == Some(&object.key_id)))
    }

    async fn secret_of(&self, object: &EncryptedObject) -> Result<Arc<Secret>, KmsError> {
        let id = object.id();
        if let Some(secret) = self.seeds.read().get(&id) {
            return Ok(secret.clone());
        }
        let request = DecryptRequest {
            ciphertext: object.source.clone(),
            uid: uid(),
            key_id: object.key_id.clone(),
            annotations: object.annotations.clone(),
        };
        let answer: DecryptResponse = self.ask("/v2.KeyManagementService/Decrypt", request).await?;
        let secret = match object.source_type {
            DERIVED if answer.plaintext.len() >= SEED => seed(&answer.plaintext),
            0 => {
                let key = UnboundKey::new(&AES_256_GCM, &answer.plaintext);
                Secret::Key(Box::new(LessSafeKey::new(
                    key.map_err(|_| self.failure("its key has a wrong length"))?,
                )))
            }
            _ => return Err(self.failure("what it decrypted is no seed")),
        };
        Ok(self.remember(id, secret))
    }

    fn remember(&self, id: [u8; 32], secret: Secret) -> Arc<Secret> {
        let secret = Arc::new(secret);
        let mut seeds = self.seeds.write();
        if seeds.len() >= SEEDS {
            seeds.clear();
        }
        seeds.insert(id, secret.clone());
        secret
    }

    /// The state to seal with, made anew when the service has another key than before.
    async fn current(&self) -> Result<State, KmsError> {
        let mut state = self.state.lock().await;
        if let Some(state) = state.as_ref().filter(|state| state.checked.elapsed() < STATUS_EVERY) {
            return Ok(state.clone());
        }
        match (self.refreshed(state.as_ref()).await, &mut *state) {
            (Ok(new), old) => {
                *self.key_id.write() = Some(new.sealed.key_id.clone());
                Ok(old.insert(new).clone())
            }
            (Err(error), Some(old)) if old.heard.elapsed() < GOOD_FOR => {
                tracing::warn!(%error, "going on with the old key");
                old.checked = Instant::now();
                Ok(old.clone())
            }
            (Err(error), _) => Err(error),
        }
    }

    async fn refreshed(&self, old: Option<&State>) -> Result<State, KmsError> {
        let status: StatusResponse = self.ask("/v2.KeyManagementService/Status", StatusRequest {}).await?;
        if status.healthz != "ok" {
            return Err(self.failure(&format!("got unexpected healthz status: {}", status.healthz)));
        }
        if !matches!(status.version.as_str(), "v2" | "v2beta1") {
            return Err(self.failure(&format!("expected KMSv2 API version v2, got {}", status.version)));
        }
        if status.key_id.is_empty() || status.key_id.len() > MAX_KEY_ID {
            return Err(self.failure("its key has no good id"));
        }
        let now = Instant::now();
        if let Some(old) = old.filter(|old| old.sealed.key_id == status.key_id) {
            return Ok(State { heard: now, checked: now, ..old.clone() });
        }
        let mut plaintext = vec![0; SEED];
        self.random.fill(&mut plaintext).map_err(|_| self.failure("no randomness"))?;
        let request = EncryptRequest { plaintext: plaintext.clone(), uid: uid() };
        let sealed: EncryptResponse = self.ask("/v2.KeyManagementService/Encrypt", request).await?;
        let size: usize = sealed.annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        if sealed.key_id.is_empty()
            || sealed.key_id.len() > MAX_KEY_ID
            || sealed.ciphertext.is_empty()
            || sealed.ciphertext.len() > MAX_SOURCE
            || size > MAX_ANNOTATIONS
        {
            return Err(self.failure("what it made of the seed is too long, or nothing"));
        }
        let id = EncryptedObject::of(&sealed, DERIVED).id();
        let seed = self.remember(id, seed(&plaintext));
        Ok(State { seed, sealed, heard: now, checked: now })
    }

    async fn ask<Q, A>(&self, path: &'static str, request: Q) -> Result<A, KmsError>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let answer = grpc::ask(&self.channel, path, tonic::Request::new(request), LARGEST_ANSWER).await;
        answer.map_err(|status| self.failure(&format!("{}: {}", status.code(), status.message())))
    }

    fn failure(&self, why: &str) -> KmsError {
        KmsError::Service { name: self.name.clone(), why: why.to_owned() }
    }
}

fn seed(bytes: &[u8]) -> Secret {
    Secret::Seed(hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, bytes))
}

/// The key of one value.
fn derived(seed: &hkdf::Prk, info: &[u8]) -> Option<LessSafeKey> {
    let info = [info];
    let material = seed.expand(&info, &AES_256_GCM).ok()?;
    Some(LessSafeKey::new(UnboundKey::from(material)))
}

fn uid() -> String {
    uuid::Uuid::new_v4().to_string()
}

impl EncryptedObject {
    fn of(sealed: &EncryptResponse, source_type: i32) -> EncryptedObject {
        let EncryptResponse { ciphertext, key_id, annotations } = sealed.clone();
        EncryptedObject { data: Vec::new(), key_id, source: ciphertext, annotations, source_type }
    }

    /// Which seed it is of: everything but the value.
    fn id(&self) -> [u8; 32] {
        let all = EncryptedObject { data: Vec::new(), ..self.clone() };
        let digest = digest::digest(&digest::SHA256, &all.encode_to_vec());
        digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
    }
}

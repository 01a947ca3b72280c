//! Envelope encryption with a key management service (KMS v2), over its gRPC socket.
//!
//! The service never sees values. This server generates a seed, lets the service encrypt it, and
//! derives a key for every value from it. The encrypted seed is stored with each value. A write
//! calls the service about once a minute (to check whether its key has changed), a read once per
//! seed.
//!
//! Counterpart upstream: `storage/value/encrypt/envelope/kmsv2`.

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
/// The interval of status calls while there are writes.
const STATUS_INTERVAL: Duration = Duration::from_secs(60);
/// How long a seed may be used since the last successful status call.
const MAX_STATUS_AGE: Duration = Duration::from_secs(3 * 60);
const SEED_BYTES: usize = 32;
const INFO_BYTES: usize = 32;
/// The key of the value is derived from a seed. 0 means that the decrypted data is the key itself.
const SOURCE_TYPE_SEED: i32 = 1;
const MAX_KEY_ID_BYTES: usize = 1 << 10;
const MAX_ENCRYPTED_SEED_BYTES: usize = 1 << 10;
const MAX_ANNOTATIONS_BYTES: usize = 32 << 10;
/// The default message limit of gRPC.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// The number of cached seeds and keys.
const MAX_CACHED_DATA_KEYS: usize = 10_000;

/// A provider that uses a key management service.
pub struct Kms {
    name: String,
    channel: Channel,
    random: SystemRandom,
    state: Mutex<Option<EnvelopeState>>,
    /// The ID of the service's current key, from its last status.
    key_id: RwLock<Option<String>>,
    data_keys: RwLock<HashMap<[u8; 32], Arc<DataKey>>>,
}

/// The state for encryption.
#[derive(Clone)]
struct EnvelopeState {
    seed: Arc<DataKey>,
    /// The encrypted seed with the key ID and annotations that the service needs for decryption.
    encrypted_seed: EncryptResponse,
    last_status: Instant,
    last_check: Instant,
}

enum DataKey {
    Seed(hkdf::Prk),
    Key(Box<LessSafeKey>),
}

/// An error of the service. Contains no secrets.
#[derive(Debug, thiserror::Error)]
pub enum KmsError {
    #[error("{0:?} is not the URL of a unix socket")]
    Endpoint(String),
    #[error("key management service {name}: {reason}")]
    Service { name: String, reason: String },
}

impl Kms {
    /// `endpoint` is `unix:///path`. The connection is established on first use.
    pub fn new(name: &str, endpoint: &str, timeout: Duration) -> Result<Kms, KmsError> {
        let invalid_endpoint = || KmsError::Endpoint(endpoint.to_owned());
        if !endpoint.starts_with("unix:///") {
            return Err(invalid_endpoint());
        }
        let channel = Endpoint::from_shared(endpoint.to_owned()).map_err(|_| invalid_endpoint())?;
        let channel = channel.timeout(timeout).connect_timeout(timeout).connect_lazy();
        Ok(Kms {
            name: name.to_owned(),
            channel,
            random: SystemRandom::new(),
            state: Mutex::default(),
            key_id: RwLock::default(),
            data_keys: RwLock::default(),
        })
    }

    pub async fn encrypt(&self, aad: &str, plain: &[u8]) -> Result<Bytes, KmsError> {
        let state = self.current_state().await?;
        let random_error = || self.service_error("no random bytes available");
        let mut data = vec![0; INFO_BYTES];
        self.random.fill(&mut data).map_err(|_| random_error())?;
        let DataKey::Seed(seed) = &*state.seed else {
            return Err(self.service_error("current data key is not a seed"));
        };
        let key = derive_key(seed, &data).ok_or_else(random_error)?;
        aes::encrypt_into(&key, &self.random, aad.as_bytes(), plain, &mut data).ok_or_else(random_error)?;
        let EncryptResponse { ciphertext, key_id, annotations } = state.encrypted_seed;
        let object =
            EncryptedObject { data, key_id, source: ciphertext, annotations, source_type: SOURCE_TYPE_SEED };
        let mut out = format!("{PREFIX}{}:", self.name).into_bytes();
        out.extend_from_slice(&object.encode_to_vec());
        Ok(out.into())
    }

    /// Returns the plain value, and whether it was encrypted with the current key of the service.
    /// `None` if the value has another prefix.
    pub async fn decrypt(&self, aad: &str, encrypted: &[u8]) -> Option<Result<(Bytes, bool), KmsError>> {
        let rest = encrypted.strip_prefix(PREFIX.as_bytes())?.strip_prefix(self.name.as_bytes())?;
        Some(self.decrypt_object(aad, rest.strip_prefix(b":")?).await)
    }

    async fn decrypt_object(&self, aad: &str, bytes: &[u8]) -> Result<(Bytes, bool), KmsError> {
        let object = EncryptedObject::decode(bytes)
            .map_err(|_| self.service_error("cannot decode the stored value"))?;
        let data_key = self.data_key(&object).await?;
        let plain = match &*data_key {
            DataKey::Key(key) => aes::decrypt(key, aad.as_bytes(), &object.data),
            DataKey::Seed(seed) => object
                .data
                .split_at_checked(INFO_BYTES)
                .and_then(|(info, body)| aes::decrypt(&derive_key(seed, info)?, aad.as_bytes(), body)),
        };
        let plain = plain.ok_or_else(|| self.service_error("cipher: message authentication failed"))?;
        let mut current_key_id = self.key_id.read().clone();
        if current_key_id.is_none() {
            current_key_id = Some(self.current_state().await?.encrypted_seed.key_id);
        }
        Ok((
            plain,
            object.source_type == SOURCE_TYPE_SEED && current_key_id.as_deref() == Some(&object.key_id),
        ))
    }

    async fn data_key(&self, object: &EncryptedObject) -> Result<Arc<DataKey>, KmsError> {
        let id = object.seed_id();
        if let Some(data_key) = self.data_keys.read().get(&id) {
            return Ok(data_key.clone());
        }
        let request = DecryptRequest {
            ciphertext: object.source.clone(),
            uid: uid(),
            key_id: object.key_id.clone(),
            annotations: object.annotations.clone(),
        };
        let response: DecryptResponse = self.call("/v2.KeyManagementService/Decrypt", request).await?;
        let data_key = match object.source_type {
            SOURCE_TYPE_SEED if response.plaintext.len() >= SEED_BYTES => seed_key(&response.plaintext),
            0 => {
                let key = UnboundKey::new(&AES_256_GCM, &response.plaintext);
                DataKey::Key(Box::new(LessSafeKey::new(
                    key.map_err(|_| self.service_error("decrypted key has an invalid length"))?,
                )))
            }
            _ => return Err(self.service_error("decrypted seed is too short or has an unknown type")),
        };
        Ok(self.cache_data_key(id, data_key))
    }

    fn cache_data_key(&self, id: [u8; 32], data_key: DataKey) -> Arc<DataKey> {
        let data_key = Arc::new(data_key);
        let mut data_keys = self.data_keys.write();
        if data_keys.len() >= MAX_CACHED_DATA_KEYS {
            data_keys.clear();
        }
        data_keys.insert(id, data_key.clone());
        data_key
    }

    /// The state for encryption. Generates a new seed if the key of the service has changed. If the
    /// service fails, the old seed is used for up to [`MAX_STATUS_AGE`].
    async fn current_state(&self) -> Result<EnvelopeState, KmsError> {
        let mut state = self.state.lock().await;
        if let Some(state) = state.as_ref().filter(|state| state.last_check.elapsed() < STATUS_INTERVAL) {
            return Ok(state.clone());
        }
        match (self.refresh(state.as_ref()).await, &mut *state) {
            (Ok(new), old) => {
                *self.key_id.write() = Some(new.encrypted_seed.key_id.clone());
                Ok(old.insert(new).clone())
            }
            (Err(error), Some(old)) if old.last_status.elapsed() < MAX_STATUS_AGE => {
                tracing::warn!(%error, "KMS status check failed, using the current data key");
                old.last_check = Instant::now();
                Ok(old.clone())
            }
            (Err(error), _) => Err(error),
        }
    }

    async fn refresh(&self, old: Option<&EnvelopeState>) -> Result<EnvelopeState, KmsError> {
        let status: StatusResponse = self.call("/v2.KeyManagementService/Status", StatusRequest {}).await?;
        if status.healthz != "ok" {
            return Err(self.service_error(&format!("got unexpected healthz status: {}", status.healthz)));
        }
        if !matches!(status.version.as_str(), "v2" | "v2beta1") {
            return Err(self.service_error(&format!("expected KMSv2 API version v2, got {}", status.version)));
        }
        if status.key_id.is_empty() || status.key_id.len() > MAX_KEY_ID_BYTES {
            return Err(self.service_error("key_id in status is empty or too long"));
        }
        let now = Instant::now();
        if let Some(old) = old.filter(|old| old.encrypted_seed.key_id == status.key_id) {
            return Ok(EnvelopeState { last_status: now, last_check: now, ..old.clone() });
        }
        let mut plaintext = vec![0; SEED_BYTES];
        self.random.fill(&mut plaintext).map_err(|_| self.service_error("no random bytes available"))?;
        let request = EncryptRequest { plaintext: plaintext.clone(), uid: uid() };
        let encrypted_seed: EncryptResponse = self.call("/v2.KeyManagementService/Encrypt", request).await?;
        let size: usize = encrypted_seed.annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        if encrypted_seed.key_id.is_empty()
            || encrypted_seed.key_id.len() > MAX_KEY_ID_BYTES
            || encrypted_seed.ciphertext.is_empty()
            || encrypted_seed.ciphertext.len() > MAX_ENCRYPTED_SEED_BYTES
            || size > MAX_ANNOTATIONS_BYTES
        {
            return Err(self.service_error("encrypt response is empty or too long"));
        }
        let id = EncryptedObject::from_response(&encrypted_seed, SOURCE_TYPE_SEED).seed_id();
        let seed = self.cache_data_key(id, seed_key(&plaintext));
        Ok(EnvelopeState { seed, encrypted_seed, last_status: now, last_check: now })
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A, KmsError>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let response =
            grpc::unary(&self.channel, path, tonic::Request::new(request), MAX_MESSAGE_BYTES).await;
        response.map_err(|status| self.service_error(&format!("{}: {}", status.code(), status.message())))
    }

    fn service_error(&self, reason: &str) -> KmsError {
        KmsError::Service { name: self.name.clone(), reason: reason.to_owned() }
    }
}

fn seed_key(bytes: &[u8]) -> DataKey {
    DataKey::Seed(hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, bytes))
}

/// Derives the key of one value.
fn derive_key(seed: &hkdf::Prk, info: &[u8]) -> Option<LessSafeKey> {
    let info = [info];
    let key_bytes = seed.expand(&info, &AES_256_GCM).ok()?;
    Some(LessSafeKey::new(UnboundKey::from(key_bytes)))
}

fn uid() -> String {
    uuid::Uuid::new_v4().to_string()
}

impl EncryptedObject {
    fn from_response(encrypted_seed: &EncryptResponse, source_type: i32) -> EncryptedObject {
        let EncryptResponse { ciphertext, key_id, annotations } = encrypted_seed.clone();
        EncryptedObject { data: Vec::new(), key_id, source: ciphertext, annotations, source_type }
    }

    /// Identifies the seed of a value: a hash of everything except the data.
    fn seed_id(&self) -> [u8; 32] {
        let without_data = EncryptedObject { data: Vec::new(), ..self.clone() };
        let digest = digest::digest(&digest::SHA256, &without_data.encode_to_vec());
        digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
    }
}

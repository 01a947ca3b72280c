//! One lease for many keys of about the same lifetime: etcd takes a lease for each badly.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tonic::Status;

use super::client::Client;

/// A key may live longer than asked by a twentieth of its time, at most this many seconds.
const SHARE_SECONDS: u64 = 60;
const SHARE_FRACTION: u64 = 20;
/// etcd deletes all keys of a lease in one go, so there should not be too many.
const MAX_KEYS: u32 = 1000;

pub struct Leases {
    client: Client,
    shared: Mutex<Option<Shared>>,
}

struct Shared {
    id: i64,
    ttl: u64,
    until: Instant,
    keys: u32,
}

impl Leases {
    pub fn new(client: Client) -> Leases {
        Leases { client, shared: Mutex::new(None) }
    }

    /// A lease that lasts at least this long from now. Most keys with a lifetime have the same one, so only
    /// the last lease is kept for sharing.
    pub async fn get(&self, ttl: Duration) -> Result<i64, Status> {
        let ttl = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).max(1);
        let mut shared = self.shared.lock().await;
        if let Some(lease) = shared.as_mut()
            && lease.ttl == ttl
            && lease.keys < MAX_KEYS
            && Instant::now() < lease.until
        {
            lease.keys += 1;
            return Ok(lease.id);
        }
        let share = (ttl / SHARE_FRACTION).min(SHARE_SECONDS);
        let asked = Instant::now();
        let total = i64::try_from(ttl.saturating_add(share)).unwrap_or(i64::MAX);
        let id = self.client.grant(total).await?;
        *shared = Some(Shared { id, ttl, until: asked + Duration::from_secs(share), keys: 1 });
        Ok(id)
    }

    pub async fn forget(&self) {
        *self.shared.lock().await = None;
    }
}

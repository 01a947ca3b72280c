//! Shares a lease between keys with about the same TTL, because etcd handles one lease per key
//! poorly. Counterpart upstream: `storage/etcd3/lease_manager.go`.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tonic::Status;

use super::client::Client;

/// A key may live longer than requested by 1/20 of its TTL, at most this many seconds.
const MAX_LEASE_REUSE_SECONDS: u64 = 60;
const LEASE_REUSE_TTL_FRACTION: u64 = 20;
/// etcd deletes all keys of a lease in one transaction, so their number is limited.
const MAX_KEYS_PER_LEASE: u32 = 1000;

pub struct LeaseManager {
    client: Client,
    shared: Mutex<Option<SharedLease>>,
}

struct SharedLease {
    id: i64,
    ttl: u64,
    reuse_until: Instant,
    keys: u32,
}

impl LeaseManager {
    pub fn new(client: Client) -> LeaseManager {
        LeaseManager { client, shared: Mutex::new(None) }
    }

    /// Returns a lease with at least this TTL. Most keys with a TTL have the same one, so only the
    /// last lease is reused.
    pub async fn get(&self, ttl: Duration) -> Result<i64, Status> {
        let ttl = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).max(1);
        let mut shared = self.shared.lock().await;
        if let Some(lease) = shared.as_mut()
            && lease.ttl == ttl
            && lease.keys < MAX_KEYS_PER_LEASE
            && Instant::now() < lease.reuse_until
        {
            lease.keys += 1;
            return Ok(lease.id);
        }
        let reuse_seconds = (ttl / LEASE_REUSE_TTL_FRACTION).min(MAX_LEASE_REUSE_SECONDS);
        let started = Instant::now();
        let total_ttl = i64::try_from(ttl.saturating_add(reuse_seconds)).unwrap_or(i64::MAX);
        let id = self.client.grant(total_ttl).await?;
        *shared =
            Some(SharedLease { id, ttl, reuse_until: started + Duration::from_secs(reuse_seconds), keys: 1 });
        Ok(id)
    }

    pub async fn reset(&self) {
        *self.shared.lock().await = None;
    }
}

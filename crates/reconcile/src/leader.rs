//! Leader election with a Lease, like client-go's `leaderelection`.

use std::future::Future;
use std::time::Duration;

use client::{Client, Error, Key, Object as _};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::clock::Clock;

// Defaults of kube-controller-manager and kube-scheduler upstream.
const LEASE_DURATION: Duration = Duration::from_secs(15);
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// A candidate for a lease.
pub struct Election {
    pub client: Client,
    pub clock: Clock,
    /// Name of the Lease in kube-system, such as `kube-controller-manager`.
    pub lease: &'static str,
    /// Unique identity of this candidate.
    pub identity: String,
}

/// Waits for the lease, then runs `work` until `shutdown` or until the lease is lost. Returns whether it was
/// lost. On a regular end the lease is released, so that the next candidate need not wait for its expiry.
pub async fn lead(
    election: &Election,
    mut shutdown: watch::Receiver<bool>,
    work: impl Future<Output = ()>,
) -> bool {
    let key = Key::new("kube-system", election.lease);
    let mut observed_lease = ObservedLease::default();
    loop {
        match election.try_acquire_or_renew(&key, &mut observed_lease).await {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                lease = election.lease,
                "failed to acquire lease, retrying"
            ),
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_PERIOD) => {}
            _ = shutdown.wait_for(|stop| *stop) => return false,
        }
    }
    tracing::info!(lease = election.lease, identity = election.identity, "became leader");
    let lost = tokio::select! {
        () = election.renew(&key) => true,
        () = work => false,
        _ = shutdown.wait_for(|stop| *stop) => false,
    };
    if !lost && let Err(error) = election.release(&key).await {
        tracing::debug!(%error, "failed to release lease");
    }
    lost
}

/// Last observed revision of the lease and when it was observed. Local time only: clocks of other machines
/// may differ.
#[derive(Default)]
struct ObservedLease {
    revision: u64,
    since: Option<Instant>,
}

impl ObservedLease {
    /// Whether the holder has not renewed the lease for its whole duration.
    fn is_expired(&mut self, lease: &Lease, now: Instant) -> bool {
        if self.since.is_none() || self.revision != lease.revision() {
            (self.revision, self.since) = (lease.revision(), Some(now));
        }
        let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or(0);
        let lease_duration = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        self.since.is_some_and(|since| now >= since + lease_duration)
    }
}

impl Election {
    /// Tries once to acquire or renew the lease. Returns whether this candidate holds it.
    async fn try_acquire_or_renew(
        &self,
        key: &Key,
        observed_lease: &mut ObservedLease,
    ) -> Result<bool, Error> {
        let now = self.clock.now();
        let mut lease: Lease = match self.client.get(key).await {
            Ok(lease) => lease,
            Err(error) if error.is_not_found() => {
                let metadata = ObjectMeta {
                    name: Some(key.name.to_string()),
                    namespace: Some(key.namespace.to_string()),
                    ..ObjectMeta::default()
                };
                let lease = Lease { metadata, spec: Some(self.spec(None, now)) };
                return match self.client.create(&lease).await {
                    Err(error) if error.is_already_exists() => Ok(false),
                    other => other.map(|_| true),
                };
            }
            Err(error) => return Err(error),
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if !holder.is_empty() && holder != self.identity && !observed_lease.is_expired(&lease, Instant::now())
        {
            return Ok(false);
        }
        lease.spec = Some(self.spec(Some(&spec), now));
        match self.client.replace(&lease).await {
            Err(error) if error.is_conflict() => Ok(false),
            other => other.map(|_| true),
        }
    }

    fn spec(&self, before: Option<&LeaseSpec>, now: Timestamp) -> LeaseSpec {
        let is_holder = before.is_some_and(|spec| spec.holder_identity.as_deref() == Some(&self.identity));
        let transitions = before.and_then(|spec| spec.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(LEASE_DURATION.as_secs() as i32),
            acquire_time: before
                .filter(|_| is_holder)
                .map_or(Some(MicroTime(now)), |spec| spec.acquire_time.clone()),
            renew_time: Some(MicroTime(now)),
            lease_transitions: Some(if is_holder || before.is_none() {
                transitions
            } else {
                transitions + 1
            }),
            ..before.cloned().unwrap_or_default()
        }
    }

    /// Renews the lease periodically. Returns when it was not renewed within [`RENEW_DEADLINE`].
    async fn renew(&self, key: &Key) {
        let mut renewed = Instant::now();
        while renewed.elapsed() < RENEW_DEADLINE {
            tokio::time::sleep(RETRY_PERIOD).await;
            match tokio::time::timeout(
                RENEW_DEADLINE,
                self.try_acquire_or_renew(key, &mut ObservedLease::default()),
            )
            .await
            {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => tracing::warn!(lease = self.lease, "lease is held by another candidate"),
                Ok(Err(error)) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        lease = self.lease,
                        "failed to renew lease, retrying"
                    )
                }
                Err(_) => break,
            }
        }
        tracing::error!(lease = self.lease, "leader election lost");
    }

    async fn release(&self, key: &Key) -> Result<(), Error> {
        let mut lease: Lease = self.client.get(key).await?;
        let now = self.clock.now();
        if let Some(spec) = &mut lease.spec
            && spec.holder_identity.as_deref() == Some(&self.identity)
        {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            spec.renew_time = Some(MicroTime(now.checked_sub(SignedDuration::ZERO).unwrap_or(now)));
            self.client.replace(&lease).await?;
        }
        Ok(())
    }
}

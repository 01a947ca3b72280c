//! The runtime state of a priority level: requests start, wait without polling, and release their
//! seats.
//!
//! One lock per level, held only while `queue_set` decides and counts.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::dropped_requests_tracker::DroppedRequestsTracker;
use super::metrics::SchemaMetrics;
use super::queue_set::{
    QueueSet, QueueSlot, QueuingConfig, RunningRequest, StartDecision, StartedRequest, WorkEstimate,
};
use super::seat_allocation::{ConcurrencyLimits, ConcurrencyShares, SeatAllocation, SeatUsage};

pub struct PriorityLevel {
    pub name: String,
    clock: Instant,
    /// Notified when a request finds no seat, so that the controller reallocates seats.
    seat_contention: Arc<Notify>,
    state: Mutex<LevelState>,
}

type StartSender = oneshot::Sender<RunningRequest>;

pub struct LevelState {
    pub queues: QueueSet<StartSender>,
    pub schema_metrics: Vec<SchemaMetrics>,
    pub share: ConcurrencyShares,
    pub bounds: ConcurrencyLimits,
    pub usage: SeatUsage,
    pub grant: SeatAllocation,
    dropped_requests: DroppedRequestsTracker,
}

/// A request as its priority level sees it.
#[derive(Clone, Copy, Debug)]
pub struct LevelRequest {
    /// The index of the schema's metrics.
    pub metrics_index: usize,
    /// The hash of the request's flow.
    pub flow: u64,
    pub work: WorkEstimate,
    /// A watch takes seats only while it initializes.
    pub watch: bool,
    /// The number of watches that receive the change; `None` for reads.
    pub watchers: Option<usize>,
}

/// The seconds after which the client of a rejected request may retry.
#[derive(Debug, PartialEq, Eq)]
pub struct Rejection {
    pub retry_after: u64,
}

pub enum SeatDecision {
    Executing(SeatGuard),
    Queued(QueuedRequest),
    Rejected(Rejection),
}

/// Seats of an executing request, released on drop.
pub struct SeatGuard {
    level: Arc<PriorityLevel>,
    request: LevelRequest,
    running_request: Option<RunningRequest>,
}

/// A queued request, removed from its queue on drop.
pub struct QueuedRequest {
    level: Arc<PriorityLevel>,
    request: LevelRequest,
    slot: Option<QueueSlot>,
    since: u64,
    started: oneshot::Receiver<RunningRequest>,
}

const REASON_CONCURRENCY_LIMIT: usize = 0;
const REASON_QUEUE_FULL: usize = 1;
const REASON_TIMEOUT: usize = 2;

impl PriorityLevel {
    pub fn new(
        name: &str,
        clock: Instant,
        seat_contention: Arc<Notify>,
        share: ConcurrencyShares,
        shape: QueuingConfig,
    ) -> PriorityLevel {
        let now = clock.elapsed().as_nanos() as u64;
        let state = LevelState {
            queues: QueueSet::new(shape, 0, now),
            schema_metrics: Vec::new(),
            share,
            bounds: ConcurrencyLimits::default(),
            usage: SeatUsage::default(),
            grant: SeatAllocation::default(),
            dropped_requests: DroppedRequestsTracker::default(),
        };
        PriorityLevel { name: name.to_owned(), clock, seat_contention, state: Mutex::new(state) }
    }

    pub fn state(&self) -> MutexGuard<'_, LevelState> {
        self.state.lock()
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    /// The index of the metrics of a schema, added if it is new.
    pub fn metrics_index(&self, schema: &str) -> usize {
        let schema_metrics = &mut self.state.lock().schema_metrics;
        let found = schema_metrics.iter().position(|metrics| metrics.schema == schema);
        found.unwrap_or_else(|| {
            schema_metrics.push(SchemaMetrics::new(schema));
            schema_metrics.len() - 1
        })
    }

    /// Sets the number of seats. Queued requests that fit now are started.
    pub fn configure(&self, shape: QueuingConfig, seats: u64) {
        let mut state = self.state.lock();
        let mut started = Vec::new();
        state.queues.configure(shape, seats, self.now(), &mut started);
        state.notify_started(started);
    }

    /// Ends a measurement period of the seat demand.
    pub fn observe(&self) {
        let now = self.now();
        let mut state = self.state.lock();
        let results = state.queues.seat_integrator.reset(now);
        state.usage.update(results);
    }

    /// Discards the measured use of seats.
    pub fn reset_usage(&self) {
        let now = self.now();
        let mut state = self.state.lock();
        state.queues.seat_integrator.reset(now);
        state.usage = SeatUsage::default();
    }

    pub fn start_request(self: &Arc<PriorityLevel>, request: LevelRequest) -> SeatDecision {
        let now = self.now();
        let mut receiver = None;
        let ticket = || {
            let (sender, started) = oneshot::channel();
            receiver = Some(started);
            sender
        };
        let mut started = Vec::new();
        let mut state = self.state.lock();
        let decision = state.queues.start_request(now, request.flow, request.work, ticket, &mut started);
        let exempt = state.share.exempt;
        let metrics = &mut state.schema_metrics[request.metrics_index];
        metrics.estimated_seats.add(request.work.max_seats() as f64);
        if let Some(watchers) = request.watchers {
            metrics.watchers.add(watchers as f64);
        }
        match decision {
            StartDecision::Execute(running_request) => {
                metrics.record_start(request.work.max_seats());
                if !exempt {
                    metrics.wait_seconds[1].add(0.0);
                }
                drop(state);
                SeatDecision::Executing(SeatGuard {
                    level: self.clone(),
                    request,
                    running_request: Some(running_request),
                })
            }
            StartDecision::Enqueued(slot, length) => {
                metrics.queue_lengths.add(length as f64);
                metrics.waiting += 1;
                metrics.waiting_seats += request.work.max_seats();
                state.notify_started(started);
                drop(state);
                self.seat_contention.notify_one();
                let started = receiver.expect("a queued request has a start channel");
                SeatDecision::Queued(QueuedRequest {
                    level: self.clone(),
                    request,
                    slot: Some(slot),
                    since: now,
                    started,
                })
            }
            StartDecision::NoSeat => {
                SeatDecision::Rejected(self.reject(&mut state, &request, REASON_CONCURRENCY_LIMIT, 0.0))
            }
            StartDecision::QueueFull => {
                SeatDecision::Rejected(self.reject(&mut state, &request, REASON_QUEUE_FULL, 0.0))
            }
        }
    }

    fn reject(
        &self,
        state: &mut LevelState,
        request: &LevelRequest,
        reason: usize,
        wait_seconds: f64,
    ) -> Rejection {
        let metrics = &mut state.schema_metrics[request.metrics_index];
        metrics.rejected[reason] += 1;
        metrics.wait_seconds[0].add(wait_seconds);
        self.seat_contention.notify_one();
        Rejection {
            retry_after: state.dropped_requests.record_dropped_request(self.clock.elapsed().as_secs()),
        }
    }

    fn finish_request(self: &Arc<PriorityLevel>, request: &LevelRequest, running_request: RunningRequest) {
        let now = self.now();
        let mut started = Vec::new();
        let mut state = self.state.lock();
        let run_nanos = now.saturating_sub(running_request.started);
        let delayed = state.queues.finish(now, running_request, &mut started);
        let metrics = &mut state.schema_metrics[request.metrics_index];
        metrics.running -= 1;
        metrics.execution_seconds[usize::from(request.watch)].add(run_nanos as f64 * 1e-9);
        if delayed.is_none() {
            metrics.running_seats -= request.work.max_seats();
        }
        state.notify_started(started);
        drop(state);
        let Some(running_request) = delayed else { return };
        let (level, metrics) = (self.clone(), request.metrics_index);
        // Final seats stay in use for the additional latency after the response, as upstream.
        let release = move || {
            let mut started = Vec::new();
            let mut state = level.state.lock();
            state.schema_metrics[metrics].running_seats -= running_request.work.max_seats();
            state.queues.release(level.now(), running_request, &mut started);
            state.notify_started(started);
        };
        let linger = Duration::from_nanos(request.work.additional_latency);
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(async move {
                tokio::time::sleep(linger).await;
                release();
            })),
            Err(_) => release(),
        }
    }
}

impl LevelState {
    /// Starts queued requests. The sender fires under the level's lock, so that a request that
    /// gives up is either still in its queue or finds the message in its channel.
    fn notify_started(&mut self, started: Vec<StartedRequest<StartSender>>) {
        for StartedRequest { ticket, request: place } in started {
            // The receiver is dropped only after its request has left the queue.
            let _ = ticket.send(place);
        }
    }
}

impl SchemaMetrics {
    fn record_start(&mut self, width: u64) {
        self.started_total += 1;
        self.running += 1;
        self.running_seats += width;
    }
}

impl QueuedRequest {
    /// Waits for a seat, at most until `deadline`.
    pub async fn wait_until(mut self, deadline: Instant) -> Result<SeatGuard, Rejection> {
        let started = tokio::time::timeout_at(deadline, &mut self.started).await;
        let Some(slot) = self.slot.take() else { return Err(Rejection { retry_after: 1 }) };
        self.finish_wait(slot, started.ok().and_then(Result::ok))
    }

    /// The seats of the started request, or a rejection. Resolves the race between start and
    /// timeout under the lock.
    fn finish_wait(
        &mut self,
        slot: QueueSlot,
        started_request: Option<RunningRequest>,
    ) -> Result<SeatGuard, Rejection> {
        let now = self.level.now();
        let mut state = self.level.state.lock();
        let running_request = started_request.or_else(|| match state.queues.cancel(now, slot) {
            Some(_) => None,
            // The request was started just before it was canceled.
            None => self.started.try_recv().ok(),
        });
        let wait_seconds = now.saturating_sub(self.since) as f64 * 1e-9;
        let width = self.request.work.max_seats();
        let metrics = &mut state.schema_metrics[self.request.metrics_index];
        metrics.waiting -= 1;
        metrics.waiting_seats -= width;
        if running_request.is_none() {
            return Err(self.level.reject(&mut state, &self.request, REASON_TIMEOUT, wait_seconds));
        }
        metrics.record_start(width);
        metrics.wait_seconds[1].add(wait_seconds);
        Ok(SeatGuard { level: self.level.clone(), request: self.request, running_request })
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            // The client is gone. Seats that were assigned in the meantime are released.
            drop(self.finish_wait(slot, None));
        }
    }
}

impl Drop for SeatGuard {
    fn drop(&mut self) {
        if let Some(running_request) = self.running_request.take() {
            self.level.finish_request(&self.request, running_request);
        }
    }
}

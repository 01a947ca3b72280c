//! Fair queuing for one priority level. Pure state: time is an argument, in nanoseconds.
//!
//! Shuffle sharding deals each flow a small hand of queues, of which it joins the one with the
//! least work waiting, so that two flows seldom share all of their queues. Queues are served by
//! virtual time: it advances at the rate of the level's seats in use divided by the number of
//! active queues. Each queue remembers the virtual time at which its next request would start, and
//! the request that would finish first is dispatched first. The service time of a request is
//! estimated when it starts and corrected when it finishes.
//!
//! A queue exists only while requests wait in it or execute from it; idle queues have no state.
//!
//! Upstream: `flowcontrol/fairqueuing/queueset`.

use std::collections::VecDeque;

use super::integrator::Integrator;

/// The service time that is assumed for a request until it finishes.
const ESTIMATED_SERVICE_NANOS: u64 = 3_000_000;

/// One of this many seats is reserved for requests of a single seat.
const SINGLE_SEAT_RESERVE_DIVISOR: u64 = 8;

/// How requests that cannot execute at once are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuingConfig {
    /// No limit: every request executes and is only counted.
    Exempt,
    /// No queues: a request without a free seat is rejected.
    Reject,
    /// One of `queues` queues, chosen from a hand of `hand_size` of them, with at most
    /// `queue_length_limit` requests each.
    Queue { queues: u64, hand_size: usize, queue_length_limit: usize },
}

/// The seats that a request takes. Upstream: `WorkEstimate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkEstimate {
    /// While it executes.
    pub initial_seats: u64,
    /// After it finishes, for `additional_latency` nanoseconds: the server still has to send watch
    /// events.
    pub final_seats: u64,
    pub additional_latency: u64,
}

/// The seats of an executing request, to be returned with [`QueueSet::finish`].
#[derive(Debug)]
pub struct RunningRequest {
    /// The index of the queue it came from.
    queue: Option<u64>,
    pub work: WorkEstimate,
    pub started: u64,
}

/// Identifies a queued request for [`QueueSet::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSlot {
    queue: u64,
    id: u64,
}

/// The decision about a new request.
#[derive(Debug)]
pub enum StartDecision {
    Execute(RunningRequest),
    /// The ticket is returned in a [`StartedRequest`]. Second: the length of the queue, including
    /// this request.
    Enqueued(QueueSlot, usize),
    /// There is no free seat, and the level has no queues.
    NoSeat,
    /// There is no free seat, and the queue is full.
    QueueFull,
}

/// A queued request that starts to execute.
#[derive(Debug)]
pub struct StartedRequest<T> {
    pub ticket: T,
    pub request: RunningRequest,
}

pub struct QueueSet<T> {
    config: QueuingConfig,
    /// The concurrency limit in seats.
    limit: u64,
    /// The active queues, sorted by number.
    queues: Vec<Queue<T>>,
    /// The virtual time, in seats × nanoseconds per queue.
    virtual_time: i128,
    last_sync: u64,
    /// The queue that was dispatched from last.
    last_queue: u64,
    request_count: usize,
    last_id: u64,
    pub seat_integrator: Integrator,
    pub counts: QueueSetCounts,
}

/// The counts of waiting and executing requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSetCounts {
    pub waiting: u64,
    pub waiting_seats: u64,
    pub running: u64,
    /// Includes requests in their additional latency.
    pub running_seats: u64,
    /// The part of `running_seats` that belongs to requests of a single seat.
    single_seat: u64,
    /// How often a dispatch attempt found too few free seats.
    pub failed_dispatch_count: u64,
}

struct Queue<T> {
    number: u64,
    waiting: VecDeque<Waiter<T>>,
    /// The total work of the queued requests.
    work: u128,
    running: u64,
    /// The virtual time at which the next request starts.
    next_dispatch: i128,
}

struct Waiter<T> {
    id: u64,
    ticket: T,
    work: WorkEstimate,
    /// The virtual time of the enqueue.
    enqueued_at: i128,
}

impl WorkEstimate {
    pub fn with_seats(seats: u64) -> WorkEstimate {
        WorkEstimate { initial_seats: seats, final_seats: 0, additional_latency: 0 }
    }

    /// The most seats that are in use at any time.
    pub fn max_seats(&self) -> u64 {
        self.initial_seats.max(self.final_seats)
    }

    fn total_work(&self) -> u128 {
        u128::from(self.initial_seats) * u128::from(ESTIMATED_SERVICE_NANOS)
            + u128::from(self.final_seats) * u128::from(self.additional_latency)
    }
}

impl<T> Queue<T> {
    /// A request cannot start before it was enqueued: an idle queue saves up no share.
    fn bound_next_dispatch(&mut self) {
        if let Some(oldest) = self.waiting.front() {
            self.next_dispatch = self.next_dispatch.max(oldest.enqueued_at);
        }
    }

    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }
}

impl<T> QueueSet<T> {
    pub fn new(config: QueuingConfig, limit: u64, now: u64) -> QueueSet<T> {
        QueueSet {
            config,
            limit,
            queues: Vec::new(),
            virtual_time: 0,
            last_sync: now,
            last_queue: 0,
            request_count: 0,
            last_id: 0,
            seat_integrator: Integrator::new(now),
            counts: QueueSetCounts::default(),
        }
    }

    /// Sets the concurrency limit and the queuing configuration. More seats may start queued
    /// requests.
    pub fn configure(
        &mut self,
        config: QueuingConfig,
        limit: u64,
        now: u64,
        started: &mut Vec<StartedRequest<T>>,
    ) {
        self.sync(now);
        (self.config, self.limit) = (config, limit);
        self.dispatch(now, started);
        self.update_integrator(now);
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn config(&self) -> QueuingConfig {
        self.config
    }

    /// A request of the flow with this hash arrives. `ticket` is called if the request is queued.
    pub fn start_request(
        &mut self,
        now: u64,
        flow: u64,
        work: WorkEstimate,
        ticket: impl FnOnce() -> T,
        started: &mut Vec<StartedRequest<T>>,
    ) -> StartDecision {
        self.sync(now);
        let decision = match self.config {
            QueuingConfig::Exempt => self.run(now, None, work),
            QueuingConfig::Reject if self.fits(work.max_seats()) => self.run(now, None, work),
            QueuingConfig::Reject => return StartDecision::NoSeat,
            QueuingConfig::Queue { queues, hand_size: hand, queue_length_limit } => {
                let number = self.shuffle_shard(queues, hand, flow);
                let free = self.counts.running_seats < self.limit;
                if self.counts.waiting == 0 && free && self.fits(work.max_seats()) {
                    self.run(now, Some(number), work)
                } else {
                    let at = self.ensure_queue(number);
                    if !free && self.queues[at].waiting.len() >= queue_length_limit {
                        self.remove_if_idle(at);
                        return StartDecision::QueueFull;
                    }
                    let slot = self.enqueue(at, work, ticket());
                    let ahead = self.queues[at].waiting.len();
                    self.dispatch(now, started);
                    StartDecision::Enqueued(slot, ahead)
                }
            }
        };
        self.update_integrator(now);
        decision
    }

    /// An executing request finishes. If a request is returned, the caller passes it to
    /// [`QueueSet::release`] after the request's `additional_latency`.
    pub fn finish(
        &mut self,
        now: u64,
        request: RunningRequest,
        started: &mut Vec<StartedRequest<T>>,
    ) -> Option<RunningRequest> {
        self.sync(now);
        self.counts.running -= 1;
        if let Some(at) = request.queue.and_then(|number| self.queue_index(number).ok()) {
            let queue = &mut self.queues[at];
            queue.running -= 1;
            let elapsed = i128::from(now.saturating_sub(request.started));
            // Replaces the estimated service time, which was added at the start, with the actual
            // one.
            queue.next_dispatch -=
                i128::from(request.work.initial_seats) * (i128::from(ESTIMATED_SERVICE_NANOS) - elapsed);
            queue.bound_next_dispatch();
            self.remove_if_idle(at);
        }
        if request.work.additional_latency == 0 {
            self.release_seats(now, request.work, started);
            return None;
        }
        self.dispatch(now, started);
        self.update_integrator(now);
        Some(request)
    }

    /// Releases the final seats of a request after its additional latency.
    pub fn release(&mut self, now: u64, request: RunningRequest, started: &mut Vec<StartedRequest<T>>) {
        self.sync(now);
        self.release_seats(now, request.work, started);
    }

    /// Removes a queued request; `None` if it has already started.
    pub fn cancel(&mut self, now: u64, slot: QueueSlot) -> Option<T> {
        self.sync(now);
        let at = self.queue_index(slot.queue).ok()?;
        let queue = &mut self.queues[at];
        let i = queue.waiting.iter().position(|waiter| waiter.id == slot.id)?;
        let waiter = queue.waiting.remove(i)?;
        queue.work -= waiter.work.total_work();
        queue.bound_next_dispatch();
        self.counts.waiting -= 1;
        self.counts.waiting_seats -= waiter.work.max_seats();
        self.remove_if_idle(at);
        self.update_integrator(now);
        Some(waiter.ticket)
    }

    /// Advances virtual time by the state since the last sync.
    fn sync(&mut self, now: u64) {
        let passed = now.saturating_sub(self.last_sync);
        self.last_sync = self.last_sync.max(now);
        if !self.queues.is_empty() {
            // By the seats in use: seats that stay idle beside a large request advance no queue.
            let used = self.counts.running_seats.min(self.limit);
            let advance = u128::from(passed) * u128::from(used) / self.queues.len() as u128;
            self.virtual_time += advance as i128;
        }
    }

    fn update_integrator(&mut self, now: u64) {
        self.seat_integrator.set(now, self.counts.running_seats + self.counts.waiting_seats);
    }

    fn fits(&self, max_seats: u64) -> bool {
        if max_seats <= 1 {
            return self.counts.running_seats + max_seats <= self.limit;
        }
        let shared = self.limit - self.reserved_seats();
        if max_seats > shared {
            // It would never fit, so it executes when nothing else does.
            return self.counts.running == 0;
        }
        self.counts.running_seats - self.counts.single_seat.min(self.reserved_seats()) + max_seats <= shared
    }

    /// Seats for requests of a single seat only: larger requests take long, and a short request
    /// must not wait for one of them to finish.
    fn reserved_seats(&self) -> u64 {
        self.limit / SINGLE_SEAT_RESERVE_DIVISOR
    }

    /// The queue of the flow's hand with the least work waiting.
    fn shuffle_shard(&mut self, queues: u64, hand_size: usize, flow: u64) -> u64 {
        let hand_size =
            hand_size.clamp(1, MAX_HAND_SIZE).min(queues.min(MAX_HAND_SIZE as u64) as usize).max(1);
        // Rotate the start of the hand, so that flows with overlapping hands do not prefer the same
        // queue.
        let first = self.request_count % hand_size;
        self.request_count = self.request_count.wrapping_add(1);
        if self.counts.waiting == 0 {
            // All queues are empty: the rest of the hand need not be compared.
            return shuffle_shard_hand(queues, first + 1, flow)[first];
        }
        let hand_queues = shuffle_shard_hand(queues, hand_size, flow);
        let waiting = |number: u64| self.queue_index(number).map_or(0, |at| self.queues[at].work);
        let around = (0..hand_size).map(|i| hand_queues[(first + i) % hand_size]);
        around.min_by_key(|number| waiting(*number)).unwrap_or(0)
    }

    fn queue_index(&self, number: u64) -> Result<usize, usize> {
        self.queues.binary_search_by_key(&number, |queue| queue.number)
    }

    /// The index of a queue, which is created if it is idle.
    fn ensure_queue(&mut self, number: u64) -> usize {
        self.queue_index(number).unwrap_or_else(|at| {
            let new = Queue {
                number,
                waiting: VecDeque::new(),
                work: 0,
                running: 0,
                next_dispatch: self.virtual_time,
            };
            self.queues.insert(at, new);
            at
        })
    }

    fn remove_if_idle(&mut self, at: usize) {
        if self.queues[at].is_idle() {
            self.queues.remove(at);
        }
    }

    fn run(&mut self, now: u64, number: Option<u64>, work: WorkEstimate) -> StartDecision {
        if let Some(number) = number {
            let at = self.ensure_queue(number);
            self.record_start(at, &work);
        }
        self.acquire_seats(work.max_seats());
        StartDecision::Execute(RunningRequest { queue: number, work, started: now })
    }

    fn record_start(&mut self, at: usize, work: &WorkEstimate) {
        let queue = &mut self.queues[at];
        queue.running += 1;
        queue.next_dispatch += work.total_work() as i128;
        queue.bound_next_dispatch();
    }

    fn enqueue(&mut self, at: usize, work: WorkEstimate, ticket: T) -> QueueSlot {
        self.last_id += 1;
        let (id, enqueued_at) = (self.last_id, self.virtual_time);
        let queue = &mut self.queues[at];
        queue.work += work.total_work();
        queue.waiting.push_back(Waiter { id, ticket, work, enqueued_at });
        queue.bound_next_dispatch();
        self.counts.waiting += 1;
        self.counts.waiting_seats += work.max_seats();
        QueueSlot { queue: queue.number, id }
    }

    fn release_seats(&mut self, now: u64, work: WorkEstimate, started: &mut Vec<StartedRequest<T>>) {
        self.counts.running_seats -= work.max_seats();
        self.counts.single_seat -= u64::from(work.max_seats() == 1);
        self.dispatch(now, started);
        self.update_integrator(now);
    }

    /// Starts queued requests while seats are free.
    fn dispatch(&mut self, now: u64, started: &mut Vec<StartedRequest<T>>) {
        while self.counts.waiting > 0 && self.counts.running_seats < self.limit {
            let mut next = self.select_queue(u64::MAX);
            if next.is_some_and(|at| !self.fits(self.head_seats(at))) {
                self.counts.failed_dispatch_count += 1;
                // The head request needs too many seats. Requests of a single seat may still use
                // the reserved ones.
                let use_reserved = self.counts.single_seat < self.reserved_seats() && self.fits(1);
                next = if use_reserved { self.select_queue(1) } else { None };
            }
            let Some(at) = next else { return };
            let queue = &mut self.queues[at];
            let Some(waiter) = queue.waiting.pop_front() else { return };
            let (number, work) = (queue.number, waiter.work);
            queue.work -= work.total_work();
            self.last_queue = number;
            self.record_start(at, &work);
            self.counts.waiting -= 1;
            self.counts.waiting_seats -= work.max_seats();
            self.acquire_seats(work.max_seats());
            let request = RunningRequest { queue: Some(number), work, started: now };
            started.push(StartedRequest { ticket: waiter.ticket, request });
        }
    }

    fn acquire_seats(&mut self, max_seats: u64) {
        self.counts.running += 1;
        self.counts.running_seats += max_seats;
        self.counts.single_seat += u64::from(max_seats == 1);
    }

    fn head_seats(&self, at: usize) -> u64 {
        self.queues[at].waiting.front().map_or(0, |head| head.work.max_seats())
    }

    /// The queue whose head request would finish first in virtual time, among heads of at most this
    /// many seats. Ties go to the first queue after the one that was dispatched from last.
    fn select_queue(&self, max_seats: u64) -> Option<usize> {
        let after = self.queues.partition_point(|queue| queue.number <= self.last_queue);
        let around = (after..self.queues.len()).chain(0..after);
        let ends = around.filter_map(|at| {
            let queue = &self.queues[at];
            let head = queue.waiting.front().filter(|head| head.work.max_seats() <= max_seats)?;
            Some((queue.next_dispatch + head.work.total_work() as i128, at))
        });
        ends.min_by_key(|(end, _)| *end).map(|(_, at)| at)
    }
}

/// The largest hand size that validation of PriorityLevelConfigurations allows.
const MAX_HAND_SIZE: usize = 15;

/// Deals a hand of distinct queues by a hash, never more queues than exist. Upstream:
/// `shufflesharding.Dealer`.
fn shuffle_shard_hand(queue_count: u64, hand_size: usize, hash: u64) -> [u64; MAX_HAND_SIZE] {
    let mut hand_queues = [0; MAX_HAND_SIZE];
    let mut sorted = [0; MAX_HAND_SIZE];
    let mut hash = hash;
    for (i, target) in hand_queues.iter_mut().enumerate().take(hand_size) {
        let left = (queue_count - i as u64).max(1);
        // Counts only the queues that are not dealt yet.
        let mut index = hash % left;
        hash /= left;
        let mut at = 0;
        while at < i && index >= sorted[at] {
            index += 1;
            at += 1;
        }
        sorted.copy_within(at..i, at + 1);
        sorted[at] = index;
        *target = index;
    }
    hand_queues
}

#[cfg(test)]
mod tests;

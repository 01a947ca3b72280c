//! Who runs next at one priority level: fair queuing, decided purely. Time is an argument, in nanoseconds.
//!
//! Each flow is dealt a small hand of queues and joins the one with the least work waiting, so that two
//! flows seldom share all of theirs. Queues take turns by virtual time: a meter advances as fast as the
//! level's seats divided by the queues in use, each queue remembers where on that meter its next request
//! would start, and the request that would end first goes first. A request's length is guessed when it
//! starts and put right when it ends.
//!
//! A queue exists only while somebody waits in it or runs from it: an idle one remembers nothing.

use std::collections::VecDeque;

use super::integrator::Integrator;

/// What a request is assumed to take until it has ended.
const ESTIMATED_SERVICE_NANOS: u64 = 3_000_000;

/// One seat in so many is not for requests of several seats.
const SINGLE_SEAT_RESERVE_DIVISOR: u64 = 8;

/// How the requests that do not run wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuingConfig {
    /// Nobody waits, everybody runs; only counted.
    Exempt,
    /// Nobody waits: who finds no seat is refused.
    Reject,
    /// In one of `queues`, chosen from a hand of `hand` of them, at most `length` in each.
    Queue { queues: u64, hand_size: usize, queue_length_limit: usize },
}

/// How much room a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkEstimate {
    /// While it runs.
    pub initial_seats: u64,
    /// Afterwards, for `linger` nanoseconds: the server still has to tell watchers.
    pub final_seats: u64,
    pub additional_latency: u64,
}

/// A running request's place, to be handed back with [`QueueSet::finish`].
#[derive(Debug)]
pub struct RunningRequest {
    /// The number of the queue it came from.
    queue: Option<u64>,
    pub work: WorkEstimate,
    pub started: u64,
}

/// A waiting request's place, to leave it with [`QueueSet::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSlot {
    queue: u64,
    id: u64,
}

/// What became of a new request.
#[derive(Debug)]
pub enum StartDecision {
    Execute(RunningRequest),
    /// Its ticket comes back in a [`Started`]; how many wait in the queue, this one included.
    Enqueued(QueueSlot, usize),
    /// There is no seat, and no queue to wait in.
    NoSeat,
    /// There is no room in the queue either.
    QueueFull,
}

/// A request that waited may now run.
#[derive(Debug)]
pub struct StartedRequest<T> {
    pub ticket: T,
    pub request: RunningRequest,
}

pub struct QueueSet<T> {
    config: QueuingConfig,
    /// How many seats may be taken at once.
    limit: u64,
    /// Those in use, by number.
    queues: Vec<Queue<T>>,
    /// The meter of virtual time, in seats × nanoseconds for each queue.
    virtual_time: i128,
    last_sync: u64,
    /// The queue that had the last turn.
    last_queue: u64,
    request_count: usize,
    last_id: u64,
    pub seat_integrator: Integrator,
    pub counts: QueueSetCounts,
}

/// What a level is busy with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSetCounts {
    pub waiting: u64,
    pub waiting_seats: u64,
    pub running: u64,
    /// Lingering ones included.
    pub running_seats: u64,
    /// Those of them that are taken one by one.
    single_seat: u64,
    /// How often the next in turn found too few seats.
    pub failed_dispatch_count: u64,
}

struct Queue<T> {
    number: u64,
    waiting: VecDeque<Waiter<T>>,
    /// The work of all who wait here.
    work: u128,
    running: u64,
    /// Where on the meter the next request starts.
    next_dispatch: i128,
}

struct Waiter<T> {
    id: u64,
    ticket: T,
    work: WorkEstimate,
    /// Where the meter was.
    enqueued_at: i128,
}

impl WorkEstimate {
    pub fn with_seats(seats: u64) -> WorkEstimate {
        WorkEstimate { initial_seats: seats, final_seats: 0, additional_latency: 0 }
    }

    /// The seats taken from beginning to end.
    pub fn max_seats(&self) -> u64 {
        self.initial_seats.max(self.final_seats)
    }

    fn total_work(&self) -> u128 {
        u128::from(self.initial_seats) * u128::from(ESTIMATED_SERVICE_NANOS)
            + u128::from(self.final_seats) * u128::from(self.additional_latency)
    }
}

impl<T> Queue<T> {
    /// Nothing starts before it has arrived: a queue that used less than its share does not save it up.
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

    /// Sets how many may run and how the others wait; more seats may let some of them start.
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

    /// A request of the flow with this hash comes; `ticket` is called if it has to wait.
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

    /// A running request has ended. What is returned is to be handed to [`QueueSet::release`] once the
    /// request's `linger` is over.
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

    /// The seats of a request that lingered are free.
    pub fn release(&mut self, now: u64, request: RunningRequest, started: &mut Vec<StartedRequest<T>>) {
        self.sync(now);
        self.release_seats(now, request.work, started);
    }

    /// A waiting request goes away; `None` if it has already started.
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

    /// Moves the meter on, as of the state until now.
    fn sync(&mut self, now: u64) {
        let passed = now.saturating_sub(self.last_sync);
        self.last_sync = self.last_sync.max(now);
        if !self.queues.is_empty() {
            // By the seats in use: what does not fit beside a wide request is nobody's.
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
            // It would never fit, so it runs alone.
            return self.counts.running == 0;
        }
        self.counts.running_seats - self.counts.single_seat.min(self.reserved_seats()) + max_seats <= shared
    }

    /// Seats that are for requests of one seat only: those of several are long, and nobody quick should have
    /// to wait until one of them ends.
    fn reserved_seats(&self) -> u64 {
        self.limit / SINGLE_SEAT_RESERVE_DIVISOR
    }

    /// The queue of the flow's hand with the least work waiting.
    fn shuffle_shard(&mut self, queues: u64, hand_size: usize, flow: u64) -> u64 {
        let hand_size =
            hand_size.clamp(1, MAX_HAND_SIZE).min(queues.min(MAX_HAND_SIZE as u64) as usize).max(1);
        // Start somewhere else each time, so that flows whose hands overlap do not all lean the same way.
        let first = self.request_count % hand_size;
        self.request_count = self.request_count.wrapping_add(1);
        if self.counts.waiting == 0 {
            // All are as good: no need to look at the rest of the hand.
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

    /// The index of a queue, made if it is idle.
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

    /// Starts as many as there are seats for.
    fn dispatch(&mut self, now: u64, started: &mut Vec<StartedRequest<T>>) {
        while self.counts.waiting > 0 && self.counts.running_seats < self.limit {
            let mut next = self.select_queue(u64::MAX);
            if next.is_some_and(|at| !self.fits(self.head_seats(at))) {
                self.counts.failed_dispatch_count += 1;
                // Whoever waits for many seats does not wait for the spared ones.
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

    /// The queue whose first request would end first, of those at most so wide; of equals, the one after the
    /// last that had a turn.
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

/// The largest hand there can be, by the rules of PriorityLevelConfigurations.
const MAX_HAND_SIZE: usize = 15;

/// Deals `hand` different cards of a deck, chosen by `hash`; never more than there are.
fn shuffle_shard_hand(queue_count: u64, hand_size: usize, hash: u64) -> [u64; MAX_HAND_SIZE] {
    let mut hand_queues = [0; MAX_HAND_SIZE];
    let mut sorted = [0; MAX_HAND_SIZE];
    let mut hash = hash;
    for (i, target) in hand_queues.iter_mut().enumerate().take(hand_size) {
        let left = (queue_count - i as u64).max(1);
        // Counted among those not yet dealt.
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

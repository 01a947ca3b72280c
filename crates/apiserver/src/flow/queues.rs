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

use super::demand::Demand;

/// What a request is assumed to take until it has ended.
const GUESS: u64 = 3_000_000;

/// One seat in so many is not for requests of several seats.
const SPARED: u64 = 8;

/// How the requests that do not run wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Nobody waits, everybody runs; only counted.
    Exempt,
    /// Nobody waits: who finds no seat is refused.
    Reject,
    /// In one of `queues`, chosen from a hand of `hand` of them, at most `length` in each.
    Queue { queues: u64, hand: usize, length: usize },
}

/// How much room a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// While it runs.
    pub seats: u64,
    /// Afterwards, for `linger` nanoseconds: the server still has to tell watchers.
    pub last_seats: u64,
    pub linger: u64,
}

/// A running request's place, to be handed back with [`QueueSet::finish`].
#[derive(Debug)]
pub struct Place {
    /// The number of the queue it came from.
    queue: Option<u64>,
    pub work: Work,
    pub started: u64,
}

/// A waiting request's place, to leave it with [`QueueSet::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    queue: u64,
    id: u64,
}

/// What became of a new request.
#[derive(Debug)]
pub enum Arrival {
    Run(Place),
    /// Its ticket comes back in a [`Started`]; how many wait in the queue, this one included.
    Wait(Spot, usize),
    /// There is no seat, and no queue to wait in.
    NoSeat,
    /// There is no room in the queue either.
    QueueFull,
}

/// A request that waited may now run.
#[derive(Debug)]
pub struct Started<T> {
    pub ticket: T,
    pub place: Place,
}

pub struct QueueSet<T> {
    shape: Shape,
    /// How many seats may be taken at once.
    limit: u64,
    /// Those in use, by number.
    queues: Vec<Queue<T>>,
    /// The meter of virtual time, in seats × nanoseconds for each queue.
    meter: i128,
    synced: u64,
    /// The queue that had the last turn.
    turn: u64,
    arrivals: usize,
    ids: u64,
    pub demand: Demand,
    pub totals: Totals,
}

/// What a level is busy with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub waiting: u64,
    pub waiting_seats: u64,
    pub running: u64,
    /// Lingering ones included.
    pub running_seats: u64,
    /// Those of them that are taken one by one.
    narrow: u64,
    /// How often the next in turn found too few seats.
    pub no_room: u64,
}

struct Queue<T> {
    number: u64,
    waiting: VecDeque<Waiter<T>>,
    /// The work of all who wait here.
    work: u128,
    running: u64,
    /// Where on the meter the next request starts.
    next: i128,
}

struct Waiter<T> {
    id: u64,
    ticket: T,
    work: Work,
    /// Where the meter was.
    arrived: i128,
}

impl Work {
    pub fn of(seats: u64) -> Work {
        Work { seats, last_seats: 0, linger: 0 }
    }

    /// The seats taken from beginning to end.
    pub fn width(&self) -> u64 {
        self.seats.max(self.last_seats)
    }

    fn total(&self) -> u128 {
        u128::from(self.seats) * u128::from(GUESS) + u128::from(self.last_seats) * u128::from(self.linger)
    }
}

impl<T> Queue<T> {
    /// Nothing starts before it has arrived: a queue that used less than its share does not save it up.
    fn bound(&mut self) {
        if let Some(oldest) = self.waiting.front() {
            self.next = self.next.max(oldest.arrived);
        }
    }

    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }
}

impl<T> QueueSet<T> {
    pub fn new(shape: Shape, limit: u64, now: u64) -> QueueSet<T> {
        QueueSet {
            shape,
            limit,
            queues: Vec::new(),
            meter: 0,
            synced: now,
            turn: 0,
            arrivals: 0,
            ids: 0,
            demand: Demand::new(now),
            totals: Totals::default(),
        }
    }

    /// Sets how many may run and how the others wait; more seats may let some of them start.
    pub fn reshape(&mut self, shape: Shape, limit: u64, now: u64, started: &mut Vec<Started<T>>) {
        self.sync(now);
        (self.shape, self.limit) = (shape, limit);
        self.dispatch(now, started);
        self.note(now);
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// A request of the flow with this hash comes; `ticket` is called if it has to wait.
    pub fn arrive(
        &mut self,
        now: u64,
        flow: u64,
        work: Work,
        ticket: impl FnOnce() -> T,
        started: &mut Vec<Started<T>>,
    ) -> Arrival {
        self.sync(now);
        let arrival = match self.shape {
            Shape::Exempt => self.run(now, None, work),
            Shape::Reject if self.fits(work.width()) => self.run(now, None, work),
            Shape::Reject => return Arrival::NoSeat,
            Shape::Queue { queues, hand, length } => {
                let number = self.choose(queues, hand, flow);
                let free = self.totals.running_seats < self.limit;
                if self.totals.waiting == 0 && free && self.fits(work.width()) {
                    self.run(now, Some(number), work)
                } else {
                    let at = self.queue(number);
                    if !free && self.queues[at].waiting.len() >= length {
                        self.forget(at);
                        return Arrival::QueueFull;
                    }
                    let spot = self.wait(at, work, ticket());
                    let ahead = self.queues[at].waiting.len();
                    self.dispatch(now, started);
                    Arrival::Wait(spot, ahead)
                }
            }
        };
        self.note(now);
        arrival
    }

    /// A running request has ended. What is returned is to be handed to [`QueueSet::release`] once the
    /// request's `linger` is over.
    pub fn finish(&mut self, now: u64, place: Place, started: &mut Vec<Started<T>>) -> Option<Place> {
        self.sync(now);
        self.totals.running -= 1;
        if let Some(at) = place.queue.and_then(|number| self.find(number).ok()) {
            let queue = &mut self.queues[at];
            queue.running -= 1;
            let took = i128::from(now.saturating_sub(place.started));
            queue.next -= i128::from(place.work.seats) * (i128::from(GUESS) - took);
            queue.bound();
            self.forget(at);
        }
        if place.work.linger == 0 {
            self.give_back(now, place.work, started);
            return None;
        }
        self.dispatch(now, started);
        self.note(now);
        Some(place)
    }

    /// The seats of a request that lingered are free.
    pub fn release(&mut self, now: u64, place: Place, started: &mut Vec<Started<T>>) {
        self.sync(now);
        self.give_back(now, place.work, started);
    }

    /// A waiting request goes away; `None` if it has already started.
    pub fn cancel(&mut self, now: u64, spot: Spot) -> Option<T> {
        self.sync(now);
        let at = self.find(spot.queue).ok()?;
        let queue = &mut self.queues[at];
        let i = queue.waiting.iter().position(|waiter| waiter.id == spot.id)?;
        let waiter = queue.waiting.remove(i)?;
        queue.work -= waiter.work.total();
        queue.bound();
        self.totals.waiting -= 1;
        self.totals.waiting_seats -= waiter.work.width();
        self.forget(at);
        self.note(now);
        Some(waiter.ticket)
    }

    /// Moves the meter on, as of the state until now.
    fn sync(&mut self, now: u64) {
        let passed = now.saturating_sub(self.synced);
        self.synced = self.synced.max(now);
        if !self.queues.is_empty() {
            // By the seats in use: what does not fit beside a wide request is nobody's.
            let used = self.totals.running_seats.min(self.limit);
            let advance = u128::from(passed) * u128::from(used) / self.queues.len() as u128;
            self.meter += advance as i128;
        }
    }

    fn note(&mut self, now: u64) {
        self.demand.set(now, self.totals.running_seats + self.totals.waiting_seats);
    }

    fn fits(&self, width: u64) -> bool {
        if width <= 1 {
            return self.totals.running_seats + width <= self.limit;
        }
        let shared = self.limit - self.spared();
        if width > shared {
            // It would never fit, so it runs alone.
            return self.totals.running == 0;
        }
        self.totals.running_seats - self.totals.narrow.min(self.spared()) + width <= shared
    }

    /// Seats that are for requests of one seat only: those of several are long, and nobody quick should have
    /// to wait until one of them ends.
    fn spared(&self) -> u64 {
        self.limit / SPARED
    }

    /// The queue of the flow's hand with the least work waiting.
    fn choose(&mut self, queues: u64, hand: usize, flow: u64) -> u64 {
        let hand = hand.clamp(1, MAX_HAND).min(queues.min(MAX_HAND as u64) as usize).max(1);
        // Start somewhere else each time, so that flows whose hands overlap do not all lean the same way.
        let first = self.arrivals % hand;
        self.arrivals = self.arrivals.wrapping_add(1);
        if self.totals.waiting == 0 {
            // All are as good: no need to look at the rest of the hand.
            return deal(queues, first + 1, flow)[first];
        }
        let cards = deal(queues, hand, flow);
        let waiting = |number: u64| self.find(number).map_or(0, |at| self.queues[at].work);
        let around = (0..hand).map(|i| cards[(first + i) % hand]);
        around.min_by_key(|number| waiting(*number)).unwrap_or(0)
    }

    fn find(&self, number: u64) -> Result<usize, usize> {
        self.queues.binary_search_by_key(&number, |queue| queue.number)
    }

    /// The index of a queue, made if it is idle.
    fn queue(&mut self, number: u64) -> usize {
        self.find(number).unwrap_or_else(|at| {
            let new = Queue { number, waiting: VecDeque::new(), work: 0, running: 0, next: self.meter };
            self.queues.insert(at, new);
            at
        })
    }

    fn forget(&mut self, at: usize) {
        if self.queues[at].is_idle() {
            self.queues.remove(at);
        }
    }

    fn run(&mut self, now: u64, number: Option<u64>, work: Work) -> Arrival {
        if let Some(number) = number {
            let at = self.queue(number);
            self.start(at, &work);
        }
        self.take(work.width());
        Arrival::Run(Place { queue: number, work, started: now })
    }

    fn start(&mut self, at: usize, work: &Work) {
        let queue = &mut self.queues[at];
        queue.running += 1;
        queue.next += work.total() as i128;
        queue.bound();
    }

    fn wait(&mut self, at: usize, work: Work, ticket: T) -> Spot {
        self.ids += 1;
        let (id, arrived) = (self.ids, self.meter);
        let queue = &mut self.queues[at];
        queue.work += work.total();
        queue.waiting.push_back(Waiter { id, ticket, work, arrived });
        queue.bound();
        self.totals.waiting += 1;
        self.totals.waiting_seats += work.width();
        Spot { queue: queue.number, id }
    }

    fn give_back(&mut self, now: u64, work: Work, started: &mut Vec<Started<T>>) {
        self.totals.running_seats -= work.width();
        self.totals.narrow -= u64::from(work.width() == 1);
        self.dispatch(now, started);
        self.note(now);
    }

    /// Starts as many as there are seats for.
    fn dispatch(&mut self, now: u64, started: &mut Vec<Started<T>>) {
        while self.totals.waiting > 0 && self.totals.running_seats < self.limit {
            let mut next = self.next_in_turn(u64::MAX);
            if next.is_some_and(|at| !self.fits(self.head_width(at))) {
                self.totals.no_room += 1;
                // Whoever waits for many seats does not wait for the spared ones.
                let spare = self.totals.narrow < self.spared() && self.fits(1);
                next = if spare { self.next_in_turn(1) } else { None };
            }
            let Some(at) = next else { return };
            let queue = &mut self.queues[at];
            let Some(waiter) = queue.waiting.pop_front() else { return };
            let (number, work) = (queue.number, waiter.work);
            queue.work -= work.total();
            self.turn = number;
            self.start(at, &work);
            self.totals.waiting -= 1;
            self.totals.waiting_seats -= work.width();
            self.take(work.width());
            let place = Place { queue: Some(number), work, started: now };
            started.push(Started { ticket: waiter.ticket, place });
        }
    }

    fn take(&mut self, width: u64) {
        self.totals.running += 1;
        self.totals.running_seats += width;
        self.totals.narrow += u64::from(width == 1);
    }

    fn head_width(&self, at: usize) -> u64 {
        self.queues[at].waiting.front().map_or(0, |head| head.work.width())
    }

    /// The queue whose first request would end first, of those at most so wide; of equals, the one after the
    /// last that had a turn.
    fn next_in_turn(&self, widest: u64) -> Option<usize> {
        let after = self.queues.partition_point(|queue| queue.number <= self.turn);
        let around = (after..self.queues.len()).chain(0..after);
        let ends = around.filter_map(|at| {
            let queue = &self.queues[at];
            let head = queue.waiting.front().filter(|head| head.work.width() <= widest)?;
            Some((queue.next + head.work.total() as i128, at))
        });
        ends.min_by_key(|(end, _)| *end).map(|(_, at)| at)
    }
}

/// The largest hand there can be, by the rules of PriorityLevelConfigurations.
const MAX_HAND: usize = 15;

/// Deals `hand` different cards of a deck, chosen by `hash`; never more than there are.
fn deal(deck: u64, hand: usize, hash: u64) -> [u64; MAX_HAND] {
    let mut cards = [0; MAX_HAND];
    let mut dealt = [0; MAX_HAND];
    let mut hash = hash;
    for (i, dealing) in cards.iter_mut().enumerate().take(hand) {
        let left = (deck - i as u64).max(1);
        // Counted among those not yet dealt.
        let mut card = hash % left;
        hash /= left;
        let mut at = 0;
        while at < i && card >= dealt[at] {
            card += 1;
            at += 1;
        }
        dealt.copy_within(at..i, at + 1);
        dealt[at] = card;
        *dealing = card;
    }
    cards
}

#[cfg(test)]
mod tests;

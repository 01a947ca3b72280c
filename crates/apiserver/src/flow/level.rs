//! A priority level at work: requests come in, wait without polling, take their seats and give them back.
//!
//! One lock, held for as long as `queues` needs to decide and to count.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::queues::{Arrival, Place, QueueSet, Shape, Spot, Started, Work};
use super::retry::Refusals;
use super::share::{Bounds, Grant, Share, Usage};
use super::tally::Tally;

pub struct Level {
    pub name: String,
    clock: Instant,
    /// Told when somebody finds no seat, so that seats are divided anew.
    crowded: Arc<Notify>,
    state: Mutex<State>,
}

type Ticket = oneshot::Sender<Place>;

pub struct State {
    pub queues: QueueSet<Ticket>,
    pub tallies: Vec<Tally>,
    pub share: Share,
    pub bounds: Bounds,
    pub usage: Usage,
    pub grant: Grant,
    refusals: Refusals,
}

/// What a request is to its level.
#[derive(Clone, Copy, Debug)]
pub struct Visit {
    /// Of the schema that sent it.
    pub tally: usize,
    /// Which flow it belongs to.
    pub flow: u64,
    pub work: Work,
    /// Only the beginning of a watch takes seats.
    pub watch: bool,
    /// Who will be told of the change, where it is one.
    pub watchers: Option<usize>,
}

/// Seconds after which a refused request may come again.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    pub retry_after: u64,
}

pub enum Entry {
    In(Seat),
    Wait(Waiting),
    Refused(Refused),
}

/// Seats taken, until dropped.
pub struct Seat {
    level: Arc<Level>,
    visit: Visit,
    place: Option<Place>,
}

/// A place in a queue, until dropped.
pub struct Waiting {
    level: Arc<Level>,
    visit: Visit,
    spot: Option<Spot>,
    since: u64,
    started: oneshot::Receiver<Place>,
}

const NO_SEAT: usize = 0;
const QUEUE_FULL: usize = 1;
const TIME_OUT: usize = 2;

impl Level {
    pub fn new(name: &str, clock: Instant, crowded: Arc<Notify>, share: Share, shape: Shape) -> Level {
        let now = clock.elapsed().as_nanos() as u64;
        let state = State {
            queues: QueueSet::new(shape, 0, now),
            tallies: Vec::new(),
            share,
            bounds: Bounds::default(),
            usage: Usage::default(),
            grant: Grant::default(),
            refusals: Refusals::default(),
        };
        Level { name: name.to_owned(), clock, crowded, state: Mutex::new(state) }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    /// Where a schema's requests are counted.
    pub fn tally(&self, schema: &str) -> usize {
        let tallies = &mut self.state.lock().tallies;
        let found = tallies.iter().position(|tally| tally.schema == schema);
        found.unwrap_or_else(|| {
            tallies.push(Tally::new(schema));
            tallies.len() - 1
        })
    }

    /// Sets how many may run; those for whom there is room now start.
    pub fn configure(&self, shape: Shape, seats: u64) {
        let mut state = self.state.lock();
        let mut started = Vec::new();
        state.queues.reshape(shape, seats, self.now(), &mut started);
        state.start(started);
    }

    /// Ends a period of watching how many seats could be used.
    pub fn observe(&self) {
        let now = self.now();
        let mut state = self.state.lock();
        let seen = state.queues.demand.take(now);
        state.usage.update(seen);
    }

    /// Forgets what is known about the use of seats.
    pub fn forget_usage(&self) {
        let now = self.now();
        let mut state = self.state.lock();
        state.queues.demand.take(now);
        state.usage = Usage::default();
    }

    pub fn enter(self: &Arc<Level>, visit: Visit) -> Entry {
        let now = self.now();
        let mut receiver = None;
        let ticket = || {
            let (sender, started) = oneshot::channel();
            receiver = Some(started);
            sender
        };
        let mut started = Vec::new();
        let mut state = self.state.lock();
        let arrival = state.queues.arrive(now, visit.flow, visit.work, ticket, &mut started);
        let exempt = state.share.exempt;
        let tally = &mut state.tallies[visit.tally];
        tally.widths.add(visit.work.width() as f64);
        if let Some(watchers) = visit.watchers {
            tally.watchers.add(watchers as f64);
        }
        match arrival {
            Arrival::Run(place) => {
                tally.run(visit.work.width());
                if !exempt {
                    tally.waited[1].add(0.0);
                }
                drop(state);
                Entry::In(Seat { level: self.clone(), visit, place: Some(place) })
            }
            Arrival::Wait(spot, length) => {
                tally.lengths.add(length as f64);
                tally.waiting += 1;
                tally.waiting_seats += visit.work.width();
                state.start(started);
                drop(state);
                self.crowded.notify_one();
                let started = receiver.expect("whoever waits was given a ticket");
                Entry::Wait(Waiting { level: self.clone(), visit, spot: Some(spot), since: now, started })
            }
            Arrival::NoSeat => Entry::Refused(self.refuse(&mut state, &visit, NO_SEAT, 0.0)),
            Arrival::QueueFull => Entry::Refused(self.refuse(&mut state, &visit, QUEUE_FULL, 0.0)),
        }
    }

    fn refuse(&self, state: &mut State, visit: &Visit, reason: usize, waited: f64) -> Refused {
        let tally = &mut state.tallies[visit.tally];
        tally.rejected[reason] += 1;
        tally.waited[0].add(waited);
        self.crowded.notify_one();
        Refused { retry_after: state.refusals.refuse(self.clock.elapsed().as_secs()) }
    }

    fn leave(self: &Arc<Level>, visit: &Visit, place: Place) {
        let now = self.now();
        let mut started = Vec::new();
        let mut state = self.state.lock();
        let ran = now.saturating_sub(place.started);
        let lingers = state.queues.finish(now, place, &mut started);
        let tally = &mut state.tallies[visit.tally];
        tally.running -= 1;
        tally.ran[usize::from(visit.watch)].add(ran as f64 * 1e-9);
        if lingers.is_none() {
            tally.running_seats -= visit.work.width();
        }
        state.start(started);
        drop(state);
        let Some(place) = lingers else { return };
        let (level, tally) = (self.clone(), visit.tally);
        let release = move || {
            let mut started = Vec::new();
            let mut state = level.state.lock();
            state.tallies[tally].running_seats -= place.work.width();
            state.queues.release(level.now(), place, &mut started);
            state.start(started);
        };
        let linger = Duration::from_nanos(visit.work.linger);
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(async move {
                tokio::time::sleep(linger).await;
                release();
            })),
            Err(_) => release(),
        }
    }
}

impl State {
    /// Lets those run whose turn it is. Their tickets are handed over under the lock, so that whoever gives
    /// up finds either themselves still waiting or their ticket.
    fn start(&mut self, started: Vec<Started<Ticket>>) {
        for Started { ticket, place } in started {
            // Nobody drops a receiver without having left the queue.
            let _ = ticket.send(place);
        }
    }
}

impl Tally {
    fn run(&mut self, width: u64) {
        self.dispatched += 1;
        self.running += 1;
        self.running_seats += width;
    }
}

impl Waiting {
    /// Waits for a seat, at most until `deadline`.
    pub async fn until(mut self, deadline: Instant) -> Result<Seat, Refused> {
        let started = tokio::time::timeout_at(deadline, &mut self.started).await;
        let Some(spot) = self.spot.take() else { return Err(Refused { retry_after: 1 }) };
        self.end(spot, started.ok().and_then(Result::ok))
    }

    /// The seat that was given, or what comes of giving up.
    fn end(&mut self, spot: Spot, given: Option<Place>) -> Result<Seat, Refused> {
        let now = self.level.now();
        let mut state = self.level.state.lock();
        let place = given.or_else(|| match state.queues.cancel(now, spot) {
            Some(_) => None,
            // It was given at the last moment.
            None => self.started.try_recv().ok(),
        });
        let waited = now.saturating_sub(self.since) as f64 * 1e-9;
        let width = self.visit.work.width();
        let tally = &mut state.tallies[self.visit.tally];
        tally.waiting -= 1;
        tally.waiting_seats -= width;
        if place.is_none() {
            return Err(self.level.refuse(&mut state, &self.visit, TIME_OUT, waited));
        }
        tally.run(width);
        tally.waited[1].add(waited);
        Ok(Seat { level: self.level.clone(), visit: self.visit, place })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(spot) = self.spot.take() {
            // The client is gone; where a seat was just given, it is given back.
            drop(self.end(spot, None));
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.level.leave(&self.visit, place);
        }
    }
}

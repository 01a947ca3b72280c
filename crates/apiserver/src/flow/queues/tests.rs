//! Tables of what happens when, and what must hold whatever happens.

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;

type Set = QueueSet<u32>;

fn queued(queues: u64, hand: usize, length: usize) -> Shape {
    Shape::Queue { queues, hand, length }
}

/// A level under test: who runs, who waits, in milliseconds.
struct Rig {
    set: Set,
    running: Vec<(u32, Place)>,
    waiting: Vec<(u32, Spot)>,
}

impl Rig {
    fn new(shape: Shape, limit: u64) -> Rig {
        Rig { set: QueueSet::new(shape, limit, 0), running: Vec::new(), waiting: Vec::new() }
    }

    fn take(&mut self, started: Vec<Started<u32>>) -> Vec<u32> {
        let names: Vec<u32> = started.iter().map(|started| started.ticket).collect();
        for Started { ticket, place } in started {
            assert!(self.waiting.iter().any(|(name, _)| *name == ticket), "{ticket} started without waiting");
            self.waiting.retain(|(name, _)| *name != ticket);
            self.running.push((ticket, place));
        }
        names
    }

    /// `run`, `wait`, `no seat` or `full`.
    fn arrive(&mut self, at: u64, name: u32, flow: u64, work: Work) -> &'static str {
        let mut started = Vec::new();
        let word = match self.set.arrive(at * MS, flow, work, || name, &mut started) {
            Arrival::Run(place) => {
                self.running.push((name, place));
                "run"
            }
            Arrival::Wait(spot, _) => {
                self.waiting.push((name, spot));
                "wait"
            }
            Arrival::NoSeat => "no seat",
            Arrival::QueueFull => "full",
        };
        self.take(started);
        word
    }

    /// Who starts when this one ends.
    fn finish(&mut self, at: u64, name: u32) -> Vec<u32> {
        let i = self.running.iter().position(|(other, _)| *other == name).expect("it runs");
        let (_, place) = self.running.remove(i);
        let mut started = Vec::new();
        assert!(self.set.finish(at * MS, place, &mut started).is_none(), "it does not linger");
        self.take(started)
    }
}

#[test]
fn exempt_requests_always_run() {
    let mut rig = Rig::new(Shape::Exempt, 0);
    for name in 0..1000 {
        assert_eq!(rig.arrive(0, name, 0, Work::of(10)), "run");
    }
    assert_eq!(rig.set.totals.running_seats, 10_000);
}

#[test]
fn without_queues_the_limit_is_the_limit() {
    let mut rig = Rig::new(Shape::Reject, 3);
    assert_eq!(rig.arrive(0, 1, 0, Work::of(2)), "run");
    assert_eq!(rig.arrive(0, 2, 0, Work::of(2)), "no seat");
    assert_eq!(rig.arrive(0, 3, 0, Work::of(1)), "run");
    assert_eq!(rig.arrive(0, 4, 0, Work::of(1)), "no seat");
    rig.finish(1, 1);
    assert_eq!(rig.arrive(1, 5, 0, Work::of(1)), "run");
}

#[test]
fn a_request_wider_than_the_level_runs_alone() {
    let mut rig = Rig::new(queued(8, 1, 10), 4);
    assert_eq!(rig.arrive(0, 1, 1, Work::of(1)), "run");
    assert_eq!(rig.arrive(0, 2, 1, Work::of(9)), "wait");
    assert_eq!(rig.finish(1, 1), [2]);
    assert_eq!(rig.arrive(1, 3, 2, Work::of(1)), "wait");
    assert_eq!(rig.finish(2, 2), [3]);
}

#[test]
fn a_queue_takes_so_many_and_no_more() {
    let mut rig = Rig::new(queued(1, 1, 2), 1);
    let words: Vec<_> = (0..5).map(|name| rig.arrive(0, name, 7, Work::of(1))).collect();
    assert_eq!(words, ["run", "wait", "wait", "full", "full"]);
    // First come, first served.
    assert_eq!(rig.finish(5, 0), [1]);
    assert_eq!(rig.finish(9, 1), [2]);
}

#[test]
fn flows_take_turns_however_many_requests_they_have() {
    // One seat; flow 1 has sent twenty, then flow 2 sends four.
    let mut rig = Rig::new(queued(1 << 20, 1, 100), 1);
    for name in 100..120 {
        rig.arrive(0, name, 1, Work::of(1));
    }
    for name in 200..204 {
        rig.arrive(1, name, 2, Work::of(1));
    }
    let mut order = vec![100];
    for at in 1..24 {
        let last = *order.last().unwrap();
        order.extend(rig.finish(at * 3, last));
    }
    let place = |name: u32| order.iter().position(|other| *other == name).unwrap();
    let places: Vec<_> = (200..204).map(place).collect();
    // Every other one, although all of flow 1's came first.
    assert!(places.iter().enumerate().all(|(i, place)| *place <= 2 * i + 2), "{order:?}");
}

#[test]
fn wide_requests_take_turns_by_their_width() {
    // Flow 1 sends requests of four seats, flow 2 of one: equal seats, so four times as many requests.
    let mut rig = Rig::new(queued(1 << 20, 1, 1000), 4);
    for name in 0..50 {
        rig.arrive(0, 1000 + name, 1, Work::of(4));
        rig.arrive(0, 2000 + name, 2, Work::of(1));
    }
    let mut seats = [0, 0];
    for at in 1..40 {
        let running: Vec<u32> = rig.running.iter().map(|(name, _)| *name).collect();
        for name in running {
            seats[if name < 2000 { 0 } else { 1 }] += if name < 2000 { 4 } else { 1 };
            rig.finish(at * 3, name);
        }
    }
    let share = f64::from(seats[0]) / f64::from(seats[0] + seats[1]);
    assert!((0.4..0.75).contains(&share), "{seats:?}");
}

#[test]
fn the_quick_do_not_wait_for_the_wide() {
    // Sixteen seats, two of them spared; lists of four seats take what they can, and more of them wait.
    let mut rig = Rig::new(queued(1 << 20, 1, 100), 16);
    let words: Vec<_> = (0..10).map(|name| rig.arrive(0, name, 1, Work::of(4))).collect();
    assert_eq!(words.iter().filter(|word| **word == "run").count(), 3);
    // Long after, when the lists that wait are first in turn, somebody quick comes.
    for (name, word) in [(100, "run"), (101, "run"), (102, "wait")] {
        rig.arrive(1000, name, 2, Work::of(1));
        let runs = rig.running.iter().any(|(other, _)| *other == name);
        assert_eq!(if runs { "run" } else { "wait" }, word, "{name}");
    }
    // The lists are not held up by that: as soon as one ends, another starts, and the quick one after it.
    assert_eq!(rig.finish(1001, 0), [3]);
    assert_eq!(rig.finish(1002, 100), [102]);
}

#[test]
fn who_gives_up_frees_their_place() {
    let mut rig = Rig::new(queued(1, 1, 2), 1);
    for name in 0..3 {
        rig.arrive(0, name, 0, Work::of(1));
    }
    let (_, spot) = rig.waiting.remove(0);
    assert_eq!(rig.set.cancel(MS, spot), Some(1));
    assert_eq!(rig.set.cancel(MS, spot), None);
    assert_eq!(rig.arrive(1, 3, 0, Work::of(1)), "wait");
    assert_eq!(rig.finish(2, 0), [2]);
    assert_eq!(rig.finish(3, 2), [3]);
}

#[test]
fn seats_linger() {
    let mut rig = Rig::new(queued(4, 1, 5), 2);
    let wide = Work { seats: 1, last_seats: 2, linger: 5 * MS };
    assert_eq!(rig.arrive(0, 1, 0, wide), "run");
    assert_eq!(rig.arrive(0, 2, 1, Work::of(1)), "wait");
    let (_, place) = rig.running.remove(0);
    let mut started = Vec::new();
    let lingering = rig.set.finish(MS, place, &mut started).expect("it lingers");
    assert!(started.is_empty());
    rig.set.release(6 * MS, lingering, &mut started);
    assert_eq!(rig.take(started), [2]);
}

#[test]
fn more_seats_let_more_start() {
    let mut rig = Rig::new(queued(4, 2, 5), 1);
    for name in 0..5 {
        rig.arrive(0, name, name.into(), Work::of(1));
    }
    let mut started = Vec::new();
    rig.set.reshape(queued(2, 1, 5), 3, MS, &mut started);
    assert_eq!(rig.take(started).len(), 2);
    // Without queues those who wait still get their turn.
    rig.set.reshape(Shape::Reject, 1, MS, &mut Vec::new());
    for _ in 0..5 {
        let name = rig.running[0].0;
        rig.finish(2, name);
    }
    assert!(rig.running.is_empty() && rig.waiting.is_empty());
    assert!(rig.set.queues.is_empty());
}

#[test]
fn hands_hold_different_cards_and_spread() {
    for deck in [1, 2, 6, 64, 128, 10_000_000] {
        let hand = 6.min(deck as usize);
        let mut seen = [0; 64];
        for hash in 0..2000u64 {
            let hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let cards = deal(deck, hand, hash);
            let mut sorted = cards[..hand].to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), hand, "{cards:?}");
            assert!(sorted.iter().all(|card| *card < deck), "{cards:?}");
            for card in sorted.iter().filter(|_| deck == 64) {
                seen[*card as usize] += 1;
            }
        }
        // About 187 each.
        assert!(deck != 64 || seen.iter().all(|count| (100..300).contains(count)), "{seen:?}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Arrive { flow: u64, seats: u64, linger: bool },
    Finish(usize),
    Cancel(usize),
    Release(usize),
    Reshape { queues: u64, limit: u64 },
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let step = prop_oneof![
        6 => (0..5u64, 1..5u64, any::<bool>())
            .prop_map(|(flow, seats, linger)| Step::Arrive { flow, seats, linger }),
        4 => any::<usize>().prop_map(Step::Finish),
        2 => any::<usize>().prop_map(Step::Cancel),
        2 => any::<usize>().prop_map(Step::Release),
        1 => (0..6u64, 0..9u64).prop_map(|(queues, limit)| Step::Reshape { queues, limit }),
    ];
    prop::collection::vec((0..10u64, step), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens: never more seats than there are (but for one that is wider than all of them),
    /// nobody is lost, and nobody waits who could run.
    #[test]
    fn seats_are_never_exceeded_and_nobody_is_lost(steps in steps()) {
        let mut rig = Rig::new(queued(4, 2, 3), 4);
        let mut lingering: Vec<Place> = Vec::new();
        let (mut now, mut limit) = (0, 4);
        for (name, (pause, step)) in steps.into_iter().enumerate() {
            now += pause * MS;
            let mut started = Vec::new();
            let mut starts = false;
            match step {
                Step::Arrive { flow, seats, linger } => {
                    let linger = u64::from(linger);
                    let work = Work { seats, last_seats: linger * 2, linger: linger * MS };
                    let (before, running) = (rig.set.totals, rig.running.len());
                    let word = rig.arrive(now / MS, name as u32, flow.wrapping_mul(0x9e37_79b9_7f4a_7c15), work);
                    if matches!(word, "full" | "no seat") {
                        prop_assert_eq!(rig.set.totals, before);
                    }
                    starts = rig.running.len() > running;
                }
                Step::Finish(i) if !rig.running.is_empty() => {
                    let i = i % rig.running.len();
                    let (_, place) = rig.running.remove(i);
                    lingering.extend(rig.set.finish(now, place, &mut started));
                }
                Step::Cancel(i) if !rig.waiting.is_empty() => {
                    let i = i % rig.waiting.len();
                    let (name, spot) = rig.waiting.remove(i);
                    prop_assert_eq!(rig.set.cancel(now, spot), Some(name));
                }
                Step::Release(i) if !lingering.is_empty() => {
                    let i = i % lingering.len();
                    let place = lingering.remove(i);
                    rig.set.release(now, place, &mut started);
                }
                Step::Reshape { queues, limit: seats } => {
                    limit = seats;
                    let shape = if queues == 0 { Shape::Reject } else { queued(queues, 2, 3) };
                    rig.set.reshape(shape, limit, now, &mut started);
                }
                _ => {}
            }
            starts |= !started.is_empty();
            rig.take(started);
            let totals = rig.set.totals;
            prop_assert_eq!(totals.running, rig.running.len() as u64);
            prop_assert_eq!(totals.waiting, rig.waiting.len() as u64);
            let places = rig.running.iter().map(|(_, place)| place).chain(&lingering);
            let seats: u64 = places.map(|place| place.work.width()).sum();
            prop_assert_eq!(totals.running_seats, seats);
            // What runs already is not thrown out when there are fewer seats, but nothing more starts.
            let alone = rig.running.len() == 1 && rig.running[0].1.work.width() > limit;
            prop_assert!(!starts || seats <= limit || alone, "{} of {}", seats, limit);
            prop_assert!(rig.set.queues.iter().all(|queue| !queue.is_idle()));
        }
        // In the end everybody gets a turn.
        let mut started = Vec::new();
        rig.set.reshape(queued(4, 2, 3), limit.max(1), now, &mut started);
        for place in lingering.drain(..) {
            rig.set.release(now, place, &mut started);
        }
        rig.take(started);
        for _ in 0..10_000 {
            let mut started = Vec::new();
            let Some((_, place)) = rig.running.pop() else { break };
            now += MS;
            if let Some(place) = rig.set.finish(now, place, &mut started) {
                rig.set.release(now, place, &mut started);
            }
            rig.take(started);
        }
        prop_assert_eq!(rig.waiting.len(), 0);
        prop_assert_eq!(rig.set.totals.running_seats, 0);
        prop_assert!(rig.set.queues.is_empty());
    }

    /// Two flows that always want more than there is get the same, whatever their requests are like.
    #[test]
    fn busy_flows_get_equal_seat_time(widths in (1..4u64, 1..4u64), lengths in (1..6u64, 1..6u64)) {
        let mut rig = Rig::new(queued(1 << 40, 1, 1000), 8);
        let (widths, lengths) = ([widths.0, widths.1], [lengths.0, lengths.1]);
        let mut ends: Vec<(u64, u32)> = Vec::new();
        let mut used = [0, 0];
        let mut name = 0;
        for now in 0..3000 {
            for flow in [0, 1usize] {
                while rig.waiting.iter().filter(|(name, _)| *name as usize % 2 == flow).count() < 20 {
                    while name as usize % 2 != flow {
                        name += 1;
                    }
                    rig.arrive(now, name, flow as u64 + 1, Work::of(widths[flow]));
                    name += 1;
                }
            }
            for (name, _) in &rig.running {
                let flow = *name as usize % 2;
                used[flow] += widths[flow];
                if !ends.iter().any(|(_, other)| other == name) {
                    ends.push((now + lengths[flow], *name));
                }
            }
            let due: Vec<u32> = ends.iter().filter(|(end, _)| *end <= now + 1).map(|(_, name)| *name).collect();
            ends.retain(|(end, _)| *end > now + 1);
            for name in due {
                rig.finish(now + 1, name);
            }
        }
        let share = used[0] as f64 / (used[0] + used[1]) as f64;
        prop_assert!((0.4..0.6).contains(&share), "{:?} {:?} {:?}", used, widths, lengths);
    }
}

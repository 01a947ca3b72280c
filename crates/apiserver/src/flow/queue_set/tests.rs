//! Scenario tests and property tests of fair queuing.

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;

type Set = QueueSet<u32>;

fn queued(queues: u64, hand_size: usize, queue_length_limit: usize) -> QueuingConfig {
    QueuingConfig::Queue { queues, hand_size, queue_length_limit }
}

/// A level under test, with its executing and queued requests. Times are in milliseconds.
struct TestLevel {
    set: Set,
    running: Vec<(u32, RunningRequest)>,
    waiting: Vec<(u32, QueueSlot)>,
}

impl TestLevel {
    fn new(shape: QueuingConfig, limit: u64) -> TestLevel {
        TestLevel { set: QueueSet::new(shape, limit, 0), running: Vec::new(), waiting: Vec::new() }
    }

    fn take(&mut self, started: Vec<StartedRequest<u32>>) -> Vec<u32> {
        let names: Vec<u32> = started.iter().map(|started| started.ticket).collect();
        for StartedRequest { ticket, request: place } in started {
            assert!(self.waiting.iter().any(|(name, _)| *name == ticket), "{ticket} started without waiting");
            self.waiting.retain(|(name, _)| *name != ticket);
            self.running.push((ticket, place));
        }
        names
    }

    /// `run`, `wait`, `no seat` or `full`.
    fn start_request(&mut self, at: u64, name: u32, flow: u64, work: WorkEstimate) -> &'static str {
        let mut started = Vec::new();
        let word = match self.set.start_request(at * MS, flow, work, || name, &mut started) {
            StartDecision::Execute(request) => {
                self.running.push((name, request));
                "run"
            }
            StartDecision::Enqueued(slot, _) => {
                self.waiting.push((name, slot));
                "wait"
            }
            StartDecision::NoSeat => "no seat",
            StartDecision::QueueFull => "full",
        };
        self.take(started);
        word
    }

    /// The requests that start when this one finishes.
    fn finish(&mut self, at: u64, name: u32) -> Vec<u32> {
        let i = self.running.iter().position(|(other, _)| *other == name).expect("it runs");
        let (_, request) = self.running.remove(i);
        let mut started = Vec::new();
        assert!(
            self.set.finish(at * MS, request, &mut started).is_none(),
            "the request has no additional latency"
        );
        self.take(started)
    }
}

#[test]
fn exempt_requests_always_run() {
    let mut level = TestLevel::new(QueuingConfig::Exempt, 0);
    for name in 0..1000 {
        assert_eq!(level.start_request(0, name, 0, WorkEstimate::with_seats(10)), "run");
    }
    assert_eq!(level.set.counts.running_seats, 10_000);
}

#[test]
fn rejects_requests_over_the_limit_without_queues() {
    let mut level = TestLevel::new(QueuingConfig::Reject, 3);
    assert_eq!(level.start_request(0, 1, 0, WorkEstimate::with_seats(2)), "run");
    assert_eq!(level.start_request(0, 2, 0, WorkEstimate::with_seats(2)), "no seat");
    assert_eq!(level.start_request(0, 3, 0, WorkEstimate::with_seats(1)), "run");
    assert_eq!(level.start_request(0, 4, 0, WorkEstimate::with_seats(1)), "no seat");
    level.finish(1, 1);
    assert_eq!(level.start_request(1, 5, 0, WorkEstimate::with_seats(1)), "run");
}

#[test]
fn request_over_the_level_limit_runs_when_idle() {
    let mut level = TestLevel::new(queued(8, 1, 10), 4);
    assert_eq!(level.start_request(0, 1, 1, WorkEstimate::with_seats(1)), "run");
    assert_eq!(level.start_request(0, 2, 1, WorkEstimate::with_seats(9)), "wait");
    assert_eq!(level.finish(1, 1), [2]);
    assert_eq!(level.start_request(1, 3, 2, WorkEstimate::with_seats(1)), "wait");
    assert_eq!(level.finish(2, 2), [3]);
}

#[test]
fn rejects_requests_when_the_queue_is_full() {
    let mut level = TestLevel::new(queued(1, 1, 2), 1);
    let words: Vec<_> =
        (0..5).map(|name| level.start_request(0, name, 7, WorkEstimate::with_seats(1))).collect();
    assert_eq!(words, ["run", "wait", "wait", "full", "full"]);
    // First come, first served.
    assert_eq!(level.finish(5, 0), [1]);
    assert_eq!(level.finish(9, 1), [2]);
}

#[test]
fn flow_with_many_requests_does_not_block_another_flow() {
    // One seat; flow 1 has sent twenty, then flow 2 sends four.
    let mut level = TestLevel::new(queued(1 << 20, 1, 100), 1);
    for name in 100..120 {
        level.start_request(0, name, 1, WorkEstimate::with_seats(1));
    }
    for name in 200..204 {
        level.start_request(1, name, 2, WorkEstimate::with_seats(1));
    }
    let mut order = vec![100];
    for at in 1..24 {
        let last = *order.last().unwrap();
        order.extend(level.finish(at * 3, last));
    }
    let position = |name: u32| order.iter().position(|other| *other == name).unwrap();
    let positions: Vec<_> = (200..204).map(position).collect();
    // Every other start, although all requests of flow 1 arrived first.
    assert!(positions.iter().enumerate().all(|(i, position)| *position <= 2 * i + 2), "{order:?}");
}

#[test]
fn shares_seats_between_large_and_small_requests() {
    // Flow 1 sends requests of four seats, flow 2 of one. Equal seats means four times as many
    // requests for flow 2.
    let mut level = TestLevel::new(queued(1 << 20, 1, 1000), 4);
    for name in 0..50 {
        level.start_request(0, 1000 + name, 1, WorkEstimate::with_seats(4));
        level.start_request(0, 2000 + name, 2, WorkEstimate::with_seats(1));
    }
    let mut seats = [0, 0];
    for at in 1..40 {
        let running: Vec<u32> = level.running.iter().map(|(name, _)| *name).collect();
        for name in running {
            seats[if name < 2000 { 0 } else { 1 }] += if name < 2000 { 4 } else { 1 };
            level.finish(at * 3, name);
        }
    }
    let share = f64::from(seats[0]) / f64::from(seats[0] + seats[1]);
    assert!((0.4..0.75).contains(&share), "{seats:?}");
}

#[test]
fn single_seat_requests_use_reserved_seats() {
    // Sixteen seats, two of them reserved. Requests of four seats take what they can, and more of
    // them wait.
    let mut level = TestLevel::new(queued(1 << 20, 1, 100), 16);
    let words: Vec<_> =
        (0..10).map(|name| level.start_request(0, name, 1, WorkEstimate::with_seats(4))).collect();
    assert_eq!(words.iter().filter(|word| **word == "run").count(), 3);
    // Much later, when the queued large requests are next, single-seat requests arrive.
    for (name, word) in [(100, "run"), (101, "run"), (102, "wait")] {
        level.start_request(1000, name, 2, WorkEstimate::with_seats(1));
        let runs = level.running.iter().any(|(other, _)| *other == name);
        assert_eq!(if runs { "run" } else { "wait" }, word, "{name}");
    }
    // That does not delay the large requests: when one finishes, the next starts, and the small one
    // after it.
    assert_eq!(level.finish(1001, 0), [3]);
    assert_eq!(level.finish(1002, 100), [102]);
}

#[test]
fn canceled_request_leaves_the_queue() {
    let mut level = TestLevel::new(queued(1, 1, 2), 1);
    for name in 0..3 {
        level.start_request(0, name, 0, WorkEstimate::with_seats(1));
    }
    let (_, slot) = level.waiting.remove(0);
    assert_eq!(level.set.cancel(MS, slot), Some(1));
    assert_eq!(level.set.cancel(MS, slot), None);
    assert_eq!(level.start_request(1, 3, 0, WorkEstimate::with_seats(1)), "wait");
    assert_eq!(level.finish(2, 0), [2]);
    assert_eq!(level.finish(3, 2), [3]);
}

#[test]
fn seats_stay_in_use_during_additional_latency() {
    let mut level = TestLevel::new(queued(4, 1, 5), 2);
    let estimate = WorkEstimate { initial_seats: 1, final_seats: 2, additional_latency: 5 * MS };
    assert_eq!(level.start_request(0, 1, 0, estimate), "run");
    assert_eq!(level.start_request(0, 2, 1, WorkEstimate::with_seats(1)), "wait");
    let (_, request) = level.running.remove(0);
    let mut started = Vec::new();
    let delayed = level.set.finish(MS, request, &mut started).expect("it lingers");
    assert!(started.is_empty());
    level.set.release(6 * MS, delayed, &mut started);
    assert_eq!(level.take(started), [2]);
}

#[test]
fn queued_requests_start_after_limit_update() {
    let mut level = TestLevel::new(queued(4, 2, 5), 1);
    for name in 0..5 {
        level.start_request(0, name, name.into(), WorkEstimate::with_seats(1));
    }
    let mut started = Vec::new();
    level.set.configure(queued(2, 1, 5), 3, MS, &mut started);
    assert_eq!(level.take(started).len(), 2);
    // Without queues, requests that are queued already still start.
    level.set.configure(QueuingConfig::Reject, 1, MS, &mut Vec::new());
    for _ in 0..5 {
        let name = level.running[0].0;
        level.finish(2, name);
    }
    assert!(level.running.is_empty() && level.waiting.is_empty());
    assert!(level.set.queues.is_empty());
}

#[test]
fn shuffle_shard_hand_has_distinct_queues() {
    for queue_count in [1, 2, 6, 64, 128, 10_000_000] {
        let hand_size = 6.min(queue_count as usize);
        let mut seen = [0; 64];
        for hash in 0..2000u64 {
            let hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let hand_queues = shuffle_shard_hand(queue_count, hand_size, hash);
            let mut sorted = hand_queues[..hand_size].to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), hand_size, "{hand_queues:?}");
            assert!(sorted.iter().all(|index| *index < queue_count), "{hand_queues:?}");
            for index in sorted.iter().filter(|_| queue_count == 64) {
                seen[*index as usize] += 1;
            }
        }
        // About 187 each.
        assert!(queue_count != 64 || seen.iter().all(|count| (100..300).contains(count)), "{seen:?}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Start { flow: u64, seats: u64, linger: bool },
    Finish(usize),
    Cancel(usize),
    Release(usize),
    Configure { queues: u64, limit: u64 },
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let step = prop_oneof![
        6 => (0..5u64, 1..5u64, any::<bool>())
            .prop_map(|(flow, seats, linger)| Step::Start { flow, seats, linger }),
        4 => any::<usize>().prop_map(Step::Finish),
        2 => any::<usize>().prop_map(Step::Cancel),
        2 => any::<usize>().prop_map(Step::Release),
        1 => (0..6u64, 0..9u64).prop_map(|(queues, limit)| Step::Configure { queues, limit }),
    ];
    prop::collection::vec((0..10u64, step), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Never more seats in use than the limit (except for a single request over the limit), no
    /// queued request is dropped, and no request waits that could execute.
    #[test]
    fn never_exceeds_the_limit_or_drops_queued_requests(steps in steps()) {
        let mut level = TestLevel::new(queued(4, 2, 3), 4);
        let mut delayed: Vec<RunningRequest> = Vec::new();
        let (mut now, mut limit) = (0, 4);
        for (name, (pause, step)) in steps.into_iter().enumerate() {
            now += pause * MS;
            let mut started = Vec::new();
            let mut starts = false;
            match step {
                Step::Start { flow, seats, linger } => {
                    let linger = u64::from(linger);
                    let work = WorkEstimate { initial_seats: seats, final_seats: linger * 2, additional_latency: linger * MS };
                    let (before, running) = (level.set.counts, level.running.len());
                    let word = level.start_request(now / MS, name as u32, flow.wrapping_mul(0x9e37_79b9_7f4a_7c15), work);
                    if matches!(word, "full" | "no seat") {
                        prop_assert_eq!(level.set.counts, before);
                    }
                    starts = level.running.len() > running;
                }
                Step::Finish(i) if !level.running.is_empty() => {
                    let i = i % level.running.len();
                    let (_, request) = level.running.remove(i);
                    delayed.extend(level.set.finish(now, request, &mut started));
                }
                Step::Cancel(i) if !level.waiting.is_empty() => {
                    let i = i % level.waiting.len();
                    let (name, slot) = level.waiting.remove(i);
                    prop_assert_eq!(level.set.cancel(now, slot), Some(name));
                }
                Step::Release(i) if !delayed.is_empty() => {
                    let i = i % delayed.len();
                    let request = delayed.remove(i);
                    level.set.release(now, request, &mut started);
                }
                Step::Configure { queues, limit: seats } => {
                    limit = seats;
                    let shape = if queues == 0 { QueuingConfig::Reject } else { queued(queues, 2, 3) };
                    level.set.configure(shape, limit, now, &mut started);
                }
                _ => {}
            }
            starts |= !started.is_empty();
            level.take(started);
            let counts = level.set.counts;
            prop_assert_eq!(counts.running, level.running.len() as u64);
            prop_assert_eq!(counts.waiting, level.waiting.len() as u64);
            let requests = level.running.iter().map(|(_, request)| request).chain(&delayed);
            let seats: u64 = requests.map(|request| request.work.max_seats()).sum();
            prop_assert_eq!(counts.running_seats, seats);
            // Executing requests continue when the limit is lowered, but no more start.
            let exceeds_limit = level.running.len() == 1 && level.running[0].1.work.max_seats() > limit;
            prop_assert!(!starts || seats <= limit || exceeds_limit, "{} of {}", seats, limit);
            prop_assert!(level.set.queues.iter().all(|queue| !queue.is_idle()));
        }
        // Every request starts eventually.
        let mut started = Vec::new();
        level.set.configure(queued(4, 2, 3), limit.max(1), now, &mut started);
        for request in delayed.drain(..) {
            level.set.release(now, request, &mut started);
        }
        level.take(started);
        for _ in 0..10_000 {
            let mut started = Vec::new();
            let Some((_, request)) = level.running.pop() else { break };
            now += MS;
            if let Some(request) = level.set.finish(now, request, &mut started) {
                level.set.release(now, request, &mut started);
            }
            level.take(started);
        }
        prop_assert_eq!(level.waiting.len(), 0);
        prop_assert_eq!(level.set.counts.running_seats, 0);
        prop_assert!(level.set.queues.is_empty());
    }

    /// Two flows with permanent backlog get equal seat time, whatever the seats and durations of
    /// their requests are.
    #[test]
    fn busy_clients_get_equal_seat_time(widths in (1..4u64, 1..4u64), lengths in (1..6u64, 1..6u64)) {
        let mut level = TestLevel::new(queued(1 << 40, 1, 1000), 8);
        let (widths, lengths) = ([widths.0, widths.1], [lengths.0, lengths.1]);
        let mut ends: Vec<(u64, u32)> = Vec::new();
        let mut used = [0, 0];
        let mut name = 0;
        for now in 0..3000 {
            for flow in [0, 1usize] {
                while level.waiting.iter().filter(|(name, _)| *name as usize % 2 == flow).count() < 20 {
                    while name as usize % 2 != flow {
                        name += 1;
                    }
                    level.start_request(now, name, flow as u64 + 1, WorkEstimate::with_seats(widths[flow]));
                    name += 1;
                }
            }
            for (name, _) in &level.running {
                let flow = *name as usize % 2;
                used[flow] += widths[flow];
                if !ends.iter().any(|(_, other)| other == name) {
                    ends.push((now + lengths[flow], *name));
                }
            }
            let ended: Vec<u32> = ends.iter().filter(|(end, _)| *end <= now + 1).map(|(_, name)| *name).collect();
            ends.retain(|(end, _)| *end > now + 1);
            for name in ended {
                level.finish(now + 1, name);
            }
        }
        let share = used[0] as f64 / (used[0] + used[1]) as f64;
        prop_assert!((0.4..0.6).contains(&share), "{:?} {:?} {:?}", used, widths, lengths);
    }
}

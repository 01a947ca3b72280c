//! Zone states and the eviction rates that follow from them. Does no I/O.
//!
//! If many nodes of a zone become unresponsive at once, the likely cause is the network. Evictions are then
//! slowed down or stopped.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

/// Evicted nodes per second in a normal zone (upstream's `--node-eviction-rate`).
const EVICTIONS_PER_SECOND: f64 = 0.1;
/// The rate in large zones with partial disruption; small ones stop evictions
/// (`--secondary-node-eviction-rate`, `--large-cluster-size-threshold`).
const SECONDARY_EVICTIONS_PER_SECOND: f64 = 0.01;
const LARGE_ZONE_NODES: usize = 50;
/// The fraction of unready nodes that makes a zone unhealthy (`--unhealthy-zone-threshold`).
const UNHEALTHY_ZONE_THRESHOLD: f64 = 0.55;

#[derive(Clone, Copy, Debug, PartialEq)]
enum ZoneState {
    Initial,
    Normal,
    PartialDisruption,
    /// No node is ready.
    FullDisruption,
}

#[derive(Debug)]
struct Zone {
    state: ZoneState,
    rate: f64,
    /// When the next node may be tainted.
    next: Option<Timestamp>,
}

/// The consequence of a change of zone states.
#[derive(Debug, PartialEq)]
pub enum ZoneChange {
    Nothing,
    /// The eviction rates of these zones changed.
    RatesChanged(Vec<String>),
    /// All zones are fully disrupted. Evictions stop.
    AllDisrupted,
    /// Some nodes are ready again. The grace periods of all nodes start over.
    SomeReady,
}

/// Whether a node may get a `NoExecute` taint now.
#[derive(Debug, PartialEq)]
pub enum RateLimit {
    Now,
    At(Timestamp),
    Never,
}

#[derive(Debug, Default)]
pub struct Zones {
    nodes: BTreeMap<String, (String, bool)>,
    zones: BTreeMap<String, Zone>,
}

impl Zones {
    /// Records the zone and readiness of a node.
    pub fn set(&mut self, node: &str, zone: &str, ready: bool) -> ZoneChange {
        let now = (zone.to_owned(), ready);
        if self.nodes.insert(node.to_owned(), now.clone()) == Some(now) {
            return ZoneChange::Nothing;
        }
        self.update_states()
    }

    pub fn remove(&mut self, node: &str) -> ZoneChange {
        if self.nodes.remove(node).is_none() { ZoneChange::Nothing } else { self.update_states() }
    }

    pub fn all_disrupted(&self) -> bool {
        !self.zones.is_empty() && self.zones.values().all(|zone| zone.state == ZoneState::FullDisruption)
    }

    /// Takes a slot of the zone's rate limit, if one is free.
    pub fn try_accept(&mut self, zone: &str, now: Timestamp) -> RateLimit {
        let Some(zone) = self.zones.get_mut(zone) else { return RateLimit::Now };
        if zone.rate == 0.0 {
            return RateLimit::Never;
        }
        match zone.next.filter(|next| *next > now) {
            Some(next) => RateLimit::At(next),
            None => {
                let pause = SignedDuration::from_secs_f64(1.0 / zone.rate);
                zone.next = now.checked_add(pause).ok();
                RateLimit::Now
            }
        }
    }

    fn update_states(&mut self) -> ZoneChange {
        let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for (zone, ready) in self.nodes.values() {
            let count = counts.entry(zone).or_default();
            count.0 += usize::from(*ready);
            count.1 += 1;
        }
        let was_all_disrupted = self.all_disrupted();
        self.zones.retain(|zone, _| counts.contains_key(zone.as_str()));
        let mut changed = Vec::new();
        for (name, (ready, all)) in &counts {
            let state = compute_zone_state(*ready, *all);
            let zone = self.zones.entry((*name).to_owned()).or_insert(Zone {
                state: ZoneState::Initial,
                rate: EVICTIONS_PER_SECOND,
                next: None,
            });
            if zone.state != state {
                zone.state = state;
                changed.push((*name).to_owned());
            }
        }
        let is_all_disrupted = self.all_disrupted();
        for (name, zone) in &mut self.zones {
            let size = counts.get(name.as_str()).map_or(0, |(_, all)| *all);
            zone.rate = match zone.state {
                _ if is_all_disrupted => 0.0,
                ZoneState::PartialDisruption if size > LARGE_ZONE_NODES => SECONDARY_EVICTIONS_PER_SECOND,
                ZoneState::PartialDisruption => 0.0,
                _ => EVICTIONS_PER_SECOND,
            };
        }
        match (was_all_disrupted, is_all_disrupted) {
            (false, true) => ZoneChange::AllDisrupted,
            (true, false) => ZoneChange::SomeReady,
            _ if changed.is_empty() || is_all_disrupted => ZoneChange::Nothing,
            _ => ZoneChange::RatesChanged(changed),
        }
    }
}

fn compute_zone_state(ready: usize, all: usize) -> ZoneState {
    let unready = all - ready;
    match ready {
        0 if unready > 0 => ZoneState::FullDisruption,
        _ if unready > 2 && unready as f64 / all as f64 >= UNHEALTHY_ZONE_THRESHOLD => {
            ZoneState::PartialDisruption
        }
        _ => ZoneState::Normal,
    }
}

//! How zones fare, and how quickly pods may be sent away from their nodes. Pure.
//!
//! When much of a zone is away at once, it is rather the network that is away: then pods leave slowly or not at
//! all.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

/// Nodes of a zone whose pods are sent away, per second, while most of the zone is well.
const EVICTIONS_PER_SECOND: f64 = 0.1;
/// The same while it is not, in large zones; in small ones nobody is sent away then.
const SECONDARY_EVICTIONS_PER_SECOND: f64 = 0.01;
const LARGE_ZONE_NODES: usize = 50;
/// The part of a zone that must be away for it not to be well.
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

/// What a change of zones means.
#[derive(Debug, PartialEq)]
pub enum ZoneChange {
    Nothing,
    /// These zones send pods away at another pace.
    RatesChanged(Vec<String>),
    /// All nodes are away: it must be us. Nobody is sent away.
    AllDisrupted,
    /// Some nodes are back; what was heard of nodes before counts for nothing.
    SomeReady,
}

/// Whether a node may be tainted so that its pods leave.
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
    /// A node is in a zone, and ready or not.
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

    /// Lets a node be tainted, if it may be now.
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

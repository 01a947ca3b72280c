//! How zones fare, and how quickly pods may be sent away from their nodes. Pure.
//!
//! When much of a zone is away at once, it is rather the network that is away: then pods leave slowly or not at
//! all.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

/// Nodes of a zone whose pods are sent away, per second, while most of the zone is well.
const RATE: f64 = 0.1;
/// The same while it is not, in large zones; in small ones nobody is sent away then.
const SLOW_RATE: f64 = 0.01;
const LARGE: usize = 50;
/// The part of a zone that must be away for it not to be well.
const UNWELL: f64 = 0.55;

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    New,
    Well,
    Unwell,
    /// No node is ready.
    Away,
}

#[derive(Debug)]
struct Zone {
    state: State,
    rate: f64,
    /// When the next node may be tainted.
    next: Option<Timestamp>,
}

/// What a change of zones means.
#[derive(Debug, PartialEq)]
pub enum Shift {
    Nothing,
    /// These zones send pods away at another pace.
    Paces(Vec<String>),
    /// All nodes are away: it must be us. Nobody is sent away.
    AllAway,
    /// Some nodes are back; what was heard of nodes before counts for nothing.
    SomeBack,
}

/// Whether a node may be tainted so that its pods leave.
#[derive(Debug, PartialEq)]
pub enum Admission {
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
    pub fn set(&mut self, node: &str, zone: &str, ready: bool) -> Shift {
        let now = (zone.to_owned(), ready);
        if self.nodes.insert(node.to_owned(), now.clone()) == Some(now) {
            return Shift::Nothing;
        }
        self.assess()
    }

    pub fn remove(&mut self, node: &str) -> Shift {
        if self.nodes.remove(node).is_none() { Shift::Nothing } else { self.assess() }
    }

    pub fn all_away(&self) -> bool {
        !self.zones.is_empty() && self.zones.values().all(|zone| zone.state == State::Away)
    }

    /// Lets a node be tainted, if it may be now.
    pub fn admit(&mut self, zone: &str, now: Timestamp) -> Admission {
        let Some(zone) = self.zones.get_mut(zone) else { return Admission::Now };
        if zone.rate == 0.0 {
            return Admission::Never;
        }
        match zone.next.filter(|next| *next > now) {
            Some(next) => Admission::At(next),
            None => {
                let pause = SignedDuration::from_secs_f64(1.0 / zone.rate);
                zone.next = now.checked_add(pause).ok();
                Admission::Now
            }
        }
    }

    fn assess(&mut self) -> Shift {
        let mut counts: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for (zone, ready) in self.nodes.values() {
            let count = counts.entry(zone).or_default();
            count.0 += usize::from(*ready);
            count.1 += 1;
        }
        let all_were_away = self.all_away();
        self.zones.retain(|zone, _| counts.contains_key(zone.as_str()));
        let mut changed = Vec::new();
        for (name, (ready, all)) in &counts {
            let state = state(*ready, *all);
            let zone = self.zones.entry((*name).to_owned()).or_insert(Zone {
                state: State::New,
                rate: RATE,
                next: None,
            });
            if zone.state != state {
                zone.state = state;
                changed.push((*name).to_owned());
            }
        }
        let all_are_away = self.all_away();
        for (name, zone) in &mut self.zones {
            let size = counts.get(name.as_str()).map_or(0, |(_, all)| *all);
            zone.rate = match zone.state {
                _ if all_are_away => 0.0,
                State::Unwell if size > LARGE => SLOW_RATE,
                State::Unwell => 0.0,
                _ => RATE,
            };
        }
        match (all_were_away, all_are_away) {
            (false, true) => Shift::AllAway,
            (true, false) => Shift::SomeBack,
            _ if changed.is_empty() || all_are_away => Shift::Nothing,
            _ => Shift::Paces(changed),
        }
    }
}

fn state(ready: usize, all: usize) -> State {
    let away = all - ready;
    match ready {
        0 if away > 0 => State::Away,
        _ if away > 2 && away as f64 / all as f64 >= UNWELL => State::Unwell,
        _ => State::Well,
    }
}

//! The search for devices: every request gets its own, one after the other, and what leads nowhere is undone.
//!
//! There is no state beside what has been given so far; whether a device may be given too is worked out from that
//! each time. A claim has few devices, so this is cheap, and nothing can be forgotten when something is undone.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::resource::v1 as resource;
use schema::quantity::Quantity;

use super::allocate::{Ask, Way};
use super::capacity;
use super::pools::{Market, Offer, Reach, add, consumption};

/// So many devices a claim may have.
const MOST_DEVICES: usize = 32;
/// So often is a device tried before the search is given up.
const MOST_STEPS: usize = 100_000;

/// A device for one of a claim's requests.
pub struct Given {
    /// Which of the offers.
    pub offer: usize,
    pub request: usize,
    pub way: usize,
    /// What is taken of a device that others may have too.
    pub consumed: Option<BTreeMap<String, Quantity>>,
}

pub struct Search<'s, 'o> {
    claims: &'s [Ask],
    market: &'s Market<'o>,
    pub offers: Vec<Offer<'o>>,
    /// For each claim.
    pub given: Vec<Vec<Given>>,
    /// The way that was gone, for each request of each claim.
    pub chosen: Vec<Vec<usize>>,
    /// Which offers a way wants, as far as it was asked.
    wanted: HashMap<(Place, usize), bool>,
    /// The devices of a way that wants all.
    all: HashMap<Place, Vec<usize>>,
    steps: usize,
}

/// Claim, request and way.
type Place = (usize, usize, usize);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    Yes,
    No,
    /// The claim would have more devices than it may.
    TooMany,
}

impl<'s, 'o> Search<'s, 'o> {
    /// Searches for devices for all claims; comes back without if there are none, and says so if that may be for
    /// another reason than that there are too few.
    pub fn run(
        claims: &'s [Ask],
        market: &'s Market<'o>,
        reach: Reach<'o>,
    ) -> Result<Option<Search<'s, 'o>>, String> {
        let mut search = Search {
            claims,
            market,
            offers: reach.offers,
            given: claims.iter().map(|_| Vec::new()).collect(),
            chosen: claims.iter().map(|claim| vec![0; claim.requests.len()]).collect(),
            wanted: HashMap::new(),
            all: HashMap::new(),
            steps: 0,
        };
        search.list_all(&reach.unusable)?;
        if search.request(0, 0) == Found::Yes {
            return Ok(Some(search));
        }
        if search.steps >= MOST_STEPS {
            return Err("timed out trying to allocate devices".to_owned());
        }
        match reach.unusable.iter().any(|(_, why)| *why == "invalid") {
            true => Err("invalid resource pools were encountered".to_owned()),
            false => Ok(None),
        }
    }

    /// Finds out how much "all" is.
    fn list_all(&mut self, unusable: &[(String, &'static str)]) -> Result<(), String> {
        for (c, claim) in self.claims.iter().enumerate() {
            for (r, request) in claim.requests.iter().enumerate() {
                for (w, way) in request.ways.iter().enumerate().filter(|(_, way)| way.count.is_none()) {
                    if let Some((pool, why)) = unusable.first() {
                        return Err(format!(
                            "claim {}, request {}: asks for all devices, but resource pool {pool} is currently {why}",
                            claim.key, way.own_name
                        ));
                    }
                    let wanted = (0..self.offers.len())
                        .filter(|offer| self.wants((c, r, w), *offer) && self.share(way, *offer).is_some());
                    let wanted = wanted.collect();
                    self.all.insert((c, r, w), wanted);
                }
            }
        }
        Ok(())
    }

    fn request(&mut self, claim: usize, request: usize) -> Found {
        let claims = self.claims;
        let Some(ask) = claims.get(claim) else { return Found::Yes };
        let Some(wanted) = ask.requests.get(request) else {
            // Other devices for this claim may leave another way to the next one.
            return match self.request(claim + 1, 0) {
                Found::TooMany => Found::No,
                found => found,
            };
        };
        let mut found = Found::TooMany;
        for way in 0..wanted.ways.len() {
            self.chosen[claim][request] = way;
            match self.device((claim, request, way), 0, 0) {
                Found::Yes => return Found::Yes,
                Found::No => found = Found::No,
                Found::TooMany => {}
            }
        }
        found
    }

    /// Gives a request its device number `index` and all that comes after it.
    fn device(&mut self, place: Place, index: usize, from: usize) -> Found {
        let (claim, request, way_index) = place;
        let claims = self.claims;
        let way = &claims[claim].requests[request].ways[way_index];
        let candidates = match way.count {
            Some(count) if index >= count => return self.request(claim, request + 1),
            Some(_) => (from..self.offers.len()).collect(),
            None => match self.all.get(&place) {
                Some(all) if index < all.len() => vec![all[index]],
                Some(all) if !all.is_empty() => return self.request(claim, request + 1),
                _ => return Found::No,
            },
        };
        let needed = way.count.unwrap_or_else(|| self.all[&place].len()) - index;
        if self.given[claim].len() + needed > MOST_DEVICES {
            return Found::TooMany;
        }
        for offer in candidates {
            self.steps += 1;
            if self.steps >= MOST_STEPS {
                return Found::No;
            }
            let Some(consumed) = self.may_give(place, way, offer) else { continue };
            self.given[claim].push(Given { offer, request, way: way_index, consumed });
            match self.device(place, index + 1, offer + 1) {
                Found::Yes => return Found::Yes,
                found => {
                    self.given[claim].pop();
                    if found == Found::TooMany {
                        return found;
                    }
                }
            }
        }
        Found::No
    }

    /// Whether a device can be given now, and what is taken of it if others may have it as well.
    fn may_give(
        &mut self,
        place: Place,
        way: &Way,
        offer: usize,
    ) -> Option<Option<BTreeMap<String, Quantity>>> {
        if self.in_use(place.0, way, offer) || !self.wants(place, offer) {
            return None;
        }
        let consumed = self.share(way, offer)?;
        let device = self.offers[offer].device;
        let allowed =
            tolerated(device, &way.tolerations) && self.counters_suffice(offer) && self.agrees(place, offer);
        allowed.then(|| is_shared(device).then_some(consumed))
    }

    fn wants(&mut self, place: Place, offer: usize) -> bool {
        if let Some(known) = self.wanted.get(&(place, offer)) {
            return *known;
        }
        let way = &self.claims[place.0].requests[place.1].ways[place.2];
        let Offer { id, device, .. } = &self.offers[offer];
        let wanted = way.selectors.iter().all(|selector| selector.matches(&id.0, device));
        self.wanted.insert((place, offer), wanted);
        wanted
    }

    fn in_use(&self, claim: usize, way: &Way, offer: usize) -> bool {
        if is_shared(self.offers[offer].device) {
            return false;
        }
        let has = |given: &Vec<Given>| given.iter().any(|given| given.offer == offer);
        match way.admin {
            // Looking over somebody's shoulder takes nothing away, but once is enough.
            true => has(&self.given[claim]),
            false => self.market.taken.contains(&self.offers[offer].id) || self.given.iter().any(has),
        }
    }

    /// What a way takes of a device's capacity, if there is so much left.
    fn share(&self, way: &Way, offer: usize) -> Option<BTreeMap<String, Quantity>> {
        let Offer { id, device, .. } = &self.offers[offer];
        let taken = capacity::taken(way.capacity.as_ref(), device)?;
        let mut sums = self.market.consumed.get(id).cloned().unwrap_or_default();
        let earlier = self.given.iter().flatten().filter(|given| given.offer == offer);
        let consumed = earlier.filter_map(|given| given.consumed.as_ref());
        for (name, amount) in consumed.chain([&taken]).flatten() {
            add(&mut sums, name, *amount);
        }
        let has_room = |(name, capacity): (&String, &resource::DeviceCapacity)| {
            sums.get(name).is_none_or(|sum| *sum <= capacity::quantity(&capacity.value))
        };
        device.capacity.iter().flatten().all(has_room).then_some(taken)
    }

    /// Whether the pool has enough of what the device is made of.
    fn counters_suffice(&self, offer: usize) -> bool {
        let Offer { id, device, pool, .. } = &self.offers[offer];
        let is_there = is_shared(device)
            && (self.market.consumed.contains_key(id)
                || self.given.iter().flatten().any(|given| given.offer == offer));
        if is_there || device.consumes_counters.as_ref().is_none_or(Vec::is_empty) {
            return true;
        }
        let mut given: Vec<usize> = self.given.iter().flatten().map(|given| given.offer).collect();
        given.push(offer);
        given.sort_unstable();
        given.dedup();
        let given = given.into_iter().map(|index| &self.offers[index]).filter(|one| one.pool == *pool);
        // A shared device that others have had is paid for.
        let new = given.filter(|one| !self.market.consumed.contains_key(&one.id));
        let mut left = self.market.pool(*pool).counters.clone();
        for (set, name, amount) in new.flat_map(|one| consumption(one.device)) {
            if let Some(left) = left.get_mut(&(set, name)) {
                *left = *left - amount;
            }
        }
        left.values().all(|left| !left.is_negative())
    }

    /// Whether a device has in common with the others of its claim what it must, and no more.
    fn agrees(&self, place: Place, offer: usize) -> bool {
        let claim = &self.claims[place.0];
        let name = |request: usize, way: usize| &claim.requests[request].ways[way];
        claim.constraints.iter().all(|constraint| {
            let concerns = |way: &Way| {
                constraint.requests.is_empty()
                    || constraint.requests.iter().any(|name| *name == way.name || *name == way.parent)
            };
            if !concerns(name(place.1, place.2)) {
                return true;
            }
            let value = |offer: usize| attribute(&self.offers[offer], &constraint.attribute);
            let Some(own) = value(offer) else { return false };
            let others = self.given[place.0].iter().filter(|given| concerns(name(given.request, given.way)));
            others.filter_map(|given| value(given.offer)).all(|other| (other == own) != constraint.distinct)
        })
    }
}

fn is_shared(device: &resource::Device) -> bool {
    device.allow_multiple_allocations == Some(true)
}

/// A device's attribute by its full name; those of the driver's own domain may be written without it.
fn attribute<'o>(offer: &Offer<'o>, name: &str) -> Option<&'o resource::DeviceAttribute> {
    let attributes = offer.device.attributes.as_ref()?;
    let short = || {
        let (domain, id) = name.split_once('/')?;
        attributes.get(id).filter(|_| domain == offer.id.0)
    };
    let found = attributes.get(name).or_else(short)?;
    let known =
        found.string.is_some() || found.int.is_some() || found.bool.is_some() || found.version.is_some();
    known.then_some(found)
}

fn tolerated(device: &resource::Device, tolerations: &[resource::DeviceToleration]) -> bool {
    let bears = |taint: &resource::DeviceTaint, toleration: &resource::DeviceToleration| {
        let some = |text: &Option<String>| text.clone().unwrap_or_default();
        let (key, effect) = (some(&toleration.key), some(&toleration.effect));
        (effect.is_empty() || effect == taint.effect)
            && (key.is_empty() || key == taint.key)
            && match toleration.operator.as_deref() {
                Some("Exists") => true,
                None | Some("" | "Equal") => some(&toleration.value) == some(&taint.value),
                Some(_) => false,
            }
    };
    let taints = device.taints.iter().flatten();
    let mut repelling = taints.filter(|taint| matches!(&*taint.effect, "NoSchedule" | "NoExecute"));
    repelling.all(|taint| tolerations.iter().any(|toleration| bears(taint, toleration)))
}

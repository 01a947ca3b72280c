//! Addresses given out, and to whom. What is known of a pod has its addresses, so that a later skiff says them again
//! ([`Pool::hold`]) and nothing else has to be written down.

use std::collections::BTreeMap;
use std::net::IpAddr;

use parking_lot::Mutex;

use crate::{Cidr, Error};

/// The first of a range that is a pod's: the one before it is this node's.
const FIRST_POD_INDEX: u64 = 2;

/// Addresses of this node's pods.
#[derive(Debug, Default)]
pub struct Pool {
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    owners: BTreeMap<IpAddr, String>,
    /// Where to look next: an address that has just been given back is not given out at once.
    next: u64,
}

impl Pool {
    /// One address of each range.
    pub fn allocate(&self, ranges: &[Cidr], owner: &str) -> Result<Vec<IpAddr>, Error> {
        let mut state = self.state.lock();
        let taken: Result<Vec<IpAddr>, Error> =
            ranges.iter().map(|range| state.allocate(*range, owner)).collect();
        if taken.is_err() {
            state.release(owner);
        }
        taken
    }

    /// An owner has this address already.
    pub fn reserve(&self, ip: IpAddr, owner: &str) {
        self.state.lock().owners.insert(ip, owner.to_owned());
    }

    /// All addresses of an owner are free again.
    pub fn release(&self, owner: &str) {
        self.state.lock().release(owner);
    }
}

impl PoolState {
    fn allocate(&mut self, range: Cidr, owner: &str) -> Result<IpAddr, Error> {
        let all = |from: u64| (from..).map_while(move |n| Some((n, range.nth(n)?)));
        let mut free = all(FIRST_POD_INDEX + self.next)
            .chain(all(FIRST_POD_INDEX))
            .filter(|(_, ip)| !self.owners.contains_key(ip));
        let (n, ip) = free.next().ok_or_else(|| Error::Exhausted { ranges: vec![range] })?;
        self.next = n - FIRST_POD_INDEX + 1;
        self.owners.insert(ip, owner.to_owned());
        Ok(ip)
    }

    fn release(&mut self, owner: &str) {
        self.owners.retain(|_, known| known != owner);
    }
}

//! Addresses given out, and to whom. What is known of a pod has its addresses, so that a later skiff says them again
//! ([`Pool::hold`]) and nothing else has to be written down.

use std::collections::BTreeMap;
use std::net::IpAddr;

use parking_lot::Mutex;

use crate::{Cidr, Error};

/// The first of a range that is a pod's: the one before it is this node's.
const FIRST: u64 = 2;

/// Addresses of this node's pods.
#[derive(Debug, Default)]
pub struct Pool {
    given: Mutex<Given>,
}

#[derive(Debug, Default)]
struct Given {
    owners: BTreeMap<IpAddr, String>,
    /// Where to look next: an address that has just been given back is not given out at once.
    next: u64,
}

impl Pool {
    /// One address of each range.
    pub fn take(&self, ranges: &[Cidr], owner: &str) -> Result<Vec<IpAddr>, Error> {
        let mut given = self.given.lock();
        let taken: Result<Vec<IpAddr>, Error> =
            ranges.iter().map(|range| given.take(*range, owner)).collect();
        if taken.is_err() {
            given.give_back(owner);
        }
        taken
    }

    /// An owner has this address already.
    pub fn hold(&self, ip: IpAddr, owner: &str) {
        self.given.lock().owners.insert(ip, owner.to_owned());
    }

    /// All addresses of an owner are free again.
    pub fn give_back(&self, owner: &str) {
        self.given.lock().give_back(owner);
    }
}

impl Given {
    fn take(&mut self, range: Cidr, owner: &str) -> Result<IpAddr, Error> {
        let all = |from: u64| (from..).map_while(move |n| Some((n, range.nth(n)?)));
        let mut free =
            all(FIRST + self.next).chain(all(FIRST)).filter(|(_, ip)| !self.owners.contains_key(ip));
        let (n, ip) = free.next().ok_or_else(|| Error::Exhausted { ranges: vec![range] })?;
        self.next = n - FIRST + 1;
        self.owners.insert(ip, owner.to_owned());
        Ok(ip)
    }

    fn give_back(&mut self, owner: &str) {
        self.owners.retain(|_, known| known != owner);
    }
}

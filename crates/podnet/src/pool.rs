//! Allocation of pod addresses. The pool is not persisted: after a restart the addresses in the records
//! of existing pods are reserved again with [`Pool::reserve`].

use std::collections::BTreeMap;
use std::net::IpAddr;

use parking_lot::Mutex;

use crate::{Cidr, Error};

/// The index of the first pod address in a range. The one before it is the node's gateway address.
const FIRST_POD_INDEX: u64 = 2;

/// The pod addresses of this node.
#[derive(Debug, Default)]
pub struct Pool {
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    owners: BTreeMap<IpAddr, String>,
    /// The index where the search starts, so that a released address is not reused immediately.
    next: u64,
}

impl Pool {
    /// Allocates one address from each range, or none at all.
    pub fn allocate(&self, ranges: &[Cidr], owner: &str) -> Result<Vec<IpAddr>, Error> {
        let mut state = self.state.lock();
        let taken: Result<Vec<IpAddr>, Error> =
            ranges.iter().map(|range| state.allocate(*range, owner)).collect();
        if taken.is_err() {
            state.release(owner);
        }
        taken
    }

    /// Marks an address as allocated to `owner`.
    pub fn reserve(&self, ip: IpAddr, owner: &str) {
        self.state.lock().owners.insert(ip, owner.to_owned());
    }

    /// Releases all addresses of an owner.
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

//! Addresses given out, each a file named by it that says to whom. Making a file that is not there yet is the one thing
//! that two can never both succeed in, and it outlives a crash.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Cidr, Error, doing};

/// Addresses of this node's pods.
#[derive(Debug)]
pub struct Pool {
    directory: PathBuf,
    /// Where to look next: an address that has just been given back is not given out at once.
    next: AtomicU64,
}

impl Pool {
    pub fn open(directory: &Path) -> Result<Pool, Error> {
        fs::create_dir_all(directory).map_err(doing(format!("make {}", directory.display())))?;
        Ok(Pool { directory: directory.to_owned(), next: AtomicU64::new(0) })
    }

    /// One address of each range.
    pub fn take(&self, ranges: &[Cidr], owner: &str) -> Result<Vec<IpAddr>, Error> {
        let mut taken = Vec::new();
        for range in ranges {
            match self.take_one(*range, owner) {
                Ok(ip) => taken.push(ip),
                Err(error) => {
                    self.give_back(owner);
                    return Err(error);
                }
            }
        }
        Ok(taken)
    }

    fn take_one(&self, range: Cidr, owner: &str) -> Result<IpAddr, Error> {
        // The first is this node's.
        const FIRST: u64 = 2;
        let start = self.next.fetch_add(1, Ordering::Relaxed);
        let mut wrapped = false;
        let mut n = FIRST + start;
        loop {
            let Some(ip) = range.nth(n) else {
                if wrapped {
                    return Err(Error::Exhausted { ranges: vec![range] });
                }
                wrapped = true;
                self.next.store(0, Ordering::Relaxed);
                n = FIRST;
                continue;
            };
            let path = self.directory.join(ip.to_string());
            match fs::File::create_new(&path).and_then(|mut file| file.write_all(owner.as_bytes())) {
                Ok(()) => {
                    self.next.store(n - FIRST + 1, Ordering::Relaxed);
                    return Ok(ip);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => n += 1,
                Err(error) => return Err(doing(format!("write {}", path.display()))(error)),
            }
        }
    }

    /// All addresses of an owner are free again.
    pub fn give_back(&self, owner: &str) {
        self.keep(|known| known != owner);
    }

    /// Frees the addresses of everybody else.
    pub fn only(&self, owners: &BTreeSet<String>) {
        self.keep(|known| owners.contains(known));
    }

    fn keep(&self, keep: impl Fn(&str) -> bool) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let owner = fs::read_to_string(entry.path()).unwrap_or_default();
            if !keep(&owner) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

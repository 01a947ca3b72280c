//! Makes the firewalls of other programs accept pod traffic. Docker, ufw and firewalld drop unknown
//! packets, so their chains get a jump to a chain of ours that accepts packets from and to pods and
//! nothing else. Chains of the administrator are not changed but reported. [`nft::foreign`] makes the
//! decisions.

mod legacy;

use std::collections::BTreeSet;
use std::io;

use nft::foreign::{self, Chain, ChainAction, Rule};
use nft::netlink::Encoded;
use nft::wire::{DONE, Message};
use nft::{IpNet, Name};

use crate::base_ruleset::MASQUERADE;
use crate::firewall::{FirewallError, TABLE, commit};
use crate::socket::NetfilterSocket;

/// The result of inspecting all tables.
#[derive(Debug, Default)]
pub struct HostFirewallReport {
    /// Chains and rules that drop packets of pods and that must not be changed.
    pub blocking_rules: Vec<String>,
    /// The base chains of our own table.
    own_chains: BTreeSet<String>,
    /// Chains that lack our rules, and whether each has our jump rule already.
    missing_accept: Vec<(Chain, bool)>,
}

impl HostFirewallReport {
    /// The chains to which accepting rules must be added.
    pub fn missing_accept(&self) -> impl Iterator<Item = &Chain> {
        self.missing_accept.iter().map(|(chain, _)| chain)
    }

    /// Whether our table has all of these base chains.
    pub fn has_base_chains<'a>(&self, mut bases: impl Iterator<Item = &'a Name>) -> bool {
        bases.all(|name| self.own_chains.contains(&**name))
    }
}

/// Inspects the chains of all tables without changing anything.
pub fn inspect(pods: &[IpNet]) -> io::Result<HostFirewallReport> {
    let chains = chains()?;
    let mut found =
        HostFirewallReport { blocking_rules: legacy::blocking_chains(), ..HostFirewallReport::default() };
    for chain in &chains {
        if is_own(chain) && chain.hook.is_some() {
            found.own_chains.insert(chain.name.clone());
        }
        if !chain.is_filter(TABLE) {
            continue;
        }
        match foreign::plan_chain(chain, &rules(chain)?, has_accept_chain(&chains, chain), pods) {
            ChainAction::Nothing => {}
            ChainAction::Accept { has_jump } => found.missing_accept.push((chain.clone(), has_jump)),
            ChainAction::Report(obstacle) => found.blocking_rules.push(obstacle.to_string()),
        }
    }
    Ok(found)
}

/// Adds the missing accepting rules to the chains of known programs.
pub fn accept(pods: &[IpNet]) -> Result<HostFirewallReport, FirewallError> {
    let found = inspect(pods)?;
    for (chain, has_jump) in &found.missing_accept {
        apply(&foreign::accept(chain, *has_jump, pods, MASQUERADE))?;
        tracing::info!(
            table = chain.table,
            chain = chain.name,
            "added rules that accept pod traffic to a chain of another program"
        );
    }
    Ok(found)
}

/// Removes our rules and chains from the tables of other programs.
pub fn remove() -> Result<(), FirewallError> {
    let chains = chains()?;
    for chain in chains.iter().filter(|chain| chain.is_filter(TABLE)) {
        if let Some(batch) = foreign::remove(chain, &rules(chain)?, has_accept_chain(&chains, chain)) {
            apply(&batch)?;
        }
    }
    Ok(())
}

fn is_own(chain: &Chain) -> bool {
    chain.family == foreign::Family::Inet && chain.table == TABLE
}

/// Whether our accepting chain exists in the table of `beside`.
fn has_accept_chain(chains: &[Chain], beside: &Chain) -> bool {
    chains.iter().any(|chain| {
        chain.family == beside.family
            && chain.table == beside.table
            && chain.name == beside.accept_chain_name()
    })
}

fn chains() -> io::Result<Vec<Chain>> {
    list(&foreign::list_chains(), foreign::chain)
}

fn rules(chain: &Chain) -> io::Result<Vec<Rule>> {
    match list(&foreign::list_rules(chain), foreign::rule) {
        // The chain was deleted in the meantime.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        rules => rules,
    }
}

fn list<T>(request: &[u8], parse: impl Fn(&Message<'_>) -> Option<T>) -> io::Result<Vec<T>> {
    let socket = NetfilterSocket::open(request.len())?;
    socket.send(request)?;
    let (mut found, mut buffer) = (Vec::new(), vec![0; 64 * 1024]);
    loop {
        for message in socket.receive(&mut buffer)? {
            if message.kind == DONE {
                return Ok(found);
            }
            if let Some(error) = message.error() {
                return Err(io::Error::from_raw_os_error(error));
            }
            found.extend(parse(&message));
        }
    }
}

fn apply(batch: &Encoded) -> Result<(), FirewallError> {
    commit(&NetfilterSocket::open(batch.bytes.len())?, batch)
}

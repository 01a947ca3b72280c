//! Encodes a batch as nfnetlink messages, so that no `nft` program is needed.

mod expressions;
mod slots;

use crate::wire::{APPEND, CREATE, Writer};
use crate::{
    BaseChain, Batch, ChainType, Command, DataType, Hook, IpFamily, Key, MatchValue, Name, Set, Verdict,
};
use expressions::rule;
pub use slots::EndpointSlots;
use slots::SlotRange;

/// NFNL_SUBSYS_NFTABLES.
pub const SUBSYS_NFTABLES: u16 = 10;
/// NFPROTO_INET: tables for both address families.
pub const INET: u8 = 1;
pub(crate) const BATCH_BEGIN: u16 = 0x10;
pub(crate) const BATCH_END: u16 = 0x11;
/// The most bytes of elements in one message. The length of a netlink attribute is limited to 64 KiB.
const MAX_ELEMENTS_BYTES: usize = 48 * 1024;

/// The nftables message types (`NFT_MSG_*`).
pub mod message {
    pub const NEW_TABLE: u16 = 0;
    pub const DELETE_TABLE: u16 = 2;
    pub const NEW_CHAIN: u16 = 3;
    pub const GET_CHAIN: u16 = 4;
    pub const DELETE_CHAIN: u16 = 5;
    pub const NEW_RULE: u16 = 6;
    pub const GET_RULE: u16 = 7;
    pub const DELETE_RULE: u16 = 8;
    pub const NEW_SET: u16 = 9;
    pub const DELETE_SET: u16 = 11;
    pub const NEW_ELEMENTS: u16 = 12;
    pub const DELETE_ELEMENTS: u16 = 14;
}

/// Set flags (`NFT_SET_*`).
mod flag {
    pub const ANONYMOUS: u32 = 0x1;
    pub const CONSTANT: u32 = 0x2;
    pub const INTERVAL: u32 = 0x4;
    pub const MAP: u32 = 0x8;
    pub const TIMEOUT: u32 = 0x10;
    pub const DYNAMIC: u32 = 0x20;
}

/// The data type of verdict maps (NFT_DATA_VERDICT).
const VERDICT_TYPE: u32 = 0xffff_ff00;
/// Data types of `nft list`. The kernel does not interpret them.
const INTEGER_TYPE: u32 = 4;
const IFNAME_TYPE: u32 = 41;
/// The size of an interface name (IFNAMSIZ).
const LINK_NAME_BYTES: usize = 16;
/// Set userdata that marks keys as host byte order for `nft list`.
const USERDATA_HOST_ENDIAN: [u8; 6] = [0, 4, 1, 0, 0, 0];

/// An encoded batch for the table `inet <table>`, with the sequence numbers of its first message and of
/// the one that is acknowledged last.
#[derive(Debug)]
pub struct Encoded {
    pub bytes: Vec<u8>,
    pub first: u32,
    pub last: u32,
}

/// Encodes a batch that has at least one command. `slots` is the allocation state of the endpoint maps.
/// It must be from a table to which all earlier batches were applied, unless the batch recreates the
/// table.
pub fn encode(table: &str, batch: &Batch, slots: &mut EndpointSlots) -> Encoded {
    slots.begin_batch();
    let mut out = Encoder { family: INET, table, out: Writer::starting_at(1), sets: 0, slots };
    let of_batch = (0, SUBSYS_NFTABLES);
    out.out.message(BATCH_BEGIN, 0, of_batch, |_| {});
    for command in &batch.commands {
        out.command(command);
    }
    // Kernels before 6.10 do not acknowledge the end of a batch, but the last message in it.
    let last = out.out.request_ack();
    out.out.message(BATCH_END, 0, of_batch, |_| {});
    Encoded { bytes: out.out.bytes, first: 1, last }
}

struct Encoder<'a> {
    family: u8,
    table: &'a str,
    out: Writer,
    /// The number of sets created in this batch, used as set IDs.
    sets: u32,
    slots: &'a mut EndpointSlots,
}

/// Encodes the expressions of a rule that needs no sets, for a table of this family.
pub(crate) fn expressions(family: u8, statements: &[crate::Statement]) -> Vec<u8> {
    let mut slots = EndpointSlots::default();
    let mut encoder = Encoder { family, table: "", out: Writer::default(), sets: 0, slots: &mut slots };
    rule(&mut encoder, &"".into(), statements)
}

/// An anonymous set, which belongs to one rule.
struct AnonymousSet {
    id: u32,
    name: &'static str,
}

impl Encoder<'_> {
    fn message(&mut self, kind: u16, flags: u16, fill: impl FnOnce(&mut Writer)) {
        let (family, table) = (self.family, self.table);
        self.out.message(SUBSYS_NFTABLES << 8 | kind, flags, (family, 0), |out| {
            out.text(1, table);
            fill(out);
        });
    }

    fn command(&mut self, command: &Command) {
        match command {
            Command::RecreateTable => {
                // Deleting a table that does not exist is an error, so it is created first.
                self.message(message::NEW_TABLE, CREATE, |_| {});
                self.message(message::DELETE_TABLE, 0, |_| {});
                self.message(message::NEW_TABLE, CREATE, |_| {});
                *self.slots = EndpointSlots::default();
                self.slots.begin_batch();
            }
            Command::DeleteTable => {
                // Deleting a table that does not exist is an error, so it is created first.
                self.message(message::NEW_TABLE, CREATE, |_| {});
                self.message(message::DELETE_TABLE, 0, |_| {});
            }
            Command::AddSet(name, set) => self.add_set(name, set),
            Command::AddChain(name, base) => self.add_chain(name, base.as_ref()),
            Command::FlushChain(chain) => {
                self.message(message::DELETE_RULE, 0, |out| out.text(2, chain));
                self.free_slots(chain);
            }
            Command::AddRule(chain, statements) => {
                let expressions = rule(self, chain, statements);
                self.message(message::NEW_RULE, CREATE | APPEND, |out| {
                    out.text(2, chain);
                    out.nested(4, |out| out.bytes.extend(expressions));
                });
            }
            Command::AddElements(set, elements) => {
                let elements = elements.iter().map(|(key, verdict)| element(key, verdict.as_ref()));
                self.elements(message::NEW_ELEMENTS, CREATE, set, None, elements);
            }
            Command::DeleteElements(set, elements) => {
                let elements = elements.iter().map(|(key, _)| element(key, None));
                self.elements(message::DELETE_ELEMENTS, 0, set, None, elements);
            }
            Command::DeleteChain(name) => self.message(message::DELETE_CHAIN, 0, |out| out.text(3, name)),
            Command::DeleteSet(name) => self.message(message::DELETE_SET, 0, |out| out.text(2, name)),
        }
    }

    /// Allocates slots for the endpoints of a rule in this chain, and creates the endpoint map if it is
    /// new.
    fn allocate_slots(&mut self, chain: &Name, ip: IpFamily, count: usize) -> SlotRange {
        let slot_range = self.slots.allocate(chain, ip, count);
        if slot_range.is_new {
            self.add_endpoint_map(&slot_range);
        }
        slot_range
    }

    /// Creates an endpoint map: slot number to address and port.
    fn add_endpoint_map(&mut self, slot_range: &SlotRange) {
        let address = slot_range.ip.address();
        let number = self.sets + 1;
        self.sets = number;
        self.message(message::NEW_SET, CREATE, |out| {
            out.text(2, &slot_range.map_name());
            out.u32(3, flag::MAP);
            out.u32(4, INTEGER_TYPE);
            out.u32(5, 4);
            out.u32(6, type_number(address) << 6 | type_number(DataType::Port));
            out.u32(7, width(address) + width(DataType::Port));
            out.u32(10, number);
            out.attribute(13, &USERDATA_HOST_ENDIAN);
        });
    }

    /// Frees the slots of a chain whose rules are deleted, and deletes the endpoints in them.
    fn free_slots(&mut self, chain: &Name) {
        for slot_range in self.slots.free(chain) {
            let elements = slot_range.numbers.clone().map(|number| boundary(&number.to_ne_bytes(), false));
            self.elements(message::DELETE_ELEMENTS, 0, &slot_range.map_name(), None, elements);
        }
    }

    fn add_chain(&mut self, name: &Name, base: Option<&BaseChain>) {
        self.message(message::NEW_CHAIN, CREATE, |out| {
            out.text(3, name);
            let Some(base) = base else { return };
            out.nested(4, |out| {
                out.u32(1, hook(base.hook));
                out.attribute(2, &base.priority.to_be_bytes());
            });
            out.text(7, if base.chain_type == ChainType::Nat { "nat" } else { "filter" });
        });
    }

    fn add_set(&mut self, name: &Name, set: &Set) {
        let mut flags = 0;
        if set.is_verdict_map {
            flags |= flag::MAP;
        }
        if set.ranges {
            flags |= flag::INTERVAL;
        }
        if set.timeout_seconds.is_some() {
            flags |= flag::TIMEOUT | flag::DYNAMIC;
        }
        let number = self.sets + 1;
        self.sets = number;
        self.message(message::NEW_SET, CREATE, |out| {
            out.text(2, name);
            out.u32(3, flags);
            out.u32(4, set.key.iter().fold(0, |number, key| number << 6 | type_number(*key)));
            out.u32(5, set.key.iter().map(|key| width(*key)).sum());
            if set.is_verdict_map {
                out.u32(6, VERDICT_TYPE);
            }
            if let Some(seconds) = set.timeout_seconds {
                out.u64(11, u64::from(seconds) * 1000);
            }
            out.u32(10, number);
        });
    }

    /// Adds an anonymous set. `key` is the type and width of its keys; `data`, for maps, that of its
    /// values.
    fn add_anonymous_set(
        &mut self,
        key: (u32, u32),
        data: Option<(u32, u32)>,
        has_ranges: bool,
        elements: Vec<Vec<u8>>,
    ) -> AnonymousSet {
        let name = if data.is_some() { "__map%d" } else { "__set%d" };
        let id = self.sets + 1;
        self.sets = id;
        let count = u32::try_from(elements.len()).unwrap_or(u32::MAX);
        self.message(message::NEW_SET, CREATE, |out| {
            out.text(2, name);
            let map = if data.is_some() { flag::MAP } else { 0 };
            let interval = if has_ranges { flag::INTERVAL } else { 0 };
            out.u32(3, flag::ANONYMOUS | flag::CONSTANT | map | interval);
            out.u32(4, key.0);
            out.u32(5, key.1);
            if let Some((kind, width)) = data {
                out.u32(6, kind);
                out.u32(7, width);
            }
            out.nested(9, |out| out.u32(1, count));
            out.u32(10, id);
            if matches!(key.0, INTEGER_TYPE | IFNAME_TYPE) {
                out.attribute(13, &USERDATA_HOST_ENDIAN);
            }
        });
        self.elements(message::NEW_ELEMENTS, CREATE, name, Some(id), elements.into_iter());
        AnonymousSet { id, name }
    }

    /// Adds or deletes elements, split into as many messages as necessary.
    fn elements(
        &mut self,
        kind: u16,
        flags: u16,
        set: &str,
        id: Option<u32>,
        elements: impl Iterator<Item = Vec<u8>>,
    ) {
        let mut elements = elements.peekable();
        while elements.peek().is_some() {
            let mut bytes = Vec::new();
            while let Some(element) = elements.next_if(|next| bytes.len() + next.len() < MAX_ELEMENTS_BYTES) {
                bytes.extend(element);
            }
            self.message(kind, flags, |out| {
                out.text(2, set);
                out.nested(3, |out| out.bytes.extend(bytes));
                if let Some(id) = id {
                    out.u32(4, id);
                }
            });
        }
    }
}

/// Encodes an element with its verdict.
fn element(key: &Key, verdict: Option<&Verdict>) -> Vec<u8> {
    let mut out = Writer::default();
    out.nested(1, |out| {
        out.nested(1, |out| out.attribute(1, &key_bytes(key)));
        if let Some(verdict) = verdict {
            out.nested(2, |out| verdict_data(out, verdict));
        }
    });
    out.bytes
}

/// Encodes a single key, or one end of an interval, as an element.
fn boundary(key: &[u8], is_end: bool) -> Vec<u8> {
    let mut out = Writer::default();
    out.nested(1, |out| {
        out.nested(1, |out| out.attribute(1, key));
        if is_end {
            out.u32(3, 1);
        }
    });
    out.bytes
}

pub(crate) fn verdict_data(out: &mut Writer, verdict: &Verdict) {
    let (code, chain): (i32, Option<&Name>) = match verdict {
        Verdict::Drop => (0, None),
        Verdict::Accept => (1, None),
        Verdict::Jump(chain) => (-3, Some(chain)),
        Verdict::Goto(chain) => (-4, Some(chain)),
        Verdict::Return => (-5, None),
    };
    out.nested(2, |out| {
        out.attribute(1, &code.to_be_bytes());
        if let Some(chain) = chain {
            out.text(2, chain);
        }
    });
}

/// Concatenated key fields, each padded to four bytes.
fn key_bytes(key: &[MatchValue]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in key {
        bytes.extend(value_bytes(value));
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    // A single field is not padded.
    if let [value] = key {
        bytes.truncate(value_bytes(value).len());
    }
    bytes
}

fn value_bytes(value: &MatchValue) -> Vec<u8> {
    use std::net::IpAddr;
    let address = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    match value {
        MatchValue::Address(one) => address(one),
        MatchValue::Net(net) => address(&net.first()),
        MatchValue::Proto(proto) => vec![proto_number(*proto)],
        MatchValue::Port(port) | MatchValue::Ports(port, _) => port.to_be_bytes().to_vec(),
        MatchValue::Family(IpFamily::V4) => vec![2],
        MatchValue::Family(IpFamily::V6) => vec![10],
        MatchValue::Link(name) => {
            let mut bytes = name.as_bytes().to_vec();
            bytes.resize(LINK_NAME_BYTES, 0);
            bytes
        }
    }
}

fn proto_number(proto: crate::Proto) -> u8 {
    match proto {
        crate::Proto::Tcp => 6,
        crate::Proto::Udp => 17,
        crate::Proto::Sctp => 132,
    }
}

fn hook(hook: Hook) -> u32 {
    match hook {
        Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    }
}

fn type_number(kind: DataType) -> u32 {
    match kind {
        DataType::V4 => 7,
        DataType::V6 => 8,
        DataType::Proto => 12,
        DataType::Port => 13,
    }
}

/// The width of a field in a concatenated key, in bytes.
fn width(kind: DataType) -> u32 {
    match kind {
        DataType::V6 => 16,
        DataType::V4 | DataType::Proto | DataType::Port => 4,
    }
}

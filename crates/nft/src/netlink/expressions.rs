//! Encodes rules as expressions of the kernel's nftables virtual machine: load registers, compare,
//! decide.

use std::net::{IpAddr, SocketAddr};

use super::{
    AnonymousSet, Encoder, IFNAME_TYPE, INET, INTEGER_TYPE, VERDICT_TYPE, boundary, key_bytes, message,
    value_bytes, verdict_data,
};
use crate::wire::{CREATE, Writer};
use crate::{Field, IpFamily, MatchValue, Name, Statement, Verdict};

/// The verdict register, and the first of the 32-bit data registers.
const VERDICT_REGISTER: u32 = 0;
const FIRST_REGISTER: u32 = 8;
const CMP_EQUAL: u32 = 0;
const CMP_NOT_EQUAL: u32 = 1;

/// Keys and values of the `meta`, `ct`, `fib`, `nat` and `reject` expressions.
const META_MARK: u32 = 3;
const META_LINK: u32 = 6;
const META_FAMILY: u32 = 15;
const META_PROTO: u32 = 16;
const CT_STATE: u32 = 0;
const CT_STATUS: u32 = 2;
const STATE_ESTABLISHED_OR_RELATED: u32 = 2 | 4;
const STATE_NEW: u32 = 8;
const STATUS_DNAT: u32 = 0x20;
const FIB_SOURCE: u32 = 1;
const FIB_DESTINATION: u32 = 2;
const FIB_TYPE: u32 = 3;
const ADDR_TYPE_LOCAL: u32 = 2;
const NAT_TYPE_DNAT: u32 = 1;
const FULLY_RANDOM: u32 = 0x10;
/// Port unreachable, translated to the ICMP code of either family.
const REJECT_TYPE_ICMP_ANY_FAMILY: u32 = 2;
const PORT_UNREACHABLE: u8 = 1;

/// Encodes the expressions of a rule in `chain`. Anonymous sets and endpoints that the rule needs are
/// written before it.
pub fn rule(encoder: &mut Encoder<'_>, chain: &Name, statements: &[Statement]) -> Vec<u8> {
    let mut rule = Expressions { encoder, out: Writer::default(), family: None };
    for statement in statements {
        match statement {
            Statement::Dnat(to) => rule.dnat(chain, to),
            other => rule.statement(other),
        }
    }
    rule.out.bytes
}

struct Expressions<'a, 'b> {
    encoder: &'a mut Encoder<'b>,
    out: Writer,
    /// The family that the rule has matched already.
    family: Option<IpFamily>,
}

impl Expressions<'_, '_> {
    fn add(&mut self, name: &str, fill: impl FnOnce(&mut Writer)) {
        self.out.nested(1, |out| {
            out.text(1, name);
            out.nested(2, fill);
        });
    }

    fn statement(&mut self, statement: &Statement) {
        match statement {
            Statement::Match { field, not, any } => self.match_field(*field, *not, any),
            Statement::InSet { fields, set } => {
                self.load(fields);
                self.lookup(set, None, false, None);
            }
            Statement::Lookup { fields, map } => {
                self.load(fields);
                self.lookup(map, None, false, Some(VERDICT_REGISTER));
            }
            Statement::SourceIsLocal => self.is_local(FIB_SOURCE),
            Statement::DestinationIsLocal => self.is_local(FIB_DESTINATION),
            Statement::StateNew => self.match_conntrack(CT_STATE, STATE_NEW),
            Statement::StateEstablished => self.match_conntrack(CT_STATE, STATE_ESTABLISHED_OR_RELATED),
            Statement::IsDnat => self.match_conntrack(CT_STATUS, STATUS_DNAT),
            Statement::HasMark(bit) => {
                self.meta(META_MARK, FIRST_REGISTER);
                self.has_bits(*bit);
            }
            Statement::SetMark(bit) => self.change_mark(!bit, *bit),
            Statement::ClearMark(bit) => self.change_mark(u32::MAX, *bit),
            Statement::RandomVerdict(verdicts) => self.random_verdict(verdicts),
            // Handled in [`rule`], which knows the chain.
            Statement::Dnat(_) => {}
            Statement::Masquerade => self.add("masq", |out| out.u32(1, FULLY_RANDOM)),
            Statement::AddSourceToSet { set, ip } => {
                self.load(&[Field::Source(*ip)]);
                self.add("dynset", |out| {
                    out.text(1, set);
                    out.u32(3, 1);
                    out.u32(4, FIRST_REGISTER);
                });
            }
            Statement::Verdict(verdict) => self.add("immediate", |out| {
                out.u32(1, VERDICT_REGISTER);
                out.nested(2, |out| verdict_data(out, verdict));
            }),
            Statement::Reject => self.add("reject", |out| {
                out.u32(1, REJECT_TYPE_ICMP_ANY_FAMILY);
                out.attribute(2, &[PORT_UNREACHABLE]);
            }),
        }
    }

    fn match_field(&mut self, field: Field, not: bool, any: &[MatchValue]) {
        self.load(&[field]);
        let operator = if not { CMP_NOT_EQUAL } else { CMP_EQUAL };
        match any {
            [MatchValue::Net(net)] => {
                self.mask(net.first(), net.bits());
                self.compare(operator, &value_bytes(&any[0]));
            }
            [MatchValue::Ports(from, to)] => self.add("range", |out| {
                out.u32(1, FIRST_REGISTER);
                out.u32(2, operator);
                out.nested(3, |out| out.attribute(1, &from.to_be_bytes()));
                out.nested(4, |out| out.attribute(1, &to.to_be_bytes()));
            }),
            [one] => self.compare(operator, &value_bytes(one)),
            several => self.match_any(field, not, several),
        }
    }

    fn match_any(&mut self, field: Field, not: bool, any: &[MatchValue]) {
        let has_ranges = any.iter().any(|value| matches!(value, MatchValue::Net(_) | MatchValue::Ports(..)));
        let elements = match has_ranges {
            true => any.iter().flat_map(interval_elements).collect(),
            false => any.iter().map(|value| boundary(&key_bytes(&[*value]), false)).collect(),
        };
        let width = any.first().map_or(0, |value| value_bytes(value).len());
        let key = (type_of(field), u32::try_from(width).unwrap_or_default());
        let set = self.encoder.add_anonymous_set(key, None, has_ranges, elements);
        self.lookup(set.name, Some(&set), not, None);
    }

    fn lookup(&mut self, set: &str, unnamed: Option<&AnonymousSet>, not: bool, to: Option<u32>) {
        self.add("lookup", |out| {
            out.text(1, set);
            out.u32(2, FIRST_REGISTER);
            if let Some(to) = to {
                out.u32(3, to);
            }
            if let Some(unnamed) = unnamed {
                out.u32(4, unnamed.id);
            }
            if not {
                out.u32(5, 1);
            }
        });
    }

    /// Loads fields into consecutive registers. Matches the address family first, because in an inet
    /// table the offset of an address depends on it.
    fn load(&mut self, fields: &[Field]) {
        for field in fields {
            if let Field::Source(ip) | Field::Destination(ip) = field
                && self.family != Some(*ip)
                && self.encoder.family == INET
            {
                self.meta(META_FAMILY, FIRST_REGISTER);
                self.compare(CMP_EQUAL, &value_bytes(&MatchValue::Family(*ip)));
                self.family = Some(*ip);
            }
        }
        let mut register = FIRST_REGISTER;
        for field in fields {
            let used = match field {
                Field::Source(IpFamily::V4) => self.payload(register, (1, 12, 4)),
                Field::Destination(IpFamily::V4) => self.payload(register, (1, 16, 4)),
                Field::Source(IpFamily::V6) => self.payload(register, (1, 8, 16)),
                Field::Destination(IpFamily::V6) => self.payload(register, (1, 24, 16)),
                Field::DestinationPort => self.payload(register, (2, 2, 2)),
                Field::Proto => self.meta(META_PROTO, register),
                Field::Family => self.meta(META_FAMILY, register),
                Field::Link => 3 + self.meta(META_LINK, register),
            };
            register += used;
        }
    }

    /// Loads bytes of a header by base, offset and length. Returns the number of registers used.
    fn payload(&mut self, register: u32, (base, offset, length): (u32, u32, u32)) -> u32 {
        self.add("payload", |out| {
            out.u32(1, register);
            out.u32(2, base);
            out.u32(3, offset);
            out.u32(4, length);
        });
        length.div_ceil(4)
    }

    fn meta(&mut self, key: u32, register: u32) -> u32 {
        self.add("meta", |out| {
            out.u32(1, register);
            out.u32(2, key);
        });
        1
    }

    fn compare(&mut self, operator: u32, value: &[u8]) {
        self.add("cmp", |out| {
            out.u32(1, FIRST_REGISTER);
            out.u32(2, operator);
            out.nested(3, |out| out.attribute(1, value));
        });
    }

    fn mask_bits(&mut self, mask: &[u8], flip: &[u8]) {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        self.add("bitwise", |out| {
            out.u32(1, FIRST_REGISTER);
            out.u32(2, FIRST_REGISTER);
            out.u32(3, length);
            out.nested(4, |out| out.attribute(1, mask));
            out.nested(5, |out| out.attribute(1, flip));
        });
    }

    fn mask(&mut self, address: IpAddr, bits: u8) {
        let width: usize = if address.is_ipv6() { 16 } else { 4 };
        if usize::from(bits) == width * 8 {
            return;
        }
        let mask: Vec<u8> = (0..width)
            .map(|byte| {
                let left = usize::from(bits).saturating_sub(byte * 8).min(8);
                u8::MAX.checked_shl(8 - u32::try_from(left).unwrap_or(8)).unwrap_or(0)
            })
            .collect();
        self.mask_bits(&mask, &vec![0; width]);
    }

    /// Matches if any of these bits of the register is set.
    fn has_bits(&mut self, bits: u32) {
        self.mask_bits(&bits.to_ne_bytes(), &[0; 4]);
        self.compare(CMP_NOT_EQUAL, &[0; 4]);
    }

    fn match_conntrack(&mut self, key: u32, bits: u32) {
        self.add("ct", |out| {
            out.u32(1, FIRST_REGISTER);
            out.u32(2, key);
        });
        self.has_bits(bits);
    }

    fn is_local(&mut self, which: u32) {
        self.add("fib", |out| {
            out.u32(1, FIRST_REGISTER);
            out.u32(2, FIB_TYPE);
            out.u32(3, which);
        });
        self.compare(CMP_EQUAL, &ADDR_TYPE_LOCAL.to_ne_bytes());
    }

    fn change_mark(&mut self, mask: u32, flip: u32) {
        self.meta(META_MARK, FIRST_REGISTER);
        self.mask_bits(&mask.to_ne_bytes(), &flip.to_ne_bytes());
        self.add("meta", |out| {
            out.u32(2, META_MARK);
            out.u32(3, FIRST_REGISTER);
        });
    }

    /// Generates a random number from `first` to `first + count - 1`.
    fn random(&mut self, first: u32, count: usize) {
        self.add("numgen", |out| {
            out.u32(1, FIRST_REGISTER);
            out.u32(2, u32::try_from(count).unwrap_or(u32::MAX));
            out.u32(3, 1);
            out.u32(4, first);
        });
    }

    fn random_verdict(&mut self, verdicts: &[Verdict]) {
        let value = |verdict: &Verdict| {
            let mut out = Writer::default();
            verdict_data(&mut out, verdict);
            out.bytes
        };
        let elements = indexed_elements(0, verdicts.iter().map(value));
        let map =
            self.encoder.add_anonymous_set((INTEGER_TYPE, 4), Some((VERDICT_TYPE, 16)), false, elements);
        self.random(0, verdicts.len());
        self.lookup(map.name, Some(&map), false, Some(VERDICT_REGISTER));
    }

    fn dnat(&mut self, chain: &Name, to: &[SocketAddr]) {
        let Some(first) = to.first() else { return };
        let (family, registers) = if first.is_ipv6() { (10, 4) } else { (2, 1) };
        let bytes = |to: &SocketAddr| key_bytes(&[MatchValue::Address(to.ip()), MatchValue::Port(to.port())]);
        if to.len() == 1 {
            self.immediate(FIRST_REGISTER, &value_bytes(&MatchValue::Address(first.ip())));
            self.immediate(FIRST_REGISTER + registers, &first.port().to_be_bytes());
        } else {
            let value = |to: &SocketAddr| {
                let mut out = Writer::default();
                out.attribute(1, &bytes(to));
                out.bytes
            };
            let slot_range = self.encoder.allocate_slots(chain, IpFamily::of(first.ip()), to.len());
            let (map, start) = (slot_range.map_name(), slot_range.numbers.start);
            let elements = indexed_elements(start, to.iter().map(value)).into_iter();
            self.encoder.elements(message::NEW_ELEMENTS, CREATE, &map, None, elements);
            self.random(start, to.len());
            self.lookup(&map, None, false, Some(FIRST_REGISTER));
        }
        self.add("nat", |out| {
            out.u32(1, NAT_TYPE_DNAT);
            out.u32(2, family);
            out.u32(3, FIRST_REGISTER);
            out.u32(5, FIRST_REGISTER + registers);
        });
    }

    fn immediate(&mut self, register: u32, value: &[u8]) {
        self.add("immediate", |out| {
            out.u32(1, register);
            out.nested(2, |out| out.attribute(1, value));
        });
    }
}

/// Encodes map elements with consecutive numbers from `first` as keys.
fn indexed_elements(first: u32, values: impl Iterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
    let element = |(value, number): (Vec<u8>, u32)| {
        let mut out = Writer::default();
        out.nested(1, |out| {
            out.nested(1, |out| out.attribute(1, &number.to_ne_bytes()));
            out.nested(2, |out| out.bytes.extend(value));
        });
        out.bytes
    };
    values.zip(first..).map(element).collect()
}

fn type_of(field: Field) -> u32 {
    match field {
        Field::Source(IpFamily::V4) | Field::Destination(IpFamily::V4) => 7,
        Field::Source(IpFamily::V6) | Field::Destination(IpFamily::V6) => 8,
        Field::Proto => 12,
        Field::DestinationPort => 13,
        Field::Family => 2,
        Field::Link => IFNAME_TYPE,
    }
}

/// Encodes an interval: its first value, and the value after its last as an end element. An interval up
/// to the maximum has no end element.
fn interval_elements(value: &MatchValue) -> Vec<Vec<u8>> {
    let first = value_bytes(value);
    let last = match value {
        MatchValue::Net(net) => value_bytes(&MatchValue::Address(net.last())),
        MatchValue::Ports(_, to) => to.to_be_bytes().to_vec(),
        _ => first.clone(),
    };
    let mut after = last;
    let is_last_value = after.iter_mut().rev().all(|byte| {
        *byte = byte.wrapping_add(1);
        *byte == 0
    });
    let end = (!is_last_value).then(|| boundary(&after, true));
    [boundary(&first, false)].into_iter().chain(end).collect()
}

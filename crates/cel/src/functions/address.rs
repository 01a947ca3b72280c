//! The IP and CIDR libraries.

use std::fmt;
use std::net::IpAddr;

use super::{FunctionOp, overload_error};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{LibraryValue, Value};

/// An IP address. IPv4-mapped IPv6 addresses are rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpAddress(IpAddr);

/// A CIDR: an address with a prefix length. Host bits are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CidrBlock {
    address: IpAddr,
    bits: u8,
}

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "ip" => |_, args| match args {
            [Value::String(text)] => parse(text).map(ip_value).map_err(EvalError::new),
            [Value::Library(LibraryValue::Cidr(block))] => Ok(ip_value(IpAddress(block.address))),
            _ => overload_error(),
        },
        "isIP" => |_, args| match args {
            [Value::String(text)] => Ok(Value::Bool(parse(text).is_ok())),
            _ => overload_error(),
        },
        "ip.isCanonical" => |_, args| match args {
            [Value::String(text)] => {
                parse(text).map(|address| Value::Bool(address.to_string() == **text)).map_err(EvalError::new)
            }
            _ => overload_error(),
        },
        "family" => |_, args| with_ip(args, |ip| Value::Int(if ip.is_ipv4() { 4 } else { 6 })),
        "isUnspecified" => |_, args| with_ip(args, |ip| Value::Bool(ip.is_unspecified())),
        "isLoopback" => |_, args| with_ip(args, |ip| Value::Bool(ip.is_loopback())),
        "isLinkLocalMulticast" => |_, args| with_ip(args, |ip| Value::Bool(is_link_local_multicast(ip))),
        "isLinkLocalUnicast" => |_, args| with_ip(args, |ip| Value::Bool(is_link_local_unicast(ip))),
        "isGlobalUnicast" => |_, args| with_ip(args, |ip| Value::Bool(is_global_unicast(ip))),
        "cidr" => |_, args| match args {
            [Value::String(text)] => parse_block(text)
                .map(|block| Value::Library(LibraryValue::Cidr(block)))
                .map_err(network_error),
            _ => overload_error(),
        },
        "isCIDR" => |_, args| match args {
            [Value::String(text)] => Ok(Value::Bool(parse_block(text).is_ok())),
            _ => overload_error(),
        },
        "prefixLength" => |_, args| match args {
            [Value::Library(LibraryValue::Cidr(block))] => Ok(Value::Int(block.bits.into())),
            _ => overload_error(),
        },
        "masked" => |_, args| match args {
            [Value::Library(LibraryValue::Cidr(block))] => {
                let address = masked(block.address, block.bits);
                Ok(Value::Library(LibraryValue::Cidr(CidrBlock { address, ..*block })))
            }
            _ => overload_error(),
        },
        "containsIP" => |_, args| {
            let (block, address) = match args {
                [Value::Library(LibraryValue::Cidr(block)), Value::Library(LibraryValue::Ip(address))] => {
                    (block, *address)
                }
                [Value::Library(LibraryValue::Cidr(block)), Value::String(text)] => {
                    (block, parse(text).map_err(EvalError::new)?)
                }
                _ => return overload_error(),
            };
            Ok(Value::Bool(contains_address(block, address.0)))
        },
        "containsCIDR" => |_, args| {
            let (block, other) = match args {
                [Value::Library(LibraryValue::Cidr(block)), Value::Library(LibraryValue::Cidr(other))] => {
                    (block, *other)
                }
                [Value::Library(LibraryValue::Cidr(block)), Value::String(text)] => {
                    (block, parse_block(text).map_err(network_error)?)
                }
                _ => return overload_error(),
            };
            Ok(Value::Bool(block.bits <= other.bits && contains_address(block, other.address)))
        },
        _ => return None,
    })
}

fn network_error(words: String) -> EvalError {
    EvalError::new(format!("network address parse error during conversion from string: {words}"))
}

fn ip_value<'a>(address: IpAddress) -> Value<'a> {
    Value::Library(LibraryValue::Ip(address))
}

fn with_ip<'a>(args: &[Value<'a>], read: impl Fn(IpAddr) -> Value<'a>) -> EvalResult<'a> {
    match args {
        [Value::Library(LibraryValue::Ip(address))] => Ok(read(address.0)),
        _ => overload_error(),
    }
}

fn parse(text: &str) -> Result<IpAddress, String> {
    if let Some((address, _)) = text.split_once('%')
        && address.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6())
    {
        return Err(format!("IP address {text:?} with zone value is not allowed"));
    }
    let address: IpAddr = text.parse().map_err(|_| {
        format!(
            "IP Address {text:?} parse error during conversion from string: ParseAddr({text:?}): unable to parse IP"
        )
    })?;
    if is_mapped(address) {
        return Err(format!("IPv4-mapped IPv6 address {text:?} is not allowed"));
    }
    Ok(IpAddress(address))
}

fn parse_block(text: &str) -> Result<CidrBlock, String> {
    let invalid = |reason: &str| {
        Err(format!(
            "network address parse error during conversion from string: netip.ParsePrefix({text:?}): {reason}"
        ))
    };
    let Some((address, length)) = text.rsplit_once('/') else { return invalid("no '/'") };
    let Ok(address) = address.parse::<IpAddr>() else {
        return invalid(&format!("ParseAddr({address:?}): unable to parse IP"));
    };
    let digits = length.bytes().all(|byte| byte.is_ascii_digit());
    if !digits || length.is_empty() || (length.len() > 1 && length.starts_with('0')) {
        return invalid(&format!("bad bits after slash: {length:?}"));
    }
    let max_bits = if address.is_ipv4() { 32 } else { 128 };
    let bits = match length.parse::<u8>() {
        Ok(bits) if bits <= max_bits => bits,
        _ => return invalid("prefix length out of range"),
    };
    if is_mapped(address) {
        return Err(format!("IPv4-mapped IPv6 address {text:?} is not allowed"));
    }
    Ok(CidrBlock { address, bits })
}

fn is_mapped(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some())
}

fn masked(address: IpAddr, bits: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            IpAddr::V4((u32::from(v4) & mask).into())
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            IpAddr::V6((u128::from(v6) & mask).into())
        }
    }
}

fn contains_address(block: &CidrBlock, address: IpAddr) -> bool {
    block.address.is_ipv4() == address.is_ipv4()
        && masked(block.address, block.bits) == masked(address, block.bits)
}

fn is_link_local_unicast(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.segments()[0] & 0xffc0 == 0xfe80,
    }
}

fn is_link_local_multicast(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.segments()[0] & 0xff0f == 0xff02,
    }
}

fn is_global_unicast(ip: IpAddr) -> bool {
    let broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
    !ip.is_unspecified()
        && !ip.is_loopback()
        && !ip.is_multicast()
        && !is_link_local_unicast(ip)
        && !broadcast
}

impl IpAddress {
    pub(crate) fn bytes(&self) -> usize {
        if self.0.is_ipv4() { 4 } else { 16 }
    }
}

impl CidrBlock {
    pub(crate) fn bytes(&self) -> usize {
        usize::from(self.bits).div_ceil(8)
    }
}

impl fmt::Display for IpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for CidrBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

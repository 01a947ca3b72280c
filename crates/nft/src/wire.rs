//! Reads and writes netlink messages: a header, then attributes, which may be nested. Values of
//! netfilter are in network byte order, those of netlink itself in host byte order.

/// The sizes of the netlink header and of the nfnetlink header that follows it.
pub const HEADER_BYTES: usize = 16;
const FAMILY_HEADER_BYTES: usize = 4;
const NESTED_FLAG: u16 = 0x8000;

/// Request flags (`NLM_F_*`).
pub const REQUEST: u16 = 0x1;
pub const ACK: u16 = 0x4;
pub const DUMP: u16 = 0x300;
pub const CREATE: u16 = 0x400;
pub const APPEND: u16 = 0x800;

/// Message types of responses (`NLMSG_*`).
pub const ERROR: u16 = 2;
pub const DONE: u16 = 3;

/// A buffer of consecutive messages that are being written.
#[derive(Debug, Default)]
pub struct Writer {
    pub bytes: Vec<u8>,
    /// The sequence number of the next message.
    pub sequence: u32,
    /// The offset of the last message.
    last: usize,
}

impl Writer {
    /// Starts with this sequence number.
    pub fn starting_at(sequence: u32) -> Writer {
        Writer { sequence, ..Writer::default() }
    }

    /// Writes an nfnetlink message. `fill` writes its attributes.
    pub fn message(&mut self, kind: u16, flags: u16, family: (u8, u16), fill: impl FnOnce(&mut Writer)) {
        let start = self.bytes.len();
        self.last = start;
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | REQUEST).to_ne_bytes());
        self.bytes.extend(self.sequence.to_ne_bytes());
        self.bytes.extend([0; 4]);
        let (family, resource) = family;
        self.bytes.extend([family, 0]);
        self.bytes.extend(resource.to_be_bytes());
        fill(self);
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.sequence += 1;
    }

    /// Requests an acknowledgement of the last message. Returns its sequence number.
    pub fn request_ack(&mut self) -> u32 {
        let flags = &mut self.bytes[self.last + 6..self.last + 8];
        let with_ack = u16::from_ne_bytes([flags[0], flags[1]]) | ACK;
        flags.copy_from_slice(&with_ack.to_ne_bytes());
        self.sequence - 1
    }

    pub fn attribute(&mut self, kind: u16, value: &[u8]) {
        // Names have a maximum length and element lists are split, so the value never comes near the
        // limit.
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.pad();
    }

    pub fn u32(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }

    pub fn u64(&mut self, kind: u16, value: u64) {
        self.attribute(kind, &value.to_be_bytes());
    }

    pub fn text(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes);
    }

    pub fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Writer)) {
        let start = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend((kind | NESTED_FLAG).to_ne_bytes());
        fill(self);
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    fn pad(&mut self) {
        let length = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(length, 0);
    }
}

/// A received message.
#[derive(Debug, PartialEq)]
pub struct Message<'a> {
    pub kind: u16,
    pub sequence: u32,
    /// The netlink port ID of the socket that made the request which this message is about.
    pub port: u32,
    /// The content after the netlink header.
    pub body: &'a [u8],
}

impl<'a> Message<'a> {
    /// The errno of an error message; 0 is an acknowledgement.
    pub fn error(&self) -> Option<i32> {
        let bytes = self.body.get(..4).filter(|_| self.kind == ERROR)?;
        Some(-i32::from_ne_bytes(bytes.try_into().ok()?))
    }

    /// The address family in the nfnetlink header.
    pub fn family(&self) -> Option<u8> {
        self.body.first().copied()
    }

    /// The attributes of an nfnetlink message.
    pub fn attributes(&self) -> impl Iterator<Item = (u16, &'a [u8])> + use<'a> {
        attributes(self.body.get(FAMILY_HEADER_BYTES..).unwrap_or_default())
    }
}

/// The messages in a received buffer. Stops at the first one that is truncated.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let number = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let length = usize::try_from(number(0)?).ok()?;
        let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
        let message =
            Message { kind, sequence: number(8)?, port: number(12)?, body: bytes.get(HEADER_BYTES..length)? };
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes in a buffer. The flags of their types are removed.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & 0x3fff;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Finds the value of an attribute.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn written_messages_parse_back() {
        let mut writer = Writer::starting_at(7);
        writer.message(0xa06, CREATE, (1, 0), |out| {
            out.text(1, "skiff");
            out.nested(4, |out| out.u32(2, 5));
        });
        writer.message(0xa07, 0, (1, 0), |_| {});
        assert_eq!(writer.request_ack(), 8);
        let read: Vec<Message<'_>> = messages(&writer.bytes).collect();
        assert_eq!(
            read.iter().map(|message| (message.kind, message.sequence)).collect::<Vec<_>>(),
            [(0xa06, 7), (0xa07, 8)]
        );
        let attributes: Vec<_> = read[0].attributes().collect();
        assert_eq!(attributes[0], (1, &b"skiff\0"[..]));
        assert_eq!(attribute(attributes[1].1, 2), Some(&[0, 0, 0, 5][..]));
    }

    proptest! {
        /// Arbitrary input is parsed to the end without panics.
        #[test]
        fn malformed_messages_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for message in messages(&bytes) {
                message.error();
                message.attributes().for_each(drop);
            }
        }
    }
}

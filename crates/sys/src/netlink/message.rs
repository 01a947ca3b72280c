//! The format of netlink messages: headers and attributes, each padded to four bytes.

const HEADER_BYTES: usize = 16;

/// A request that is being built.
pub struct Message {
    bytes: Vec<u8>,
}

/// The fields of a response header that are needed.
pub struct Header {
    pub kind: u16,
    pub sequence: u32,
}

impl Message {
    pub fn new(kind: u16, flags: u16) -> Message {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        // NLM_F_REQUEST
        bytes[6..8].copy_from_slice(&(flags | 1).to_ne_bytes());
        Message { bytes }
    }

    pub fn link(kind: u16, flags: u16, index: u32, state: u32, change: u32) -> Message {
        let mut message = Message::new(kind, flags);
        message.link_header(index, state, change);
        message
    }

    pub fn link_header(&mut self, index: u32, state: u32, change: u32) {
        self.raw(&[0; 4]);
        self.raw(&index.to_ne_bytes());
        self.raw(&state.to_ne_bytes());
        self.raw(&change.to_ne_bytes());
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.nested(kind, |message| message.raw(value));
    }

    pub fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Message)) {
        let start = self.bytes.len();
        self.raw(&[0; 4]);
        fill(self);
        let length = u16::try_from(self.bytes.len() - start).expect("requests are short");
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.bytes[start + 2..start + 4].copy_from_slice(&kind.to_ne_bytes());
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    pub fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.bytes[6], self.bytes[7]])
    }

    pub fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).expect("requests are short");
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// A name as a NUL-terminated string.
pub fn c_string(name: &str) -> Vec<u8> {
    [name.as_bytes(), b"\0"].concat()
}

/// The messages in received bytes.
pub fn split_messages(mut bytes: &[u8]) -> impl Iterator<Item = (Header, &[u8])> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
        let header = Header {
            kind: u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?),
            sequence: u32::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?),
        };
        let body = bytes.get(HEADER_BYTES..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((header, body))
    })
}

/// The attributes in the body of a message.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    /// NLA_TYPE_MASK
    const TYPE_MASK: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & TYPE_MASK;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_messages_parse_back() {
        let mut message = Message::new(16, 4);
        message.attribute(3, b"name\0");
        message.nested(18, |nested| nested.attribute(1, b"veth"));
        let bytes = message.finish(7);
        let (header, body) = split_messages(&bytes).next().unwrap();
        assert_eq!((header.kind, header.sequence), (16, 7));
        let found: Vec<_> = attributes(body).collect();
        assert_eq!(found[0], (3, &b"name\0"[..]));
        assert_eq!(attributes(found[1].1).next(), Some((1, &b"veth"[..])));
    }

    #[test]
    fn malformed_input_ends_parsing() {
        for bytes in [&[0u8; 3][..], &[0; 16], &[255; 40], &[4, 0, 0, 0]] {
            assert!(split_messages(bytes).count() < 3);
            assert!(attributes(bytes).count() < 12);
        }
    }
}

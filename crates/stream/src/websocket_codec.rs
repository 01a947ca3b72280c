//! The server side of WebSocket (RFC 6455): messages in both directions over an upgraded
//! connection.

use std::io;

use base64::Engine as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// The maximum size of a message. Larger ones are rejected.
const MAX_MESSAGE_BYTES: u64 = 32 << 20;
const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The value of `Sec-WebSocket-Accept` for a `Sec-WebSocket-Key`.
pub fn accept_key(key: &str) -> String {
    const ACCEPT_GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    let digest = ring::digest::digest(
        &ring::digest::SHA1_FOR_LEGACY_USE_ONLY,
        format!("{key}{ACCEPT_GUID}").as_bytes(),
    );
    base64::engine::general_purpose::STANDARD.encode(digest)
}

/// A message from the client.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    Data(Vec<u8>),
    /// The server must respond with [`Sender::pong`].
    Ping(Vec<u8>),
    Close,
}

pub struct Receiver<R> {
    io: R,
    received: Vec<u8>,
    /// The fragments of an incomplete message.
    message: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Receiver<R> {
    pub fn new(io: R) -> Receiver<R> {
        Receiver { io, received: Vec::new(), message: Vec::new() }
    }

    /// The next message. `None` if the client has disconnected. Cancel-safe.
    pub async fn next(&mut self) -> io::Result<Option<Message>> {
        loop {
            if let Some((header, body)) = take_frame(&mut self.received)? {
                match header.opcode {
                    CONTINUATION | TEXT | BINARY => {
                        if self.message.len() as u64 + body.len() as u64 > MAX_MESSAGE_BYTES {
                            return Err(invalid("message is too large"));
                        }
                        self.message.extend(body);
                        if header.is_last {
                            return Ok(Some(Message::Data(std::mem::take(&mut self.message))));
                        }
                    }
                    PING => return Ok(Some(Message::Ping(body))),
                    CLOSE => return Ok(Some(Message::Close)),
                    PONG => {}
                    _ => return Err(invalid("unknown frame opcode")),
                }
                continue;
            }
            if self.io.read_buf(&mut self.received).await? == 0 {
                return Ok(None);
            }
        }
    }
}

struct FrameHeader {
    opcode: u8,
    is_last: bool,
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// Removes the first frame from `received` if it is complete.
fn take_frame(received: &mut Vec<u8>) -> io::Result<Option<(FrameHeader, Vec<u8>)>> {
    let [first, second, ..] = received[..] else { return Ok(None) };
    let header = FrameHeader { opcode: first & 0x0f, is_last: first & 0x80 != 0 };
    if second & 0x80 == 0 {
        return Err(invalid("client frame is not masked"));
    }
    let (length, start) = match second & 0x7f {
        126 => match received.get(2..4).and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => (u64::from(u16::from_be_bytes(bytes)), 4),
            None => return Ok(None),
        },
        127 => match received.get(2..10).and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => (u64::from_be_bytes(bytes), 10),
            None => return Ok(None),
        },
        short => (u64::from(short), 2),
    };
    if length > MAX_MESSAGE_BYTES {
        return Err(invalid("frame is too large"));
    }
    let end = start + 4 + usize::try_from(length).map_err(|_| invalid("frame is too large"))?;
    if received.len() < end {
        return Ok(None);
    }
    let mask = [received[start], received[start + 1], received[start + 2], received[start + 3]];
    let body =
        received[start + 4..end].iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask).collect();
    received.drain(..end);
    Ok(Some((header, body)))
}

pub struct Sender<W> {
    io: W,
}

impl<W: AsyncWrite + Unpin> Sender<W> {
    pub fn new(io: W) -> Sender<W> {
        Sender { io }
    }

    pub async fn data(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        self.write_frame(BINARY, parts).await
    }

    pub async fn pong(&mut self, body: &[u8]) -> io::Result<()> {
        self.write_frame(PONG, &[body]).await
    }

    /// Sends a close frame and closes the connection.
    pub async fn close(&mut self) -> io::Result<()> {
        const NORMAL_CLOSURE: u16 = 1000;
        self.write_frame(CLOSE, &[&NORMAL_CLOSURE.to_be_bytes()]).await?;
        self.io.shutdown().await
    }

    async fn write_frame(&mut self, opcode: u8, parts: &[&[u8]]) -> io::Result<()> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let mut frame = vec![0x80 | opcode];
        match (u8::try_from(length), u16::try_from(length)) {
            (Ok(short), _) if short < 126 => frame.push(short),
            (_, Ok(middle)) => {
                frame.push(126);
                frame.extend(middle.to_be_bytes());
            }
            _ => {
                frame.push(127);
                frame.extend((length as u64).to_be_bytes());
            }
        }
        parts.iter().for_each(|part| frame.extend_from_slice(part));
        self.io.write_all(&frame).await?;
        self.io.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_key_matches_rfc_example() {
        assert_eq!(accept_key("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    fn masked_frame(first: u8, body: &[u8]) -> Vec<u8> {
        let mask = [1, 2, 3, 4];
        let masked_body = body.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask);
        let length = if body.len() < 126 {
            vec![0x80 | body.len() as u8]
        } else {
            [&[0x80 | 126][..], &(body.len() as u16).to_be_bytes()].concat()
        };
        [vec![first], length, mask.to_vec(), masked_body.collect()].concat()
    }

    #[tokio::test]
    async fn message_may_be_split_around_ping() {
        let bytes = [
            masked_frame(0x02, b"he"),
            masked_frame(0x89, b"p"),
            masked_frame(0x80, b"llo"),
            masked_frame(0x82, &[7; 300]),
            masked_frame(0x88, b""),
        ]
        .concat();
        let mut receiver = Receiver::new(&bytes[..]);
        let mut received = Vec::new();
        while let Some(message) = receiver.next().await.unwrap() {
            received.push(message);
        }
        let expected = [
            Message::Ping(b"p".into()),
            Message::Data(b"hello".into()),
            Message::Data(vec![7; 300]),
            Message::Close,
        ];
        assert_eq!(received, expected);
        assert!(Receiver::new(&[0x82u8, 3, 1, 2, 3][..]).next().await.is_err());
        assert!(
            Receiver::new(&[0x82u8, 0xff, 255, 255, 255, 255, 255, 255, 255, 255][..]).next().await.is_err()
        );
    }

    #[tokio::test]
    async fn header_size_matches_payload_length() {
        for length in [0usize, 125, 126, 65_535, 65_536] {
            let mut sent = Vec::new();
            Sender::new(&mut sent).data(&[&[1], &vec![9; length]]).await.unwrap();
            let header = match length + 1 {
                0..126 => 2,
                126..65_536 => 4,
                _ => 10,
            };
            assert_eq!(sent.len(), header + 1 + length);
        }
    }
}

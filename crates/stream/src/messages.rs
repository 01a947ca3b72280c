//! WebSocket, the server's side: messages both ways over a connection that was upgraded (RFC 6455).

use std::io;

use base64::Engine as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// A message larger than this is from somebody who means no good.
const LARGEST: u64 = 32 << 20;
const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// What the answer to an upgrade proves its understanding with.
pub fn accept_key(key: &str) -> String {
    const MAGIC: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    let digest =
        ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{MAGIC}").as_bytes());
    base64::engine::general_purpose::STANDARD.encode(digest)
}

/// What the client says.
#[derive(Debug, PartialEq, Eq)]
pub enum Message {
    Data(Vec<u8>),
    /// To be answered with [`Sender::pong`].
    Ping(Vec<u8>),
    Close,
}

/// Reads messages.
pub struct Receiver<R> {
    io: R,
    received: Vec<u8>,
    /// The parts of a message so far.
    message: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Receiver<R> {
    pub fn new(io: R) -> Receiver<R> {
        Receiver { io, received: Vec::new(), message: Vec::new() }
    }

    /// The next message; `None` when the client is gone. May be dropped half way and called again.
    pub async fn next(&mut self) -> io::Result<Option<Message>> {
        loop {
            if let Some((header, body)) = take(&mut self.received)? {
                match header.kind {
                    CONTINUATION | TEXT | BINARY => {
                        if self.message.len() as u64 + body.len() as u64 > LARGEST {
                            return Err(invalid("a message is too large"));
                        }
                        self.message.extend(body);
                        if header.is_last {
                            return Ok(Some(Message::Data(std::mem::take(&mut self.message))));
                        }
                    }
                    PING => return Ok(Some(Message::Ping(body))),
                    CLOSE => return Ok(Some(Message::Close)),
                    PONG => {}
                    _ => return Err(invalid("an unknown kind of frame")),
                }
                continue;
            }
            if self.io.read_buf(&mut self.received).await? == 0 {
                return Ok(None);
            }
        }
    }
}

struct Header {
    kind: u8,
    is_last: bool,
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Takes the first frame off what was received, once it is all there.
fn take(received: &mut Vec<u8>) -> io::Result<Option<(Header, Vec<u8>)>> {
    let [first, second, ..] = received[..] else { return Ok(None) };
    let header = Header { kind: first & 0x0f, is_last: first & 0x80 != 0 };
    if second & 0x80 == 0 {
        return Err(invalid("a client's frame without a mask"));
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
    if length > LARGEST {
        return Err(invalid("a frame is too large"));
    }
    let end = start + 4 + usize::try_from(length).map_err(|_| invalid("a frame is too large"))?;
    if received.len() < end {
        return Ok(None);
    }
    let mask = [received[start], received[start + 1], received[start + 2], received[start + 3]];
    let body =
        received[start + 4..end].iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask).collect();
    received.drain(..end);
    Ok(Some((header, body)))
}

/// Writes messages.
pub struct Sender<W> {
    io: W,
}

impl<W: AsyncWrite + Unpin> Sender<W> {
    pub fn new(io: W) -> Sender<W> {
        Sender { io }
    }

    pub async fn data(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        self.frame(BINARY, parts).await
    }

    pub async fn pong(&mut self, body: &[u8]) -> io::Result<()> {
        self.frame(PONG, &[body]).await
    }

    /// Says goodbye; nothing may follow.
    pub async fn close(&mut self) -> io::Result<()> {
        const NORMAL: u16 = 1000;
        self.frame(CLOSE, &[&NORMAL.to_be_bytes()]).await?;
        self.io.shutdown().await
    }

    async fn frame(&mut self, kind: u8, parts: &[&[u8]]) -> io::Result<()> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let mut frame = vec![0x80 | kind];
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
    fn the_key_of_the_specification() {
        assert_eq!(accept_key("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    fn masked(first: u8, body: &[u8]) -> Vec<u8> {
        let mask = [1, 2, 3, 4];
        let masked = body.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask);
        let length = if body.len() < 126 {
            vec![0x80 | body.len() as u8]
        } else {
            [&[0x80 | 126][..], &(body.len() as u16).to_be_bytes()].concat()
        };
        [vec![first], length, mask.to_vec(), masked.collect()].concat()
    }

    #[tokio::test]
    async fn messages_in_parts_and_pings_between() {
        let bytes = [
            masked(0x02, b"he"),
            masked(0x89, b"p"),
            masked(0x80, b"llo"),
            masked(0x82, &[7; 300]),
            masked(0x88, b""),
        ]
        .concat();
        let mut receiver = Receiver::new(&bytes[..]);
        let mut heard = Vec::new();
        while let Some(message) = receiver.next().await.unwrap() {
            heard.push(message);
        }
        let expected = [
            Message::Ping(b"p".into()),
            Message::Data(b"hello".into()),
            Message::Data(vec![7; 300]),
            Message::Close,
        ];
        assert_eq!(heard, expected);
        assert!(Receiver::new(&[0x82u8, 3, 1, 2, 3][..]).next().await.is_err());
        assert!(
            Receiver::new(&[0x82u8, 0xff, 255, 255, 255, 255, 255, 255, 255, 255][..]).next().await.is_err()
        );
    }

    #[tokio::test]
    async fn frames_of_all_lengths() {
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

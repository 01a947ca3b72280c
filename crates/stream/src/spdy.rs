//! SPDY/3.1, in the subset that Kubernetes clients and servers use: streams opened by the client
//! with a few headers, and data in both directions. Flow control is omitted; no Kubernetes
//! implementation has it.

mod headers;

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use headers::HeaderDecompressor;

const MAX_FRAME_BYTES: usize = 16 << 20;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const FIN: u8 = 1;

/// A frame from the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// The client opens a stream. The server must respond with [`Sender::accept`].
    Open {
        stream: u32,
        headers: Vec<(String, String)>,
        is_last: bool,
    },
    Data {
        stream: u32,
        bytes: Vec<u8>,
        is_last: bool,
    },
    /// The peer aborts a stream.
    Reset {
        stream: u32,
    },
    /// The receiver must respond with [`Sender::ping`].
    Ping(u32),
    GoAway,
}

pub struct Receiver<R> {
    io: R,
    received: Vec<u8>,
    header_decompressor: HeaderDecompressor,
}

impl<R: AsyncRead + Unpin> Receiver<R> {
    pub fn new(io: R) -> Receiver<R> {
        Receiver { io, received: Vec::new(), header_decompressor: HeaderDecompressor::new() }
    }

    /// The next frame. `None` if the peer has disconnected. Cancel-safe.
    pub async fn next(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(length) = self.frame_length()? {
                let frame: Vec<u8> = self.received.drain(..length).collect();
                match self.parse_frame(&frame)? {
                    Some(frame) => return Ok(Some(frame)),
                    None => continue,
                }
            }
            if self.io.read_buf(&mut self.received).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// The length of the first frame, if it is complete.
    fn frame_length(&self) -> io::Result<Option<usize>> {
        let Some(header) = self.received.first_chunk::<8>() else { return Ok(None) };
        let length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize + 8;
        if length > MAX_FRAME_BYTES {
            return Err(invalid("frame is too large"));
        }
        Ok((self.received.len() >= length).then_some(length))
    }

    fn parse_frame(&mut self, frame: &[u8]) -> io::Result<Option<Frame>> {
        let (first, flags, body) = (read_u32(frame, 0)?, frame[4], &frame[8..]);
        let is_last = flags & FIN != 0;
        if first & 0x8000_0000 == 0 {
            return Ok(Some(Frame::Data { stream: first, bytes: body.to_vec(), is_last }));
        }
        Ok(match (first & 0xffff) as u16 {
            SYN_STREAM => {
                let stream = read_u32(body, 0)? & 0x7fff_ffff;
                let block = body.get(10..).ok_or_else(|| invalid("SYN_STREAM without headers"))?;
                let headers = self.header_decompressor.decompress_headers(block)?;
                Some(Frame::Open { stream, headers, is_last })
            }
            // Unused headers must be decompressed, too, because all blocks of a connection share
            // the compression state.
            SYN_REPLY | 8 => {
                self.header_decompressor.decompress_headers(body.get(4..).unwrap_or_default())?;
                None
            }
            RST_STREAM => Some(Frame::Reset { stream: read_u32(body, 0)? & 0x7fff_ffff }),
            PING => Some(Frame::Ping(read_u32(body, 0)?)),
            GOAWAY => Some(Frame::GoAway),
            _ => None,
        })
    }
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

fn read_u32(bytes: &[u8], at: usize) -> io::Result<u32> {
    let found = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    found.map(u32::from_be_bytes).ok_or_else(|| invalid("frame is too short"))
}

pub struct Sender<W> {
    io: W,
    has_sent_headers: bool,
}

impl<W: AsyncWrite + Unpin> Sender<W> {
    pub fn new(io: W) -> Sender<W> {
        Sender { io, has_sent_headers: false }
    }

    /// Opens a stream as a client. The ID must be odd and greater than the previous one.
    pub async fn open(&mut self, stream: u32, headers: &[(&str, &str)]) -> io::Result<()> {
        let block = headers::stored_block(&headers::encode_headers(headers), !self.has_sent_headers);
        self.has_sent_headers = true;
        // No associated stream, highest priority, no slot.
        self.write_control_frame(SYN_STREAM, &[&stream.to_be_bytes()[..], &[0; 6], &block].concat()).await
    }

    /// Accepts a stream that the client has opened.
    pub async fn accept(&mut self, stream: u32) -> io::Result<()> {
        // No headers: a count of zero.
        let block = headers::stored_block(&0u32.to_be_bytes(), !self.has_sent_headers);
        self.has_sent_headers = true;
        self.write_control_frame(SYN_REPLY, &[&stream.to_be_bytes()[..], &block].concat()).await
    }

    pub async fn data(&mut self, stream: u32, bytes: &[u8], is_last: bool) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(|_| invalid("too much data"))?;
        let flags = if is_last { u32::from(FIN) << 24 } else { 0 };
        let header = [stream.to_be_bytes(), (flags | length).to_be_bytes()].concat();
        self.io.write_all(&[&header, bytes].concat()).await?;
        self.io.flush().await
    }

    pub async fn ping(&mut self, id: u32) -> io::Result<()> {
        self.write_control_frame(PING, &id.to_be_bytes()).await
    }

    /// Aborts a stream.
    pub async fn reset(&mut self, stream: u32) -> io::Result<()> {
        const CANCEL: u32 = 5;
        self.write_control_frame(RST_STREAM, &[stream.to_be_bytes(), CANCEL.to_be_bytes()].concat()).await
    }

    /// Closes the connection.
    pub async fn close(&mut self) -> io::Result<()> {
        self.io.shutdown().await
    }

    async fn write_control_frame(&mut self, frame_type: u16, body: &[u8]) -> io::Result<()> {
        let length = u32::try_from(body.len()).map_err(|_| invalid("too much data"))?;
        let first = 0x8003_0000 | u32::from(frame_type);
        self.io.write_all(&[&first.to_be_bytes()[..], &length.to_be_bytes(), body].concat()).await?;
        self.io.flush().await
    }
}

#[cfg(test)]
mod tests;

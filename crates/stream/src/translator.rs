//! Translates between clients that use WebSocket and servers that use SPDY.
//!
//! [`translate`] is for exec and attach: every message starts with its channel
//! (`v5.channel.k8s.io`, in which the client can close a channel), and the upstream server has a
//! stream for each channel. [`tunnel_spdy`] is for port-forward, where the messages contain the
//! SPDY bytes themselves.
//!
//! Both directions run independently, because each may block on its reader. A single loop would
//! deadlock on a command that echoes its input.
//!
//! Counterpart upstream: `k8s.io/apiserver/pkg/util/proxy` (`StreamTranslatorHandler`,
//! `TunnelingHandler`).

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;

use crate::spdy::{self, Frame};
use crate::websocket_codec::{self, Message};

/// The channel numbers of the WebSocket protocol.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The first byte of a message that closes a channel.
const STREAM_CLOSE: u8 = 255;
/// The maximum size of a data frame that is written at once. SPDY limits frames to 16 MiB.
const MAX_DATA_FRAME_BYTES: usize = 256 << 10;
/// The number of pongs that may be queued. Further pings are not answered.
const MAX_PENDING_PINGS: usize = 4;
/// The delay before the first message to a client. kubectl starts to read before it has registered
/// its channels, and drops messages that arrive in between. Other runtimes never respond that fast.
const CLIENT_START_DELAY: Duration = Duration::from_millis(5);
/// The timeout for the client to close the connection after the session has ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The streams of an exec or attach session.
#[derive(Clone, Copy, Debug)]
pub struct SessionStreams {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

impl SessionStreams {
    /// The streams to open, as channel number and `streamtype`. The stream ID follows from the
    /// index.
    fn streams(self) -> Vec<(u8, &'static str)> {
        let all = [
            (true, ERROR, "error"),
            (self.stdin, STDIN, "stdin"),
            (self.stdout, STDOUT, "stdout"),
            (self.stderr, STDERR, "stderr"),
            (self.tty, RESIZE, "resize"),
        ];
        all.into_iter().filter(|(enabled, ..)| *enabled).map(|(_, channel, name)| (channel, name)).collect()
    }

    /// The channel for the empty message that signals the connection: the first channel that the
    /// client reads.
    fn ready_channel(self) -> u8 {
        match (self.stdout, self.stderr) {
            (true, _) => STDOUT,
            (false, true) => STDERR,
            (false, false) => ERROR,
        }
    }
}

fn stream_id(index: usize) -> u32 {
    u32::try_from(index * 2 + 1).unwrap_or(u32::MAX)
}

/// Runs a session until the upstream server closes it or the client disconnects. The status of the
/// upstream server is the last message.
pub async fn translate(
    client: impl AsyncRead + AsyncWrite,
    upstream: impl AsyncRead + AsyncWrite,
    session: SessionStreams,
) -> io::Result<()> {
    let (from_client, to_client) = tokio::io::split(client);
    let (from_upstream, to_upstream) = tokio::io::split(upstream);
    let streams = session.streams();
    let (pong_sender, pong_receiver) = mpsc::channel(MAX_PENDING_PINGS);
    let (ping_sender, ping_receiver) = mpsc::channel(MAX_PENDING_PINGS);
    let mut client_receiver = websocket_codec::Receiver::new(from_client);
    let mut upstream_sender = spdy::Sender::new(to_upstream);
    for (index, (_, name)) in streams.iter().enumerate() {
        upstream_sender.open(stream_id(index), &[("streamtype", name)]).await?;
    }
    let mut client_sender = websocket_codec::Sender::new(to_client);
    // The upstream server starts the command in the meantime, which usually takes as long.
    tokio::time::sleep(CLIENT_START_DELAY).await;
    client_sender.data(&[&[session.ready_channel()]]).await?;
    let upstream_copy =
        copy_to_upstream(&mut client_receiver, &mut upstream_sender, &streams, pong_sender, ping_receiver);
    let client_copy = copy_to_client(
        spdy::Receiver::new(from_upstream),
        &mut client_sender,
        &streams,
        ping_sender,
        pong_receiver,
    );
    tokio::select! {
        left = upstream_copy => return left,
        result = client_copy => result?,
    }
    let drain =
        async { while let Ok(Some(Message::Data(_) | Message::Ping(_))) = client_receiver.next().await {} };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, drain).await;
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, upstream_sender.close()).await;
    Ok(())
}

/// Copies from the client to the upstream server until the client disconnects.
async fn copy_to_upstream<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    client_receiver: &mut websocket_codec::Receiver<R>,
    upstream_sender: &mut spdy::Sender<W>,
    streams: &[(u8, &'static str)],
    pong_sender: mpsc::Sender<Vec<u8>>,
    mut ping_receiver: mpsc::Receiver<u32>,
) -> io::Result<()> {
    let stream_of = |channel: u8| {
        streams.iter().position(|(known, _)| *known == channel).map(stream_id).unwrap_or_default()
    };
    let (stdin, resize) = (stream_of(STDIN), stream_of(RESIZE));
    let mut stdin_open = stdin != 0;
    loop {
        let message = tokio::select! {
            message = client_receiver.next() => message?,
            Some(id) = ping_receiver.recv() => {
                upstream_sender.ping(id).await?;
                continue;
            }
        };
        match message {
            Some(Message::Data(bytes)) => match bytes.split_first() {
                Some((&STDIN, rest)) if stdin_open => {
                    for chunk in rest.chunks(MAX_DATA_FRAME_BYTES) {
                        upstream_sender.data(stdin, chunk, false).await?;
                    }
                }
                Some((&RESIZE, rest)) if resize != 0 => upstream_sender.data(resize, rest, false).await?,
                Some((&STREAM_CLOSE, [STDIN])) if stdin_open => {
                    stdin_open = false;
                    upstream_sender.data(stdin, b"", true).await?;
                }
                _ => {}
            },
            Some(Message::Ping(body)) => drop(pong_sender.try_send(body)),
            Some(Message::Close) | None => return Ok(()),
        }
    }
}

/// Copies from the upstream server to the client until all streams are closed.
async fn copy_to_client<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    mut upstream: spdy::Receiver<R>,
    client_sender: &mut websocket_codec::Sender<W>,
    streams: &[(u8, &'static str)],
    ping_sender: mpsc::Sender<u32>,
    mut pong_receiver: mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    let channel_of = |stream: u32| {
        let index = usize::try_from(stream.saturating_sub(1) / 2).unwrap_or(usize::MAX);
        streams.get(index).filter(|_| stream % 2 == 1).map(|(channel, _)| *channel)
    };
    let mut open_channels: Vec<u8> = streams.iter().map(|(channel, _)| *channel).collect();
    open_channels.retain(|channel| matches!(*channel, STDOUT | STDERR | ERROR));
    let mut status = Vec::new();
    while !open_channels.is_empty() {
        let frame = tokio::select! {
            frame = upstream.next() => frame,
            Some(body) = pong_receiver.recv() => {
                client_sender.pong(&body).await?;
                continue;
            }
        };
        match frame {
            Ok(Some(Frame::Data { stream, bytes, is_last })) => {
                let Some(channel) = channel_of(stream) else { continue };
                if channel == ERROR {
                    // The status is sent last, in whatever order the upstream server closes its
                    // streams. Clients stop reading after it.
                    status.extend(bytes);
                } else if !bytes.is_empty() {
                    client_sender.data(&[&[channel], &bytes]).await?;
                }
                if is_last {
                    open_channels.retain(|known| *known != channel);
                }
            }
            Ok(Some(Frame::Reset { stream })) => {
                open_channels.retain(|known| Some(*known) != channel_of(stream))
            }
            Ok(Some(Frame::Ping(id))) => drop(ping_sender.try_send(id)),
            Ok(Some(Frame::Open { .. } | Frame::GoAway)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    if status.is_empty() && open_channels.contains(&ERROR) {
        status = internal_error_status("error reading from error stream: unexpected EOF").into_bytes();
    }
    if !status.is_empty() {
        client_sender.data(&[&[ERROR], &status]).await?;
    }
    client_sender.close().await
}

/// Reports to a client why its session failed to start.
pub async fn reject(
    client: impl AsyncRead + AsyncWrite,
    session: SessionStreams,
    status: &str,
) -> io::Result<()> {
    let (from_client, to_client) = tokio::io::split(client);
    let mut client_sender = websocket_codec::Sender::new(to_client);
    tokio::time::sleep(CLIENT_START_DELAY).await;
    client_sender.data(&[&[session.ready_channel()]]).await?;
    client_sender.data(&[&[ERROR], status.as_bytes()]).await?;
    client_sender.close().await?;
    let mut client_receiver = websocket_codec::Receiver::new(from_client);
    let drain =
        async { while let Ok(Some(Message::Data(_) | Message::Ping(_))) = client_receiver.next().await {} };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, drain).await;
    Ok(())
}

/// The Status for a session that ended without one.
pub fn internal_error_status(reason: &str) -> String {
    serde_json::json!({
        "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
        "message": format!("Internal error occurred: {reason}"),
        "details": {"causes": [{"message": reason}]},
    })
    .to_string()
}

/// Copies the bytes in a client's messages until either side closes.
pub async fn tunnel_spdy(
    client: impl AsyncRead + AsyncWrite,
    upstream: impl AsyncRead + AsyncWrite,
) -> io::Result<()> {
    let (from_client, to_client) = tokio::io::split(client);
    let (mut from_upstream, mut to_upstream) = tokio::io::split(upstream);
    let (pong_sender, mut pong_receiver) = mpsc::channel::<Vec<u8>>(MAX_PENDING_PINGS);
    let upstream_copy = async {
        let mut client_receiver = websocket_codec::Receiver::new(from_client);
        loop {
            match client_receiver.next().await? {
                Some(Message::Data(bytes)) => {
                    to_upstream.write_all(&bytes).await?;
                    to_upstream.flush().await?;
                }
                Some(Message::Ping(body)) => drop(pong_sender.try_send(body)),
                Some(Message::Close) | None => return Ok(()),
            }
        }
    };
    let client_copy = async {
        let mut client_sender = websocket_codec::Sender::new(to_client);
        let mut buffer = vec![0; 64 << 10];
        loop {
            tokio::select! {
                count = from_upstream.read(&mut buffer) => match count? {
                    0 => return client_sender.close().await,
                    count => client_sender.data(&[&buffer[..count]]).await?,
                },
                Some(body) = pong_receiver.recv() => client_sender.pong(&body).await?,
            }
        }
    };
    let result = tokio::select! {
        result = upstream_copy => result,
        result = client_copy => result,
    };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, to_upstream.shutdown()).await;
    result
}

//! Clients that speak WebSocket, tied to far ends that speak SPDY.
//!
//! [`channels`] is for exec and attach: every message names its channel (v5 of the protocol, in which a client can say
//! that a channel is over), and the far end has a stream for each. [`tunnel`] is for port-forward, where the messages
//! hold the bytes of SPDY itself.
//!
//! Both directions run by themselves, since either may have to wait for its reader while the other goes on: a command
//! that repeats what it is told would stand still otherwise.

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;

use crate::messages::{self, Message};
use crate::spdy::{self, Frame};

/// A message's channel, and what SPDY calls it.
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// In front of the number of a channel that is over.
const END: u8 = 255;
/// Bytes given to SPDY at once, of which a frame holds less than 16 MiB.
const PIECE: usize = 256 << 10;
/// Answers to pings on their way; whoever sends more of them unanswered gets none.
const PINGS: usize = 4;
/// How long a client is told nothing. kubectl listens before it knows what to do with what it hears, and throws away what
/// comes in that moment; other runtimes are never that fast.
const SETTLES: Duration = Duration::from_millis(5);
/// For the client to hang up after it was told that all is over.
const GOODBYE: Duration = Duration::from_secs(5);

/// The channels of a session.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

impl Wanted {
    /// The streams to open: channel and SPDY's word for it. The number of each follows from its place.
    fn streams(self) -> Vec<(u8, &'static str)> {
        let all = [
            (true, ERROR, "error"),
            (self.stdin, STDIN, "stdin"),
            (self.stdout, STDOUT, "stdout"),
            (self.stderr, STDERR, "stderr"),
            (self.tty, RESIZE, "resize"),
        ];
        all.into_iter().filter(|(wanted, ..)| *wanted).map(|(_, channel, name)| (channel, name)).collect()
    }

    /// The channel that tells the client that it is connected: the first it reads.
    fn first(self) -> u8 {
        match (self.stdout, self.stderr) {
            (true, _) => STDOUT,
            (false, true) => STDERR,
            (false, false) => ERROR,
        }
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place * 2 + 1).unwrap_or(u32::MAX)
}

/// Carries a session until the far end is done, whose status is then the last that is told, or the client hangs up.
pub async fn channels(
    client: impl AsyncRead + AsyncWrite,
    far: impl AsyncRead + AsyncWrite,
    wanted: Wanted,
) -> io::Result<()> {
    let (from_client, to_client) = tokio::io::split(client);
    let (from_far, to_far) = tokio::io::split(far);
    let streams = wanted.streams();
    let (pongs, pongs_due) = mpsc::channel(PINGS);
    let (pings, pings_due) = mpsc::channel(PINGS);
    let mut heard = messages::Receiver::new(from_client);
    let mut speak = spdy::Sender::new(to_far);
    for (place, (_, name)) in streams.iter().enumerate() {
        speak.open(number(place), &[("streamtype", name)]).await?;
    }
    let mut teller = messages::Sender::new(to_client);
    // Meanwhile the command is on its way, which mostly takes as long.
    tokio::time::sleep(SETTLES).await;
    teller.data(&[&[wanted.first()]]).await?;
    let outward = outward(&mut heard, &mut speak, &streams, pongs, pings_due);
    let inward = inward(spdy::Receiver::new(from_far), &mut teller, &streams, pings, pongs_due);
    tokio::select! {
        left = outward => return left,
        told = inward => told?,
    }
    let leaving = async { while let Ok(Some(Message::Data(_) | Message::Ping(_))) = heard.next().await {} };
    let _ = tokio::time::timeout(GOODBYE, leaving).await;
    let _ = tokio::time::timeout(GOODBYE, speak.close()).await;
    Ok(())
}

/// What the client says, until it hangs up.
async fn outward<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    heard: &mut messages::Receiver<R>,
    speak: &mut spdy::Sender<W>,
    streams: &[(u8, &'static str)],
    pongs: mpsc::Sender<Vec<u8>>,
    mut pings_due: mpsc::Receiver<u32>,
) -> io::Result<()> {
    let stream_of =
        |channel: u8| streams.iter().position(|(known, _)| *known == channel).map(number).unwrap_or_default();
    let (stdin, resize) = (stream_of(STDIN), stream_of(RESIZE));
    let mut is_open = stdin != 0;
    loop {
        let message = tokio::select! {
            message = heard.next() => message?,
            Some(id) = pings_due.recv() => {
                speak.ping(id).await?;
                continue;
            }
        };
        match message {
            Some(Message::Data(bytes)) => match bytes.split_first() {
                Some((&STDIN, rest)) if is_open => {
                    for piece in rest.chunks(PIECE) {
                        speak.data(stdin, piece, false).await?;
                    }
                }
                Some((&RESIZE, rest)) if resize != 0 => speak.data(resize, rest, false).await?,
                Some((&END, [STDIN])) if is_open => {
                    is_open = false;
                    speak.data(stdin, b"", true).await?;
                }
                _ => {}
            },
            Some(Message::Ping(body)) => drop(pongs.try_send(body)),
            Some(Message::Close) | None => return Ok(()),
        }
    }
}

/// What the far end says, until it has said all.
async fn inward<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    mut far: spdy::Receiver<R>,
    teller: &mut messages::Sender<W>,
    streams: &[(u8, &'static str)],
    pings: mpsc::Sender<u32>,
    mut pongs_due: mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    let channel_of = |stream: u32| {
        let place = usize::try_from(stream.saturating_sub(1) / 2).unwrap_or(usize::MAX);
        streams.get(place).filter(|_| stream % 2 == 1).map(|(channel, _)| *channel)
    };
    let mut open: Vec<u8> = streams.iter().map(|(channel, _)| *channel).collect();
    open.retain(|channel| matches!(*channel, STDOUT | STDERR | ERROR));
    let mut status = Vec::new();
    while !open.is_empty() {
        let frame = tokio::select! {
            frame = far.next() => frame,
            Some(body) = pongs_due.recv() => {
                teller.pong(&body).await?;
                continue;
            }
        };
        match frame {
            Ok(Some(Frame::Data { stream, bytes, is_last })) => {
                let Some(channel) = channel_of(stream) else { continue };
                if channel == ERROR {
                    // It comes last, whatever the order in which the far end ends its streams.
                    status.extend(bytes);
                } else if !bytes.is_empty() {
                    teller.data(&[&[channel], &bytes]).await?;
                }
                if is_last {
                    open.retain(|known| *known != channel);
                }
            }
            Ok(Some(Frame::Reset { stream })) => open.retain(|known| Some(*known) != channel_of(stream)),
            Ok(Some(Frame::Ping(id))) => drop(pings.try_send(id)),
            Ok(Some(Frame::Open { .. } | Frame::GoAway)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    if status.is_empty() && open.contains(&ERROR) {
        status = broken("error reading from error stream: unexpected EOF").into_bytes();
    }
    if !status.is_empty() {
        teller.data(&[&[ERROR], &status]).await?;
    }
    teller.close().await
}

/// Tells a client whose session could not begin why.
pub async fn refuse(client: impl AsyncRead + AsyncWrite, wanted: Wanted, status: &str) -> io::Result<()> {
    let (from_client, to_client) = tokio::io::split(client);
    let mut teller = messages::Sender::new(to_client);
    tokio::time::sleep(SETTLES).await;
    teller.data(&[&[wanted.first()]]).await?;
    teller.data(&[&[ERROR], status.as_bytes()]).await?;
    teller.close().await?;
    let mut heard = messages::Receiver::new(from_client);
    let leaving = async { while let Ok(Some(Message::Data(_) | Message::Ping(_))) = heard.next().await {} };
    let _ = tokio::time::timeout(GOODBYE, leaving).await;
    Ok(())
}

/// A Status of a session that ended without one.
pub fn broken(why: &str) -> String {
    serde_json::json!({
        "metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500,
        "message": format!("Internal error occurred: {why}"),
        "details": {"causes": [{"message": why}]},
    })
    .to_string()
}

/// Carries the bytes inside a client's messages until either end is done.
pub async fn tunnel(client: impl AsyncRead + AsyncWrite, far: impl AsyncRead + AsyncWrite) -> io::Result<()> {
    let (from_client, to_client) = tokio::io::split(client);
    let (mut from_far, mut to_far) = tokio::io::split(far);
    let (pongs, mut pongs_due) = mpsc::channel::<Vec<u8>>(PINGS);
    let outward = async {
        let mut heard = messages::Receiver::new(from_client);
        loop {
            match heard.next().await? {
                Some(Message::Data(bytes)) => {
                    to_far.write_all(&bytes).await?;
                    to_far.flush().await?;
                }
                Some(Message::Ping(body)) => drop(pongs.try_send(body)),
                Some(Message::Close) | None => return Ok(()),
            }
        }
    };
    let inward = async {
        let mut teller = messages::Sender::new(to_client);
        let mut buffer = vec![0; 64 << 10];
        loop {
            tokio::select! {
                count = from_far.read(&mut buffer) => match count? {
                    0 => return teller.close().await,
                    count => teller.data(&[&buffer[..count]]).await?,
                },
                Some(body) = pongs_due.recv() => teller.pong(&body).await?,
            }
        }
    };
    let ended = tokio::select! {
        ended = outward => ended,
        ended = inward => ended,
    };
    let _ = tokio::time::timeout(GOODBYE, to_far.shutdown()).await;
    ended
}

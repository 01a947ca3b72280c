//! A client's streams, whichever protocol they come by: what it types and how large its window is, what it is shown.

use std::collections::HashMap;
use std::io;

use serde::Deserialize;
use stream::{messages as websocket, spdy};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;

use super::session::Session;

/// Pieces on their way; each is as large as what was read at once.
const PIECES: usize = 16;
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// In front of the number of a channel that is over.
const END: u8 = 255;

/// What the client does.
#[derive(Debug)]
pub enum Input {
    /// All streams are there.
    Ready,
    Stdin(Vec<u8>),
    StdinEnd,
    Resize {
        columns: u16,
        rows: u16,
    },
}

/// What the client is told.
#[derive(Debug)]
pub enum Output {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// How it ended, as a Status.
    Status(String),
}

/// Both directions. The first is at its end when the client is gone.
pub struct Channels {
    pub input: mpsc::Receiver<Input>,
    pub output: mpsc::Sender<Output>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Size {
    width: u16,
    height: u16,
}

fn resize(bytes: &[u8]) -> Option<Input> {
    let size: Size = serde_json::from_slice(bytes).ok()?;
    Some(Input::Resize { columns: size.width, rows: size.height })
}

/// Over WebSocket: a channel's number in front of each message.
pub fn websocket<R, W>(session: &Session, reader: R, writer: W, tells_end: bool) -> Channels
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (to_session, input) = mpsc::channel(PIECES);
    let (output, mut from_session) = mpsc::channel(PIECES);
    let has_stdin = session.stdin;
    tokio::spawn(async move {
        let (mut receiver, mut sender) = (websocket::Receiver::new(reader), websocket::Sender::new(writer));
        // The client learns that all is well before anything is said.
        let _ = sender.data(&[&[STDOUT]]).await;
        let _ = to_session.send(Input::Ready).await;
        loop {
            tokio::select! {
                message = receiver.next() => match message {
                    Ok(Some(websocket::Message::Data(bytes))) => {
                        let input = match bytes.split_first() {
                            Some((&STDIN, rest)) if has_stdin => Some(Input::Stdin(rest.to_vec())),
                            Some((&RESIZE, rest)) => resize(rest),
                            Some((&END, [STDIN])) if tells_end => Some(Input::StdinEnd),
                            _ => None,
                        };
                        if let Some(input) = input && to_session.send(input).await.is_err() {
                            // The session is over, but what it said last may still be on its way.
                            continue;
                        }
                    }
                    Ok(Some(websocket::Message::Ping(body))) => drop(sender.pong(&body).await),
                    _ => return,
                },
                output = from_session.recv() => {
                    let sent = match output {
                        Some(Output::Stdout(bytes)) => sender.data(&[&[STDOUT], &bytes]).await,
                        Some(Output::Stderr(bytes)) => sender.data(&[&[STDERR], &bytes]).await,
                        Some(Output::Status(text)) => sender.data(&[&[ERROR], text.as_bytes()]).await,
                        None => return drop(sender.close().await),
                    };
                    if sent.is_err() {
                        return;
                    }
                }
            }
        }
    });
    Channels { input, output }
}

/// Over SPDY: a stream of its own for each, told apart by a header.
pub fn spdy<R, W>(session: &Session, reader: R, writer: W) -> Channels
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (to_session, input) = mpsc::channel(PIECES);
    let (output, from_session) = mpsc::channel(PIECES);
    let mut missing: Vec<&'static str> = vec!["error"];
    let wanted = [(session.stdin, "stdin"), (session.stdout, "stdout"), (session.stderr, "stderr")];
    missing.extend(wanted.iter().filter(|(wanted, _)| *wanted).map(|(_, name)| *name));
    if session.tty {
        missing.push("resize");
    }
    tokio::spawn(async move {
        let mut spdy =
            Spdy { streams: HashMap::new(), missing, sender: spdy::Sender::new(writer), resizes: Vec::new() };
        // The client sees the connection's end; there is nobody to tell more.
        let _ = spdy.carry(spdy::Receiver::new(reader), to_session, from_session).await;
    });
    Channels { input, output }
}

struct Spdy<W> {
    streams: HashMap<&'static str, u32>,
    missing: Vec<&'static str>,
    sender: spdy::Sender<W>,
    /// Sizes come one after the other without anything between.
    resizes: Vec<u8>,
}

impl<W: AsyncWrite + Unpin> Spdy<W> {
    async fn carry<R: AsyncRead + Unpin>(
        &mut self,
        mut receiver: spdy::Receiver<R>,
        to_session: mpsc::Sender<Input>,
        mut from_session: mpsc::Receiver<Output>,
    ) -> io::Result<()> {
        loop {
            tokio::select! {
                frame = receiver.next() => {
                    let Some(frame) = frame? else { return Ok(()) };
                    if matches!(frame, spdy::Frame::GoAway) {
                        return Ok(());
                    }
                    for input in self.hear(frame).await? {
                        // The session may be over while its last words are still on their way.
                        let _ = to_session.send(input).await;
                    }
                }
                output = from_session.recv() => {
                    let (name, bytes) = match output {
                        Some(Output::Stdout(bytes)) => ("stdout", bytes),
                        Some(Output::Stderr(bytes)) => ("stderr", bytes),
                        Some(Output::Status(text)) => ("error", text.into_bytes()),
                        None => return self.end(receiver).await,
                    };
                    if let Some(stream) = self.streams.get(name) {
                        self.sender.data(*stream, &bytes, false).await?;
                    }
                }
            }
        }
    }

    async fn hear(&mut self, frame: spdy::Frame) -> io::Result<Vec<Input>> {
        Ok(match frame {
            spdy::Frame::Open { stream, headers, .. } => {
                let kind = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("streamtype"));
                let at = kind.and_then(|(_, kind)| self.missing.iter().position(|name| name == kind));
                match at {
                    Some(at) => {
                        self.sender.accept(stream).await?;
                        self.streams.insert(self.missing.swap_remove(at), stream);
                        if self.missing.is_empty() { vec![Input::Ready] } else { vec![] }
                    }
                    None => {
                        self.sender.reset(stream).await?;
                        vec![]
                    }
                }
            }
            spdy::Frame::Data { stream, bytes, is_last } if self.streams.get("stdin") == Some(&stream) => {
                let mut inputs = vec![];
                if !bytes.is_empty() {
                    inputs.push(Input::Stdin(bytes));
                }
                if is_last {
                    inputs.push(Input::StdinEnd);
                }
                inputs
            }
            spdy::Frame::Data { stream, bytes, .. } if self.streams.get("resize") == Some(&stream) => {
                self.resizes.extend(bytes);
                let mut inputs = vec![];
                while let Some(end) = self.resizes.iter().position(|byte| *byte == b'}') {
                    let one: Vec<u8> = self.resizes.drain(..=end).collect();
                    inputs.extend(resize(&one));
                }
                inputs
            }
            spdy::Frame::Ping(id) => {
                self.sender.ping(id).await?;
                vec![]
            }
            _ => vec![],
        })
    }

    /// Closes all streams and waits for the client to hang up, which it does when it has read them.
    async fn end<R: AsyncRead + Unpin>(&mut self, mut receiver: spdy::Receiver<R>) -> io::Result<()> {
        const PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);
        for name in ["stdout", "stderr", "error"] {
            if let Some(stream) = self.streams.get(name) {
                self.sender.data(*stream, b"", true).await?;
            }
        }
        let leaving = async { while let Ok(Some(_)) = receiver.next().await {} };
        let _ = tokio::time::timeout(PATIENCE, leaving).await;
        self.sender.close().await
    }
}

/// The bytes inside WebSocket messages, as a connection of their own.
pub fn tunnel<R, W>(
    reader: R,
    writer: W,
) -> (tokio::io::ReadHalf<DuplexStream>, tokio::io::WriteHalf<DuplexStream>)
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    const BUFFER: usize = 64 << 10;
    let (near, far) = tokio::io::duplex(BUFFER);
    tokio::spawn(async move {
        let (mut receiver, mut sender) = (websocket::Receiver::new(reader), websocket::Sender::new(writer));
        let (mut from, mut to) = tokio::io::split(far);
        let mut buffer = vec![0; BUFFER];
        loop {
            tokio::select! {
                message = receiver.next() => match message {
                    Ok(Some(websocket::Message::Data(bytes))) => {
                        if to.write_all(&bytes).await.is_err() {
                            return;
                        }
                    }
                    Ok(Some(websocket::Message::Ping(body))) => drop(sender.pong(&body).await),
                    _ => return,
                },
                count = from.read(&mut buffer) => match count {
                    Ok(count) if count > 0 => {
                        if sender.data(&[&buffer[..count]]).await.is_err() {
                            return;
                        }
                    }
                    _ => return drop(sender.close().await),
                },
            }
        }
    });
    tokio::io::split(near)
}

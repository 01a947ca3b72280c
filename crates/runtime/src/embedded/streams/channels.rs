//! A client's streams, whichever protocol they come by: what it types and how large its window is, what it is shown.

use std::collections::HashMap;
use std::io;

use serde::Deserialize;
use stream::{spdy, websocket_codec as websocket};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::sync::mpsc;

use super::session::Session;

/// Pieces on their way; each is as large as what was read at once.
const CHANNEL_CAPACITY: usize = 16;
/// Answers to pings on their way.
const PONG_QUEUE_CAPACITY: usize = 4;
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// In front of the number of a channel that is over.
const CLOSE_CHANNEL: u8 = 255;

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
struct TerminalSize {
    width: u16,
    height: u16,
}

fn resize(bytes: &[u8]) -> Option<Input> {
    let size: TerminalSize = serde_json::from_slice(bytes).ok()?;
    Some(Input::Resize { columns: size.width, rows: size.height })
}

/// Over WebSocket: a channel's number in front of each message.
pub fn websocket<R, W>(session: &Session, reader: R, writer: W, has_close_signal: bool) -> Channels
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (to_session, input) = mpsc::channel(CHANNEL_CAPACITY);
    let (output, mut from_session) = mpsc::channel(CHANNEL_CAPACITY);
    let (pongs, mut pongs_due) = mpsc::channel::<Vec<u8>>(PONG_QUEUE_CAPACITY);
    let has_stdin = session.stdin;
    let read_loop = async move {
        let mut receiver = websocket::Receiver::new(reader);
        let _ = to_session.send(Input::Ready).await;
        while let Ok(Some(message)) = receiver.next().await {
            let bytes = match message {
                websocket::Message::Data(bytes) => bytes,
                websocket::Message::Ping(body) => {
                    let _ = pongs.try_send(body);
                    continue;
                }
                websocket::Message::Close => return,
            };
            let input = match bytes.split_first() {
                Some((&STDIN, rest)) if has_stdin => Some(Input::Stdin(rest.to_vec())),
                Some((&RESIZE, rest)) => resize(rest),
                Some((&CLOSE_CHANNEL, [STDIN])) if has_close_signal => Some(Input::StdinEnd),
                _ => None,
            };
            // The session may be over while its last words are still on their way.
            if let Some(input) = input {
                let _ = to_session.send(input).await;
            }
        }
    };
    let write_loop = async move {
        let mut sender = websocket::Sender::new(writer);
        // The client learns that all is well before anything is said.
        let _ = sender.data(&[&[STDOUT]]).await;
        loop {
            let sent = tokio::select! {
                Some(body) = pongs_due.recv() => sender.pong(&body).await,
                output = from_session.recv() => match output {
                    Some(Output::Stdout(bytes)) => sender.data(&[&[STDOUT], &bytes]).await,
                    Some(Output::Stderr(bytes)) => sender.data(&[&[STDERR], &bytes]).await,
                    Some(Output::Status(text)) => sender.data(&[&[ERROR], text.as_bytes()]).await,
                    None => return drop(sender.close().await),
                },
            };
            if sent.is_err() {
                return;
            }
        }
    };
    spawn_both(read_loop, write_loop);
    Channels { input, output }
}

/// Runs both directions by themselves until either is done: a command that repeats what it is told must be able to say
/// it while it is told more.
fn spawn_both(
    read_loop: impl Future<Output = ()> + Send + 'static,
    write_loop: impl Future<Output = ()> + Send + 'static,
) {
    tokio::spawn(async move {
        tokio::select! {
            () = read_loop => {}
            () = write_loop => {}
        }
    });
}

/// Over SPDY: a stream of its own for each, told apart by a header.
pub fn spdy<R, W>(session: &Session, reader: R, writer: W) -> Channels
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (to_session, input) = mpsc::channel(CHANNEL_CAPACITY);
    let (output, from_session) = mpsc::channel(CHANNEL_CAPACITY);
    let (reply_sender, due) = mpsc::channel(CHANNEL_CAPACITY);
    let mut missing: Vec<&'static str> = vec!["error"];
    let requested = [(session.stdin, "stdin"), (session.stdout, "stdout"), (session.stderr, "stderr")];
    missing.extend(requested.iter().filter(|(requested, _)| *requested).map(|(_, name)| *name));
    if session.tty {
        missing.push("resize");
    }
    let mut spdy_streams =
        SpdyStreams { streams: HashMap::new(), missing, resizes: Vec::new(), reply_sender };
    let read_loop = async move {
        let mut receiver = spdy::Receiver::new(reader);
        while let Ok(Some(frame)) = receiver.next().await {
            if matches!(frame, spdy::Frame::GoAway) {
                break;
            }
            for input in spdy_streams.handle_frame(frame).await {
                // The session may be over while its last words are still on their way.
                let _ = to_session.send(input).await;
            }
        }
    };
    let write_loop = async move {
        // The client sees the connection's end; there is nobody to tell more.
        let _ = send_output(spdy::Sender::new(writer), from_session, due).await;
    };
    spawn_both(read_loop, write_loop);
    Channels { input, output }
}

/// What is owed to a client for what it did.
enum SpdyReply {
    Accept { name: &'static str, stream: u32 },
    Reset(u32),
    Ping(u32),
}

/// What the client says.
struct SpdyStreams {
    streams: HashMap<&'static str, u32>,
    missing: Vec<&'static str>,
    /// Sizes come one after the other without anything between.
    resizes: Vec<u8>,
    reply_sender: mpsc::Sender<SpdyReply>,
}

impl SpdyStreams {
    async fn handle_frame(&mut self, frame: spdy::Frame) -> Vec<Input> {
        let mut inputs = vec![];
        match frame {
            spdy::Frame::Open { stream, headers, .. } => {
                let kind = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("streamtype"));
                let at = kind.and_then(|(_, kind)| self.missing.iter().position(|name| name == kind));
                let reply = match at {
                    Some(at) => {
                        let name = self.missing.swap_remove(at);
                        self.streams.insert(name, stream);
                        if self.missing.is_empty() {
                            inputs.push(Input::Ready);
                        }
                        SpdyReply::Accept { name, stream }
                    }
                    None => SpdyReply::Reset(stream),
                };
                let _ = self.reply_sender.send(reply).await;
            }
            spdy::Frame::Data { stream, bytes, is_last } if self.streams.get("stdin") == Some(&stream) => {
                if !bytes.is_empty() {
                    inputs.push(Input::Stdin(bytes));
                }
                if is_last {
                    inputs.push(Input::StdinEnd);
                }
            }
            spdy::Frame::Data { stream, bytes, .. } if self.streams.get("resize") == Some(&stream) => {
                self.resizes.extend(bytes);
                while let Some(end) = self.resizes.iter().position(|byte| *byte == b'}') {
                    let one: Vec<u8> = self.resizes.drain(..=end).collect();
                    inputs.extend(resize(&one));
                }
                // A size is a few bytes; whatever this is, it is none.
                if self.resizes.len() > 1024 {
                    self.resizes.clear();
                }
            }
            spdy::Frame::Ping(id) => drop(self.reply_sender.try_send(SpdyReply::Ping(id))),
            _ => {}
        }
        inputs
    }
}

/// Tells the client what the session says, then closes all streams and waits for it to hang up, which it does when it
/// has read them.
async fn send_output<W: AsyncWrite + Unpin>(
    mut sender: spdy::Sender<W>,
    mut from_session: mpsc::Receiver<Output>,
    mut due: mpsc::Receiver<SpdyReply>,
) -> io::Result<()> {
    const CLOSE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
    let mut streams: HashMap<&'static str, u32> = HashMap::new();
    loop {
        let output = tokio::select! {
            // What the client opened is accepted before anything is said over it.
            biased;
            Some(reply) = due.recv() => {
                match reply {
                    SpdyReply::Accept { name, stream } => {
                        streams.insert(name, stream);
                        sender.accept(stream).await?;
                    }
                    SpdyReply::Reset(stream) => sender.reset(stream).await?,
                    SpdyReply::Ping(id) => sender.ping(id).await?,
                }
                continue;
            }
            output = from_session.recv() => output,
        };
        let (name, bytes) = match output {
            Some(Output::Stdout(bytes)) => ("stdout", bytes),
            Some(Output::Stderr(bytes)) => ("stderr", bytes),
            Some(Output::Status(text)) => ("error", text.into_bytes()),
            None => break,
        };
        if let Some(stream) = streams.get(name) {
            sender.data(*stream, &bytes, false).await?;
        }
    }
    for name in ["stdout", "stderr", "error"] {
        if let Some(stream) = streams.get(name) {
            sender.data(*stream, b"", true).await?;
        }
    }
    // Ended sooner by the client's leaving.
    tokio::time::sleep(CLOSE_TIMEOUT).await;
    sender.close().await
}

/// The bytes inside WebSocket messages, as a connection of their own.
pub fn tunnel(
    client: impl AsyncRead + AsyncWrite + Send + 'static,
) -> (tokio::io::ReadHalf<DuplexStream>, tokio::io::WriteHalf<DuplexStream>) {
    const BUFFER: usize = 64 << 10;
    let (local, remote) = tokio::io::duplex(BUFFER);
    tokio::spawn(stream::translator::tunnel_spdy(client, remote));
    tokio::io::split(local)
}

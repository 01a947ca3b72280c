//! A client's streams, independent of the protocol: stdin and terminal sizes in, stdout, stderr and the
//! result out.

use std::collections::HashMap;
use std::io;

use serde::Deserialize;
use stream::{spdy, websocket_codec as websocket};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::sync::mpsc;

use super::session::Session;

/// Buffered chunks per direction. A chunk is what one read returns.
const CHANNEL_CAPACITY: usize = 16;
/// Buffered pongs.
const PONG_QUEUE_CAPACITY: usize = 4;
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
/// The close signal of v5: this byte, followed by the number of the closed channel.
const CLOSE_CHANNEL: u8 = 255;

/// Input from the client.
#[derive(Debug)]
pub enum Input {
    /// All streams are open.
    Ready,
    Stdin(Vec<u8>),
    StdinEnd,
    Resize {
        columns: u16,
        rows: u16,
    },
}

/// Output to the client.
#[derive(Debug)]
pub enum Output {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// The result of the session, in the client's format.
    Status(String),
}

/// Both directions of a session. `input` ends when the client disconnects.
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

/// WebSocket: each message starts with the number of its channel.
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
            // The session may have ended while input still arrives.
            if let Some(input) = input {
                let _ = to_session.send(input).await;
            }
        }
    };
    let write_loop = async move {
        let mut sender = websocket::Sender::new(writer);
        // As upstream, an empty message confirms that the connection is established.
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

/// Runs both directions concurrently until either ends: a command that echoes its input must be able to
/// write while more input arrives.
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

/// SPDY: one stream per channel, identified by the header `streamtype`.
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
                // The session may have ended while input still arrives.
                let _ = to_session.send(input).await;
            }
        }
    };
    let write_loop = async move {
        // An error means that the client is gone, so it needs no report.
        let _ = send_output(spdy::Sender::new(writer), from_session, due).await;
    };
    spawn_both(read_loop, write_loop);
    Channels { input, output }
}

/// A control frame to send to the client.
enum SpdyReply {
    Accept { name: &'static str, stream: u32 },
    Reset(u32),
    Ping(u32),
}

/// The state of the client's SPDY streams.
struct SpdyStreams {
    streams: HashMap<&'static str, u32>,
    missing: Vec<&'static str>,
    /// Terminal sizes are JSON objects without separators; this is an incomplete one.
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
                // No valid size is this long.
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

/// Sends the session's output. At its end closes all streams and waits for the client to disconnect,
/// which it does after reading them.
async fn send_output<W: AsyncWrite + Unpin>(
    mut sender: spdy::Sender<W>,
    mut from_session: mpsc::Receiver<Output>,
    mut due: mpsc::Receiver<SpdyReply>,
) -> io::Result<()> {
    const CLOSE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);
    let mut streams: HashMap<&'static str, u32> = HashMap::new();
    loop {
        let output = tokio::select! {
            // A stream must be accepted before data is sent on it.
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
    // Interrupted when the client disconnects.
    tokio::time::sleep(CLOSE_TIMEOUT).await;
    sender.close().await
}

/// The byte stream inside WebSocket messages.
pub fn tunnel(
    client: impl AsyncRead + AsyncWrite + Send + 'static,
) -> (tokio::io::ReadHalf<DuplexStream>, tokio::io::WriteHalf<DuplexStream>) {
    const BUFFER: usize = 64 << 10;
    let (local, remote) = tokio::io::duplex(BUFFER);
    tokio::spawn(stream::translator::tunnel_spdy(client, remote));
    tokio::io::split(local)
}

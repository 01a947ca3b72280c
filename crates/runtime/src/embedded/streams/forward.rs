//! Port-forward: each connection of the client is a pair of SPDY streams, one for data and one for
//! errors.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use stream::spdy::{Frame, Receiver, Sender};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc};

use crate::embedded::protocol::SupervisorRequest;
use crate::embedded::supervisor_client::SupervisorClient;

const CHANNEL_CAPACITY: usize = 16;
const READ_BUFFER_BYTES: usize = 32 << 10;
/// Limit of the bytes that wait to be written into the pod, for all connections of a client together.
/// At the limit, nothing more is read from the client: the protocol cannot pause a single connection.
const MAX_PENDING_BYTES: usize = 4 << 20;
/// How long reading may be paused before the client is dropped. While it is paused, a disconnect goes
/// unnoticed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(300);
/// Delay between the end of the client's data and the half-close of the connection into the pod.
const SHUTDOWN_DELAY: Duration = Duration::from_secs(1);

/// Data for one of the client's streams.
struct StreamChunk {
    stream: u32,
    bytes: Vec<u8>,
    is_last: bool,
}

/// Counts the bytes that are received from the client and not yet written into the pod.
#[derive(Default)]
struct PendingBytes {
    bytes: AtomicUsize,
    capacity: Notify,
}

/// Received bytes, counted until they are dropped.
struct PendingChunk {
    bytes: Vec<u8>,
    waiting: Arc<PendingBytes>,
}

impl PendingChunk {
    fn new(bytes: Vec<u8>, waiting: &Arc<PendingBytes>) -> PendingChunk {
        waiting.bytes.fetch_add(bytes.len(), Relaxed);
        PendingChunk { bytes, waiting: waiting.clone() }
    }
}

impl Drop for PendingChunk {
    fn drop(&mut self) {
        let before = self.waiting.bytes.fetch_sub(self.bytes.len(), Relaxed);
        if before >= MAX_PENDING_BYTES {
            self.waiting.capacity.notify_one();
        }
    }
}

/// A pair of streams of which one may be missing.
#[derive(Default)]
struct StreamPair {
    error: Option<u32>,
    data: Option<u32>,
}

/// Forwards connections into a pod until the client disconnects.
pub async fn run<R, W>(pod: &Path, reader: R, writer: W)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let (mut receiver, mut sender) = (Receiver::new(reader), Sender::new(writer));
    let (to_client, mut chunks) = mpsc::channel::<StreamChunk>(CHANNEL_CAPACITY);
    let mut pairs: HashMap<String, StreamPair> = HashMap::new();
    let mut into_pod: HashMap<u32, mpsc::UnboundedSender<PendingChunk>> = HashMap::new();
    let waiting = Arc::new(PendingBytes::default());
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let is_full = waiting.bytes.load(Relaxed) >= MAX_PENDING_BYTES;
        tokio::select! {
            () = waiting.capacity.notified() => {}
            () = tokio::time::sleep(WRITE_TIMEOUT), if is_full => return,
            frame = receiver.next(), if !is_full => match frame {
                Ok(Some(Frame::Open { stream, headers, .. })) => {
                    if sender.accept(stream).await.is_err() {
                        return;
                    }
                    let value = |name: &str| {
                        let found = headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
                        found.map(|(_, value)| value.clone()).unwrap_or_default()
                    };
                    let key = format!("{} {}", value("requestid"), value("port"));
                    let pair = pairs.entry(key.clone()).or_default();
                    match value("streamtype").as_str() {
                        "error" => pair.error = Some(stream),
                        _ => pair.data = Some(stream),
                    }
                    if let (Some(error), Some(data)) = (pair.error, pair.data) {
                        pairs.remove(&key);
                        // Unbounded: the limit applies to all connections together.
                        let (sender, receiver) = mpsc::unbounded_channel();
                        into_pod.insert(data, sender);
                        let port = value("port").parse().unwrap_or(0);
                        tasks.spawn(connect(pod.to_owned(), port, error, data, receiver, to_client.clone()));
                    }
                }
                Ok(Some(Frame::Data { stream, bytes, is_last })) => {
                    if let Some(target) = into_pod.get(&stream) {
                        let _ = target.send(PendingChunk::new(bytes, &waiting));
                    }
                    if is_last {
                        into_pod.remove(&stream);
                    }
                }
                Ok(Some(Frame::Reset { stream })) => drop(into_pod.remove(&stream)),
                Ok(Some(Frame::Ping(id))) => drop(sender.ping(id).await),
                Ok(Some(Frame::GoAway) | None) | Err(_) => return,
            },
            Some(chunk) = chunks.recv() => {
                if sender.data(chunk.stream, &chunk.bytes, chunk.is_last).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Forwards one connection.
async fn connect(
    pod: PathBuf,
    port: u16,
    error: u32,
    data: u32,
    mut from_client: mpsc::UnboundedReceiver<PendingChunk>,
    to_client: mpsc::Sender<StreamChunk>,
) {
    let end = |stream, bytes| StreamChunk { stream, bytes, is_last: true };
    let connection = match dial(&pod, port).await {
        Ok(connection) => connection,
        Err(why) => {
            let _ = to_client.send(end(error, why.into_bytes())).await;
            let _ = to_client.send(end(data, Vec::new())).await;
            return;
        }
    };
    let (mut reader, mut writer) = connection.into_split();
    let client_to_pod = async {
        while let Some(pending) = from_client.recv().await {
            if writer.write_all(&pending.bytes).await.is_err() {
                return;
            }
        }
        // Servers that take a half-close for the end of the connection get a moment to respond. Other
        // runtimes do not pass it on.
        tokio::time::sleep(SHUTDOWN_DELAY).await;
        let _ = writer.shutdown().await;
    };
    let pod_to_client = async {
        let mut buffer = vec![0; READ_BUFFER_BYTES];
        while let Ok(count) = reader.read(&mut buffer).await {
            let chunk = StreamChunk { stream: data, bytes: buffer[..count].to_vec(), is_last: count == 0 };
            if to_client.send(chunk).await.is_err() || count == 0 {
                return;
            }
        }
        let _ = to_client.send(end(data, Vec::new())).await;
    };
    // The pod's side ends the connection: a client that has sent everything may still be reading.
    tokio::pin!(client_to_pod, pod_to_client);
    tokio::select! {
        () = &mut pod_to_client => {}
        () = &mut client_to_pod => pod_to_client.await,
    }
    let _ = to_client.send(end(error, Vec::new())).await;
}

/// Connects to a port on the loopback of the pod's network, IPv4 first.
async fn dial(pod: &Path, port: u16) -> Result<TcpStream, String> {
    let mut errors = Vec::new();
    for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        match dial_one(pod, SocketAddr::new(ip, port)).await {
            Ok(connection) => return Ok(connection),
            Err(error) => errors.push(format!("dial tcp {}: {error}", SocketAddr::new(ip, port))),
        }
    }
    Err(format!("failed to connect to localhost:{port} inside the pod's network: {}", errors.join(", ")))
}

async fn dial_one(pod: &Path, address: SocketAddr) -> io::Result<TcpStream> {
    let mut caller =
        SupervisorClient::send_request(pod, &SupervisorRequest::Socket { ipv6: address.is_ipv6() }, &[])
            .await?;
    caller.wait_done().await.map_err(io::Error::other)?;
    let socket = caller.take_fd().ok_or(io::ErrorKind::NotFound)?;
    // A socket stays in the network namespace it was created in.
    TcpSocket::from_std_stream(std::net::TcpStream::from(socket)).connect(address).await
}

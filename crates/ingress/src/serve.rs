//! Accepts client connections and applies limits and timeouts.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use jiff::Timestamp;
use parking_lot::RwLock;
use reconcile::Ctx;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use crate::certificates::Certificates;
use crate::forward::{self, RequestSource};
use crate::pool::Pool;
use crate::status::{self, Config};
use crate::{Metrics, Shared};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout for the headers of a request, including the idle time before it.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum size of the headers.
const MAX_HEADER_BYTES: u32 = 64 << 10;
/// The start of the HTTP/2 connection preface. No HTTP/1.1 request starts with it.
const HTTP2_PREFACE: &[u8; 4] = b"PRI ";
/// The limit of concurrent streams per HTTP/2 connection.
const MAX_CONCURRENT_STREAMS: u32 = 250;
/// The limit of open connections. Further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 8192;

/// The servers for HTTP and HTTPS.
#[derive(Clone)]
pub struct IngressServer {
    shared: Arc<Shared>,
    semaphore: Arc<Semaphore>,
    shutdown: watch::Receiver<bool>,
}

impl IngressServer {
    /// Starts to watch the cluster. Call [`IngressServer::serve_http`] and
    /// [`IngressServer::serve_https`] to accept connections.
    pub fn start(ctx: &Ctx, config: Config) -> Result<IngressServer, pki::Error> {
        let shared = Arc::new(Shared {
            table: RwLock::default(),
            certificates: Certificates::new(Timestamp::now())?,
            pool: Pool::new(config.dial.clone())?,
            https_port: AtomicU16::new(0),
            metrics: Arc::default(),
        });
        tokio::spawn(status::run(ctx.clone(), config, shared.clone()));
        let semaphore = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        Ok(IngressServer { shared, semaphore, shutdown: ctx.shutdown.clone() })
    }

    pub fn metrics(&self) -> Arc<Metrics> {
        self.shared.metrics.clone()
    }

    /// Serves HTTP until shutdown.
    pub async fn serve_http(self, listener: TcpListener) {
        self.serve(listener, None).await;
    }

    /// Serves HTTPS until shutdown.
    pub async fn serve_https(self, listener: TcpListener) {
        match self.shared.certificates.tls() {
            Ok(tls) => {
                let port = listener.local_addr().map_or(0, |address| address.port());
                self.shared.https_port.store(port, Ordering::Relaxed);
                self.serve(listener, Some(TlsAcceptor::from(Arc::new(tls)))).await;
            }
            Err(error) => tracing::error!(%error, "cannot serve HTTPS"),
        }
    }

    async fn serve(mut self, listener: TcpListener, tls: Option<TlsAcceptor>) {
        let port = listener.local_addr().map_or(0, |address| address.port());
        loop {
            let accept = async {
                let permit =
                    self.semaphore.clone().acquire_owned().await.expect("the semaphore is never closed");
                (listener.accept().await, permit)
            };
            let (accepted, permit) = tokio::select! {
                accepted = accept => accepted,
                _ = self.shutdown.wait_for(|stop| *stop) => return,
            };
            match accepted {
                Ok((stream, client)) => {
                    let connection =
                        handle_connection(self.shared.clone(), tls.clone(), (stream, client, port));
                    let mut shutdown = self.shutdown.clone();
                    tokio::spawn(async move {
                        tokio::select! {
                            () = connection => {}
                            _ = shutdown.wait_for(|stop| *stop) => {}
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to accept connection, will retry");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

/// Counts a connection while it is open.
struct OpenConnection(Arc<Metrics>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.record_connection(false);
    }
}

async fn handle_connection(
    shared: Arc<Shared>,
    tls: Option<TlsAcceptor>,
    (stream, client, port): (TcpStream, SocketAddr, u16),
) {
    shared.metrics.record_connection(true);
    let _open = OpenConnection(shared.metrics.clone());
    let _ = stream.set_nodelay(true);
    // Keepalive detects clients that disappear without closing the connection, even if idle
    // connections are allowed.
    let _ = sockopt::set_socket_keepalive(&stream, true);
    let _ = sockopt::set_tcp_keepidle(&stream, HEADER_READ_TIMEOUT);
    let source = RequestSource { client: client.ip().to_canonical(), port, tls: tls.is_some() };
    let Some(acceptor) = tls else {
        // The first bytes distinguish HTTP/2 with prior knowledge from HTTP/1.1.
        let mut first = [0; HTTP2_PREFACE.len()];
        if let Ok(Ok(_)) = tokio::time::timeout(HEADER_READ_TIMEOUT, stream.peek(&mut first)).await {
            serve_stream(shared, source, stream, first == *HTTP2_PREFACE).await;
        }
        return;
    };
    let stream = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake timed out"),
    };
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    serve_stream(shared, source, stream, http2).await;
}

async fn serve_stream<IO>(shared: Arc<Shared>, source: RequestSource, stream: IO, http2: bool)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(forward::handle_request(&shared, source, request).await) }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut builder = if http2 { builder.http2_only() } else { builder.http1_only() };
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .max_header_list_size(MAX_HEADER_BYTES)
        .keep_alive_interval(HEADER_READ_TIMEOUT)
        .keep_alive_timeout(HANDSHAKE_TIMEOUT);
    let result = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
    if let Err(error) = result {
        tracing::debug!(error = &*error, "connection ended");
    }
}

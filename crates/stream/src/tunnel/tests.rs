use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;

/// A server, a client that serves a tunnel, and the tunnel.
async fn tunnel(
    allowed: impl Fn(SocketAddr) -> bool + Send + Sync + 'static,
) -> (Tunnel, tokio::task::JoinHandle<()>) {
    let (client_end, server_end) = tokio::io::duplex(64 << 10);
    let (sender, mut receiver) = mpsc::channel(1);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let sender = sender.clone();
        async move {
            assert_eq!(request.headers()[UPGRADE], UPGRADE_PROTOCOL);
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move { sender.send(upgrade.await.expect("upgraded")).await });
            let mut response = Response::new(Empty::<Bytes>::new());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            response.headers_mut().insert(CONNECTION, "Upgrade".parse().expect("a value"));
            response.headers_mut().insert(UPGRADE, UPGRADE_PROTOCOL.parse().expect("a value"));
            Ok::<_, hyper::Error>(response)
        }
    });
    let server =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(server_end), service);
    tokio::spawn(server.with_upgrades());
    let serve_task = tokio::spawn(async move {
        let _ = serve_tunnel(client_end, "server", "/tunnel", Arc::new(allowed)).await;
    });
    let (tunnel, driver) =
        Tunnel::from_upgraded(receiver.recv().await.expect("an offer")).await.expect("a tunnel");
    tokio::spawn(driver);
    (tunnel, serve_task)
}

async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                tokio::io::copy(&mut reader, &mut writer).await
            });
        }
    });
    address
}

#[tokio::test]
async fn dial_is_limited_to_allowed_addresses() {
    let echo_address = echo().await;
    let (tunnel, serve_task) = tunnel(move |to| to == echo_address).await;
    let check_echo = async |bytes: &'static [u8]| {
        let mut connection = tunnel.dial("127.0.0.1", echo_address.port()).await.expect("a connection");
        connection.write_all(bytes).await.expect("sent");
        connection.shutdown().await.expect("closed");
        let mut back = Vec::new();
        connection.read_to_end(&mut back).await.expect("an echo");
        assert_eq!(back, bytes);
    };
    tokio::join!(check_echo(b"one"), check_echo(b"two"), check_echo(&[7; 200_000]));
    let result = tunnel.dial("127.0.0.2", echo_address.port()).await.map(drop).map_err(|error| error.kind());
    assert_eq!(result, Err(io::ErrorKind::PermissionDenied));
    assert!(tunnel.is_open());
    serve_task.abort();
    let _ = serve_task.await;
    assert!(tunnel.dial("127.0.0.1", echo_address.port()).await.is_err(), "the tunnel is closed");
}

#[tokio::test]
async fn dial_fails_when_port_is_closed() {
    let (tunnel, _serve_task) = tunnel(|_| true).await;
    let closed_address =
        TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("an address");
    let result =
        tunnel.dial("127.0.0.1", closed_address.port()).await.map(drop).map_err(|error| error.kind());
    assert_eq!(result, Err(io::ErrorKind::ConnectionRefused));
}

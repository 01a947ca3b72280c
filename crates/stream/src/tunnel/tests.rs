use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;

/// A server that takes tunnels, a client that offers one, and the tunnel.
async fn tunnel(
    allowed: impl Fn(SocketAddr) -> bool + Send + Sync + 'static,
) -> (Tunnel, tokio::task::JoinHandle<()>) {
    let (near, far) = tokio::io::duplex(64 << 10);
    let (tell, mut told) = mpsc::channel(1);
    let serve = service_fn(move |mut request: Request<Incoming>| {
        let tell = tell.clone();
        async move {
            assert_eq!(request.headers()[UPGRADE], PROTOCOL);
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move { tell.send(upgrade.await.expect("upgraded")).await });
            let mut response = Response::new(Empty::<Bytes>::new());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            response.headers_mut().insert(CONNECTION, "Upgrade".parse().expect("a value"));
            response.headers_mut().insert(UPGRADE, PROTOCOL.parse().expect("a value"));
            Ok::<_, hyper::Error>(response)
        }
    });
    let server = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(far), serve);
    tokio::spawn(server.with_upgrades());
    let offering = tokio::spawn(async move {
        let _ = offer(near, "server", "/tunnel", Arc::new(allowed)).await;
    });
    let (tunnel, lasting) = Tunnel::over(told.recv().await.expect("an offer")).await.expect("a tunnel");
    tokio::spawn(lasting);
    (tunnel, offering)
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
async fn places_are_dialled_from_the_other_side() {
    let place = echo().await;
    let (tunnel, offering) = tunnel(move |to| to == place).await;
    let say = async |words: &'static [u8]| {
        let mut connection = tunnel.dial("127.0.0.1", place.port()).await.expect("a connection");
        connection.write_all(words).await.expect("sent");
        connection.shutdown().await.expect("closed");
        let mut back = Vec::new();
        connection.read_to_end(&mut back).await.expect("an echo");
        assert_eq!(back, words);
    };
    tokio::join!(say(b"one"), say(b"two"), say(&[7; 200_000]));
    let refused = tunnel.dial("127.0.0.2", place.port()).await.map(drop).map_err(|error| error.kind());
    assert_eq!(refused, Err(io::ErrorKind::PermissionDenied));
    assert!(tunnel.is_open());
    offering.abort();
    let _ = offering.await;
    assert!(tunnel.dial("127.0.0.1", place.port()).await.is_err(), "nobody is there any more");
}

#[tokio::test]
async fn nobody_listens() {
    let (tunnel, _offering) = tunnel(|_| true).await;
    let free = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("an address");
    let refused = tunnel.dial("127.0.0.1", free.port()).await.map(drop).map_err(|error| error.kind());
    assert_eq!(refused, Err(io::ErrorKind::ConnectionRefused));
}

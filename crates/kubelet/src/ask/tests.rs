use k8s_openapi::api::core::v1::HTTPHeader;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::TcpListener;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(5);

/// Answers every connection with the next of these; says what was asked.
async fn serve(answers: &'static [&'static str]) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let asked = tokio::spawn(async move {
        let mut asked = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut buffer = [0; 1024];
            let mut request = String::new();
            while !request.contains("\r\n\r\n") {
                let read = stream.read(&mut buffer).await.expect("a request");
                request += &String::from_utf8_lossy(&buffer[..read]);
            }
            stream.write_all(answer.as_bytes()).await.expect("an answer");
            asked.push(request);
        }
        asked
    });
    (port, asked)
}

fn get(port: u16) -> HTTPGetAction {
    HTTPGetAction { port: IntOrString::Int(port.into()), path: Some("/x".into()), ..HTTPGetAction::default() }
}

#[tokio::test]
async fn pages() {
    let (port, asked) = serve(&["HTTP/1.1 204 No Content\r\n\r\n"]).await;
    let header = HTTPHeader { name: "X-A".into(), value: "b\r\nc: d".into() };
    let action = HTTPGetAction { http_headers: Some(vec![header]), ..get(port) };
    assert_eq!(http(&Pod::default(), "127.0.0.1", &action, TIMEOUT).await, Ok(()));
    let asked = asked.await.expect("asked").remove(0);
    assert!(asked.starts_with("GET /x HTTP/1.1\r\nX-A: bc: d\r\nHost: 127.0.0.1:"), "{asked}");

    let (port, _asked) = serve(&["HTTP/1.1 500 No\r\n\r\n"]).await;
    let answer = http(&Pod::default(), "127.0.0.1", &get(port), TIMEOUT).await;
    assert_eq!(answer, Err("HTTP probe failed with statuscode: 500".to_owned()));

    let (port, _asked) = serve(&["nonsense\r\n"]).await;
    let answer = http(&Pod::default(), "127.0.0.1", &get(port), TIMEOUT).await;
    assert_eq!(answer, Err(format!("Get \"http://127.0.0.1:{port}/x\": malformed HTTP response")));
}

#[tokio::test]
async fn redirects_on_the_same_host_are_followed() {
    let (port, asked) =
        serve(&["HTTP/1.1 302 Found\r\nLocation: /y?z\r\n\r\n", "HTTP/1.1 404 Not Found\r\n\r\n"]).await;
    let answer = http(&Pod::default(), "127.0.0.1", &get(port), TIMEOUT).await;
    assert_eq!(answer, Err("HTTP probe failed with statuscode: 404".to_owned()));
    assert!(asked.await.expect("asked")[1].starts_with("GET /y?z "));

    let (port, _asked) = serve(&["HTTP/1.1 302 Found\r\nLocation: http://elsewhere.invalid/\r\n\r\n"]).await;
    assert_eq!(http(&Pod::default(), "127.0.0.1", &get(port), TIMEOUT).await, Ok(()));
}

#[tokio::test]
async fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let refused = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
    assert_eq!(tcp("127.0.0.1", port, TIMEOUT).await, Err(refused.clone()));
    let answer = http(&Pod::default(), "127.0.0.1", &get(port), TIMEOUT).await;
    assert_eq!(answer, Err(format!("Get \"http://127.0.0.1:{port}/x\": {refused}")));
}

#[tokio::test]
async fn health_services() {
    use http_body_util::StreamBody;
    use hyper::body::Frame;

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let service = hyper::service::service_fn(|request: Request<hyper::body::Incoming>| async move {
                assert_eq!(request.uri().path(), "/grpc.health.v1.Health/Check");
                let asked = request.into_body().collect().await.expect("a body").to_bytes();
                let name = asked.get(7..).unwrap_or_default();
                let (data, code): (&'static [u8], &'static str) = match name {
                    b"well" => (&[0, 0, 0, 0, 2, 8, 1], "0"),
                    b"sick" => (&[0, 0, 0, 0, 2, 8, 2], "0"),
                    b"" => (&[0, 0, 0, 0, 0], "0"),
                    _ => (&[], "5"),
                };
                let trailers = http::HeaderMap::from_iter([(
                    http::HeaderName::from_static("grpc-status"),
                    http::HeaderValue::from_static(code),
                )]);
                let frames = [
                    Ok::<_, std::convert::Infallible>(Frame::data(Bytes::from_static(data))),
                    Ok(Frame::trailers(trailers)),
                ];
                Ok::<_, std::convert::Infallible>(http::Response::new(StreamBody::new(
                    futures_util::stream::iter(frames),
                )))
            });
            let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(serving.serve_connection(TokioIo::new(stream), service));
        }
    });
    let ask = |service| grpc("127.0.0.1", port, service, TIMEOUT);
    assert_eq!(ask("well").await, Ok(()));
    assert_eq!(ask("sick").await, Err("service unhealthy (responded with \"NOT_SERVING\")".to_owned()));
    assert_eq!(ask("").await, Err("service unhealthy (responded with \"UNKNOWN\")".to_owned()));
    let expected = "error: health rpc probe failed: rpc error: code = 5 desc = ";
    assert_eq!(ask("nobody").await, Err(expected.to_owned()));
}

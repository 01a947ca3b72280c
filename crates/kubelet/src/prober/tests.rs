use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::TcpListener;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(5);

/// Serves these responses, one per connection. Returns the port and the recorded requests.
async fn serve(answers: &'static [&'static str]) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let requests = tokio::spawn(async move {
        let mut requests = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut buffer = [0; 1024];
            let mut request = String::new();
            while !request.contains("\r\n\r\n") {
                let read = stream.read(&mut buffer).await.expect("a request");
                request += &String::from_utf8_lossy(&buffer[..read]);
            }
            stream.write_all(answer.as_bytes()).await.expect("an answer");
            requests.push(request);
        }
        requests
    });
    (port, requests)
}

fn get(port: u16) -> HTTPGetAction {
    HTTPGetAction { port: IntOrString::Int(port.into()), path: Some("/x".into()), ..HTTPGetAction::default() }
}

fn get_request(get: &HTTPGetAction, purpose: &'static str) -> HttpGetRequest {
    HttpGetRequest::new(&Container::default(), "127.0.0.1", get, purpose).expect("a page")
}

async fn probe(get: &HTTPGetAction) -> Result<(), String> {
    get_request(get, "probe").probe(TIMEOUT).await
}

#[tokio::test]
async fn http_probe_sends_headers_and_checks_status_code() {
    let (port, requests) = serve(&["HTTP/1.1 204 No Content\r\n\r\n"]).await;
    let header = HTTPHeader { name: "X-A".into(), value: "b\r\nc: d".into() };
    let action = HTTPGetAction { http_headers: Some(vec![header]), ..get(port) };
    assert_eq!(probe(&action).await, Ok(()));
    let request = requests.await.expect("asked").remove(0);
    assert!(request.starts_with("GET /x HTTP/1.1\r\nX-A: bc: d\r\nHost: 127.0.0.1:"), "{request}");

    let (port, _requests) = serve(&["HTTP/1.1 500 No\r\n\r\n"]).await;
    let answer = probe(&get(port)).await;
    assert_eq!(answer, Err("HTTP probe failed with statuscode: 500".to_owned()));

    let (port, _requests) = serve(&["nonsense\r\n"]).await;
    let answer = probe(&get(port)).await;
    assert_eq!(answer, Err(format!("Get \"http://127.0.0.1:{port}/x\": malformed HTTP response")));
}

#[tokio::test]
async fn http_probe_follows_redirects_on_the_same_host_only() {
    let (port, requests) =
        serve(&["HTTP/1.1 302 Found\r\nLocation: /y?z\r\n\r\n", "HTTP/1.1 404 Not Found\r\n\r\n"]).await;
    let answer = probe(&get(port)).await;
    assert_eq!(answer, Err("HTTP probe failed with statuscode: 404".to_owned()));
    assert!(requests.await.expect("asked")[1].starts_with("GET /y?z "));

    let (port, _requests) =
        serve(&["HTTP/1.1 302 Found\r\nLocation: http://elsewhere.invalid/\r\n\r\n"]).await;
    assert_eq!(probe(&get(port)).await, Ok(()));
}

#[tokio::test]
async fn http_hooks_accept_any_status_code() {
    for answer in [&["HTTP/1.1 500 No\r\n\r\n"], &["HTTP/1.1 204 No Content\r\n\r\n"]] {
        let (port, requests) = serve(answer).await;
        assert_eq!(get_request(&get(port), "lifecycle").call().await, Ok(HttpHookResult::Success));
        assert!(requests.await.expect("asked")[0].contains("\r\nUser-Agent: kube-lifecycle/1.36\r\n"));
    }
    let (port, _requests) = serve(&["nonsense\r\n"]).await;
    let answer = get_request(&get(port), "lifecycle").call().await;
    assert_eq!(answer, Err(format!("Get \"http://127.0.0.1:{port}/x\": malformed HTTP response")));
}

#[tokio::test(start_paused = true)]
async fn http_hooks_have_no_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        tokio::time::sleep(Duration::from_secs(24 * 60 * 60)).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.expect("an answer");
    });
    assert_eq!(get_request(&get(port), "lifecycle").call().await, Ok(HttpHookResult::Success));
}

/// A hook for a server without TLS gets an error from it and falls back to HTTP.
#[tokio::test]
async fn https_hooks_fallback_to_http_without_authorization_header() {
    async fn serve_plaintext() -> (u16, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let last = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                let mut buffer = vec![0; 4096];
                let read = stream.read(&mut buffer).await.expect("a request");
                stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("an answer");
                if buffer.starts_with(b"GET") {
                    return String::from_utf8_lossy(&buffer[..read]).into_owned();
                }
            }
        });
        (port, last)
    }
    let (port, last) = serve_plaintext().await;
    let header = |name: &str| HTTPHeader { name: name.into(), value: "v".into() };
    let action = HTTPGetAction {
        scheme: Some("HTTPS".into()),
        http_headers: Some(vec![header("Authorization"), header("X-A")]),
        ..get(port)
    };
    let request = get_request(&action, "lifecycle");
    let message =
        format!("Get \"https://127.0.0.1:{port}/x\": http: server gave HTTP response to HTTPS client");
    assert_eq!(request.probe(TIMEOUT).await, Err(message));
    assert_eq!(request.call().await, Ok(HttpHookResult::HttpFallback));
    let last = last.await.expect("asked");
    assert!(last.contains("X-A: v") && !last.contains("Authorization"), "{last}");
}

#[tokio::test]
async fn probe_reports_connection_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let message = format!("dial tcp 127.0.0.1:{port}: connect: connection refused");
    assert_eq!(tcp("127.0.0.1", port, TIMEOUT).await, Err(message.clone()));
    let answer = probe(&get(port)).await;
    assert_eq!(answer, Err(format!("Get \"http://127.0.0.1:{port}/x\": {message}")));
}

#[tokio::test]
async fn grpc_probe_checks_serving_status() {
    use http_body_util::StreamBody;
    use hyper::body::Frame;

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let service = hyper::service::service_fn(|request: Request<hyper::body::Incoming>| async move {
                assert_eq!(request.uri().path(), "/grpc.health.v1.Health/Check");
                let body = request.into_body().collect().await.expect("a body").to_bytes();
                let name = body.get(7..).unwrap_or_default();
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
    let probe_service = |service| grpc("127.0.0.1", port, service, TIMEOUT);
    assert_eq!(probe_service("well").await, Ok(()));
    assert_eq!(
        probe_service("sick").await,
        Err("service unhealthy (responded with \"NOT_SERVING\")".to_owned())
    );
    assert_eq!(probe_service("").await, Err("service unhealthy (responded with \"UNKNOWN\")".to_owned()));
    let expected = "error: health rpc probe failed: rpc error: code = 5 desc = ";
    assert_eq!(probe_service("unknown").await, Err(expected.to_owned()));
}

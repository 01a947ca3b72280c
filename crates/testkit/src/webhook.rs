//! An HTTPS server in tests that the server under test calls.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::Value;

/// Handles every request with a function and records it. Stops on drop.
pub struct Webhook {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<WebhookRequest>>>,
    stopped: Arc<AtomicBool>,
}

/// A recorded request.
#[derive(Clone, Debug)]
pub struct WebhookRequest {
    pub method: String,
    pub path: String,
    /// Header names are in lower case.
    pub headers: Vec<(String, String)>,
    /// `null` if the body is not JSON.
    pub body: Value,
}

impl WebhookRequest {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

impl Webhook {
    /// Starts on a free port of the loopback address. The function returns a status and a body; a
    /// string is sent as plain text.
    pub fn start(
        mut config: ServerConfig,
        answer: impl Fn(&WebhookRequest) -> (u16, Value) + Send + Sync + 'static,
    ) -> Result<Webhook> {
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let config = Arc::new(config);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (requests, stopped) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let answer = Arc::new(answer);
        let (recorded, stop) = (requests.clone(), stopped.clone());
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(socket), config) = (socket, config.clone()) else { continue };
                let (recorded, answer) = (recorded.clone(), answer.clone());
                // A client that disconnects does not fail the test.
                std::thread::spawn(move || {
                    serve(socket, config, |request| {
                        recorded.lock().expect("the mutex is not poisoned").push(request.clone());
                        answer(request)
                    })
                });
            }
        });
        Ok(Webhook { address, requests, stopped })
    }

    /// `https://127.0.0.1:<port>`
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<WebhookRequest> {
        self.requests.lock().expect("the mutex is not poisoned").clone()
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(
    socket: TcpStream,
    config: Arc<ServerConfig>,
    answer: impl Fn(&WebhookRequest) -> (u16, Value),
) -> io::Result<()> {
    let connection = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut stream = BufReader::new(StreamOwned::new(connection, socket));
    while let Some(request) = read(&mut stream)? {
        let (status, body) = answer(&request);
        let (kind, body) = match body {
            Value::String(text) => ("text/plain", text),
            json => ("application/json", json.to_string()),
        };
        let head = format!("HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {}", body.len());
        let stream = stream.get_mut();
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes())?;
        stream.flush()?;
    }
    Ok(())
}

fn read(
    stream: &mut BufReader<StreamOwned<ServerConnection, TcpStream>>,
) -> io::Result<Option<WebhookRequest>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut lines = lines.into_iter();
    let first = lines.next().unwrap_or_default();
    let mut words = first.split(' ').map(str::to_owned);
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| {
            line.split_once(':').map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
        })
        .collect();
    let mut request = WebhookRequest {
        method: words.next().unwrap_or_default(),
        path: words.next().unwrap_or_default(),
        headers,
        body: Value::Null,
    };
    let length = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    request.body = serde_json::from_slice(&body).unwrap_or_default();
    Ok(Some(request))
}

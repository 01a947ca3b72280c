//! A minimal HTTPS/1.1 client: one request per connection, bodies as a whole or line by line.

use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring};
use serde_json::Value;

use crate::kubeconfig;

/// Time limit for a silent server.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// A client of one server, with the certificate of a kubeconfig or anonymous.
#[derive(Clone)]
pub struct Http {
    address: String,
    config: Arc<ClientConfig>,
}

/// A response with its complete body.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Header names are in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// A response whose body is read line by line, such as a watch.
pub struct Lines {
    pub status: u16,
    body: BufReader<Body>,
}

impl Http {
    /// Authenticates with the kubeconfig's client certificate.
    pub fn from_kubeconfig(text: &str) -> Result<Http> {
        let read = kubeconfig::parse(text)?;
        let chain = CertificateDer::pem_slice_iter(&read.cert_pem).collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(&read.key_pem)?;
        let config = client_config(&read.ca_pem)?.with_client_auth_cert(chain, key)?;
        Ok(Http { address: read.address, config: Arc::new(config) })
    }

    /// Trusts the kubeconfig's CA and presents another client certificate.
    pub fn with_certificate(text: &str, cert_pem: &str, key_pem: &str) -> Result<Http> {
        let read = kubeconfig::parse(text)?;
        let chain = CertificateDer::pem_slice_iter(cert_pem.as_bytes()).collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())?;
        let config = client_config(&read.ca_pem)?.with_client_auth_cert(chain, key)?;
        Ok(Http { address: read.address, config: Arc::new(config) })
    }

    /// Trusts the kubeconfig's CA and presents no client certificate.
    pub fn anonymous(text: &str) -> Result<Http> {
        let read = kubeconfig::parse(text)?;
        let config = client_config(&read.ca_pem)?.with_no_client_auth();
        Ok(Http { address: read.address, config: Arc::new(config) })
    }

    pub fn get(&self, path: &str) -> Result<Reply> {
        self.send("GET", path, &[], b"")
    }

    /// Sends JSON.
    pub fn post(&self, path: &str, body: &Value) -> Result<Reply> {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<Reply> {
        let (status, headers, mut rest) = self.send_request(method, path, headers, body)?;
        let mut body = Vec::new();
        if method == "HEAD" {
            return Ok(Reply { status, headers, body });
        }
        rest.read_to_end(&mut body).with_context(|| format!("read the response to {method} {path}"))?;
        Ok(Reply { status, headers, body })
    }

    /// Sends a request whose response is a stream.
    pub fn open(&self, path: &str) -> Result<Lines> {
        self.open_with(path, &[])
    }

    pub fn open_with(&self, path: &str, headers: &[(&str, &str)]) -> Result<Lines> {
        let (status, _, body) = self.send_request("GET", path, headers, b"")?;
        Ok(Lines { status, body: BufReader::new(body) })
    }

    fn send_request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<Head> {
        let socket =
            TcpStream::connect(&self.address).with_context(|| format!("connect to {}", self.address))?;
        socket.set_read_timeout(Some(READ_TIMEOUT))?;
        let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())?;
        let connection = ClientConnection::new(self.config.clone(), name)?;
        let mut stream = StreamOwned::new(connection, socket);
        let mut request =
            format!("{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address);
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        stream.write_all(request.as_bytes()).with_context(|| format!("send {method} {path}"))?;
        stream.write_all(body)?;
        stream.flush()?;
        read_head(BufReader::new(Box::new(stream)))
            .with_context(|| format!("read the response to {method} {path}"))
    }
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON, or `null` if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

impl Lines {
    /// The next line without its line break, or `None` at the end of the body.
    pub fn next_line(&mut self) -> Result<Option<String>> {
        let mut line = String::new();
        let length = self.body.read_line(&mut line)?;
        Ok((length > 0).then(|| line.trim_end().to_owned()))
    }

    /// The next frame of a protobuf watch with its length prefix, or `None` at the end of the body.
    pub fn next_frame(&mut self) -> Result<Option<Vec<u8>>> {
        if self.body.fill_buf()?.is_empty() {
            return Ok(None);
        }
        let mut frame = vec![0; 4];
        self.body.read_exact(&mut frame)?;
        let length = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]);
        let got = (&mut self.body).take(length.into()).read_to_end(&mut frame)?;
        anyhow::ensure!(got as u64 == u64::from(length), "a frame of {length} bytes ended after {got}");
        Ok(Some(frame))
    }
}

type Head = (u16, Vec<(String, String)>, Body);

struct Body {
    reader: BufReader<Box<dyn Read>>,
    remaining: BodyLength,
}

enum BodyLength {
    Bytes(u64),
    /// Bytes left in the current chunk; more chunks follow.
    Chunk(u64),
    UntilEof,
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let BodyLength::Chunk(0) = self.remaining {
            self.remaining = match next_chunk(&mut self.reader)? {
                0 => BodyLength::Bytes(0),
                size => BodyLength::Chunk(size),
            };
        }
        let limit = match self.remaining {
            BodyLength::Bytes(remaining) | BodyLength::Chunk(remaining) => {
                usize::try_from(remaining).unwrap_or(usize::MAX)
            }
            BodyLength::UntilEof => usize::MAX,
        };
        let limit = limit.min(buffer.len());
        if limit == 0 {
            return Ok(0);
        }
        let length = match self.reader.read(&mut buffer[..limit]) {
            // Some servers close the connection without TLS close_notify; a body without a length is
            // complete then.
            Err(error)
                if error.kind() == io::ErrorKind::UnexpectedEof
                    && matches!(self.remaining, BodyLength::UntilEof) =>
            {
                0
            }
            other => other?,
        };
        if let BodyLength::Bytes(remaining) | BodyLength::Chunk(remaining) = &mut self.remaining {
            if length == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            *remaining -= length as u64;
            if matches!(self.remaining, BodyLength::Chunk(0)) {
                read_line(&mut self.reader)?;
            }
        }
        Ok(length)
    }
}

fn client_config(
    ca_pem: &[u8],
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(ca_pem) {
        roots.add(root?)?;
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    Ok(builder.with_safe_default_protocol_versions()?.with_root_certificates(roots))
}

fn read_head(mut reader: BufReader<Box<dyn Read>>) -> Result<Head> {
    let first = read_line(&mut reader)?;
    let status = first.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.with_context(|| format!("{first:?} is not an HTTP status line"))?;
    let mut headers = Vec::new();
    loop {
        let line = read_line(&mut reader)?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.push((name.to_lowercase(), value.trim().to_owned()));
    }
    let header = |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let remaining = match (header("transfer-encoding"), header("content-length")) {
        (Some("chunked"), _) => BodyLength::Chunk(0),
        (_, Some(length)) => BodyLength::Bytes(length.parse()?),
        _ => BodyLength::UntilEof,
    };
    Ok((status, headers, Body { reader, remaining }))
}

/// The size of the next chunk. For the last chunk, the final empty line is consumed as well.
fn next_chunk(reader: &mut impl BufRead) -> io::Result<u64> {
    let line = read_line(reader)?;
    let size = line.split(';').next().unwrap_or_default();
    let size = u64::from_str_radix(size.trim(), 16).map_err(|_| io::ErrorKind::InvalidData)?;
    if size == 0 {
        read_line(reader)?;
    }
    Ok(size)
}

fn read_line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    Ok(line.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use jiff::Timestamp;
    use rustls::ServerConnection;

    use super::*;

    fn body(text: &'static str) -> io::Result<String> {
        let (_, _, mut body) = read_head(BufReader::new(Box::new(text.as_bytes()))).unwrap();
        let mut all = String::new();
        body.read_to_string(&mut all).map(|_| all)
    }

    #[test]
    fn body_ends_at_declared_length() {
        assert_eq!(body("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcdef").unwrap(), "abc");
        assert_eq!(body("HTTP/1.1 200 OK\r\n\r\nabc").unwrap(), "abc");
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n";
        assert_eq!(body(chunked).unwrap(), "abc0123456789");
        assert_eq!(body("HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n").unwrap(), "");
        assert!(body("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc").is_err(), "cut short");
        assert!(body("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n").is_err());
    }

    /// Serves one request and responds with the user name and the request line.
    fn serve_once(listener: TcpListener, config: rustls::ServerConfig) {
        let (socket, _) = listener.accept().unwrap();
        let mut stream = StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), socket);
        let mut reader = BufReader::new(&mut stream);
        let request = read_line(&mut reader).unwrap();
        while !read_line(&mut reader).unwrap().is_empty() {}
        let user = stream.conn.peer_certificates().map(|chain| pki::identity_of(&chain[0]).unwrap().user);
        let line = format!("{} {request}\n", user.as_deref().unwrap_or("anonymous"));
        let answer = format!(
            "HTTP/1.1 200 OK\r\nX-Kind: test\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{line}\r\n0\r\n\r\n",
            line.len()
        );
        stream.write_all(answer.as_bytes()).unwrap();
    }

    #[test]
    fn client_uses_kubeconfig_certificate_or_is_anonymous() {
        let dir = tempfile::tempdir().unwrap();
        let now = Timestamp::now();
        let server_ca = pki::Authority::load_or_create(dir.path(), "server-ca", now).unwrap();
        let client_ca = pki::Authority::load_or_create(dir.path(), "client-ca", now).unwrap();
        let leaf = |usage| pki::Leaf {
            common_name: "admin".to_owned(),
            organizations: vec![],
            dns_names: vec![],
            ips: vec!["127.0.0.1".parse().unwrap()],
            usage,
            lifetime: Duration::from_secs(600),
        };
        let server = server_ca.issue(&leaf(pki::Usage::Server), now).unwrap();
        let client = client_ca.issue(&leaf(pki::Usage::Client), now).unwrap();
        for (anonymous, expected) in
            [(false, "admin GET /readyz HTTP/1.1"), (true, "anonymous GET /readyz HTTP/1.1")]
        {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("https://{}", listener.local_addr().unwrap());
            let authority = pki::ClientAuthority::new(client_ca.pem(), "client-ca").unwrap();
            let config =
                pki::server_config(pki::ServingCertificate::new(&server).unwrap(), &[authority]).unwrap();
            let thread = std::thread::spawn(|| serve_once(listener, config));
            let text = pki::kubeconfig(&url, server_ca.pem(), &client, "default");
            let http = if anonymous { Http::anonymous(&text) } else { Http::from_kubeconfig(&text) }.unwrap();
            let mut lines = http.open("/readyz").unwrap();
            assert_eq!(lines.status, 200);
            assert_eq!(lines.next_line().unwrap().as_deref(), Some(expected));
            assert_eq!(lines.next_line().unwrap(), None);
            thread.join().unwrap();
        }
    }
}

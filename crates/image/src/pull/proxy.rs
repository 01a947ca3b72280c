//! Proxies for registry connections: `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, with the semantics
//! of Go's `httpproxy` package, because existing configurations are written for Go programs.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base64::Engine as _;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tower::Service;

/// The maximum size of the response header of a proxy.
const MAX_RESPONSE_HEAD_BYTES: usize = 8 << 10;

/// The configured proxies and the exceptions.
#[derive(Debug, Default)]
pub struct Proxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    no_proxy: Vec<NoProxyRule>,
}

#[derive(Clone, Debug)]
struct Proxy {
    /// `None` if the configured address is invalid. Requests then fail; a direct connection would
    /// bypass the proxy.
    address: Option<Uri>,
    /// The `Proxy-Authorization` header.
    authorization: Option<HeaderValue>,
}

/// A `NO_PROXY` entry. With a port it only applies to that port.
#[derive(Debug, PartialEq)]
enum NoProxyRule {
    All,
    Network(IpAddr, u8),
    Address(IpAddr, Option<u16>),
    /// A suffix that starts with a dot. `itself` says whether the domain itself matches, or only
    /// its subdomains.
    Domain {
        end: String,
        itself: bool,
        port: Option<u16>,
    },
}

impl Proxies {
    pub fn from_env() -> Proxies {
        Proxies::new(|name| std::env::var(name).ok())
    }

    pub(super) fn new(read: impl Fn(&str) -> Option<String>) -> Proxies {
        let env_value = |name: &str| {
            let found = [name.to_owned(), name.to_lowercase()].iter().find_map(|name| {
                read(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
            });
            found.unwrap_or_default()
        };
        let proxy =
            |name: &str| Some(env_value(name)).filter(|text| !text.is_empty()).map(|text| Proxy::new(&text));
        let no_proxy = env_value("NO_PROXY");
        Proxies {
            http: proxy("HTTP_PROXY"),
            https: proxy("HTTPS_PROXY"),
            no_proxy: no_proxy.split(',').filter_map(NoProxyRule::new).collect(),
        }
    }

    fn proxy_for(&self, url: &Uri) -> Option<&Proxy> {
        let (proxy, default_port) = match url.scheme_str() {
            Some("http") => (self.http.as_ref()?, 80),
            Some("https") => (self.https.as_ref()?, 443),
            _ => return None,
        };
        let host = url.host()?.trim_matches(['[', ']']).to_ascii_lowercase();
        let (ip, port) = (host.parse::<IpAddr>().ok(), url.port_u16().unwrap_or(default_port));
        let is_loopback = host == "localhost" || ip.is_some_and(|ip| ip.is_loopback());
        let matches_no_proxy = || self.no_proxy.iter().any(|rule| rule.matches(&host, ip, port));
        (!is_loopback && !matches_no_proxy()).then_some(proxy)
    }

    /// The `Proxy-Authorization` header for a plain HTTP request. HTTPS requests are tunneled and
    /// authenticate in CONNECT.
    pub fn proxy_authorization(&self, url: &Uri) -> Option<HeaderValue> {
        self.proxy_for(url).filter(|_| url.scheme_str() == Some("http"))?.authorization.clone()
    }
}

impl Proxy {
    /// Parses an address such as `http://user:password@proxy:3128`. The scheme is optional.
    fn new(text: &str) -> Proxy {
        let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let authority = whole.parse::<Uri>().ok().filter(|url| url.scheme_str() == Some("http"));
        let authority =
            authority.and_then(|url| url.authority().map(ToString::to_string)).unwrap_or_default();
        let (user, host_port) = match authority.rsplit_once('@') {
            Some((user, host_port)) => (Some(user), host_port),
            None => (None, authority.as_str()),
        };
        let address = format!("http://{host_port}/").parse().ok().filter(|_| !host_port.is_empty());
        let key = user.and_then(|user| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            let text = [&percent_decode(name)[..], b":", &percent_decode(password)].concat();
            let encoded = base64::engine::general_purpose::STANDARD.encode(text);
            let mut key = HeaderValue::from_str(&format!("Basic {encoded}")).ok()?;
            key.set_sensitive(true);
            Some(key)
        });
        Proxy { address, authorization: key }
    }
}

impl NoProxyRule {
    fn new(text: &str) -> Option<NoProxyRule> {
        let text = text.trim().to_ascii_lowercase();
        if text == "*" {
            return Some(NoProxyRule::All);
        }
        if let Some((ip, prefix)) = text.split_once('/')
            && let (Ok(ip), Ok(prefix)) = (ip.parse(), prefix.parse())
        {
            return Some(NoProxyRule::Network(ip, prefix));
        }
        if let Ok(ip) = text.parse() {
            return Some(NoProxyRule::Address(ip, None));
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().ok()?)),
            None => (text.as_str(), None),
        };
        let host = host.trim_matches(['[', ']']);
        if let Ok(ip) = host.parse() {
            return Some(NoProxyRule::Address(ip, port));
        }
        let host = host.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(host);
        let itself = !host.starts_with('.');
        let end = if itself { format!(".{host}") } else { host.to_owned() };
        (end.len() > 1).then_some(NoProxyRule::Domain { end, itself, port })
    }

    fn matches(&self, host: &str, ip: Option<IpAddr>, at: u16) -> bool {
        match self {
            NoProxyRule::All => true,
            NoProxyRule::Network(base, prefix) => ip.is_some_and(|ip| contains(ip, *base, *prefix)),
            NoProxyRule::Address(address, port) => ip == Some(*address) && port.is_none_or(|port| port == at),
            NoProxyRule::Domain { end, itself, port } => {
                let is_named = host.ends_with(end) || (*itself && end.strip_prefix('.') == Some(host));
                is_named && port.is_none_or(|port| port == at)
            }
        }
    }
}

fn contains(ip: IpAddr, base: IpAddr, prefix: u8) -> bool {
    // IPv4 addresses in the upper bits, so that one shift works for both families.
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => (u128::from(u32::from(ip)) << 96, 32),
        IpAddr::V6(ip) => (u128::from(ip), 128),
    };
    let ((ip, size), (base, other)) = (bits(ip), bits(base));
    let difference = (ip ^ base).checked_shr(128 - u32::from(prefix.min(128))).unwrap_or(0);
    size == other && prefix <= size && difference == 0
}

/// Decodes percent-encoding. Invalid sequences stay unchanged.
fn percent_decode(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        let code = behind.get(..2).filter(|_| *first == b'%').and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &behind[2..];
            }
            None => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    bytes
}

/// Connects to the host of a URL, or to its proxy.
#[derive(Clone)]
pub struct Connector {
    tcp: HttpConnector,
    proxies: Arc<Proxies>,
}

impl Connector {
    pub fn new(proxies: Arc<Proxies>) -> Connector {
        let mut tcp = HttpConnector::new();
        // HTTPS URLs are allowed; the TLS connector wraps this one.
        tcp.enforce_http(false);
        Connector { tcp, proxies }
    }
}

impl Service<Uri> for Connector {
    type Response = ProxyStream;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<ProxyStream, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let Some(proxy) = self.proxies.proxy_for(&url).cloned() else {
            let connecting = self.tcp.call(url);
            return Box::pin(async { Ok(ProxyStream { inner: connecting.await?, is_proxied: false }) });
        };
        let Some(address) = proxy.address else {
            let reason = "invalid proxy address, must be http://host:port";
            return Box::pin(async { Err(reason.into()) });
        };
        let connecting = self.tcp.call(address.clone());
        Box::pin(async move {
            let failed = |reason: String| {
                format!("proxy {}: {reason}", address.authority().map_or("", |it| it.as_str()))
            };
            let mut inner = connecting.await.map_err(|error| failed(super::registry::root_cause(&error)))?;
            let is_proxied = url.scheme_str() == Some("http");
            if !is_proxied {
                let to = format!("{}:{}", url.host().unwrap_or_default(), url.port_u16().unwrap_or(443));
                let done = tunnel(inner.inner_mut(), &to, proxy.authorization.as_ref()).await;
                done.map_err(|error| failed(error.to_string()))?;
            }
            Ok(ProxyStream { inner, is_proxied })
        })
    }
}

/// Opens a tunnel through a proxy with CONNECT.
async fn tunnel(stream: &mut TcpStream, to: &str, key: Option<&HeaderValue>) -> io::Result<()> {
    let mut request = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: skiff\r\n").into_bytes();
    if let Some(key) = key {
        request.extend_from_slice(&[b"Proxy-Authorization: ", key.as_bytes(), b"\r\n"].concat());
    }
    request.extend_from_slice(b"\r\n");
    stream.write_all(&request).await?;
    let mut head = Vec::new();
    // Read single bytes: any byte after the header belongs to the tunneled connection.
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
        if head.len() > MAX_RESPONSE_HEAD_BYTES {
            return Err(io::Error::other("response header is too large"));
        }
    }
    let head = String::from_utf8_lossy(&head);
    let status = head.lines().next().and_then(|line| line.split_once(' ')).map_or("", |(_, status)| status);
    match status.split(' ').next() {
        Some("200") => Ok(()),
        _ => Err(io::Error::other(status.to_owned())),
    }
}

/// A TCP connection. `is_proxied` is set if the peer is a proxy for plain HTTP, which needs
/// absolute URIs in requests.
pub struct ProxyStream {
    inner: TokioIo<TcpStream>,
    is_proxied: bool,
}

impl Connection for ProxyStream {
    fn connected(&self) -> Connected {
        self.inner.connected().proxy(self.is_proxied)
    }
}

impl Read for ProxyStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl Write for ProxyStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(set: &[(&str, &str)], url: &str, expected: Option<&str>) {
        let read =
            |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned());
        let url = url.parse().unwrap();
        let format_proxy = |proxy: &Proxy| {
            let key = proxy.authorization.as_ref().and_then(|key| key.to_str().ok()).unwrap_or("");
            let address = proxy.address.as_ref().map_or("unusable".to_owned(), ToString::to_string);
            format!("{address} {key}").trim().to_owned()
        };
        assert_eq!(
            Proxies::new(read).proxy_for(&url).map(format_proxy).as_deref(),
            expected,
            "{set:?} {url}"
        );
    }

    #[test]
    fn select_the_proxy_for_a_url() {
        let both = [("HTTP_PROXY", "http://one:3128"), ("https_proxy", "two")];
        check(&both, "http://r.example/v2", Some("http://one:3128/"));
        check(&both, "https://r.example/v2", Some("http://two/"));
        check(&both[..1], "https://r.example/v2", None);
        check(&[("HTTP_PROXY", ""), ("http_proxy", "one:1")], "http://r/", Some("http://one:1/"));
        check(&[("HTTP_PROXY", "a"), ("http_proxy", "b")], "http://r/", Some("http://a/"));
        check(
            &[("HTTP_PROXY", "http://me:s%40crET@[::1]:1")],
            "http://r/",
            Some("http://[::1]:1/ Basic bWU6c0BjckVU"),
        );
        for unusable in ["socks5://one", "https://one", "http://", "one two"] {
            check(&[("HTTP_PROXY", unusable)], "http://r/", Some("unusable"));
        }
        for here in ["localhost:5000", "127.0.0.1:5000", "127.9.9.9", "[::1]:5000", "LOCALHOST"] {
            check(&both, &format!("http://{here}/v2"), None);
        }
    }

    #[test]
    fn no_proxy_rules_disable_the_proxy() {
        for (no_proxy, host, matches_no_proxy) in [
            ("", "r.example", false),
            ("*", "r.example", true),
            ("a, *", "10.0.0.1", true),
            ("example", "r.example", true),
            ("example", "notexample", false),
            (" R.Example ,b", "r.EXAMPLE", true),
            (".example", "r.example", true),
            (".r.example", "r.example", false),
            ("*.example", "r.example", true),
            ("*.r.example", "r.example", false),
            ("r.example:5000", "r.example:5000", true),
            ("r.example:5000", "r.example", false),
            ("r.example:443", "r.example", true),
            (".example:443", "a.r.example", true),
            ("10.0.0.1", "10.0.0.1:5000", true),
            ("10.0.0.1:5000", "10.0.0.1:5000", true),
            ("10.0.0.1:5000", "10.0.0.1:5001", false),
            ("10.0.0.0/8", "10.9.9.9", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("0.0.0.0/0", "11.0.0.1", true),
            ("10.0.0.1/32", "10.0.0.2", false),
            ("0.0.0.0/0", "[fd00::1]", false),
            ("10.0.0.0/33", "10.0.0.0", false),
            ("fd00::/8", "[fd00::1]:5000", true),
            ("::/0", "10.0.0.1", false),
            ("fd00::1", "[fd00::1]", true),
            ("[fd00::1]:5000", "[fd00::1]:5000", true),
            ("[fd00::1]:5000", "[fd00::1]", false),
            (":5000,.,", "r.example:5000", false),
        ] {
            let set = [("HTTPS_PROXY", "proxy:1"), ("NO_PROXY", no_proxy)];
            let expected = (!matches_no_proxy).then_some("http://proxy:1/");
            check(&set, &format!("https://{host}/"), expected);
        }
    }

    #[test]
    fn debug_output_has_no_password() {
        let proxies =
            Proxies::new(|name| name.starts_with("HTTP").then(|| "http://me:secret@one:1".to_owned()));
        let text = format!("{proxies:?}");
        assert!(!text.contains("secret") && !text.contains("bWU6"), "{text}");
        let has_authorization = |url: &str| proxies.proxy_authorization(&url.parse().unwrap()).is_some();
        assert!(
            has_authorization("http://r/")
                && !has_authorization("https://r/")
                && !has_authorization("http://localhost/")
        );
    }
}

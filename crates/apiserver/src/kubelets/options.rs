//! Validates the API's options of log, exec, attach and portforward and converts them to the
//! kubelet's query.

use api::field::Path;
use api::{ErrorList, Status};
use stream::translator::SessionStreams;

use crate::request::Query;

/// The subresources that upgrade the connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StreamSubresource {
    Exec,
    Attach,
    PortForward,
}

impl StreamSubresource {
    /// Converts the API's query to the kubelet's.
    pub fn query(self, query: &Query) -> Result<String, Status> {
        let mut out = QueryBuilder::default();
        if self == StreamSubresource::PortForward {
            let mut ports = Vec::new();
            for text in query.all("ports").flat_map(|text| text.split(',')) {
                let port: Option<u16> = text.parse().ok().filter(|port| *port > 0);
                let port = port.ok_or_else(|| Status::bad_request(format!("invalid port {text:?}")))?;
                ports.push(port.to_string());
            }
            if !ports.is_empty() {
                out.add("port", &ports.join(","));
            }
            return Ok(out.0);
        }
        let SessionStreams { stdin, stdout, stderr, tty } = requested_streams(query);
        let named = [("input", stdin), ("output", stdout), ("error", stderr), ("tty", tty)];
        named.iter().filter(|(_, requested)| *requested).for_each(|(name, _)| out.add(name, "1"));
        if self == StreamSubresource::Exec {
            query.all("command").for_each(|word| out.add("command", word));
        }
        Ok(out.0)
    }
}

/// The streams that a client of exec or attach requests.
pub fn requested_streams(query: &Query) -> SessionStreams {
    let tty = query.flag("tty") == Some(true);
    SessionStreams {
        stdin: query.flag("stdin").unwrap_or(false),
        stdout: query.flag("stdout").unwrap_or(true),
        stderr: query.flag("stderr").unwrap_or(!tty),
        tty,
    }
}

/// Validates PodLogOptions and converts them to the kubelet's query.
pub fn log_query(query: &Query, pod: &str) -> Result<String, Status> {
    let mut out = QueryBuilder::default();
    for name in ["follow", "previous", "timestamps"] {
        if query.flag(name) == Some(true) {
            out.add(name, "true");
        }
    }
    let (tail, limit, seconds) =
        (query.int("tailLines")?, query.int("limitBytes")?, query.int("sinceSeconds")?);
    let time = query.get("sinceTime");
    let mut errors = ErrorList::default();
    if let Some(tail) = tail.filter(|tail| *tail < 0) {
        errors.invalid(&Path::new("tailLines"), tail, "must be greater than or equal to 0");
    }
    if let Some(limit) = limit.filter(|limit| *limit < 1) {
        errors.invalid(&Path::new("limitBytes"), limit, "must be greater than 0");
    }
    if seconds.is_some() && !time.is_empty() {
        errors.forbidden(&Path::root(), "at most one of `sinceTime` or `sinceSeconds` may be specified");
    } else if let Some(seconds) = seconds.filter(|seconds| *seconds < 1) {
        errors.invalid(&Path::new("sinceSeconds"), seconds, "must be greater than 0");
    }
    if query.has("stream") {
        errors.forbidden(&Path::new("stream"), "may not be specified");
    }
    if !errors.is_empty() {
        return Err(Status::invalid("", "PodLogOptions", pod, &errors));
    }
    if !time.is_empty() {
        let parsed: Result<jiff::Timestamp, _> = time.parse();
        let parsed = parsed.map_err(|_| Status::bad_request(format!("invalid RFC 3339 time {time:?}")))?;
        out.add("sinceTime", &parsed.to_string());
    }
    let numbers = [("tailLines", tail), ("limitBytes", limit), ("sinceSeconds", seconds)];
    for (name, number) in numbers {
        if let Some(number) = number {
            out.add(name, &number.to_string());
        }
    }
    Ok(out.0)
}

/// Builds a query string.
#[derive(Default)]
struct QueryBuilder(String);

impl QueryBuilder {
    fn add(&mut self, name: &str, value: &str) {
        self.0.push(if self.0.is_empty() { '?' } else { '&' });
        self.0.push_str(name);
        self.0.push('=');
        for byte in value.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    self.0.push(byte.into())
                }
                _ => self.0.push_str(&format!("%{byte:02X}")),
            }
        }
    }
}

//! Routes and parameters of requests, from their path and query.

use http::{Request, StatusCode};
use reconcile::Key;

use super::HttpError;

/// The endpoint of a request.
#[derive(Debug, PartialEq)]
pub enum Route {
    Health,
    Pods,
    RunningPods,
    Summary,
    Config,
    Metrics(MetricsEndpoint),
    Logs { pod: Key, container: String },
    Exec { pod: Key, container: String },
    Attach { pod: Key, container: String },
    PortForward { pod: Key },
    Unknown,
}

/// The metrics endpoints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetricsEndpoint {
    Kubelet,
    Resource,
    Cadvisor,
    Probes,
}

impl Route {
    pub fn of(path: &str) -> Route {
        if path == "/runningpods/" {
            return Route::RunningPods;
        }
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        let named = parts.get(1..).unwrap_or_default();
        // Names of objects need no escapes. A segment with an escape or a leading dot is rejected,
        // so that no path leads out of the log directory.
        if named.iter().any(|name| !is_name(name)) {
            return Route::Unknown;
        }
        let pod = |namespace: &str, name: &str| Key::new(namespace, name);
        match parts.as_slice() {
            ["healthz"] | ["healthz", "ping"] => Route::Health,
            ["pods"] => Route::Pods,
            ["configz"] => Route::Config,
            ["stats", "summary"] => Route::Summary,
            ["metrics"] => Route::Metrics(MetricsEndpoint::Kubelet),
            ["metrics", "resource"] => Route::Metrics(MetricsEndpoint::Resource),
            ["metrics", "cadvisor"] => Route::Metrics(MetricsEndpoint::Cadvisor),
            ["metrics", "probes"] => Route::Metrics(MetricsEndpoint::Probes),
            ["containerLogs", namespace, name, container] => {
                Route::Logs { pod: pod(namespace, name), container: (*container).to_owned() }
            }
            ["exec", namespace, name, container] | ["exec", namespace, name, _, container] => {
                Route::Exec { pod: pod(namespace, name), container: (*container).to_owned() }
            }
            ["attach", namespace, name, container] | ["attach", namespace, name, _, container] => {
                Route::Attach { pod: pod(namespace, name), container: (*container).to_owned() }
            }
            ["portForward", namespace, name] | ["portForward", namespace, name, _] => {
                Route::PortForward { pod: pod(namespace, name) }
            }
            _ => Route::Unknown,
        }
    }
}

fn is_name(text: &str) -> bool {
    let plain = text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'));
    plain && !text.starts_with('.') && !text.is_empty()
}

/// The parameters of a query, unescaped.
pub struct QueryFlags(Vec<(String, String)>);

impl QueryFlags {
    pub fn of(query: &str) -> QueryFlags {
        QueryFlags(stream::url_encoding::parse_query(query).collect())
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The first value, or `""`.
    pub fn get<'a>(&'a self, name: &'a str) -> &'a str {
        self.all(name).next().unwrap_or("")
    }

    pub fn is_set(&self, name: &str) -> bool {
        matches!(self.get(name), "1" | "true")
    }
}

/// The streams that a client requests.
#[derive(Debug, PartialEq)]
pub struct StreamOptions {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

impl StreamOptions {
    pub fn of<B>(request: &Request<B>) -> Result<StreamOptions, HttpError> {
        let flags = QueryFlags::of(request.uri().query().unwrap_or(""));
        let tty = flags.is_set("tty");
        let streams = StreamOptions {
            stdin: flags.is_set("input"),
            stdout: flags.is_set("output"),
            // A terminal has a single output stream.
            stderr: flags.is_set("error") && !tty,
            tty,
        };
        if !streams.stdin && !streams.stdout && !streams.stderr {
            let message = "you must specify at least 1 of stdin, stdout, stderr";
            return Err((StatusCode::BAD_REQUEST, message.to_owned()));
        }
        Ok(streams)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(path: &str, expected: Route) {
        assert_eq!(Route::of(path), expected, "{path}");
    }

    #[test]
    fn routes_paths() {
        let pod = || Key::new("default", "web");
        let container = || "main".to_owned();
        check("/healthz", Route::Health);
        check("/pods", Route::Pods);
        check("/runningpods/", Route::RunningPods);
        check("/metrics/resource", Route::Metrics(MetricsEndpoint::Resource));
        check("/metrics/else", Route::Unknown);
        check("/stats/summary", Route::Summary);
        check("/containerLogs/default/web/main", Route::Logs { pod: pod(), container: container() });
        check("/exec/default/web/main", Route::Exec { pod: pod(), container: container() });
        check("/exec/default/web/some-uid/main", Route::Exec { pod: pod(), container: container() });
        check("/attach/default/web/main", Route::Attach { pod: pod(), container: container() });
        check("/portForward/default/web", Route::PortForward { pod: pod() });
        check("/", Route::Unknown);
        check("/containerLogs/default/web", Route::Unknown);
    }

    #[test]
    fn rejects_paths_outside_the_logs() {
        for path in [
            "/containerLogs/default/web/..",
            "/containerLogs/default/../main",
            "/containerLogs/../../etc",
            "/containerLogs/default/web/..%2f..%2fetc%2fpasswd",
            "/containerLogs/default/web/%2e%2e",
            "/containerLogs/default//main",
            "/containerLogs/default/web/main\\..",
            "/containerLogs/default/web/main/../../x",
        ] {
            check(path, Route::Unknown);
        }
    }

    #[test]
    fn reads_query_pairs() {
        let flags = QueryFlags::of("command=sh&command=echo%20a%26b+c&tty=1&none&x=%zz");
        assert_eq!(flags.all("command").collect::<Vec<_>>(), ["sh", "echo a&b c"]);
        assert!(flags.is_set("tty") && !flags.is_set("none"));
        assert_eq!(flags.get("x"), "%zz");
    }
}

//! EventRateLimit: token buckets for events, one per server, namespace, user, or source and object.
//!
//! Disabled by default. Without a configuration file it has no limits.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::json::JsonExt as _;
use api::{ErrorList, Path, Status};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;

use super::{Cluster, Operation, Request};

/// Upstream's default for `cacheSize`.
const DEFAULT_CACHE_SIZE: usize = 4096;
const LIMIT_TYPES: [&str; 4] = ["Namespace", "Server", "SourceAndObject", "User"];

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limit {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    qps: i32,
    #[serde(default)]
    burst: i32,
    #[serde(default)]
    cache_size: i32,
}

/// `Configuration` of eventratelimit.admission.k8s.io.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    #[serde(default)]
    limits: Vec<Limit>,
}

/// The configured limits with their token buckets.
#[derive(Default)]
pub struct EventRateLimiter(Vec<(Limit, Mutex<Buckets>)>);

#[derive(Default)]
struct Buckets {
    by_key: HashMap<Arc<str>, Bucket>,
    /// Keys in order of last use; `last_used` of a bucket is its key here.
    order: BTreeMap<u64, Arc<str>>,
    uses: u64,
}

struct Bucket {
    tokens: f64,
    last_update: Instant,
    last_used: u64,
}

pub fn validate(request: &Request<'_>, event: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let event_kind = (request.row.group, request.row.plural) == ("", "events");
    if !event_kind || request.operation == Operation::Delete || request.dry_run {
        return Ok(());
    }
    cluster.event_rates().take(request, event, Instant::now())
}

/// Parses and validates a `Configuration`.
pub fn read(value: &Value) -> Result<Vec<Limit>, String> {
    let file = File::deserialize(value).map_err(|error| error.to_string())?;
    if (file.api_version.as_str(), file.kind.as_str())
        != ("eventratelimit.admission.k8s.io/v1alpha1", "Configuration")
    {
        return Err("expected a Configuration of eventratelimit.admission.k8s.io/v1alpha1".to_owned());
    }
    let mut errors = ErrorList::default();
    let limits = Path::new("limits");
    if file.limits.is_empty() {
        errors.invalid(&limits, Value::Array(Vec::new()), "must not be empty");
    }
    for (i, limit) in file.limits.iter().enumerate() {
        let path = limits.index(i);
        if !LIMIT_TYPES.contains(&limit.kind.as_str()) {
            errors.not_supported(&path.child("type"), limit.kind.as_str(), &LIMIT_TYPES);
        }
        for (field, number) in [("burst", limit.burst), ("qps", limit.qps)] {
            if number <= 0 {
                errors.invalid(&path.child(field), number, "must be positive");
            }
        }
        if limit.kind != "Server" && limit.cache_size < 0 {
            errors.invalid(&path.child("cacheSize"), limit.cache_size, "must not be negative");
        }
    }
    if errors.is_empty() { Ok(file.limits) } else { Err(errors.to_string()) }
}

impl EventRateLimiter {
    pub fn new(limits: &[Limit]) -> EventRateLimiter {
        EventRateLimiter(limits.iter().map(|limit| (limit.clone(), Mutex::default())).collect())
    }

    /// Takes one token from every bucket of the event. As upstream, all buckets are charged even if
    /// one is empty.
    fn take(&self, request: &Request<'_>, event: &Value, now: Instant) -> Result<(), Status> {
        let mut empty = Vec::new();
        for (limit, buckets) in &self.0 {
            let key = limit.key(request, event);
            if !buckets.lock().take(limit, &key, now) {
                empty.push(format!("limit reached on type {} for key {key}", limit.kind));
            }
        }
        if empty.is_empty() {
            return Ok(());
        }
        let reason = crate::rbac::aggregate_errors(&empty);
        Err(Status::failure(429, "TooManyRequests", format!("Too many requests: {reason}")))
    }
}

impl Limit {
    fn key(&self, request: &Request<'_>, event: &Value) -> String {
        match self.kind.as_str() {
            "Namespace" => request.namespace.to_owned(),
            "User" => request.user.map(|user| user.name.clone()).unwrap_or_default(),
            "SourceAndObject" => {
                let (source, object) = (event.at("source"), event.at("involvedObject"));
                let source = ["component", "host"].map(|field| source.text(field));
                let fields = ["kind", "namespace", "name", "uid", "apiVersion"];
                [source.concat(), fields.map(|field| object.text(field)).concat()].concat()
            }
            _ => String::new(),
        }
    }
}

impl Buckets {
    fn take(&mut self, limit: &Limit, key: &str, now: Instant) -> bool {
        self.uses += 1;
        let (used, burst) = (self.uses, f64::from(limit.burst));
        let key: Arc<str> = match self.by_key.get_key_value(key) {
            Some((key, bucket)) => {
                self.order.remove(&bucket.last_used);
                key.clone()
            }
            None => {
                self.evict_oldest(limit);
                key.into()
            }
        };
        self.order.insert(used, key.clone());
        let bucket =
            self.by_key.entry(key).or_insert(Bucket { tokens: burst, last_update: now, last_used: used });
        let since: Duration = now.saturating_duration_since(bucket.last_update);
        bucket.tokens = (bucket.tokens + since.as_secs_f64() * f64::from(limit.qps)).min(burst);
        (bucket.last_update, bucket.last_used) = (now, used);
        let enough = bucket.tokens >= 1.0;
        if enough {
            bucket.tokens -= 1.0;
        }
        enough
    }

    /// Drops the least recently used buckets. A dropped bucket is full when it is created again.
    fn evict_oldest(&mut self, limit: &Limit) {
        let max_buckets = match usize::try_from(limit.cache_size) {
            Ok(0) | Err(_) => DEFAULT_CACHE_SIZE,
            Ok(size) => size,
        };
        while self.by_key.len() >= max_buckets {
            let Some((_, oldest)) = self.order.pop_first() else { return };
            self.by_key.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::access::User;
    use crate::request::Target;

    fn limit(kind: &str, qps: i32, burst: i32, cache_size: i32) -> Limit {
        Limit { kind: kind.into(), qps, burst, cache_size }
    }

    /// Sends each event `namespace user object` at its time in milliseconds; returns the result of
    /// each.
    fn run(limits: &[Limit], events: &[(u64, &str)]) -> Vec<String> {
        let rates = EventRateLimiter::new(limits);
        let begin = Instant::now();
        let row = api::resource_table::find_resource("", "v1", "events").expect("events are in the table");
        let each = events.iter().map(|(after, text)| {
            let words: Vec<&str> = text.split(' ').collect();
            let target = Target::collection(row, words[0]);
            let user = User { name: words[1].into(), ..User::default() };
            let event =
                json!({"involvedObject": {"kind": "Pod", "name": words[2]}, "source": {"component": "c"}});
            let request = Request::new(&target, Operation::Create, &event, None, Some(&user));
            let answer = rates.take(&request, &event, begin + Duration::from_millis(*after));
            answer.map_or_else(|status| format!("{} {}", status.code, status.message), |()| "ok".to_owned())
        });
        each.collect()
    }

    #[test]
    fn rejects_events_while_bucket_is_empty() {
        let full = "429 Too many requests: limit reached on type Server for key ";
        let found = run(
            &[limit("Server", 2, 3, 0)],
            &[
                (0, "a u p"),
                (0, "b u p"),
                (0, "c u p"),
                (0, "d u p"),
                (499, "d u p"),
                (501, "d u p"),
                (502, "d u p"),
            ],
        );
        assert_eq!(found, ["ok", "ok", "ok", full, full, "ok", full]);
    }

    #[test]
    fn uses_a_separate_bucket_for_each_key() {
        let found = run(&[limit("Namespace", 1, 1, 0)], &[(0, "a u p"), (0, "b u p"), (0, "a v q")]);
        assert_eq!(found, ["ok", "ok", "429 Too many requests: limit reached on type Namespace for key a"]);
        let found = run(&[limit("User", 1, 1, 0)], &[(0, "a u p"), (0, "a v p"), (0, "b u p")]);
        assert_eq!(found, ["ok", "ok", "429 Too many requests: limit reached on type User for key u"]);
        let found = run(&[limit("SourceAndObject", 1, 1, 0)], &[(0, "a u p"), (0, "a u q"), (0, "b v p")]);
        assert_eq!(
            found,
            ["ok", "ok", "429 Too many requests: limit reached on type SourceAndObject for key cPodp"]
        );
        let both = [limit("Server", 1, 1, 0), limit("User", 1, 1, 0)];
        let found = run(&both, &[(0, "a u p"), (0, "a u p")]);
        assert_eq!(
            found[1],
            "429 Too many requests: [limit reached on type Server for key , limit reached on type User for key u]"
        );
    }

    #[test]
    fn drops_least_recently_used_bucket_at_cache_size() {
        let found = run(
            &[limit("Namespace", 1, 1, 2)],
            &[(0, "a u p"), (0, "b u p"), (0, "a u p"), (0, "c u p"), (0, "a u p"), (0, "b u p")],
        );
        // The use of `a` makes `b` the least recently used, so `b` is dropped and starts with a
        // full bucket.
        assert_eq!(
            found.iter().map(|text| text.starts_with("ok")).collect::<Vec<_>>(),
            [true, true, false, true, false, true]
        );
    }

    #[test]
    fn validates_configuration() {
        let file = |limits: Value| {
            let version = "eventratelimit.admission.k8s.io/v1alpha1";
            read(&json!({"apiVersion": version, "kind": "Configuration", "limits": limits}))
                .map(|limits| limits.len())
        };
        assert_eq!(
            file(
                json!([{"type": "Server", "qps": 1, "burst": 1}, {"type": "User", "qps": 1, "burst": 1, "cacheSize": 9}])
            ),
            Ok(2)
        );
        assert_eq!(file(json!([])).unwrap_err(), "limits: Invalid value: []: must not be empty");
        assert_eq!(
            file(json!([{"type": "Moon", "cacheSize": -1}])).unwrap_err(),
            r#"[limits[0].type: Unsupported value: "Moon": supported values: "Namespace", "Server", "SourceAndObject", "User", limits[0].burst: Invalid value: 0: must be positive, limits[0].qps: Invalid value: 0: must be positive, limits[0].cacheSize: Invalid value: -1: must not be negative]"#
        );
    }
}

//! API Priority and Fairness: classifies requests, limits their concurrency and queues them fairly.
//!
//! Each request is classified by the FlowSchemas (`flow_schema`), is assigned a number of seats
//! (`work_estimator`), and waits in a queue of its priority level if they are not free
//! (`priority_level`, decided by `queue_set`). Priority levels divide the server's seats by shares
//! and borrow unused seats from each other (`seat_allocation`). `config_controller` follows the
//! configuration objects; `defaults` are the objects that every cluster has.
//!
//! A request that finds a seat at once costs one pass over the FlowSchemas and two short locks.
//!
//! Counterpart upstream: `k8s.io/apiserver/pkg/util/flowcontrol`.

mod config_controller;
mod debug;
mod defaults;
mod dropped_requests_tracker;
mod flow_schema;
mod integrator;
mod metrics;
mod priority_level;
mod queue_set;
mod seat_allocation;
#[cfg(test)]
mod tests;
mod work_estimator;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use api::json::JsonExt as _;
use bytes::Bytes;
use futures_util::Stream;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::access::User;
use crate::body::Body;
use crate::rbac::Attributes;
use crate::request::{Query, Target};
use crate::server::Server;

pub use config_controller::{ensure_defaults, run};
use flow_schema::{Distinguisher, FlowSchemaEntry, FlowSchemaSpec, FlowSchemaTable};
use priority_level::{LevelRequest, PriorityLevel, Rejection, SeatDecision, SeatGuard};
use queue_set::{QueuingConfig, WorkEstimate};
use seat_allocation::{ConcurrencyLimits, SeatClaim};
use work_estimator::{WatchRegistration, WatchTracker};

const FLOW_SCHEMA_UID_HEADER: HeaderName = HeaderName::from_static("x-kubernetes-pf-flowschema-uid");
const PRIORITY_LEVEL_UID_HEADER: HeaderName = HeaderName::from_static("x-kubernetes-pf-prioritylevel-uid");
/// Upstream's `--max-requests-inflight` and `--max-mutating-requests-inflight` together.
pub const DEFAULT_MAX_REQUESTS_INFLIGHT: u64 = 600;
/// The most seats of one request, in percent of the level's nominal seats.
const MAX_REQUEST_SEATS_PERCENT: u64 = 15;

pub struct FlowControl {
    total_seats: u64,
    clock: Instant,
    table: RwLock<Arc<FlowSchemaTable>>,
    levels: Mutex<BTreeMap<String, Arc<PriorityLevel>>>,
    watchers: Arc<WatchTracker>,
    seat_contention: Arc<Notify>,
    /// The fraction of its target that every level could have at the last borrowing update.
    fair_fraction: Mutex<f64>,
    /// Randomly keyed, so that a client cannot choose a name whose flow collides with another's
    /// queues.
    hasher: RandomState,
}

/// The attributes of a request that flow control uses.
pub struct FlowRequest<'a> {
    pub user: &'a User,
    pub attributes: Attributes<'a>,
    pub target: Option<&'a Target>,
    pub query: &'a Query,
    /// The request's timeout.
    pub timeout: Duration,
}

/// A request that may execute, with its seats.
pub struct ExecutingRequest {
    schema: Arc<FlowSchemaEntry>,
    seat: SeatGuard,
    watch_registration: Option<WatchRegistration>,
    timeout: Duration,
}

impl FlowControl {
    pub fn new(total_seats: u64) -> FlowControl {
        let flow = FlowControl {
            total_seats,
            clock: Instant::now(),
            table: RwLock::new(Arc::new(FlowSchemaTable { schemas: Vec::new() })),
            levels: Mutex::default(),
            watchers: Arc::default(),
            seat_contention: Arc::default(),
            fair_fraction: Mutex::default(),
            hasher: RandomState::new(),
        };
        flow.digest_config_objects(&[], &[]);
        flow
    }

    /// Executes a request, queues it or rejects it with a 429 response. `None`: the request needs
    /// no seat.
    pub async fn start_request(
        &self,
        server: &Server,
        request: FlowRequest<'_>,
    ) -> Result<Option<ExecutingRequest>, Response<Body>> {
        let verb = match request.attributes {
            Attributes::Resource { verb, subresource, .. } => {
                if verb != "watch" && is_long_running(subresource) {
                    return Ok(None);
                }
                verb
            }
            Attributes::Path { .. } => "",
        };
        let Some(schema) = self.table.read().find_schema(request.user, &request.attributes).cloned() else {
            return Ok(None);
        };
        let watch = verb == "watch";
        let (work, watchers) = self.estimate_work(server, &request, verb, &schema);
        let flow = self.flow_hash(&schema, &request);
        let level_request = LevelRequest { metrics_index: schema.metrics_index, flow, work, watch, watchers };
        let seat = match schema.level.start_request(level_request) {
            SeatDecision::Executing(seat) => Ok(seat),
            // A request may spend a quarter of its timeout in the queue, as upstream.
            SeatDecision::Queued(waiting) => waiting.wait_until(Instant::now() + request.timeout / 4).await,
            SeatDecision::Rejected(rejection) => Err(rejection),
        };
        match seat {
            Ok(seat) => {
                let watch_registration = match (watch, request.target, request.attributes) {
                    (true, Some(target), Attributes::Resource { name, .. }) => {
                        self.watchers.register_watch(target, name, request.query)
                    }
                    _ => None,
                };
                Ok(Some(ExecutingRequest { schema, seat, watch_registration, timeout: request.timeout }))
            }
            Err(rejection) => {
                let mut response = too_many_requests_response(&rejection);
                schema.add_headers(&mut response);
                Err(response)
            }
        }
    }

    fn estimate_work(
        &self,
        server: &Server,
        request: &FlowRequest<'_>,
        verb: &str,
        schema: &FlowSchemaEntry,
    ) -> (WorkEstimate, Option<usize>) {
        let (Some(target), Attributes::Resource { name, .. }) = (request.target, request.attributes) else {
            return (WorkEstimate::with_seats(1), None);
        };
        match verb {
            "list" | "watch" => {
                let stored = server.shard(target.resource).object_stats();
                (
                    work_estimator::estimate_list(
                        verb,
                        !name.is_empty(),
                        request.query,
                        stored,
                        schema.max_seats,
                    ),
                    None,
                )
            }
            "create" | "update" | "patch" | "delete" if target.subresource != "token" => {
                let watchers = self.watchers.interested_watch_count(target);
                (work_estimator::estimate_mutation(watchers, schema.max_seats), Some(watchers))
            }
            _ => (WorkEstimate::with_seats(1), None),
        }
    }

    fn flow_hash(&self, schema: &FlowSchemaEntry, request: &FlowRequest<'_>) -> u64 {
        let distinguisher = match schema.rules.distinguisher {
            Distinguisher::None => "",
            Distinguisher::User => request.user.name.as_str(),
            Distinguisher::Namespace => request.attributes.namespace(),
        };
        // Only levels with queues distinguish flows.
        if schema.max_seats == 0 { 0 } else { self.hasher.hash_one((&schema.rules.name, distinguisher)) }
    }

    /// Applies the current objects. Mandatory objects that are missing are replaced by their
    /// defaults.
    fn digest_config_objects(&self, levels: &[Value], schemas: &[Value]) {
        let name = |object: &Value| object.at("metadata").text("name").to_owned();
        let uid = |object: &Value| {
            HeaderValue::try_from(object.at("metadata").text("uid")).unwrap_or(HeaderValue::from_static(""))
        };
        let missing = |objects: &[Value], all: Vec<Value>| -> Vec<Value> {
            let is_missing = |desired: &Value| !objects.iter().any(|object| name(object) == name(desired));
            all.into_iter()
                .filter(|desired| config_controller::is_mandatory(desired) && is_missing(desired))
                .collect()
        };
        let mandatory = missing(levels, defaults::levels());
        let parsed: Vec<_> = levels
            .iter()
            .chain(&mandatory)
            .filter_map(|object| {
                let (share, shape) = flow_schema::parse_priority_level(object)?;
                Some((name(object), uid(object), share, shape))
            })
            .collect();
        let shares: Vec<_> = parsed.iter().map(|(_, _, share, _)| *share).collect();
        let all_bounds = seat_allocation::concurrency_limits(self.total_seats, &shares);
        let mut known = self.levels.lock();
        let mut now: BTreeMap<String, (Arc<PriorityLevel>, HeaderValue, u64)> = BTreeMap::new();
        for ((name, uid, share, shape), bounds) in parsed.into_iter().zip(all_bounds) {
            let level = known.get(&name).cloned().unwrap_or_else(|| {
                Arc::new(PriorityLevel::new(&name, self.clock, self.seat_contention.clone(), share, shape))
            });
            let mut state = level.state();
            (state.share, state.bounds) = (share, bounds);
            let seats = state.queues.limit();
            drop(state);
            // `configure` takes the level's lock itself.
            level.configure(shape, seats);
            now.insert(name, (level, uid, max_request_seats(&bounds, shape)));
        }
        *known = now.iter().map(|(name, (level, ..))| (name.clone(), level.clone())).collect();
        drop(known);
        self.update_borrowing();
        let mandatory = missing(schemas, defaults::schemas());
        let mut table: Vec<Arc<FlowSchemaEntry>> = Vec::new();
        for object in schemas.iter().chain(&mandatory) {
            let rules = FlowSchemaSpec::parse(object);
            // A schema whose priority level does not exist matches nothing.
            let Some((level, level_uid, max_seats)) = now.get(&rules.level) else { continue };
            let (uid, level_uid) = (uid(object), level_uid.clone());
            let metrics_index = level.metrics_index(&rules.name);
            table.push(Arc::new(FlowSchemaEntry {
                rules,
                uid,
                level: level.clone(),
                level_uid,
                metrics_index,
                max_seats: *max_seats,
            }));
        }
        table.sort_by(|a, b| {
            let order = |schema: &FlowSchemaEntry| (schema.rules.precedence, schema.rules.name.clone());
            order(a).cmp(&order(b))
        });
        *self.table.write() = Arc::new(FlowSchemaTable { schemas: table });
    }

    /// Reallocates the seats by what each level has used in the last period.
    fn update_borrowing(&self) {
        let levels = self.levels.lock();
        let claims: Vec<SeatClaim> = levels
            .values()
            .map(|level| {
                level.observe();
                let state = level.state();
                SeatClaim {
                    exempt: state.share.exempt,
                    bounds: state.bounds,
                    usage: state.usage,
                    current: state.queues.limit(),
                }
            })
            .collect();
        let (allocations, fair_fraction) = seat_allocation::compute_allocations(&claims);
        *self.fair_fraction.lock() = fair_fraction;
        for (level, allocation) in levels.values().zip(allocations) {
            let mut state = level.state();
            state.grant = allocation;
            let shape = state.queues.config();
            drop(state);
            level.configure(shape, allocation.seats);
        }
    }

    /// Starts a new measurement period.
    fn reset_usage(&self) {
        self.levels.lock().values().for_each(|level| level.reset_usage());
    }
}

/// The most seats that one request of a level may take; 0 for levels without queues.
fn max_request_seats(bounds: &ConcurrencyLimits, shape: QueuingConfig) -> u64 {
    match shape {
        QueuingConfig::Queue { hand_size: hand, .. } => (bounds.nominal * MAX_REQUEST_SEATS_PERCENT)
            .div_ceil(100)
            .min(bounds.nominal / hand.max(1) as u64)
            .max(1),
        _ => 0,
    }
}

/// Requests that last as long as the client wants take no seats. Watches take seats while they
/// initialize.
pub fn is_long_running(subresource: &str) -> bool {
    matches!(subresource, "attach" | "exec" | "proxy" | "log" | "portforward")
}

fn too_many_requests_response(rejection: &Rejection) -> Response<Body> {
    let text = "Too many requests, please try again later.\n";
    let mut response = Response::new(Body::from(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::RETRY_AFTER, rejection.retry_after.into());
    response
}

impl FlowSchemaEntry {
    /// Adds the UIDs of the priority level and the FlowSchema. UIDs, not names, because only
    /// administrators may resolve them.
    fn add_headers(&self, response: &mut Response<Body>) {
        let headers = response.headers_mut();
        headers.insert(PRIORITY_LEVEL_UID_HEADER, self.level_uid.clone());
        headers.insert(FLOW_SCHEMA_UID_HEADER, self.uid.clone());
    }
}

impl ExecutingRequest {
    /// Attaches the seats to the response until its body is produced: a long list is encoded while
    /// it is sent, and a watch starts with its initial events.
    pub fn hold_seats(self, mut response: Response<Body>) -> Response<Body> {
        self.schema.add_headers(&mut response);
        match response.body() {
            Body::Whole(_) => response,
            Body::Chunks(_) | Body::Stream(_) => {
                let hold = SeatHold::new(self.seat, self.timeout);
                let watch_registration = self.watch_registration;
                response.map(|body| match body {
                    Body::Stream(stream) => Body::Stream(Box::pin(SeatGuardStream {
                        stream,
                        hold: Some(hold),
                        _watch_registration: watch_registration,
                    })),
                    other => other.with_guard(hold),
                })
            }
        }
    }
}

/// The seats of a response body that is being sent, released when the request's timeout expires: a
/// client that does not read must not block others.
struct SeatHold {
    seat: Arc<Mutex<Option<SeatGuard>>>,
    timer: AbortHandle,
}

impl SeatHold {
    fn new(seat: SeatGuard, timeout: Duration) -> SeatHold {
        let seat = Arc::new(Mutex::new(Some(seat)));
        let shared_seat = seat.clone();
        let timer = tokio::spawn(async move {
            tokio::time::sleep(timeout).await;
            // The seats are dropped after this lock is released: their drop locks the priority
            // level.
            let seat = shared_seat.lock().take();
            drop(seat);
        });
        SeatHold { seat, timer: timer.abort_handle() }
    }
}

impl Drop for SeatHold {
    fn drop(&mut self) {
        self.timer.abort();
        let seat = self.seat.lock().take();
        drop(seat);
    }
}

struct SeatGuardStream {
    stream: Pin<Box<dyn Stream<Item = Bytes> + Send>>,
    hold: Option<SeatHold>,
    _watch_registration: Option<WatchRegistration>,
}

impl Stream for SeatGuardStream {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let next = self.stream.as_mut().poll_next(cx);
        // A watch that has no event ready has sent its initial events.
        if !matches!(next, Poll::Ready(Some(_))) {
            self.hold = None;
        }
        next
    }
}

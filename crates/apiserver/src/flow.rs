//! Priority and fairness: who is served when there is more to do than seats.
//!
//! Each request is classified by the FlowSchemas (`table`), takes as many seats of its priority level as it
//! is wide (`width`), and waits its turn where there are none (`level`, decided by `queues`). Levels divide
//! the server's seats by shares and lend each other what they do not use (`share`). `keep` follows the
//! objects that say all this; `defaults` are those every cluster has.
//!
//! A request that finds a seat costs one pass over the table and two short locks.

mod defaults;
mod demand;
mod keep;
mod level;
mod print;
mod queues;
mod retry;
mod share;
mod table;
mod tally;
#[cfg(test)]
mod tests;
mod width;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use api::json::Json as _;
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
use crate::rbac::Ask;
use crate::request::{Query, Target};
use crate::server::Server;

pub use keep::{ensure_defaults, keep};
use level::{Entry, Level, Refused, Seat, Visit};
use queues::{Shape, Work};
use share::{Bounds, Claim};
use table::{Distinguisher, Rules, Schema, Table};
use width::{Watchers, Watching};

const SCHEMA_UID: HeaderName = HeaderName::from_static("x-kubernetes-pf-flowschema-uid");
const LEVEL_UID: HeaderName = HeaderName::from_static("x-kubernetes-pf-prioritylevel-uid");
/// Upstream's `--max-requests-inflight` and `--max-mutating-requests-inflight` together.
pub const SEATS: u64 = 600;
/// What a request of a level may be as wide as, in percent of the level.
const WIDEST_PERCENT: u64 = 15;

pub struct Flow {
    total: u64,
    clock: Instant,
    table: RwLock<Arc<Table>>,
    levels: Mutex<BTreeMap<String, Arc<Level>>>,
    watchers: Arc<Watchers>,
    crowded: Arc<Notify>,
    /// The fraction of its target every level could have at the last division.
    fair: Mutex<f64>,
    /// Keyed by chance, so that nobody can choose a name that shares another's queues.
    hasher: RandomState,
}

/// A request at the door.
pub struct Asking<'a> {
    pub user: &'a User,
    pub ask: Ask<'a>,
    pub target: Option<&'a Target>,
    pub query: &'a Query,
    /// How long it may take altogether.
    pub limit: Duration,
}

/// A request that was let in, with its seats.
pub struct Entered {
    schema: Arc<Schema>,
    seat: Seat,
    watching: Option<Watching>,
    limit: Duration,
}

impl Flow {
    pub fn new(total: u64) -> Flow {
        let flow = Flow {
            total,
            clock: Instant::now(),
            table: RwLock::new(Arc::new(Table { schemas: Vec::new() })),
            levels: Mutex::default(),
            watchers: Arc::default(),
            crowded: Arc::default(),
            fair: Mutex::default(),
            hasher: RandomState::new(),
        };
        flow.rebuild(&[], &[]);
        flow
    }

    /// Lets a request in, or has it wait its turn, or answers why not. `None`: it needs no seat.
    pub async fn enter(
        &self,
        server: &Server,
        asking: Asking<'_>,
    ) -> Result<Option<Entered>, Response<Body>> {
        let verb = match asking.ask {
            Ask::Resource { verb, subresource, .. } => {
                if verb != "watch" && is_long_running(subresource) {
                    return Ok(None);
                }
                verb
            }
            Ask::Path { .. } => "",
        };
        let Some(schema) = self.table.read().classify(asking.user, &asking.ask).cloned() else {
            return Ok(None);
        };
        let watch = verb == "watch";
        let (work, watchers) = self.estimate(server, &asking, verb, &schema);
        let flow = self.flow_of(&schema, &asking);
        let visit = Visit { tally: schema.tally, flow, work, watch, watchers };
        let seat = match schema.level.enter(visit) {
            Entry::In(seat) => Ok(seat),
            // A quarter of the request's time is for waiting.
            Entry::Wait(waiting) => waiting.until(Instant::now() + asking.limit / 4).await,
            Entry::Refused(refused) => Err(refused),
        };
        match seat {
            Ok(seat) => {
                let watching = match (watch, asking.target, asking.ask) {
                    (true, Some(target), Ask::Resource { name, .. }) => {
                        self.watchers.watch(target, name, asking.query)
                    }
                    _ => None,
                };
                Ok(Some(Entered { schema, seat, watching, limit: asking.limit }))
            }
            Err(refused) => {
                let mut response = too_many(&refused);
                schema.mark(&mut response);
                Err(response)
            }
        }
    }

    fn estimate(
        &self,
        server: &Server,
        asking: &Asking<'_>,
        verb: &str,
        schema: &Schema,
    ) -> (Work, Option<usize>) {
        let (Some(target), Ask::Resource { name, .. }) = (asking.target, asking.ask) else {
            return (Work::of(1), None);
        };
        match verb {
            "list" | "watch" => {
                let stored = server.shard(target.resource).weight();
                (width::list(verb, !name.is_empty(), asking.query, stored, schema.max_seats), None)
            }
            "create" | "update" | "patch" | "delete" if target.subresource != "token" => {
                let watchers = self.watchers.of(target);
                (width::change(watchers, schema.max_seats), Some(watchers))
            }
            _ => (Work::of(1), None),
        }
    }

    fn flow_of(&self, schema: &Schema, asking: &Asking<'_>) -> u64 {
        let distinguisher = match schema.rules.distinguisher {
            Distinguisher::None => "",
            Distinguisher::User => asking.user.name.as_str(),
            Distinguisher::Namespace => asking.ask.namespace(),
        };
        // Only queues tell flows apart.
        if schema.max_seats == 0 { 0 } else { self.hasher.hash_one((&schema.rules.name, distinguisher)) }
    }

    /// Takes in the objects as they are now. A mandatory one that is missing is imagined.
    fn rebuild(&self, levels: &[Value], schemas: &[Value]) {
        let name = |object: &Value| object.at("metadata").text("name").to_owned();
        let uid = |object: &Value| {
            HeaderValue::try_from(object.at("metadata").text("uid")).unwrap_or(HeaderValue::from_static(""))
        };
        let missing = |objects: &[Value], all: Vec<Value>| -> Vec<Value> {
            let lacks = |wanted: &Value| !objects.iter().any(|object| name(object) == name(wanted));
            all.into_iter().filter(|wanted| keep::is_mandatory(wanted) && lacks(wanted)).collect()
        };
        let imagined = missing(levels, defaults::levels());
        let parsed: Vec<_> = levels
            .iter()
            .chain(&imagined)
            .filter_map(|object| {
                let (share, shape) = table::level_of(object)?;
                Some((name(object), uid(object), share, shape))
            })
            .collect();
        let shares: Vec<_> = parsed.iter().map(|(_, _, share, _)| *share).collect();
        let all_bounds = share::bounds(self.total, &shares);
        let mut known = self.levels.lock();
        let mut now: BTreeMap<String, (Arc<Level>, HeaderValue, u64)> = BTreeMap::new();
        for ((name, uid, share, shape), bounds) in parsed.into_iter().zip(all_bounds) {
            let level = known.get(&name).cloned().unwrap_or_else(|| {
                Arc::new(Level::new(&name, self.clock, self.crowded.clone(), share, shape))
            });
            let mut state = level.state();
            (state.share, state.bounds) = (share, bounds);
            let seats = state.queues.limit();
            drop(state);
            level.configure(shape, seats);
            now.insert(name, (level, uid, widest(&bounds, shape)));
        }
        *known = now.iter().map(|(name, (level, ..))| (name.clone(), level.clone())).collect();
        drop(known);
        self.divide();
        let imagined = missing(schemas, defaults::schemas());
        let mut table: Vec<Arc<Schema>> = Vec::new();
        for object in schemas.iter().chain(&imagined) {
            let rules = Rules::parse(object);
            // One that points nowhere matches nothing.
            let Some((level, level_uid, max_seats)) = now.get(&rules.level) else { continue };
            let (uid, level_uid) = (uid(object), level_uid.clone());
            let tally = level.tally(&rules.name);
            table.push(Arc::new(Schema {
                rules,
                uid,
                level: level.clone(),
                level_uid,
                tally,
                max_seats: *max_seats,
            }));
        }
        table.sort_by(|a, b| {
            let order = |schema: &Schema| (schema.rules.precedence, schema.rules.name.clone());
            order(a).cmp(&order(b))
        });
        *self.table.write() = Arc::new(Table { schemas: table });
    }

    /// Divides the seats by what each level has used since the last time.
    fn divide(&self) {
        let levels = self.levels.lock();
        let claims: Vec<Claim> = levels
            .values()
            .map(|level| {
                level.observe();
                let state = level.state();
                Claim {
                    exempt: state.share.exempt,
                    bounds: state.bounds,
                    usage: state.usage,
                    current: state.queues.limit(),
                }
            })
            .collect();
        let (grants, fair) = share::divide(&claims);
        *self.fair.lock() = fair;
        for (level, grant) in levels.values().zip(grants) {
            let mut state = level.state();
            state.grant = grant;
            let shape = state.queues.shape();
            drop(state);
            level.configure(shape, grant.seats);
        }
    }

    /// Begins to look at who uses what.
    fn forget_usage(&self) {
        self.levels.lock().values().for_each(|level| level.forget_usage());
    }
}

/// The most seats one request of a level may take; 0 where the level has no queues.
fn widest(bounds: &Bounds, shape: Shape) -> u64 {
    match shape {
        Shape::Queue { hand, .. } => {
            (bounds.nominal * WIDEST_PERCENT).div_ceil(100).min(bounds.nominal / hand.max(1) as u64).max(1)
        }
        _ => 0,
    }
}

/// These last as long as their client likes and are not counted; watches are while they begin.
pub fn is_long_running(subresource: &str) -> bool {
    matches!(subresource, "attach" | "exec" | "proxy" | "log" | "portforward")
}

fn too_many(refused: &Refused) -> Response<Body> {
    let text = "Too many requests, please try again later.\n";
    let mut response = Response::new(Body::from(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::RETRY_AFTER, refused.retry_after.into());
    response
}

impl Schema {
    /// Tells the client where its request was put, by numbers that only an administrator can look up.
    fn mark(&self, response: &mut Response<Body>) {
        let headers = response.headers_mut();
        headers.insert(LEVEL_UID, self.level_uid.clone());
        headers.insert(SCHEMA_UID, self.uid.clone());
    }
}

impl Entered {
    /// The answer, which keeps the seats for as long as making it takes: a long list is made while it is
    /// sent, and a watch begins with what there is.
    pub fn attach(self, mut response: Response<Body>) -> Response<Body> {
        self.schema.mark(&mut response);
        match response.body() {
            Body::Whole(_) => response,
            Body::Chunks(_) | Body::Stream(_) => {
                let hold = Hold::new(self.seat, self.limit);
                let watching = self.watching;
                response.map(|body| match body {
                    Body::Stream(stream) => {
                        Body::Stream(Box::pin(HeldStream { stream, hold: Some(hold), _watching: watching }))
                    }
                    other => other.holding(hold),
                })
            }
        }
    }
}

/// Seats held by a body that is being sent, though not longer than a request may last: a client that does
/// not read would keep them from others.
struct Hold {
    seat: Arc<Mutex<Option<Seat>>>,
    timer: AbortHandle,
}

impl Hold {
    fn new(seat: Seat, limit: Duration) -> Hold {
        let seat = Arc::new(Mutex::new(Some(seat)));
        let held = seat.clone();
        let timer = tokio::spawn(async move {
            tokio::time::sleep(limit).await;
            let seat = held.lock().take();
            drop(seat);
        });
        Hold { seat, timer: timer.abort_handle() }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.timer.abort();
        let seat = self.seat.lock().take();
        drop(seat);
    }
}

struct HeldStream {
    stream: Pin<Box<dyn Stream<Item = Bytes> + Send>>,
    hold: Option<Hold>,
    _watching: Option<Watching>,
}

impl Stream for HeldStream {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let next = self.stream.as_mut().poll_next(cx);
        // A watch that waits for something to happen has begun.
        if !matches!(next, Poll::Ready(Some(_))) {
            self.hold = None;
        }
        next
    }
}

//! The state that all handlers share, and the pipeline of every request: routing, authentication,
//! audit, impersonation, flow control, authorization, admission.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use api::Status;
use api::selector::FieldSelector;
use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Method, Request, Response, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::upgrade::OnUpgrade;
use jiff::Timestamp;
use store::Store;
use tokio::sync::watch;

use crate::access::{self, User};
use crate::admission::{Chain, Policies, Webhooks};
use crate::aggregator::Aggregator;
use crate::audit::{self, Audit, AuditRecord, AuditRequest, RemoteAddr, RequestResult};
use crate::authentication::{self, Authenticators, Peer};
use crate::body::Body;
use crate::cache::Cache;
use crate::flow::{DEFAULT_MAX_REQUESTS_INFLIGHT, ExecutingRequest, FlowControl, FlowRequest};
use crate::metrics::{Metrics, RequestLabels};
use crate::negotiate::{Format, OutputKind, negotiate, not_acceptable};
use crate::options::ListOptions;
use crate::rbac::{Attributes, Rbac};
use crate::registry::Registry;
use crate::reload::ReloadMetrics;
use crate::render::{IncludeObject, Renderer, status_response};
use crate::request::{Query, Route, Target, route, verb};
use crate::services::ServiceAllocator;
use crate::subresource_view::SubresourceView;
use crate::tokens::Tokens;
use crate::tunnels::Tunnels;
use crate::warning_recorder::WarningRecorder;
use crate::write::with_warnings;

/// Upstream's limit of request bodies.
const MAX_REQUEST_BODY_BYTES: usize = 3 << 20;
/// Smaller bodies are not compressed.
pub const MIN_GZIP_BYTES: usize = 128 << 10;
/// The time until a response must start, including reading the request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// The default TTL of Events.
pub const EVENT_TTL: Duration = Duration::from_secs(3600);

pub struct Server {
    pub store: Arc<dyn Store>,
    pub cache: Arc<Cache>,
    pub registry: Arc<Registry>,
    /// The conversion webhooks of custom resources.
    pub conversion_webhooks: crate::custom::ConversionWebhooks,
    pub rbac: Rbac,
    pub metrics: Metrics,
    pub allocations: ServiceAllocator,
    pub flow: FlowControl,
    pub event_ttl: Duration,
    pub admission: Chain,
    pub webhooks: Webhooks,
    pub aggregator: Aggregator,
    pub reload_metrics: ReloadMetrics,
    pub policies: Policies,
    pub authenticators: Authenticators,
    /// `None`: auditing is disabled.
    pub audit: Option<Arc<Audit>>,
    pub shutdown: watch::Receiver<bool>,
    pub tokens: Tokens,
    /// Client TLS for connections to kubelets.
    pub kubelet_client_tls: Option<Arc<pki::ClientTls>>,
    /// Tunnels to nodes that cannot be dialed directly.
    pub tunnels: Tunnels,
    /// True once the bootstrap objects exist.
    pub ready: watch::Receiver<bool>,
    seed: AtomicU64,
}

/// A request body: streamed from a connection, or in memory.
pub trait RequestBody:
    http_body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send
{
}

impl<B> RequestBody for B where
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send
{
}

/// State that a request collects while it is handled and that the response needs.
struct RequestContext<'a> {
    /// The request's timeout.
    timeout: Duration,
    audit_id: &'a str,
    /// Its seats in flow control.
    executing: Option<ExecutingRequest>,
    /// Its audit record.
    audit_record: Option<AuditRecord>,
    /// Its warnings and audit annotations.
    recorder: Arc<WarningRecorder>,
}

/// A parsed and authenticated request.
pub struct Call {
    pub method: Method,
    pub path: String,
    pub query: Query,
    /// The query as sent.
    pub raw_query: String,
    /// The client's IP address; `None` in the same process.
    pub remote: Option<std::net::IpAddr>,
    pub headers: http::HeaderMap,
    pub body: Bytes,
    pub user: User,
    pub format: Format,
    pub now: Timestamp,
    /// Its warnings and audit annotations.
    pub recorder: Arc<WarningRecorder>,
    /// The connection, for protocol upgrades.
    pub upgrade: Option<OnUpgrade>,
}

impl Call {
    /// A header's value, or `""`.
    pub fn header(&self, name: impl header::AsHeaderName) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
    }

    pub fn renderer(&self, target: &Target) -> Result<Renderer, Status> {
        let include = match self.format.output_kind {
            OutputKind::Table => IncludeObject::parse(self.query.get("includeObject"))?,
            _ => IncludeObject::Metadata,
        };
        Ok(Renderer { resource: target.resource, format: self.format, include, now: self.now })
    }
}

impl Server {
    pub fn new(
        store: Arc<dyn Store>,
        cache: Arc<Cache>,
        registry: Registry,
        allocations: ServiceAllocator,
        tokens: Tokens,
        (shutdown, ready): (watch::Receiver<bool>, watch::Receiver<bool>),
    ) -> Server {
        let seed = AtomicU64::new(uuid::Uuid::new_v4().as_u64_pair().0);
        Server {
            rbac: Rbac::new(&cache),
            webhooks: Webhooks::new(&cache),
            aggregator: Aggregator::new(&cache),
            reload_metrics: ReloadMetrics::default(),
            policies: Policies::new(&cache),
            store,
            cache,
            registry: Arc::new(registry),
            conversion_webhooks: crate::custom::ConversionWebhooks::default(),
            metrics: Metrics::default(),
            allocations,
            flow: FlowControl::new(DEFAULT_MAX_REQUESTS_INFLIGHT),
            event_ttl: EVENT_TTL,
            admission: Chain::default(),
            authenticators: Authenticators::default(),
            audit: None,
            shutdown,
            tokens,
            kubelet_client_tls: None,
            tunnels: Tunnels::default(),
            ready,
            seed,
        }
    }

    /// A pseudorandom number in `0.0..1.0`, for spreading load. Not for secrets.
    pub fn random(&self) -> f64 {
        // SplitMix64.
        let mut z = self.seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Handles one request. Errors are returned as responses.
    pub async fn handle_request<B: RequestBody>(
        self: &Arc<Server>,
        request: Request<B>,
        peer: Peer,
    ) -> Response<Body> {
        let start = Instant::now();
        let _counted = self.metrics.count_inflight(request.method());
        let gzip = accepts_gzip(&request);
        let head = *request.method() == Method::HEAD;
        let audit_id = audit_id(&request);
        let query = Query::parse(request.uri().query().unwrap_or(""));
        // Negotiation errors are returned as JSON.
        let format = negotiate(request.headers(), &query).unwrap_or(Format::JSON);
        let route = route(&self.registry, request.uri().path());
        let label = match &route {
            Ok(Route::Resource(target)) => {
                Some(RequestLabels::of(request.method(), target, is_watch(&query, target)))
            }
            _ => None,
        };
        let timeout = request_timeout(&query);
        let recorder = Arc::new(WarningRecorder::default());
        let mut context = RequestContext {
            timeout,
            audit_id: &audit_id,
            executing: None,
            audit_record: None,
            recorder: recorder.clone(),
        };
        let work = self.dispatch_request(request, query, route, peer, &mut context);
        let work = AssertUnwindSafe(work).catch_unwind();
        let mut panic = None;
        let result = match tokio::time::timeout(timeout, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(cause)) => Err(panic_status(panic.insert(cause).as_ref())),
            Err(_) => Err(timed_out()),
        };
        let RequestContext { executing: entered, audit_record: trail, .. } = context;
        let audit_result = trail.is_some().then(|| match (&result, &panic) {
            (_, Some(cause)) => RequestResult::Panicked(panic_text(cause.as_ref()).to_owned()),
            (Err(status), _) => RequestResult::Failed(Box::new(status.clone())),
            (Ok(_), _) => RequestResult::Completed,
        });
        let response = result.unwrap_or_else(|status| status_response(&format, &status));
        let mut response = with_warnings(response, &recorder.warnings());
        if let Some(executing) = entered {
            response = executing.hold_seats(response);
        }
        if let (Some(audit_record), Some(audit_result)) = (trail, audit_result) {
            response = audit_record.finish(response, audit_result).await;
        }
        if let Some(label) = label {
            self.metrics.record_request(label, response.status().as_u16(), start.elapsed());
        }
        let headers = response.headers_mut();
        if let Ok(value) = audit_id.parse() {
            headers.insert("audit-id", value);
        }
        let is_large = response.body().size().is_none_or(|size| size >= MIN_GZIP_BYTES);
        let stream = matches!(response.body(), Body::Stream(_));
        if gzip && is_large && !stream && !response.headers().contains_key(header::CONTENT_ENCODING) {
            response.headers_mut().insert(header::CONTENT_ENCODING, header::HeaderValue::from_static("gzip"));
            response.headers_mut().append(header::VARY, header::HeaderValue::from_static("Accept-Encoding"));
            response = response.map(Body::gzip);
        }
        if head { without_body(response) } else { response }
    }

    async fn dispatch_request<B: RequestBody>(
        self: &Arc<Server>,
        request: Request<B>,
        query: Query,
        route: Result<Route, Status>,
        peer: Peer,
        context: &mut RequestContext<'_>,
    ) -> Result<Response<Body>, Status> {
        let path = request.uri().path().to_owned();
        let raw_query = request.uri().query().unwrap_or("").to_owned();
        let (mut parts, body) = request.into_parts();
        // HTTP/2 sends the host as `:authority`.
        if let Some(host) = parts.uri.authority().and_then(|host| host.as_str().parse().ok()) {
            parts.headers.entry(header::HOST).or_insert(host);
        }
        let method = parts.method.clone();
        // A list with a field selector on metadata.name is authorized for that name.
        let selected = FieldSelector::parse(query.get("fieldSelector")).unwrap_or_default();
        let request_info = match &route {
            Ok(Route::Resource(target)) => {
                let verb = verb(&parts.method, target, is_watch(&query, target));
                let name = match (target.name.as_str(), selected.exact("metadata.name")) {
                    ("", Some(name)) if matches!(verb, "list" | "watch") => name,
                    (name, _) => name,
                };
                access::RequestInfo::Resource(verb, target, name, Some(&selected))
            }
            _ => access::RequestInfo::Path(method.as_str(), &path),
        };
        let verb = request_info.verb();
        let target = match &route {
            Ok(Route::Resource(target)) => Some(target),
            _ => None,
        };
        let mut user = self
            .authenticate(&peer, &path, &mut parts, &query, (request_info.attributes(&verb), target), context)
            .await?;
        let authenticated = context.audit_record.is_some().then(|| user.clone());
        user = access::impersonate(&self.rbac, user, &parts.headers, &request_info).await?;
        if let (Some(audit_record), Some(authenticated)) = (&mut context.audit_record, authenticated)
            && authenticated != user
        {
            audit_record.set_impersonation(&user);
        }
        let flow_request = FlowRequest {
            user: &user,
            attributes: request_info.attributes(&verb),
            target,
            query: &query,
            timeout: context.timeout,
        };
        match self.flow.start_request(self, flow_request).await {
            Ok(seats) => context.executing = seats,
            Err(rejection) => return Ok(rejection),
        }
        let attributes = request_info.attributes(&verb);
        let verdict = self.rbac.evaluate(&user, &attributes).await;
        if let Some(audit_record) = &mut context.audit_record {
            audit_record.set_decision(&verdict);
        }
        attributes.check_verdict(&user, verdict)?;
        let remote = self.aggregator.find_remote(&path);
        let format = match (negotiate(&parts.headers, &query), &route) {
            // Aggregated API servers negotiate formats themselves.
            (Err(_), _) if remote.is_some() => Format::JSON,
            // OpenAPI and discovery have additional formats.
            (Err(_), Ok(Route::NonResource | Route::Discovery(_))) => Format::JSON,
            (format, _) => format?,
        };
        let body = read(body).await?;
        let now = Timestamp::now();
        let call = Call {
            remote: parts.extensions.get().map(|RemoteAddr(ip)| *ip),
            upgrade: parts.extensions.remove(),
            method: parts.method,
            path,
            query,
            raw_query,
            headers: parts.headers,
            body,
            user,
            format,
            now,
            recorder: context.recorder.clone(),
        };
        if let Some(entry) = remote {
            return crate::aggregator::proxy_request(self, &call, &entry).await;
        }
        match route? {
            Route::Resource(target) => {
                if let Some(audit_record) = &mut context.audit_record {
                    audit_record.set_request(&call, &target);
                }
                let deprecated = deprecation(&target);
                Ok(with_warnings(self.handle_resource(&call, target).await?, deprecated.as_slice()))
            }
            Route::Discovery(segments) => crate::discovery::handle(self, &call, &segments),
            Route::NonResource => crate::nonresource::handle(self, &call).await,
        }
    }

    /// Authenticates the request and starts its audit record.
    async fn authenticate(
        &self,
        peer: &Peer,
        path: &str,
        parts: &mut http::request::Parts,
        query: &Query,
        (attributes, target): (Attributes<'_>, Option<&Target>),
        context: &mut RequestContext<'_>,
    ) -> Result<User, Status> {
        let Some(audit) = &self.audit else {
            return authentication::authenticate(self, peer, path, &mut parts.headers).await;
        };
        let attempted = audit::attempted(&parts.headers, query, peer.has_certificate());
        let user = authentication::authenticate(self, peer, path, &mut parts.headers).await;
        let audit_request = AuditRequest {
            id: context.audit_id,
            uri: &parts.uri,
            headers: &parts.headers,
            remote: parts.extensions.get().map(|RemoteAddr(ip)| *ip),
            attributes,
            version: target.map_or("", |target| target.resource.version),
        };
        match &user {
            Ok(user) => context.audit_record = audit.begin_record(&audit_request, user),
            Err(_) => context.audit_record = audit.begin_authentication_failure(&audit_request, &attempted),
        }
        if let Some(audit_record) = &mut context.audit_record {
            audit_record.recorder = context.recorder.clone();
        }
        if let (Ok(_), Some(audit_record)) = (&user, &mut context.audit_record) {
            audit_record.receive().await?;
        }
        user
    }

    pub async fn handle_resource(
        self: &Arc<Server>,
        call: &Call,
        target: Target,
    ) -> Result<Response<Body>, Status> {
        if !target.subresource.is_empty() {
            return crate::subresource::handle(self, call, &target).await;
        }
        let watch = is_watch(&call.query, &target);
        let verb = verb(&call.method, &target, watch);
        if !target.resource.verb_names().contains(&verb) {
            return Err(method_not_allowed());
        }
        if target.resource.custom.is_some() {
            crate::custom::check_request(call, verb)?;
        }
        if target.resource.storage == api::resource_table::Storage::None {
            // Tables require a resource that can be listed.
            if call.format.output_kind == OutputKind::Table && !target.resource.verb_names().contains(&"list")
            {
                return Err(not_acceptable());
            }
            return crate::review::handle(self, call, &target).await;
        }
        let renderer = call.renderer(&target)?;
        let collection = target.name.is_empty();
        match (call.method.as_str(), collection) {
            ("GET" | "HEAD", _) => {
                if watch {
                    if call.headers.contains_key(header::UPGRADE) {
                        return Err(Status::bad_request("watch over WebSocket is not supported"));
                    }
                    let options = ListOptions::parse(&call.query, &target)?;
                    return crate::watch::watch(self, &target, options, renderer).await;
                }
                if collection {
                    let options = ListOptions::parse(&call.query, &target)?;
                    return crate::read::list(self, &target, &options, &renderer).await;
                }
                crate::read::get(self, &target, &call.query, &renderer).await
            }
            ("POST", true) => crate::create::create(self, call, &target, &renderer).await,
            ("PUT", false) => {
                crate::update::update(self, call, &target, SubresourceView::Object, &renderer).await
            }
            ("PATCH", false) => {
                crate::patch_handler::patch(self, call, &target, SubresourceView::Object, &renderer).await
            }
            ("DELETE", false) => crate::delete::delete(self, call, &target, &renderer).await,
            ("DELETE", true) => crate::delete::delete_collection(self, call, &target, &renderer).await,
            _ => Err(method_not_allowed()),
        }
    }
}

/// The warning for deprecated API versions.
fn deprecation(target: &Target) -> Option<String> {
    let row = target.resource;
    if let Some(crd) = row.custom {
        return crd.definition().version(row.version).and_then(|version| version.deprecation.clone());
    }
    ((row.group, row.plural) == ("", "endpoints"))
        .then(|| "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice".to_owned())
}

/// Only collections can be watched, except through the deprecated `/watch/` paths.
fn is_watch(query: &Query, target: &Target) -> bool {
    target.watch || target.name.is_empty() && query.flag("watch").unwrap_or(false)
}

/// Clients may shorten the timeout, not extend it. Watches return their headers at once, so it does
/// not limit their bodies.
fn request_timeout(query: &Query) -> Duration {
    let requested =
        api::time::parse_duration(query.get("timeout")).ok().and_then(|time| time.try_into().ok());
    requested
        .filter(|time: &Duration| !time.is_zero())
        .map_or(REQUEST_TIMEOUT, |time| time.min(REQUEST_TIMEOUT))
}

fn timed_out() -> Status {
    let message = "Timeout: request did not complete within the allotted timeout";
    let mut status = Status::failure(504, "Timeout", message);
    status.details = Some(api::status::StatusDetails::default());
    status
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown cause")
}

/// A panic while handling a request must not close the connection.
fn panic_status(panic: &(dyn std::any::Any + Send)) -> Status {
    let message = panic_text(panic);
    tracing::error!(message, "panic while handling request");
    Status::internal("this request caused apiserver to panic, look in the logs for details")
}

/// The response to HEAD keeps the Content-Length.
fn without_body(response: Response<Body>) -> Response<Body> {
    let size = response.body().size();
    let mut response = response.map(|_| Body::empty());
    if let Some(size) = size {
        response.headers_mut().insert(header::CONTENT_LENGTH, size.into());
    }
    response
}

pub fn method_not_allowed() -> Status {
    let mut status = Status::failure(
        405,
        "MethodNotAllowed",
        "the server does not allow this method on the requested resource",
    );
    status.details = Some(api::status::StatusDetails::default());
    status
}

async fn read(body: impl RequestBody) -> Result<Bytes, Status> {
    match Limited::new(body, MAX_REQUEST_BODY_BYTES).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Status::failure(
            413,
            "RequestEntityTooLarge",
            format!("Request entity too large: limit is {MAX_REQUEST_BODY_BYTES}"),
        )),
        Err(error) => Err(Status::bad_request(format!("cannot read the request body: {error}"))),
    }
}

fn accepts_gzip<B>(request: &Request<B>) -> bool {
    let accepted = request.headers().get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok());
    accepted.is_some_and(|text| text.split(',').any(|coding| coding.trim().split(';').next() == Some("gzip")))
}

/// The client's Audit-ID, or a new one.
fn audit_id<B>(request: &Request<B>) -> String {
    let given = request.headers().get("audit-id").and_then(|value| value.to_str().ok());
    match given {
        Some(id) if !id.is_empty() && id.len() <= 64 => id.to_owned(),
        _ => uuid::Uuid::new_v4().to_string(),
    }
}

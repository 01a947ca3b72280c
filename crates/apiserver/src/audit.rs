//! Audit logging: who requested what, when, and with which result.
//!
//! The policy selects the level of each request (`policy`). The event is assembled while the
//! request is handled ([`AuditRecord`], `event`) and queued for the backends (`log`, `webhook`),
//! which write it outside of the request. Bodies are only recorded at the levels `Request` and
//! `RequestResponse`; of the headers only the user agent and forwarded addresses are. Without a
//! policy there is no overhead.

mod body;
mod event;
mod log;
mod policy;
#[cfg(test)]
mod tests;
mod webhook;

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use api::Status;
use http::{HeaderMap, Response, Uri};
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::access::User;
use crate::body::Body;
use crate::codec;
use crate::https;
use crate::negotiate::MediaType;
use crate::rbac::Attributes;
use crate::request::{Query, Target};
use crate::server::Call;
use crate::warning_recorder::WarningRecorder;

use event::{Event, ObjectRef, StatusInfo, UserInfo};
pub use log::LogOptions;
pub use policy::PolicyError;
use policy::{LEVELS, Level, Policy, RequestAuditConfig, Stage};
pub use webhook::{AuditWebhookOptions, BatchOptions};

/// The `--audit-*` flags.
#[derive(Debug, Default)]
pub struct AuditOptions {
    pub policy_file: Option<PathBuf>,
    pub log: Option<LogOptions>,
    pub webhook: Option<AuditWebhookOptions>,
}

/// Whether requests wait until their events are written (`--audit-log-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Batch,
    Blocking,
    /// Like `Blocking`, and requests are rejected if their RequestReceived event cannot be written.
    BlockingStrict,
}

#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("loading audit policy file")]
    Policy(#[from] PolicyError),
    #[error("cannot open the audit log {path}")]
    Log { path: PathBuf, source: std::io::Error },
    #[error("initializing audit webhook")]
    Webhook(#[from] https::ConfigError),
}

/// Default capacity of a backend's queue. When it is full, events are dropped in batch mode,
/// otherwise requests wait.
const EVENT_BUFFER_SIZE: usize = 10_000;
/// How long a flush may take.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Responses to deletions that are smaller may be a Status and are parsed at any level.
const MAX_STATUS_BYTES: usize = 4096;

pub struct Audit {
    policy: Policy,
    backends: Vec<AuditBackend>,
    events: AtomicU64,
    levels: [AtomicU64; 4],
    rejected: AtomicU64,
}

struct AuditBackend {
    name: &'static str,
    format: EventFormat,
    mode: Mode,
    sender: mpsc::Sender<EncodedEvent>,
    lost: AtomicU64,
}

#[derive(Clone, Copy)]
enum EventFormat {
    Json,
    Legacy,
    ListItem,
}

/// An encoded event and the sender to notify when it is written. Without bytes it is a flush
/// marker.
struct EncodedEvent {
    bytes: Vec<u8>,
    done: Option<oneshot::Sender<bool>>,
}

/// The attributes of an incoming request.
pub struct AuditRequest<'a> {
    pub id: &'a str,
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    pub remote: Option<IpAddr>,
    pub attributes: Attributes<'a>,
    /// The API version of a resource request.
    pub version: &'a str,
}

/// Request extension: the address of the client.
#[derive(Clone, Copy)]
pub struct RemoteAddr(pub IpAddr);

/// The audit event of one request, built in stages.
pub struct AuditRecord {
    audit: Arc<Audit>,
    audit_config: RequestAuditConfig,
    event: Event,
    /// The request's audit annotations.
    pub recorder: Arc<WarningRecorder>,
    /// Watches, exec and the like also get a ResponseStarted event.
    long_running: bool,
    /// Authentication failed.
    authentication_failed: bool,
}

/// The outcome of a request.
pub enum RequestResult {
    Completed,
    Failed(Box<Status>),
    Panicked(String),
}

impl Audit {
    /// `None` without a policy or without a backend.
    pub fn new(options: &AuditOptions) -> Result<Option<Arc<Audit>>, AuditError> {
        let Some(path) = &options.policy_file else { return Ok(None) };
        let policy = Policy::load(path)?;
        let mut backends = Vec::new();
        let mut add = |name, format, mode, sender| {
            backends.push(AuditBackend { name, format, mode, sender, lost: AtomicU64::new(0) });
        };
        if let Some(log) = &options.log {
            let sender =
                log::start(log).map_err(|source| AuditError::Log { path: log.path.clone(), source })?;
            add("log", if log.json { EventFormat::Json } else { EventFormat::Legacy }, log.mode, sender);
        }
        if let Some(webhook) = &options.webhook {
            let client = https::HttpsClient::from_kubeconfig(&webhook.kubeconfig)?;
            add("webhook", EventFormat::ListItem, webhook.mode, webhook::start(client, webhook));
        }
        let audit = Audit {
            policy,
            events: AtomicU64::new(0),
            levels: Default::default(),
            rejected: AtomicU64::new(0),
            backends,
        };
        Ok((!audit.backends.is_empty()).then(|| Arc::new(audit)))
    }

    /// Starts the record of an authenticated request; `None` if its level is `None`.
    pub fn begin_record(self: &Arc<Audit>, request: &AuditRequest<'_>, user: &User) -> Option<AuditRecord> {
        self.new_record(request, Some(user))
    }

    /// Starts the record of a request that failed authentication; `attempted` names the methods
    /// tried.
    pub fn begin_authentication_failure(
        self: &Arc<Audit>,
        request: &AuditRequest<'_>,
        attempted: &str,
    ) -> Option<AuditRecord> {
        let mut record = self.new_record(request, None)?;
        record.authentication_failed = true;
        record.event.response_status =
            Some(StatusInfo { message: attempted.to_owned(), ..StatusInfo::default() });
        Some(record)
    }

    fn new_record(self: &Arc<Audit>, request: &AuditRequest<'_>, user: Option<&User>) -> Option<AuditRecord> {
        let audit_config = self.policy.evaluate(user, &request.attributes);
        let level = audit_config.map_or(Level::None, |audit_config| audit_config.level);
        self.levels[level as usize].fetch_add(1, Ordering::Relaxed);
        let audit_config = audit_config?;
        let (verb, long_running) = match request.attributes {
            Attributes::Resource { verb, subresource, .. } => {
                (verb, verb == "watch" || crate::flow::is_long_running(subresource))
            }
            Attributes::Path { verb, .. } => (verb, false),
        };
        let now = Timestamp::now();
        let event = Event {
            level: audit_config.level.name(),
            audit_id: request.id.to_owned(),
            stage: "",
            request_uri: request.uri.path_and_query().map_or_else(String::new, ToString::to_string),
            verb: verb.to_owned(),
            user: user.map(UserInfo::from).unwrap_or_default(),
            impersonated_user: None,
            source_ips: event::source_ips(request.headers, request.remote),
            user_agent: event::user_agent(request.headers),
            object_ref: ObjectRef::of(&request.attributes, request.version),
            response_status: None,
            request_object: None,
            response_object: None,
            request_received_timestamp: now,
            stage_timestamp: now,
            annotations: Default::default(),
        };
        let recorder = Arc::default();
        Some(AuditRecord {
            audit: self.clone(),
            audit_config,
            event,
            recorder,
            long_running,
            authentication_failed: false,
        })
    }

    /// Sends an event to all backends and waits where the mode requires it. Returns false if a
    /// `BlockingStrict` backend failed.
    async fn write_event(&self, event: &Event) -> bool {
        self.events.fetch_add(1, Ordering::Relaxed);
        let mut delivered = true;
        for backend in &self.backends {
            let bytes = backend.format.encode(event);
            if backend.mode == Mode::Batch {
                backend.try_enqueue(bytes);
                continue;
            }
            let (done, written) = oneshot::channel();
            let sent = backend.sender.send(EncodedEvent { bytes, done: Some(done) }).await.is_ok();
            let written = sent && written.await.unwrap_or(false);
            if !written {
                backend.lost.fetch_add(1, Ordering::Relaxed);
            }
            delivered &= written || backend.mode == Mode::Blocking;
        }
        delivered
    }

    /// The same without waiting, for the end of a response body, where nothing can await.
    fn enqueue_event(&self, event: &Event) {
        self.events.fetch_add(1, Ordering::Relaxed);
        self.backends.iter().for_each(|backend| backend.try_enqueue(backend.format.encode(event)));
    }

    /// Waits until all queued events are written.
    pub async fn flush(&self) {
        for backend in &self.backends {
            let (done, written) = oneshot::channel();
            let event = EncodedEvent { bytes: Vec::new(), done: Some(done) };
            let flush = async { backend.sender.send(event).await.is_ok() && written.await.is_ok() };
            if !tokio::time::timeout(FLUSH_TIMEOUT, flush).await.unwrap_or(false) {
                tracing::warn!(backend = backend.name, "audit events were not flushed in time");
            }
        }
    }

    pub fn print(&self, out: &mut String) {
        let mut counter = |name: &str, help: &str, lines: &[(String, u64)]| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter");
            for (labels, count) in lines {
                let _ = writeln!(out, "{name}{labels} {count}");
            }
        };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let one = |counter: &AtomicU64| [(String::new(), count(counter))];
        counter(
            "apiserver_audit_event_total",
            "Counter of audit events generated and sent to the audit backend.",
            &one(&self.events),
        );
        let rejected = one(&self.rejected);
        counter(
            "apiserver_audit_requests_rejected_total",
            "Counter of apiserver requests rejected due to an error in audit logging backend.",
            &rejected,
        );
        let levels: Vec<_> = LEVELS
            .iter()
            .zip(&self.levels)
            .map(|((name, _), counter)| (format!("{{level=\"{name}\"}}"), count(counter)))
            .collect();
        counter(
            "apiserver_audit_level_total",
            "Counter of policy levels for audit events (1 per request).",
            &levels,
        );
        let lost: Vec<_> = self
            .backends
            .iter()
            .map(|backend| (format!("{{plugin=\"{}\"}}", backend.name), count(&backend.lost)))
            .collect();
        counter(
            "apiserver_audit_error_total",
            "Counter of audit events that failed to be audited properly.",
            &lost,
        );
    }
}

impl AuditBackend {
    fn try_enqueue(&self, bytes: Vec<u8>) {
        if self.sender.try_send(EncodedEvent { bytes, done: None }).is_err() {
            // Log every thousandth drop only, so that a flood of requests does not flood the server
            // log, too.
            let lost = self.lost.fetch_add(1, Ordering::Relaxed);
            if lost.is_multiple_of(1000) {
                tracing::error!(backend = self.name, lost = lost + 1, "audit events dropped: buffer is full");
            }
        }
    }
}

impl EventFormat {
    fn encode(self, event: &Event) -> Vec<u8> {
        match self {
            EventFormat::Json => event.to_line(),
            EventFormat::Legacy => event.to_text(),
            EventFormat::ListItem => event.to_json(),
        }
    }
}

impl AuditRecord {
    /// Records RequestReceived. Returns an error if the event must be written and is not.
    pub async fn receive(&mut self) -> Result<(), Status> {
        if self.write_stage(Stage::RequestReceived).await {
            return Ok(());
        }
        self.audit.rejected.fetch_add(1, Ordering::Relaxed);
        Err(Status::internal("failed to store audit event"))
    }

    /// Sets `impersonatedUser`.
    pub fn set_impersonation(&mut self, user: &User) {
        self.event.impersonated_user = Some(user.into());
    }

    /// Adds the authorization annotations.
    pub fn set_decision(&mut self, verdict: &crate::authorization::Verdict) {
        let decision = if verdict.allowed { "allow" } else { "forbid" };
        self.recorder.annotate("authorization.k8s.io/decision", decision);
        self.recorder.annotate("authorization.k8s.io/reason", verdict.reason.clone());
    }

    /// Sets `objectRef` from the request body, and `requestObject` if the level includes bodies.
    pub fn set_request(&mut self, call: &Call, target: &Target) {
        let Some(object_ref) = &mut self.event.object_ref else { return };
        let include_body = self.audit_config.level >= Level::Request;
        let verb = self.event.verb.as_str();
        if call.body.is_empty() || !include_body && !matches!(verb, "create" | "update") {
            return;
        }
        let Some(mut object) = decode_request(call, target, verb) else { return };
        if matches!(verb, "create" | "update") {
            object_ref.set_object_metadata(&object);
        }
        if include_body {
            if self.audit_config.omit_managed_fields {
                event::without_managed_fields(&mut object);
            }
            self.event.request_object = Some(object);
        }
    }

    /// Records the response. Streamed bodies record ResponseComplete at their end.
    pub async fn finish(mut self, response: Response<Body>, result: RequestResult) -> Response<Body> {
        let code = response.status().as_u16();
        if self.authentication_failed {
            if let Some(status) = &mut self.event.response_status {
                status.code = code;
            }
            self.write_stage(Stage::ResponseStarted).await;
            return response;
        }
        self.event.response_status = Some(match &result {
            RequestResult::Completed => StatusInfo { code, ..StatusInfo::default() },
            RequestResult::Failed(status) => {
                StatusInfo::read(&serde_json::to_value(status).unwrap_or_default(), code)
            }
            RequestResult::Panicked(reason) => StatusInfo {
                status: "Failure".into(),
                reason: "InternalError".into(),
                message: format!("APIServer panic'd: {reason}"),
                code: 500,
                ..StatusInfo::default()
            },
        });
        if let RequestResult::Panicked(_) = result {
            self.write_stage(Stage::Panic).await;
            return response;
        }
        if self.long_running {
            self.write_stage(Stage::ResponseStarted).await;
        }
        let content_type = response.headers().get(http::header::CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok()).unwrap_or("").to_owned();
        match response.body() {
            Body::Whole(bytes) => {
                self.set_response(&content_type, bytes.as_deref().unwrap_or_default());
                self.write_stage(Stage::ResponseComplete).await;
                response
            }
            Body::Chunks(_) | Body::Stream(_) => body::record_response_end(response, self, content_type),
        }
    }

    fn wants_response(&self) -> bool {
        self.audit_config.level >= Level::RequestResponse
            && self.event.object_ref.is_some()
            && !self.long_running
    }

    /// Sets `responseObject` if the level includes it, and `responseStatus` if the body is a
    /// Status.
    fn set_response(&mut self, content_type: &str, bytes: &[u8]) {
        let has_status = self.event.verb.starts_with("delete") && bytes.len() < MAX_STATUS_BYTES;
        if !self.wants_response() && !has_status {
            return;
        }
        let Some(mut object) = decode_response(content_type, bytes) else { return };
        if object["kind"] == "Status" && self.event.object_ref.is_some() {
            let code = self.event.response_status.as_ref().map_or(200, |status| status.code);
            self.event.response_status = Some(StatusInfo::read(&object, code));
        }
        if self.wants_response() {
            if self.audit_config.omit_managed_fields {
                event::without_managed_fields(&mut object);
            }
            self.event.response_object = Some(object);
        }
    }

    /// Completes the event for a stage; `None` if the policy omits the stage.
    fn prepare_event(&mut self, stage: Stage) -> Option<&Event> {
        if self.audit_config.should_omit(stage) {
            return None;
        }
        self.event.set_stage(stage, Timestamp::now());
        self.event.annotations = self.recorder.annotations();
        if self.audit_config.level < Level::Request {
            // Patches of webhooks reveal the request body.
            self.event
                .annotations
                .retain(|key, _| !key.starts_with(crate::admission::PATCH_ANNOTATION_PREFIX));
        }
        Some(&self.event)
    }

    async fn write_stage(&mut self, stage: Stage) -> bool {
        let audit = self.audit.clone();
        match self.prepare_event(stage) {
            Some(event) => audit.write_event(event).await,
            None => true,
        }
    }

    fn enqueue_stage(&mut self, stage: Stage) {
        let audit = self.audit.clone();
        if let Some(event) = self.prepare_event(stage) {
            audit.enqueue_event(event);
        }
    }
}

/// The authentication methods a client tried, as upstream words them.
pub fn attempted(headers: &HeaderMap, query: &Query, certificate: bool) -> String {
    let header = headers.get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or("");
    let scheme = header.trim().split_once(' ').map_or("", |(scheme, _)| scheme).to_ascii_lowercase();
    let methods = [
        (scheme == "basic", "basic"),
        (scheme == "bearer", "bearer"),
        (!query.get("access_token").trim().is_empty(), "access_token"),
        (certificate, "x509"),
    ];
    let methods: Vec<&str> = methods.iter().filter(|(tried, _)| *tried).map(|(_, name)| *name).collect();
    match methods.as_slice() {
        [] => "Authentication failed, no credentials provided".to_owned(),
        methods => format!("Authentication failed, attempted: {}", methods.join(", ")),
    }
}

/// The request body as an object; `None` if it cannot be decoded, which the handler reports.
fn decode_request(call: &Call, target: &Target, verb: &str) -> Option<Value> {
    let row = target.resource;
    if verb == "patch" {
        let json = codec::read_yaml(&call.body).ok()?.json;
        return serde_json::from_slice(&json).ok();
    }
    let media = codec::body_media(&call.headers).ok()?;
    if target.subresource.is_empty() && matches!(verb, "create" | "update") {
        let kind = (row.group, row.version, row.kind);
        let decoded = codec::decode(media, &call.body, kind, codec::FieldValidation::Ignore).ok()?;
        let mut value = decoded.value;
        if let Ok(ty) = codec::row_type(row) {
            api::defaults::set_defaults(schema::kubernetes(), ty, &mut value);
        }
        return Some(value);
    }
    match media {
        MediaType::Json => serde_json::from_slice(&call.body).ok(),
        MediaType::Yaml => serde_json::from_slice(&codec::read_yaml(&call.body).ok()?.json).ok(),
        MediaType::Protobuf => decode_protobuf(&call.body),
    }
}

fn decode_response(content_type: &str, bytes: &[u8]) -> Option<Value> {
    if content_type.starts_with("application/vnd.kubernetes.protobuf") {
        return decode_protobuf(bytes);
    }
    serde_json::from_slice(bytes).ok()
}

/// Decodes a protobuf envelope by the kind it names.
fn decode_protobuf(bytes: &[u8]) -> Option<Value> {
    let envelope = schema::protobuf::decode_envelope(bytes).ok()?;
    let (group, version) = envelope.api_version.split_once('/').unwrap_or(("", envelope.api_version));
    let ty = codec::type_of(group, version, envelope.kind).ok()?;
    let mut value = schema::protobuf::from_protobuf(schema::kubernetes(), ty, envelope.raw).ok()?;
    codec::set_type_meta(&mut value, group, version, envelope.kind);
    Some(value)
}

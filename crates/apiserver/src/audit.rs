//! The audit trail: who asked for what, when, and what came of it.
//!
//! A policy decides how much is told about each request (`policy`); an event is put together on the way of
//! the request (`event`, [`Trail`]) and handed to the log and to the webhook (`log`, `webhook`), which write
//! it outside of the request. Bodies are told only at the levels `Request` and `RequestResponse`, headers
//! never but for the user agent. Without a policy nothing of this costs anything.

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

/// Where the policy is, and who is told.
#[derive(Debug, Default)]
pub struct AuditOptions {
    pub policy_file: Option<PathBuf>,
    pub log: Option<LogOptions>,
    pub webhook: Option<AuditWebhookOptions>,
}

/// Whether requests wait for their events to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Batch,
    Blocking,
    /// And are refused where the first of them cannot be.
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

/// Events that wait to be written; what comes while there are so many is lost, or waits.
const EVENT_BUFFER_SIZE: usize = 10_000;
/// How long the last events may take at the end.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// A success that is told in words is shorter than this.
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

/// An event in its final form, and whom to tell that it is written.
struct EncodedEvent {
    bytes: Vec<u8>,
    done: Option<oneshot::Sender<bool>>,
}

/// What is known of a request when it comes.
pub struct AuditRequest<'a> {
    pub id: &'a str,
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    pub remote: Option<IpAddr>,
    pub attributes: Attributes<'a>,
    /// Of the API, where the request is about objects.
    pub version: &'a str,
}

/// Where a request on the wire came from.
#[derive(Clone, Copy)]
pub struct RemoteAddr(pub IpAddr);

/// The story of one request.
pub struct AuditRecord {
    audit: Arc<Audit>,
    audit_config: RequestAuditConfig,
    event: Event,
    /// What others have to say about it.
    pub recorder: Arc<WarningRecorder>,
    /// Lasts as long as its client likes, so that its beginning is told too.
    long_running: bool,
    /// The client could not say who it is.
    authentication_failed: bool,
}

/// What came of a request.
pub enum RequestResult {
    Completed,
    Failed(Box<Status>),
    Panicked(String),
}

impl Audit {
    /// `None` where there is no policy, or nobody to tell.
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

    /// Begins to tell about a request of a known user; `None` where the policy says nothing about it.
    pub fn begin_record(self: &Arc<Audit>, request: &AuditRequest<'_>, user: &User) -> Option<AuditRecord> {
        self.new_record(request, Some(user))
    }

    /// A request of somebody who could not say who they are, though they `attempted` to.
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

    /// Hands an event to everybody, waiting where the mode says so. False where it had to be written and
    /// was not.
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

    /// The same where nobody can wait: at the end of a body.
    fn enqueue_event(&self, event: &Event) {
        self.events.fetch_add(1, Ordering::Relaxed);
        self.backends.iter().for_each(|backend| backend.try_enqueue(backend.format.encode(event)));
    }

    /// Waits until everything is written that was told.
    pub async fn flush(&self) {
        for backend in &self.backends {
            let (done, written) = oneshot::channel();
            let event = EncodedEvent { bytes: Vec::new(), done: Some(done) };
            let flush = async { backend.sender.send(event).await.is_ok() && written.await.is_ok() };
            if !tokio::time::timeout(FLUSH_TIMEOUT, flush).await.unwrap_or(false) {
                tracing::warn!(backend = backend.name, "some audit events were not written");
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
        counter("apiserver_audit_event_total", "Audit events made.", &one(&self.events));
        let rejected = one(&self.rejected);
        counter(
            "apiserver_audit_requests_rejected_total",
            "Requests refused for want of an audit log.",
            &rejected,
        );
        let levels: Vec<_> = LEVELS
            .iter()
            .zip(&self.levels)
            .map(|((name, _), counter)| (format!("{{level=\"{name}\"}}"), count(counter)))
            .collect();
        counter("apiserver_audit_level_total", "Requests by how much is told about them.", &levels);
        let lost: Vec<_> = self
            .backends
            .iter()
            .map(|backend| (format!("{{plugin=\"{}\"}}", backend.name), count(&backend.lost)))
            .collect();
        counter("apiserver_audit_error_total", "Audit events that were lost.", &lost);
    }
}

impl AuditBackend {
    fn try_enqueue(&self, bytes: Vec<u8>) {
        if self.sender.try_send(EncodedEvent { bytes, done: None }).is_err() {
            // Once for each thousand: whoever floods the audit log shall not flood the other one too.
            let lost = self.lost.fetch_add(1, Ordering::Relaxed);
            if lost.is_multiple_of(1000) {
                tracing::error!(
                    backend = self.name,
                    lost = lost + 1,
                    "audit events are lost: the buffer is full"
                );
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
    /// The request has come. An error where it must be written down and could not be.
    pub async fn receive(&mut self) -> Result<(), Status> {
        if self.write_stage(Stage::RequestReceived).await {
            return Ok(());
        }
        self.audit.rejected.fetch_add(1, Ordering::Relaxed);
        Err(Status::internal("failed to store audit event"))
    }

    /// Whom the user acts as.
    pub fn set_impersonation(&mut self, user: &User) {
        self.event.impersonated_user = Some(user.into());
    }

    /// What authorization says, in its own words.
    pub fn set_decision(&mut self, verdict: &crate::authorization::Verdict) {
        let decision = if verdict.allowed { "allow" } else { "forbid" };
        self.recorder.annotate("authorization.k8s.io/decision", decision);
        self.recorder.annotate("authorization.k8s.io/reason", verdict.reason.clone());
    }

    /// What was sent: of all bodies the object's name, and the whole of it where the policy says so.
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

    /// The answer, whose end is told once it has been sent.
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

    /// What was answered, where the policy says so; a success may have its own words at any level.
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

    /// Puts the event together; `None` where this stage is not told.
    fn prepare_event(&mut self, stage: Stage) -> Option<&Event> {
        if self.audit_config.should_omit(stage) {
            return None;
        }
        self.event.set_stage(stage, Timestamp::now());
        self.event.annotations = self.recorder.annotations();
        if self.audit_config.level < Level::Request {
            // What webhooks change shows what was sent.
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

/// How a client tried to say who it is.
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

/// The body of a request as an object; `None` where it is none, which the client is told elsewhere.
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

/// What is in a protobuf envelope, by what the envelope says it is.
fn decode_protobuf(bytes: &[u8]) -> Option<Value> {
    let envelope = schema::protobuf::decode_envelope(bytes).ok()?;
    let (group, version) = envelope.api_version.split_once('/').unwrap_or(("", envelope.api_version));
    let ty = codec::type_of(group, version, envelope.kind).ok()?;
    let mut value = schema::protobuf::from_protobuf(schema::kubernetes(), ty, envelope.raw).ok()?;
    codec::set_type_meta(&mut value, group, version, envelope.kind);
    Some(value)
}

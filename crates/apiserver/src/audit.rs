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
use crate::negotiate::Media;
use crate::rbac::Ask;
use crate::remarks::Remarks;
use crate::request::{Query, Target};
use crate::server::Call;

use event::{Event, ObjectRef, StatusInfo, UserInfo};
pub use log::LogOptions;
pub use policy::PolicyError;
use policy::{LEVELS, Level, Policy, Stage, Verdict};
pub use webhook::{AuditWebhookOptions, Batch};

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
const BUFFER: usize = 10_000;
/// How long the last events may take at the end.
const FLUSH: Duration = Duration::from_secs(5);
/// A success that is told in words is shorter than this.
const STATUS: usize = 4096;

pub struct Audit {
    policy: Policy,
    sinks: Vec<Sink>,
    events: AtomicU64,
    levels: [AtomicU64; 4],
    rejected: AtomicU64,
}

struct Sink {
    name: &'static str,
    form: Form,
    mode: Mode,
    sender: mpsc::Sender<Parcel>,
    lost: AtomicU64,
}

#[derive(Clone, Copy)]
enum Form {
    Line,
    Text,
    Item,
}

/// An event in its final form, and whom to tell that it is written.
struct Parcel {
    bytes: Vec<u8>,
    done: Option<oneshot::Sender<bool>>,
}

/// What is known of a request when it comes.
pub struct Arrival<'a> {
    pub id: &'a str,
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    pub remote: Option<IpAddr>,
    pub ask: Ask<'a>,
    /// Of the API, where the request is about objects.
    pub version: &'a str,
}

/// Where a request on the wire came from.
#[derive(Clone, Copy)]
pub struct Remote(pub IpAddr);

/// The story of one request.
pub struct Trail {
    audit: Arc<Audit>,
    verdict: Verdict,
    event: Event,
    /// What others have to say about it.
    pub remarks: Arc<Remarks>,
    /// Lasts as long as its client likes, so that its beginning is told too.
    long: bool,
    /// The client could not say who it is.
    refused: bool,
}

/// What came of a request.
pub enum Outcome {
    Answered,
    Failed(Box<Status>),
    Panicked(String),
}

impl Audit {
    /// `None` where there is no policy, or nobody to tell.
    pub fn new(options: &AuditOptions) -> Result<Option<Arc<Audit>>, AuditError> {
        let Some(path) = &options.policy_file else { return Ok(None) };
        let policy = Policy::load(path)?;
        let mut sinks = Vec::new();
        let mut add = |name, form, mode, sender| {
            sinks.push(Sink { name, form, mode, sender, lost: AtomicU64::new(0) });
        };
        if let Some(log) = &options.log {
            let sender =
                log::start(log).map_err(|source| AuditError::Log { path: log.path.clone(), source })?;
            add("log", if log.json { Form::Line } else { Form::Text }, log.mode, sender);
        }
        if let Some(webhook) = &options.webhook {
            let client = https::Client::from_kubeconfig(&webhook.kubeconfig)?;
            add("webhook", Form::Item, webhook.mode, webhook::start(client, webhook));
        }
        let audit = Audit {
            policy,
            events: AtomicU64::new(0),
            levels: Default::default(),
            rejected: AtomicU64::new(0),
            sinks,
        };
        Ok((!audit.sinks.is_empty()).then(|| Arc::new(audit)))
    }

    /// Begins to tell about a request of a known user; `None` where the policy says nothing about it.
    pub fn begin(self: &Arc<Audit>, arrival: &Arrival<'_>, user: &User) -> Option<Trail> {
        self.trail(arrival, Some(user))
    }

    /// A request of somebody who could not say who they are, though they `attempted` to.
    pub fn refused(self: &Arc<Audit>, arrival: &Arrival<'_>, attempted: &str) -> Option<Trail> {
        let mut trail = self.trail(arrival, None)?;
        trail.refused = true;
        trail.event.response_status =
            Some(StatusInfo { message: attempted.to_owned(), ..StatusInfo::default() });
        Some(trail)
    }

    fn trail(self: &Arc<Audit>, arrival: &Arrival<'_>, user: Option<&User>) -> Option<Trail> {
        let verdict = self.policy.judge(user, &arrival.ask);
        let level = verdict.map_or(Level::None, |verdict| verdict.level);
        self.levels[level as usize].fetch_add(1, Ordering::Relaxed);
        let verdict = verdict?;
        let (verb, long) = match arrival.ask {
            Ask::Resource { verb, subresource, .. } => {
                (verb, verb == "watch" || crate::flow::is_long_running(subresource))
            }
            Ask::Path { verb, .. } => (verb, false),
        };
        let now = Timestamp::now();
        let event = Event {
            level: verdict.level.name(),
            audit_id: arrival.id.to_owned(),
            stage: "",
            request_uri: arrival.uri.path_and_query().map_or_else(String::new, ToString::to_string),
            verb: verb.to_owned(),
            user: user.map(UserInfo::from).unwrap_or_default(),
            impersonated_user: None,
            source_ips: event::source_ips(arrival.headers, arrival.remote),
            user_agent: event::user_agent(arrival.headers),
            object_ref: ObjectRef::of(&arrival.ask, arrival.version),
            response_status: None,
            request_object: None,
            response_object: None,
            request_received_timestamp: now,
            stage_timestamp: now,
            annotations: Default::default(),
        };
        let remarks = Arc::default();
        Some(Trail { audit: self.clone(), verdict, event, remarks, long, refused: false })
    }

    /// Hands an event to everybody, waiting where the mode says so. False where it had to be written and
    /// was not.
    async fn tell(&self, event: &Event) -> bool {
        self.events.fetch_add(1, Ordering::Relaxed);
        let mut good = true;
        for sink in &self.sinks {
            let bytes = sink.form.print(event);
            if sink.mode == Mode::Batch {
                sink.offer(bytes);
                continue;
            }
            let (done, written) = oneshot::channel();
            let sent = sink.sender.send(Parcel { bytes, done: Some(done) }).await.is_ok();
            let written = sent && written.await.unwrap_or(false);
            if !written {
                sink.lost.fetch_add(1, Ordering::Relaxed);
            }
            good &= written || sink.mode == Mode::Blocking;
        }
        good
    }

    /// The same where nobody can wait: at the end of a body.
    fn tell_later(&self, event: &Event) {
        self.events.fetch_add(1, Ordering::Relaxed);
        self.sinks.iter().for_each(|sink| sink.offer(sink.form.print(event)));
    }

    /// Waits until everything is written that was told.
    pub async fn flush(&self) {
        for sink in &self.sinks {
            let (done, written) = oneshot::channel();
            let parcel = Parcel { bytes: Vec::new(), done: Some(done) };
            let flushed = async { sink.sender.send(parcel).await.is_ok() && written.await.is_ok() };
            if !tokio::time::timeout(FLUSH, flushed).await.unwrap_or(false) {
                tracing::warn!(backend = sink.name, "some audit events were not written");
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
            .sinks
            .iter()
            .map(|sink| (format!("{{plugin=\"{}\"}}", sink.name), count(&sink.lost)))
            .collect();
        counter("apiserver_audit_error_total", "Audit events that were lost.", &lost);
    }
}

impl Sink {
    fn offer(&self, bytes: Vec<u8>) {
        if self.sender.try_send(Parcel { bytes, done: None }).is_err() {
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

impl Form {
    fn print(self, event: &Event) -> Vec<u8> {
        match self {
            Form::Line => event.to_line(),
            Form::Text => event.to_text(),
            Form::Item => event.to_json(),
        }
    }
}

impl Trail {
    /// The request has come. An error where it must be written down and could not be.
    pub async fn receive(&mut self) -> Result<(), Status> {
        if self.tell(Stage::RequestReceived).await {
            return Ok(());
        }
        self.audit.rejected.fetch_add(1, Ordering::Relaxed);
        Err(Status::internal("failed to store audit event"))
    }

    /// Whom the user acts as.
    pub fn impersonate(&mut self, user: &User) {
        self.event.impersonated_user = Some(user.into());
    }

    /// What authorization says, in its own words.
    pub fn decided(&mut self, verdict: &crate::authorization::Verdict) {
        let decision = if verdict.allowed { "allow" } else { "forbid" };
        self.remarks.annotate("authorization.k8s.io/decision", decision);
        self.remarks.annotate("authorization.k8s.io/reason", verdict.reason.clone());
    }

    /// What was sent: of all bodies the object's name, and the whole of it where the policy says so.
    pub fn request(&mut self, call: &Call, target: &Target) {
        let Some(object_ref) = &mut self.event.object_ref else { return };
        let whole = self.verdict.level >= Level::Request;
        let verb = self.event.verb.as_str();
        if call.body.is_empty() || !whole && !matches!(verb, "create" | "update") {
            return;
        }
        let Some(mut object) = sent(call, target, verb) else { return };
        if matches!(verb, "create" | "update") {
            object_ref.complete(&object);
        }
        if whole {
            if self.verdict.omit_managed_fields {
                event::without_managed_fields(&mut object);
            }
            self.event.request_object = Some(object);
        }
    }

    /// The answer, whose end is told once it has been sent.
    pub async fn finish(mut self, response: Response<Body>, outcome: Outcome) -> Response<Body> {
        let code = response.status().as_u16();
        if self.refused {
            if let Some(status) = &mut self.event.response_status {
                status.code = code;
            }
            self.tell(Stage::ResponseStarted).await;
            return response;
        }
        self.event.response_status = Some(match &outcome {
            Outcome::Answered => StatusInfo { code, ..StatusInfo::default() },
            Outcome::Failed(status) => {
                StatusInfo::read(&serde_json::to_value(status).unwrap_or_default(), code)
            }
            Outcome::Panicked(why) => StatusInfo {
                status: "Failure".into(),
                reason: "InternalError".into(),
                message: format!("APIServer panic'd: {why}"),
                code: 500,
                ..StatusInfo::default()
            },
        });
        if let Outcome::Panicked(_) = outcome {
            self.tell(Stage::Panic).await;
            return response;
        }
        if self.long {
            self.tell(Stage::ResponseStarted).await;
        }
        let content_type = response.headers().get(http::header::CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok()).unwrap_or("").to_owned();
        match response.body() {
            Body::Whole(bytes) => {
                self.answered(&content_type, bytes.as_deref().unwrap_or_default());
                self.tell(Stage::ResponseComplete).await;
                response
            }
            Body::Chunks(_) | Body::Stream(_) => body::told(response, self, content_type),
        }
    }

    fn wants_response(&self) -> bool {
        self.verdict.level >= Level::RequestResponse && self.event.object_ref.is_some() && !self.long
    }

    /// What was answered, where the policy says so; a success may have its own words at any level.
    fn answered(&mut self, content_type: &str, bytes: &[u8]) {
        let words = self.event.verb.starts_with("delete") && bytes.len() < STATUS;
        if !self.wants_response() && !words {
            return;
        }
        let Some(mut object) = answer(content_type, bytes) else { return };
        if object["kind"] == "Status" && self.event.object_ref.is_some() {
            let code = self.event.response_status.as_ref().map_or(200, |status| status.code);
            self.event.response_status = Some(StatusInfo::read(&object, code));
        }
        if self.wants_response() {
            if self.verdict.omit_managed_fields {
                event::without_managed_fields(&mut object);
            }
            self.event.response_object = Some(object);
        }
    }

    /// Puts the event together; `None` where this stage is not told.
    fn event_at(&mut self, stage: Stage) -> Option<&Event> {
        if self.verdict.omits(stage) {
            return None;
        }
        self.event.at(stage, Timestamp::now());
        self.event.annotations = self.remarks.annotations();
        if self.verdict.level < Level::Request {
            // What webhooks change shows what was sent.
            self.event.annotations.retain(|key, _| !key.starts_with(crate::admission::PATCHES));
        }
        Some(&self.event)
    }

    async fn tell(&mut self, stage: Stage) -> bool {
        let audit = self.audit.clone();
        match self.event_at(stage) {
            Some(event) => audit.tell(event).await,
            None => true,
        }
    }

    fn tell_later(&mut self, stage: Stage) {
        let audit = self.audit.clone();
        if let Some(event) = self.event_at(stage) {
            audit.tell_later(event);
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
fn sent(call: &Call, target: &Target, verb: &str) -> Option<Value> {
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
        Media::Json => serde_json::from_slice(&call.body).ok(),
        Media::Yaml => serde_json::from_slice(&codec::read_yaml(&call.body).ok()?.json).ok(),
        Media::Protobuf => opened(&call.body),
    }
}

fn answer(content_type: &str, bytes: &[u8]) -> Option<Value> {
    if content_type.starts_with("application/vnd.kubernetes.protobuf") {
        return opened(bytes);
    }
    serde_json::from_slice(bytes).ok()
}

/// What is in a protobuf envelope, by what the envelope says it is.
fn opened(bytes: &[u8]) -> Option<Value> {
    let envelope = schema::protobuf::open(bytes).ok()?;
    let (group, version) = envelope.api_version.split_once('/').unwrap_or(("", envelope.api_version));
    let ty = codec::type_of(group, version, envelope.kind).ok()?;
    let mut value = schema::protobuf::from_protobuf(schema::kubernetes(), ty, envelope.raw).ok()?;
    codec::set_type_meta(&mut value, group, version, envelope.kind);
    Some(value)
}

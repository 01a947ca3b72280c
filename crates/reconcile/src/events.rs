//! Tells people what the loops do, as Events on the objects concerned.
//!
//! What is recorded goes through the correlation upstream's recorder makes ([`correlate`]): repeated events
//! count up, many similar ones become one, and a source that talks too much is cut short. Recording never
//! waits; a lost event is not a failure.

mod correlate;

use std::sync::Arc;

use client::{Client, Error, Key, Object, Patch};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use crate::clock::Clock;
use correlate::{Correlator, Outcome};

/// How many events may wait to be written; more are dropped.
const WAITING: usize = 1_000;

/// `Normal` or `Warning`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    Normal,
    Warning,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
        }
    }
}

/// Something worth telling.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    pub about: ObjectReference,
    pub related: Option<ObjectReference>,
    pub severity: Severity,
    pub reason: String,
    pub message: String,
    /// What was done, for events of the newer form; `""` makes one of the older.
    pub action: &'static str,
    pub source: &'static str,
    pub at: Timestamp,
}

/// Records events of one source. Cheap to clone.
#[derive(Clone)]
pub struct Recorder {
    source: &'static str,
    clock: Clock,
    notes: mpsc::Sender<Note>,
}

impl Recorder {
    pub fn new(client: Client, clock: Clock, shutdown: watch::Receiver<bool>) -> Recorder {
        let (notes, waiting) = mpsc::channel(WAITING);
        tokio::spawn(write_all(client, waiting, shutdown));
        Recorder { source: "", clock, notes }
    }

    /// The same for another source.
    pub fn from(&self, source: &'static str) -> Recorder {
        Recorder { source, ..self.clone() }
    }

    pub fn normal<T: Object>(&self, object: &T, reason: &str, message: impl Into<String>) {
        self.record(reference(object), Severity::Normal, reason, message.into());
    }

    pub fn warning<T: Object>(&self, object: &T, reason: &str, message: impl Into<String>) {
        self.record(reference(object), Severity::Warning, reason, message.into());
    }

    pub fn record(&self, about: ObjectReference, severity: Severity, reason: &str, message: String) {
        self.note(Note {
            about,
            related: None,
            severity,
            reason: reason.to_owned(),
            message,
            action: "",
            source: self.source,
            at: self.clock.now(),
        });
    }

    pub fn note(&self, note: Note) {
        if self.notes.try_send(note).is_err() {
            tracing::debug!("too many events at once, one is dropped");
        }
    }
}

/// How events and bindings refer to an object.
pub fn reference<T: Object>(object: &T) -> ObjectReference {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    ObjectReference {
        api_version: Some(T::API_VERSION.to_owned()),
        kind: Some(T::KIND.to_owned()),
        name: some(object.name()),
        namespace: some(object.namespace()),
        uid: some(object.uid()),
        resource_version: object.metadata().resource_version.clone(),
        field_path: None,
    }
}

async fn write_all(client: Client, mut notes: mpsc::Receiver<Note>, mut shutdown: watch::Receiver<bool>) {
    let mut correlator = Correlator::default();
    loop {
        let note = tokio::select! {
            note = notes.recv() => note,
            _ = shutdown.wait_for(|stop| *stop) => None,
        };
        let Some(note) = note else { return };
        let (outcome, memory) = correlator.correlate(&note);
        let made = match outcome {
            Outcome::Drop => continue,
            Outcome::Create { message } => client.create(&event(&note, message, 1)).await,
            Outcome::Count { named, message, count, first } => {
                let patch = json!({"count": count, "message": message, "lastTimestamp": Time(note.at)});
                let key = Key::new(&namespace(&note), &name(&note, named));
                match client.patch::<Event>(&key, &Patch::Strategic(patch)).await {
                    // It has expired meanwhile.
                    Err(error) if error.is_not_found() => {
                        let mut event = event(&note, message, count);
                        event.first_timestamp = Some(Time(first));
                        client.create(&event).await
                    }
                    Err(error) => Err(error),
                    Ok(_) => continue,
                }
            }
        };
        match made {
            Ok(_) => correlator.made(memory, note.at),
            Err(error) => complain(&error, &note),
        }
    }
}

fn complain(error: &Error, note: &Note) {
    // Nothing can be told about what is in a namespace that goes away.
    if !error.is_namespace_terminating() {
        tracing::debug!(%error, reason = note.reason, "cannot record an event");
    }
}

/// Events about what lives in no namespace are in `default`.
fn namespace(note: &Note) -> Arc<str> {
    note.about.namespace.as_deref().unwrap_or("default").into()
}

/// The name of an event of what a note is about that was made at some time.
fn name(note: &Note, at: Timestamp) -> String {
    format!("{}.{:x}", note.about.name.as_deref().unwrap_or_default(), at.as_nanosecond())
}

fn event(note: &Note, message: String, count: i32) -> Event {
    let metadata = ObjectMeta {
        name: Some(name(note, note.at)),
        namespace: Some(namespace(note).to_string()),
        ..ObjectMeta::default()
    };
    let mut event = Event {
        metadata,
        involved_object: note.about.clone(),
        related: note.related.clone(),
        type_: Some(note.severity.as_str().to_owned()),
        reason: Some(note.reason.clone()),
        message: Some(message),
        reporting_component: Some(note.source.to_owned()),
        reporting_instance: Some(String::new()),
        ..Event::default()
    };
    event.source = Some(EventSource { component: Some(note.source.to_owned()), host: None });
    if note.action.is_empty() {
        event.count = Some(count);
        event.first_timestamp = Some(Time(note.at));
        event.last_timestamp = Some(Time(note.at));
    } else {
        event.action = Some(note.action.to_owned());
        event.event_time = Some(MicroTime(note.at));
        // The newer form must say which process it was.
        event.reporting_instance = Some(format!("{}-skiff", note.source));
    }
    event
}

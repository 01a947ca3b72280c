//! Records Events about objects, like client-go's `record.EventRecorder`.
//!
//! Events go through the same correlation as upstream ([`correlator`]): repeated events increase a count,
//! similar ones are aggregated, and a source that emits too many is rate limited. Recording never blocks;
//! events are best effort and may be lost.

mod correlator;

use std::sync::Arc;

use client::{Client, Error, Key, Object, Patch};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use crate::clock::Clock;
use correlator::{CorrelateResult, EventCorrelator};

/// How many events may be queued; further ones are dropped.
const MAX_PENDING_EVENTS: usize = 1_000;

/// `Normal` or `Warning`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventType {
    Normal,
    Warning,
}

impl EventType {
    pub fn as_str(self) -> &'static str {
        match self {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        }
    }
}

/// An event to record.
#[derive(Clone, Debug, PartialEq)]
pub struct EventRecord {
    pub regarding: ObjectReference,
    pub related: Option<ObjectReference>,
    pub event_type: EventType,
    pub reason: String,
    pub message: String,
    /// `action` of an event in the events.k8s.io form; empty for a core/v1 event.
    pub action: &'static str,
    pub source: &'static str,
    pub timestamp: Timestamp,
}

/// Records the events of one source. Cheap to clone.
#[derive(Clone)]
pub struct Recorder {
    source: &'static str,
    clock: Clock,
    sender: mpsc::Sender<EventRecord>,
}

impl Recorder {
    pub fn new(client: Client, clock: Clock, shutdown: watch::Receiver<bool>) -> Recorder {
        let (sender, receiver) = mpsc::channel(MAX_PENDING_EVENTS);
        tokio::spawn(run_event_writer(client, receiver, shutdown));
        Recorder { source: "", clock, sender }
    }

    /// The same recorder with another source.
    pub fn from(&self, source: &'static str) -> Recorder {
        Recorder { source, ..self.clone() }
    }

    pub fn normal<T: Object>(&self, object: &T, reason: &str, message: impl Into<String>) {
        self.record(reference(object), EventType::Normal, reason, message.into());
    }

    pub fn warning<T: Object>(&self, object: &T, reason: &str, message: impl Into<String>) {
        self.record(reference(object), EventType::Warning, reason, message.into());
    }

    pub fn record(&self, regarding: ObjectReference, event_type: EventType, reason: &str, message: String) {
        self.record_event(EventRecord {
            regarding,
            related: None,
            event_type,
            reason: reason.to_owned(),
            message,
            action: "",
            source: self.source,
            timestamp: self.clock.now(),
        });
    }

    pub fn record_event(&self, record: EventRecord) {
        if self.sender.try_send(record).is_err() {
            tracing::debug!("event queue is full, dropping event");
        }
    }
}

/// Returns the reference to an object as used in events and bindings.
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

async fn run_event_writer(
    client: Client,
    mut receiver: mpsc::Receiver<EventRecord>,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut correlator = EventCorrelator::default();
    loop {
        let record = tokio::select! {
            record = receiver.recv() => record,
            _ = shutdown.wait_for(|stop| *stop) => None,
        };
        let Some(record) = record else { return };
        let (result, event_key) = correlator.correlate(&record);
        let created = match result {
            CorrelateResult::Drop => continue,
            CorrelateResult::Create { message } => client.create(&new_event(&record, message, 1)).await,
            CorrelateResult::Patch { name_timestamp: named, message, count, first_timestamp: first } => {
                let patch =
                    json!({"count": count, "message": message, "lastTimestamp": Time(record.timestamp)});
                let key = Key::new(&event_namespace(&record), &event_name(&record, named));
                match client.patch::<Event>(&key, &Patch::Strategic(patch)).await {
                    // The event has expired (TTL); create it again with the current count.
                    Err(error) if error.is_not_found() => {
                        let mut event = new_event(&record, message, count);
                        event.first_timestamp = Some(Time(first));
                        client.create(&event).await
                    }
                    Err(error) => Err(error),
                    Ok(_) => continue,
                }
            }
        };
        match created {
            Ok(_) => correlator.record_created(event_key, record.timestamp),
            Err(error) => log_error(&error, &record),
        }
    }
}

fn log_error(error: &Error, record: &EventRecord) {
    // No event can be created in a terminating namespace.
    if !error.is_namespace_terminating() {
        tracing::debug!(%error, reason = record.reason, "failed to record event");
    }
}

/// Events about cluster-scoped objects go to `default`.
fn event_namespace(record: &EventRecord) -> Arc<str> {
    record.regarding.namespace.as_deref().unwrap_or("default").into()
}

/// Event name as upstream: the object's name and a timestamp in hexadecimal nanoseconds.
fn event_name(record: &EventRecord, at: Timestamp) -> String {
    format!("{}.{:x}", record.regarding.name.as_deref().unwrap_or_default(), at.as_nanosecond())
}

fn new_event(record: &EventRecord, message: String, count: i32) -> Event {
    let metadata = ObjectMeta {
        name: Some(event_name(record, record.timestamp)),
        namespace: Some(event_namespace(record).to_string()),
        ..ObjectMeta::default()
    };
    let mut event = Event {
        metadata,
        involved_object: record.regarding.clone(),
        related: record.related.clone(),
        type_: Some(record.event_type.as_str().to_owned()),
        reason: Some(record.reason.clone()),
        message: Some(message),
        reporting_component: Some(record.source.to_owned()),
        reporting_instance: Some(String::new()),
        ..Event::default()
    };
    event.source = Some(EventSource { component: Some(record.source.to_owned()), host: None });
    if record.action.is_empty() {
        event.count = Some(count);
        event.first_timestamp = Some(Time(record.timestamp));
        event.last_timestamp = Some(Time(record.timestamp));
    } else {
        event.action = Some(record.action.to_owned());
        event.event_time = Some(MicroTime(record.timestamp));
        // Validation of events with eventTime requires reportingInstance.
        event.reporting_instance = Some(format!("{}-skiff", record.source));
    }
    event
}

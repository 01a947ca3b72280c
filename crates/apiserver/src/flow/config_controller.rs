//! The controller of flow control: applies the configuration objects, reconciles the default
//! objects, and reallocates seats while there is contention. Idle until an object changes or a
//! request finds no seat.
//!
//! Upstream: `configController` in `flowcontrol/apf_controller.go`.

use std::sync::Arc;
use std::time::Duration;

use api::Status;
use api::json::JsonExt as _;
use futures_util::FutureExt as _;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::defaults::{self, row};
use crate::cache::wait_for_shutdown;
use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

const PRIORITY_LEVELS_RESOURCE: &str = "prioritylevelconfigurations";
const FLOW_SCHEMAS_RESOURCE: &str = "flowschemas";
const FIELD_MANAGER: &str = "api-priority-and-fairness-config-consumer-v1";
/// How often seats are reallocated while there is contention.
const BORROWING_UPDATE_INTERVAL: Duration = Duration::from_secs(10);
/// After this many periods without contention, seats return to their nominal allocation.
const MAX_IDLE_PERIOD_COUNT: u32 = 30;
/// The delay before a failed write is retried.
const WRITE_RETRY: Duration = Duration::from_secs(1);

/// Creates the default objects and applies the existing ones.
pub async fn ensure_defaults(server: &Server) -> Result<(), Status> {
    ensure_all(server).await?;
    server.wait_until_fresh(crate::options::ResourceVersionMatch::MostRecent).await?;
    server.flow.digest_config_objects(
        &objects(server, PRIORITY_LEVELS_RESOURCE),
        &objects(server, FLOW_SCHEMAS_RESOURCE),
    );
    Ok(())
}

/// Whether the object is mandatory: it is recreated and its changes are reverted.
pub fn is_mandatory(object: &Value) -> bool {
    matches!(object.at("metadata").text("name"), "exempt" | "catch-all")
}

async fn ensure_all(server: &Server) -> Result<(), Status> {
    let (levels, schemas) =
        (objects(server, PRIORITY_LEVELS_RESOURCE), objects(server, FLOW_SCHEMAS_RESOURCE));
    defaults::ensure(server, PRIORITY_LEVELS_RESOURCE, &defaults::levels(), &levels).await?;
    defaults::ensure(server, FLOW_SCHEMAS_RESOURCE, &defaults::schemas(), &schemas).await
}

/// Runs the controller until shutdown.
pub async fn run(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let mut levels = server.shard(row(PRIORITY_LEVELS_RESOURCE)).subscribe();
    let mut schemas = server.shard(row(FLOW_SCHEMAS_RESOURCE)).subscribe();
    let mut retry: Option<Instant> = Some(Instant::now());
    let mut next_borrowing_update: Option<Instant> = None;
    let mut idle_period_count = 0;
    loop {
        let no_deadline = Instant::now() + Duration::from_secs(1 << 30);
        tokio::select! {
            _ = levels.changed() => retry = sync(&server).await,
            _ = schemas.changed() => retry = sync(&server).await,
            () = tokio::time::sleep_until(retry.unwrap_or(no_deadline)), if retry.is_some() => {
                retry = sync(&server).await;
            }
            () = server.flow.seat_contention.notified(), if next_borrowing_update.is_none() => {
                server.flow.reset_usage();
                (next_borrowing_update, idle_period_count) = (Some(Instant::now() + BORROWING_UPDATE_INTERVAL), 0);
            }
            () = tokio::time::sleep_until(next_borrowing_update.unwrap_or(no_deadline)), if next_borrowing_update.is_some() => {
                let had_contention = server.flow.seat_contention.notified().now_or_never().is_some();
                idle_period_count = if had_contention { 0 } else { idle_period_count + 1 };
                if idle_period_count > MAX_IDLE_PERIOD_COUNT {
                    server.flow.reset_usage();
                }
                server.flow.update_borrowing();
                next_borrowing_update = (idle_period_count <= MAX_IDLE_PERIOD_COUNT).then(|| Instant::now() + BORROWING_UPDATE_INTERVAL);
            }
            () = wait_for_shutdown(&mut shutdown) => return,
        }
    }
}

/// Applies the objects and reconciles them. Returns when to retry if a write failed.
pub(super) async fn sync(server: &Server) -> Option<Instant> {
    let (levels, schemas) =
        (objects(server, PRIORITY_LEVELS_RESOURCE), objects(server, FLOW_SCHEMAS_RESOURCE));
    server.flow.digest_config_objects(&levels, &schemas);
    let ensure_result = ensure_all(server).await;
    let condition_updates = futures_util::future::join_all(
        schemas
            .iter()
            .filter_map(|schema| dangling_condition(schema, &levels))
            .map(|(name, condition)| update_dangling_condition(server, name, condition)),
    );
    let failed = condition_updates.await.into_iter().chain([ensure_result]).filter_map(Result::err).next()?;
    tracing::warn!(error = failed.message, "failed to write flow control objects, will retry");
    Some(Instant::now() + WRITE_RETRY)
}

fn objects(server: &Server, plural: &str) -> Vec<Value> {
    server.shard(row(plural)).snapshot("", 0).objects.iter().map(|object| object.value()).collect()
}

/// The Dangling condition of a schema if it must change: whether the priority level exists.
fn dangling_condition(schema: &Value, levels: &[Value]) -> Option<(String, Value)> {
    let level = schema.at("spec").at("priorityLevelConfiguration").text("name");
    let found = levels.iter().any(|object| object.at("metadata").text("name") == level);
    let reference =
        format!("This FlowSchema references the PriorityLevelConfiguration object named {level:?}");
    let (status, reason, message) = match found {
        true => ("False", "Found", format!("{reference} and it exists")),
        false => ("True", "NotFound", format!("{reference} but there is no such object")),
    };
    let conditions = schema.at("status").items("conditions");
    let is_current = conditions.iter().any(|condition| {
        condition.text("type") == "Dangling"
            && condition.text("status") == status
            && condition.text("reason") == reason
            && condition.text("message") == message
    });
    (!is_current).then(|| {
        let condition = json!({"type": "Dangling", "status": status, "reason": reason, "message": message});
        (schema.at("metadata").text("name").to_owned(), condition)
    })
}

async fn update_dangling_condition(
    server: &Server,
    name: String,
    mut condition: Value,
) -> Result<(), Status> {
    let target =
        Target { name, subresource: "status".into(), ..Target::collection(row(FLOW_SCHEMAS_RESOURCE), "") };
    let options = WriteOptions { manager: FIELD_MANAGER.into(), ..WriteOptions::internal(Timestamp::now()) };
    condition.set("lastTransitionTime", options.timestamp());
    let change = |before: &Value| {
        let mut after = before.clone();
        let others = before.at("status").items("conditions").iter();
        let mut conditions: Vec<Value> =
            others.filter(|other| other.text("type") != "Dangling").cloned().collect();
        conditions.push(condition.clone());
        after.object_mut("status").insert("conditions".into(), conditions.into());
        Ok(ObjectChange::replace(after))
    };
    match server.update_object(&target, &options, change).await {
        Err(status) if status.code != 404 => Err(status),
        _ => Ok(()),
    }
}

//! Keeps the table of flows in step with its objects, the objects with the defaults, and the seats with
//! their use. Sleeps until an object changes or somebody finds no seat.

use std::sync::Arc;
use std::time::Duration;

use api::Status;
use api::json::Json as _;
use futures_util::FutureExt as _;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::defaults::{self, row};
use crate::cache::stopped;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

const LEVELS: &str = "prioritylevelconfigurations";
const SCHEMAS: &str = "flowschemas";
const MANAGER: &str = "api-priority-and-fairness-config-consumer-v1";
/// How often seats are divided anew while there are too few.
const PERIOD: Duration = Duration::from_secs(10);
/// After so many periods in which everybody found a seat, seats are as at first again.
const QUIET: u32 = 30;
/// How soon a write that failed is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// Makes the objects every cluster has, and takes in what there is.
pub async fn ensure_defaults(server: &Server) -> Result<(), Status> {
    ensure_all(server).await?;
    server.fresh(crate::options::Version::MostRecent).await?;
    server.flow.rebuild(&objects(server, LEVELS), &objects(server, SCHEMAS));
    Ok(())
}

/// Whether the server cannot do without the object.
pub fn is_mandatory(object: &Value) -> bool {
    matches!(object.at("metadata").text("name"), "exempt" | "catch-all")
}

async fn ensure_all(server: &Server) -> Result<(), Status> {
    let (levels, schemas) = (objects(server, LEVELS), objects(server, SCHEMAS));
    defaults::ensure(server, LEVELS, &defaults::levels(), &levels).await?;
    defaults::ensure(server, SCHEMAS, &defaults::schemas(), &schemas).await
}

/// Until told to stop.
pub async fn keep(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let mut levels = server.shard(row(LEVELS)).subscribe();
    let mut schemas = server.shard(row(SCHEMAS)).subscribe();
    let mut retry: Option<Instant> = Some(Instant::now());
    let mut divide: Option<Instant> = None;
    let mut quiet = 0;
    loop {
        let far = Instant::now() + Duration::from_secs(1 << 30);
        tokio::select! {
            _ = levels.changed() => retry = follow(&server).await,
            _ = schemas.changed() => retry = follow(&server).await,
            () = tokio::time::sleep_until(retry.unwrap_or(far)), if retry.is_some() => {
                retry = follow(&server).await;
            }
            () = server.flow.crowded.notified(), if divide.is_none() => {
                server.flow.forget_usage();
                (divide, quiet) = (Some(Instant::now() + PERIOD), 0);
            }
            () = tokio::time::sleep_until(divide.unwrap_or(far)), if divide.is_some() => {
                let crowded = server.flow.crowded.notified().now_or_never().is_some();
                quiet = if crowded { 0 } else { quiet + 1 };
                if quiet > QUIET {
                    server.flow.forget_usage();
                }
                server.flow.divide();
                divide = (quiet <= QUIET).then(|| Instant::now() + PERIOD);
            }
            () = stopped(&mut shutdown) => return,
        }
    }
}

/// Takes in the objects and puts them right; when to try again where that failed.
pub(super) async fn follow(server: &Server) -> Option<Instant> {
    let (levels, schemas) = (objects(server, LEVELS), objects(server, SCHEMAS));
    server.flow.rebuild(&levels, &schemas);
    let ensured = ensure_all(server).await;
    let told = futures_util::future::join_all(
        schemas
            .iter()
            .filter_map(|schema| dangling(schema, &levels))
            .map(|(name, condition)| tell(server, name, condition)),
    );
    let failed = told.await.into_iter().chain([ensured]).filter_map(Result::err).next()?;
    tracing::warn!(error = failed.message, "cannot write the objects of flow control, trying again");
    Some(Instant::now() + AGAIN)
}

fn objects(server: &Server, plural: &str) -> Vec<Value> {
    server.shard(row(plural)).snapshot("", 0).objects.iter().map(|object| object.value()).collect()
}

/// The condition a schema should have and has not: whether its level is there.
fn dangling(schema: &Value, levels: &[Value]) -> Option<(String, Value)> {
    let level = schema.at("spec").at("priorityLevelConfiguration").text("name");
    let found = levels.iter().any(|object| object.at("metadata").text("name") == level);
    let reference =
        format!("This FlowSchema references the PriorityLevelConfiguration object named {level:?}");
    let (status, reason, message) = match found {
        true => ("False", "Found", format!("{reference} and it exists")),
        false => ("True", "NotFound", format!("{reference} but there is no such object")),
    };
    let conditions = schema.at("status").items("conditions");
    let is_right = conditions.iter().any(|condition| {
        condition.text("type") == "Dangling"
            && condition.text("status") == status
            && condition.text("reason") == reason
            && condition.text("message") == message
    });
    (!is_right).then(|| {
        let condition = json!({"type": "Dangling", "status": status, "reason": reason, "message": message});
        (schema.at("metadata").text("name").to_owned(), condition)
    })
}

async fn tell(server: &Server, name: String, mut condition: Value) -> Result<(), Status> {
    let target = Target { name, subresource: "status".into(), ..Target::collection(row(SCHEMAS), "") };
    let options = WriteOptions { manager: MANAGER.into(), ..WriteOptions::internal(Timestamp::now()) };
    condition.set("lastTransitionTime", options.timestamp());
    let change = |before: &Value| {
        let mut after = before.clone();
        let others = before.at("status").items("conditions").iter();
        let mut conditions: Vec<Value> =
            others.filter(|other| other.text("type") != "Dangling").cloned().collect();
        conditions.push(condition.clone());
        after.object_mut("status").insert("conditions".into(), conditions.into());
        Ok(Change::replace(after))
    };
    match server.change(&target, &options, change).await {
        Err(status) if status.code != 404 => Err(status),
        _ => Ok(()),
    }
}

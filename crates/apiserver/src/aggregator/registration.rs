//! APIServices for groups that this server serves itself. Built-in groups are synced at startup,
//! groups of custom resources always. Upstream: the autoregister controller.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::Status;
use api::json::JsonExt as _;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::ApiService;
use crate::cache::wait_for_shutdown;
use crate::delete::DeleteOptions;
use crate::request::Target;
use crate::server::Server;
use crate::update::ObjectChange;
use crate::write::WriteOptions;

/// The label on managed APIServices: `onstart` or `true`.
pub const AUTO_MANAGED_LABEL: &str = "kube-aggregator.kubernetes.io/automanaged";
const MANAGED_ON_START: &str = "onstart";
const MANAGED_ALWAYS: &str = "true";

/// Group, version, `groupPriorityMinimum` and `versionPriority`, as upstream. Other groups are
/// custom resources.
#[rustfmt::skip]
const PRIORITIES: &[(&str, &str, i64, i64)] = &[
    ("", "v1", 18000, 1),
    ("admissionregistration.k8s.io", "v1", 16700, 15),
    ("apiextensions.k8s.io", "v1", 16700, 15),
    ("apps", "v1", 17800, 15),
    ("authentication.k8s.io", "v1", 17700, 15),
    ("authorization.k8s.io", "v1", 17600, 15),
    ("autoscaling", "v1", 17500, 15),
    ("autoscaling", "v2", 17500, 30),
    ("batch", "v1", 17400, 15),
    ("certificates.k8s.io", "v1", 17300, 15),
    ("coordination.k8s.io", "v1", 16500, 15),
    ("discovery.k8s.io", "v1", 16200, 15),
    ("events.k8s.io", "v1", 17750, 15),
    ("flowcontrol.apiserver.k8s.io", "v1", 16100, 21),
    ("networking.k8s.io", "v1", 17200, 15),
    ("node.k8s.io", "v1", 16300, 15),
    ("policy", "v1", 17100, 15),
    ("rbac.authorization.k8s.io", "v1", 17000, 15),
    ("resource.k8s.io", "v1", 16200, 21),
    ("scheduling.k8s.io", "v1", 16600, 15),
    ("storage.k8s.io", "v1", 16800, 15),
];
const CUSTOM_PRIORITIES: (i64, i64) = (1000, 100);
/// As upstream, the group of APIServices has no APIService itself.
const OWN_GROUP: &str = "apiregistration.k8s.io";

/// `groupPriorityMinimum` of a local group.
pub fn group_priority(group: &str) -> i64 {
    PRIORITIES.iter().find(|row| row.0 == group).map_or(CUSTOM_PRIORITIES.0, |row| row.2)
}

#[derive(Clone, Debug, PartialEq)]
struct DesiredService {
    group: String,
    version: String,
    priorities: (i64, i64),
    label: &'static str,
}

#[derive(Debug, PartialEq)]
enum Action {
    Create(String),
    Update(String),
    Delete(String),
}

/// Syncs the APIServices of local groups.
pub async fn run_controller(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let mut kinds = server.registry.changes();
    let mut services = server.aggregator.shard.subscribe();
    let mut starting = true;
    loop {
        let desired = desired_services(&server);
        let found = server.aggregator.all();
        let actions = plan(&desired, &found, starting);
        let work = actions.iter().map(|action| apply_action(&server, action, &desired));
        let failed = futures_util::future::join_all(work).await.into_iter().filter_map(Result::err).next();
        if let Some(status) = failed {
            tracing::warn!(error = status.message, "cannot sync the APIServices of local groups");
        }
        starting &= !actions.is_empty();
        tokio::select! {
            changed = kinds.changed() => if changed.is_err() { return },
            changed = services.changed() => if changed.is_err() { return },
            () = wait_for_shutdown(&mut shutdown) => return,
        }
    }
}

fn desired_services(server: &Server) -> BTreeMap<String, DesiredService> {
    let mut desired = BTreeMap::new();
    for row in server.registry.rows().iter().filter(|row| row.group != OWN_GROUP) {
        let known = PRIORITIES.iter().find(|known| (known.0, known.1) == (row.group, row.version));
        let entry = DesiredService {
            group: row.group.to_owned(),
            version: row.version.to_owned(),
            priorities: known.map_or(CUSTOM_PRIORITIES, |known| (known.2, known.3)),
            label: if known.is_some() { MANAGED_ON_START } else { MANAGED_ALWAYS },
        };
        desired.insert(format!("{}.{}", row.version, row.group), entry);
    }
    desired
}

/// The changes to make. `onstart` APIServices are only synced at startup; those without the label
/// are never changed.
fn plan(
    desired: &BTreeMap<String, DesiredService>,
    found: &[Arc<ApiService>],
    starting: bool,
) -> Vec<Action> {
    let mut actions = Vec::new();
    for entry in found {
        let is_managed = entry.managed == MANAGED_ALWAYS || entry.managed == MANAGED_ON_START && starting;
        if is_managed && !desired.contains_key(&entry.name) {
            actions.push(Action::Delete(entry.name.clone()));
        }
    }
    for (name, service) in desired.iter().filter(|(_, service)| starting || service.label == MANAGED_ALWAYS) {
        match found.iter().find(|entry| entry.name == *name) {
            None => actions.push(Action::Create(name.clone())),
            Some(entry) if entry.managed.is_empty() => {}
            Some(entry) => {
                let same = (entry.group_priority, entry.version_priority) == service.priorities
                    && entry.remote.is_none()
                    && entry.managed == service.label;
                let is_managed = entry.managed == MANAGED_ALWAYS || starting;
                if !same && is_managed {
                    actions.push(Action::Update(name.clone()));
                }
            }
        }
    }
    actions
}

async fn apply_action(
    server: &Server,
    action: &Action,
    desired: &BTreeMap<String, DesiredService>,
) -> Result<(), Status> {
    let row = api::resource_table::find_resource(OWN_GROUP, "v1", "apiservices")
        .expect("APIServices are in the table");
    let collection = Target::collection(row, "");
    let named = |name: &str| Target { name: name.to_owned(), ..collection.clone() };
    let options = WriteOptions::internal(Timestamp::now());
    let done = match action {
        Action::Delete(name) => {
            server.delete_object(&named(name), &DeleteOptions::default(), options.now).await.map(drop)
        }
        Action::Create(name) => match desired.get(name) {
            None => Ok(()),
            Some(service) => {
                let metadata = json!({"name": name, "labels": {AUTO_MANAGED_LABEL: service.label}});
                let object = json!({
                    "kind": "APIService", "apiVersion": "apiregistration.k8s.io/v1", "metadata": metadata,
                    "spec": spec(service),
                });
                server.create_object(&collection, object, &options, None).await.map(drop)
            }
        },
        Action::Update(name) => match desired.get(name) {
            None => Ok(()),
            Some(service) => {
                let change = |before: &Value| {
                    let mut after = before.clone();
                    after.set("spec", spec(service));
                    after["metadata"]
                        .object_mut("labels")
                        .insert(AUTO_MANAGED_LABEL.to_owned(), service.label.into());
                    Ok(ObjectChange::replace(after))
                };
                server.update_object(&named(name), &options, change).await.map(drop)
            }
        },
    };
    match done {
        // Another writer was faster; its change triggers the next sync.
        Err(status) if matches!(status.code, 404 | 409) => Ok(()),
        done => done,
    }
}

fn spec(service: &DesiredService) -> Value {
    json!({
        "group": service.group, "version": service.version,
        "groupPriorityMinimum": service.priorities.0, "versionPriority": service.priorities.1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, managed: &str, priority: i64) -> Arc<ApiService> {
        let (version, group) = name.split_once('.').unwrap();
        Arc::new(ApiService {
            name: name.into(),
            group: group.into(),
            version: version.into(),
            group_priority: priority,
            version_priority: 15,
            managed: managed.into(),
            remote: None,
        })
    }

    #[track_caller]
    fn check(found: &[Arc<ApiService>], starting: bool, expected: &[Action]) {
        let service = |group: &str, label| DesiredService {
            group: group.into(),
            version: "v1".into(),
            priorities: (17800, 15),
            label,
        };
        let desired = [
            ("v1.apps".to_owned(), service("apps", MANAGED_ON_START)),
            ("v1.c".to_owned(), service("c", MANAGED_ALWAYS)),
        ]
        .into();
        assert_eq!(plan(&desired, found, starting), expected);
    }

    #[test]
    fn registration_plan_at_startup_and_after() {
        let [apps, custom] = ["v1.apps", "v1.c"].map(str::to_owned);
        let good = [entry("v1.apps", "onstart", 17800), entry("v1.c", "true", 17800)];
        check(&[], true, &[Action::Create(apps.clone()), Action::Create(custom.clone())]);
        check(&[], false, &[Action::Create(custom.clone())]);
        check(&good, true, &[]);
        let other = [entry("v1.apps", "onstart", 5), entry("v1.c", "true", 5)];
        check(&other, true, &[Action::Update(apps), Action::Update(custom.clone())]);
        check(&other, false, &[Action::Update(custom)]);
        check(&[entry("v1.apps", "", 5), entry("v1.c", "", 5)], true, &[]);
        let mut more = good.to_vec();
        more.extend([entry("v1.old", "onstart", 5), entry("v1.gone", "true", 5), entry("v1.own", "", 5)]);
        let delete_action = || Action::Delete("v1.gone".into());
        check(&more, true, &[Action::Delete("v1.old".into()), delete_action()]);
        check(&more, false, &[delete_action()]);
    }

    #[test]
    fn every_built_in_group_has_its_priority() {
        for row in api::RESOURCES.iter().filter(|row| row.group != OWN_GROUP) {
            let known = PRIORITIES.iter().any(|known| (known.0, known.1) == (row.group, row.version));
            assert!(known, "{}/{}", row.group, row.version);
        }
    }
}

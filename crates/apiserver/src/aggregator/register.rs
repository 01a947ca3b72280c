//! APIServices for what this server answers itself: the built-in groups, once when it starts, and those of
//! custom kinds, always.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::Status;
use api::json::Json as _;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::Entry;
use crate::cache::stopped;
use crate::delete::DeleteOptions;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

/// The label that says that an APIService is looked after, and how.
pub const MANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";
const ON_START: &str = "onstart";
const ALWAYS: &str = "true";

/// How groups and the versions in them come before others; what is not here is a custom kind's.
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
const CUSTOM: (i64, i64) = (1000, 100);
/// Its own group has no APIService: nobody else could answer for it.
const OWN: &str = "apiregistration.k8s.io";

/// The priority of a group that this server answers for.
pub fn group_priority(group: &str) -> i64 {
    PRIORITIES.iter().find(|row| row.0 == group).map_or(CUSTOM.0, |row| row.2)
}

#[derive(Clone, Debug, PartialEq)]
struct Wanted {
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

/// Keeps the APIServices of this server's own groups as they should be.
pub async fn keep(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let mut kinds = server.registry.changes();
    let mut services = server.aggregator.shard.subscribe();
    let mut starting = true;
    loop {
        let wanted = wanted(&server);
        let found = server.aggregator.all();
        let actions = plan(&wanted, &found, starting);
        let work = actions.iter().map(|action| act(&server, action, &wanted));
        let failed = futures_util::future::join_all(work).await.into_iter().filter_map(Result::err).next();
        if let Some(status) = failed {
            tracing::warn!(error = status.message, "cannot register what this server answers for");
        }
        starting &= !actions.is_empty();
        tokio::select! {
            changed = kinds.changed() => if changed.is_err() { return },
            changed = services.changed() => if changed.is_err() { return },
            () = stopped(&mut shutdown) => return,
        }
    }
}

fn wanted(server: &Server) -> BTreeMap<String, Wanted> {
    let mut wanted = BTreeMap::new();
    for row in server.registry.rows().iter().filter(|row| row.group != OWN) {
        let known = PRIORITIES.iter().find(|known| (known.0, known.1) == (row.group, row.version));
        let entry = Wanted {
            group: row.group.to_owned(),
            version: row.version.to_owned(),
            priorities: known.map_or(CUSTOM, |known| (known.2, known.3)),
            label: if known.is_some() { ON_START } else { ALWAYS },
        };
        wanted.insert(format!("{}.{}", row.version, row.group), entry);
    }
    wanted
}

/// What is to be done. Those that are only set at the start are left alone later, and those that do not say
/// that they are looked after always.
fn plan(wanted: &BTreeMap<String, Wanted>, found: &[Arc<Entry>], starting: bool) -> Vec<Action> {
    let mut actions = Vec::new();
    for entry in found {
        let looked_after = entry.managed == ALWAYS || entry.managed == ON_START && starting;
        if looked_after && !wanted.contains_key(&entry.name) {
            actions.push(Action::Delete(entry.name.clone()));
        }
    }
    for (name, want) in wanted.iter().filter(|(_, want)| starting || want.label == ALWAYS) {
        match found.iter().find(|entry| entry.name == *name) {
            None => actions.push(Action::Create(name.clone())),
            Some(entry) if entry.managed.is_empty() => {}
            Some(entry) => {
                let same = (entry.group_priority, entry.version_priority) == want.priorities
                    && entry.remote.is_none()
                    && entry.managed == want.label;
                let looked_after = entry.managed == ALWAYS || starting;
                if !same && looked_after {
                    actions.push(Action::Update(name.clone()));
                }
            }
        }
    }
    actions
}

async fn act(server: &Server, action: &Action, wanted: &BTreeMap<String, Wanted>) -> Result<(), Status> {
    let row = api::table::find(OWN, "v1", "apiservices").expect("APIServices are in the table");
    let collection = Target::collection(row, "");
    let named = |name: &str| Target { name: name.to_owned(), ..collection.clone() };
    let options = WriteOptions::internal(Timestamp::now());
    let done = match action {
        Action::Delete(name) => {
            server.delete_object(&named(name), &DeleteOptions::default(), options.now).await.map(drop)
        }
        Action::Create(name) => match wanted.get(name) {
            None => Ok(()),
            Some(want) => {
                let metadata = json!({"name": name, "labels": {MANAGED: want.label}});
                let object = json!({
                    "kind": "APIService", "apiVersion": "apiregistration.k8s.io/v1", "metadata": metadata,
                    "spec": spec(want),
                });
                server.create_object(&collection, object, &options, None).await.map(drop)
            }
        },
        Action::Update(name) => match wanted.get(name) {
            None => Ok(()),
            Some(want) => {
                let change = |before: &Value| {
                    let mut after = before.clone();
                    after.set("spec", spec(want));
                    after["metadata"].object_mut("labels").insert(MANAGED.to_owned(), want.label.into());
                    Ok(Change::replace(after))
                };
                server.change(&named(name), &options, change).await.map(drop)
            }
        },
    };
    match done {
        // Somebody else was faster.
        Err(status) if matches!(status.code, 404 | 409) => Ok(()),
        done => done,
    }
}

fn spec(want: &Wanted) -> Value {
    json!({
        "group": want.group, "version": want.version,
        "groupPriorityMinimum": want.priorities.0, "versionPriority": want.priorities.1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, managed: &str, priority: i64) -> Arc<Entry> {
        let (version, group) = name.split_once('.').unwrap();
        Arc::new(Entry {
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
    fn check(found: &[Arc<Entry>], starting: bool, expected: &[Action]) {
        let want = |group: &str, label| Wanted {
            group: group.into(),
            version: "v1".into(),
            priorities: (17800, 15),
            label,
        };
        let wanted =
            [("v1.apps".to_owned(), want("apps", ON_START)), ("v1.c".to_owned(), want("c", ALWAYS))].into();
        assert_eq!(plan(&wanted, found, starting), expected);
    }

    #[test]
    fn what_is_done_at_the_start_and_later() {
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
        let gone = || Action::Delete("v1.gone".into());
        check(&more, true, &[Action::Delete("v1.old".into()), gone()]);
        check(&more, false, &[gone()]);
    }

    #[test]
    fn every_built_in_group_has_its_priority() {
        for row in api::RESOURCES.iter().filter(|row| row.group != OWN) {
            let known = PRIORITIES.iter().any(|known| (known.0, known.1) == (row.group, row.version));
            assert!(known, "{}/{}", row.group, row.version);
        }
    }
}

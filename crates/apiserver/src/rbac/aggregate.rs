//! ClusterRoles whose rules are gathered from other ClusterRoles by their labels.

use std::sync::Arc;

use api::json::Json as _;
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::watch;

use super::row;
use crate::cache::stopped;
use crate::request::Target;
use crate::server::Server;
use crate::update::Change;
use crate::write::WriteOptions;

const OWNER: &str = "clusterrole-aggregation-controller";

/// Gathers whenever a ClusterRole has changed, until told to stop.
pub async fn keep_aggregated(server: Arc<Server>, mut shutdown: watch::Receiver<bool>) {
    let mut news = server.shard(row("clusterroles")).subscribe();
    loop {
        // Marked as seen first, so that what changes meanwhile is looked at again.
        news.borrow_and_update();
        gather_all(&server).await;
        tokio::select! {
            changed = news.changed() => if changed.is_err() { return },
            () = stopped(&mut shutdown) => return,
        }
    }
}

async fn gather_all(server: &Server) {
    let shard = server.shard(row("clusterroles"));
    let roles: Vec<Value> = shard.snapshot("", 0).objects.iter().map(|object| object.value()).collect();
    for role in roles.iter().filter(|role| role.has("aggregationRule")) {
        let rules = gathered(role, &roles);
        if role.items("rules") == rules {
            continue;
        }
        let name = role.at("metadata").text("name");
        let target = Target { name: name.to_owned(), ..Target::collection(row("clusterroles"), "") };
        let options = WriteOptions { manager: OWNER.into(), ..WriteOptions::internal(Timestamp::now()) };
        let change = |before: &Value| {
            let mut after = before.clone();
            after.set("rules", rules.clone());
            Ok(Change::replace(after))
        };
        match server.change(&target, &options, change).await {
            Err(status) if status.code != 404 => {
                tracing::warn!(name, error = status.message, "cannot aggregate the ClusterRole");
            }
            _ => {}
        }
    }
}

/// The rules of all roles that `role` selects, each once, in the order of the roles' names.
pub fn gathered(role: &Value, roles: &[Value]) -> Vec<Value> {
    let own = role.at("metadata").text("name");
    let mut rules: Vec<Value> = Vec::new();
    for selector in role.at("aggregationRule").items("clusterRoleSelectors") {
        for other in roles {
            let metadata = other.at("metadata");
            if metadata.text("name") == own || !selects(selector, metadata.at("labels")) {
                continue;
            }
            for rule in other.items("rules") {
                if !rules.contains(rule) {
                    rules.push(rule.clone());
                }
            }
        }
    }
    rules
}

/// A label selector in its long form; an empty one selects everything.
fn selects(selector: &Value, labels: &Value) -> bool {
    let exact = selector.entries("matchLabels").all(|(name, value)| labels.get(name) == Some(value));
    exact
        && selector.items("matchExpressions").iter().all(|expression| {
            let found = labels.get(expression.text("key"));
            let listed = found.is_some_and(|value| expression.items("values").contains(value));
            match expression.text("operator") {
                "In" => listed,
                "NotIn" => !listed,
                "Exists" => found.is_some(),
                "DoesNotExist" => found.is_none(),
                _ => false,
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn role(name: &str, label: &str, verbs: &[&str], selectors: Value) -> Value {
        let rules: Vec<Value> = verbs.iter().map(|verb| json!({"verbs": [verb]})).collect();
        json!({
            "metadata": {"name": name, "labels": {"to": label}}, "rules": rules,
            "aggregationRule": {"clusterRoleSelectors": selectors},
        })
    }

    #[track_caller]
    fn check(selectors: Value, expected: &str) {
        let roles = [
            role("a", "x", &["get", "list"], json!([])),
            role("b", "y", &["list", "watch"], json!([])),
            role("c", "x", &["create"], selectors),
        ];
        let verbs: Vec<String> =
            gathered(&roles[2], &roles).iter().map(|rule| rule.path("verbs")[0].to_string()).collect();
        assert_eq!(verbs.join(" "), expected);
    }

    #[test]
    fn rules_are_gathered_by_label() {
        check(json!([{"matchLabels": {"to": "x"}}]), r#""get" "list""#);
        check(json!([{"matchLabels": {"to": "y"}}, {"matchLabels": {"to": "x"}}]), r#""list" "watch" "get""#);
        check(json!([{}]), r#""get" "list" "watch""#);
        check(json!([]), "");
        let expression = |operator: &str, values: Value| json!([{"matchExpressions": [{"key": "to", "operator": operator, "values": values}]}]);
        check(expression("In", json!(["y", "z"])), r#""list" "watch""#);
        check(expression("NotIn", json!(["y"])), r#""get" "list""#);
        check(expression("Exists", json!([])), r#""get" "list" "watch""#);
        check(expression("DoesNotExist", json!([])), "");
    }
}

//! Nobody grants what they do not have: the checks on writing roles and bindings.

use api::Status;
use api::field::quoted;
use api::json::Json as _;
use serde_json::Value;

use super::rule::{Rule, compact, missing, quoted_list};
use super::{Ask, GROUP, Rbac};
use crate::access::{MASTERS, User};
use crate::request::Target;

/// Whether `user` may store `value` (in place of `before`) at `target`. Anything but roles and bindings is
/// none of our business.
pub async fn check(
    rbac: &Rbac,
    user: &User,
    target: &Target,
    value: &Value,
    before: Option<&Value>,
) -> Result<(), Status> {
    let resource = target.resource;
    if resource.group != GROUP || !target.subresource.is_empty() || user.is_in(MASTERS) {
        return Ok(());
    }
    if before.is_some_and(|before| only_collection_differs(value, before)) {
        return Ok(());
    }
    let wish = Wish { rbac, user, target, value };
    match resource.plural {
        "roles" | "clusterroles" => wish.role(before).await,
        "rolebindings" | "clusterrolebindings" => wish.binding().await,
        _ => Ok(()),
    }
}

struct Wish<'a> {
    rbac: &'a Rbac,
    user: &'a User,
    target: &'a Target,
    value: &'a Value,
}

impl Wish<'_> {
    async fn role(&self, before: Option<&Value>) -> Result<(), Status> {
        let ask = Ask::Resource {
            verb: "escalate",
            group: GROUP,
            resource: self.target.resource.plural,
            subresource: "",
            namespace: &self.target.namespace,
            name: &self.target.name,
            fields: None,
        };
        if self.rbac.judge(self.user, &ask).await.allowed {
            return Ok(());
        }
        self.confirm(&Rule::all_of(self.value))?;
        let aggregates = |role: &Value| !role.at("aggregationRule").items("clusterRoleSelectors").is_empty();
        let gathers = aggregates(self.value) || before.is_some_and(aggregates);
        // What is gathered may be anything, so whoever gathers must have everything.
        if gathers && self.confirm(&everything()).is_err() {
            return Err(self.refused("must have cluster-admin privileges to use the aggregationRule"));
        }
        Ok(())
    }

    async fn binding(&self) -> Result<(), Status> {
        let reference = self.value.at("roleRef");
        let name = reference.text("name");
        let (plural, namespace) = match reference.text("kind") {
            "ClusterRole" => ("clusterroles", ""),
            "Role" => ("roles", self.target.namespace.as_str()),
            kind => {
                let why = format!("unsupported role reference kind: {}", quoted(kind));
                return Err(Status::failure(500, "", why));
            }
        };
        let ask = Ask::Resource {
            verb: "bind",
            group: reference.text("apiGroup"),
            resource: plural,
            subresource: "",
            namespace: &self.target.namespace,
            name,
            fields: None,
        };
        if self.rbac.judge(self.user, &ask).await.allowed {
            return Ok(());
        }
        // A Role is not found from a binding without a namespace.
        let found = match (plural, namespace) {
            ("roles", "") => None,
            _ => self.rbac.rules_of(namespace, name),
        };
        let rules = found.ok_or_else(|| Status::not_found(GROUP, plural, name))?;
        self.confirm(&rules)
    }

    /// The user has all of `rules` where the object is.
    fn confirm(&self, rules: &[Rule]) -> Result<(), Status> {
        let held = self.rbac.held(self.user, &self.target.namespace);
        let missing = missing(&held.rules, rules);
        if missing.is_empty() {
            return Ok(());
        }
        let mut lines: Vec<String> = compact(missing).iter().map(Rule::to_string).collect();
        lines.sort();
        lines.dedup();
        let mut why = format!(
            "user {} (groups={}) is attempting to grant RBAC permissions not currently held:\n{}",
            quoted(&self.user.name),
            quoted_list(&self.user.groups),
            lines.join("\n")
        );
        if !held.problems.is_empty() {
            why += &format!("; resolution errors: [{}]", super::together(&held.problems));
        }
        Err(self.refused(&why))
    }

    fn refused(&self, why: &str) -> Status {
        let name = self.value.at("metadata").text("name");
        Status::forbidden(GROUP, self.target.resource.plural, name, why)
    }
}

fn everything() -> [Rule; 2] {
    let all = || vec!["*".to_owned()];
    let resources = Rule { verbs: all(), groups: all(), resources: all(), ..Rule::default() };
    [resources, Rule { verbs: all(), urls: all(), ..Rule::default() }]
}

/// The change is one that only garbage collection cares about.
fn only_collection_differs(value: &Value, before: &Value) -> bool {
    let rest = |value: &Value| {
        let mut value = value.clone();
        let metadata = value.object_mut("metadata");
        for field in ["ownerReferences", "finalizers", "selfLink", "managedFields"] {
            metadata.remove(field);
        }
        value
    };
    rest(value) == rest(before)
}

//! Privilege escalation checks: users may only grant permissions that they have.

use api::Status;
use api::field::quote;
use api::json::JsonExt as _;
use serde_json::Value;

use super::rule::{PolicyRule, compact, missing, quoted_list};
use super::{Attributes, GROUP, Rbac};
use crate::access::{SYSTEM_PRIVILEGED_GROUP, User};
use crate::request::Target;

/// Whether `user` may store `value` (replacing `before`) at `target`. Allows anything but roles and
/// bindings.
pub async fn check(
    rbac: &Rbac,
    user: &User,
    target: &Target,
    value: &Value,
    before: Option<&Value>,
) -> Result<(), Status> {
    let resource = target.resource;
    if resource.group != GROUP || !target.subresource.is_empty() || user.is_in(SYSTEM_PRIVILEGED_GROUP) {
        return Ok(());
    }
    if before.is_some_and(|before| is_only_gc_change(value, before)) {
        return Ok(());
    }
    let request = EscalationRequest { rbac, user, target, value };
    match resource.plural {
        "roles" | "clusterroles" => request.check_role(before).await,
        "rolebindings" | "clusterrolebindings" => request.check_binding().await,
        _ => Ok(()),
    }
}

struct EscalationRequest<'a> {
    rbac: &'a Rbac,
    user: &'a User,
    target: &'a Target,
    value: &'a Value,
}

impl EscalationRequest<'_> {
    async fn check_role(&self, before: Option<&Value>) -> Result<(), Status> {
        let attributes = Attributes::Resource {
            verb: "escalate",
            group: GROUP,
            resource: self.target.resource.plural,
            subresource: "",
            namespace: &self.target.namespace,
            name: &self.target.name,
            fields: None,
        };
        if self.rbac.evaluate(self.user, &attributes).await.allowed {
            return Ok(());
        }
        self.confirm_no_escalation(&PolicyRule::all_of(self.value))?;
        let has_aggregation_rule =
            |role: &Value| !role.at("aggregationRule").items("clusterRoleSelectors").is_empty();
        let uses_aggregation = has_aggregation_rule(self.value) || before.is_some_and(has_aggregation_rule);
        // Aggregated rules may be anything, so the user must have all permissions.
        if uses_aggregation && self.confirm_no_escalation(&full_access_rules()).is_err() {
            return Err(self.forbidden("must have cluster-admin privileges to use the aggregationRule"));
        }
        Ok(())
    }

    async fn check_binding(&self) -> Result<(), Status> {
        let reference = self.value.at("roleRef");
        let name = reference.text("name");
        let (plural, namespace) = match reference.text("kind") {
            "ClusterRole" => ("clusterroles", ""),
            "Role" => ("roles", self.target.namespace.as_str()),
            kind => {
                let message = format!("unsupported role reference kind: {}", quote(kind));
                return Err(Status::failure(500, "", message));
            }
        };
        let attributes = Attributes::Resource {
            verb: "bind",
            group: reference.text("apiGroup"),
            resource: plural,
            subresource: "",
            namespace: &self.target.namespace,
            name,
            fields: None,
        };
        if self.rbac.evaluate(self.user, &attributes).await.allowed {
            return Ok(());
        }
        // A ClusterRoleBinding cannot reference a Role.
        let found = match (plural, namespace) {
            ("roles", "") => None,
            _ => self.rbac.rules_of(namespace, name),
        };
        let rules = found.ok_or_else(|| Status::not_found(GROUP, plural, name))?;
        self.confirm_no_escalation(&rules)
    }

    /// Checks that the user holds all of `rules` in the object's namespace.
    fn confirm_no_escalation(&self, rules: &[PolicyRule]) -> Result<(), Status> {
        let resolved = self.rbac.resolve_rules(self.user, &self.target.namespace);
        let missing = missing(&resolved.rules, rules);
        if missing.is_empty() {
            return Ok(());
        }
        let mut lines: Vec<String> = compact(missing).iter().map(PolicyRule::to_string).collect();
        lines.sort();
        lines.dedup();
        let mut message = format!(
            "user {} (groups={}) is attempting to grant RBAC permissions not currently held:\n{}",
            quote(&self.user.name),
            quoted_list(&self.user.groups),
            lines.join("\n")
        );
        if !resolved.errors.is_empty() {
            message += &format!("; resolution errors: [{}]", super::aggregate_errors(&resolved.errors));
        }
        Err(self.forbidden(&message))
    }

    fn forbidden(&self, message: &str) -> Status {
        let name = self.value.at("metadata").text("name");
        Status::forbidden(GROUP, self.target.resource.plural, name, message)
    }
}

fn full_access_rules() -> [PolicyRule; 2] {
    let all = || vec!["*".to_owned()];
    let resources = PolicyRule { verbs: all(), groups: all(), resources: all(), ..PolicyRule::default() };
    [resources, PolicyRule { verbs: all(), urls: all(), ..PolicyRule::default() }]
}

/// The update changes only fields that the garbage collector writes.
fn is_only_gc_change(value: &Value, before: &Value) -> bool {
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

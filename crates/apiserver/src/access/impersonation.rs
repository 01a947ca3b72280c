//! Impersonation by `Impersonate-*` headers.
//!
//! Constrained impersonation allows a user to act as another one for single verbs only: it needs
//! `impersonate-on:<mode>:<verb>` on the target and `impersonate:<mode>` on the impersonated
//! identity. Unconstrained impersonation (`impersonate`) covers all requests. User name, UID, each
//! group and each extra value need their own permission.

use std::collections::BTreeMap;

use api::Status;
use api::field::quote;
use http::HeaderMap;

use super::{ANONYMOUS, AUTHENTICATED, RequestInfo, SYSTEM_PRIVILEGED_GROUP, UNAUTHENTICATED, User};
use crate::rbac::{Attributes, Rbac};

/// The user that the headers name, if `user` may impersonate them for this request.
pub async fn impersonate(
    rbac: &Rbac,
    user: User,
    headers: &HeaderMap,
    request_info: &RequestInfo<'_>,
) -> Result<User, Status> {
    let requested = requested_user(headers);
    if requested.name.is_empty() {
        return if requested == User::default() { Ok(user) } else { Err(missing_user_name(&requested)) };
    }
    let impersonation = ImpersonationRequest { rbac, user: &user, requested: &requested };
    let mut first_error = None;
    for mode in MODES {
        if !impersonation.applies(mode) {
            continue;
        }
        match impersonation.authorize_constrained(mode, request_info).await {
            Ok(other) => return Ok(other),
            Err(status) => drop(first_error.get_or_insert(status)),
        }
    }
    // Report the first error: its mode requires the narrowest permission.
    impersonation.authorize_all("impersonate", false).await.map_err(|status| first_error.unwrap_or(status))
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    AssociatedNode,
    ArbitraryNode,
    ServiceAccount,
    UserInfo,
}

const MODES: [Mode; 4] = [Mode::AssociatedNode, Mode::ArbitraryNode, Mode::ServiceAccount, Mode::UserInfo];
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const GROUP: &str = "authentication.k8s.io";

impl Mode {
    fn as_str(self) -> &'static str {
        match self {
            Mode::AssociatedNode => "associated-node",
            Mode::ArbitraryNode => "arbitrary-node",
            Mode::ServiceAccount => "serviceaccount",
            Mode::UserInfo => "user-info",
        }
    }
}

struct ImpersonationRequest<'a> {
    rbac: &'a Rbac,
    user: &'a User,
    requested: &'a User,
}

impl ImpersonationRequest<'_> {
    /// Whether the mode covers the requested identity.
    fn applies(&self, mode: Mode) -> bool {
        let requested = self.requested;
        let only_name = requested.uid.is_empty() && requested.groups.is_empty() && requested.extra.is_empty();
        let node = node(&requested.name);
        let account = account(&requested.name).is_some();
        match mode {
            Mode::AssociatedNode => {
                let own = self.user.extra.get(NODE_NAME).map(Vec::as_slice);
                only_name
                    && self::account(&self.user.name).is_some()
                    && node.is_some_and(|node| own.is_some_and(|own| own == [node]))
            }
            Mode::ArbitraryNode => only_name && node.is_some(),
            Mode::ServiceAccount => only_name && account,
            Mode::UserInfo => node.is_none() && !account,
        }
    }

    async fn authorize_constrained(
        &self,
        mode: Mode,
        request_info: &RequestInfo<'_>,
    ) -> Result<User, Status> {
        let verb = format!("impersonate-on:{}:{}", mode.as_str(), request_info.verb());
        self.rbac.authorize(self.user, &request_info.attributes(&verb)).await?;
        self.authorize_all(&format!("impersonate:{}", mode.as_str()), true).await
    }

    /// The impersonated user, if every part of the identity is permitted.
    async fn authorize_all(&self, verb: &str, constrained: bool) -> Result<User, Status> {
        let requested = self.requested;
        let mut other = requested.clone();
        // Unconstrained impersonation checks users and groups in the core group.
        let group = if constrained { GROUP } else { "" };
        let attributes = |group, resource, subresource, namespace, name| Attributes::Resource {
            verb,
            group,
            resource,
            subresource,
            namespace,
            name,
            fields: None,
        };
        let allow = async |attributes: Attributes<'_>| self.rbac.authorize(self.user, &attributes).await;
        match (account(&requested.name), node(&requested.name)) {
            (Some((namespace, name)), _) => {
                allow(attributes(group, "serviceaccounts", "", namespace, name)).await?;
                if requested.groups.is_empty() {
                    let own = format!("system:serviceaccounts:{namespace}");
                    other.groups = vec!["system:serviceaccounts".into(), own];
                }
            }
            (None, Some(node)) if constrained => {
                // `associated-node` grants impersonation of whatever node the user runs on, so the
                // name is not checked.
                let any = verb.ends_with(Mode::AssociatedNode.as_str());
                allow(attributes(group, "nodes", "", "", if any { "*" } else { node })).await?;
                other.groups = vec!["system:nodes".into()];
            }
            _ => allow(attributes(group, "users", "", "", &requested.name)).await?,
        }
        if !requested.uid.is_empty() {
            allow(attributes(GROUP, "uids", "", "", &requested.uid)).await?;
        }
        let refuse =
            |attributes: Attributes<'_>, reason: &str| Err(attributes.forbidden_status(self.user, reason));
        if constrained && requested.is_in("") {
            let reason = "impersonating the empty string group is not allowed";
            return refuse(attributes(group, "groups", "", "", ""), reason);
        }
        if constrained && requested.is_in(SYSTEM_PRIVILEGED_GROUP) {
            let reason = "impersonating the system:masters group is not allowed";
            return refuse(attributes(group, "groups", "", "", SYSTEM_PRIVILEGED_GROUP), reason);
        }
        for name in &requested.groups {
            allow(attributes(group, "groups", "", "", name)).await?;
        }
        for (key, values) in &requested.extra {
            if let (true, Some(reason)) = (constrained, validate_extra(key, values)) {
                return refuse(attributes(GROUP, "userextras", "", "", ""), &reason);
            }
            for value in values {
                allow(attributes(GROUP, "userextras", key, "", value)).await?;
            }
        }
        if other.name == ANONYMOUS {
            if !other.is_in(UNAUTHENTICATED) {
                other.groups.push(UNAUTHENTICATED.into());
            }
        } else if !other.is_in(AUTHENTICATED) && !other.is_in(UNAUTHENTICATED) {
            other.groups.push(AUTHENTICATED.into());
        }
        Ok(other)
    }
}

/// The identity in the headers.
fn requested_user(headers: &HeaderMap) -> User {
    let header_values = |name: &str| -> Vec<String> {
        let values = headers.get_all(name).iter();
        values.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect()
    };
    let first = |name: &str| header_values(name).into_iter().next().unwrap_or_default();
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in headers.keys() {
        if let Some(key) = name.as_str().strip_prefix("impersonate-extra-") {
            extra
                .entry(stream::url_encoding::unescape(key))
                .or_default()
                .extend(header_values(name.as_str()));
        }
    }
    let (name, uid) = (first("impersonate-user"), first("impersonate-uid"));
    User { name, uid, groups: header_values("impersonate-group"), extra }
}

/// Upstream prints its Go struct in this message.
fn missing_user_name(requested: &User) -> Status {
    let list = |strings: &[String]| {
        let quoted: Vec<String> = strings.iter().map(|text| quote(text)).collect();
        format!("[]string{{{}}}", quoted.join(", "))
    };
    let groups =
        if requested.groups.is_empty() { "[]string(nil)".to_owned() } else { list(&requested.groups) };
    let pairs: Vec<String> =
        requested.extra.iter().map(|(key, values)| format!("{}:{}", quote(key), list(values))).collect();
    let extra = if pairs.is_empty() { "(nil)".to_owned() } else { format!("{{{}}}", pairs.join(", ")) };
    Status::bad_request(format!(
        "requested &user.DefaultInfo{{Name:\"\", UID:{}, Groups:{groups}, Extra:map[string][]string{extra}}} without impersonating a user name",
        quote(&requested.uid)
    ))
}

fn account(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'))
}

fn node(name: &str) -> Option<&str> {
    name.strip_prefix("system:node:").filter(|node| api::names::dns1123_subdomain(node).is_empty())
}

/// Why the extra key or its values are not allowed in constrained impersonation.
fn validate_extra(key: &str, values: &[String]) -> Option<String> {
    let prefixed = key
        .split_once('/')
        .is_some_and(|(domain, path)| api::names::dns1123_subdomain(domain).is_empty() && !path.is_empty());
    let reason = if key.is_empty() {
        "impersonating the empty string key in extra is not allowed".to_owned()
    } else if !prefixed {
        format!(
            "impersonating an invalid key in extra is not allowed: extra.key: Invalid value: {}: must be a domain-prefixed path (such as \"acme.io/foo\")",
            quote(key)
        )
    } else if key.chars().any(char::is_uppercase) {
        format!("impersonating a non-lowercase key in extra is not allowed: {}", quote(key))
    } else if values.iter().any(String::is_empty) {
        "impersonating the empty string value in extra is not allowed".to_owned()
    } else {
        return None;
    };
    Some(reason)
}

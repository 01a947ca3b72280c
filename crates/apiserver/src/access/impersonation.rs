//! Acting as somebody else, by `Impersonate-*` headers.
//!
//! A user may be allowed to act as another in what they ask for only (`impersonate-on:…` that verb, and
//! `impersonate:…` that user), or, the old way, in everything (`impersonate`). Each part of the other's
//! identity needs its own permission.

use std::collections::BTreeMap;

use api::Status;
use api::field::quoted;
use http::HeaderMap;

use super::{ANONYMOUS, AUTHENTICATED, Asks, MASTERS, UNAUTHENTICATED, User};
use crate::rbac::{Ask, Rbac};

/// The user that the headers name, where `user` may act as them to do what the request asks.
pub async fn impersonate(
    rbac: &Rbac,
    user: User,
    headers: &HeaderMap,
    asks: &Asks<'_>,
) -> Result<User, Status> {
    let wanted = wanted(headers);
    if wanted.name.is_empty() {
        return if wanted == User::default() { Ok(user) } else { Err(nameless(&wanted)) };
    }
    let wish = Wish { rbac, user: &user, wanted: &wanted };
    let mut refusal = None;
    for mode in MODES {
        if !wish.fits(mode) {
            continue;
        }
        match wish.constrained(mode, asks).await {
            Ok(other) => return Ok(other),
            Err(status) => drop(refusal.get_or_insert(status)),
        }
    }
    // The first refusal is told: it names the least that is needed.
    wish.check("impersonate", false).await.map_err(|status| refusal.unwrap_or(status))
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
    fn word(self) -> &'static str {
        match self {
            Mode::AssociatedNode => "associated-node",
            Mode::ArbitraryNode => "arbitrary-node",
            Mode::ServiceAccount => "serviceaccount",
            Mode::UserInfo => "user-info",
        }
    }
}

struct Wish<'a> {
    rbac: &'a Rbac,
    user: &'a User,
    wanted: &'a User,
}

impl Wish<'_> {
    /// Whether the mode is about users such as the wanted one.
    fn fits(&self, mode: Mode) -> bool {
        let wanted = self.wanted;
        let only_name = wanted.uid.is_empty() && wanted.groups.is_empty() && wanted.extra.is_empty();
        let node = node(&wanted.name);
        let account = account(&wanted.name).is_some();
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

    async fn constrained(&self, mode: Mode, asks: &Asks<'_>) -> Result<User, Status> {
        let on = format!("impersonate-on:{}:{}", mode.word(), asks.verb());
        self.rbac.authorize(self.user, &asks.ask(&on)).await?;
        self.check(&format!("impersonate:{}", mode.word()), true).await
    }

    /// The whole user to act as, where every part of them is allowed.
    async fn check(&self, verb: &str, constrained: bool) -> Result<User, Status> {
        let wanted = self.wanted;
        let mut other = wanted.clone();
        // In the old way, these are in the core group.
        let group = if constrained { GROUP } else { "" };
        let ask = |group, resource, subresource, namespace, name| Ask::Resource {
            verb,
            group,
            resource,
            subresource,
            namespace,
            name,
            fields: None,
        };
        let allow = async |ask: Ask<'_>| self.rbac.authorize(self.user, &ask).await;
        match (account(&wanted.name), node(&wanted.name)) {
            (Some((namespace, name)), _) => {
                allow(ask(group, "serviceaccounts", "", namespace, name)).await?;
                if wanted.groups.is_empty() {
                    let own = format!("system:serviceaccounts:{namespace}");
                    other.groups = vec!["system:serviceaccounts".into(), own];
                }
            }
            (None, Some(node)) if constrained => {
                // Whoever may act as the node they run on may do so on any node.
                let any = verb.ends_with(Mode::AssociatedNode.word());
                allow(ask(group, "nodes", "", "", if any { "*" } else { node })).await?;
                other.groups = vec!["system:nodes".into()];
            }
            _ => allow(ask(group, "users", "", "", &wanted.name)).await?,
        }
        if !wanted.uid.is_empty() {
            allow(ask(GROUP, "uids", "", "", &wanted.uid)).await?;
        }
        let refuse = |ask: Ask<'_>, why: &str| Err(ask.refusal(self.user, why));
        if constrained && wanted.is_in("") {
            let why = "impersonating the empty string group is not allowed";
            return refuse(ask(group, "groups", "", "", ""), why);
        }
        if constrained && wanted.is_in(MASTERS) {
            let why = "impersonating the system:masters group is not allowed";
            return refuse(ask(group, "groups", "", "", MASTERS), why);
        }
        for name in &wanted.groups {
            allow(ask(group, "groups", "", "", name)).await?;
        }
        for (key, values) in &wanted.extra {
            if let (true, Some(why)) = (constrained, bad_extra(key, values)) {
                return refuse(ask(GROUP, "userextras", "", "", ""), &why);
            }
            for value in values {
                allow(ask(GROUP, "userextras", key, "", value)).await?;
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

/// The user as the headers say.
fn wanted(headers: &HeaderMap) -> User {
    let texts = |name: &str| -> Vec<String> {
        let values = headers.get_all(name).iter();
        values.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect()
    };
    let first = |name: &str| texts(name).into_iter().next().unwrap_or_default();
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in headers.keys() {
        if let Some(key) = name.as_str().strip_prefix("impersonate-extra-") {
            extra.entry(stream::escapes::decoded(key)).or_default().extend(texts(name.as_str()));
        }
    }
    let (name, uid) = (first("impersonate-user"), first("impersonate-uid"));
    User { name, uid, groups: texts("impersonate-group"), extra }
}

/// Upstream prints its own structure here.
fn nameless(wanted: &User) -> Status {
    let list = |texts: &[String]| {
        let quoted: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
        format!("[]string{{{}}}", quoted.join(", "))
    };
    let groups = if wanted.groups.is_empty() { "[]string(nil)".to_owned() } else { list(&wanted.groups) };
    let pairs: Vec<String> =
        wanted.extra.iter().map(|(key, values)| format!("{}:{}", quoted(key), list(values))).collect();
    let extra = if pairs.is_empty() { "(nil)".to_owned() } else { format!("{{{}}}", pairs.join(", ")) };
    Status::bad_request(format!(
        "requested &user.DefaultInfo{{Name:\"\", UID:{}, Groups:{groups}, Extra:map[string][]string{extra}}} without impersonating a user name",
        quoted(&wanted.uid)
    ))
}

fn account(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'))
}

fn node(name: &str) -> Option<&str> {
    name.strip_prefix("system:node:").filter(|node| api::names::dns1123_subdomain(node).is_empty())
}

/// Why this cannot be part of anybody.
fn bad_extra(key: &str, values: &[String]) -> Option<String> {
    let prefixed = key
        .split_once('/')
        .is_some_and(|(domain, path)| api::names::dns1123_subdomain(domain).is_empty() && !path.is_empty());
    let why = if key.is_empty() {
        "impersonating the empty string key in extra is not allowed".to_owned()
    } else if !prefixed {
        format!(
            "impersonating an invalid key in extra is not allowed: extra.key: Invalid value: {}: must be a domain-prefixed path (such as \"acme.io/foo\")",
            quoted(key)
        )
    } else if key.chars().any(char::is_uppercase) {
        format!("impersonating a non-lowercase key in extra is not allowed: {}", quoted(key))
    } else if values.iter().any(String::is_empty) {
        "impersonating the empty string value in extra is not allowed".to_owned()
    } else {
        return None;
    };
    Some(why)
}

//! `audit.k8s.io/v1` Event.

use std::collections::BTreeMap;
use std::net::IpAddr;

use api::field::quote;
use http::HeaderMap;
use jiff::Timestamp;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::policy::Stage;
use crate::access::User;
use crate::rbac::Attributes;

/// Fields are in upstream's order.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    pub level: &'static str,
    #[serde(rename = "auditID")]
    pub audit_id: String,
    pub stage: &'static str,
    #[serde(rename = "requestURI")]
    pub request_uri: String,
    pub verb: String,
    pub user: UserInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub impersonated_user: Option<UserInfo>,
    #[serde(rename = "sourceIPs", skip_serializing_if = "Vec::is_empty")]
    pub source_ips: Vec<IpAddr>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user_agent: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object_ref: Option<ObjectRef>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_status: Option<StatusInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_object: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_object: Option<Value>,
    #[serde(serialize_with = "micros")]
    pub request_received_timestamp: Timestamp,
    #[serde(serialize_with = "micros")]
    pub stage_timestamp: Timestamp,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct UserInfo {
    #[serde(skip_serializing_if = "String::is_empty")]
    username: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    uid: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    groups: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    extra: BTreeMap<String, Vec<String>>,
}

#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subresource: String,
}

/// A Status without kind and apiVersion.
#[derive(Clone, Debug, Default, Serialize)]
pub struct StatusInfo {
    pub metadata: Empty,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub status: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
    pub code: u16,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Empty {}

impl StatusInfo {
    /// From a Status object and the HTTP code of the response.
    pub fn read(status: &Value, code: u16) -> StatusInfo {
        let text = |name: &str| status[name].as_str().unwrap_or("").to_owned();
        StatusInfo {
            metadata: Empty {},
            status: text("status"),
            message: text("message"),
            reason: text("reason"),
            details: status.get("details").filter(|details| !details.is_null()).cloned(),
            code,
        }
    }
}

const MAX_USER_AGENT_BYTES: usize = 1024;

impl From<&User> for UserInfo {
    fn from(user: &User) -> UserInfo {
        UserInfo {
            username: user.name.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
        }
    }
}

impl ObjectRef {
    /// The object of a resource request; `None` for other paths.
    pub fn of(attributes: &Attributes<'_>, version: &str) -> Option<ObjectRef> {
        let Attributes::Resource { group, resource, subresource, namespace, name, .. } = *attributes else {
            return None;
        };
        Some(ObjectRef {
            resource: resource.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            api_group: group.to_owned(),
            api_version: version.to_owned(),
            subresource: subresource.to_owned(),
            ..ObjectRef::default()
        })
    }

    /// Fills empty fields from the request body.
    pub fn set_object_metadata(&mut self, object: &Value) {
        let metadata = &object["metadata"];
        let from = |field: &mut String, name: &str| {
            if field.is_empty() {
                *field = metadata[name].as_str().unwrap_or("").to_owned();
            }
        };
        from(&mut self.namespace, "namespace");
        from(&mut self.name, "name");
        from(&mut self.uid, "uid");
        from(&mut self.resource_version, "resourceVersion");
    }
}

impl Event {
    /// JSON without kind and apiVersion, as an item of an EventList.
    pub fn to_json(&self) -> Vec<u8> {
        // Serialization only fails for maps with non-string keys, of which there are none.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// One line of JSON.
    pub fn to_line(&self) -> Vec<u8> {
        let mut line = br#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","#.to_vec();
        line.extend_from_slice(self.to_json().get(1..).unwrap_or_default());
        line.push(b'\n');
        line
    }

    /// One line of text: `--audit-log-format=legacy`.
    pub fn to_text(&self) -> Vec<u8> {
        let list = |groups: &[String]| {
            let all: Vec<String> = groups.iter().map(|group| quote(group)).collect();
            quote(&all.join(","))
        };
        let or = |text: &str, default: &str| quote(if text.is_empty() { default } else { text });
        let groups = match self.user.groups.as_slice() {
            [] => quote("<none>"),
            groups => list(groups),
        };
        let (other, other_groups) = match &self.impersonated_user {
            None => (quote("<self>"), quote("<lookup>")),
            Some(user) if user.groups.is_empty() => (quote(&user.username), quote("<lookup>")),
            Some(user) => (quote(&user.username), list(&user.groups)),
        };
        let ip = self.source_ips.first().map_or_else(|| "<unknown>".to_owned(), ToString::to_string);
        let namespace = self.object_ref.as_ref().map_or("", |object| &object.namespace);
        let status = self.response_status.as_ref();
        let response = status.map_or_else(|| "<deferred>".to_owned(), |status| status.code.to_string());
        let text = format!(
            "{} AUDIT: id={} stage={} ip={} method={} user={} groups={groups} as={other} asgroups={other_groups} user-agent={} namespace={} uri={} response=\"{response}\"\n",
            self.request_received_timestamp,
            quote(&self.audit_id),
            quote(self.stage),
            quote(&ip),
            quote(&self.verb),
            or(&self.user.username, "<none>"),
            quote(&self.user_agent),
            or(namespace, "<none>"),
            quote(&self.request_uri),
        );
        text.into_bytes()
    }

    pub fn set_stage(&mut self, stage: Stage, now: Timestamp) {
        self.stage = stage.name();
        self.stage_timestamp = match stage {
            Stage::RequestReceived => self.request_received_timestamp,
            _ => now,
        };
    }
}

fn micros<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&time.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"))
}

/// The User-Agent header, truncated as upstream does.
pub fn user_agent(headers: &HeaderMap) -> String {
    let agent = headers.get(http::header::USER_AGENT).map_or(&[][..], |value| value.as_bytes());
    match agent.get(..MAX_USER_AGENT_BYTES) {
        Some(start) if agent.len() > MAX_USER_AGENT_BYTES => {
            format!("{}...TRUNCATED", String::from_utf8_lossy(start))
        }
        _ => String::from_utf8_lossy(agent).into_owned(),
    }
}

/// Client addresses: X-Forwarded-For, X-Real-Ip and the remote address.
pub fn source_ips(headers: &HeaderMap, remote: Option<IpAddr>) -> Vec<IpAddr> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let mut found: Vec<IpAddr> =
        text("x-forwarded-for").split(',').filter_map(|part| part.trim().parse().ok()).collect();
    if let Ok(real) = text("x-real-ip").parse()
        && !found.contains(&real)
    {
        found.push(real);
    }
    if let Some(remote) = remote.map(|ip| ip.to_canonical())
        && found.last() != Some(&remote)
    {
        found.push(remote);
    }
    found
}

/// Removes managedFields from an object, or from the items of a list or table.
pub fn without_managed_fields(value: &mut Value) {
    let take = |object: &mut Value| {
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    };
    take(value);
    for item in value.get_mut("items").and_then(Value::as_array_mut).into_iter().flatten() {
        take(item);
    }
    for row in value.get_mut("rows").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(object) = row.get_mut("object") {
            take(object);
        }
    }
}

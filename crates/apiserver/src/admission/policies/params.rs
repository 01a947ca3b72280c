//! The params objects of a binding.

use api::Resource;
use serde_json::Value;

use super::config::{Binding, Policy};
use super::matching;
use crate::admission::Request;
use crate::codec;
use crate::object::Object;
use crate::request::Target;
use crate::server::Server;

/// The params if the binding matches the request; empty if it does not.
pub fn matching_params(
    server: &Server,
    policy: &Policy,
    binding: &Binding,
    request: &Request<'_>,
    object: &Value,
) -> Result<Vec<Value>, String> {
    if let Some(match_resources) = &binding.match_resources
        && matching::matched(server, match_resources, request, object)?.is_none()
    {
        return Ok(Vec::new());
    }
    collect_params(server, policy, binding, request)
}

/// One entry per object found; a single null if the policy has no params.
fn collect_params(
    server: &Server,
    policy: &Policy,
    binding: &Binding,
    request: &Request<'_>,
) -> Result<Vec<Value>, String> {
    let (Some((api_version, kind)), Some(reference)) = (&policy.param_kind, &binding.params) else {
        return Ok(vec![Value::Null]);
    };
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let is = |row: &&&'static Resource| row.group == group && row.version == version && row.kind == kind;
    let rows = server.registry.rows();
    let Some(row) = rows.iter().find(is).copied() else {
        let group_version = codec::api_version(group, version);
        return Err(format!(
            "failed to find resource referenced by paramKind: '{group_version}, Kind={kind}'"
        ));
    };
    let namespace = match (row.namespaced, reference.namespace.as_str()) {
        (false, "") => "",
        (false, _) => {
            return Err("paramRef.namespace must not be provided for a cluster-scoped `paramKind`".to_owned());
        }
        (true, "") if request.namespace.is_empty() => {
            return Err(
                "cannot use namespaced paramRef in policy binding that matches cluster-scoped resources"
                    .to_owned(),
            );
        }
        (true, "") => request.namespace,
        (true, given) => given,
    };
    let collection = Target::collection(row, namespace);
    let value = |object: &Object| codec::from_stored(row, object.value());
    let found: Vec<Value> = match &reference.selector {
        None => {
            let target = Target { name: reference.name.clone(), ..collection };
            server.find(&target).iter().map(|object| value(object)).collect()
        }
        Some(selector) => {
            let objects = server.shard(row).snapshot(&collection.key(), 0).objects;
            let selected = objects.iter().filter(|object| selector.matches(|key| object.label(key)));
            selected.map(|object| value(object)).collect()
        }
    };
    if found.is_empty() && reference.required {
        return Err("no params found for policy binding with `Deny` parameterNotFoundAction".to_owned());
    }
    Ok(found)
}

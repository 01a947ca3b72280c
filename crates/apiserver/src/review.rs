//! Resources that are evaluated and never stored: reviews, bindings, component statuses.

use api::json::JsonExt as _;
use api::selector::{FieldSelector, escape};
use api::{ErrorList, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::access::User;
use crate::body::Body;
use crate::codec;
use crate::create::{invalid, set_namespace};
use crate::node_authorizer;
use crate::rbac::{Attributes, PolicyRule};
use crate::render::encode_response;
use crate::request::Target;
use crate::server::{Call, Server, method_not_allowed};
use crate::tokens;
use crate::write::WriteOptions;

pub async fn handle(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let row = target.resource;
    if row.plural == "componentstatuses" {
        return component_statuses(call, target).await;
    }
    if call.method != http::Method::POST || !target.name.is_empty() {
        return Err(method_not_allowed());
    }
    if row.plural == "bindings" {
        return crate::subresource::bind(server, call, target).await;
    }
    let options = WriteOptions::parse(call, "CreateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let mut review =
        codec::decode(media, &call.body, (row.group, row.version, row.kind), options.validation)?.value;
    set_namespace(&mut review, target)?;
    server.admit_review(target, &mut review, &options).await?;
    let mut errors = ErrorList::default();
    row.strategy.validate(&review, &mut errors);
    invalid(row, "", &errors)?;
    review["status"] = match row.plural {
        "selfsubjectreviews" => json!({"userInfo": tokens::user_info(&call.user)}),
        "tokenreviews" => {
            api::authentication::token_review::token(&review)?;
            tokens::review(server, review.at("spec"), call.now).await
        }
        "selfsubjectrulesreviews" => evaluate_rules(server, &call.user, review.at("spec"))?,
        "selfsubjectaccessreviews" => evaluate_access(server, &call.user, review.at("spec")).await,
        _ => evaluate_access(server, &subject(review.at("spec")), review.at("spec")).await,
    };
    let created = if row.plural == "selfsubjectreviews" { options.timestamp().into() } else { Value::Null };
    review.object_mut("metadata").insert("creationTimestamp".into(), created);
    Ok(encode_response(StatusCode::CREATED, &call.format, review))
}

fn subject(spec: &Value) -> User {
    let string_list = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let extra = spec.entries("extra").map(|(key, values)| (key.to_owned(), string_list(values)));
    User {
        name: spec.text("user").to_owned(),
        uid: spec.text("uid").to_owned(),
        groups: string_list(spec.at("groups")),
        extra: extra.collect(),
    }
}

async fn evaluate_access(server: &Server, user: &User, spec: &Value) -> Value {
    let resource = spec.at("resourceAttributes");
    let path = spec.at("nonResourceAttributes");
    let fields = parse_field_selector(resource.at("fieldSelector"));
    let attributes = if resource.is_object() {
        Attributes::Resource {
            verb: resource.text("verb"),
            group: resource.text("group"),
            resource: resource.text("resource"),
            subresource: resource.text("subresource"),
            namespace: resource.text("namespace"),
            name: resource.text("name"),
            fields: Some(&fields),
        }
    } else {
        Attributes::Path { verb: path.text("verb"), path: path.text("path") }
    };
    let verdict = server.rbac.evaluate(user, &attributes).await;
    let mut status = json!({"allowed": verdict.allowed});
    if verdict.denied {
        status.set("denied", true);
    }
    for (name, text) in [("reason", verdict.reason), ("evaluationError", verdict.evaluation_error)] {
        if !text.is_empty() {
            status.set(name, text);
        }
    }
    status
}

/// The part of a field selector that authorizers use: exact matches.
fn parse_field_selector(selector: &Value) -> FieldSelector {
    let terms = selector.items("requirements").iter().filter_map(|term| match term.items("values") {
        [Value::String(value)] if term.text("operator") == "In" => {
            Some(format!("{}={}", term.text("key"), escape(value)))
        }
        _ => None,
    });
    let text = match selector.text("rawSelector") {
        "" => terms.collect::<Vec<_>>().join(","),
        raw => raw.to_owned(),
    };
    FieldSelector::parse(&text).unwrap_or_default()
}

fn evaluate_rules(server: &Server, user: &User, spec: &Value) -> Result<Value, Status> {
    let namespace = spec.text("namespace");
    if namespace.is_empty() {
        return Err(Status::bad_request("no namespace on request"));
    }
    let resolved = server.rbac.resolve_rules(user, namespace);
    let (mut resources, mut paths) = (Vec::new(), Vec::new());
    for rule in &resolved.rules {
        if !rule.resources.is_empty() {
            resources.push(PolicyRule { urls: Vec::new(), ..rule.clone() }.to_value());
        }
        if !rule.urls.is_empty() {
            paths.push(json!({"verbs": rule.verbs, "nonResourceURLs": rule.urls}));
        }
    }
    // A node's permissions depend on its pods.
    let node = node_authorizer::node_name_of(user).is_some();
    let mut errors = resolved.errors;
    if node {
        errors.insert(0, "node authorizer does not support user rule resolution".to_owned());
    }
    let webhooks = server.rbac.chain().has_webhooks();
    if webhooks {
        errors.push("webhook authorizer does not support user rule resolution".to_owned());
    }
    let mut status =
        json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": node || webhooks});
    if !errors.is_empty() {
        status.set("evaluationError", crate::rbac::aggregate_errors(&errors));
    }
    Ok(status)
}

/// The deprecated ComponentStatus API. All components run in this process, so they are always
/// healthy.
async fn component_statuses(call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    if !matches!(call.method.as_str(), "GET" | "HEAD") {
        return Err(method_not_allowed());
    }
    let component = |name: &str| {
        json!({
            "metadata": {"name": name, "creationTimestamp": null},
            "conditions": [{"type": "Healthy", "status": "True", "message": "ok"}],
        })
    };
    let all = ["controller-manager", "etcd-0", "scheduler"];
    let renderer = call.renderer(target)?;
    let warning = vec!["v1 ComponentStatus is deprecated in v1.19+".to_owned()];
    if target.name.is_empty() {
        let items: Vec<Value> = all.iter().map(|name| component(name)).collect();
        let objects = items.into_iter().map(|mut value| {
            codec::set_type_meta(&mut value, "", "v1", "ComponentStatus");
            let key = format!("/registry/componentstatuses/{}", value.at("metadata").text("name"));
            crate::object::Object::new(key.into(), crate::object::to_stored(value), 1)
                .map(std::sync::Arc::new)
        });
        let objects = objects.collect::<Result<Vec<_>, _>>().map_err(Status::internal)?;
        let list = renderer.list(objects, &crate::render::ListMeta::default()).await;
        return Ok(crate::write::with_warnings(list, &warning));
    }
    if !all.contains(&target.name.as_str()) {
        return Err(target.not_found());
    }
    let mut value = component(&target.name);
    codec::set_type_meta(&mut value, "", "v1", "ComponentStatus");
    Ok(crate::write::with_warnings(renderer.value(StatusCode::OK, value), &warning))
}

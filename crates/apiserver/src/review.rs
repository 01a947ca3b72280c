//! Kinds that are asked and answered, never stored.

use api::json::Json as _;
use api::{Errors, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::access::{Asks, User, authorize};
use crate::body::Body;
use crate::codec;
use crate::create::invalid;
use crate::render::encoded;
use crate::request::Target;
use crate::server::{Call, Server, method_not_allowed};
use crate::write::WriteOptions;

pub async fn answer(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let row = target.resource;
    if row.plural == "componentstatuses" {
        return components(call, target).await;
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
    let mut errors = Errors::default();
    row.rules.validate(&review, &mut errors);
    invalid(row, "", &errors)?;
    review["status"] = match row.plural {
        "selfsubjectreviews" => json!({"userInfo": {"username": call.user.name, "groups": call.user.groups}}),
        "tokenreviews" => json!({"user": {}, "error": "this server knows no tokens"}),
        "selfsubjectrulesreviews" => rules(&call.user),
        "selfsubjectaccessreviews" => access(server, &call.user, review.at("spec")),
        _ => access(server, &subject(review.at("spec")), review.at("spec")),
    };
    review.object_mut("metadata").insert("creationTimestamp".into(), Value::Null);
    Ok(encoded(StatusCode::CREATED, &call.format, review))
}

fn subject(spec: &Value) -> User {
    let groups = spec.items("groups").iter().filter_map(Value::as_str).map(str::to_owned).collect();
    User { name: spec.text("user").to_owned(), groups, ..User::default() }
}

fn access(server: &Server, user: &User, spec: &Value) -> Value {
    let attributes = spec.at("resourceAttributes");
    let may = if attributes.is_object() {
        let row =
            server.registry.rows().iter().find(|row| {
                row.group == attributes.text("group") && row.plural == attributes.text("resource")
            });
        // Asked about a kind nobody serves, only those who may do everything may.
        match row {
            Some(row) => {
                authorize(user, &Asks::Resource("", &Target::collection(row, attributes.text("namespace"))))
            }
            None => authorize(user, &Asks::Path("", "")),
        }
    } else {
        let path = spec.at("nonResourceAttributes");
        let verb = path.text("verb").to_ascii_uppercase();
        authorize(user, &Asks::Path(&verb, path.text("path")))
    };
    json!({"allowed": may.is_ok()})
}

fn rules(user: &User) -> Value {
    let everything = user.groups.iter().any(|group| group == "system:masters");
    let resource_rules = if everything {
        json!([{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}])
    } else {
        json!([])
    };
    let mut paths =
        vec![json!({"verbs": ["get"], "nonResourceURLs": ["/healthz", "/livez", "/readyz", "/version"]})];
    if everything {
        paths.push(json!({"verbs": ["*"], "nonResourceURLs": ["*"]}));
    }
    json!({"resourceRules": resource_rules, "nonResourceRules": paths, "incomplete": false})
}

/// The old health listing. Deprecated upstream; everything here lives and dies with this process.
async fn components(call: &Call, target: &Target) -> Result<Response<Body>, Status> {
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

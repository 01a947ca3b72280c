//! What a few kinds need from the request, or ask of a subresource, beyond the rules in `api`.

use api::certificates::certificate_signing_request;
use api::json::Json as _;
use api::{Errors, Resource};
use serde_json::{Map, Value};

use crate::server::Call;

/// Fills in what only the request knows.
pub fn before_create(stored: &Resource, value: &mut Value, call: Option<&Call>) {
    if (stored.group, stored.plural) == ("certificates.k8s.io", "certificatesigningrequests")
        && let Some(call) = call
    {
        // Who asks for a certificate is not for them to say; `prepare_create` has not run yet, which drops
        // what the client said, so it is dropped here.
        let spec = value.object_mut("spec");
        ["username", "groups", "uid", "extra"].iter().for_each(|name| drop(spec.remove(*name)));
        certificate_signing_request::set_requester(
            value,
            &call.user.name,
            "",
            &call.user.groups,
            &Map::new(),
        );
    }
}

/// The rules of changes through a subresource other than status.
pub fn validate_subresource(
    stored: &Resource,
    subresource: &str,
    new: &Value,
    old: &Value,
    errors: &mut Errors,
) {
    match (stored.plural, subresource) {
        ("pods", "ephemeralcontainers") => {
            api::core::pod::validate_ephemeral_containers_update(new, old, errors)
        }
        ("pods", "resize") => api::core::pod::validate_resize(new, old, errors),
        ("certificatesigningrequests", "approval") => {
            certificate_signing_request::validate_approval(new, old, errors);
        }
        // Bindings and namespace finalizers are checked where they are merged.
        _ => {}
    }
}

//! The `authorizer` variable of CEL expressions in admission.

use api::selector::FieldSelector;
use cel::{AuthorizationAttributes, Authorizer, Decision};
use futures_util::FutureExt as _;
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::access::User;
use crate::rbac::Attributes;
use crate::server::Server;

/// Authorizes for the user of the request, or for the service account that the expression names.
pub struct CelAuthorizer<'a> {
    pub server: &'a Server,
    pub user: &'a User,
}

impl Authorizer for CelAuthorizer<'_> {
    fn authorize(&self, question: &AuthorizationAttributes) -> Decision {
        let account = question.service_account.as_ref().map(|(namespace, name)| User {
            name: format!("system:serviceaccount:{namespace}:{name}"),
            groups: vec![
                "system:serviceaccounts".to_owned(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".to_owned(),
            ],
            ..User::default()
        });
        let user = account.as_ref().unwrap_or(self.user);
        let fields = FieldSelector::parse(&question.field_selector).unwrap_or_default();
        let attributes = match &question.path {
            Some(path) => Attributes::Path { verb: &question.verb, path },
            None => Attributes::Resource {
                verb: &question.verb,
                group: &question.group,
                resource: &question.resource,
                subresource: &question.subresource,
                namespace: &question.namespace,
                name: &question.name,
                fields: Some(&fields),
            },
        };
        let rbac = &self.server.rbac;
        // Only a webhook authorizer is not ready at once. CEL evaluation is synchronous, so wait in
        // place; the multi-threaded runtime moves its other tasks to another thread.
        let verdict = match rbac.evaluate(user, &attributes).now_or_never() {
            Some(verdict) => verdict,
            None if Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread => {
                tokio::task::block_in_place(|| Handle::current().block_on(rbac.evaluate(user, &attributes)))
            }
            None => {
                let error = Some("cannot wait for the authorizer in a single-threaded runtime".to_owned());
                return Decision { error, ..Decision::default() };
            }
        };
        Decision {
            allowed: verdict.allowed,
            reason: verdict.reason,
            error: Some(verdict.evaluation_error).filter(|evaluation_error| !evaluation_error.is_empty()),
        }
    }
}

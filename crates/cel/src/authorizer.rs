//! Authorization checks that are built step by step in an expression:
//! `authorizer.group('apps').resource('deployments').namespace('x').check('create').allowed()`.

use std::sync::Arc;

/// Makes authorization decisions for the user that the expression is evaluated for.
pub trait Authorizer: Sync {
    /// Whether the user, or the service account in `attributes`, is allowed to do this.
    fn authorize(&self, attributes: &AuthorizationAttributes) -> Decision;
}

/// The attributes of an authorization check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuthorizationAttributes {
    /// Namespace and name of the service account to check instead of the user.
    pub service_account: Option<(String, String)>,
    /// The verb.
    pub verb: String,
    /// The path of a non-resource request. The fields below are for resource requests.
    pub path: Option<String>,
    /// The API group.
    pub group: String,
    /// The resource's plural name.
    pub resource: String,
    /// The subresource, if any.
    pub subresource: String,
    /// The namespace, if any.
    pub namespace: String,
    /// The object's name, if any.
    pub name: String,
    /// A field selector, if any.
    pub field_selector: String,
    /// A label selector, if any.
    pub label_selector: String,
}

/// An authorization decision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decision {
    /// Whether it is allowed.
    pub allowed: bool,
    /// The reason from the authorizer, or empty.
    pub reason: String,
    /// The error from the authorizer, if any.
    pub error: Option<String>,
}

/// An authorization check that is being built.
pub struct AuthorizerCheck<'a> {
    pub(crate) stage: Stage,
    pub(crate) authorizer: &'a dyn Authorizer,
    pub(crate) attributes: AuthorizationAttributes,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Stage {
    Authorizer,
    Path,
    Group,
    Resource,
    Decision(Decision),
}

impl<'a> AuthorizerCheck<'a> {
    /// The value of the variable `authorizer`.
    pub fn new(authorizer: &'a dyn Authorizer) -> Arc<AuthorizerCheck<'a>> {
        Arc::new(AuthorizerCheck {
            stage: Stage::Authorizer,
            authorizer,
            attributes: AuthorizationAttributes::default(),
        })
    }

    /// The value of the variable `authorizer.requestResource`, to which only the verb must be added.
    pub fn for_resource(
        authorizer: &'a dyn Authorizer,
        attributes: AuthorizationAttributes,
    ) -> Arc<AuthorizerCheck<'a>> {
        Arc::new(AuthorizerCheck { stage: Stage::Resource, authorizer, attributes })
    }

    pub(crate) fn type_name(&self) -> &'static str {
        match self.stage {
            Stage::Authorizer => "kubernetes.authorization.Authorizer",
            Stage::Path => "kubernetes.authorization.PathCheck",
            Stage::Group => "kubernetes.authorization.GroupCheck",
            Stage::Resource => "kubernetes.authorization.ResourceCheck",
            Stage::Decision(_) => "kubernetes.authorization.Decision",
        }
    }

    pub(crate) fn next(
        &self,
        stage: Stage,
        change: impl FnOnce(&mut AuthorizationAttributes),
    ) -> Arc<AuthorizerCheck<'a>> {
        let mut attributes = self.attributes.clone();
        change(&mut attributes);
        Arc::new(AuthorizerCheck { stage, authorizer: self.authorizer, attributes })
    }
}

//! Questions to the authorizer, built step by step as expressions do:
//! `authorizer.group('apps').resource('deployments').namespace('x').check('create').allowed()`.

use std::sync::Arc;

/// Who answers. An implementation knows the user the expression is evaluated for.
pub trait Authorizer: Sync {
    /// Whether the user (or the service account asked for instead) may.
    fn authorize(&self, attributes: &AuthorizationAttributes) -> Decision;
}

/// What is asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuthorizationAttributes {
    /// Namespace and name of a service account to ask for instead of the user.
    pub service_account: Option<(String, String)>,
    /// The verb.
    pub verb: String,
    /// For questions about paths; all that follows is for questions about resources.
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

/// The answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decision {
    /// Whether it is allowed.
    pub allowed: bool,
    /// Why, if the authorizer said.
    pub reason: String,
    /// What went wrong, if anything.
    pub error: Option<String>,
}

/// How far a question has been built.
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

    /// The value of the variable `authorizer.requestResource`: a question that is only missing its verb.
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

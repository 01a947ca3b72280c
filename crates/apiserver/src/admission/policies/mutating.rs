//! MutatingAdmissionPolicy.

use std::collections::HashSet;
use std::time::Instant;

use api::json::JsonExt as _;
use api::status::{StatusCause, StatusDetails};
use api::{Resource, Status};
use cel::{Budget, RUNTIME_BUDGET};
use serde_json::Value;

use super::activation::{PolicyActivation, VersionedRequest};
use super::authorizer::CelAuthorizer;
use super::config::{Binding, Policy};
use super::metrics::{COMPILE_ERROR, INVALID_ERROR, NO_ERROR};
use super::validating::match_conditions_hold;
use super::{MUTATING, Policies, PolicyFailure, PolicyHook, matching, params, patches};
use crate::admission::webhooks::{from_versioned, kind_of};
use crate::admission::{Operation, Request};
use crate::codec;
use crate::server::Server;

/// Reinvocation of mutating policies (upstream: `policyReinvokeContext`). A policy that ran in the
/// first round runs again in the second if the object has changed since and its
/// `reinvocationPolicy` is `IfNeeded`.
#[derive(Default)]
pub struct PolicyReinvokeContext {
    is_reinvoke: bool,
    changed: bool,
    /// The object after the policies of the first round.
    last_output: Value,
    previously_invoked: HashSet<String>,
    reinvoke_policies: HashSet<String>,
}

impl PolicyReinvokeContext {
    /// Whether a policy mutated the object, which requires a second round.
    pub fn changed(&self) -> bool {
        self.changed
    }

    /// Starts the second round.
    pub fn start_reinvocation(&mut self) {
        self.is_reinvoke = true;
    }

    fn require_reinvocation(&mut self) {
        self.reinvoke_policies.extend(self.previously_invoked.drain());
    }
}

/// A policy to apply, with one binding and one params object.
struct PolicyInvocation<'a> {
    policy: &'a Policy,
    binding: &'a Binding,
    row: &'static Resource,
    params: Value,
}

impl Policies {
    pub fn mutate(
        &self,
        server: &Server,
        request: &Request<'_>,
        object: &mut Value,
        reinvocation: &mut PolicyReinvokeContext,
    ) -> Result<(), Status> {
        let hooks = self.hooks(MUTATING, request);
        if hooks.is_empty() || matches!(request.operation, Operation::Delete | Operation::Connect) {
            return Ok(());
        }
        if reinvocation.is_reinvoke && *object != reinvocation.last_output {
            reinvocation.require_reinvocation();
        }
        let mut failures = Vec::new();
        // Collect all invocations before the first mutation, so that it does not change which
        // policies match.
        let mut invocations = Vec::new();
        for hook in hooks.iter() {
            collect_invocations(server, hook, request, object, &mut invocations, &mut failures);
        }
        for invocation in &invocations {
            invoke(server, invocation, request, object, reinvocation, &mut failures)?;
        }
        if reinvocation.changed {
            // As upstream: a policy is reinvoked for its own changes, too.
            reinvocation.require_reinvocation();
        }
        reinvocation.last_output = object.clone();
        deny_request(request, failures)
    }
}

fn collect_invocations<'a>(
    server: &Server,
    hook: &'a PolicyHook,
    request: &Request<'_>,
    object: &Value,
    invocations: &mut Vec<PolicyInvocation<'a>>,
    failures: &mut Vec<PolicyFailure>,
) {
    let policy = &hook.policy;
    let mut record_failure = |binding: Option<&Binding>, reason: &str| {
        if !policy.fails_open {
            failures.push(PolicyFailure::configuration_failure(policy, binding, reason));
        }
    };
    let Some(match_resources) = &policy.match_resources else {
        return record_failure(None, "policy contained no match constraints, a required field");
    };
    let row = match matching::matched(server, match_resources, request, object) {
        Ok(Some(row)) => row,
        Ok(None) => return,
        Err(reason) => return record_failure(None, &reason),
    };
    for binding in &hook.bindings {
        let found = params::matching_params(server, policy, binding, request, object);
        match found {
            Ok(found) => invocations.extend(found.into_iter().map(|params| PolicyInvocation {
                policy,
                binding,
                row,
                params,
            })),
            Err(reason) => record_failure(Some(binding), &reason),
        }
    }
}

fn invoke(
    server: &Server,
    invocation: &PolicyInvocation<'_>,
    request: &Request<'_>,
    object: &mut Value,
    reinvocation: &mut PolicyReinvokeContext,
    failures: &mut Vec<PolicyFailure>,
) -> Result<(), Status> {
    let PolicyInvocation { policy, binding, row, params } = invocation;
    let Some(user) = request.user else { return Ok(()) };
    let authorizer = CelAuthorizer { server, user };
    let mut record_failure = |message: String| {
        if !policy.fails_open {
            failures.push(PolicyFailure {
                policy: policy.name.clone(),
                binding: Some(binding.name.clone()),
                message,
                reason: Some("Invalid"),
            });
        }
    };
    let metadata = params.at("metadata");
    let key = [&policy.name, &binding.name, metadata.text("namespace"), metadata.text("name")].join("/");
    let mut versioned_request = VersionedRequest::new(server, request, row, object)?;
    match match_conditions_hold(
        policy,
        &PolicyActivation::new(policy, &versioned_request, params, &authorizer),
    ) {
        Ok(true) => {}
        Ok(false) => return Ok(()),
        Err(reason) => {
            record_failure(reason);
            return Ok(());
        }
    }
    if reinvocation.is_reinvoke && !reinvocation.reinvoke_policies.contains(&key) {
        return Ok(());
    }
    let started = Instant::now();
    let mut error = NO_ERROR;
    for index in 0..policy.mutations.len() {
        if versioned_request.object.is_null() {
            break;
        }
        match apply_mutation(policy, index, &versioned_request, params, &authorizer, request, row) {
            Ok(new_object) => {
                reinvocation.changed = true;
                if new_object != versioned_request.object {
                    *object = from_versioned(request, row, object, new_object)?;
                    versioned_request = VersionedRequest::new(server, request, row, object)?;
                }
            }
            Err(reason) => {
                error =
                    if policy.mutations[index].expression.is_err() { COMPILE_ERROR } else { INVALID_ERROR };
                record_failure(reason);
            }
        }
    }
    let action = if error == NO_ERROR { "allow" } else { "deny" };
    server.policies.metrics.observe(MUTATING, (policy, binding), started.elapsed(), (error, action));
    if policy.reinvoke {
        reinvocation.previously_invoked.insert(key);
    }
    Ok(())
}

/// The object, in the version of the policy, after one mutation.
fn apply_mutation(
    policy: &Policy,
    index: usize,
    versioned_request: &VersionedRequest,
    params: &Value,
    authorizer: &CelAuthorizer<'_>,
    request: &Request<'_>,
    row: &'static Resource,
) -> Result<Value, String> {
    let mutation = &policy.mutations[index];
    if let Err(error) = &mutation.expression {
        return Err(error.clone());
    }
    let activation = PolicyActivation::new(policy, versioned_request, params, authorizer);
    let value = activation
        .evaluate(&mutation.expression, &mut Budget::new(RUNTIME_BUDGET))
        .map_err(|evaluation_error| evaluation_error.message())?;
    if mutation.is_patch {
        return patches::apply_json_patch(&versioned_request.object, &value);
    }
    let (group, version, kind) = kind_of(row, request.subresource);
    let applied = match row.custom.is_some() && kind == row.kind {
        true => codec::with_type(row, |table, ty| {
            patches::apply_configuration(&versioned_request.object, &value, (table, ty))
        }),
        false => codec::type_of(group, version, kind).map(|ty| {
            patches::apply_configuration(&versioned_request.object, &value, (schema::kubernetes(), ty))
        }),
    };
    applied.map_err(|status| status.message)?
}

/// The Status for the first failure.
fn deny_request(request: &Request<'_>, failures: Vec<PolicyFailure>) -> Result<(), Status> {
    let message = |failure: &PolicyFailure| match &failure.binding {
        Some(binding) => {
            format!(
                "policy '{}' with binding '{binding}' denied request: {}",
                failure.policy, failure.message
            )
        }
        None => format!("policy {:?} denied request: {}", failure.policy, failure.message),
    };
    let Some(first) = failures.first() else { return Ok(()) };
    let mut status = request.forbidden("admission request denied by policy");
    status.message = message(first);
    if let Some(reason) = first.reason {
        status.reason = reason.into();
    }
    let details = status.details.get_or_insert_with(StatusDetails::default);
    details.causes.extend(
        failures.iter().map(|failure| StatusCause { message: message(failure), ..StatusCause::default() }),
    );
    Err(status)
}

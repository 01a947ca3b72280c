//! Policies that may change a request.

use std::collections::HashSet;
use std::time::Instant;

use api::json::Json as _;
use api::status::{Cause, Details};
use api::{Resource, Status};
use cel::{Budget, RUNTIME_BUDGET};
use serde_json::Value;

use super::asking::Asking;
use super::config::{Binding, Policy};
use super::subject::{Sight, Subject};
use super::tally::{COMPILE_ERROR, INVALID_ERROR, NO_ERROR};
use super::validating::holds;
use super::{Hook, MUTATING, Policies, Problem, matching, params, patches};
use crate::admission::webhooks::{kind_of, taken};
use crate::admission::{Operation, Request};
use crate::codec;
use crate::server::Server;

/// The two rounds in which a request may be changed: whoever changes it in the first gives those before, if
/// they want, another look in the second.
#[derive(Default)]
pub struct Rounds {
    second: bool,
    changed: bool,
    /// What policies made of the object in the first round.
    made: Value,
    asked: HashSet<String>,
    again: HashSet<String>,
}

impl Rounds {
    /// Whether a mutation was made, which calls for a second round.
    pub fn changed(&self) -> bool {
        self.changed
    }

    /// The second round begins.
    pub fn ask_again(&mut self) {
        self.second = true;
    }

    fn give_another_look(&mut self) {
        self.again.extend(self.asked.drain());
    }
}

/// A policy that is to be applied, with a binding and its parameters.
struct Invocation<'a> {
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
        rounds: &mut Rounds,
    ) -> Result<(), Status> {
        let hooks = self.hooks(MUTATING, request);
        if hooks.is_empty() || matches!(request.operation, Operation::Delete | Operation::Connect) {
            return Ok(());
        }
        if rounds.second && *object != rounds.made {
            rounds.give_another_look();
        }
        let mut problems = Vec::new();
        // Which policies are concerned is settled before the first of them changes anything.
        let mut invocations = Vec::new();
        for hook in hooks.iter() {
            gather(server, hook, request, object, &mut invocations, &mut problems);
        }
        for invocation in &invocations {
            invoke(server, invocation, request, object, rounds, &mut problems)?;
        }
        if rounds.changed {
            // Whoever wants another look gets one, also at what it has changed itself.
            rounds.give_another_look();
        }
        rounds.made = object.clone();
        refused(request, problems)
    }
}

fn gather<'a>(
    server: &Server,
    hook: &'a Hook,
    request: &Request<'_>,
    object: &Value,
    invocations: &mut Vec<Invocation<'a>>,
    problems: &mut Vec<Problem>,
) {
    let policy = &hook.policy;
    let mut wrong = |binding: Option<&Binding>, why: &str| {
        if !policy.fails_open {
            problems.push(Problem::configuring(policy, binding, why));
        }
    };
    let Some(scope) = &policy.scope else {
        return wrong(None, "policy contained no match constraints, a required field");
    };
    let row = match matching::matched(server, scope, request, object) {
        Ok(Some(row)) => row,
        Ok(None) => return,
        Err(why) => return wrong(None, &why),
    };
    for binding in &hook.bindings {
        let found = params::concerned(server, policy, binding, request, object);
        match found {
            Ok(found) => invocations.extend(found.into_iter().map(|params| Invocation {
                policy,
                binding,
                row,
                params,
            })),
            Err(why) => wrong(Some(binding), &why),
        }
    }
}

fn invoke(
    server: &Server,
    invocation: &Invocation<'_>,
    request: &Request<'_>,
    object: &mut Value,
    rounds: &mut Rounds,
    problems: &mut Vec<Problem>,
) -> Result<(), Status> {
    let Invocation { policy, binding, row, params } = invocation;
    let Some(user) = request.user else { return Ok(()) };
    let asking = Asking { server, user };
    let mut wrong = |message: String| {
        if !policy.fails_open {
            problems.push(Problem {
                policy: policy.name.clone(),
                binding: Some(binding.name.clone()),
                message,
                reason: Some("Invalid"),
            });
        }
    };
    let metadata = params.at("metadata");
    let key = [&policy.name, &binding.name, metadata.text("namespace"), metadata.text("name")].join("/");
    let mut subject = Subject::new(server, request, row, object)?;
    match holds(policy, &Sight::new(policy, &subject, params, &asking)) {
        Ok(true) => {}
        Ok(false) => return Ok(()),
        Err(why) => {
            wrong(why);
            return Ok(());
        }
    }
    if rounds.second && !rounds.again.contains(&key) {
        return Ok(());
    }
    let begun = Instant::now();
    let mut error = NO_ERROR;
    for index in 0..policy.mutations.len() {
        if subject.object.is_null() {
            break;
        }
        match mutated(policy, index, &subject, params, &asking, request, row) {
            Ok(made) => {
                rounds.changed = true;
                if made != subject.object {
                    *object = taken(request, row, object, made)?;
                    subject = Subject::new(server, request, row, object)?;
                }
            }
            Err(why) => {
                error =
                    if policy.mutations[index].expression.is_err() { COMPILE_ERROR } else { INVALID_ERROR };
                wrong(why);
            }
        }
    }
    let action = if error == NO_ERROR { "allow" } else { "deny" };
    server.policies.tally.asked(MUTATING, (policy, binding), begun.elapsed(), (error, action));
    if policy.reinvoke {
        rounds.asked.insert(key);
    }
    Ok(())
}

/// The object, as the policy sees it, after one of its mutations.
fn mutated(
    policy: &Policy,
    index: usize,
    subject: &Subject,
    params: &Value,
    asking: &Asking<'_>,
    request: &Request<'_>,
    row: &'static Resource,
) -> Result<Value, String> {
    let mutation = &policy.mutations[index];
    if let Err(error) = &mutation.expression {
        return Err(error.clone());
    }
    let sight = Sight::new(policy, subject, params, asking);
    let value =
        sight.see(&mutation.expression, &mut Budget::new(RUNTIME_BUDGET)).map_err(|blind| blind.message())?;
    if mutation.is_patch {
        return patches::patched(&subject.object, &value);
    }
    let (group, version, kind) = kind_of(row, request.subresource);
    let applied = match row.custom.is_some() && kind == row.kind {
        true => codec::with_type(row, |table, ty| patches::applied(&subject.object, &value, (table, ty))),
        false => codec::type_of(group, version, kind)
            .map(|ty| patches::applied(&subject.object, &value, (schema::kubernetes(), ty))),
    };
    applied.map_err(|status| status.message)?
}

/// The answer where something went wrong.
fn refused(request: &Request<'_>, problems: Vec<Problem>) -> Result<(), Status> {
    let message = |problem: &Problem| match &problem.binding {
        Some(binding) => {
            format!(
                "policy '{}' with binding '{binding}' denied request: {}",
                problem.policy, problem.message
            )
        }
        None => format!("policy {:?} denied request: {}", problem.policy, problem.message),
    };
    let Some(first) = problems.first() else { return Ok(()) };
    let mut status = request.forbidden("admission request denied by policy");
    status.message = message(first);
    if let Some(reason) = first.reason {
        status.reason = reason.into();
    }
    let details = status.details.get_or_insert_with(Details::default);
    details
        .causes
        .extend(problems.iter().map(|problem| Cause { message: message(problem), ..Cause::default() }));
    Err(status)
}

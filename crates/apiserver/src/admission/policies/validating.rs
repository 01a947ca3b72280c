//! Policies that may refuse a request, or only say what they think of it.

use std::collections::BTreeMap;

use api::status::{Cause, Details};
use api::{Resource, Status};
use cel::{Budget, MATCH_CONDITIONS_BUDGET, RUNTIME_BUDGET};
use serde_json::{Value, json};

use super::asking::Asking;
use super::config::{Binding, Policy, Validation};
use super::subject::{Blind, OUT_OF_BUDGET, Sight, Subject};
use super::{Hook, Policies, Problem, VALIDATING, matching, params};
use crate::admission::Request;
use crate::server::Server;

const FAILURE: &str = "validation.policy.admission.k8s.io/validation_failure";
const LONGEST_ANNOTATION: usize = 10 * 1024;
const LONGEST_MESSAGE: usize = 5 * 1024;

/// What one of a policy's expressions makes of a request.
struct Denial {
    message: String,
    reason: &'static str,
    index: usize,
}

/// What a policy makes of a request with one set of parameters.
#[derive(Default)]
struct Judgement {
    denials: Vec<Denial>,
    annotations: Vec<(String, String)>,
    /// Of annotations; whatever the binding wants, these deny.
    failures: Vec<String>,
}

/// The request in the versions policies want to see it in, each made once.
type Subjects = Vec<(&'static Resource, Subject)>;

/// The first thing that speaks against a request decides what the answer is.
#[derive(Default)]
struct Verdict {
    first: Option<Status>,
}

impl Policies {
    pub fn validate(&self, server: &Server, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        let hooks = self.hooks(VALIDATING, request);
        let mut verdict = Verdict::default();
        let mut subjects = Subjects::new();
        for hook in hooks.iter() {
            judge(server, hook, request, object, &mut subjects, &mut verdict)?;
        }
        verdict.first.map_or(Ok(()), Err)
    }
}

fn judge(
    server: &Server,
    hook: &Hook,
    request: &Request<'_>,
    object: &Value,
    subjects: &mut Subjects,
    verdict: &mut Verdict,
) -> Result<(), Status> {
    let policy = &hook.policy;
    let wrong = |verdict: &mut Verdict, binding: Option<&Binding>, why: &str| {
        if !policy.fails_open {
            verdict.problem(request, Problem::configuring(policy, binding, why));
        }
    };
    let Some(scope) = &policy.scope else {
        wrong(verdict, None, "policy contained no match constraints, a required field");
        return Ok(());
    };
    let row = match matching::matched(server, scope, request, object) {
        Ok(Some(row)) => row,
        Ok(None) => return Ok(()),
        Err(why) => {
            wrong(verdict, None, &why);
            return Ok(());
        }
    };
    let mut annotations: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for binding in &hook.bindings {
        let concerned = match &binding.scope {
            Some(scope) => matching::matched(server, scope, request, object).map(|row| row.is_some()),
            None => Ok(true),
        };
        let found = concerned.and_then(|concerned| match concerned {
            true => params::params(server, policy, binding, request),
            false => Ok(Vec::new()),
        });
        let found = match found {
            Ok(found) => found,
            Err(why) => {
                wrong(verdict, Some(binding), &why);
                continue;
            }
        };
        for params in &found {
            let Some(user) = request.user else { continue };
            let known = subjects.iter().position(|(known, _)| std::ptr::eq(*known, row));
            let index = match known {
                Some(index) => index,
                None => {
                    subjects.push((row, Subject::new(server, request, row, object)?));
                    subjects.len() - 1
                }
            };
            let subject = &subjects[index].1;
            let asking = Asking { server, user };
            let judgement = evaluated(policy, subject, params, &asking);
            act(policy, binding, judgement, request, &mut annotations, verdict);
        }
    }
    for (key, values) in annotations {
        request.annotate(format!("{}/{key}", policy.name), values.join(", "));
    }
    Ok(())
}

/// Does what the binding wants done about a judgement.
fn act(
    policy: &Policy,
    binding: &Binding,
    judgement: Judgement,
    request: &Request<'_>,
    annotations: &mut BTreeMap<String, Vec<String>>,
    verdict: &mut Verdict,
) {
    for denial in judgement.denials {
        for action in &binding.actions {
            match action.as_str() {
                "Deny" => verdict.deny(request, policy, binding, &denial.message, denial.reason),
                "Warn" => request.warn(format!(
                    "Validation failed for ValidatingAdmissionPolicy '{}' with binding '{}': {}",
                    policy.name, binding.name, denial.message
                )),
                "Audit" => {
                    let failure = json!([{
                        "message": denial.message, "policy": policy.name, "binding": binding.name,
                        "expressionIndex": denial.index, "validationActions": binding.actions,
                    }]);
                    request.annotate(FAILURE.to_owned(), failure.to_string());
                }
                _ => {}
            }
        }
    }
    for (key, value) in judgement.annotations {
        let values = annotations.entry(key).or_default();
        if !values.contains(&value) {
            values.push(value);
        }
    }
    for message in judgement.failures {
        verdict.deny(request, policy, binding, &message, "Invalid");
    }
}

fn evaluated(policy: &Policy, subject: &Subject, params: &Value, asking: &Asking<'_>) -> Judgement {
    let sight = Sight::new(policy, subject, params, asking);
    match holds(policy, &sight) {
        Ok(true) => {}
        Ok(false) => return Judgement::default(),
        Err(why) => return Judgement { denials: failed(policy, why, 0), ..Judgement::default() },
    }
    let mut judgement = Judgement::default();
    let mut budget = Budget::new(RUNTIME_BUDGET);
    for (index, validation) in policy.validations.iter().enumerate() {
        match sight.see(&validation.expression, &mut budget) {
            Ok(value) if value.as_bool() == Some(true) => {}
            Ok(_) => {
                let (message, spent) = message(validation, &sight, &mut budget);
                match spent {
                    true => {
                        let why = format!("failed messageExpression: {OUT_OF_BUDGET}");
                        judgement.denials.extend(failed(policy, why, index));
                    }
                    false => judgement.denials.push(Denial { message, reason: reason(validation), index }),
                }
            }
            Err(Blind::Spent) => {
                let denials = failed(policy, OUT_OF_BUDGET.to_owned(), 0);
                return Judgement { denials, ..Judgement::default() };
            }
            Err(blind) => judgement.denials.extend(failed(policy, blind.message(), index)),
        }
    }
    annotate(policy, &sight, &mut judgement);
    judgement
}

/// What an expression that cannot be evaluated means.
fn failed(policy: &Policy, message: String, index: usize) -> Vec<Denial> {
    match policy.fails_open {
        true => Vec::new(),
        false => vec![Denial { message, reason: "Invalid", index }],
    }
}

/// Whether all of the policy's conditions hold: one that does not is enough, whatever is wrong with the others.
pub(super) fn holds<'a>(policy: &'a Policy, sight: &Sight<'a>) -> Result<bool, String> {
    let mut budget = Budget::new(MATCH_CONDITIONS_BUDGET);
    let mut problems = Vec::new();
    for condition in &policy.conditions {
        match evaluate_condition(condition, sight, &mut budget) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(Blind::Spent) => {
                problems = vec![OUT_OF_BUDGET.to_owned()];
                break;
            }
            Err(blind) => problems.push(blind.message()),
        }
    }
    match problems.as_slice() {
        [] => Ok(true),
        _ if policy.fails_open => Ok(false),
        problems => Err(crate::rbac::together(problems)),
    }
}

fn evaluate_condition<'a>(
    condition: &'a super::config::Expression,
    sight: &Sight<'a>,
    budget: &mut Budget,
) -> Result<bool, Blind> {
    sight.see(condition, budget).map(|value| value.as_bool() != Some(false))
}

fn reason(validation: &Validation) -> &'static str {
    match validation.reason.as_str() {
        "Forbidden" => "Forbidden",
        "Unauthorized" => "Unauthorized",
        "RequestEntityTooLarge" => "RequestEntityTooLarge",
        _ => "Invalid",
    }
}

/// What the client is told, and whether nothing can be worked out any more.
fn message<'a>(validation: &'a Validation, sight: &Sight<'a>, budget: &mut Budget) -> (String, bool) {
    let computed = validation.message_expression.as_ref().map(|expression| sight.see(expression, budget));
    if matches!(computed, Some(Err(Blind::Spent))) {
        return (String::new(), true);
    }
    let usable = |text: &str| !text.is_empty() && text.len() <= LONGEST_MESSAGE && !text.contains('\n');
    let computed = match &computed {
        Some(Ok(value)) => value.as_str().map(str::trim).filter(|text| usable(text)),
        _ => None,
    };
    let message = match (computed, validation.message.trim()) {
        (Some(text), _) => text.to_owned(),
        (None, "") => format!("failed expression: {}", validation.source.trim()),
        (None, text) => text.to_owned(),
    };
    (message, false)
}

fn annotate<'a>(policy: &'a Policy, sight: &Sight<'a>, judgement: &mut Judgement) {
    let mut budget = Budget::new(RUNTIME_BUDGET);
    for (key, expression) in &policy.annotations {
        match sight.see(expression, &mut budget) {
            Ok(value) => {
                let text = value.as_str().unwrap_or_default().trim();
                if !text.is_empty() {
                    let end = text.floor_char_boundary(LONGEST_ANNOTATION.min(text.len()));
                    judgement.annotations.push((key.clone(), text[..end].to_owned()));
                }
            }
            Err(blind) if !policy.fails_open => judgement.failures.push(blind.message()),
            Err(_) => {}
        }
    }
}

impl Verdict {
    fn problem(&mut self, request: &Request<'_>, problem: Problem) {
        let message = match &problem.binding {
            Some(binding) => format!(
                "ValidatingAdmissionPolicy '{}' with binding '{binding}' denied request: {}",
                problem.policy, problem.message
            ),
            None => {
                format!("ValidatingAdmissionPolicy '{}' denied request: {}", problem.policy, problem.message)
            }
        };
        let reason = problem.reason.unwrap_or("Invalid");
        let mut status = request.forbidden(&message);
        status.reason = reason.into();
        status.code = match reason {
            "Forbidden" => 403,
            "Unauthorized" => 401,
            "RequestEntityTooLarge" => 413,
            _ => 422,
        };
        let details = status.details.get_or_insert_with(Details::default);
        details.causes.push(Cause { message, ..Cause::default() });
        self.first.get_or_insert(status);
    }

    fn deny(
        &mut self,
        request: &Request<'_>,
        policy: &Policy,
        binding: &Binding,
        message: &str,
        reason: &'static str,
    ) {
        self.problem(
            request,
            Problem {
                policy: policy.name.clone(),
                binding: Some(binding.name.clone()),
                message: message.to_owned(),
                reason: Some(reason),
            },
        );
    }
}

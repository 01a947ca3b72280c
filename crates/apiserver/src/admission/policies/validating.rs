//! Policies that may refuse a request, or only say what they think of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use api::status::{Cause, Details};
use api::{Resource, Status};
use cel::{Budget, MATCH_CONDITIONS_BUDGET, RUNTIME_BUDGET};
use serde_json::{Value, json};

use super::asking::Asking;
use super::config::{Binding, Policy, Validation};
use super::subject::{Blind, OUT_OF_BUDGET, Sight, Subject};
use super::tally::{self, COMPILE_ERROR, INVALID_ERROR, NO_ERROR};
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
    counted: Counted,
}

/// What is counted of an evaluation: how long it took and what was wrong with it.
type Counted = (Duration, &'static str);

/// What a policy makes of a request with one set of parameters.
#[derive(Default)]
struct Judgement {
    denials: Vec<Denial>,
    annotations: Vec<(String, String)>,
    /// Of annotations; whatever the binding wants, these deny.
    failures: Vec<(String, Counted)>,
    /// What could not be evaluated, which does not matter to a policy that fails open.
    passed_over: Vec<Counted>,
}

impl Judgement {
    /// What an expression that cannot be evaluated means.
    fn failed(&mut self, policy: &Policy, message: String, index: usize, counted: Counted) {
        match policy.fails_open {
            true => self.passed_over.push(counted),
            false => self.denials.push(Denial { message, reason: "Invalid", index, counted }),
        }
    }
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
        let found = params::concerned(server, policy, binding, request, object);
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
            act((server, policy, binding), judgement, request, &mut annotations, verdict);
        }
    }
    for (key, values) in annotations {
        request.annotate(format!("{}/{key}", policy.name), values.join(", "));
    }
    Ok(())
}

/// Does what the binding wants done about a judgement.
fn act(
    (server, policy, binding): (&Server, &Policy, &Binding),
    judgement: Judgement,
    request: &Request<'_>,
    annotations: &mut BTreeMap<String, Vec<String>>,
    verdict: &mut Verdict,
) {
    let count = |(took, error): Counted, action: &str| {
        server.policies.tally.asked(VALIDATING, (policy, binding), took, (error, action));
    };
    judgement.passed_over.iter().for_each(|counted| count(*counted, "allow"));
    for denial in judgement.denials {
        for action in &binding.actions {
            count(denial.counted, &action.to_ascii_lowercase());
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
    for (message, counted) in judgement.failures {
        count(counted, "deny");
        verdict.deny(request, policy, binding, &message, "Invalid");
    }
}

fn evaluated(policy: &Policy, subject: &Subject, params: &Value, asking: &Asking<'_>) -> Judgement {
    let sight = Sight::new(policy, subject, params, asking);
    let mut judgement = Judgement::default();
    let begun = Instant::now();
    match holds(policy, &sight) {
        Ok(true) => {}
        Ok(false) => return judgement,
        Err(why) => {
            judgement.failed(policy, why, 0, (begun.elapsed(), INVALID_ERROR));
            return judgement;
        }
    }
    let mut budget = Budget::new(RUNTIME_BUDGET);
    for (index, validation) in policy.validations.iter().enumerate() {
        let begun = Instant::now();
        let seen = sight.see(&validation.expression, &mut budget);
        let took = begun.elapsed();
        match seen {
            Ok(value) if value.as_bool() == Some(true) => {}
            Ok(_) => {
                let (message, spent) = message(validation, &sight, &mut budget);
                match spent {
                    true => {
                        let why = format!("failed messageExpression: {OUT_OF_BUDGET}");
                        judgement.failed(policy, why, index, (took, tally::OUT_OF_BUDGET));
                    }
                    false => judgement.denials.push(Denial {
                        message,
                        reason: reason(validation),
                        index,
                        counted: (took, NO_ERROR),
                    }),
                }
            }
            Err(Blind::Spent) => {
                let mut spent = Judgement::default();
                spent.failed(policy, OUT_OF_BUDGET.to_owned(), 0, (took, tally::OUT_OF_BUDGET));
                return spent;
            }
            Err(blind) => {
                let error = if validation.expression.is_err() { COMPILE_ERROR } else { INVALID_ERROR };
                judgement.failed(policy, blind.message(), index, (took, error));
            }
        }
    }
    annotate(policy, &sight, &mut judgement);
    judgement
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
        let begun = Instant::now();
        match sight.see(expression, &mut budget) {
            Ok(value) => {
                let text = value.as_str().unwrap_or_default().trim();
                if !text.is_empty() {
                    let end = text.floor_char_boundary(LONGEST_ANNOTATION.min(text.len()));
                    judgement.annotations.push((key.clone(), text[..end].to_owned()));
                }
            }
            Err(blind) if !policy.fails_open => {
                judgement.failures.push((blind.message(), (begun.elapsed(), INVALID_ERROR)));
            }
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

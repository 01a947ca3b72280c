//! ValidatingAdmissionPolicy.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use api::status::{StatusCause, StatusDetails};
use api::{Resource, Status};
use cel::{Budget, MATCH_CONDITIONS_BUDGET, RUNTIME_BUDGET};
use serde_json::{Value, json};

use super::activation::{EvaluationError, OUT_OF_BUDGET, PolicyActivation, VersionedRequest};
use super::authorizer::CelAuthorizer;
use super::config::{Binding, Policy, Validation};
use super::metrics::{self, COMPILE_ERROR, INVALID_ERROR, NO_ERROR};
use super::{Policies, PolicyFailure, PolicyHook, VALIDATING, matching, params};
use crate::admission::Request;
use crate::server::Server;

const VALIDATION_FAILURE_ANNOTATION: &str = "validation.policy.admission.k8s.io/validation_failure";
const MAX_AUDIT_ANNOTATION_BYTES: usize = 10 * 1024;
const MAX_MESSAGE_BYTES: usize = 5 * 1024;

/// A validation that failed.
struct DenyDecision {
    message: String,
    reason: &'static str,
    index: usize,
    metric: EvaluationMetric,
}

/// Duration and `error_type` of an evaluation, for metrics.
type EvaluationMetric = (Duration, &'static str);

/// The result of one policy with one params object.
#[derive(Default)]
struct ValidateResult {
    denied: Vec<DenyDecision>,
    annotations: Vec<(String, String)>,
    /// Failed audit annotations. They deny the request whatever the actions of the binding are.
    failures: Vec<(String, EvaluationMetric)>,
    /// Evaluation errors that `failurePolicy: Ignore` ignores.
    ignored_failures: Vec<EvaluationMetric>,
}

impl ValidateResult {
    /// Records an evaluation error according to the failure policy.
    fn record_failure(&mut self, policy: &Policy, message: String, index: usize, metric: EvaluationMetric) {
        match policy.fails_open {
            true => self.ignored_failures.push(metric),
            false => self.denied.push(DenyDecision { message, reason: "Invalid", index, metric }),
        }
    }
}

/// The request in each version that policies use, converted once per version.
type VersionedRequests = Vec<(&'static Resource, VersionedRequest)>;

/// The response: as upstream, the first denial decides.
#[derive(Default)]
struct ValidationStatus {
    first: Option<Status>,
}

impl Policies {
    pub fn validate(&self, server: &Server, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        let hooks = self.hooks(VALIDATING, request);
        let mut validation_status = ValidationStatus::default();
        let mut versioned_requests = VersionedRequests::new();
        for hook in hooks.iter() {
            evaluate_hook(server, hook, request, object, &mut versioned_requests, &mut validation_status)?;
        }
        validation_status.first.map_or(Ok(()), Err)
    }
}

fn evaluate_hook(
    server: &Server,
    hook: &PolicyHook,
    request: &Request<'_>,
    object: &Value,
    versioned_requests: &mut VersionedRequests,
    validation_status: &mut ValidationStatus,
) -> Result<(), Status> {
    let policy = &hook.policy;
    let record_wrong =
        |validation_status: &mut ValidationStatus, binding: Option<&Binding>, error_message: &str| {
            if !policy.fails_open {
                validation_status.record_failure(
                    request,
                    PolicyFailure::configuration_failure(policy, binding, error_message),
                );
            }
        };
    let Some(match_resources) = &policy.match_resources else {
        record_wrong(validation_status, None, "policy contained no match constraints, a required field");
        return Ok(());
    };
    let row = match matching::matched(server, match_resources, request, object) {
        Ok(Some(row)) => row,
        Ok(None) => return Ok(()),
        Err(error_message) => {
            record_wrong(validation_status, None, &error_message);
            return Ok(());
        }
    };
    let mut annotations: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for binding in &hook.bindings {
        let found = params::matching_params(server, policy, binding, request, object);
        let found = match found {
            Ok(found) => found,
            Err(error_message) => {
                record_wrong(validation_status, Some(binding), &error_message);
                continue;
            }
        };
        for params in &found {
            let Some(user) = request.user else { continue };
            let known = versioned_requests.iter().position(|(known, _)| std::ptr::eq(*known, row));
            let index = match known {
                Some(index) => index,
                None => {
                    versioned_requests.push((row, VersionedRequest::new(server, request, row, object)?));
                    versioned_requests.len() - 1
                }
            };
            let versioned_request = &versioned_requests[index].1;
            let authorizer = CelAuthorizer { server, user };
            let result = evaluate_policy(policy, versioned_request, params, &authorizer);
            enforce_actions((server, policy, binding), result, request, &mut annotations, validation_status);
        }
    }
    for (key, values) in annotations {
        request.annotate(format!("{}/{key}", policy.name), values.join(", "));
    }
    Ok(())
}

/// Applies the `validationActions` of the binding to a result.
fn enforce_actions(
    (server, policy, binding): (&Server, &Policy, &Binding),
    result: ValidateResult,
    request: &Request<'_>,
    annotations: &mut BTreeMap<String, Vec<String>>,
    validation_status: &mut ValidationStatus,
) {
    let count = |(elapsed, error): EvaluationMetric, action: &str| {
        server.policies.metrics.observe(VALIDATING, (policy, binding), elapsed, (error, action));
    };
    result.ignored_failures.iter().for_each(|metric| count(*metric, "allow"));
    for decision in result.denied {
        for action in &binding.actions {
            count(decision.metric, &action.to_ascii_lowercase());
            match action.as_str() {
                "Deny" => {
                    validation_status.deny(request, policy, binding, &decision.message, decision.reason)
                }
                "Warn" => request.warn(format!(
                    "Validation failed for ValidatingAdmissionPolicy '{}' with binding '{}': {}",
                    policy.name, binding.name, decision.message
                )),
                "Audit" => {
                    let failure = json!([{
                        "message": decision.message, "policy": policy.name, "binding": binding.name,
                        "expressionIndex": decision.index, "validationActions": binding.actions,
                    }]);
                    request.annotate(VALIDATION_FAILURE_ANNOTATION.to_owned(), failure.to_string());
                }
                _ => {}
            }
        }
    }
    for (key, value) in result.annotations {
        let values = annotations.entry(key).or_default();
        if !values.contains(&value) {
            values.push(value);
        }
    }
    for (message, metric) in result.failures {
        count(metric, "deny");
        validation_status.deny(request, policy, binding, &message, "Invalid");
    }
}

fn evaluate_policy(
    policy: &Policy,
    versioned_request: &VersionedRequest,
    params: &Value,
    authorizer: &CelAuthorizer<'_>,
) -> ValidateResult {
    let activation = PolicyActivation::new(policy, versioned_request, params, authorizer);
    let mut result = ValidateResult::default();
    let started = Instant::now();
    match match_conditions_hold(policy, &activation) {
        Ok(true) => {}
        Ok(false) => return result,
        Err(error_message) => {
            result.record_failure(policy, error_message, 0, (started.elapsed(), INVALID_ERROR));
            return result;
        }
    }
    let mut budget = Budget::new(RUNTIME_BUDGET);
    for (index, validation) in policy.validations.iter().enumerate() {
        let started = Instant::now();
        let evaluation = activation.evaluate(&validation.expression, &mut budget);
        let elapsed = started.elapsed();
        match evaluation {
            Ok(value) if value.as_bool() == Some(true) => {}
            Ok(_) => {
                let (message, out_of_budget) = message(validation, &activation, &mut budget);
                match out_of_budget {
                    true => {
                        let error_message = format!("failed messageExpression: {OUT_OF_BUDGET}");
                        result.record_failure(
                            policy,
                            error_message,
                            index,
                            (elapsed, metrics::OUT_OF_BUDGET),
                        );
                    }
                    false => result.denied.push(DenyDecision {
                        message,
                        reason: reason(validation),
                        index,
                        metric: (elapsed, NO_ERROR),
                    }),
                }
            }
            Err(EvaluationError::OutOfBudget) => {
                let mut exhausted = ValidateResult::default();
                exhausted.record_failure(
                    policy,
                    OUT_OF_BUDGET.to_owned(),
                    0,
                    (elapsed, metrics::OUT_OF_BUDGET),
                );
                return exhausted;
            }
            Err(evaluation_error) => {
                let error = if validation.expression.is_err() { COMPILE_ERROR } else { INVALID_ERROR };
                result.record_failure(policy, evaluation_error.message(), index, (elapsed, error));
            }
        }
    }
    annotate(policy, &activation, &mut result);
    result
}

/// Whether all match conditions hold. One that is false decides, whatever errors the others have.
pub(super) fn match_conditions_hold<'a>(
    policy: &'a Policy,
    activation: &PolicyActivation<'a>,
) -> Result<bool, String> {
    let mut budget = Budget::new(MATCH_CONDITIONS_BUDGET);
    let mut errors = Vec::new();
    for condition in &policy.conditions {
        match evaluate_condition(condition, activation, &mut budget) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(EvaluationError::OutOfBudget) => {
                errors = vec![OUT_OF_BUDGET.to_owned()];
                break;
            }
            Err(evaluation_error) => errors.push(evaluation_error.message()),
        }
    }
    match errors.as_slice() {
        [] => Ok(true),
        _ if policy.fails_open => Ok(false),
        errors => Err(crate::rbac::aggregate_errors(errors)),
    }
}

fn evaluate_condition<'a>(
    condition: &'a super::config::Expression,
    activation: &PolicyActivation<'a>,
    budget: &mut Budget,
) -> Result<bool, EvaluationError> {
    activation.evaluate(condition, budget).map(|value| value.as_bool() != Some(false))
}

fn reason(validation: &Validation) -> &'static str {
    match validation.reason.as_str() {
        "Forbidden" => "Forbidden",
        "Unauthorized" => "Unauthorized",
        "RequestEntityTooLarge" => "RequestEntityTooLarge",
        _ => "Invalid",
    }
}

/// The message for the client, and whether the cost budget is exhausted.
fn message<'a>(
    validation: &'a Validation,
    activation: &PolicyActivation<'a>,
    budget: &mut Budget,
) -> (String, bool) {
    let message_value =
        validation.message_expression.as_ref().map(|expression| activation.evaluate(expression, budget));
    if matches!(message_value, Some(Err(EvaluationError::OutOfBudget))) {
        return (String::new(), true);
    }
    let usable = |text: &str| !text.is_empty() && text.len() <= MAX_MESSAGE_BYTES && !text.contains('\n');
    let message_value = match &message_value {
        Some(Ok(value)) => value.as_str().map(str::trim).filter(|text| usable(text)),
        _ => None,
    };
    let message = match (message_value, validation.message.trim()) {
        (Some(text), _) => text.to_owned(),
        (None, "") => format!("failed expression: {}", validation.source.trim()),
        (None, text) => text.to_owned(),
    };
    (message, false)
}

fn annotate<'a>(policy: &'a Policy, activation: &PolicyActivation<'a>, result: &mut ValidateResult) {
    let mut budget = Budget::new(RUNTIME_BUDGET);
    for (key, expression) in &policy.annotations {
        let started = Instant::now();
        match activation.evaluate(expression, &mut budget) {
            Ok(value) => {
                let text = value.as_str().unwrap_or_default().trim();
                if !text.is_empty() {
                    let end = text.floor_char_boundary(MAX_AUDIT_ANNOTATION_BYTES.min(text.len()));
                    result.annotations.push((key.clone(), text[..end].to_owned()));
                }
            }
            Err(evaluation_error) if !policy.fails_open => {
                result.failures.push((evaluation_error.message(), (started.elapsed(), INVALID_ERROR)));
            }
            Err(_) => {}
        }
    }
}

impl ValidationStatus {
    fn record_failure(&mut self, request: &Request<'_>, failure: PolicyFailure) {
        let message = match &failure.binding {
            Some(binding) => format!(
                "ValidatingAdmissionPolicy '{}' with binding '{binding}' denied request: {}",
                failure.policy, failure.message
            ),
            None => {
                format!("ValidatingAdmissionPolicy '{}' denied request: {}", failure.policy, failure.message)
            }
        };
        let reason = failure.reason.unwrap_or("Invalid");
        let mut status = request.forbidden(&message);
        status.reason = reason.into();
        status.code = match reason {
            "Forbidden" => 403,
            "Unauthorized" => 401,
            "RequestEntityTooLarge" => 413,
            _ => 422,
        };
        let details = status.details.get_or_insert_with(StatusDetails::default);
        details.causes.push(StatusCause { message, ..StatusCause::default() });
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
        self.record_failure(
            request,
            PolicyFailure {
                policy: policy.name.clone(),
                binding: Some(binding.name.clone()),
                message: message.to_owned(),
                reason: Some(reason),
            },
        );
    }
}

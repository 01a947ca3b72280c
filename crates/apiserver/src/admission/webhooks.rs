//! Admission webhooks. Mutating webhooks are called one after the other, validating webhooks all at
//! once.
//!
//! Configurations are compiled when they change, never for a request; a request without matching
//! webhooks only reads a list. `matching` decides whether a webhook is called and in which version,
//! `review` builds the AdmissionReview and checks the response, `conversion` converts objects to
//! the webhook's version and back.

mod config;
mod conversion;
mod matching;
mod metrics;
mod review;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use api::{Resource, Status};
use serde_json::{Value, json};

use self::config::Hook;
pub(super) use self::config::{Rule, rule};
pub(super) use self::conversion::{from_versioned, kind_of, to_versioned};
pub(super) use self::matching::{equivalent_rows, in_namespace, matches_selector};
use self::metrics::WebhookMetrics;
pub(super) use self::review::build_request;
use self::review::{WebhookError, WebhookResponse};
use super::{Operation, Request};
use crate::cache::{Cache, IncrementalView, View};
use crate::object::Object;
use crate::server::Server;

/// Audit annotation with the patch of a webhook; only at the levels `Request` and
/// `RequestResponse`.
pub const PATCH_ANNOTATION_PREFIX: &str = "patch.webhook.admission.k8s.io/";
const MUTATION_ANNOTATION_PREFIX: &str = "mutation.webhook.admission.k8s.io/";
const FAILED_OPEN_PREFIX: &str = "failed-open.";
const VALIDATING_ANNOTATION_PREFIX: &str = "validating.webhook.admission.k8s.io/";

/// All webhooks and their metrics.
pub struct Webhooks {
    configurations: IncrementalView<Configurations, 2>,
    metrics: WebhookMetrics,
}

/// Mutating and validating webhooks, each in calling order: by configuration name, then as listed.
#[derive(Default)]
struct Configurations {
    by_name: [BTreeMap<String, Vec<Arc<Hook>>>; 2],
    hooks: [Hooks; 2],
}

type Hooks = Arc<[Arc<Hook>]>;

const MUTATING: usize = 0;
const VALIDATING: usize = 1;

impl View for Configurations {
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool) {
        let all = &mut self.by_name[kind];
        match deleted {
            true => drop(all.remove(object.name())),
            false => drop(all.insert(object.name().to_owned(), config::compile(&object.value()))),
        }
        self.hooks[kind] = all.values().flatten().cloned().collect();
    }
}

/// Reinvocation of mutating webhooks (upstream: `webhookReinvokeContext`). A webhook that was
/// called in the first round is called again if the object has changed since and its
/// `reinvocationPolicy` is `IfNeeded`.
#[derive(Default)]
pub struct WebhookReinvokeContext {
    is_reinvoke: bool,
    should_reinvoke: bool,
    changed: bool,
    /// The object after the webhooks of the first round.
    last_output: Value,
    /// Called so far with `reinvocationPolicy: IfNeeded`.
    previously_invoked: HashSet<String>,
    /// To be called again in the second round.
    reinvoke_webhooks: HashSet<String>,
}

impl WebhookReinvokeContext {
    /// Starts the second round; returns whether it is needed.
    pub fn start_reinvocation(&mut self) -> bool {
        self.is_reinvoke = true;
        self.should_reinvoke
    }

    pub fn changed(&self) -> bool {
        self.changed
    }

    fn round(&self) -> usize {
        usize::from(self.is_reinvoke)
    }

    fn require_reinvocation(&mut self) {
        self.reinvoke_webhooks.extend(self.previously_invoked.drain());
    }
}

impl Webhooks {
    pub fn new(cache: &Cache) -> Webhooks {
        let shard = |plural| {
            let row = api::resource_table::find_resource("admissionregistration.k8s.io", "v1", plural);
            cache.shard(&crate::registry::prefix(row.expect("webhooks are in the table")))
        };
        let shards = [shard("mutatingwebhookconfigurations"), shard("validatingwebhookconfigurations")];
        Webhooks { configurations: IncrementalView::new(shards), metrics: WebhookMetrics::default() }
    }

    pub fn print(&self, out: &mut String) {
        self.metrics.print(out);
    }

    pub fn is_empty(&self) -> bool {
        self.configurations.current().hooks.iter().all(|hooks| hooks.is_empty())
    }

    /// The webhooks to match against the request.
    fn hooks(&self, kind: usize, request: &Request<'_>) -> Hooks {
        match should_handle(request) {
            true => self.configurations.current().hooks[kind].clone(),
            false => Hooks::default(),
        }
    }

    /// Calls the mutating webhooks, one after the other.
    pub async fn mutate(
        &self,
        server: &Server,
        request: &Request<'_>,
        object: &mut Value,
        reinvocation: &mut WebhookReinvokeContext,
    ) -> Result<(), Status> {
        let hooks = self.hooks(MUTATING, request);
        if hooks.is_empty() {
            return Ok(());
        }
        if reinvocation.is_reinvoke && *object != reinvocation.last_output {
            reinvocation.require_reinvocation();
        }
        for (index, hook) in hooks.iter().enumerate() {
            let Some(row) = matching::matching_row(server, hook, request, object, &self.metrics, "admit")?
            else {
                continue;
            };
            if reinvocation.is_reinvoke && !reinvocation.reinvoke_webhooks.contains(&hook.uid) {
                continue;
            }
            let key = format!("round_{}_index_{index}", reinvocation.round());
            let changed = self.call_mutating_hook(server, hook, row, request, object, &key).await?;
            if changed {
                reinvocation.require_reinvocation();
                reinvocation.should_reinvoke = true;
                reinvocation.changed = true;
            }
            if hook.reinvoke {
                reinvocation.previously_invoked.insert(hook.uid.clone());
            }
        }
        if reinvocation.should_reinvoke && !reinvocation.is_reinvoke {
            reinvocation.last_output = object.clone();
        }
        Ok(())
    }

    /// Returns whether the webhook changed the object.
    async fn call_mutating_hook(
        &self,
        server: &Server,
        hook: &Hook,
        row: &'static Resource,
        request: &Request<'_>,
        object: &mut Value,
        key: &str,
    ) -> Result<bool, Status> {
        let started = Instant::now();
        let versioned_object = conversion::to_versioned(request, row, object);
        let response = review::call_webhook(server, hook, request, row, &versioned_object, true).await;
        let patched = response.and_then(|answer| {
            self.apply_patch(hook, request, row, (&*object, versioned_object), answer, key)
        });
        let changed = matches!(&patched, Ok(Some(after)) if after != object);
        let annotation =
            json!({"configuration": hook.configuration, "webhook": hook.name, "mutated": changed});
        request.recorder.annotate(format!("{MUTATION_ANNOTATION_PREFIX}{key}"), annotation.to_string());
        self.metrics.observe(hook, "admit", request.operation, started.elapsed(), patched.as_ref().err());
        match patched {
            Ok(Some(after)) => {
                *object = after;
                Ok(changed)
            }
            Ok(None) => Ok(false),
            Err(error) => {
                let failed_open = format!("{FAILED_OPEN_PREFIX}{MUTATION_ANNOTATION_PREFIX}{key}");
                self.handle_failure(hook, "admit", request, failed_open, error).map(|()| false)
            }
        }
    }

    /// The object after the patch of the response; `None` without a patch.
    fn apply_patch(
        &self,
        hook: &Hook,
        request: &Request<'_>,
        row: &'static Resource,
        (before, mut versioned_object): (&Value, Value),
        answer: WebhookResponse,
        key: &str,
    ) -> Result<Option<Value>, WebhookError> {
        let Some(patch) = answer.patch.filter(|patch| !patch.as_array().is_some_and(Vec::is_empty)) else {
            return Ok(None);
        };
        // As upstream: deleted objects and the options of connections cannot be patched.
        if versioned_object.is_null() || request.operation == Operation::Connect {
            return Err(internal_error(Status::internal(format!(
                "admission webhook {:?} attempted to modify the object, which is not supported for this operation",
                hook.name
            ))));
        }
        patch::json_patch(&mut versioned_object, &patch)
            .map_err(|error| internal_error(Status::internal(error)))?;
        let after =
            conversion::from_versioned(request, row, before, versioned_object).map_err(internal_error)?;
        let annotation = json!({
            "configuration": hook.configuration, "webhook": hook.name, "patch": patch, "patchType": "JSONPatch",
        });
        request.recorder.annotate(format!("{PATCH_ANNOTATION_PREFIX}{key}"), annotation.to_string());
        Ok(Some(after))
    }

    /// Calls the validating webhooks concurrently.
    pub async fn validate(
        &self,
        server: &Server,
        request: &Request<'_>,
        object: &Value,
    ) -> Result<(), Status> {
        let hooks = self.hooks(VALIDATING, request);
        let mut matched_hooks = Vec::new();
        for hook in hooks.iter() {
            let matched_row =
                matching::matching_row(server, hook, request, object, &self.metrics, "validating")?;
            matched_hooks.extend(matched_row.map(|row| (hook, row)));
        }
        let calls = matched_hooks.into_iter().enumerate().map(|(index, (hook, row))| async move {
            let started = Instant::now();
            let versioned_object = conversion::to_versioned(request, row, object);
            let response = review::call_webhook(server, hook, request, row, &versioned_object, false).await;
            self.metrics.observe(
                hook,
                "validating",
                request.operation,
                started.elapsed(),
                response.as_ref().err(),
            );
            let key = format!("{FAILED_OPEN_PREFIX}{VALIDATING_ANNOTATION_PREFIX}round_0_index_{index}");
            match response {
                Ok(_) => Ok(()),
                Err(error) => self.handle_failure(hook, "validating", request, key, error),
            }
        });
        futures_util::future::join_all(calls).await.into_iter().collect()
    }

    /// Applies the failure policy to an error.
    fn handle_failure(
        &self,
        hook: &Hook,
        step: &'static str,
        request: &Request<'_>,
        key: String,
        error: WebhookError,
    ) -> Result<(), Status> {
        let (reason, _) = match error {
            WebhookError::Rejected(status) | WebhookError::Internal(status) => return Err(*status),
            WebhookError::CallFailed { reason: why, code } => (why, code),
        };
        let message = format!("failed calling webhook {:?}: {reason}", hook.name);
        tracing::warn!(webhook = hook.name, open = hook.fails_open, error = reason, "webhook call failed");
        if !hook.fails_open {
            return Err(Status::internal(message));
        }
        self.metrics.record_failed_open(hook, step);
        request.recorder.annotate(key, hook.name.clone());
        Ok(())
    }
}

/// Whether webhooks see the request. As upstream, they are not called for admission configuration
/// itself, so that a broken webhook can always be removed. Writes of the server itself are not
/// subject to webhooks either.
pub(super) fn should_handle(request: &Request<'_>) -> bool {
    const ADMISSION_RESOURCES: [&str; 6] = [
        "mutatingwebhookconfigurations",
        "validatingwebhookconfigurations",
        "mutatingadmissionpolicies",
        "mutatingadmissionpolicybindings",
        "validatingadmissionpolicies",
        "validatingadmissionpolicybindings",
    ];
    let own = request.row.group == "admissionregistration.k8s.io"
        && ADMISSION_RESOURCES.contains(&request.row.plural);
    // A Binding is admitted when it is created, not again as the update of the pod it causes.
    let bound = request.operation == Operation::Update && request.subresource == "binding";
    request.user.is_some() && !own && !bound
}

fn internal_error(status: Status) -> WebhookError {
    WebhookError::Internal(Box::new(status))
}

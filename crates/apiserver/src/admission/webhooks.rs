//! Admission by others: webhooks that may change a request, one after the other, and webhooks that may only
//! refuse it, all at once.
//!
//! Their configurations are compiled when they change, never for a request, and a request that concerns no
//! webhook pays for a look at a list. `matching` says whether and in which version a webhook is asked, `review`
//! what it is told and what its answer means, `form` turns objects into versions and back.

mod config;
mod form;
mod matching;
mod review;
mod tally;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use api::{Resource, Status};
use serde_json::{Value, json};

use self::config::Hook;
pub(super) use self::config::{Rule, rule};
pub(super) use self::form::{kind_of, taken, told};
pub(super) use self::matching::{equivalent_rows, in_namespace, selects};
pub(super) use self::review::request_of;
use self::review::{Answer, Trouble};
use self::tally::Tally;
use super::{Operation, Request};
use crate::cache::{Cache, Followed, View};
use crate::object::Object;
use crate::server::Server;

/// What the audit log calls the patches of webhooks; only told where requests are.
pub const PATCHES: &str = "patch.webhook.admission.k8s.io/";
const MUTATIONS: &str = "mutation.webhook.admission.k8s.io/";
const FAILED_OPEN: &str = "failed-open.";
const VALIDATIONS: &str = "validating.webhook.admission.k8s.io/";

/// Every webhook there is, and what became of asking them.
pub struct Webhooks {
    configurations: Followed<Configurations, 2>,
    tally: Tally,
}

/// The two kinds of webhooks, each in the order in which they are asked: by the names of their configurations.
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

/// The two rounds in which a request may be changed: whoever changes it in the first gives those before, if
/// they want, another look in the second.
#[derive(Default)]
pub struct Rounds {
    second: bool,
    wanted: bool,
    changed: bool,
    /// What webhooks made of the object in the first round.
    made: Value,
    /// Those asked so far that want another look.
    asked: HashSet<String>,
    /// Those that get one.
    again: HashSet<String>,
}

impl Rounds {
    /// Whether there is a second round, which begins with this.
    pub fn ask_again(&mut self) -> bool {
        self.second = true;
        self.wanted
    }

    pub fn changed(&self) -> bool {
        self.changed
    }

    fn number(&self) -> usize {
        usize::from(self.second)
    }

    fn give_another_look(&mut self) {
        self.again.extend(self.asked.drain());
    }
}

impl Webhooks {
    pub fn new(cache: &Cache) -> Webhooks {
        let shard = |plural| {
            let row = api::table::find("admissionregistration.k8s.io", "v1", plural);
            cache.shard(&crate::registry::prefix(row.expect("webhooks are in the table")))
        };
        let shards = [shard("mutatingwebhookconfigurations"), shard("validatingwebhookconfigurations")];
        Webhooks { configurations: Followed::new(shards), tally: Tally::default() }
    }

    pub fn print(&self, out: &mut String) {
        self.tally.print(out);
    }

    pub fn are_none(&self) -> bool {
        self.configurations.look().hooks.iter().all(|hooks| hooks.is_empty())
    }

    /// Those that may have something to say.
    fn hooks(&self, kind: usize, request: &Request<'_>) -> Hooks {
        match concerns(request) {
            true => self.configurations.look().hooks[kind].clone(),
            false => Hooks::default(),
        }
    }

    /// Asks those that may change the object, one after the other.
    pub async fn mutate(
        &self,
        server: &Server,
        request: &Request<'_>,
        object: &mut Value,
        rounds: &mut Rounds,
    ) -> Result<(), Status> {
        let hooks = self.hooks(MUTATING, request);
        if hooks.is_empty() {
            return Ok(());
        }
        if rounds.second && *object != rounds.made {
            rounds.give_another_look();
        }
        for (index, hook) in hooks.iter().enumerate() {
            let Some(row) = matching::wanted(server, hook, request, object, &self.tally, "admit")? else {
                continue;
            };
            if rounds.second && !rounds.again.contains(&hook.uid) {
                continue;
            }
            let key = format!("round_{}_index_{index}", rounds.number());
            let changed = self.mutate_by(server, hook, row, request, object, &key).await?;
            if changed {
                rounds.give_another_look();
                rounds.wanted = true;
                rounds.changed = true;
            }
            if hook.reinvoke {
                rounds.asked.insert(hook.uid.clone());
            }
        }
        if rounds.wanted && !rounds.second {
            rounds.made = object.clone();
        }
        Ok(())
    }

    /// Whether the webhook has changed the object.
    async fn mutate_by(
        &self,
        server: &Server,
        hook: &Hook,
        row: &'static Resource,
        request: &Request<'_>,
        object: &mut Value,
        key: &str,
    ) -> Result<bool, Status> {
        let begun = Instant::now();
        let told = form::told(request, row, object);
        let asked = review::ask(server, hook, request, row, &told, true).await;
        let patched =
            asked.and_then(|answer| self.patched(hook, request, row, (&*object, told), answer, key));
        let mutated = matches!(&patched, Ok(Some(after)) if after != object);
        let note = json!({"configuration": hook.configuration, "webhook": hook.name, "mutated": mutated});
        request.remarks.annotate(format!("{MUTATIONS}{key}"), note.to_string());
        self.tally.asked(hook, "admit", request.operation, begun.elapsed(), patched.as_ref().err());
        match patched {
            Ok(Some(after)) => {
                *object = after;
                Ok(mutated)
            }
            Ok(None) => Ok(false),
            Err(trouble) => {
                let failed_open = format!("{FAILED_OPEN}{MUTATIONS}{key}");
                self.settle(hook, "admit", request, failed_open, trouble).map(|()| false)
            }
        }
    }

    /// The object after the patch of an answer; `None` where there is none.
    fn patched(
        &self,
        hook: &Hook,
        request: &Request<'_>,
        row: &'static Resource,
        (before, mut told): (&Value, Value),
        answer: Answer,
        key: &str,
    ) -> Result<Option<Value>, Trouble> {
        let Some(patch) = answer.patch.filter(|patch| !patch.as_array().is_some_and(Vec::is_empty)) else {
            return Ok(None);
        };
        // A connection's options are settled by the time webhooks are asked.
        if told.is_null() || request.operation == Operation::Connect {
            return Err(internal(Status::internal(format!(
                "admission webhook {:?} attempted to modify the object, which is not supported for this operation",
                hook.name
            ))));
        }
        patch::json_patch(&mut told, &patch).map_err(|error| internal(Status::internal(error)))?;
        let after = form::taken(request, row, before, told).map_err(internal)?;
        let note = json!({
            "configuration": hook.configuration, "webhook": hook.name, "patch": patch, "patchType": "JSONPatch",
        });
        request.remarks.annotate(format!("{PATCHES}{key}"), note.to_string());
        Ok(Some(after))
    }

    /// Asks those that may only refuse, all at once.
    pub async fn validate(
        &self,
        server: &Server,
        request: &Request<'_>,
        object: &Value,
    ) -> Result<(), Status> {
        let hooks = self.hooks(VALIDATING, request);
        let mut concerned = Vec::new();
        for hook in hooks.iter() {
            let wanted = matching::wanted(server, hook, request, object, &self.tally, "validating")?;
            concerned.extend(wanted.map(|row| (hook, row)));
        }
        let calls = concerned.into_iter().enumerate().map(|(index, (hook, row))| async move {
            let begun = Instant::now();
            let told = form::told(request, row, object);
            let asked = review::ask(server, hook, request, row, &told, false).await;
            self.tally.asked(hook, "validating", request.operation, begun.elapsed(), asked.as_ref().err());
            let key = format!("{FAILED_OPEN}{VALIDATIONS}round_0_index_{index}");
            match asked {
                Ok(_) => Ok(()),
                Err(trouble) => self.settle(hook, "validating", request, key, trouble),
            }
        });
        futures_util::future::join_all(calls).await.into_iter().collect()
    }

    /// What trouble with a webhook means for the request.
    fn settle(
        &self,
        hook: &Hook,
        step: &'static str,
        request: &Request<'_>,
        key: String,
        trouble: Trouble,
    ) -> Result<(), Status> {
        let (why, _) = match trouble {
            Trouble::Rejected(status) | Trouble::Internal(status) => return Err(*status),
            Trouble::Calling { why, code } => (why, code),
        };
        let message = format!("failed calling webhook {:?}: {why}", hook.name);
        tracing::warn!(
            webhook = hook.name,
            open = hook.fails_open,
            error = why,
            "a webhook could not be asked"
        );
        if !hook.fails_open {
            return Err(Status::internal(message));
        }
        self.tally.failed_open(hook, step);
        request.remarks.annotate(key, hook.name.clone());
        Ok(())
    }
}

/// Webhooks see what clients do, except to what rules webhooks: whoever locks themselves out must have a way
/// back in. What the server does on its own account is nobody's to refuse.
pub(super) fn concerns(request: &Request<'_>) -> bool {
    const OWN: [&str; 6] = [
        "mutatingwebhookconfigurations",
        "validatingwebhookconfigurations",
        "mutatingadmissionpolicies",
        "mutatingadmissionpolicybindings",
        "validatingadmissionpolicies",
        "validatingadmissionpolicybindings",
    ];
    let own = request.row.group == "admissionregistration.k8s.io" && OWN.contains(&request.row.plural);
    // A binding is asked about when it is made, not as the change of the pod that it leads to.
    let bound = request.operation == Operation::Update && request.subresource == "binding";
    request.user.is_some() && !own && !bound
}

fn internal(status: Status) -> Trouble {
    Trouble::Internal(Box::new(status))
}

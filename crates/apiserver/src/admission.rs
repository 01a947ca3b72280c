//! Admission: what may change or refuse a write once its sender is allowed to make it.
//!
//! One table of plugins in upstream's order, each a pure function of the request, the object and what the
//! cluster holds. The changing half of a plugin runs before the kind's rules, the judging half after them.
//! Only `quota` writes, since what it grants must be known to the next request, and only `event_rates` keeps state.
//! What others have to say is asked last, and over the network: `webhooks`.

mod certificates;
mod defaults;
mod device_claims;
mod event_rates;
mod expressions;
mod lifecycle;
mod limits;
mod node_restriction;
mod optional;
mod pod_security;
mod policies;
mod priority;
pub mod quota;
mod resize;
mod runtime;
mod service_account;
mod settings;
mod storage;
#[cfg(test)]
mod tests;
mod webhooks;

use std::sync::Arc;
use std::time::Duration;

use api::json::JsonExt as _;
use api::{Resource, Status};
use serde_json::Value;

use crate::access::User;
use crate::delete::DeleteOptions;
use crate::object::Object;
use crate::options::ResourceVersionMatch;
use crate::rbac::Attributes;
use crate::registry::stored_as;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::warning_recorder::WarningRecorder;
use crate::write::{AFTER_ADMISSION, WriteOptions, dedup_owner_references};

pub use policies::Policies;
pub use priority::SYSTEM_CLASSES;
pub use settings::{Settings, SettingsError};
pub use webhooks::{PATCH_ANNOTATION_PREFIX, Webhooks};

/// How long a pod waits for the default account of a namespace that is still being furnished.
const DEFAULT_ACCOUNT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

/// What a plugin knows of a write besides the object.
pub struct Request<'a> {
    /// The row of the stored version.
    pub row: &'static Resource,
    /// The row that was asked for.
    pub requested_row: &'static Resource,
    pub operation: Operation,
    pub subresource: &'a str,
    pub namespace: &'a str,
    /// As far as it is known: a name still to be generated is known by its beginning.
    pub name: String,
    /// The name as webhooks are told it: empty where it is still to be generated, or for a whole collection.
    pub review_name: String,
    /// What is replaced or deleted.
    pub old: Option<&'a Value>,
    /// The options of the write or deletion, as they were given.
    pub options: &'a Value,
    pub dry_run: bool,
    /// Only what changes was sent.
    pub is_patch: bool,
    /// Whose write it is; `None` for the server itself.
    pub user: Option<&'a User>,
    /// What plugins have to say besides yes and no.
    pub recorder: Arc<WarningRecorder>,
}

/// What plugins see of the cluster.
pub trait Cluster {
    fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Arc<Object>>;
    fn list(&self, group: &str, plural: &str, namespace: &str) -> Vec<Arc<Object>>;
    /// How plugins are set.
    fn settings(&self) -> &Settings;
    /// How many events may still come.
    fn event_rates(&self) -> &event_rates::EventRateLimiter;
    /// Whether somebody may do something.
    fn allows(&self, user: &User, attributes: &Attributes<'_>) -> bool;
}

type Admit = fn(&Request<'_>, &mut Value, &dyn Cluster) -> Result<(), Status>;
type Validate = fn(&Request<'_>, &Value, &dyn Cluster) -> Result<(), Status>;

pub struct Plugin {
    pub name: &'static str,
    /// On unless switched off.
    default_enabled: bool,
    admit: Option<Admit>,
    validate: Option<Validate>,
}

const fn plugin(
    name: &'static str,
    default_enabled: bool,
    admit: Option<Admit>,
    validate: Option<Validate>,
) -> Plugin {
    Plugin { name, default_enabled, admit, validate }
}

/// Every plugin, in upstream's order.
pub const PLUGINS: &[Plugin] = &[
    plugin("NamespaceLifecycle", true, Some(lifecycle::admit), None),
    plugin("LimitPodHardAntiAffinityTopology", false, None, Some(optional::hostname_anti_affinity)),
    plugin("LimitRanger", true, Some(limits::admit), Some(limits::validate)),
    plugin("ServiceAccount", true, Some(service_account::admit), Some(service_account::validate)),
    // Upstream leaves switching this on to whoever installs the cluster.
    plugin("NodeRestriction", true, Some(node_restriction::admit), None),
    plugin("TaintNodesByCondition", true, Some(defaults::not_ready_taint), None),
    plugin(
        "AlwaysPullImages",
        false,
        Some(optional::set_always_pull_images),
        Some(optional::validate_always_pull_images),
    ),
    plugin("PodSecurity", true, None, Some(pod_security::validate)),
    plugin("Priority", true, Some(priority::admit), Some(priority::validate)),
    plugin("DefaultTolerationSeconds", true, Some(defaults::toleration_seconds), None),
    plugin("EventRateLimit", false, None, Some(event_rates::validate)),
    plugin("ExtendedResourceToleration", false, Some(optional::extended_resource_tolerations), None),
    plugin("DefaultStorageClass", true, Some(storage::default_class), None),
    plugin("StorageObjectInUseProtection", true, Some(storage::protect), None),
    plugin("PersistentVolumeClaimResize", true, None, Some(storage::resize)),
    plugin("RuntimeClass", true, Some(runtime::admit), Some(runtime::validate)),
    plugin("CertificateApproval", true, None, Some(certificates::approval)),
    plugin("CertificateSigning", true, None, Some(certificates::signing)),
    plugin("CertificateSubjectRestriction", true, None, Some(certificates::subject)),
    plugin("DefaultIngressClass", true, Some(defaults::ingress_class), None),
    plugin("DenyServiceExternalIPs", false, None, Some(optional::deny_external_ips)),
    plugin("PodTopologyLabels", true, Some(defaults::topology_labels), None),
    plugin("NodeDeclaredFeatureValidator", true, None, Some(resize::validate_declared_features)),
    plugin("PodResizeValidator", true, None, Some(resize::validate)),
    // Ask others, which takes time: see `Server::admit` and `Server::judge`.
    plugin(MUTATING_POLICIES, true, None, None),
    plugin(MUTATING, true, None, None),
    plugin(VALIDATING_POLICIES, true, None, None),
    plugin(VALIDATING, true, None, None),
    // Judges in `quota`, since it writes down what it grants.
    plugin("ResourceQuota", true, None, None),
];

const MUTATING_POLICIES: &str = "MutatingAdmissionPolicy";
const VALIDATING_POLICIES: &str = "ValidatingAdmissionPolicy";
const MUTATING: &str = "MutatingAdmissionWebhook";
const VALIDATING: &str = "ValidatingAdmissionWebhook";

/// Which plugins to switch on and off, as `--enable-admission-plugins` and its opposite name them, and how
/// they are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdmissionOptions {
    pub enable: Vec<String>,
    pub disable: Vec<String>,
    pub settings: Settings,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AdmissionOptionsError {
    #[error("admission plugin {0:?} is not known here")]
    Unknown(String),
    #[error("admission plugin {0:?} is both enabled and disabled")]
    Both(String),
}

/// The plugins that are on.
pub struct Chain {
    plugins: Vec<&'static Plugin>,
    settings: Settings,
    event_rates: event_rates::EventRateLimiter,
    pub quotas: quota::Quotas,
}

impl Default for Chain {
    fn default() -> Chain {
        Chain::new(&AdmissionOptions::default()).expect("nothing is switched that is not known")
    }
}

impl Chain {
    pub fn new(options: &AdmissionOptions) -> Result<Chain, AdmissionOptionsError> {
        for name in options.enable.iter().chain(&options.disable) {
            if !PLUGINS.iter().any(|plugin| plugin.name == name) {
                return Err(AdmissionOptionsError::Unknown(name.clone()));
            }
        }
        if let Some(both) = options.enable.iter().find(|name| options.disable.contains(name)) {
            return Err(AdmissionOptionsError::Both(both.clone()));
        }
        let contains_plugin = |list: &[String], plugin: &Plugin| list.iter().any(|name| name == plugin.name);
        let enabled = |plugin: &&Plugin| {
            contains_plugin(&options.enable, plugin)
                || plugin.default_enabled && !contains_plugin(&options.disable, plugin)
        };
        let plugins: Vec<&Plugin> = PLUGINS.iter().filter(enabled).collect();
        let enforced = plugins.iter().any(|plugin| plugin.name == "ResourceQuota");
        let settings = options.settings.clone();
        let event_rates = event_rates::EventRateLimiter::new(&settings.event_rates);
        Ok(Chain { plugins, settings, event_rates, quotas: quota::Quotas::new(enforced) })
    }

    fn has(&self, name: &str) -> bool {
        self.plugins.iter().any(|plugin| plugin.name == name)
    }

    fn admit(&self, request: &Request<'_>, object: &mut Value, cluster: &dyn Cluster) -> Result<(), Status> {
        let mut steps = self.plugins.iter().filter_map(|plugin| plugin.admit);
        steps.try_for_each(|admit| admit(request, object, cluster))
    }

    fn validate(&self, request: &Request<'_>, object: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
        device_claims::validate(request, object, cluster)?;
        let mut steps = self.plugins.iter().filter_map(|plugin| plugin.validate);
        steps.try_for_each(|validate| validate(request, object, cluster))
    }
}

impl Operation {
    /// As upstream spells it.
    fn as_str(self) -> &'static str {
        match self {
            Operation::Create => "CREATE",
            Operation::Update => "UPDATE",
            Operation::Delete => "DELETE",
            Operation::Connect => "CONNECT",
        }
    }
}

impl<'a> Request<'a> {
    pub fn new(
        target: &'a Target,
        operation: Operation,
        object: &Value,
        old: Option<&'a Value>,
        user: Option<&'a User>,
    ) -> Self {
        let metadata = object.at("metadata");
        let review_name = if target.name.is_empty() { metadata.text("name") } else { &target.name };
        let known = [target.name.as_str(), metadata.text("name"), metadata.text("generateName"), "Unknown"];
        Request {
            row: stored_as(target.resource),
            requested_row: target.resource,
            review_name: review_name.to_owned(),
            operation,
            subresource: &target.subresource,
            namespace: &target.namespace,
            name: known.into_iter().find(|name| !name.is_empty()).unwrap_or_default().to_owned(),
            old,
            options: &Value::Null,
            dry_run: false,
            is_patch: false,
            user,
            recorder: Arc::default(),
        }
    }

    /// With the options of a write.
    pub fn with_write_options(mut self, options: &'a WriteOptions) -> Self {
        self.dry_run = options.dry_run;
        self.is_patch = options.is_patch;
        self.options = &options.raw_options;
        self.recorder = options.recorder.clone();
        self
    }

    /// With the options of a deletion.
    pub fn with_delete_options(mut self, options: &'a DeleteOptions) -> Self {
        self.dry_run = options.dry_run;
        self.options = &options.raw_options;
        self.recorder = options.recorder.clone();
        if options.collection {
            self.review_name.clear();
        }
        self
    }

    /// Lets the client know of something that is not wrong enough to refuse.
    fn warn(&self, text: String) {
        self.recorder.warn(text);
    }

    /// Leaves something for the audit log.
    fn annotate(&self, key: String, text: impl Into<String>) {
        self.recorder.annotate(key, text);
    }

    /// About the kind itself, not one of its subresources.
    fn is(&self, group: &str, plural: &str) -> bool {
        self.subresource.is_empty() && self.row.plural == plural && self.row.group == group
    }

    fn creates(&self, group: &str, plural: &str) -> bool {
        self.operation == Operation::Create && self.is(group, plural)
    }

    fn forbidden(&self, reason: impl AsRef<str>) -> Status {
        Status::forbidden(self.row.group, self.row.plural, &self.name, reason.as_ref())
    }
}

/// The two rounds in which a request may be changed by others.
#[derive(Default)]
struct ReinvocationContext {
    policies: policies::PolicyReinvokeContext,
    webhooks: webhooks::WebhookReinvokeContext,
}

impl ReinvocationContext {
    /// Whether there is a second round, which begins with this.
    fn start_reinvocation(&mut self) -> bool {
        self.policies.start_reinvocation();
        self.webhooks.start_reinvocation() || self.policies.changed()
    }

    fn changed(&self) -> bool {
        self.policies.changed() || self.webhooks.changed()
    }
}

impl Cluster for Server {
    fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Arc<Object>> {
        let row = api::resource_table::find_resource(group, "v1", plural)?;
        self.find(&Target { name: name.to_owned(), ..Target::collection(row, namespace) })
    }

    fn list(&self, group: &str, plural: &str, namespace: &str) -> Vec<Arc<Object>> {
        match api::resource_table::find_resource(group, "v1", plural) {
            Some(row) => self.shard(row).snapshot(&Target::collection(row, namespace).key(), 0).objects,
            None => Vec::new(),
        }
    }

    fn settings(&self) -> &Settings {
        &self.admission.settings
    }

    fn event_rates(&self) -> &event_rates::EventRateLimiter {
        &self.admission.event_rates
    }

    fn allows(&self, user: &User, attributes: &Attributes<'_>) -> bool {
        self.rbac.allows(user, attributes)
    }
}

impl Server {
    /// Runs the changing halves of the plugins.
    pub async fn mutate(&self, request: &Request<'_>, object: &mut Value) -> Result<(), Status> {
        if request.operation == Operation::Create && !request.namespace.is_empty() {
            // Pods depend on many objects that may just have been made; for the rest the namespace is enough.
            let pod = request.is("", "pods");
            if pod || self.get("", "namespaces", "", request.namespace).is_none() {
                self.wait_until_fresh(ResourceVersionMatch::MostRecent).await?;
            }
            if pod && matches!(object.at("spec").text("serviceAccountName"), "" | "default") {
                self.wait_for_default_account(request.namespace).await;
            }
        }
        self.admission.admit(request, object, self)?;
        let mut reinvocation = ReinvocationContext::default();
        self.dispatch_mutating(request, object, &mut reinvocation).await?;
        if reinvocation.start_reinvocation() {
            // What others have changed, plugins and others before them may want to change once more.
            self.admission.admit(request, object, self)?;
            self.dispatch_mutating(request, object, &mut reinvocation).await?;
        }
        if reinvocation.changed()
            && let Some(warning) = dedup_owner_references(object, AFTER_ADMISSION)
        {
            request.recorder.warn(warning);
        }
        Ok(())
    }

    /// For what is made but not stored: tokens, bindings, evictions.
    pub async fn admit_subresource_create(
        &self,
        target: &Target,
        object: &mut Value,
        options: &WriteOptions,
    ) -> Result<(), Status> {
        let user = options.user.as_ref();
        let request =
            Request::new(target, Operation::Create, &Value::Null, None, user).with_write_options(options);
        self.mutate(&request, object).await?;
        self.dispatch_validating(&request, object).await
    }

    /// For what is asked and answered: only webhooks have a say.
    pub async fn admit_review(
        &self,
        target: &Target,
        object: &mut Value,
        options: &WriteOptions,
    ) -> Result<(), Status> {
        let user = options.user.as_ref();
        let request = Request::new(target, Operation::Create, object, None, user).with_write_options(options);
        self.dispatch_mutating(&request, object, &mut ReinvocationContext::default()).await?;
        self.dispatch_validating(&request, object).await
    }

    /// For connections: `object` holds their options.
    pub async fn admit_connection(&self, call: &Call, target: &Target, object: Value) -> Result<(), Status> {
        if call.query.has("dryRun") {
            return Err(Status::bad_request("dryRun is not supported"));
        }
        let mut request = Request::new(target, Operation::Connect, &Value::Null, None, Some(&call.user));
        request.recorder = call.recorder.clone();
        let mut object = object;
        self.dispatch_mutating(&request, &mut object, &mut ReinvocationContext::default()).await?;
        self.dispatch_validating(&request, &object).await
    }

    /// Runs the judging halves.
    pub async fn validate(&self, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        self.admission.validate(request, object, self)?;
        self.dispatch_validating(request, object).await
    }

    /// Whether anybody else may look at what is written.
    pub fn has_admission_hooks(&self) -> bool {
        !(self.policies.is_empty() && self.webhooks.is_empty())
    }

    /// Lets policies and webhooks change the object.
    async fn dispatch_mutating(
        &self,
        request: &Request<'_>,
        object: &mut Value,
        reinvocation: &mut ReinvocationContext,
    ) -> Result<(), Status> {
        if self.admission.has(MUTATING_POLICIES) {
            self.policies.mutate(self, request, object, &mut reinvocation.policies)?;
        }
        if self.admission.has(MUTATING) {
            self.webhooks.mutate(self, request, object, &mut reinvocation.webhooks).await?;
        }
        Ok(())
    }

    /// Asks the policies and webhooks that only judge.
    pub async fn dispatch_validating(&self, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        if self.admission.has(VALIDATING_POLICIES) {
            self.policies.validate(self, request, object)?;
        }
        if !self.admission.has(VALIDATING) {
            return Ok(());
        }
        self.webhooks.validate(self, request, object).await
    }

    /// A new namespace gets its default account a moment after it is made; a pod may come in between.
    async fn wait_for_default_account(&self, namespace: &str) {
        let Some(row) = api::resource_table::find_resource("", "v1", "serviceaccounts") else { return };
        if self.get("", "namespaces", "", namespace).is_none() {
            return;
        }
        let mut changes = self.shard(row).subscribe();
        let account_created = async {
            while self.get("", "serviceaccounts", namespace, "default").is_none() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // Too late is for the plugin to say.
        let _ = tokio::time::timeout(DEFAULT_ACCOUNT_TIMEOUT, account_created).await;
    }
}

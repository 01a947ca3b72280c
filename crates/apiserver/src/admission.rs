//! Admission control: plugins that mutate or reject a write after authorization.
//!
//! One table of plugins in upstream's order; each is a function of the request, the object and the
//! cluster state. The mutating half of a plugin runs before the kind's validation, the validating
//! half after it. Only `quota` writes to the store, because the next request must see the usage it
//! grants, and only `event_rates` keeps state. Policies and webhooks (`policies`, `webhooks`) run
//! after the built-in plugins.

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

/// How long a pod waits for the default ServiceAccount of a new namespace.
const DEFAULT_ACCOUNT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

/// The attributes of a write (upstream: `admission.Attributes`), without the new object.
pub struct Request<'a> {
    /// The resource in its storage version.
    pub row: &'static Resource,
    /// The resource in the version of the request.
    pub requested_row: &'static Resource,
    pub operation: Operation,
    pub subresource: &'a str,
    pub namespace: &'a str,
    /// The name for error messages: `generateName` where the name is not generated yet.
    pub name: String,
    /// The name in AdmissionReviews: empty if it is not generated yet, or for a deletion of a
    /// collection.
    pub review_name: String,
    /// The replaced or deleted object.
    pub old: Option<&'a Value>,
    /// The CreateOptions, UpdateOptions or DeleteOptions as they were sent.
    pub options: &'a Value,
    pub dry_run: bool,
    /// The body is a patch.
    pub is_patch: bool,
    /// The user of the write; `None` for the server itself.
    pub user: Option<&'a User>,
    /// Collects warnings and audit annotations of plugins.
    pub recorder: Arc<WarningRecorder>,
}

/// The cluster state that plugins may read.
pub trait Cluster {
    fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Arc<Object>>;
    fn list(&self, group: &str, plural: &str, namespace: &str) -> Vec<Arc<Object>>;
    /// The configuration of the plugins.
    fn settings(&self) -> &Settings;
    /// The token buckets of EventRateLimit.
    fn event_rates(&self) -> &event_rates::EventRateLimiter;
    /// Whether `user` is authorized for the request in `attributes`.
    fn allows(&self, user: &User, attributes: &Attributes<'_>) -> bool;
}

type Admit = fn(&Request<'_>, &mut Value, &dyn Cluster) -> Result<(), Status>;
type Validate = fn(&Request<'_>, &Value, &dyn Cluster) -> Result<(), Status>;

pub struct Plugin {
    pub name: &'static str,
    /// Enabled unless `--disable-admission-plugins` names it.
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
    // Upstream leaves it disabled by default and installers such as kubeadm enable it.
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
    // These may wait for the network and run in `Server::mutate` and `Server::validate`.
    plugin(MUTATING_POLICIES, true, None, None),
    plugin(MUTATING, true, None, None),
    plugin(VALIDATING_POLICIES, true, None, None),
    plugin(VALIDATING, true, None, None),
    // Runs in `quota`, because it writes the usage that it grants.
    plugin("ResourceQuota", true, None, None),
];

const MUTATING_POLICIES: &str = "MutatingAdmissionPolicy";
const VALIDATING_POLICIES: &str = "ValidatingAdmissionPolicy";
const MUTATING: &str = "MutatingAdmissionWebhook";
const VALIDATING: &str = "ValidatingAdmissionWebhook";

/// `--enable-admission-plugins`, `--disable-admission-plugins` and the configuration of the
/// plugins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdmissionOptions {
    pub enable: Vec<String>,
    pub disable: Vec<String>,
    pub settings: Settings,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AdmissionOptionsError {
    #[error("admission plugin {0:?} is unknown")]
    Unknown(String),
    #[error("admission plugin {0:?} is both enabled and disabled")]
    Both(String),
}

/// The enabled plugins.
pub struct Chain {
    plugins: Vec<&'static Plugin>,
    settings: Settings,
    event_rates: event_rates::EventRateLimiter,
    pub quotas: quota::Quotas,
}

impl Default for Chain {
    fn default() -> Chain {
        Chain::new(&AdmissionOptions::default()).expect("the default options name no plugins")
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
    /// The operation as in AdmissionReviews.
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

    /// Adds a warning to the response.
    fn warn(&self, text: String) {
        self.recorder.warn(text);
    }

    /// Adds an annotation to the audit event.
    fn annotate(&self, key: String, text: impl Into<String>) {
        self.recorder.annotate(key, text);
    }

    /// Whether the request is for this resource itself and not for a subresource.
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

/// Reinvocation state of one request: mutating policies and webhooks run at most twice.
#[derive(Default)]
struct ReinvocationContext {
    policies: policies::PolicyReinvokeContext,
    webhooks: webhooks::WebhookReinvokeContext,
}

impl ReinvocationContext {
    /// Starts the second round; returns whether it is needed.
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
    /// Runs the mutating plugins, then mutating policies and webhooks.
    pub async fn mutate(&self, request: &Request<'_>, object: &mut Value) -> Result<(), Status> {
        if request.operation == Operation::Create && !request.namespace.is_empty() {
            // Pod admission reads many objects that may have been created just before the pod, so
            // it always needs a fresh cache. Other kinds only need their namespace.
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
            // A webhook or policy changed the object, so built-in plugins and those that ask for
            // reinvocation run again.
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

    /// For subresources that are created but not stored: TokenRequest, Binding, Eviction.
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

    /// For reviews, which are not stored: only policies and webhooks run.
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

    /// For exec, attach, portforward and proxy; `object` is the options object.
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

    /// Runs the validating plugins, then validating policies and webhooks.
    pub async fn validate(&self, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        self.admission.validate(request, object, self)?;
        self.dispatch_validating(request, object).await
    }

    /// Whether any policy or webhook is configured.
    pub fn has_admission_hooks(&self) -> bool {
        !(self.policies.is_empty() && self.webhooks.is_empty())
    }

    /// Runs mutating policies and webhooks.
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

    /// Runs validating policies and webhooks.
    pub async fn dispatch_validating(&self, request: &Request<'_>, object: &Value) -> Result<(), Status> {
        if self.admission.has(VALIDATING_POLICIES) {
            self.policies.validate(self, request, object)?;
        }
        if !self.admission.has(VALIDATING) {
            return Ok(());
        }
        self.webhooks.validate(self, request, object).await
    }

    /// The ServiceAccount controller creates the default account shortly after the namespace, so a
    /// pod that is created together with its namespace may come before it.
    async fn wait_for_default_account(&self, namespace: &str) {
        let Some(row) = api::resource_table::find_resource("", "v1", "serviceaccounts") else { return };
        if self.get("", "namespaces", "", namespace).is_none() {
            return;
        }
        // Subscribe before the first check, so that no event is missed.
        let mut changes = self.shard(row).subscribe();
        let account_created = async {
            while self.get("", "serviceaccounts", namespace, "default").is_none() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // On timeout the ServiceAccount plugin rejects the pod with its usual error.
        let _ = tokio::time::timeout(DEFAULT_ACCOUNT_TIMEOUT, account_created).await;
    }
}

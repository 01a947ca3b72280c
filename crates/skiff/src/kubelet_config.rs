//! `--kubelet-arg name=value`: the flags of upstream's kubelet that skiff supports, and its
//! configuration file (`--kubelet-arg config=FILE`, a KubeletConfiguration). Flags take precedence over
//! the file, as in upstream.

mod ignored_fields;

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use kubelet::Config;
use schema::quantity::Quantity;
use serde_json::Value;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";

/// Flags without a field in the configuration file.
const CREDENTIAL_PROVIDER_BIN_DIR: &str = "imageCredentialProviderBinDir";
const CREDENTIAL_PROVIDER_CONFIG: &str = "imageCredentialProviderConfig";

/// Fields that are read before the node is configured ([`certificates`], [`endpoint`]).
const ROTATE_CERTIFICATES: &str = "rotateCertificates";
const SERVER_TLS_BOOTSTRAP: &str = "serverTLSBootstrap";
const RUNTIME_ENDPOINT: &str = "containerRuntimeEndpoint";

/// Whether `evictionHard` in the file is merged with the defaults. Without it, thresholds that the file
/// does not name are off.
const MERGE_DEFAULT_EVICTION: &str = "mergeDefaultEvictionSettings";

/// Flags and the equivalent fields of the configuration file.
const FLAG_FIELDS: &[(&str, &str)] = &[
    ("allowed-unsafe-sysctls", "allowedUnsafeSysctls"),
    ("cloud-provider", "cloudProvider"),
    ("cluster-dns", "clusterDNS"),
    ("cluster-domain", "clusterDomain"),
    ("container-log-max-files", "containerLogMaxFiles"),
    ("container-log-max-size", "containerLogMaxSize"),
    ("cpu-cfs-quota", "cpuCFSQuota"),
    ("enforce-node-allocatable", "enforceNodeAllocatable"),
    ("eviction-hard", "evictionHard"),
    ("eviction-max-pod-grace-period", "evictionMaxPodGracePeriod"),
    ("eviction-minimum-reclaim", "evictionMinimumReclaim"),
    ("eviction-pressure-transition-period", "evictionPressureTransitionPeriod"),
    ("eviction-soft", "evictionSoft"),
    ("eviction-soft-grace-period", "evictionSoftGracePeriod"),
    ("fail-swap-on", "failSwapOn"),
    ("image-credential-provider-bin-dir", CREDENTIAL_PROVIDER_BIN_DIR),
    ("image-credential-provider-config", CREDENTIAL_PROVIDER_CONFIG),
    ("image-gc-high-threshold", "imageGCHighThresholdPercent"),
    ("image-gc-low-threshold", "imageGCLowThresholdPercent"),
    ("kube-reserved", "kubeReserved"),
    ("kube-reserved-cgroup", "kubeReservedCgroup"),
    ("max-pods", "maxPods"),
    ("minimum-image-ttl-duration", "imageMinimumGCAge"),
    ("node-labels", "nodeLabels"),
    ("node-status-max-images", "nodeStatusMaxImages"),
    ("node-status-update-frequency", "nodeStatusUpdateFrequency"),
    ("pod-manifest-path", "staticPodPath"),
    ("pod-max-pids", "podPidsLimit"),
    ("pods-per-core", "podsPerCore"),
    ("provider-id", "providerID"),
    ("register-node", "registerNode"),
    ("register-with-taints", "registerWithTaints"),
    ("resolv-conf", "resolvConf"),
    ("root-dir", "rootDir"),
    ("rotate-certificates", ROTATE_CERTIFICATES),
    ("rotate-server-certificates", SERVER_TLS_BOOTSTRAP),
    ("seccomp-default", "seccompDefault"),
    ("serialize-image-pulls", "serializeImagePulls"),
    ("system-reserved", "systemReserved"),
    ("system-reserved-cgroup", "systemReservedCgroup"),
];

/// Applies the flags and the configuration file to a node's configuration.
pub fn apply(arguments: &[String], config: &mut Config) -> anyhow::Result<()> {
    let mut pairs = Vec::new();
    for argument in arguments {
        let Some((name, value)) = argument.trim_start_matches("--").split_once('=') else {
            bail!("--kubelet-arg {argument}: must be name=value");
        };
        if name == "config" {
            let fields = read_file(&PathBuf::from(value))?;
            if !fields.iter().any(|(field, value)| field == MERGE_DEFAULT_EVICTION && *value == true) {
                clear_thresholds(config, fields.iter().map(|(field, _)| field.as_str()));
            }
            for (field, value) in fields {
                set_field(config, &field, &value)
                    .map_err(|error| name_value(error, &value))
                    .with_context(|| format!("{argument}: {field}"))?;
            }
            continue;
        }
        let Some((_, field)) = FLAG_FIELDS.iter().find(|(known, _)| *known == name) else {
            let known: Vec<&str> = FLAG_FIELDS.iter().map(|(name, _)| *name).chain(["config"]).collect();
            bail!("--kubelet-arg {name} is not supported; supported names: {}", known.join(", "));
        };
        pairs.push((*field, flag_value(field, value)));
    }
    let path = |field_name: &str| {
        let found = pairs.iter().rev().find(|(field, _)| *field == field_name);
        found.map(|(_, value)| PathBuf::from(value.as_str().unwrap_or_default()))
    };
    match (path(CREDENTIAL_PROVIDER_CONFIG), path(CREDENTIAL_PROVIDER_BIN_DIR)) {
        (Some(file), Some(bin_dir)) => {
            let read = kubelet::CredentialProviders::read(&file, &bin_dir);
            config.settings.kubelet_config.credentials = read.map_err(anyhow::Error::msg)?;
        }
        (None, None) => {}
        _ => bail!(
            "--kubelet-arg image-credential-provider-config and image-credential-provider-bin-dir must be set together"
        ),
    }
    clear_thresholds(config, pairs.iter().map(|(field, _)| *field));
    for (field, value) in pairs
        .into_iter()
        .filter(|(field, _)| ![CREDENTIAL_PROVIDER_BIN_DIR, CREDENTIAL_PROVIDER_CONFIG].contains(field))
    {
        set_field(config, field, &value)
            .map_err(|error| name_value(error, &value))
            .with_context(|| format!("--kubelet-arg {field}"))?;
    }
    let presentation = &mut config.presentation;
    presentation.max_pods = presentation
        .max_pods_by_cores
        .map_or(presentation.max_pods, |limit| limit.min(presentation.max_pods));
    let soft = &mut config.settings.kubelet_config.soft_eviction;
    for signal in kubelet::SIGNALS {
        let is_set = soft
            .limits
            .threshold_mut(signal)
            .is_some_and(|amount| *amount != kubelet::ThresholdValue::Number(0));
        ensure!(
            !is_set || soft.grace_by_signal.contains_key(signal),
            "evictionSoft {signal} (--eviction-soft): grace period must be specified for the soft eviction threshold"
        );
    }
    config.settings.kubelet_config.pull_policy.validate().map_err(anyhow::Error::msg)?;
    let reserved = &config.presentation.reserved;
    reserved.validate().map_err(anyhow::Error::msg)?;
    let milli = std::thread::available_parallelism().map_or(1, usize::from) * 1000;
    let (policies, memory) = (&config.settings.kubelet_config, config.settings.memory);
    let reserved_memory = policies.hard_eviction.memory.to_number(memory.unsigned_abs());
    let capacity =
        [("cpu", i64::try_from(milli)?), ("memory", memory.saturating_sub_unsigned(reserved_memory))];
    reserved.validate_capacity(&capacity).map_err(anyhow::Error::msg)?;
    let images = &config.settings.kubelet_config.image_gc;
    ensure!(
        images.low_threshold_percent < images.high_threshold_percent,
        "imageGCLowThresholdPercent (--image-gc-low-threshold) {} must be less than imageGCHighThresholdPercent \
         (--image-gc-high-threshold) {}",
        images.low_threshold_percent,
        images.high_threshold_percent
    );
    Ok(())
}

/// Settings of certificates.
#[derive(Debug, Default, PartialEq)]
pub struct CertificateSettings {
    /// Whether the client certificate is renewed before it expires.
    pub rotate_client: Option<bool>,
    /// Whether the serving certificate is requested from the cluster until it is signed.
    pub request_serving: Option<bool>,
    /// CA for client authentication.
    pub client_ca: Option<PathBuf>,
    /// Serving certificate and its private key.
    pub serving_files: Option<(PathBuf, PathBuf)>,
}

/// The settings of certificates. They are needed before the rest of the configuration.
pub fn certificates(arguments: &[String]) -> anyhow::Result<CertificateSettings> {
    let mut found = CertificateSettings::default();
    let mut serving_files = (None, None);
    for (field, value) in all_fields(arguments)? {
        let path = || value.as_str().filter(|path| !path.is_empty()).map(PathBuf::from);
        match field.as_str() {
            ROTATE_CERTIFICATES => found.rotate_client = value.as_bool(),
            SERVER_TLS_BOOTSTRAP => found.request_serving = value.as_bool(),
            "authentication" => {
                let path = value["x509"]["clientCAFile"].as_str().filter(|path| !path.is_empty());
                found.client_ca = path.map(PathBuf::from);
            }
            "tlsCertFile" => serving_files.0 = path(),
            "tlsPrivateKeyFile" => serving_files.1 = path(),
            _ => {}
        }
    }
    found.serving_files = serving_files.0.zip(serving_files.1);
    Ok(found)
}

/// The CRI socket, if it is set.
pub fn endpoint(arguments: &[String]) -> anyhow::Result<Option<String>> {
    let fields = all_fields(arguments)?;
    let found = fields
        .iter()
        .rev()
        .find(|(field, _)| field == RUNTIME_ENDPOINT)
        .and_then(|(_, value)| value.as_str());
    Ok(found.filter(|socket| !socket.is_empty()).map(str::to_owned))
}

/// All fields with their values: first those of the file, then those of flags. The last value of a
/// field applies.
fn all_fields(arguments: &[String]) -> anyhow::Result<Vec<(String, Value)>> {
    let (mut fields, mut flags) = (Vec::new(), Vec::new());
    for argument in arguments {
        let Some((name, value)) = argument.trim_start_matches("--").split_once('=') else { continue };
        if name == "config" {
            fields.extend(read_file(&PathBuf::from(value))?);
        } else if let Some((_, field)) = FLAG_FIELDS.iter().find(|(known, _)| *known == name) {
            flags.push(((*field).to_owned(), flag_value(field, value)));
        }
    }
    fields.extend(flags);
    Ok(fields)
}

/// As in upstream, setting one threshold clears the defaults of the others. Thresholds that are not set
/// are not monitored.
fn clear_thresholds<'a>(config: &mut Config, fields: impl Iterator<Item = &'a str>) {
    let policies = &mut config.settings.kubelet_config;
    for field in fields {
        match field {
            "evictionHard" => policies.hard_eviction = kubelet::EvictionThresholds::NONE,
            "evictionSoft" => policies.soft_eviction.limits = kubelet::EvictionThresholds::NONE,
            "evictionSoftGracePeriod" => policies.soft_eviction.grace_by_signal.clear(),
            _ => {}
        }
    }
}

/// The fields of a KubeletConfiguration file.
fn read_file(path: &PathBuf) -> anyhow::Result<Vec<(String, Value)>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let value: Value = schema::yaml::parse(&text).with_context(|| path.display().to_string())?;
    let Value::Object(fields) = value else { bail!("{} is not a KubeletConfiguration", path.display()) };
    let is = |name: &str, expected: &str| fields.get(name).and_then(Value::as_str) == Some(expected);
    ensure!(
        is("kind", "KubeletConfiguration") && is("apiVersion", API_VERSION),
        "{} is not a KubeletConfiguration of {API_VERSION}",
        path.display()
    );
    Ok(fields.into_iter().filter(|(name, _)| name != "kind" && name != "apiVersion").collect())
}

/// Parses a taint as in flags: `key=value:effect`.
fn taint(text: &str) -> Value {
    let (named, effect) = text.rsplit_once(':').unwrap_or((text, ""));
    let (key, value) = named.split_once('=').unwrap_or((named, ""));
    serde_json::json!({"key": key, "value": value, "effect": effect})
}

/// The value of a flag in the form of the configuration file.
fn flag_value(field: &str, text: &str) -> Value {
    match field {
        "evictionHard"
        | "evictionMinimumReclaim"
        | "evictionSoft"
        | "evictionSoftGracePeriod"
        | "kubeReserved"
        | "systemReserved" => {
            let pairs = text.split(',').filter_map(|pair| pair.split_once(['<', '=']));
            Value::Object(pairs.map(|(name, value)| (name.to_owned(), Value::from(value))).collect())
        }
        "clusterDNS" | "allowedUnsafeSysctls" | "enforceNodeAllocatable" => {
            text.split(',').filter(|one| !one.is_empty()).map(Value::from).collect()
        }
        "cpuCFSQuota"
        | "failSwapOn"
        | "registerNode"
        | "seccompDefault"
        | "serializeImagePulls"
        | ROTATE_CERTIFICATES
        | SERVER_TLS_BOOTSTRAP => text.parse::<bool>().map_or_else(|_| Value::from(text), Value::from),
        "registerWithTaints" => text.split(',').map(taint).collect(),
        "nodeLabels"
        | "providerID"
        | "resolvConf"
        | CREDENTIAL_PROVIDER_BIN_DIR
        | CREDENTIAL_PROVIDER_CONFIG => Value::from(text),
        _ => text.parse::<i64>().map_or_else(|_| Value::from(text), Value::from),
    }
}

/// Adds the value to an error that says what it must be.
fn name_value(error: anyhow::Error, value: &Value) -> anyhow::Error {
    let message = error.to_string();
    if message.starts_with("must be ") { anyhow::anyhow!("{message}, got {value}") } else { error }
}

fn set_field(config: &mut Config, field: &str, value: &Value) -> anyhow::Result<()> {
    let number = || value.as_u64().context("must be a number");
    let text = || value.as_str().map(str::to_owned).context("must be a string");
    let settings = &mut config.settings;
    match field {
        "allowedUnsafeSysctls" => {
            let all = value.as_array().context("must be a list")?.iter();
            let all: Vec<String> = all.filter_map(|name| name.as_str().map(str::to_owned)).collect();
            if let Some(other) = all.iter().find(|name| !kubelet::is_own_sysctl(name)) {
                bail!("the sysctls {other:?} are not known to be namespaced");
            }
            settings.kubelet_config.allowed_unsafe_sysctls = all;
        }
        "clusterDNS" => {
            let all = value.as_array().context("must be a list")?;
            settings.cluster_dns = all.iter().filter_map(|ip| ip.as_str().map(str::to_owned)).collect();
        }
        // A flag without a field in the file, like `nodeLabels` below.
        "cloudProvider" => match text()?.as_str() {
            "external" => config.presentation.has_external_cloud_provider = true,
            "" => config.presentation.has_external_cloud_provider = false,
            other => bail!("{other:?} is not supported: only `external` is"),
        },
        "nodeLabels" => {
            for pair in text()?.split(',').filter(|pair| !pair.is_empty()) {
                let (name, value) =
                    pair.split_once('=').with_context(|| format!("{pair:?} must be name=value"))?;
                config.presentation.labels.insert(name.to_owned(), value.to_owned());
            }
        }
        "nodeStatusUpdateFrequency" => {
            let pause = std::time::Duration::try_from(duration(&text()?)?)?;
            ensure!(!pause.is_zero(), "must be greater than zero");
            // `None` follows the common housekeeping tick of 10 s, which is also the default of this
            // field.
            config.presentation.status_update_frequency = Some(pause).filter(|pause| pause.as_secs() != 10);
        }
        "podLogsDir" => settings.logs.dir = logs_dir(&text()?)?,
        "nodeStatusReportFrequency" => {
            config.presentation.status_report_frequency =
                Some(std::time::Duration::try_from(duration(&text()?)?)?);
        }
        "nodeStatusMaxImages" => {
            let limit = value.as_i64().filter(|limit| *limit >= -1);
            config.presentation.max_reported_images = Some(limit.context("must be a number, or -1 for all")?);
        }
        "nodeLeaseDurationSeconds" => {
            ensure!(number()? > 0, "must be greater than zero");
            config.presentation.lease_seconds = Some(i32::try_from(number()?)?);
        }
        "podsPerCore" => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let limit = u32::try_from(number()?.saturating_mul(u64::try_from(cores)?)).unwrap_or(u32::MAX);
            config.presentation.max_pods_by_cores = Some(limit).filter(|limit| *limit > 0);
        }
        "serializeImagePulls" => {
            let is_serial = value.as_bool().context("must be true or false")?;
            let policies = &mut settings.kubelet_config;
            ensure!(
                !is_serial || policies.max_parallel_image_pulls.is_none_or(|limit| limit == 1),
                "maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls is set to false"
            );
            if is_serial {
                policies.max_parallel_image_pulls = Some(1);
            } else {
                policies.max_parallel_image_pulls.take_if(|limit| *limit == 1);
            }
        }
        "maxParallelImagePulls" => {
            ensure!(number()? > 0, "must be a positive number");
            let limit = usize::try_from(number()?)?;
            ensure!(
                limit == 1 || settings.kubelet_config.max_parallel_image_pulls != Some(1),
                "maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls is set to false"
            );
            settings.kubelet_config.max_parallel_image_pulls = Some(limit);
        }
        "enableDebuggingHandlers" => {
            config.presentation.debug_handlers_disabled =
                !value.as_bool().context("must be true or false")?;
        }
        "failSwapOn" => {
            let swap_table = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
            let has_swap = swap_table.lines().count() > 1;
            ensure!(
                !has_swap || value.as_bool() == Some(false),
                "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false"
            );
        }
        "failCgroupV1" => {
            let is_cgroup_v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
            ensure!(
                is_cgroup_v2 || value.as_bool() != Some(true),
                "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be \
                 removed in a future release"
            );
        }
        // These fields are read before the node is configured.
        ROTATE_CERTIFICATES | SERVER_TLS_BOOTSTRAP | RUNTIME_ENDPOINT | "tlsCertFile"
        | "tlsPrivateKeyFile" => {}
        "authentication" => {
            let is = |name: &str, is: bool| value[name]["enabled"].as_bool() == Some(is);
            ensure!(
                !is("anonymous", true),
                "anonymous access is not supported: set anonymous.enabled to false"
            );
            if is("webhook", false) {
                tracing::warn!(
                    "authentication.webhook.enabled=false is ignored: the API server always authenticates tokens"
                );
            }
        }
        "podPidsLimit" => {
            settings.kubelet_config.pod_pids_limit = value.as_i64().context("must be a number")?
        }
        "providerID" => config.presentation.provider_id = text()?,
        "registerNode" => {
            config.presentation.is_registered_externally =
                !value.as_bool().context("must be true or false")?;
        }
        "clusterDomain" => settings.cluster_domain = text()?,
        "containerLogMaxFiles" => {
            ensure!(number()? > 1, "must be at least 2");
            settings.kubelet_config.max_log_files = usize::try_from(number()?)?;
        }
        "containerLogMaxSize" => settings.kubelet_config.max_log_bytes = bytes(&text()?)?,
        "cpuCFSQuota" => {
            settings.kubelet_config.cpu_cfs_quota = value.as_bool().context("must be true or false")?
        }
        "crashLoopBackOff" => {
            let period = &value["maxContainerRestartPeriod"];
            if !period.is_null() {
                let text =
                    period.as_str().context("maxContainerRestartPeriod must be a string such as 300s")?;
                let max_period = duration(text)?;
                ensure!(
                    (1_000..=300_000).contains(&max_period.as_millis()),
                    "maxContainerRestartPeriod (got: {} seconds) must be set between 1s and 300s",
                    max_period.as_secs_f64()
                );
                settings.kubelet_config.max_restart_backoff = max_period;
            }
        }
        "evictionHard" | "evictionSoft" | "evictionMinimumReclaim" => {
            let policies = &mut settings.kubelet_config;
            let limits = match field {
                "evictionHard" => &mut policies.hard_eviction,
                "evictionSoft" => &mut policies.soft_eviction.limits,
                _ => &mut policies.minimum_reclaim,
            };
            for (signal, threshold) in value.as_object().context("must be a map")? {
                let threshold = threshold.as_str().with_context(|| format!("{signal} must be a string"))?;
                set_threshold(limits, signal, threshold).with_context(|| signal.clone())?;
            }
        }
        MERGE_DEFAULT_EVICTION => drop(value.as_bool().context("must be true or false")?),
        "evictionSoftGracePeriod" => {
            for (signal, grace_period) in value.as_object().context("must be a map")? {
                let grace_period =
                    grace_period.as_str().with_context(|| format!("{signal} must be a string"))?;
                settings
                    .kubelet_config
                    .soft_eviction
                    .grace_by_signal
                    .insert(signal.clone(), duration(grace_period)?);
            }
        }
        "evictionMaxPodGracePeriod" => {
            settings.kubelet_config.soft_eviction.max_pod_grace_seconds =
                value.as_i64().context("must be a number")?.max(0);
        }
        "evictionPressureTransitionPeriod" => {
            settings.kubelet_config.pressure_transition_period = duration(&text()?)?
        }
        "imageGCHighThresholdPercent" => {
            settings.kubelet_config.image_gc.high_threshold_percent = percent(number()?)?
        }
        "imageGCLowThresholdPercent" => {
            settings.kubelet_config.image_gc.low_threshold_percent = percent(number()?)?
        }
        "imageMaximumGCAge" => settings.kubelet_config.image_gc.max_age = duration(&text()?)?,
        "imageMinimumGCAge" => settings.kubelet_config.image_gc.min_age = duration(&text()?)?,
        "imagePullCredentialsVerificationPolicy" => {
            settings.kubelet_config.pull_policy.verify =
                kubelet::CredentialVerification::parse(&text()?).map_err(anyhow::Error::msg)?;
        }
        "preloadedImagesVerificationAllowlist" => {
            settings.kubelet_config.pull_policy.allowed = string_list(value)?;
        }
        "kubeReserved" | "systemReserved" => {
            for (name, amount) in value.as_object().context("must be a map")? {
                let amount = amount.as_str().with_context(|| format!("{name} must be a string"))?;
                let known = ["cpu", "memory", "ephemeral-storage", "pid"].contains(&name.as_str());
                ensure!(known, "cannot reserve {name:?} resource");
                let quantity =
                    Quantity::parse(amount).map_err(|_| anyhow::anyhow!("{amount:?} is not a quantity"))?;
                let number = if name == "cpu" { quantity.milli() } else { quantity.value() };
                ensure!(number >= 0, "resource quantity for {name:?} cannot be negative: {amount}");
                let part = usize::from(field == "kubeReserved");
                config.presentation.reserved.values[part].insert(name.clone(), number);
            }
        }
        "kubeReservedCgroup" | "systemReservedCgroup" => {
            let part = usize::from(field == "kubeReservedCgroup");
            config.presentation.reserved.groups[part] = text()?;
        }
        "enforceNodeAllocatable" => {
            config.presentation.reserved.enforced = Some(string_list(value)?);
        }
        "maxPods" => config.presentation.max_pods = u32::try_from(number()?)?,
        "registerWithTaints" => {
            let mut taints: Vec<kubelet::Taint> = serde_json::from_value(value.clone())?;
            for taint in &mut taints {
                let known = ["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&taint.effect.as_str());
                ensure!(known, "invalid taint effect: {:?}", taint.effect);
                taint.value = taint.value.take().filter(|value| !value.is_empty());
            }
            config.presentation.taints.extend(taints);
        }
        "resolvConf" => settings.resolver = kubelet::ResolverConfig::from_path(&text()?),
        // A flag without a field in the file.
        "rootDir" => settings.root = PathBuf::from(text()?),
        "seccompDefault" => {
            settings.kubelet_config.seccomp_default = value.as_bool().context("must be true or false")?;
        }
        "shutdownGracePeriod" | "shutdownGracePeriodCriticalPods" => {
            let seconds = duration(&text()?)?.as_secs();
            clear_default_shutdown(settings);
            let known: i64 = settings.shutdown.iter().map(|period| period.seconds).sum();
            let critical = settings.shutdown.last().map_or(0, |period| period.seconds);
            // The two fields may come in any order; the second one completes the values.
            settings.shutdown = match field {
                "shutdownGracePeriod" => kubelet::periods(seconds, critical),
                _ => kubelet::periods(known.max(seconds), seconds),
            };
        }
        "shutdownGracePeriodByPodPriority" => {
            let all = value.as_array().context("must be a list")?;
            let number = |one: &Value, name: &str| {
                one[name].as_i64().with_context(|| format!("{name} must be a number"))
            };
            let parsed = all.iter().map(|one| {
                let priority = i32::try_from(number(one, "priority")?)?;
                Ok(kubelet::PriorityGracePeriod {
                    priority,
                    seconds: number(one, "shutdownGracePeriodSeconds")?,
                })
            });
            settings.shutdown = parsed.collect::<anyhow::Result<_>>()?;
            settings.is_shutdown_default = false;
        }
        "staticPodPath" => {
            let path = PathBuf::from(text()?);
            settings.manifests = (!path.as_os_str().is_empty()).then_some(path);
        }
        _ => ignored_fields::warn_if_ignored(field, value),
    }
    Ok(())
}

/// Upstream's validation of `podLogsDir`.
fn logs_dir(text: &str) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(text);
    ensure!(path.is_absolute(), "pod logs path {text:?} must be absolute path");
    let parts: Vec<_> = text.split('/').skip(1).collect();
    let is_clean = parts == [""] || !parts.iter().any(|part| ["", ".", ".."].contains(part));
    ensure!(is_clean, "pod logs path {text:?} must be normalized");
    ensure!(text.is_ascii(), "pod logs path {text:?} mut contains ASCII characters only");
    Ok(path)
}

fn string_list(value: &Value) -> anyhow::Result<Vec<String>> {
    let all = value.as_array().context("must be a list")?.iter();
    all.map(|one| one.as_str().map(str::to_owned).context("must be a list of strings")).collect()
}

fn set_threshold(
    limits: &mut kubelet::EvictionThresholds,
    signal: &str,
    threshold: &str,
) -> anyhow::Result<()> {
    if kubelet::OVERRIDDEN_SIGNALS.contains(&signal) {
        tracing::warn!(
            signal,
            "eviction threshold ignored: the threshold of the filesystem with the containers applies"
        );
        return Ok(());
    }
    let Some(amount) = limits.threshold_mut(signal) else { bail!("unknown eviction signal") };
    *amount = match threshold.strip_suffix('%') {
        Some(number) => kubelet::ThresholdValue::Percent(percent(number.trim().parse::<f64>()? as u64)?),
        None => kubelet::ThresholdValue::Number(bytes(threshold)?),
    };
    Ok(())
}

/// A duration in Go's format, such as `2m0s`.
fn duration(text: &str) -> anyhow::Result<jiff::SignedDuration> {
    let text = if text == "0" { "0s" } else { text };
    let found: jiff::SignedDuration =
        text.parse().map_err(|_| anyhow::anyhow!("{text:?} is not a duration such as 2m0s"))?;
    ensure!(!found.is_negative(), "{text} must not be negative");
    Ok(found)
}

fn percent(number: u64) -> anyhow::Result<u64> {
    ensure!(number <= 100, "{number} is not a percentage from 0 to 100");
    Ok(number)
}

fn bytes(text: &str) -> anyhow::Result<u64> {
    let amount = Quantity::parse(text).map_err(|_| anyhow::anyhow!("{text:?} is not a quantity"))?;
    u64::try_from(amount.value()).with_context(|| format!("{text:?} must not be negative"))
}

/// The first of the shutdown fields clears the default of all of them.
fn clear_default_shutdown(settings: &mut kubelet::Settings) {
    if std::mem::take(&mut settings.is_shutdown_default) {
        settings.shutdown.clear();
    }
}

#[cfg(test)]
mod tests;

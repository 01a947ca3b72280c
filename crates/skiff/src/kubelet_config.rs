//! `--kubelet-arg name=value`: the flags of upstream's kubelet that have a meaning here, and its configuration file
//! (`--kubelet-arg config=FILE`, a KubeletConfiguration), which they win over.

mod without_effect;

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use kubelet::Config;
use schema::quantity::Quantity;
use serde_json::Value;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";

/// Flags only; the file has no such fields.
const PROGRAMS: &str = "imageCredentialProviderBinDir";
const PROVIDERS: &str = "imageCredentialProviderConfig";

/// What is looked at before there is a node to change ([`certificates`], [`endpoint`]).
const ROTATES: &str = "rotateCertificates";
const OF_SERVER: &str = "serverTLSBootstrap";
const ENDPOINT: &str = "containerRuntimeEndpoint";

/// Whether what the file does not name of `evictionHard` is as if it named nothing.
const MERGES: &str = "mergeDefaultEvictionSettings";

/// Flags by the field of the configuration file that says the same.
const FLAGS: &[(&str, &str)] = &[
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
    ("image-credential-provider-bin-dir", PROGRAMS),
    ("image-credential-provider-config", PROVIDERS),
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
    ("rotate-certificates", ROTATES),
    ("rotate-server-certificates", OF_SERVER),
    ("seccomp-default", "seccompDefault"),
    ("serialize-image-pulls", "serializeImagePulls"),
    ("system-reserved", "systemReserved"),
    ("system-reserved-cgroup", "systemReservedCgroup"),
];

/// Changes a node's configuration as the flags say.
pub fn apply(arguments: &[String], config: &mut Config) -> anyhow::Result<()> {
    let mut pairs = Vec::new();
    for argument in arguments {
        let Some((name, value)) = argument.trim_start_matches("--").split_once('=') else {
            bail!("--kubelet-arg {argument}: write name=value");
        };
        if name == "config" {
            let fields = file(&PathBuf::from(value))?;
            if !fields.iter().any(|(field, value)| field == MERGES && *value == true) {
                forget_thresholds(config, fields.iter().map(|(field, _)| field.as_str()));
            }
            for (field, value) in fields {
                set(config, &field, &value).with_context(|| format!("{argument}: {field}"))?;
            }
            continue;
        }
        let Some((_, field)) = FLAGS.iter().find(|(known, _)| *known == name) else {
            let known: Vec<&str> = FLAGS.iter().map(|(name, _)| *name).chain(["config"]).collect();
            bail!("--kubelet-arg {name} has no meaning here; these have: {}", known.join(", "));
        };
        pairs.push((*field, flag_value(field, value)));
    }
    let path = |wanted: &str| {
        let found = pairs.iter().rev().find(|(field, _)| *field == wanted);
        found.map(|(_, value)| PathBuf::from(value.as_str().unwrap_or_default()))
    };
    match (path(PROVIDERS), path(PROGRAMS)) {
        (Some(file), Some(programs)) => {
            let read = kubelet::CredentialProviders::read(&file, &programs);
            config.settings.keeping.credentials = read.map_err(anyhow::Error::msg)?;
        }
        (None, None) => {}
        _ => bail!(
            "--kubelet-arg image-credential-provider-config and image-credential-provider-bin-dir belong together"
        ),
    }
    forget_thresholds(config, pairs.iter().map(|(field, _)| *field));
    for (field, value) in pairs.into_iter().filter(|(field, _)| ![PROGRAMS, PROVIDERS].contains(field)) {
        set(config, field, &value).with_context(|| format!("--kubelet-arg {field}"))?;
    }
    let shown = &mut config.presentation;
    shown.max_pods = shown.most_by_cores.map_or(shown.max_pods, |most| most.min(shown.max_pods));
    let soft = &mut config.settings.keeping.soft;
    for signal in kubelet::SIGNALS {
        let is_set =
            soft.limits.of_signal(signal).is_some_and(|amount| *amount != kubelet::Amount::Number(0));
        ensure!(
            !is_set || soft.patience.contains_key(signal),
            "evictionSoft {signal} (--eviction-soft): grace period must be specified for the soft eviction threshold"
        );
    }
    config.settings.keeping.pulled.check().map_err(anyhow::Error::msg)?;
    let reserved = &config.presentation.reserved;
    reserved.check().map_err(anyhow::Error::msg)?;
    let milli = std::thread::available_parallelism().map_or(1, usize::from) * 1000;
    let (keeping, memory) = (&config.settings.keeping, config.settings.memory);
    let kept = keeping.limits.memory.of(memory.unsigned_abs());
    let capacity = [("cpu", i64::try_from(milli)?), ("memory", memory.saturating_sub_unsigned(kept))];
    reserved.fits(&capacity).map_err(anyhow::Error::msg)?;
    let images = &config.settings.keeping.images;
    ensure!(
        images.low < images.high,
        "imageGCLowThresholdPercent (--image-gc-low-threshold) {} must be less than imageGCHighThresholdPercent \
         (--image-gc-high-threshold) {}",
        images.low,
        images.high
    );
    Ok(())
}

/// What is said of certificates.
#[derive(Debug, Default, PartialEq)]
pub struct Certificates {
    /// Whether the one by which the node is known to the API server is replaced before it ends.
    pub rotates: Option<bool>,
    /// Whether the one it serves with is asked for until somebody signs it.
    pub of_server: Option<bool>,
    /// Who vouches for those that ask the node, and the certificate it serves with and its key.
    pub client_ca: Option<PathBuf>,
    pub served: Option<(PathBuf, PathBuf)>,
}

/// What is said of certificates, which are needed first of all.
pub fn certificates(arguments: &[String]) -> anyhow::Result<Certificates> {
    let mut found = Certificates::default();
    let mut served = (None, None);
    for (field, value) in said(arguments)? {
        let path = || value.as_str().filter(|path| !path.is_empty()).map(PathBuf::from);
        match field.as_str() {
            ROTATES => found.rotates = value.as_bool(),
            OF_SERVER => found.of_server = value.as_bool(),
            "authentication" => {
                let path = value["x509"]["clientCAFile"].as_str().filter(|path| !path.is_empty());
                found.client_ca = path.map(PathBuf::from);
            }
            "tlsCertFile" => served.0 = path(),
            "tlsPrivateKeyFile" => served.1 = path(),
            _ => {}
        }
    }
    found.served = served.0.zip(served.1);
    Ok(found)
}

/// The runtime's socket, if that is said.
pub fn endpoint(arguments: &[String]) -> anyhow::Result<Option<String>> {
    let said = said(arguments)?;
    let found = said.iter().rev().find(|(field, _)| field == ENDPOINT).and_then(|(_, value)| value.as_str());
    Ok(found.filter(|socket| !socket.is_empty()).map(str::to_owned))
}

/// Everything that is said, the file first: the last word counts.
fn said(arguments: &[String]) -> anyhow::Result<Vec<(String, Value)>> {
    let (mut fields, mut flags) = (Vec::new(), Vec::new());
    for argument in arguments {
        let Some((name, value)) = argument.trim_start_matches("--").split_once('=') else { continue };
        if name == "config" {
            fields.extend(file(&PathBuf::from(value))?);
        } else if let Some((_, field)) = FLAGS.iter().find(|(known, _)| *known == name) {
            flags.push(((*field).to_owned(), flag_value(field, value)));
        }
    }
    fields.extend(flags);
    Ok(fields)
}

/// Who names one threshold names them all: those that are not named are not looked at.
fn forget_thresholds<'a>(config: &mut Config, fields: impl Iterator<Item = &'a str>) {
    let keeping = &mut config.settings.keeping;
    for field in fields {
        match field {
            "evictionHard" => keeping.limits = kubelet::Limits::NONE,
            "evictionSoft" => keeping.soft.limits = kubelet::Limits::NONE,
            "evictionSoftGracePeriod" => keeping.soft.patience.clear(),
            _ => {}
        }
    }
}

/// The fields of a KubeletConfiguration.
fn file(path: &PathBuf) -> anyhow::Result<Vec<(String, Value)>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let value: Value = schema::yaml::value(&text).with_context(|| path.display().to_string())?;
    let Value::Object(fields) = value else { bail!("{} is no KubeletConfiguration", path.display()) };
    let is = |name: &str, wanted: &str| fields.get(name).and_then(Value::as_str) == Some(wanted);
    ensure!(
        is("kind", "KubeletConfiguration") && is("apiVersion", API_VERSION),
        "{} is no KubeletConfiguration of {API_VERSION}",
        path.display()
    );
    Ok(fields.into_iter().filter(|(name, _)| name != "kind" && name != "apiVersion").collect())
}

/// A taint as flags write it: `key=value:effect`.
fn taint(text: &str) -> Value {
    let (named, effect) = text.rsplit_once(':').unwrap_or((text, ""));
    let (key, value) = named.split_once('=').unwrap_or((named, ""));
    serde_json::json!({"key": key, "value": value, "effect": effect})
}

/// A flag's text as the file would have it.
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
        | ROTATES
        | OF_SERVER => text.parse::<bool>().map_or_else(|_| Value::from(text), Value::from),
        "registerWithTaints" => text.split(',').map(taint).collect(),
        "nodeLabels" | "providerID" | "resolvConf" | PROGRAMS | PROVIDERS => Value::from(text),
        _ => text.parse::<i64>().map_or_else(|_| Value::from(text), Value::from),
    }
}

fn set(config: &mut Config, field: &str, value: &Value) -> anyhow::Result<()> {
    let number = || value.as_u64().context("this is a number");
    let text = || value.as_str().map(str::to_owned).context("this is a text");
    let settings = &mut config.settings;
    match field {
        "allowedUnsafeSysctls" => {
            let all = value.as_array().context("this is a list")?.iter();
            let all: Vec<String> = all.filter_map(|name| name.as_str().map(str::to_owned)).collect();
            if let Some(other) = all.iter().find(|name| !kubelet::is_own_sysctl(name)) {
                bail!("the sysctls {other:?} are not known to be namespaced");
            }
            settings.keeping.sysctls = all;
        }
        "clusterDNS" => {
            let all = value.as_array().context("this is a list")?;
            settings.cluster_dns = all.iter().filter_map(|ip| ip.as_str().map(str::to_owned)).collect();
        }
        // Flags only, like the labels below; the file has no such fields.
        "cloudProvider" => match text()?.as_str() {
            "external" => config.presentation.is_external = true,
            "" => config.presentation.is_external = false,
            other => bail!("{other:?} is not known here: only `external` is"),
        },
        "nodeLabels" => {
            for pair in text()?.split(',').filter(|pair| !pair.is_empty()) {
                let (name, value) =
                    pair.split_once('=').with_context(|| format!("{pair:?} is no name=value"))?;
                config.presentation.labels.insert(name.to_owned(), value.to_owned());
            }
        }
        "nodeStatusUpdateFrequency" => {
            let pause = std::time::Duration::try_from(duration(&text()?)?)?;
            ensure!(!pause.is_zero(), "it must be more than nothing");
            // What everything else keeps time by.
            config.presentation.report_every = Some(pause).filter(|pause| pause.as_secs() != 10);
        }
        "podLogsDir" => settings.logs.dir = logs_dir(&text()?)?,
        "nodeStatusReportFrequency" => {
            config.presentation.tell_every = Some(std::time::Duration::try_from(duration(&text()?)?)?);
        }
        "nodeStatusMaxImages" => {
            let most = value.as_i64().filter(|most| *most >= -1);
            config.presentation.most_images = Some(most.context("this is a number, or -1 for all")?);
        }
        "nodeLeaseDurationSeconds" => {
            ensure!(number()? > 0, "it must be more than nothing");
            config.presentation.lease_seconds = Some(i32::try_from(number()?)?);
        }
        "podsPerCore" => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let most = u32::try_from(number()?.saturating_mul(u64::try_from(cores)?)).unwrap_or(u32::MAX);
            config.presentation.most_by_cores = Some(most).filter(|most| *most > 0);
        }
        "serializeImagePulls" => {
            let one_by_one = value.as_bool().context("this is true or false")?;
            let keeping = &mut settings.keeping;
            ensure!(
                !one_by_one || keeping.pulls_at_once.is_none_or(|most| most == 1),
                "maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls is set to false"
            );
            if one_by_one {
                keeping.pulls_at_once = Some(1);
            } else {
                keeping.pulls_at_once.take_if(|most| *most == 1);
            }
        }
        "maxParallelImagePulls" => {
            ensure!(number()? > 0, "it must be a positive number");
            let most = usize::try_from(number()?)?;
            ensure!(
                most == 1 || settings.keeping.pulls_at_once != Some(1),
                "maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls is set to false"
            );
            settings.keeping.pulls_at_once = Some(most);
        }
        "enableDebuggingHandlers" => {
            config.presentation.is_closed = !value.as_bool().context("this is true or false")?;
        }
        "failSwapOn" => {
            let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
            let has_swap = swaps.lines().count() > 1;
            ensure!(
                !has_swap || value.as_bool() == Some(false),
                "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false"
            );
        }
        "failCgroupV1" => {
            let is_second = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
            ensure!(
                is_second || value.as_bool() != Some(true),
                "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be \
                 removed in a future release"
            );
        }
        // These are looked at before this, by whoever has use for them.
        ROTATES | OF_SERVER | ENDPOINT | "tlsCertFile" | "tlsPrivateKeyFile" => {}
        "authentication" => {
            let is = |name: &str, is: bool| value[name]["enabled"].as_bool() == Some(is);
            ensure!(!is("anonymous", true), "nobody is told anything here without saying who they are");
            if is("webhook", false) {
                tracing::warn!(
                    "tokens are always shown to the API server, whatever authentication.webhook says"
                );
            }
        }
        "podPidsLimit" => settings.keeping.pids = value.as_i64().context("this is a number")?,
        "providerID" => config.presentation.provider_id = text()?,
        "registerNode" => {
            config.presentation.is_unregistered = !value.as_bool().context("this is true or false")?;
        }
        "clusterDomain" => settings.cluster_domain = text()?,
        "containerLogMaxFiles" => {
            ensure!(number()? > 1, "at least two files are kept");
            settings.keeping.log_files = usize::try_from(number()?)?;
        }
        "containerLogMaxSize" => settings.keeping.log_size = bytes(&text()?)?,
        "cpuCFSQuota" => settings.keeping.limits_cpu = value.as_bool().context("this is true or false")?,
        "crashLoopBackOff" => {
            let period = &value["maxContainerRestartPeriod"];
            if !period.is_null() {
                let text = period.as_str().context("maxContainerRestartPeriod is a text such as 300s")?;
                let longest = duration(text)?;
                ensure!(
                    (1_000..=300_000).contains(&longest.as_millis()),
                    "maxContainerRestartPeriod (got: {} seconds) must be set between 1s and 300s",
                    longest.as_secs_f64()
                );
                settings.keeping.longest_pause = longest;
            }
        }
        "evictionHard" | "evictionSoft" | "evictionMinimumReclaim" => {
            let keeping = &mut settings.keeping;
            let limits = match field {
                "evictionHard" => &mut keeping.limits,
                "evictionSoft" => &mut keeping.soft.limits,
                _ => &mut keeping.reclaim,
            };
            for (signal, threshold) in value.as_object().context("this is a map")? {
                let threshold = threshold.as_str().with_context(|| format!("{signal} is a text"))?;
                evict(limits, signal, threshold).with_context(|| signal.clone())?;
            }
        }
        MERGES => drop(value.as_bool().context("this is true or false")?),
        "evictionSoftGracePeriod" => {
            for (signal, patience) in value.as_object().context("this is a map")? {
                let patience = patience.as_str().with_context(|| format!("{signal} is a text"))?;
                settings.keeping.soft.patience.insert(signal.clone(), duration(patience)?);
            }
        }
        "evictionMaxPodGracePeriod" => {
            settings.keeping.soft.grace = value.as_i64().context("this is a number")?.max(0);
        }
        "evictionPressureTransitionPeriod" => settings.keeping.lasts = duration(&text()?)?,
        "imageGCHighThresholdPercent" => settings.keeping.images.high = percent(number()?)?,
        "imageGCLowThresholdPercent" => settings.keeping.images.low = percent(number()?)?,
        "imageMaximumGCAge" => settings.keeping.images.oldest = duration(&text()?)?,
        "imageMinimumGCAge" => settings.keeping.images.youngest = duration(&text()?)?,
        "imagePullCredentialsVerificationPolicy" => {
            settings.keeping.pulled.verify = kubelet::Verify::named(&text()?).map_err(anyhow::Error::msg)?;
        }
        "preloadedImagesVerificationAllowlist" => {
            settings.keeping.pulled.allowed = texts(value)?;
        }
        "kubeReserved" | "systemReserved" => {
            for (name, amount) in value.as_object().context("this is a map")? {
                let amount = amount.as_str().with_context(|| format!("{name} is a text"))?;
                let known = ["cpu", "memory", "ephemeral-storage", "pid"].contains(&name.as_str());
                ensure!(known, "cannot reserve {name:?} resource");
                let quantity =
                    Quantity::parse(amount).map_err(|_| anyhow::anyhow!("{amount:?} is no quantity"))?;
                let number = if name == "cpu" { quantity.milli() } else { quantity.value() };
                ensure!(number >= 0, "resource quantity for {name:?} cannot be negative: {amount}");
                let part = usize::from(field == "kubeReserved");
                config.presentation.reserved.amounts[part].insert(name.clone(), number);
            }
        }
        "kubeReservedCgroup" | "systemReservedCgroup" => {
            let part = usize::from(field == "kubeReservedCgroup");
            config.presentation.reserved.groups[part] = text()?;
        }
        "enforceNodeAllocatable" => {
            config.presentation.reserved.enforced = Some(texts(value)?);
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
        "resolvConf" => settings.resolver = kubelet::Resolver::at(&text()?),
        // A flag only; the file has no such field.
        "rootDir" => settings.root = PathBuf::from(text()?),
        "seccompDefault" => {
            settings.keeping.seccomp_default = value.as_bool().context("this is true or false")?;
        }
        "shutdownGracePeriod" | "shutdownGracePeriodCriticalPods" => {
            let seconds = duration(&text()?)?.as_secs();
            forget_default_shutdown(settings);
            let known: i64 = settings.shutdown.iter().map(|period| period.seconds).sum();
            let critical = settings.shutdown.last().map_or(0, |period| period.seconds);
            // Either may come first; the second completes it.
            settings.shutdown = match field {
                "shutdownGracePeriod" => kubelet::periods(seconds, critical),
                _ => kubelet::periods(known.max(seconds), seconds),
            };
        }
        "shutdownGracePeriodByPodPriority" => {
            let all = value.as_array().context("this is a list")?;
            let number =
                |one: &Value, name: &str| one[name].as_i64().with_context(|| format!("{name} is a number"));
            let periods = all.iter().map(|one| {
                let priority = i32::try_from(number(one, "priority")?)?;
                Ok(kubelet::Period { priority, seconds: number(one, "shutdownGracePeriodSeconds")? })
            });
            settings.shutdown = periods.collect::<anyhow::Result<_>>()?;
            settings.is_shutdown_default = false;
        }
        "staticPodPath" => {
            let path = PathBuf::from(text()?);
            settings.manifests = (!path.as_os_str().is_empty()).then_some(path);
        }
        _ => without_effect::say(field, value),
    }
    Ok(())
}

/// Upstream's rules for it.
fn logs_dir(text: &str) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(text);
    ensure!(path.is_absolute(), "pod logs path {text:?} must be absolute path");
    let parts: Vec<_> = text.split('/').skip(1).collect();
    let is_clean = parts == [""] || !parts.iter().any(|part| ["", ".", ".."].contains(part));
    ensure!(is_clean, "pod logs path {text:?} must be normalized");
    ensure!(text.is_ascii(), "pod logs path {text:?} mut contains ASCII characters only");
    Ok(path)
}

fn texts(value: &Value) -> anyhow::Result<Vec<String>> {
    let all = value.as_array().context("this is a list")?.iter();
    all.map(|one| one.as_str().map(str::to_owned).context("this is a list of texts")).collect()
}

fn evict(limits: &mut kubelet::Limits, signal: &str, threshold: &str) -> anyhow::Result<()> {
    if kubelet::OVERRIDDEN_SIGNALS.contains(&signal) {
        tracing::warn!(signal, "the threshold of the disk that containers are on is used instead");
        return Ok(());
    }
    let Some(of) = limits.of_signal(signal) else { bail!("no such signal is looked at") };
    *of = match threshold.strip_suffix('%') {
        Some(number) => kubelet::Amount::Percent(percent(number.trim().parse::<f64>()? as u64)?),
        None => kubelet::Amount::Number(bytes(threshold)?),
    };
    Ok(())
}

/// As Go writes them: `2m0s`.
fn duration(text: &str) -> anyhow::Result<jiff::SignedDuration> {
    let text = if text == "0" { "0s" } else { text };
    let found: jiff::SignedDuration =
        text.parse().map_err(|_| anyhow::anyhow!("{text:?} is no time such as 2m0s"))?;
    ensure!(!found.is_negative(), "{text} is less than nothing");
    Ok(found)
}

fn percent(number: u64) -> anyhow::Result<u64> {
    ensure!(number <= 100, "{number} is more than all");
    Ok(number)
}

fn bytes(text: &str) -> anyhow::Result<u64> {
    let amount = Quantity::parse(text).map_err(|_| anyhow::anyhow!("{text:?} is no quantity"))?;
    u64::try_from(amount.value()).with_context(|| format!("{text:?} is less than nothing"))
}

/// The first of two fields replaces the default of both.
fn forget_default_shutdown(settings: &mut kubelet::Settings) {
    if std::mem::take(&mut settings.is_shutdown_default) {
        settings.shutdown.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_shutdown_field_replaces_the_default_of_all() {
        let check = |arguments: &[&str], expected: &[(i32, i64)], is_default: bool| {
            let mut config = config();
            config.settings.shutdown = kubelet::periods(10, 5);
            config.settings.is_shutdown_default = true;
            let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
            apply(&arguments, &mut config).expect("applied");
            let settings = &config.settings;
            let found: Vec<_> = settings.shutdown.iter().map(|one| (one.priority, one.seconds)).collect();
            assert_eq!((&found[..], settings.is_shutdown_default), (expected, is_default), "{arguments:?}");
        };
        check(&[], &[(0, 5), (2_000_000_000, 5)], true);
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kubelet.yaml");
        let file = |fields: &str| {
            let head = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\n";
            std::fs::write(&path, format!("{head}{fields}")).expect("written");
            format!("config={}", path.display())
        };
        check(&[&file("shutdownGracePeriod: 30s\n")], &[(0, 30), (2_000_000_000, 0)], false);
        check(&[&file("shutdownGracePeriod: 0s\n")], &[], false);
        check(
            &[&file("shutdownGracePeriodByPodPriority: [{priority: 7, shutdownGracePeriodSeconds: 3}]\n")],
            &[(7, 3)],
            false,
        );
    }

    fn config() -> Config {
        Config {
            settings: kubelet::Settings {
                node_name: "here".into(),
                node_ip: crate::address::fixed(None),
                second_ip: None,
                pods: PathBuf::new(),
                root: PathBuf::new(),
                logs: kubelet::Logs::within(PathBuf::new()),
                cluster_domain: String::new(),
                cluster_dns: Vec::new(),
                resolver: kubelet::Resolver::Host,
                memory: 8 << 30,
                keeping: kubelet::Keeping::default(),
                shutdown: Vec::new(),
                is_shutdown_default: false,
                manifests: None,
                proxied: false,
            },
            presentation: kubelet::Presentation::default(),
            api: None,
            referred: None,
            host_shutdown: kubelet::HostShutdown::default(),
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kubelet.yaml");
        let text = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nmaxPods: 5\n\
            staticPodPath: /etc/pods\nevictionHard:\n  memory.available: 200Mi\n  nodefs.available: 7%\n\
            imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages\n\
            preloadedImagesVerificationAllowlist: [registry.example/*]\ncontainerLogMaxSize: 1Mi\nimageMinimumGCAge: 1m30s\nimageMaximumGCAge: 24h\n\
            shutdownGracePeriod: 1m30s\nshutdownGracePeriodCriticalPods: 10s\nsystemReserved:\n  cpu: 500m\n  memory: 1Gi\n\
            kubeReserved:\n  memory: 1Gi\nenforceNodeAllocatable: [none]\nseccompDefault: false\n\
            resolvConf: ''\n";
        std::fs::write(&path, text).expect("written");
        let mut config = config();
        let arguments = [
            "max-pods=7",
            "register-node=false",
            "register-with-taints=a=b:NoSchedule,c:NoExecute",
            "node-labels=x=y",
            "seccomp-default=true",
            "resolv-conf=/first",
            "resolv-conf=/last",
            "cloud-provider=external",
            "eviction-soft=nodefs.available<1Gi",
            "eviction-soft-grace-period=nodefs.available=1m30s",
            "eviction-max-pod-grace-period=20",
            "eviction-pressure-transition-period=1m",
            "node-status-update-frequency=1m",
            "pod-max-pids=100",
            "eviction-minimum-reclaim=nodefs.available=500Mi,memory.available=5%",
            "serialize-image-pulls=true",
            "provider-id=cloud://1",
            "kube-reserved=memory=1Mi,pid=5",
        ];
        let mut arguments: Vec<String> = arguments.map(str::to_owned).to_vec();
        arguments.push(format!("config={}", path.display()));
        apply(&arguments, &mut config).expect("understood");
        let shown = &config.presentation;
        let taints: Vec<_> = shown.taints.iter().map(|taint| (&*taint.key, taint.value.as_deref())).collect();
        assert_eq!(taints, [("a", Some("b")), ("c", None)]);
        assert!(shown.is_unregistered && shown.is_external && shown.labels["x"] == "y");
        assert_eq!(
            (shown.provider_id.as_str(), shown.report_every.map(|pause| pause.as_secs())),
            ("cloud://1", Some(60))
        );
        assert_eq!(config.settings.keeping.pids, 100);
        assert!(config.settings.keeping.seccomp_default);
        assert_eq!(config.settings.resolver, kubelet::Resolver::File("/last".into()));
        assert_eq!(config.presentation.max_pods, 7);
        assert_eq!(config.settings.manifests, Some(PathBuf::from("/etc/pods")));
        let limits = &config.settings.keeping.limits;
        use kubelet::Amount::{Number, Percent};
        assert_eq!((limits.memory, limits.disk, limits.inodes), (Number(200 << 20), Percent(7), Number(0)));
        let soft = &config.settings.keeping.soft;
        assert_eq!((soft.limits.disk, soft.patience["nodefs.available"].as_secs()), (Number(1 << 30), 90));
        assert_eq!((soft.grace, config.settings.keeping.lasts.as_secs()), (20, 60));
        let reclaim = &config.settings.keeping.reclaim;
        assert_eq!(
            (reclaim.disk, reclaim.memory, reclaim.inodes),
            (Number(500 << 20), Percent(5), Number(0))
        );
        assert_eq!(config.settings.keeping.pulls_at_once, Some(1));
        assert_eq!(config.settings.keeping.log_size, 1 << 20);
        let pulled = kubelet::PullPolicy {
            verify: kubelet::Verify::NotAllowed,
            allowed: vec!["registry.example/*".to_owned()],
        };
        assert_eq!(config.settings.keeping.pulled, pulled);
        let images = &config.settings.keeping.images;
        assert_eq!((images.youngest.as_secs(), images.oldest.as_secs()), (90, 86_400));
        let shutdown: Vec<_> =
            config.settings.shutdown.iter().map(|period| (period.priority, period.seconds)).collect();
        assert_eq!(shutdown, [(0, 80), (2_000_000_000, 10)]);
        let reserved = &config.presentation.reserved;
        let amounts = ["cpu", "memory", "pid"].map(|name| reserved.of(name));
        assert_eq!(amounts, [500, (1 << 30) + (1 << 20), 5]);
        assert_eq!(reserved.enforced.as_deref(), Some(&["none".to_owned()][..]));
    }

    /// Upstream's rule: naming one takes the others away, unless the file says that they stay.
    #[test]
    fn thresholds_are_named_together() {
        use kubelet::Amount::{Number, Percent};
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kubelet.yaml");
        let head = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\n";
        let limits = |fields: &str, flags: &[&str]| {
            std::fs::write(&path, format!("{head}{fields}")).expect("written");
            let file = format!("config={}", path.display());
            let arguments: Vec<String> =
                [&*file].iter().chain(flags).map(|argument| (*argument).to_owned()).collect();
            let mut config = config();
            apply(&arguments, &mut config).expect("understood");
            let limits = config.settings.keeping.limits;
            (limits.memory, limits.disk)
        };
        let (usual_memory, usual_disk) = (Number(100 << 20), Percent(10));
        let file = "evictionHard: {nodefs.available: 7%}\n";
        let merging = "evictionHard: {nodefs.available: 7%}\nmergeDefaultEvictionSettings: true\n";
        assert_eq!(limits("", &[]), (usual_memory, usual_disk));
        assert_eq!(limits(file, &[]), (Number(0), Percent(7)));
        assert_eq!(limits(merging, &[]), (usual_memory, Percent(7)));
        assert_eq!(limits(file, &["eviction-hard=memory.available<5"]), (Number(5), Number(0)));
        assert_eq!(limits(merging, &["eviction-hard=memory.available<5"]), (Number(5), Number(0)));
        let twice = ["eviction-hard=memory.available<5", "eviction-hard=nodefs.available<1%"];
        assert_eq!(limits("", &twice), (Number(5), Percent(1)));
    }

    /// What upstream's own defaults name, and what it takes without heeding it.
    #[test]
    fn all_signals_of_upstream_can_be_named() {
        use kubelet::Amount::{Number, Percent};
        let mut config = config();
        let all = "eviction-hard=memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<4%,imagefs.available<15%,\
            imagefs.inodesFree<3%,containerfs.available<2%,containerfs.inodesFree<1%,pid.available<10,\
            allocatableMemory.available<1Ki";
        apply(&[all.to_owned()], &mut config).expect("understood");
        let expected = kubelet::Limits {
            inodes: Percent(4),
            image_inodes: Percent(3),
            processes: Number(10),
            pods_memory: Number(1024),
            ..kubelet::Limits::default()
        };
        assert_eq!(config.settings.keeping.limits, expected);
    }

    #[test]
    fn pauses_and_processors_are_limited_as_the_file_says() {
        let check = |value: Value, expected: Result<i64, &str>| {
            let mut config = config();
            let done = set(&mut config, "crashLoopBackOff", &value).map_err(|error| error.to_string());
            let found = done.map(|()| config.settings.keeping.longest_pause.as_secs());
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        let period = |text: &str| serde_json::json!({"maxContainerRestartPeriod": text});
        check(Value::Object(Default::default()), Ok(300));
        check(period("1m"), Ok(60));
        check(
            serde_json::json!({"maxContainerRestartPeriod": 60}),
            Err("maxContainerRestartPeriod is a text such as 300s"),
        );
        check(
            period("0s"),
            Err("maxContainerRestartPeriod (got: 0 seconds) must be set between 1s and 300s"),
        );
        check(
            period("6m"),
            Err("maxContainerRestartPeriod (got: 360 seconds) must be set between 1s and 300s"),
        );
        let mut config = config();
        apply(&["cpu-cfs-quota=false".to_owned()], &mut config).expect("understood");
        assert!(!config.settings.keeping.limits_cpu);
    }

    #[test]
    fn logs_go_where_the_file_says() {
        let check = |path: &str, expected: Result<&str, &str>| {
            let mut config = config();
            let done = set(&mut config, "podLogsDir", &Value::from(path)).map_err(|error| error.to_string());
            let found = done.map(|()| config.settings.logs.dir);
            assert_eq!(found, expected.map(PathBuf::from).map_err(str::to_owned));
        };
        check("/logs/pods", Ok("/logs/pods"));
        check("logs", Err("pod logs path \"logs\" must be absolute path"));
        check("/logs/../x", Err("pod logs path \"/logs/../x\" must be normalized"));
        check("/logs/", Err("pod logs path \"/logs/\" must be normalized"));
        check("/\u{e9}", Err("pod logs path \"/\u{e9}\" mut contains ASCII characters only"));
    }

    #[test]
    fn some_is_needed_before_there_is_a_node() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kubelet.yaml");
        let text = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\nrotateCertificates: true\n\
            authentication: {x509: {clientCAFile: /ca}}\ntlsCertFile: /c\ntlsPrivateKeyFile: /k\n\
            containerRuntimeEndpoint: unix:///run/x.sock\npodsPerCore: 1\nnodeStatusMaxImages: -1\n\
            nodeLeaseDurationSeconds: 20\nnodeStatusReportFrequency: 1m\nmaxParallelImagePulls: 3\n";
        std::fs::write(&path, text).expect("written");
        let arguments = [format!("config={}", path.display()), "rotate-server-certificates=true".to_owned()];
        let expected = Certificates {
            rotates: Some(true),
            of_server: Some(true),
            client_ca: Some("/ca".into()),
            served: Some(("/c".into(), "/k".into())),
        };
        assert_eq!(certificates(&arguments).expect("understood"), expected);
        assert_eq!(endpoint(&arguments).expect("understood").as_deref(), Some("unix:///run/x.sock"));
        let mut config = config();
        config.presentation.max_pods = 110;
        apply(&arguments, &mut config).expect("understood");
        let cores = u32::try_from(std::thread::available_parallelism().map_or(1, usize::from)).expect("few");
        let shown = &config.presentation;
        assert_eq!((shown.max_pods, shown.most_images), (cores.min(110), Some(-1)));
        assert_eq!(
            (shown.lease_seconds, shown.tell_every.map(|every| every.as_secs())),
            (Some(20), Some(60))
        );
        assert_eq!(config.settings.keeping.pulls_at_once, Some(3));
    }

    #[test]
    fn mistakes_are_named() {
        let check = |argument: &str, expected: &str| {
            let error = apply(&[argument.to_owned()], &mut config()).expect_err("a mistake");
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        };
        check("register-with-taints=a=b", "invalid taint effect: \"\"");
        check("cloud-provider=aws", "\"aws\" is not known here: only `external` is");
        check("node-labels=a", "\"a\" is no name=value");
        check("allowed-unsafe-sysctls=net.*,kernel.panic", "\"kernel.panic\" are not known to be namespaced");
        check("max-pods", "write name=value");
        check("colour=red", "has no meaning here; these have: allowed-unsafe-sysctls");
        check("max-pods=many", "this is a number");
        check("seccomp-default=yes", "this is true or false");
        check("eviction-hard=moon.phase<3%", "no such signal");
        check(
            "eviction-soft=memory.available<1Gi",
            "grace period must be specified for the soft eviction threshold",
        );
        check("container-log-max-size=x", "is no quantity");
        check("minimum-image-ttl-duration=soon", "is no time such as 2m0s");
        check("image-gc-high-threshold=50", "80 must be less than imageGCHighThresholdPercent");
        check(
            "enforce-node-allocatable=system-reserved",
            "(--system-reserved-cgroup) must be specified when",
        );
        check("kube-reserved=example.com/gpu=1", "cannot reserve \"example.com/gpu\" resource");
        check("system-reserved=cpu=-1", "resource quantity for \"cpu\" cannot be negative: -1");
        check(
            "system-reserved=memory=8Gi",
            "Resource \"memory\" has a reservation of 8589934592 but capacity",
        );
        check("image-credential-provider-config=/x", "and image-credential-provider-bin-dir belong together");
        check("config=/not/there", "cannot read /not/there");
    }
}

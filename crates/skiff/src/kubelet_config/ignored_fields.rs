//! Fields of upstream's KubeletConfiguration that skiff ignores. A field that is set produces a warning
//! with the reason.

use serde_json::Value;

/// Values that match skiff's fixed behaviour; they produce no warning.
const MATCHING_VALUES: &[(&str, &str)] = &[
    ("authorization", r#"{"mode":"Webhook"}"#),
    ("cgroupsPerQOS", "true"),
    ("configMapAndSecretChangeDetectionStrategy", r#""Watch""#),
    ("cpuManagerPolicy", r#""none""#),
    ("enableControllerAttachDetach", "true"),
    ("enableServer", "true"),
    ("localStorageCapacityIsolation", "true"),
    ("memoryManagerPolicy", r#""None""#),
    ("topologyManagerPolicy", r#""none""#),
    ("topologyManagerScope", r#""container""#),
];

/// Fields without effect, sorted, and the reason.
const IGNORED_FIELDS: &[(&str, &str)] = &[
    ("address", "use --kubelet-address"),
    ("authorization", "requests are always authorized by the API server"),
    ("cgroupDriver", "cgroups are managed directly in cgroupfs"),
    ("cgroupRoot", "pods are always below skiff's own cgroup"),
    ("cgroupsPerQOS", "QoS classes always have cgroups of their own"),
    ("configMapAndSecretChangeDetectionStrategy", "ConfigMaps and Secrets are always watched"),
    ("containerLogMaxWorkers", "logs are rotated one after another"),
    ("containerLogMonitorInterval", "logs are checked every ten seconds"),
    ("contentType", "requests always use JSON"),
    ("cpuCFSQuotaPeriod", "it is always 100 ms"),
    ("cpuManagerPolicy", "CPUs are not assigned to single pods"),
    ("cpuManagerPolicyOptions", "CPUs are not assigned to single pods"),
    ("cpuManagerReconcilePeriod", "CPUs are not assigned to single pods"),
    ("enableContentionProfiling", "there is no profiling"),
    ("enableControllerAttachDetach", "volumes are always attached by the controller"),
    ("enableDebugFlagsHandler", "there are no debug flags"),
    ("enableProfilingHandler", "there is no profiling"),
    ("enableServer", "the server is always enabled"),
    ("enableSystemLogHandler", "logs of the host are not served"),
    ("enableSystemLogQuery", "logs of the host are not served"),
    ("eventBurst", "events are aggregated, not rate-limited"),
    ("eventRecordQPS", "events are aggregated, not rate-limited"),
    (
        "featureGates",
        "there are no feature gates: features that are stable and enabled by default upstream are enabled",
    ),
    ("fileCheckFrequency", "changes are detected immediately"),
    ("hairpinMode", "pods can always reach themselves through their Service"),
    ("healthzBindAddress", "health is served at /healthz of the kubelet's port"),
    ("healthzPort", "health is served at /healthz of the kubelet's port"),
    ("httpCheckFrequency", "static pods are not fetched from URLs"),
    ("imageServiceEndpoint", "images are managed through the runtime's socket"),
    ("iptablesDropBit", "iptables is not used"),
    ("iptablesMasqueradeBit", "iptables is not used"),
    ("kernelMemcgNotification", "memory is checked every ten seconds"),
    ("kubeAPIBurst", "the API server limits the request rate"),
    ("kubeAPIQPS", "the API server limits the request rate"),
    ("kubeletCgroups", "skiff stays in its cgroup"),
    ("localStorageCapacityIsolation", "disk usage is always checked"),
    ("logging", "use --log"),
    ("makeIPTablesUtilChains", "iptables is not used"),
    ("maxOpenFiles", "the limit is that of the skiff process"),
    ("memoryManagerPolicy", "memory is not assigned to single pods"),
    ("memoryReservationPolicy", "memory is not reserved by cgroups"),
    ("memorySwap", "pods do not use swap"),
    ("memoryThrottlingFactor", "memory is not throttled"),
    ("oomScoreAdj", "the OOM score of skiff is not changed"),
    ("podCIDR", "pod networks are those of the Node object"),
    ("port", "use --kubelet-port"),
    ("protectKernelDefaults", "kernel settings are neither changed nor checked"),
    ("qosReserved", "memory is not reserved for QoS classes"),
    ("readOnlyPort", "there is no read-only port"),
    ("registryBurst", "registries limit the request rate"),
    ("registryPullQPS", "registries limit the request rate"),
    ("reservedMemory", "memory is not assigned to single pods"),
    ("reservedSystemCPUs", "CPUs are not assigned to single pods"),
    ("runOnce", "the kubelet always keeps running"),
    ("runtimeRequestTimeout", "requests to the runtime have no time limit"),
    ("showHiddenMetricsForVersion", "there are no hidden metrics"),
    ("singleProcessOOMKill", "the kernel decides which processes are killed"),
    ("staticPodURL", "static pods are not fetched from URLs"),
    ("staticPodURLHeader", "static pods are not fetched from URLs"),
    ("streamingConnectionIdleTimeout", "idle streams are not closed"),
    ("syncFrequency", "changes are detected immediately"),
    ("systemCgroups", "processes of the host stay in their cgroups"),
    ("tlsCipherSuites", "all secure ones are offered"),
    ("tlsCurvePreferences", "all secure ones are offered"),
    ("tlsMinVersion", "it is always TLS 1.2"),
    ("topologyManagerPolicy", "resources are not aligned by NUMA node"),
    ("topologyManagerPolicyOptions", "resources are not aligned by NUMA node"),
    ("topologyManagerScope", "resources are not aligned by NUMA node"),
    ("tracing", "tracing is not supported"),
    ("userNamespaces", "each pod has 65536 user IDs"),
    ("volumePluginDir", "FlexVolumes are not supported"),
    ("volumeStatsAggPeriod", "volume usage is measured on request"),
];

/// Logs a warning if a field is ignored, unless its value is the zero value or matches skiff's
/// behaviour.
pub fn warn_if_ignored(field: &str, value: &Value) {
    let is_known = |(name, text): &(&str, &str)| {
        *name == field && serde_json::from_str::<Value>(text).is_ok_and(|known| known == *value)
    };
    // For fields that are always on, `false` is not a zero value but a request that cannot be met.
    let disables_default = *value == false && MATCHING_VALUES.contains(&(field, "true"));
    if (is_zero_value(value) && !disables_default) || MATCHING_VALUES.iter().any(is_known) {
        return;
    }
    match IGNORED_FIELDS.iter().find(|(name, _)| *name == field) {
        Some((_, reason)) => tracing::warn!(field, reason, "KubeletConfiguration field is ignored"),
        None => tracing::warn!(field, "unknown KubeletConfiguration field"),
    }
}

/// Whether a value is the zero value that tools write for an unset field.
fn is_zero_value(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || text == "0s",
        Value::Array(all) => all.iter().all(is_zero_value),
        Value::Object(fields) => fields.values().all(is_zero_value),
        Value::Bool(true) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_fields_are_sorted_and_zero_values_detected() {
        let check = |value: Value, expected: bool| assert_eq!(is_zero_value(&value), expected, "{value}");
        check(serde_json::json!({"flushFrequency": 0, "options": {"json": {"infoBufferSize": "0"}}}), false);
        check(serde_json::json!({"flushFrequency": 0, "verbosity": 0}), true);
        check(serde_json::json!("0s"), true);
        check(serde_json::json!([]), true);
        check(serde_json::json!(true), false);
        for pair in IGNORED_FIELDS.windows(2) {
            assert!(pair[0].0 < pair[1].0, "{} is not in sorted order", pair[1].0);
        }
        for (field, value) in MATCHING_VALUES {
            assert!(IGNORED_FIELDS.iter().any(|(name, _)| name == field), "{field}");
            serde_json::from_str::<Value>(value).expect("a value");
        }
    }
}

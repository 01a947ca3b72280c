//! What upstream's KubeletConfiguration has and this node has no use for. Whoever sets it is told so, and why.

use serde_json::Value;

/// Fields with a value that says what is done here anyway.
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

/// Fields of upstream that change nothing here, and why.
const IGNORED_FIELDS: &[(&str, &str)] = &[
    ("address", "say --kubelet-address"),
    ("authorization", "who asks this node is always judged by the API server"),
    ("cgroupDriver", "groups are made in the kernel's own file system"),
    ("cgroupRoot", "pods are in a group of this program's own"),
    ("cgroupsPerQOS", "pods of a class are always in a group of their own"),
    ("configMapAndSecretChangeDetectionStrategy", "they are always watched"),
    ("containerLogMaxWorkers", "logs are looked at one after the other"),
    ("containerLogMonitorInterval", "logs are looked at every ten seconds"),
    ("contentType", "this is JSON"),
    ("cpuCFSQuotaPeriod", "it is 100 ms"),
    ("cpuManagerPolicy", "processors are not given to single pods"),
    ("cpuManagerPolicyOptions", "processors are not given to single pods"),
    ("cpuManagerReconcilePeriod", "processors are not given to single pods"),
    ("enableContentionProfiling", "there are no profiles"),
    ("enableControllerAttachDetach", "volumes are always attached by the controller"),
    ("enableDebugFlagsHandler", "there are no such flags"),
    ("enableProfilingHandler", "there are no profiles"),
    ("enableServer", "the node always answers"),
    ("enableSystemLogHandler", "logs of the host are not served"),
    ("enableSystemLogQuery", "logs of the host are not served"),
    ("eventBurst", "events are put together, not counted"),
    ("eventRecordQPS", "events are put together, not counted"),
    ("featureGates", "there are no such gates: what is stable and on by default upstream is on"),
    ("fileCheckFrequency", "changes are seen at once"),
    ("hairpinMode", "pods always reach themselves by their Service"),
    ("healthzBindAddress", "health is told at /healthz of the node's own port"),
    ("healthzPort", "health is told at /healthz of the node's own port"),
    ("httpCheckFrequency", "manifests are not fetched"),
    ("imageServiceEndpoint", "images are at the socket of the runtime"),
    ("iptablesDropBit", "there is no iptables"),
    ("iptablesMasqueradeBit", "there is no iptables"),
    ("kernelMemcgNotification", "memory is looked at every ten seconds"),
    ("kubeAPIBurst", "the API server says how much it takes"),
    ("kubeAPIQPS", "the API server says how much it takes"),
    ("kubeletCgroups", "this program is left in its group"),
    ("localStorageCapacityIsolation", "disks are always looked at"),
    ("logging", "say --log"),
    ("makeIPTablesUtilChains", "there is no iptables"),
    ("maxOpenFiles", "the limit is the one that this program was started with"),
    ("memoryManagerPolicy", "memory is not given to single pods"),
    ("memoryReservationPolicy", "memory is not protected by cgroups"),
    ("memorySwap", "pods do not swap"),
    ("memoryThrottlingFactor", "nobody is throttled for memory"),
    ("oomScoreAdj", "this program is left with its score"),
    ("podCIDR", "addresses are those of the Node object"),
    ("port", "say --kubelet-port"),
    ("protectKernelDefaults", "the kernel's settings are neither changed nor checked"),
    ("qosReserved", "memory is not reserved for classes of pods"),
    ("readOnlyPort", "nothing is told to whoever asks"),
    ("registryBurst", "registries say how much they take"),
    ("registryPullQPS", "registries say how much they take"),
    ("reservedMemory", "memory is not given to single pods"),
    ("reservedSystemCPUs", "processors are not given to single pods"),
    ("runOnce", "a node goes on"),
    ("runtimeRequestTimeout", "runtimes have as long as they need"),
    ("showHiddenMetricsForVersion", "there are none"),
    ("singleProcessOOMKill", "the kernel decides who goes"),
    ("staticPodURL", "manifests are not fetched"),
    ("staticPodURLHeader", "manifests are not fetched"),
    ("streamingConnectionIdleTimeout", "streams last as long as both ends want"),
    ("syncFrequency", "changes are seen at once"),
    ("systemCgroups", "the host's processes are left in their groups"),
    ("tlsCipherSuites", "all that are safe are offered"),
    ("tlsCurvePreferences", "all that are safe are offered"),
    ("tlsMinVersion", "it is TLS 1.2"),
    ("topologyManagerPolicy", "pods are not aligned"),
    ("topologyManagerPolicyOptions", "pods are not aligned"),
    ("topologyManagerScope", "pods are not aligned"),
    ("tracing", "nothing is traced"),
    ("userNamespaces", "pods have 65536 users each"),
    ("volumePluginDir", "there are no FlexVolumes"),
    ("volumeStatsAggPeriod", "volumes are looked at when somebody asks"),
];

/// Says that something has no effect, unless it says nothing or what is so anyway.
pub fn warn_if_ignored(field: &str, value: &Value) {
    let is_known = |(name, text): &(&str, &str)| {
        *name == field && serde_json::from_str::<Value>(text).is_ok_and(|known| known == *value)
    };
    // What is so unless somebody says that it is not.
    let disables_default = *value == false && MATCHING_VALUES.contains(&(field, "true"));
    if (is_zero_value(value) && !disables_default) || MATCHING_VALUES.iter().any(is_known) {
        return;
    }
    match IGNORED_FIELDS.iter().find(|(name, _)| *name == field) {
        Some((_, reason)) => {
            tracing::warn!(field, reason, "this field of KubeletConfiguration has no effect")
        }
        None => tracing::warn!(field, "KubeletConfiguration has no such field"),
    }
}

/// What tools write for what nobody has said.
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
            assert!(pair[0].0 < pair[1].0, "{} is not in its place", pair[1].0);
        }
        for (field, value) in MATCHING_VALUES {
            assert!(IGNORED_FIELDS.iter().any(|(name, _)| name == field), "{field}");
            serde_json::from_str::<Value>(value).expect("a value");
        }
    }
}

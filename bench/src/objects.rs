//! The objects that are written: a ConfigMap of about 1 KiB, and a Pod of about 3 KiB as created for a
//! Deployment.

use serde_json::{Value, json};

/// Pods are spread over this many groups, so that a selector for one group matches 1 %.
pub const GROUP_COUNT: usize = 100;
pub const NAMESPACE: &str = "default";

pub fn config_map(name: &str) -> Value {
    let line = "listen=0.0.0.0:8080 upstream=backend.default.svc timeout=30s\n";
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"app": "bench"}},
        "data": {"app.conf": line.repeat(14), "mode": "fast"},
    })
}

pub fn labels(index: usize) -> Value {
    json!({
        "app.kubernetes.io/component": "api",
        "app.kubernetes.io/instance": "orders-eu",
        "app.kubernetes.io/name": "orders",
        "group": format!("g{}", index % GROUP_COUNT),
        "pod-template-hash": "7d4b9c6f58",
        "tier": if index.is_multiple_of(2) { "front" } else { "back" },
    })
}

/// A Pod as a client sends it.
pub fn pod(index: usize) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(index),
            "namespace": NAMESPACE,
            "labels": labels(index),
            "annotations": {
                "example.com/config-digest": "6b1f0c5a7c2e4d0f9a3b8e7d6c5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b0c9d8e7f",
                "example.com/owner": "the people who run orders",
            },
        },
        "spec": {
            "initContainers": [{
                "name": "schema",
                "image": "registry.example.com/orders/schema:4.2.0",
                "command": ["/bin/schema", "upgrade", "--wait=60s"],
                "env": [secret("DATABASE_PASSWORD", "password")],
                "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
            }],
            "containers": [api_container(), {
                "name": "forwarder",
                "image": "registry.example.com/platform/forwarder:1.30.2",
                "args": ["--from=/var/log/orders", "--to=logs.platform.svc:4317"],
                "resources": {"requests": {"cpu": "20m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
                "volumeMounts": [{"name": "logs", "mountPath": "/var/log/orders", "readOnly": true}],
            }],
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{
                "weight": 100,
                "podAffinityTerm": {
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "orders"}},
                    "topologyKey": "kubernetes.io/hostname",
                },
            }]}},
            "securityContext": {"fsGroup": 2000, "runAsNonRoot": true, "runAsUser": 1000},
            "terminationGracePeriodSeconds": 45,
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            ],
            "volumes": [
                {"name": "logs", "emptyDir": {"sizeLimit": "256Mi"}},
                {"name": "settings", "configMap": {"name": "orders-settings"}},
                {"name": "scratch", "emptyDir": {"medium": "Memory"}},
            ],
        },
    })
}

pub fn pod_name(index: usize) -> String {
    format!("orders-7d4b9c6f58-{index:05}")
}

fn api_container() -> Value {
    let probe =
        |path: &str, period: u32| json!({"httpGet": {"path": path, "port": "http"}, "periodSeconds": period});
    json!({
        "name": "api",
        "image": "registry.example.com/orders/api:4.2.0",
        "args": ["serve", "--listen=:8080", "--metrics=:9090", "--settings=/etc/orders"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "DATABASE_HOST", "value": "postgres.storage.svc.cluster.local"},
            secret("DATABASE_USER", "user"),
            secret("DATABASE_PASSWORD", "password"),
        ],
        "ports": [{"name": "http", "containerPort": 8080}, {"name": "metrics", "containerPort": 9090}],
        "livenessProbe": probe("/live", 20),
        "readinessProbe": probe("/ready", 5),
        "resources": {
            "requests": {"cpu": "250m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
        },
        "volumeMounts": [
            {"name": "logs", "mountPath": "/var/log/orders"},
            {"name": "settings", "mountPath": "/etc/orders", "readOnly": true},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
    })
}

fn secret(name: &str, key: &str) -> Value {
    json!({"name": name, "valueFrom": {"secretKeyRef": {"name": "orders-database", "key": key}}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_expected_sizes() {
        let sizes = [config_map("cm-00000"), pod(7)].map(|object| object.to_string().len());
        assert!((950..1100).contains(&sizes[0]) && (2900..3250).contains(&sizes[1]), "{sizes:?}");
    }
}

use serde_json::json;

use super::*;

/// Checks that each path in `added` has its value and that nothing else has changed.
#[track_caller]
fn check(api_version: &str, kind: &str, object: Value, added: Value) {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let table = schema::kubernetes();
    let ty = table.type_by_kind(group, version, kind).expect("a known kind");
    let mut actual = object;
    schema::normalize(table, ty, &mut actual).expect("a well-formed object");
    let expected = merge_into(actual.clone(), added);
    set_defaults(table, ty, &mut actual);
    let pretty = |value: &Value| serde_json::to_string_pretty(value).expect("JSON");
    assert_eq!(pretty(&actual), pretty(&expected), "{kind}");
    let mut again = actual.clone();
    set_defaults(table, ty, &mut again);
    assert_eq!(again, actual, "defaults of defaults of {kind}");
}

/// Merges objects by key and lists by index. `null` in a list leaves the item unchanged.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(from)) if into.len() == from.len() => {
            into.iter_mut().zip(from).for_each(|(into, from)| merge(into, from));
        }
        (_, Value::Null) => {}
        (into, from) => *into = from,
    }
}

fn merge_into(mut into: Value, from: Value) -> Value {
    merge(&mut into, from);
    into
}

/// The defaults of every PodSpec.
fn pod_spec(more: Value) -> Value {
    let mut spec = json!({
        "dnsPolicy": "ClusterFirst", "restartPolicy": "Always", "securityContext": {},
        "terminationGracePeriodSeconds": 30, "schedulerName": "default-scheduler",
    });
    merge(&mut spec, more);
    spec
}

fn container(more: Value) -> Value {
    let mut container = json!({
        "imagePullPolicy": "IfNotPresent", "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
    });
    merge(&mut container, more);
    container
}

#[test]
fn all_defaults_refer_to_known_fields() {
    let table = schema::kubernetes();
    for row in TYPE_DEFAULTS.iter().copied().flatten() {
        let id = table.type_by_name(&full_name(row.ty)).unwrap_or_else(|| panic!("no type {}", row.ty));
        for rule in row.rules {
            if let DefaultRule::Set(field, _) = rule {
                assert!(table.get(id).field(field).is_some(), "{} has no {field}", row.ty);
            }
        }
    }
    let mut names: Vec<&str> = TYPE_DEFAULTS.iter().copied().flatten().map(|row| row.ty).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "each type must have at most one row");
}

#[test]
fn sets_pod_defaults() {
    check(
        "v1",
        "Pod",
        json!({"spec": {"containers": [{"name": "a", "image": "nginx", "ports": [{"containerPort": 80}]}]}}),
        json!({"spec": pod_spec(json!({
            "enableServiceLinks": true,
            "containers": [container(json!({"imagePullPolicy": "Always", "ports": [{"protocol": "TCP"}]}))],
        }))}),
    );
    check(
        "v1",
        "Pod",
        json!({"spec": {
            "hostNetwork": true,
            "containers": [{
                "image": "a:1", "ports": [{"containerPort": 80}],
                "resources": {"limits": {"cpu": "1", "memory": "1u"}, "requests": {"cpu": "500m"}},
                "livenessProbe": {"httpGet": {"port": 80}},
                "readinessProbe": {"grpc": {"port": 1}},
                "lifecycle": {"preStop": {"httpGet": {"port": 1}}},
                "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            }],
            "initContainers": [{"image": "b:1", "resources": {"limits": {"cpu": "2"}}}],
            "ephemeralContainers": [{"image": "c"}],
            "volumes": [
                {"name": "none"},
                {"name": "host", "hostPath": {"path": "/"}},
                {"name": "secret", "secret": {"secretName": "s"}},
                {"name": "cm", "configMap": {"name": "c", "defaultMode": 256}},
                {"name": "all", "projected": {"sources": [
                    {"serviceAccountToken": {"path": "t"}},
                    {"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
                ]}},
                {"name": "image", "image": {"reference": "a:latest"}},
                {"name": "claim", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
                {"name": "disk", "azureDisk": {"diskName": "d", "diskURI": "u"}},
            ],
        }}),
        json!({"spec": pod_spec(json!({
            "enableServiceLinks": true,
            "containers": [container(json!({
                "ports": [{"protocol": "TCP", "hostPort": 80}],
                "resources": {"limits": {"memory": "1m"}, "requests": {"memory": "1m"}},
                "livenessProbe": {
                    "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3,
                    "httpGet": {"path": "/", "scheme": "HTTP"},
                },
                "readinessProbe": {
                    "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3,
                    "grpc": {"service": ""},
                },
                "lifecycle": {"preStop": {"httpGet": {"path": "/", "scheme": "HTTP"}}},
                "env": [{"valueFrom": {"fieldRef": {"apiVersion": "v1"}}}],
            }))],
            "initContainers": [container(json!({"resources": {"requests": {"cpu": "2"}}}))],
            "ephemeralContainers": [container(json!({"imagePullPolicy": "Always"}))],
            "volumes": [
                {"emptyDir": {}},
                {"hostPath": {"type": ""}},
                {"secret": {"defaultMode": 420}},
                null,
                {"projected": {"defaultMode": 420, "sources": [
                    {"serviceAccountToken": {"expirationSeconds": 3600}},
                    {"downwardAPI": {"items": [{"fieldRef": {"apiVersion": "v1"}}]}},
                ]}},
                {"image": {"pullPolicy": "Always"}},
                {"ephemeral": {"volumeClaimTemplate": {"spec": {"volumeMode": "Filesystem"}}}},
                {"azureDisk": {"cachingMode": "ReadWrite", "fsType": "ext4", "readOnly": false, "kind": "Shared"}},
            ],
        }))}),
    );
}

#[test]
fn sets_pod_level_resource_defaults() {
    check(
        "v1",
        "Pod",
        json!({"spec": {
            "resources": {"limits": {"cpu": "4", "memory": "1Gi"}},
            "containers": [
                {"image": "a:1", "resources": {"requests": {"cpu": "1"}}},
                {"image": "a:1", "resources": {"requests": {"cpu": "500m"}, "limits": {"hugepages-2Mi": "2Mi"}}},
            ],
            "initContainers": [
                {"image": "a:1", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
                {"image": "a:1", "resources": {"requests": {"cpu": "1200m"}}},
            ],
        }}),
        json!({"spec": pod_spec(json!({
            "enableServiceLinks": true,
            "resources": {
                "limits": {"hugepages-2Mi": "2Mi"},
                "requests": {"cpu": "2500m", "memory": "1Gi", "hugepages-2Mi": "2Mi"},
            },
            "containers": [container(json!({})), container(json!({"resources": {"requests": {"hugepages-2Mi": "2Mi"}}}))],
            "initContainers": [container(json!({})), container(json!({}))],
        }))}),
    );
}

#[test]
fn sets_core_defaults() {
    let template = || json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": []}});
    check(
        "v1",
        "ReplicationController",
        json!({"spec": {"template": template()}}),
        json!({
            "metadata": {"labels": {"a": "b"}},
            "spec": {"replicas": 1, "selector": {"a": "b"}, "template": {"spec": pod_spec(json!({}))}},
        }),
    );
    check(
        "v1",
        "Service",
        json!({"spec": {"ports": [{"port": 80}, {"port": 81, "targetPort": "web", "protocol": "UDP"}]}}),
        json!({"spec": {
            "type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
            "ports": [{"protocol": "TCP", "targetPort": 80}, null],
        }}),
    );
    check(
        "v1",
        "Service",
        json!({
            "spec": {"type": "LoadBalancer", "sessionAffinity": "ClientIP"},
            "status": {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}, {"hostname": "h"}]}},
        }),
        json!({
            "spec": {
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10800}},
                "externalTrafficPolicy": "Cluster", "internalTrafficPolicy": "Cluster",
                "allocateLoadBalancerNodePorts": true,
            },
            "status": {"loadBalancer": {"ingress": [{"ipMode": "VIP"}, null]}},
        }),
    );
    check(
        "v1",
        "Service",
        json!({"spec": {"type": "ExternalName"}}),
        json!({"spec": {"sessionAffinity": "None"}}),
    );
    check("v1", "Secret", json!({}), json!({"type": "Opaque"}));
    check("v1", "ConfigMap", json!({"data": {"a": "b"}}), json!({}));
    check(
        "v1",
        "Namespace",
        json!({"metadata": {"name": "x"}}),
        json!({"metadata": {"labels": {"kubernetes.io/metadata.name": "x"}}, "status": {"phase": "Active"}}),
    );
    check(
        "v1",
        "PersistentVolume",
        json!({"spec": {"hostPath": {"path": "/"}, "capacity": {"storage": "1Gi"}}}),
        json!({
            "spec": {
                "persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem",
                "hostPath": {"type": ""},
            },
            "status": {"phase": "Pending"},
        }),
    );
    check(
        "v1",
        "PersistentVolumeClaim",
        json!({"spec": {}}),
        json!({"spec": {"volumeMode": "Filesystem"}, "status": {"phase": "Pending"}}),
    );
    check(
        "v1",
        "Endpoints",
        json!({"subsets": [{"ports": [{"port": 1}]}]}),
        json!({"subsets": [{"ports": [{"protocol": "TCP"}]}]}),
    );
    check(
        "v1",
        "Node",
        json!({"status": {"capacity": {"cpu": "2"}}}),
        json!({"status": {"allocatable": {"cpu": "2"}}}),
    );
    check(
        "v1",
        "LimitRange",
        json!({"spec": {"limits": [
            {"type": "Container", "max": {"cpu": "2"}, "min": {"cpu": "1", "memory": "1Mi"}},
            {"type": "Pod", "max": {"cpu": "2"}},
        ]}}),
        json!({"spec": {"limits": [
            {"default": {"cpu": "2"}, "defaultRequest": {"cpu": "2", "memory": "1Mi"}},
            null,
        ]}}),
    );
}

#[test]
fn sets_workload_defaults() {
    let template = || json!({"spec": {"containers": []}});
    let filled = || json!({"spec": pod_spec(json!({}))});
    check(
        "apps/v1",
        "Deployment",
        json!({"spec": {"template": template()}}),
        json!({"spec": {
            "replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
            "template": filled(),
        }}),
    );
    check(
        "apps/v1",
        "Deployment",
        json!({"spec": {"replicas": 0, "strategy": {"type": "Recreate"}, "template": template()}}),
        json!({"spec": {"revisionHistoryLimit": 10, "progressDeadlineSeconds": 600, "template": filled()}}),
    );
    check(
        "apps/v1",
        "DaemonSet",
        json!({"spec": {"template": template()}}),
        json!({"spec": {
            "revisionHistoryLimit": 10,
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": filled(),
        }}),
    );
    check(
        "apps/v1",
        "StatefulSet",
        json!({"spec": {"template": template(), "volumeClaimTemplates": [{"metadata": {"name": "v"}}]}}),
        json!({"spec": {
            "replicas": 1, "revisionHistoryLimit": 10, "podManagementPolicy": "OrderedReady",
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
            "template": filled(),
            "volumeClaimTemplates": [{
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "spec": {"volumeMode": "Filesystem"}, "status": {"phase": "Pending"},
            }],
        }}),
    );
    check(
        "apps/v1",
        "ReplicaSet",
        json!({"spec": {"template": template()}}),
        json!({"spec": {"replicas": 1, "template": filled()}}),
    );
    let job = || {
        json!({
            "parallelism": 1, "backoffLimit": 6, "completionMode": "NonIndexed", "suspend": false,
            "podReplacementPolicy": "TerminatingOrFailed", "manualSelector": false, "template": filled(),
        })
    };
    let once = merge_into(job(), json!({"completions": 1}));
    check("batch/v1", "Job", json!({"spec": {"template": template()}}), json!({"spec": once}));
    check(
        "batch/v1",
        "Job",
        json!({"spec": {"parallelism": 2, "template": template()}}),
        json!({"spec": merge_into(job(), json!({"parallelism": 2}))}),
    );
    check(
        "batch/v1",
        "CronJob",
        json!({"spec": {"jobTemplate": {"spec": {"template": template()}}}}),
        json!({"spec": {
            "concurrencyPolicy": "Allow", "suspend": false, "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 1, "jobTemplate": {"spec": {"template": filled()}},
        }}),
    );
    check(
        "autoscaling/v1",
        "HorizontalPodAutoscaler",
        json!({"spec": {}}),
        json!({"spec": {"minReplicas": 1}}),
    );
    check(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        json!({"spec": {"behavior": {"scaleDown": {"selectPolicy": "Min"}}}}),
        json!({"spec": {
            "minReplicas": 1,
            "metrics": [{"type": "Resource", "resource": {
                "name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80},
            }}],
            "behavior": {
                "scaleUp": {
                    "stabilizationWindowSeconds": 0, "selectPolicy": "Max",
                    "policies": [
                        {"type": "Pods", "value": 4, "periodSeconds": 15},
                        {"type": "Percent", "value": 100, "periodSeconds": 15},
                    ],
                },
                "scaleDown": {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}]},
            },
        }}),
    );
}

#[test]
fn sets_defaults_of_other_groups() {
    let selectors = || json!({"matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}});
    let mut webhook = selectors();
    merge(
        &mut webhook,
        json!({
            "failurePolicy": "Fail", "timeoutSeconds": 10,
            "clientConfig": {"service": {"port": 443}}, "rules": [{"scope": "*"}],
        }),
    );
    let configuration = || json!({"webhooks": [{"clientConfig": {"service": {"name": "s"}}, "rules": [{}]}]});
    let group = "admissionregistration.k8s.io/v1";
    check(group, "ValidatingWebhookConfiguration", configuration(), json!({"webhooks": [webhook.clone()]}));
    merge(&mut webhook, json!({"reinvocationPolicy": "Never"}));
    check(group, "MutatingWebhookConfiguration", configuration(), json!({"webhooks": [webhook]}));
    check(
        group,
        "ValidatingAdmissionPolicy",
        json!({"spec": {"matchConstraints": {"resourceRules": [{}]}}}),
        json!({"spec": {
            "failurePolicy": "Fail",
            "matchConstraints": merge_into(selectors(), json!({"resourceRules": [{"scope": "*"}]})),
        }}),
    );
    check(
        "apiextensions.k8s.io/v1",
        "CustomResourceDefinition",
        json!({"spec": {"names": {"kind": "Boat"}, "versions": [{"name": "v1"}, {"name": "v2", "storage": true}]}}),
        json!({
            "spec": {"names": {"singular": "boat", "listKind": "BoatList"}, "conversion": {"strategy": "None"}},
            "status": {"storedVersions": ["v2"]},
        }),
    );
    check(
        "apiregistration.k8s.io/v1",
        "APIService",
        json!({"spec": {"service": {"name": "s"}}}),
        json!({"spec": {"service": {"port": 443}}}),
    );
    check(
        "authentication.k8s.io/v1",
        "TokenRequest",
        json!({"spec": {}}),
        json!({"spec": {"expirationSeconds": 3600}}),
    );
    check(
        "discovery.k8s.io/v1",
        "EndpointSlice",
        json!({"ports": [{"port": 1}]}),
        json!({"ports": [{"name": "", "protocol": "TCP"}]}),
    );
    check(
        "flowcontrol.apiserver.k8s.io/v1",
        "FlowSchema",
        json!({"spec": {}}),
        json!({"spec": {"matchingPrecedence": 1000}}),
    );
    check(
        "flowcontrol.apiserver.k8s.io/v1",
        "PriorityLevelConfiguration",
        json!({"spec": {"limited": {"limitResponse": {"queuing": {}}}, "exempt": {}}}),
        json!({"spec": {
            "limited": {
                "nominalConcurrencyShares": 30, "lendablePercent": 0,
                "limitResponse": {"queuing": {"handSize": 8, "queues": 64, "queueLengthLimit": 50}},
            },
            "exempt": {"nominalConcurrencyShares": 0, "lendablePercent": 0},
        }}),
    );
    check(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        json!({"spec": {"egress": [{"ports": [{"port": 1}]}]}}),
        json!({"spec": {"policyTypes": ["Ingress", "Egress"], "egress": [{"ports": [{"protocol": "TCP"}]}]}}),
    );
    check(
        "networking.k8s.io/v1",
        "IngressClass",
        json!({"spec": {"parameters": {}}}),
        json!({"spec": {"parameters": {"scope": "Cluster"}}}),
    );
    check(
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        json!({"roleRef": {"name": "r"}, "subjects": [{"kind": "User"}, {"kind": "ServiceAccount"}]}),
        json!({
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io"}, null],
        }),
    );
    check(
        "resource.k8s.io/v1",
        "ResourceClaim",
        json!({"spec": {"devices": {"requests": [{"exactly": {"tolerations": [{}]}}]}}}),
        json!({"spec": {"devices": {"requests": [{"exactly": {
            "allocationMode": "ExactCount", "count": 1, "tolerations": [{"operator": "Equal"}],
        }}]}}}),
    );
    check(
        "scheduling.k8s.io/v1",
        "PriorityClass",
        json!({"value": 1}),
        json!({"preemptionPolicy": "PreemptLowerPriority"}),
    );
    check(
        "storage.k8s.io/v1",
        "StorageClass",
        json!({}),
        json!({"reclaimPolicy": "Delete", "volumeBindingMode": "Immediate"}),
    );
    check(
        "storage.k8s.io/v1",
        "CSIDriver",
        json!({"spec": {"attachRequired": false}}),
        json!({"spec": {
            "podInfoOnMount": false, "storageCapacity": false, "requiresRepublish": false, "seLinuxMount": false,
            "fsGroupPolicy": "ReadWriteOnceWithFSType", "volumeLifecycleModes": ["Persistent"],
        }}),
    );
}

#[test]
fn defaults_are_normalized_values() {
    let table = schema::kubernetes();
    for (id, ty) in table.types() {
        let mut object = json!({});
        schema::normalize(table, id, &mut object).expect("an empty object");
        set_defaults(table, id, &mut object);
        let mut again = object.clone();
        schema::normalize(table, id, &mut again).expect("a well-formed object");
        assert_eq!(again, object, "{}", ty.name);
    }
}

/// Malformed objects do not get here, but must not cause a panic or change.
#[test]
fn malformed_objects_never_panic() {
    let table = schema::kubernetes();
    let malformed = [json!(null), json!(5), json!("x"), json!([]), json!([1, {}]), json!({"x": [null]})];
    for (id, ty) in table.types() {
        for value in &malformed {
            let fields = ty.fields.iter().map(|field| (field.name.to_string(), value.clone()));
            let mut object = Value::Object(fields.collect());
            set_defaults(table, id, &mut object);
            set_defaults(table, id, &mut value.clone());
            for field in &ty.fields {
                let inner: Map<String, Value> =
                    ["type", "ports", "spec", "limits", "labels", "resources", "containers"]
                        .into_iter()
                        .map(|name| (name.to_owned(), value.clone()))
                        .collect();
                let mut object = json!({ &*field.name: inner });
                set_defaults(table, id, &mut object);
            }
        }
    }
}

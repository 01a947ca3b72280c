use super::*;

const PODS: (&str, &str) = ("", "pods");

fn pod(spec: Value) -> Value {
    json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec})
}

fn with_resources(resources: Value) -> Value {
    pod(json!({"containers": [{"name": "c", "resources": resources}]}))
}

fn range(limit: Value) -> FakeCluster {
    let range = json!({"metadata": {"name": "l", "namespace": "n"}, "spec": {"limits": [limit]}});
    let other = json!({"metadata": {"name": "l", "namespace": "other"},
        "spec": {"limits": [{"type": "Pod", "min": {"cpu": "100"}}]}});
    FakeCluster::of(&[("", "limitranges", range), ("", "limitranges", other)])
}

#[test]
fn sets_default_limits_and_requests() {
    let cluster = range(json!({"type": "Container", "default": {"cpu": "200m", "memory": "64Mi"},
        "defaultRequest": {"cpu": "100m", "memory": "64Mi"}}));
    let check = |object, path: &str, expected| check("LimitRanger", PODS, object, &cluster, path, expected);
    let resources = "/spec/containers/0/resources";
    let note = "/metadata/annotations/kubernetes.io~1limit-ranger";
    check(
        with_resources(json!({})),
        resources,
        json!({"limits": {"cpu": "200m", "memory": "64Mi"}, "requests": {"cpu": "100m", "memory": "64Mi"}}),
    );
    check(
        with_resources(json!({})),
        note,
        json!(
            "LimitRanger plugin set: cpu, memory request for container c; cpu, memory limit for container c"
        ),
    );
    let all = json!({"limits": {"cpu": "1", "memory": "1"}, "requests": {"cpu": "1", "memory": "1"}});
    check(with_resources(all.clone()), resources, all.clone());
    check(with_resources(all), note, json!(null));
}

#[test]
fn enforces_limit_range() {
    let check = |limit: Value, resources: Value, reason: &str| {
        let expected = match reason {
            "" => json!("p"),
            reason => json!(format!("403 pods \"p\" is forbidden: {reason}")),
        };
        check("LimitRanger", PODS, with_resources(resources), &range(limit), "/metadata/name", expected);
    };
    let cpu = |request: &str, limit: &str| json!({"requests": {"cpu": request}, "limits": {"cpu": limit}});
    for kind in ["Container", "Pod"] {
        let max = json!({"type": kind, "max": {"cpu": "1"}});
        check(max.clone(), cpu("1", "1"), "");
        check(max.clone(), cpu("1", "2"), &format!("maximum cpu usage per {kind} is 1, but limit is 2"));
        check(max, json!({}), &format!("maximum cpu usage per {kind} is 1.  No limit is specified"));
        let min = json!({"type": kind, "min": {"cpu": "100m"}});
        check(min.clone(), cpu("100m", "1"), "");
        check(
            min.clone(),
            cpu("50m", "1"),
            &format!("minimum cpu usage per {kind} is 100m, but request is 50m"),
        );
        check(min, json!({}), &format!("minimum cpu usage per {kind} is 100m.  No request is specified"));
        let ratio = json!({"type": kind, "maxLimitRequestRatio": {"cpu": "2"}});
        check(ratio.clone(), cpu("1", "2"), "");
        check(
            ratio.clone(),
            cpu("1", "3"),
            &format!("cpu max limit to request ratio per {kind} is 2, but provided ratio is 3.000000"),
        );
        check(
            ratio,
            json!({}),
            &format!(
                "cpu max limit to request ratio per {kind} is 2, but no request is specified or request is 0"
            ),
        );
    }
    check(
        json!({"type": "Container", "max": {"cpu": "1", "memory": "1Gi"}}),
        json!({"limits": {"cpu": "2", "memory": "2Gi"}}),
        "[maximum cpu usage per Container is 1, but limit is 2, maximum memory usage per Container is 1Gi, but limit is 2Gi]",
    );
}

#[test]
fn pod_requests_include_sidecars_and_largest_init_container() {
    let cpu = |name: &str, cpu: &str, policy: &str| json!({"name": name, "restartPolicy": policy, "resources": {"requests": {"cpu": cpu}}});
    let spec = json!({
        "containers": [cpu("a", "1", ""), cpu("b", "500m", "")],
        "initContainers": [cpu("once", "2", ""), cpu("sidecar", "1", "Always"), cpu("late", "1500m", "")],
    });
    let sum = api::resources::pod_resources(&spec, "requests");
    assert_eq!(sum["cpu"].to_string(), "2500m");
}

#[test]
fn enforces_limit_range_for_claims() {
    let cluster =
        range(json!({"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}, "max": {"storage": "2Gi"}}));
    let claim = |size: &str| json!({"metadata": {"name": "c", "namespace": "n"}, "spec": {"resources": {"requests": {"storage": size}}}});
    for (size, expected) in [
        ("1Gi", "c"),
        (
            "512Mi",
            "403 persistentvolumeclaims \"c\" is forbidden: minimum storage usage per PersistentVolumeClaim is 1Gi, but request is 512Mi",
        ),
        (
            "3Gi",
            "403 persistentvolumeclaims \"c\" is forbidden: maximum storage usage per PersistentVolumeClaim is 2Gi, but request is 3Gi",
        ),
    ] {
        check(
            "LimitRanger",
            ("", "persistentvolumeclaims"),
            claim(size),
            &cluster,
            "/metadata/name",
            json!(expected),
        );
    }
}

fn account(more: Value) -> FakeCluster {
    let mut account = json!({"metadata": {"name": "default", "namespace": "n"}});
    for (name, value) in more.as_object().unwrap() {
        account[name] = value.clone();
    }
    FakeCluster::of(&[("", "serviceaccounts", account)])
}

#[test]
fn sets_service_account_and_mounts_token() {
    let cluster = account(json!({"imagePullSecrets": [{"name": "pull"}]}));
    let plain = pod(json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i"}]}));
    let result = run("ServiceAccount", PODS, Operation::Create, plain.clone(), None, &cluster).unwrap();
    let spec = result.at("spec");
    assert_eq!((spec.text("serviceAccountName"), spec.text("serviceAccount")), ("default", "default"));
    assert_eq!(spec.at("imagePullSecrets"), &json!([{"name": "pull"}]));
    let volume = &spec.items("volumes")[0];
    let name = volume.text("name");
    assert!(name.starts_with("kube-api-access-") && name.len() == 21, "{name}");
    let mount = json!([{"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "name": name, "readOnly": true}]);
    assert_eq!(spec.pointer("/containers/0/volumeMounts"), Some(&mount));
    assert_eq!(spec.pointer("/initContainers/0/volumeMounts"), Some(&mount));
    assert_eq!(
        volume.at("projected"),
        &json!({"defaultMode": 420, "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": "kube-root-ca.crt"}},
            {"downwardAPI": {"items": [{"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}, "path": "namespace"}]}},
        ]})
    );
    let again = run("ServiceAccount", PODS, Operation::Create, result.clone(), None, &cluster).unwrap();
    assert_eq!(again, result);
    check(
        "ServiceAccount",
        PODS,
        pod(json!({"serviceAccountName": "ghost"})),
        &cluster,
        "",
        json!(
            "403 pods \"p\" is forbidden: error looking up service account n/ghost: serviceaccount \"ghost\" not found"
        ),
    );
}

#[test]
fn token_automount_can_be_disabled() {
    let volumes = |cluster: &FakeCluster, spec: Value| {
        let pod = run("ServiceAccount", PODS, Operation::Create, pod(spec), None, cluster).unwrap();
        pod.at("spec").items("volumes").len()
    };
    let container = json!([{"name": "c"}]);
    let mounted = json!([{"name": "c", "volumeMounts": [{"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]}]);
    let (automount, no_automount) =
        (account(json!({})), account(json!({"automountServiceAccountToken": false})));
    assert_eq!(volumes(&automount, json!({"containers": container})), 1);
    assert_eq!(volumes(&no_automount, json!({"containers": container})), 0);
    assert_eq!(
        volumes(&automount, json!({"containers": container, "automountServiceAccountToken": false})),
        0
    );
    assert_eq!(
        volumes(&no_automount, json!({"containers": container, "automountServiceAccountToken": true})),
        1
    );
    assert_eq!(volumes(&automount, json!({"containers": mounted})), 0);
}

#[test]
fn enforces_mountable_secrets() {
    let cluster = account(json!({"secrets": [{"name": "good"}], "imagePullSecrets": [{"name": "pull"}],
        "metadata": {"name": "default", "namespace": "n", "annotations": {"kubernetes.io/enforce-mountable-secrets": "true"}}}));
    let env = |secret: &str| json!([{"name": "c", "env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": secret}}}]}]);
    let cases = [
        (json!({"containers": env("good")}), ""),
        (
            json!({"containers": env("bad")}),
            "container c with envVar E referencing secret.secretName=\"bad\" is not allowed because service account default does not reference that secret",
        ),
        (
            json!({"volumes": [{"name": "v", "secret": {"secretName": "bad"}}]}),
            "volume with secret.secretName=\"bad\" is not allowed because service account default does not reference that secret",
        ),
        (
            json!({"imagePullSecrets": [{"name": "bad"}]}),
            "imagePullSecrets[0].name=\"bad\" is not allowed because service account default does not reference that imagePullSecret",
        ),
    ];
    for (spec, reason) in cases {
        let expected = match reason {
            "" => json!("p"),
            reason => json!(format!("403 pods \"p\" is forbidden: {reason}")),
        };
        check("ServiceAccount", PODS, pod(spec), &cluster, "/metadata/name", expected);
    }
}

#[test]
fn mirror_pods_must_not_reference_secrets() {
    let mirror = |spec: Value| json!({"metadata": {"name": "p", "namespace": "n", "annotations": {"kubernetes.io/config.mirror": "x"}}, "spec": spec});
    let cases = [
        (json!({}), json!(null)),
        (
            json!({"serviceAccountName": "default"}),
            json!("403 pods \"p\" is forbidden: a mirror pod may not reference service accounts"),
        ),
        (
            json!({"volumes": [{"secret": {"secretName": "s"}}]}),
            json!("403 pods \"p\" is forbidden: a mirror pod may not reference secrets"),
        ),
    ];
    for (spec, expected) in cases {
        check(
            "ServiceAccount",
            PODS,
            mirror(spec),
            &account(json!({})),
            "/spec/serviceAccountName",
            expected,
        );
    }
}

#[test]
fn sets_priority_from_class() {
    let class = |name: &str, value: i64, default: bool| {
        let class = json!({"metadata": {"name": name}, "value": value, "globalDefault": default, "preemptionPolicy": "Never"});
        ("scheduling.k8s.io", "priorityclasses", class)
    };
    let plain = FakeCluster::of(&[class("high", 10, false)]);
    let defaulted = FakeCluster::of(&[class("high", 10, false), class("usual", 5, true)]);
    let check = |spec: Value, cluster: &FakeCluster, expected: Value| {
        check("Priority", PODS, pod(spec), cluster, "/spec", expected)
    };
    check(json!({}), &plain, json!({"priority": 0, "preemptionPolicy": "PreemptLowerPriority"}));
    check(
        json!({}),
        &defaulted,
        json!({"priority": 5, "preemptionPolicy": "Never", "priorityClassName": "usual"}),
    );
    check(
        json!({"priorityClassName": "high"}),
        &defaulted,
        json!({"priority": 10, "preemptionPolicy": "Never", "priorityClassName": "high"}),
    );
    let forbidden = |reason: &str| json!(format!("403 pods \"p\" is forbidden: {reason}"));
    check(json!({"priorityClassName": "x"}), &plain, forbidden("no PriorityClass with name x was found"));
    check(
        json!({"priority": 7}),
        &plain,
        forbidden(
            "the integer value of priority (7) must not be provided in pod spec; priority admission controller computed 0 from the given PriorityClass name",
        ),
    );
    check(
        json!({"preemptionPolicy": "Never"}),
        &plain,
        forbidden(
            "the string value of PreemptionPolicy (Never) must not be provided in pod spec; priority admission controller computed PreemptLowerPriority from the given PriorityClass name",
        ),
    );
    let second = json!({"metadata": {"name": "new"}, "value": 1, "globalDefault": true});
    super::check(
        "Priority",
        ("scheduling.k8s.io", "priorityclasses"),
        second,
        &defaulted,
        "",
        json!(
            "403 priorityclasses.scheduling.k8s.io \"new\" is forbidden: PriorityClass usual is already marked as default. Only one default can exist"
        ),
    );
}

#[test]
fn adds_default_tolerations_for_five_minutes() {
    let seconds = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
    let (ready, reach) = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable");
    let check = |spec: Value, expected: Value| {
        check(
            "DefaultTolerationSeconds",
            PODS,
            pod(spec),
            &FakeCluster::default(),
            "/spec/tolerations",
            expected,
        );
    };
    check(json!({}), json!([seconds(ready), seconds(reach)]));
    let own = json!({"key": ready, "operator": "Exists", "effect": "NoExecute"});
    check(json!({"tolerations": [own]}), json!([own, seconds(reach)]));
    check(json!({"tolerations": [{"operator": "Exists"}]}), json!([{"operator": "Exists"}]));
}

#[test]
fn applies_runtime_class_overhead_and_scheduling() {
    let class = json!({"metadata": {"name": "vm"}, "handler": "vm", "overhead": {"podFixed": {"cpu": "250m"}},
        "scheduling": {"nodeSelector": {"vm": "yes"}, "tolerations": [{"key": "vm", "operator": "Exists"}]}});
    let cluster = FakeCluster::of(&[("node.k8s.io", "runtimeclasses", class)]);
    let check = |spec: Value, path: &str, expected: Value| {
        check("RuntimeClass", PODS, pod(spec), &cluster, path, expected)
    };
    let forbidden = |reason: &str| json!(format!("403 pods \"p\" is forbidden: {reason}"));
    let vm = json!({"runtimeClassName": "vm"});
    check(vm.clone(), "/spec/overhead", json!({"cpu": "250m"}));
    check(vm.clone(), "/spec/nodeSelector", json!({"vm": "yes"}));
    check(vm, "/spec/tolerations", json!([{"key": "vm", "operator": "Exists"}]));
    let with_tolerations = json!({"runtimeClassName": "vm", "tolerations": [{"key": "vm", "operator": "Equal", "value": "a"}, {"key": "b"}]});
    check(with_tolerations, "/spec/tolerations", json!([{"key": "b"}, {"key": "vm", "operator": "Exists"}]));
    check(json!({"runtimeClassName": "x"}), "", forbidden("pod rejected: RuntimeClass \"x\" not found"));
    check(
        json!({"runtimeClassName": "vm", "overhead": {"cpu": "1"}}),
        "",
        forbidden("pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead"),
    );
    check(
        json!({"overhead": {"cpu": "1"}}),
        "",
        forbidden("pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"),
    );
    check(
        json!({"runtimeClassName": "vm", "nodeSelector": {"vm": "no"}}),
        "",
        forbidden("conflict: runtimeClass.scheduling.nodeSelector[vm] = yes; pod.spec.nodeSelector[vm] = no"),
    );
}

#[test]
fn optional_plugins() {
    let none = FakeCluster::default();
    let image = json!({"containers": [{"name": "c", "image": "i", "imagePullPolicy": "Never"}]});
    check("AlwaysPullImages", PODS, pod(image), &none, "/spec/containers/0/imagePullPolicy", json!("Always"));
    let device = json!({"containers": [{"name": "c", "resources": {"requests": {"example.com/gpu": "1", "cpu": "1"}}}]});
    check(
        "ExtendedResourceToleration",
        PODS,
        pod(device),
        &none,
        "/spec/tolerations",
        json!([{"key": "example.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
    );
    let anti_affinity = |key: &str| {
        pod(
            json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": key}]}}}),
        )
    };
    let name = "LimitPodHardAntiAffinityTopology";
    check(name, PODS, anti_affinity("kubernetes.io/hostname"), &none, "/metadata/name", json!("p"));
    check(
        name,
        PODS,
        anti_affinity("zone"),
        &none,
        "",
        json!(
            "403 pods \"p\" is forbidden: affinity.PodAntiAffinity.RequiredDuringScheduling has TopologyKey zone but only key kubernetes.io/hostname is allowed"
        ),
    );
}

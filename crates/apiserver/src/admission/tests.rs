//! One table per plugin: object and cluster in, changed part or error out.

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::object::to_stored;

mod pods;
mod quotas;

/// A cluster with these objects.
#[derive(Default)]
pub struct FakeCluster {
    objects: Vec<Arc<Object>>,
    settings: Settings,
    event_rates: event_rates::EventRateLimiter,
}

impl FakeCluster {
    /// The objects, each with group and plural of its kind.
    pub fn of(objects: &[(&str, &str, Value)]) -> FakeCluster {
        let store = |(group, plural, value): &(&str, &str, Value)| {
            let row = api::resource_table::find_resource(group, "v1", plural).expect("a known kind");
            let metadata = value.at("metadata");
            let collection = Target::collection(row, metadata.text("namespace"));
            let key = Target { name: metadata.text("name").to_owned(), ..collection }.key();
            Arc::new(Object::new(key.into(), to_stored(value.clone()), 1).expect("an object"))
        };
        FakeCluster { objects: objects.iter().map(store).collect(), ..FakeCluster::default() }
    }

    pub fn set_pod_security(&mut self, settings: pod_security::Settings) {
        self.settings.pod_security = settings;
    }
}

impl Cluster for FakeCluster {
    fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Arc<Object>> {
        self.list(group, plural, namespace).into_iter().find(|object| object.name() == name)
    }

    fn list(&self, group: &str, plural: &str, namespace: &str) -> Vec<Arc<Object>> {
        let row = api::resource_table::find_resource(group, "v1", plural).expect("a known kind");
        let prefix = Target::collection(row, namespace).key();
        self.objects.iter().filter(|object| object.key.starts_with(&prefix)).cloned().collect()
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn event_rates(&self) -> &event_rates::EventRateLimiter {
        &self.event_rates
    }

    /// `jo` may do everything, other users nothing.
    fn allows(&self, user: &User, _: &Attributes<'_>) -> bool {
        user.name == "jo"
    }
}

/// Runs both halves of one plugin; returns the changed object or the error.
fn run(
    name: &str,
    (group, plural): (&str, &str),
    operation: Operation,
    mut object: Value,
    old: Option<&Value>,
    cluster: &FakeCluster,
) -> Result<Value, String> {
    let plugin = PLUGINS.iter().find(|plugin| plugin.name == name).expect("a known plugin");
    let row = api::resource_table::find_resource(group, "v1", plural).expect("a known kind");
    let target = Target::collection(row, object.at("metadata").text("namespace"));
    let mut request = Request::new(&target, operation, &object, old, None);
    request.name = object.at("metadata").text("name").to_owned();
    let mutate_result = plugin.admit.map_or(Ok(()), |admit| admit(&request, &mut object, cluster));
    let validate_result = mutate_result
        .and_then(|()| plugin.validate.map_or(Ok(()), |validate| validate(&request, &object, cluster)));
    validate_result.map(|()| object).map_err(|status| format!("{} {}", status.code, status.message))
}

/// Checks the part at `path` of a new object after one plugin, or the error.
#[track_caller]
fn check(name: &str, kind: (&str, &str), object: Value, cluster: &FakeCluster, path: &str, expected: Value) {
    let found = match run(name, kind, Operation::Create, object, None, cluster) {
        Ok(object) => object.pointer(path).cloned().unwrap_or_default(),
        Err(message) => message.into(),
    };
    assert_eq!(found, expected);
}

#[track_caller]
fn check_update(
    name: &str,
    kind: (&str, &str),
    new: Value,
    old: Value,
    cluster: &FakeCluster,
    expected: &str,
) {
    let found = run(name, kind, Operation::Update, new, Some(&old), cluster);
    assert_eq!(found.err().unwrap_or_default(), expected);
}

#[test]
fn plugins_can_be_enabled_and_disabled_by_name() {
    let enabled_plugins = |enable: &[&str], disable: &[&str]| {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Chain::new(&AdmissionOptions {
            enable: list(enable),
            disable: list(disable),
            ..AdmissionOptions::default()
        })
        .map(|chain| chain.plugins.iter().map(|plugin| plugin.name).collect::<Vec<_>>())
    };
    let default_plugins = enabled_plugins(&[], &[]).unwrap();
    assert_eq!(default_plugins.first(), Some(&"NamespaceLifecycle"));
    assert_eq!(default_plugins.last(), Some(&"ResourceQuota"));
    assert!(!default_plugins.contains(&"AlwaysPullImages"));
    let changed = enabled_plugins(&["AlwaysPullImages", "Priority"], &["LimitRanger"]).unwrap();
    assert_eq!(changed.len(), default_plugins.len());
    assert!(changed.contains(&"AlwaysPullImages") && !changed.contains(&"LimitRanger"));
    assert_eq!(enabled_plugins(&["Nonsense"], &[]), Err(AdmissionOptionsError::Unknown("Nonsense".into())));
    assert_eq!(
        enabled_plugins(&["Priority"], &["Priority"]),
        Err(AdmissionOptionsError::Both("Priority".into()))
    );
    let mut names: Vec<_> = PLUGINS.iter().map(|plugin| plugin.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), PLUGINS.len());
}

/// All plugins of upstream in order; `!` marks those enabled by default.
const UPSTREAM: &[&str] = &[
    "AlwaysAdmit",
    "NamespaceAutoProvision",
    "!NamespaceLifecycle",
    "NamespaceExists",
    "LimitPodHardAntiAffinityTopology",
    "!LimitRanger",
    "!ServiceAccount",
    "NodeRestriction",
    "!TaintNodesByCondition",
    "AlwaysPullImages",
    "ImagePolicyWebhook",
    "!PodSecurity",
    "PodNodeSelector",
    "!Priority",
    "!DefaultTolerationSeconds",
    "PodTolerationRestriction",
    "EventRateLimit",
    "ExtendedResourceToleration",
    "!DefaultStorageClass",
    "!StorageObjectInUseProtection",
    "!PodGroupProtection",
    "OwnerReferencesPermissionEnforcement",
    "!PersistentVolumeClaimResize",
    "!RuntimeClass",
    "!CertificateApproval",
    "!CertificateSigning",
    "!ClusterTrustBundleAttest",
    "!CertificateSubjectRestriction",
    "!DefaultIngressClass",
    "DenyServiceExternalIPs",
    "!PodTopologyLabels",
    "!PodGroupWorkloadExists",
    "!NodeDeclaredFeatureValidator",
    "!JobValidation",
    "!PodResizeValidator",
    "!MutatingAdmissionPolicy",
    "!MutatingAdmissionWebhook",
    "!ValidatingAdmissionPolicy",
    "!ValidatingAdmissionWebhook",
    "!ResourceQuota",
    "AlwaysDeny",
];

/// Enabled by default upstream, but missing here: plugins for kinds that are not served (PodGroup,
/// ClusterTrustBundle) and for disabled feature gates.
const ABSENT: &[&str] =
    &["PodGroupProtection", "ClusterTrustBundleAttest", "PodGroupWorkloadExists", "JobValidation"];

/// Enabled by default here and not upstream, or vice versa; the table explains why.
const DIFFERENT_DEFAULTS: &[&str] = &["NodeRestriction"];

#[test]
fn plugin_order_and_defaults_match_upstream() {
    let name = |entry: &&'static str| entry.trim_start_matches('!');
    let implemented: Vec<&str> = PLUGINS.iter().map(|plugin| plugin.name).collect();
    let upstream_order: Vec<&str> =
        UPSTREAM.iter().map(name).filter(|name| implemented.contains(name)).collect();
    assert_eq!(implemented, upstream_order);
    for plugin in PLUGINS {
        let default_enabled = UPSTREAM.contains(&format!("!{}", plugin.name).as_str());
        assert_eq!(
            plugin.default_enabled != default_enabled,
            DIFFERENT_DEFAULTS.contains(&plugin.name),
            "{}",
            plugin.name
        );
    }
    for entry in UPSTREAM.iter().filter(|entry| entry.starts_with('!')) {
        assert_ne!(implemented.contains(&name(entry)), ABSENT.contains(&name(entry)), "{entry}");
    }
}

#[test]
fn copies_topology_labels_from_node_to_pod() {
    let labels = json!({"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/region": "r", "x": "y"});
    let cluster = FakeCluster::of(&[
        ("", "nodes", json!({"metadata": {"name": "there", "labels": labels}})),
        ("", "nodes", json!({"metadata": {"name": "nowhere"}})),
    ]);
    let pod = |node: &str| {
        json!({"metadata": {"name": "p", "namespace": "n", "labels": {"topology.kubernetes.io/zone": "mine"}},
            "spec": {"nodeName": node}})
    };
    let own = json!({"topology.kubernetes.io/zone": "mine"});
    let given = json!({"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/region": "r"});
    for (node, expected) in [("there", &given), ("nowhere", &own), ("none", &own), ("", &own)] {
        check("PodTopologyLabels", ("", "pods"), pod(node), &cluster, "/metadata/labels", expected.clone());
    }
    let pods = api::resource_table::find_resource("", "v1", "pods").expect("pods are in the table");
    let target = Target { name: "p".into(), subresource: "binding".into(), ..Target::collection(pods, "n") };
    for (kind, expected) in [("Node", given), ("Moon", Value::Null)] {
        let mut binding = json!({"metadata": {"name": "p"}, "target": {"kind": kind, "name": "there"}});
        let request = Request::new(&target, Operation::Create, &Value::Null, None, None);
        defaults::topology_labels(&request, &mut binding, &cluster).expect("labels");
        assert_eq!(*binding.path("metadata.labels"), expected);
    }
}

/// Runs a validating plugin on an update through a subresource.
fn validate_update(
    name: &str,
    (group, plural, subresource): (&str, &str, &str),
    user_name: Option<&str>,
    (new, old): (Value, Value),
    cluster: &FakeCluster,
) -> String {
    let plugin = PLUGINS.iter().find(|plugin| plugin.name == name).expect("a known plugin");
    let row = api::resource_table::find_resource(group, "v1", plural).expect("a known kind");
    let target = Target { name: "x".into(), subresource: subresource.into(), ..Target::collection(row, "") };
    let user = user_name.map(|name| User { name: name.into(), ..User::default() });
    let request = Request::new(&target, Operation::Update, &new, Some(&old), user.as_ref());
    let answer = plugin.validate.expect("a judge")(&request, &new, cluster);
    answer.map_or_else(|status| status.message, |()| String::new())
}

#[test]
fn requires_signer_permission_for_approval_and_signing() {
    let csr = |signer: &str, certificate: &str| json!({"spec": {"signerName": signer}, "status": {"certificate": certificate}});
    let permission_error = |verb: &str| {
        format!(
            "certificatesigningrequests.certificates.k8s.io \"x\" is forbidden: user not permitted to {verb} requests with signerName \"example.com/s\""
        )
    };
    let check =
        |name: &str, subresource: &str, user_name: Option<&str>, certificate: &str, expected: &str| {
            // The signer name in the approval does not count.
            let objects = (csr("other.com/s", certificate), csr("example.com/s", ""));
            let kind = ("certificates.k8s.io", "certificatesigningrequests", subresource);
            assert_eq!(
                validate_update(name, kind, user_name, objects, &FakeCluster::default()),
                expected,
                "{name} {subresource}"
            );
        };
    check("CertificateApproval", "approval", Some("al"), "", &permission_error("approve"));
    check("CertificateApproval", "approval", Some("jo"), "", "");
    check("CertificateApproval", "approval", None, "", "");
    check("CertificateApproval", "status", Some("al"), "x", "");
    check("CertificateSigning", "status", Some("al"), "x", &permission_error("sign"));
    check("CertificateSigning", "status", Some("al"), "", "");
    check("CertificateSigning", "status", Some("jo"), "x", "");
    check("CertificateSigning", "approval", Some("al"), "x", "");
}

#[test]
fn rejects_updates_that_need_missing_node_features() {
    let node = |name: &str, features: &[&str]| json!({"metadata": {"name": name}, "status": {"declaredFeatures": features}});
    let resize_features =
        ["InPlacePodLevelResourcesVerticalScaling", "InPlacePodVerticalScalingInitContainers"];
    let cluster =
        FakeCluster::of(&[("", "nodes", node("old", &[])), ("", "nodes", node("new", &resize_features))]);
    let pod = |node: &str, generation: u64, whole: &str, init: &str, sidecar: &str| {
        let resources = |cpu: &str| json!({"requests": {"cpu": cpu}});
        json!({"metadata": {"generation": generation}, "spec": {
            "nodeName": node, "resources": resources(whole), "initContainers": [
                {"name": "i", "resources": resources(init)},
                {"name": "s", "restartPolicy": "Always", "resources": resources(sidecar)},
            ],
        }})
    };
    let check = |new: Value, reason: &str| {
        let node = new["spec"]["nodeName"].as_str().unwrap().to_owned();
        let objects = (new, pod(&node, 1, "1", "1", "1"));
        let found = validate_update(
            "NodeDeclaredFeatureValidator",
            ("", "pods", "resize"),
            Some("al"),
            objects,
            &cluster,
        );
        assert_eq!(found.trim_start_matches("pods \"x\" is forbidden: "), reason);
    };
    check(pod("new", 2, "2", "2", "2"), "");
    check(pod("old", 2, "1", "1", "2"), "");
    check(pod("old", 1, "2", "2", "2"), "");
    let both = "pod update requires features InPlacePodLevelResourcesVerticalScaling, InPlacePodVerticalScalingInitContainers which are not available on node \"old\"";
    check(pod("old", 2, "2", "2", "1"), both);
    check(pod("gone", 2, "2", "1", "1"), "node \"gone\" not found");
    check(pod("", 2, "2", "2", "2"), "");
}

#[test]
fn rejects_pod_resize_above_node_allocatable() {
    let node = |name: &str, os: &str| {
        json!({"metadata": {"name": name, "labels": {"kubernetes.io/os": os}},
            "status": {"allocatable": {"cpu": "2", "memory": "1Gi"}}})
    };
    let cluster = FakeCluster::of(&[("", "nodes", node("n", "linux")), ("", "nodes", node("w", "windows"))]);
    let pod = |node: &str, cpu: &str, memory: &str| {
        let requests = json!({"cpu": cpu, "memory": memory});
        json!({"spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": requests}}]}})
    };
    let check = |node: &str, (cpu, memory): (&str, &str), reason: &str| {
        let objects = (pod(node, cpu, memory), pod(node, "1", "1Mi"));
        let found =
            validate_update("PodResizeValidator", ("", "pods", "resize"), Some("al"), objects, &cluster);
        assert_eq!(found.trim_start_matches("pods \"x\" is forbidden: "), reason);
    };
    check("n", ("2", "1Gi"), "");
    check(
        "n",
        ("3", "1Gi"),
        "node didn't have enough allocatable resources: cpu, requested: 3000, allocatable: 2000",
    );
    check(
        "n",
        ("2500m", "2Gi"),
        "node didn't have enough allocatable resources: cpu, requested: 2500, allocatable: 2000; memory, requested: 2147483648, allocatable: 1073741824",
    );
    check("w", ("2", "1Mi"), "pod resize is only supported on linux nodes, node \"w\" is \"windows\"");
    check("none", ("2", "1Mi"), "node \"none\" not found");
    check("", ("9", "9Gi"), "");
}

#[test]
fn rejects_creation_in_terminating_namespace() {
    let cluster = FakeCluster::of(&[
        ("", "namespaces", json!({"metadata": {"name": "n"}, "status": {"phase": "Active"}})),
        ("", "namespaces", json!({"metadata": {"name": "end"}, "status": {"phase": "Terminating"}})),
    ]);
    let kind = ("", "configmaps");
    let map = |namespace: &str| json!({"metadata": {"name": "m", "namespace": namespace}});
    let check = |namespace: &str, expected: &str| {
        check("NamespaceLifecycle", kind, map(namespace), &cluster, "/none", expected.into());
    };
    super::tests::check("NamespaceLifecycle", kind, map("n"), &cluster, "/metadata/name", json!("m"));
    check("none", "404 namespaces \"none\" not found");
    check(
        "end",
        "403 configmaps \"m\" is forbidden: unable to create new content in namespace end because it is being terminated",
    );
    for (name, expected) in [
        ("default", Some("403 namespaces \"default\" is forbidden: this namespace may not be deleted")),
        ("kube-node-lease", None),
    ] {
        let namespace = json!({"metadata": {"name": name}});
        let found =
            run("NamespaceLifecycle", ("", "namespaces"), Operation::Delete, namespace, None, &cluster);
        assert_eq!(found.err().as_deref(), expected);
    }
}

#[test]
fn taints_new_nodes_as_not_ready() {
    let taint = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
    for spec in [json!({}), json!({"taints": [taint]})] {
        let node = json!({"metadata": {"name": "n"}, "spec": spec});
        check(
            "TaintNodesByCondition",
            ("", "nodes"),
            node,
            &FakeCluster::default(),
            "/spec/taints",
            json!([taint]),
        );
    }
}

#[test]
fn sets_default_storage_and_ingress_class() {
    let class = |name: &str, time: &str, default: &str| {
        json!({"metadata": {"name": name, "creationTimestamp": time, "annotations": {
            "storageclass.kubernetes.io/is-default-class": default,
            "ingressclass.kubernetes.io/is-default-class": default,
        }}})
    };
    let classes = [
        class("a", "2026-01-01T00:00:00Z", "true"),
        class("b", "2026-01-02T00:00:00Z", "true"),
        class("c", "2026-01-02T00:00:00Z", "true"),
        class("d", "2026-01-03T00:00:00Z", "false"),
    ];
    let of = |group: &'static str, plural: &'static str| {
        FakeCluster::of(&classes.clone().map(|class| (group, plural, class)))
    };
    let named = json!({"metadata": {"name": "x", "namespace": "n"}, "spec": {"storageClassName": "", "ingressClassName": "z"}});
    let plain = json!({"metadata": {"name": "x", "namespace": "n"}, "spec": {}});
    let (claims, ingresses) = (("", "persistentvolumeclaims"), ("networking.k8s.io", "ingresses"));
    let storage = of("storage.k8s.io", "storageclasses");
    check("DefaultStorageClass", claims, plain.clone(), &storage, "/spec/storageClassName", json!("b"));
    check("DefaultStorageClass", claims, named.clone(), &storage, "/spec/storageClassName", json!(""));
    check(
        "DefaultStorageClass",
        claims,
        plain.clone(),
        &FakeCluster::default(),
        "/spec/storageClassName",
        json!(null),
    );
    let ingress = of("networking.k8s.io", "ingressclasses");
    check("DefaultIngressClass", ingresses, plain, &ingress, "/spec/ingressClassName", json!("b"));
    check("DefaultIngressClass", ingresses, named, &ingress, "/spec/ingressClassName", json!("z"));
}

#[test]
fn adds_protection_finalizers() {
    let object = json!({"metadata": {"name": "x", "finalizers": ["a/b"]}});
    let check = |kind, expected: Value| {
        check(
            "StorageObjectInUseProtection",
            kind,
            object.clone(),
            &FakeCluster::default(),
            "/metadata/finalizers",
            expected,
        );
    };
    check(("", "persistentvolumes"), json!(["a/b", "kubernetes.io/pv-protection"]));
    check(("", "persistentvolumeclaims"), json!(["a/b", "kubernetes.io/pvc-protection"]));
    check(("", "configmaps"), json!(["a/b"]));
}

#[test]
fn allows_claim_expansion_only_if_class_allows_it() {
    let cluster = FakeCluster::of(&[
        (
            "storage.k8s.io",
            "storageclasses",
            json!({"metadata": {"name": "grows"}, "allowVolumeExpansion": true}),
        ),
        ("storage.k8s.io", "storageclasses", json!({"metadata": {"name": "stays"}})),
    ]);
    let claim = |class: &str, size: &str, phase: &str| {
        json!({"metadata": {"name": "c", "namespace": "n"}, "status": {"phase": phase},
            "spec": {"storageClassName": class, "resources": {"requests": {"storage": size}}}})
    };
    let check = |class: &str, phase: &str, sizes: (&str, &str), reason: &str| {
        let expected = match reason {
            "" => String::new(),
            reason => format!("403 persistentvolumeclaims \"c\" is forbidden: {reason}"),
        };
        let (new, old) = (claim(class, sizes.1, phase), claim(class, sizes.0, phase));
        check_update(
            "PersistentVolumeClaimResize",
            ("", "persistentvolumeclaims"),
            new,
            old,
            &cluster,
            &expected,
        );
    };
    let fixed = "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize";
    check("grows", "Bound", ("1Gi", "2Gi"), "");
    check("stays", "Bound", ("1Gi", "2Gi"), fixed);
    check("", "Bound", ("1Gi", "2Gi"), fixed);
    check("stays", "Bound", ("1Gi", "1024Mi"), "");
    check("grows", "Pending", ("1Gi", "2Gi"), "Only bound persistent volume claims can be expanded");
}

#[test]
fn rejects_new_external_ips() {
    let service =
        |ips: &[&str]| json!({"metadata": {"name": "s", "namespace": "n"}, "spec": {"externalIPs": ips}});
    let kind = ("", "services");
    let none = FakeCluster::default();
    let denied = "403 services \"s\" is forbidden: Use of external IPs is denied by admission control";
    check("DenyServiceExternalIPs", kind, service(&["1.1.1.1"]), &none, "", json!(denied));
    check("DenyServiceExternalIPs", kind, service(&[]), &none, "/metadata/name", json!("s"));
    let old = service(&["1.1.1.1", "2.2.2.2"]);
    check_update("DenyServiceExternalIPs", kind, service(&["2.2.2.2"]), old.clone(), &none, "");
    check_update("DenyServiceExternalIPs", kind, service(&["3.3.3.3"]), old, &none, denied);
}

#[test]
fn rejects_client_certificates_for_privileged_group() {
    use base64::Engine as _;
    let csr = |pem: &str, signer: &str| {
        let request = base64::engine::general_purpose::STANDARD.encode(pem);
        json!({"metadata": {"name": "c"}, "spec": {"request": request, "signerName": signer}})
    };
    let (privileged_csr, user_csr) = (include_str!("tests/masters.csr"), include_str!("tests/jane.csr"));
    let client = "kubernetes.io/kube-apiserver-client";
    let forbidden = |reason: &str| {
        json!(format!("403 certificatesigningrequests.certificates.k8s.io \"c\" is forbidden: {reason}"))
    };
    let not_allowed = forbidden(
        "use of kubernetes.io/kube-apiserver-client signer with system:masters group is not allowed",
    );
    let parse_error = forbidden("failed to parse CSR: PEM block type must be CERTIFICATE REQUEST");
    for (object, expected) in [
        (csr(user_csr, client), json!("c")),
        (csr(privileged_csr, client), not_allowed),
        (csr(privileged_csr, "example.com/other"), json!("c")),
        (csr("nonsense", client), parse_error),
    ] {
        let kind = ("certificates.k8s.io", "certificatesigningrequests");
        let name = "CertificateSubjectRestriction";
        check(name, kind, object, &FakeCluster::default(), "/metadata/name", expected);
    }
}

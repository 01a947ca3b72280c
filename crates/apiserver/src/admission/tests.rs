//! One table per plugin: an object and the cluster in, the changed part or the complaint out.

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::object::to_stored;

mod pods;
mod quotas;

/// A cluster of these objects.
#[derive(Default)]
pub struct Fake {
    objects: Vec<Arc<Object>>,
    settings: Settings,
    event_rates: event_rates::Rates,
}

impl Fake {
    /// Each object with the plural of its kind, such as `limitranges`.
    pub fn of(objects: &[(&str, &str, Value)]) -> Fake {
        let store = |(group, plural, value): &(&str, &str, Value)| {
            let row = api::table::find(group, "v1", plural).expect("a known kind");
            let metadata = value.at("metadata");
            let collection = Target::collection(row, metadata.text("namespace"));
            let key = Target { name: metadata.text("name").to_owned(), ..collection }.key();
            Arc::new(Object::new(key.into(), to_stored(value.clone()), 1).expect("an object"))
        };
        Fake { objects: objects.iter().map(store).collect(), ..Fake::default() }
    }

    pub fn set_pod_security(&mut self, settings: pod_security::Settings) {
        self.settings.pod_security = settings;
    }
}

impl Cluster for Fake {
    fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Arc<Object>> {
        self.list(group, plural, namespace).into_iter().find(|object| object.name() == name)
    }

    fn list(&self, group: &str, plural: &str, namespace: &str) -> Vec<Arc<Object>> {
        let row = api::table::find(group, "v1", plural).expect("a known kind");
        let prefix = Target::collection(row, namespace).key();
        self.objects.iter().filter(|object| object.key.starts_with(&prefix)).cloned().collect()
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn event_rates(&self) -> &event_rates::Rates {
        &self.event_rates
    }

    /// `jo` may do everything, and nobody else anything.
    fn allows(&self, user: &User, _: &Ask<'_>) -> bool {
        user.name == "jo"
    }
}

/// Runs one plugin, both halves, and answers with the changed object or the complaint.
fn run(
    name: &str,
    (group, plural): (&str, &str),
    operation: Operation,
    mut object: Value,
    old: Option<&Value>,
    cluster: &Fake,
) -> Result<Value, String> {
    let plugin = PLUGINS.iter().find(|plugin| plugin.name == name).expect("a known plugin");
    let row = api::table::find(group, "v1", plural).expect("a known kind");
    let target = Target::collection(row, object.at("metadata").text("namespace"));
    let mut request = Request::new(&target, operation, &object, old, None);
    request.name = object.at("metadata").text("name").to_owned();
    let admitted = plugin.admit.map_or(Ok(()), |admit| admit(&request, &mut object, cluster));
    let judged = admitted
        .and_then(|()| plugin.validate.map_or(Ok(()), |validate| validate(&request, &object, cluster)));
    judged.map(|()| object).map_err(|status| format!("{} {}", status.code, status.message))
}

/// The part at `path` of what one plugin makes of a new object, or the complaint.
#[track_caller]
fn check(name: &str, kind: (&str, &str), object: Value, cluster: &Fake, path: &str, expected: Value) {
    let found = match run(name, kind, Operation::Create, object, None, cluster) {
        Ok(object) => object.pointer(path).cloned().unwrap_or_default(),
        Err(message) => message.into(),
    };
    assert_eq!(found, expected);
}

#[track_caller]
fn check_update(name: &str, kind: (&str, &str), new: Value, old: Value, cluster: &Fake, expected: &str) {
    let found = run(name, kind, Operation::Update, new, Some(&old), cluster);
    assert_eq!(found.err().unwrap_or_default(), expected);
}

#[test]
fn plugins_are_switched_by_name() {
    let on = |enable: &[&str], disable: &[&str]| {
        let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Chain::new(&Switches { enable: list(enable), disable: list(disable), ..Switches::default() })
            .map(|chain| chain.plugins.iter().map(|plugin| plugin.name).collect::<Vec<_>>())
    };
    let usual = on(&[], &[]).unwrap();
    assert_eq!(usual.first(), Some(&"NamespaceLifecycle"));
    assert_eq!(usual.last(), Some(&"ResourceQuota"));
    assert!(!usual.contains(&"AlwaysPullImages"));
    let changed = on(&["AlwaysPullImages", "Priority"], &["LimitRanger"]).unwrap();
    assert_eq!(changed.len(), usual.len());
    assert!(changed.contains(&"AlwaysPullImages") && !changed.contains(&"LimitRanger"));
    assert_eq!(on(&["Nonsense"], &[]), Err(SwitchError::Unknown("Nonsense".into())));
    assert_eq!(on(&["Priority"], &["Priority"]), Err(SwitchError::Both("Priority".into())));
    let mut names: Vec<_> = PLUGINS.iter().map(|plugin| plugin.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), PLUGINS.len());
}

/// All of upstream's, in its order; `!` for those that are on by default.
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

/// On by default upstream, and not here at all: those of kinds that are not served (the groups of pods,
/// trust bundles) and those of gates that are off.
const ABSENT: &[&str] =
    &["PodGroupProtection", "ClusterTrustBundleAttest", "PodGroupWorkloadExists", "JobValidation"];

/// On here and off there, or the other way round; the table says why.
const OTHERWISE: &[&str] = &["NodeRestriction"];

#[test]
fn the_order_and_what_is_on_are_upstreams() {
    let name = |entry: &&'static str| entry.trim_start_matches('!');
    let ours: Vec<&str> = PLUGINS.iter().map(|plugin| plugin.name).collect();
    let theirs: Vec<&str> = UPSTREAM.iter().map(name).filter(|name| ours.contains(name)).collect();
    assert_eq!(ours, theirs);
    for plugin in PLUGINS {
        let on = UPSTREAM.contains(&format!("!{}", plugin.name).as_str());
        assert_eq!(plugin.on != on, OTHERWISE.contains(&plugin.name), "{}", plugin.name);
    }
    for entry in UPSTREAM.iter().filter(|entry| entry.starts_with('!')) {
        assert_ne!(ours.contains(&name(entry)), ABSENT.contains(&name(entry)), "{entry}");
    }
}

#[test]
fn pods_are_labelled_with_where_they_are() {
    let labels = json!({"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/region": "r", "x": "y"});
    let cluster = Fake::of(&[
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
    let pods = api::table::find("", "v1", "pods").expect("pods are in the table");
    let target = Target { name: "p".into(), subresource: "binding".into(), ..Target::collection(pods, "n") };
    for (kind, expected) in [("Node", given), ("Moon", Value::Null)] {
        let mut binding = json!({"metadata": {"name": "p"}, "target": {"kind": kind, "name": "there"}});
        let request = Request::new(&target, Operation::Create, &Value::Null, None, None);
        defaults::topology_labels(&request, &mut binding, &cluster).expect("labels");
        assert_eq!(*binding.path("metadata.labels"), expected);
    }
}

/// Runs a judging plugin on a change through a subresource.
fn judge_change(
    name: &str,
    (group, plural, subresource): (&str, &str, &str),
    who: Option<&str>,
    (new, old): (Value, Value),
    cluster: &Fake,
) -> String {
    let plugin = PLUGINS.iter().find(|plugin| plugin.name == name).expect("a known plugin");
    let row = api::table::find(group, "v1", plural).expect("a known kind");
    let target = Target { name: "x".into(), subresource: subresource.into(), ..Target::collection(row, "") };
    let user = who.map(|name| User { name: name.into(), ..User::default() });
    let request = Request::new(&target, Operation::Update, &new, Some(&old), user.as_ref());
    let answer = plugin.validate.expect("a judge")(&request, &new, cluster);
    answer.map_or_else(|status| status.message, |()| String::new())
}

#[test]
fn certificates_are_approved_and_signed_by_who_may() {
    let csr = |signer: &str, certificate: &str| json!({"spec": {"signerName": signer}, "status": {"certificate": certificate}});
    let refused = |verb: &str| {
        format!(
            "certificatesigningrequests.certificates.k8s.io \"x\" is forbidden: user not permitted to {verb} requests with signerName \"example.com/s\""
        )
    };
    let check = |name: &str, subresource: &str, who: Option<&str>, certificate: &str, expected: &str| {
        // What an approval says about the signer does not count.
        let objects = (csr("other.com/s", certificate), csr("example.com/s", ""));
        let kind = ("certificates.k8s.io", "certificatesigningrequests", subresource);
        assert_eq!(
            judge_change(name, kind, who, objects, &Fake::default()),
            expected,
            "{name} {subresource}"
        );
    };
    check("CertificateApproval", "approval", Some("al"), "", &refused("approve"));
    check("CertificateApproval", "approval", Some("jo"), "", "");
    check("CertificateApproval", "approval", None, "", "");
    check("CertificateApproval", "status", Some("al"), "x", "");
    check("CertificateSigning", "status", Some("al"), "x", &refused("sign"));
    check("CertificateSigning", "status", Some("al"), "", "");
    check("CertificateSigning", "status", Some("jo"), "x", "");
    check("CertificateSigning", "approval", Some("al"), "x", "");
}

#[test]
fn pods_are_changed_only_as_their_node_can() {
    let node = |name: &str, features: &[&str]| json!({"metadata": {"name": name}, "status": {"declaredFeatures": features}});
    let able = ["InPlacePodLevelResourcesVerticalScaling", "InPlacePodVerticalScalingInitContainers"];
    let cluster = Fake::of(&[("", "nodes", node("old", &[])), ("", "nodes", node("new", &able))]);
    let pod = |node: &str, generation: u64, whole: &str, init: &str, sidecar: &str| {
        let resources = |cpu: &str| json!({"requests": {"cpu": cpu}});
        json!({"metadata": {"generation": generation}, "spec": {
            "nodeName": node, "resources": resources(whole), "initContainers": [
                {"name": "i", "resources": resources(init)},
                {"name": "s", "restartPolicy": "Always", "resources": resources(sidecar)},
            ],
        }})
    };
    let check = |new: Value, why: &str| {
        let node = new["spec"]["nodeName"].as_str().unwrap().to_owned();
        let objects = (new, pod(&node, 1, "1", "1", "1"));
        let found = judge_change(
            "NodeDeclaredFeatureValidator",
            ("", "pods", "resize"),
            Some("al"),
            objects,
            &cluster,
        );
        assert_eq!(found.trim_start_matches("pods \"x\" is forbidden: "), why);
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
fn pods_grow_no_larger_than_their_node() {
    let node = |name: &str, os: &str| {
        json!({"metadata": {"name": name, "labels": {"kubernetes.io/os": os}},
            "status": {"allocatable": {"cpu": "2", "memory": "1Gi"}}})
    };
    let cluster = Fake::of(&[("", "nodes", node("n", "linux")), ("", "nodes", node("w", "windows"))]);
    let pod = |node: &str, cpu: &str, memory: &str| {
        let requests = json!({"cpu": cpu, "memory": memory});
        json!({"spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": requests}}]}})
    };
    let check = |node: &str, (cpu, memory): (&str, &str), why: &str| {
        let objects = (pod(node, cpu, memory), pod(node, "1", "1Mi"));
        let found = judge_change("PodResizeValidator", ("", "pods", "resize"), Some("al"), objects, &cluster);
        assert_eq!(found.trim_start_matches("pods \"x\" is forbidden: "), why);
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
fn namespaces_live_and_end() {
    let cluster = Fake::of(&[
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
fn new_nodes_are_not_ready() {
    let taint = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
    for spec in [json!({}), json!({"taints": [taint]})] {
        let node = json!({"metadata": {"name": "n"}, "spec": spec});
        check("TaintNodesByCondition", ("", "nodes"), node, &Fake::default(), "/spec/taints", json!([taint]));
    }
}

#[test]
fn default_classes() {
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
        Fake::of(&classes.clone().map(|class| (group, plural, class)))
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
        &Fake::default(),
        "/spec/storageClassName",
        json!(null),
    );
    let ingress = of("networking.k8s.io", "ingressclasses");
    check("DefaultIngressClass", ingresses, plain, &ingress, "/spec/ingressClassName", json!("b"));
    check("DefaultIngressClass", ingresses, named, &ingress, "/spec/ingressClassName", json!("z"));
}

#[test]
fn storage_in_use_is_held() {
    let object = json!({"metadata": {"name": "x", "finalizers": ["a/b"]}});
    let check = |kind, expected: Value| {
        check(
            "StorageObjectInUseProtection",
            kind,
            object.clone(),
            &Fake::default(),
            "/metadata/finalizers",
            expected,
        );
    };
    check(("", "persistentvolumes"), json!(["a/b", "kubernetes.io/pv-protection"]));
    check(("", "persistentvolumeclaims"), json!(["a/b", "kubernetes.io/pvc-protection"]));
    check(("", "configmaps"), json!(["a/b"]));
}

#[test]
fn claims_grow_where_their_class_allows_it() {
    let cluster = Fake::of(&[
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
    let check = |class: &str, phase: &str, sizes: (&str, &str), why: &str| {
        let expected = match why {
            "" => String::new(),
            why => format!("403 persistentvolumeclaims \"c\" is forbidden: {why}"),
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
fn external_ips_can_be_denied() {
    let service =
        |ips: &[&str]| json!({"metadata": {"name": "s", "namespace": "n"}, "spec": {"externalIPs": ips}});
    let kind = ("", "services");
    let none = Fake::default();
    let refused = "403 services \"s\" is forbidden: Use of external IPs is denied by admission control";
    check("DenyServiceExternalIPs", kind, service(&["1.1.1.1"]), &none, "", json!(refused));
    check("DenyServiceExternalIPs", kind, service(&[]), &none, "/metadata/name", json!("s"));
    let old = service(&["1.1.1.1", "2.2.2.2"]);
    check_update("DenyServiceExternalIPs", kind, service(&["2.2.2.2"]), old.clone(), &none, "");
    check_update("DenyServiceExternalIPs", kind, service(&["3.3.3.3"]), old, &none, refused);
}

#[test]
fn nobody_asks_to_be_a_master() {
    use base64::Engine as _;
    let csr = |pem: &str, signer: &str| {
        let request = base64::engine::general_purpose::STANDARD.encode(pem);
        json!({"metadata": {"name": "c"}, "spec": {"request": request, "signerName": signer}})
    };
    let (masters, jane) = (include_str!("tests/masters.csr"), include_str!("tests/jane.csr"));
    let client = "kubernetes.io/kube-apiserver-client";
    let refused = |why: &str| {
        json!(format!("403 certificatesigningrequests.certificates.k8s.io \"c\" is forbidden: {why}"))
    };
    let not_allowed =
        refused("use of kubernetes.io/kube-apiserver-client signer with system:masters group is not allowed");
    let unreadable = refused("failed to parse CSR: PEM block type must be CERTIFICATE REQUEST");
    for (object, expected) in [
        (csr(jane, client), json!("c")),
        (csr(masters, client), not_allowed),
        (csr(masters, "example.com/other"), json!("c")),
        (csr("nonsense", client), unreadable),
    ] {
        let kind = ("certificates.k8s.io", "certificatesigningrequests");
        let name = "CertificateSubjectRestriction";
        check(name, kind, object, &Fake::default(), "/metadata/name", expected);
    }
}

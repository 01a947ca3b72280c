//! The plugin around the checks: labels, modes, exemptions, workloads and namespaces.

use expect_test::{Expect, expect};
use serde_json::json;

use super::*;
use crate::access::User;
use crate::admission::tests::FakeCluster;
use crate::request::Target;

fn labels(text: &str) -> Value {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').expect("name=value");
        (format!("{PREFIX}{name}"), Value::from(value))
    };
    Value::Object(text.split_whitespace().map(pair).collect())
}

/// A namespace with these labels, and the plugin's configuration.
fn cluster(text: &str, settings: Value) -> FakeCluster {
    let namespace = json!({"metadata": {"name": "n", "labels": labels(text)}});
    let mut cluster = FakeCluster::of(&[("", "namespaces", namespace)]);
    cluster.set_pod_security(settings_of(settings));
    cluster
}

fn settings_of(mut file: Value) -> Settings {
    file["apiVersion"] = json!("pod-security.admission.config.k8s.io/v1");
    file["kind"] = json!("PodSecurityConfiguration");
    Settings::read(&file).expect("good settings")
}

/// The result of a write with its warnings and audit annotations.
fn run(
    cluster: &FakeCluster,
    kind: (&str, &str),
    subresource: &str,
    new: Value,
    old: Option<&Value>,
) -> String {
    let row = api::resource_table::find_resource(kind.0, "v1", kind.1).expect("a known kind");
    let namespace = if row.namespaced { "n" } else { "" };
    let target = Target { subresource: subresource.into(), ..Target::collection(row, namespace) };
    let operation = if old.is_some() { Operation::Update } else { Operation::Create };
    let user = User { name: "jo".into(), ..User::default() };
    let request = Request::new(&target, operation, &new, old, Some(&user));
    let answer = validate(&request, &new, cluster).map_or_else(|status| status.message, |()| "fine".into());
    let (warnings, annotations) = (request.recorder.warnings(), request.recorder.annotations());
    let warnings = warnings.iter().map(|text| format!("warning: {text}"));
    let audit = annotations.iter().map(|(key, text)| format!("{}: {text}", key.replace(PREFIX, "")));
    std::iter::once(answer).chain(warnings).chain(audit).collect::<Vec<_>>().join("\n")
}

fn privileged(image: &str) -> Value {
    let context = json!({"privileged": true});
    json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": image, "securityContext": context}]}})
}

#[track_caller]
fn check_pod(text: &str, settings: Value, expected: Expect) {
    expected.assert_eq(&run(&cluster(text, settings), ("", "pods"), "", privileged("i"), None));
}

#[test]
fn modes_and_defaults() {
    check_pod(
        "",
        json!({}),
        expect![[r#"
        fine
        enforce-policy: privileged:latest"#]],
    );
    check_pod(
        "enforce=baseline",
        json!({}),
        expect![[r#"
        pods "p" is forbidden: violates PodSecurity "baseline:latest": privileged (container "c" must not set securityContext.privileged=true)
        enforce-policy: baseline:latest"#]],
    );
    check_pod(
        "enforce=baseline enforce-version=v1.20 audit=baseline",
        json!({}),
        expect![[r#"
        pods "p" is forbidden: violates PodSecurity "baseline:v1.20": privileged (container "c" must not set securityContext.privileged=true)
        audit-violations: would violate PodSecurity "baseline:latest": privileged (container "c" must not set securityContext.privileged=true)
        enforce-policy: baseline:v1.20"#]],
    );
    check_pod(
        "warn=baseline warn-version=v1.5",
        json!({}),
        expect![[r#"
        fine
        warning: would violate PodSecurity "baseline:v1.5": privileged (container "c" must not set securityContext.privileged=true)
        enforce-policy: privileged:latest"#]],
    );
    check_pod(
        "audit=baseline",
        json!({}),
        expect![[r#"
        fine
        audit-violations: would violate PodSecurity "baseline:latest": privileged (container "c" must not set securityContext.privileged=true)
        enforce-policy: privileged:latest"#]],
    );
    let defaults =
        json!({"defaults": {"enforce": "baseline", "enforce-version": "v1.30", "warn": "restricted"}});
    check_pod(
        "",
        defaults.clone(),
        expect![[r#"
        pods "p" is forbidden: violates PodSecurity "baseline:v1.30": privileged (container "c" must not set securityContext.privileged=true)
        enforce-policy: baseline:v1.30"#]],
    );
    check_pod(
        "enforce=privileged warn=privileged",
        defaults,
        expect![[r#"
        fine
        enforce-policy: privileged:latest"#]],
    );
}

/// An invalid label was stored while the plugin was disabled.
#[test]
fn invalid_enforce_label_defaults_to_restricted() {
    check_pod(
        "enforce=strict audit=x warn=y warn-version=1",
        json!({}),
        expect![[r#"
        pods "p" is forbidden: violates PodSecurity "restricted:latest": privileged (container "c" must not set securityContext.privileged=true), allowPrivilegeEscalation != false (container "c" must set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (container "c" must set securityContext.capabilities.drop=["ALL"]), runAsNonRoot != true (pod or container "c" must set securityContext.runAsNonRoot=true), seccompProfile (pod or container "c" must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost")
        enforce-policy: restricted:latest
        error: Failed to parse policy: [metadata.labels[pod-security.kubernetes.io/enforce]: Invalid value: "strict": must be one of privileged, baseline, restricted, metadata.labels[pod-security.kubernetes.io/audit]: Invalid value: "x": must be one of privileged, baseline, restricted, metadata.labels[pod-security.kubernetes.io/warn]: Invalid value: "y": must be one of privileged, baseline, restricted, metadata.labels[pod-security.kubernetes.io/warn-version]: Invalid value: "1": must be "latest" or "v1.x"]"#]],
    );
}

#[test]
fn skips_exempt_users_namespaces_and_runtime_classes() {
    let exempt = |what: &str, name: &str| json!({"exemptions": {what: [name]}});
    for (what, name) in [("usernames", "jo"), ("namespaces", "n")] {
        let found =
            run(&cluster("enforce=baseline", exempt(what, name)), ("", "pods"), "", privileged("i"), None);
        let reason = if what == "usernames" { "user" } else { "namespace" };
        assert_eq!(found, format!("fine\nexempt: {reason}"));
    }
    let mut pod = privileged("i");
    pod["spec"]["runtimeClassName"] = json!("kata");
    let exempt_runtime = cluster("enforce=baseline", exempt("runtimeClasses", "kata"));
    assert_eq!(run(&exempt_runtime, ("", "pods"), "", pod, None), "fine\nexempt: runtimeClass");
    assert!(run(&exempt_runtime, ("", "pods"), "", privileged("i"), None).contains("forbidden"));
    let namespace =
        json!({"metadata": {"name": "n", "labels": labels("enforce=baseline warn-version=v1.1")}});
    let old = json!({"metadata": {"name": "n"}});
    let exempt = cluster("", exempt("namespaces", "n"));
    assert_eq!(
        run(&exempt, ("", "namespaces"), "", namespace, Some(&old)),
        "fine\nwarning: namespace \"n\" is exempt from Pod Security, and the policy (enforce=baseline:latest, warn=baseline:v1.1) will be ignored"
    );
}

#[test]
fn skips_updates_that_do_not_change_images() {
    let cluster = cluster("enforce=baseline", json!({}));
    let check = |subresource: &str, new: &Value, denied: bool| {
        let found = run(&cluster, ("", "pods"), subresource, new.clone(), Some(&privileged("old")));
        assert_eq!(found.contains("forbidden"), denied, "{subresource} {new}");
    };
    let mut with_ephemeral_container = privileged("old");
    with_ephemeral_container["spec"]["ephemeralContainers"] = json!([{"name": "d", "image": "busybox"}]);
    check("", &privileged("old"), false);
    check("", &privileged("new"), true);
    check("status", &privileged("new"), false);
    check("ephemeralcontainers", &with_ephemeral_container, true);
    check("resize", &privileged("old"), false);
}

#[test]
fn adds_warnings_for_workload_templates() {
    let cluster = cluster("enforce=baseline audit=baseline", json!({}));
    for (group, plural, path) in POD_TEMPLATE_PATHS {
        let mut object = privileged("i");
        for name in path.rsplit('.') {
            object = json!({name: object});
        }
        object["metadata"] = json!({"name": "w"});
        let found = run(&cluster, (group, plural), "", object.clone(), None);
        let wrong = "would violate PodSecurity \"baseline:latest\": privileged (container \"c\" must not set securityContext.privileged=true)";
        assert_eq!(found, format!("fine\nwarning: {wrong}\naudit-violations: {wrong}"), "{plural}");
        assert_eq!(run(&cluster, (group, plural), "status", object, None), "fine");
    }
    let empty = json!({"metadata": {"name": "w"}, "spec": {}});
    assert_eq!(run(&cluster, ("", "replicationcontrollers"), "", empty, None), "fine");
}

#[test]
fn validates_namespace_labels() {
    let namespace = |text: &str| json!({"metadata": {"name": "n", "labels": labels(text)}});
    let check = |new: &str, old: Option<&str>, expected: &str| {
        let old = old.map(namespace);
        let found = run(&cluster("", json!({})), ("", "namespaces"), "", namespace(new), old.as_ref());
        assert_eq!(found, expected);
    };
    let wrong = r#"Namespace "n" is invalid: metadata.labels[pod-security.kubernetes.io/enforce]: Invalid value: "x": must be one of privileged, baseline, restricted"#;
    check("enforce=x", None, wrong);
    check("enforce=x", Some(""), wrong);
    check("enforce=x", Some("enforce=x"), "fine");
    for good in ["v1.0", "v1.36", "v1.999", "latest"] {
        check(&format!("warn-version={good}"), None, "fine");
    }
    for bad in ["v1.01", "1.2", "v1.", "v2.1", "v1.+1", "v1.99999999999", ""] {
        let expected = format!(
            "Namespace \"n\" is invalid: metadata.labels[pod-security.kubernetes.io/warn-version]: Invalid value: {}: must be \"latest\" or \"v1.x\"",
            quote(bad)
        );
        check(&format!("warn-version={bad}"), None, &expected);
    }
}

#[test]
fn adds_warnings_for_existing_pods_when_enforce_level_changes() {
    let pod = |name: &str, image: &str, owner: &str| {
        let mut pod = privileged(image);
        pod["metadata"] =
            json!({"name": name, "namespace": "n", "ownerReferences": [{"uid": owner, "controller": true}]});
        pod
    };
    let mut network = pod("host", "i", "b");
    network["spec"] = json!({"hostNetwork": true, "containers": []});
    let good = json!({"metadata": {"name": "good", "namespace": "n"}, "spec": {"containers": []}});
    let pods = [pod("z", "i", "a"), pod("b", "i", "a"), pod("c", "i", ""), network, good];
    let cluster = FakeCluster::of(&pods.map(|pod| ("", "pods", pod)));
    let namespace = |text: &str| json!({"metadata": {"name": "n", "labels": labels(text)}});
    let check = |old: &str, new: &str, expected: Expect| {
        expected.assert_eq(&run(&cluster, ("", "namespaces"), "", namespace(new), Some(&namespace(old))));
    };
    check(
        "",
        "enforce=baseline",
        expect![[r#"
        fine
        warning: existing pods in namespace "n" violate the new PodSecurity enforce level "baseline:latest"
        warning: b (and 2 other pods): privileged
        warning: host: host namespaces"#]],
    );
    for (old, new) in [
        ("enforce=baseline", "enforce=baseline warn=baseline"),
        ("enforce=restricted", "enforce=baseline"),
        ("enforce=restricted", "enforce=privileged"),
        ("", "warn=restricted"),
    ] {
        assert_eq!(run(&cluster, ("", "namespaces"), "", namespace(new), Some(&namespace(old))), "fine");
    }
    // The check of a newer version may be stricter at the same level.
    check(
        "enforce=restricted enforce-version=v1.1",
        "enforce=baseline",
        expect![[r#"
        fine
        warning: existing pods in namespace "n" violate the new PodSecurity enforce level "baseline:latest"
        warning: b (and 2 other pods): privileged
        warning: host: host namespaces"#]],
    );
}

/// With too many pods to check, one pod of each controller comes first.
#[test]
fn checks_one_pod_of_each_controller_first() {
    let pod = |name: &str, owner: &str| json!({"metadata": {"name": name, "ownerReferences": [{"uid": owner, "controller": true}]}});
    let without_owner = json!({"metadata": {"name": "alone"}});
    let pods = vec![pod("a1", "a"), pod("a2", "a"), without_owner, pod("b1", "b")];
    let ordered = Settings::default().prioritize_pods(pods);
    let names: Vec<&str> = ordered.iter().map(|pod| pod.at("metadata").text("name")).collect();
    assert_eq!(names, ["a1", "alone", "b1", "a2"]);
    let many: Vec<Value> =
        (0..NAMESPACE_MAX_PODS_TO_CHECK + 1).map(|i| json!({"metadata": {"name": i.to_string()}})).collect();
    let warnings = Settings::default().evaluate_pods_in_namespace("n", LevelVersion::default(), many);
    assert_eq!(
        warnings,
        ["new PodSecurity enforce level only checked against the first 3000 of 3001 existing pods"]
    );
}

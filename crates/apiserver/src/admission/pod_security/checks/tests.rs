use serde_json::json;

use super::*;

/// A pod without violations at the restricted level.
fn good() -> Value {
    json!({"metadata": {}, "spec": {
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [{"name": "i", "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}}],
        "containers": [{"name": "c", "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}}],
    }})
}

fn merged(mut into: Value, patch: &Value) -> Value {
    // Lists of containers are merged by index.
    match (&mut into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                let old = into.remove(key).unwrap_or_default();
                into.insert(key.clone(), merged(old, value));
            }
        }
        (Value::Array(into), Value::Array(patch)) if into.iter().all(Value::is_object) => {
            for (i, value) in patch.iter().enumerate() {
                let old = if i < into.len() { into[i].take() } else { json!({}) };
                let new = merged(old, value);
                if i < into.len() { into[i] = new } else { into.push(new) }
            }
        }
        (into, patch) => *into = patch.clone(),
    }
    into
}

fn evaluate(at: &str, pod: &Value) -> String {
    let (level, version) = at.split_once(':').expect("a level and a version");
    let (level, version) = (Level::parse(level), Version::parse(version));
    let level_version = LevelVersion { level: level.expect("a level"), version: version.expect("a version") };
    let pod = Pod { metadata: pod.at("metadata"), spec: pod.at("spec") };
    let found = run_checks(level_version, &pod);
    found.iter().map(|one| format!("{}: {}", one.reason, one.detail)).collect::<Vec<_>>().join(" | ")
}

/// Checks the good pod with a change merged into it.
#[track_caller]
fn check(at: &str, change: Value, expected: &str) {
    assert_eq!(evaluate(at, &merged(good(), &change)), expected, "{at} {change}");
}

fn container(context: Value) -> Value {
    json!({"spec": {"containers": [{"securityContext": context}]}})
}

fn on_pod(context: Value) -> Value {
    json!({"spec": {"securityContext": context}})
}

#[test]
fn allows_restricted_pod_at_every_level_and_version() {
    for version in (0..40).map(|minor| format!("v1.{minor}")).chain(["latest".to_owned()]) {
        for level in ["privileged", "baseline", "restricted"] {
            check(&format!("{level}:{version}"), json!({}), "");
        }
    }
}

#[test]
fn default_pod_passes_baseline_only() {
    let pod = json!({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}});
    assert_eq!(evaluate("baseline:latest", &pod), "");
    assert_eq!(
        evaluate("restricted:v1.0", &pod),
        r#"runAsNonRoot != true: pod or containers "a", "b" must set securityContext.runAsNonRoot=true"#
    );
    assert_eq!(
        evaluate("restricted:latest", &pod),
        r#"allowPrivilegeEscalation != false: containers "a", "b" must set securityContext.allowPrivilegeEscalation=false | unrestricted capabilities: containers "a", "b" must set securityContext.capabilities.drop=["ALL"] | runAsNonRoot != true: pod or containers "a", "b" must set securityContext.runAsNonRoot=true | seccompProfile: pod or containers "a", "b" must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost""#
    );
}

#[test]
fn baseline_checks() {
    let check = |change: Value, expected: &str| check("baseline:latest", change, expected);
    let profile = |kind: &str| json!({"appArmorProfile": {"type": kind}});
    check(on_pod(profile("Localhost")), "");
    check(
        on_pod(profile("Unconfined")),
        r#"forbidden AppArmor profile: pod must not set AppArmor profile type to "Unconfined""#,
    );
    let annotated = merged(
        container(profile("Unconfined")),
        &json!({"metadata": {"annotations": {
            "container.apparmor.security.beta.kubernetes.io/c": "unconfined",
            "container.apparmor.security.beta.kubernetes.io/i": "localhost/x",
        }}}),
    );
    check(
        annotated,
        r#"forbidden AppArmor profiles: container "c" and annotation must not set AppArmor profile type to "Unconfined", "container.apparmor.security.beta.kubernetes.io/c="unconfined"""#,
    );
    let add_capabilities = |names: &[&str]| json!({"capabilities": {"add": names}});
    check(container(add_capabilities(&["CHOWN", "KILL"])), "");
    check(
        container(add_capabilities(&["NET_RAW", "CHOWN", "BPF"])),
        r#"non-default capabilities: container "c" must not include "BPF", "NET_RAW" in securityContext.capabilities.add"#,
    );
    check(
        json!({"spec": {"hostNetwork": true, "hostPID": true, "hostIPC": true}}),
        "host namespaces: hostNetwork=true, hostPID=true, hostIPC=true",
    );
    let volumes =
        json!({"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}, {"name": "n", "nfs": {}}]}});
    check(volumes, r#"hostPath volumes: volume "v""#);
    let ports = json!({"spec": {
        "initContainers": [{"ports": [{"hostPort": 9090}]}],
        "containers": [{"ports": [{"hostPort": 80}, {"hostPort": 0}, {"containerPort": 1}]}],
    }});
    check(ports, r#"hostPort: containers "i", "c" use hostPorts 80, 9090"#);
    check(
        container(json!({"privileged": true})),
        r#"privileged: container "c" must not set securityContext.privileged=true"#,
    );
    check(container(json!({"procMount": "Default"})), "");
    check(
        container(json!({"procMount": "Unmasked"})),
        r#"procMount: container "c" must not set securityContext.procMount to "Unmasked""#,
    );
    check(on_pod(json!({"seLinuxOptions": {"type": "container_t", "level": "s0"}})), "");
    check(
        merged(
            on_pod(json!({"seLinuxOptions": {"type": "x", "user": "u"}})),
            &container(json!({"seLinuxOptions": {"type": "y", "role": "r"}})),
        ),
        r#"seLinuxOptions: pod and container "c" set forbidden securityContext.seLinuxOptions: types "x", "y"; user may not be set; role may not be set"#,
    );
    check(
        container(json!({"seccompProfile": {"type": "Unconfined"}})),
        r#"seccompProfile: container "c" must not set securityContext.seccompProfile.type to "Unconfined""#,
    );
    let set = |names: &[&str]| {
        on_pod(json!({"sysctls": names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>()}))
    };
    check(set(&["kernel.shm_rmid_forced", "net.ipv4.tcp_rmem"]), "");
    check(set(&["kernel.msgmax", "a.b"]), "forbidden sysctls: kernel.msgmax, a.b");
    check(
        merged(
            on_pod(json!({"windowsOptions": {"hostProcess": true}})),
            &container(json!({"windowsOptions": {"hostProcess": true}})),
        ),
        r#"hostProcess: pod and container "c" must not set securityContext.windowsOptions.hostProcess=true"#,
    );
    let probes = json!({"spec": {"containers": [{
        "livenessProbe": {"httpGet": {"host": "b"}},
        "lifecycle": {"preStop": {"tcpSocket": {"host": "a"}}},
    }], "ephemeralContainers": [{"name": "e", "startupProbe": {"tcpSocket": {"host": "a"}}}]}});
    check(probes, r#"probe or lifecycle host: containers "c", "e" use probe or lifecycle hosts "a", "b""#);
}

#[test]
fn restricted_checks() {
    let check = |change: Value, expected: &str| check("restricted:latest", change, expected);
    check(
        container(json!({"allowPrivilegeEscalation": true})),
        r#"allowPrivilegeEscalation != false: container "c" must set securityContext.allowPrivilegeEscalation=false"#,
    );
    check(
        container(json!({"capabilities": {"drop": [], "add": ["NET_RAW"]}})),
        r#"unrestricted capabilities: container "c" must set securityContext.capabilities.drop=["ALL"]; container "c" must not include "NET_RAW" in securityContext.capabilities.add"#,
    );
    let volumes = json!({"spec": {"volumes": [
        {"name": "a", "hostPath": {"path": "/"}}, {"name": "b", "nfs": {}}, {"name": "c"}, {"name": "d", "emptyDir": {}}]}});
    check(
        volumes,
        r#"restricted volume types: volumes "a", "b", "c" use restricted volume types "hostPath", "nfs", "unknown""#,
    );
    check(
        merged(on_pod(json!({"runAsNonRoot": false})), &container(json!({"runAsNonRoot": false}))),
        r#"runAsNonRoot != true: pod and container "c" must not set securityContext.runAsNonRoot=false"#,
    );
    check(
        on_pod(json!({"runAsNonRoot": null})),
        r#"runAsNonRoot != true: pod or containers "i", "c" must set securityContext.runAsNonRoot=true"#,
    );
    check(
        merged(on_pod(json!({"runAsUser": 0})), &container(json!({"runAsUser": 0}))),
        r#"runAsUser=0: pod and container "c" must not set runAsUser=0"#,
    );
    check(on_pod(json!({"runAsUser": 1})), "");
    check(
        merged(
            on_pod(json!({"seccompProfile": null})),
            &container(json!({"seccompProfile": {"type": "Localhost"}})),
        ),
        r#"seccompProfile: pod or container "i" must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost""#,
    );
    check(
        on_pod(json!({"seccompProfile": {"type": "Unconfined"}})),
        r#"seccompProfile: pod must not set securityContext.seccompProfile.type to "Unconfined""#,
    );
}

/// Each check at the version boundary: the last version without it, and the first with it.
#[test]
fn checks_apply_from_their_minor_version() {
    let windows = json!({"spec": {"os": {"name": "windows"}}});
    let own_users = json!({"spec": {"hostUsers": false}});
    let rows: &[(&str, &str, Value, bool)] = &[
        ("restricted", "v1.7", container(json!({"allowPrivilegeEscalation": true})), true),
        ("restricted", "v1.8", container(json!({"allowPrivilegeEscalation": true})), false),
        (
            "restricted",
            "v1.24",
            merged(windows.clone(), &container(json!({"allowPrivilegeEscalation": true}))),
            false,
        ),
        (
            "restricted",
            "v1.25",
            merged(windows.clone(), &container(json!({"allowPrivilegeEscalation": true}))),
            true,
        ),
        ("restricted", "v1.21", container(json!({"capabilities": {"drop": []}})), true),
        ("restricted", "v1.22", container(json!({"capabilities": {"drop": []}})), false),
        (
            "restricted",
            "v1.24",
            merged(windows.clone(), &container(json!({"capabilities": {"drop": []}}))),
            false,
        ),
        (
            "restricted",
            "v1.25",
            merged(windows.clone(), &container(json!({"capabilities": {"drop": []}}))),
            true,
        ),
        ("restricted", "v1.22", on_pod(json!({"runAsUser": 0})), true),
        ("restricted", "v1.23", on_pod(json!({"runAsUser": 0})), false),
        ("restricted", "v1.34", merged(own_users.clone(), &on_pod(json!({"runAsUser": 0}))), false),
        ("restricted", "v1.35", merged(own_users.clone(), &on_pod(json!({"runAsUser": 0}))), true),
        ("restricted", "v1.34", merged(own_users.clone(), &on_pod(json!({"runAsNonRoot": false}))), false),
        ("restricted", "v1.35", merged(own_users.clone(), &on_pod(json!({"runAsNonRoot": false}))), true),
        ("restricted", "v1.18", on_pod(json!({"seccompProfile": null})), true),
        ("restricted", "v1.19", on_pod(json!({"seccompProfile": null})), false),
        ("restricted", "v1.24", merged(windows.clone(), &on_pod(json!({"seccompProfile": null}))), false),
        ("restricted", "v1.25", merged(windows, &on_pod(json!({"seccompProfile": null}))), true),
        ("baseline", "v1.18", on_pod(json!({"seccompProfile": {"type": "Unconfined"}})), true),
        ("baseline", "v1.19", on_pod(json!({"seccompProfile": {"type": "Unconfined"}})), false),
        ("baseline", "v1.34", merged(own_users.clone(), &container(json!({"procMount": "Unmasked"}))), false),
        ("baseline", "v1.35", merged(own_users.clone(), &container(json!({"procMount": "Unmasked"}))), true),
        ("restricted", "v1.35", merged(own_users, &container(json!({"procMount": "Unmasked"}))), false),
        ("baseline", "v1.30", on_pod(json!({"seLinuxOptions": {"type": "container_engine_t"}})), false),
        ("baseline", "v1.31", on_pod(json!({"seLinuxOptions": {"type": "container_engine_t"}})), true),
        (
            "baseline",
            "v1.26",
            on_pod(json!({"sysctls": [{"name": "net.ipv4.ip_local_reserved_ports"}]})),
            false,
        ),
        (
            "baseline",
            "v1.27",
            on_pod(json!({"sysctls": [{"name": "net.ipv4.ip_local_reserved_ports"}]})),
            true,
        ),
        ("baseline", "v1.28", on_pod(json!({"sysctls": [{"name": "net.ipv4.tcp_fin_timeout"}]})), false),
        ("baseline", "v1.29", on_pod(json!({"sysctls": [{"name": "net.ipv4.tcp_fin_timeout"}]})), true),
        ("baseline", "v1.31", on_pod(json!({"sysctls": [{"name": "net.ipv4.tcp_wmem"}]})), false),
        ("baseline", "v1.32", on_pod(json!({"sysctls": [{"name": "net.ipv4.tcp_wmem"}]})), true),
        (
            "baseline",
            "v1.33",
            json!({"spec": {"containers": [{"livenessProbe": {"httpGet": {"host": "x"}}}]}}),
            true,
        ),
        (
            "baseline",
            "v1.34",
            json!({"spec": {"containers": [{"livenessProbe": {"httpGet": {"host": "x"}}}]}}),
            false,
        ),
    ];
    for (level, version, change, allowed) in rows {
        let found = evaluate(&format!("{level}:{version}"), &merged(good(), change));
        assert_eq!(found.is_empty(), *allowed, "{level}:{version} {change}: {found}");
    }
    let annotated = |value: &str| {
        json!({"metadata": {"annotations": {
            "seccomp.security.alpha.kubernetes.io/pod": value,
            "container.seccomp.security.alpha.kubernetes.io/c": value}}})
    };
    check("baseline:v1.18", annotated("docker/default"), "");
    check(
        "baseline:v1.18",
        annotated("unconfined"),
        r#"seccompProfile: forbidden annotations container.seccomp.security.alpha.kubernetes.io/c="unconfined", seccomp.security.alpha.kubernetes.io/pod="unconfined""#,
    );
    check("baseline:v1.19", annotated("unconfined"), "");
}

#[test]
fn checks_are_sorted_and_override_existing_checks() {
    let keys: Vec<_> = CHECKS.iter().map(|check| (check.level, check.name)).collect();
    assert!(keys.is_sorted(), "{keys:?}");
    for check in CHECKS {
        assert!(check.since.is_sorted_by(|a, b| a.0 < b.0), "{}", check.name);
        let known =
            check.override_check.is_empty() || CHECKS.iter().any(|other| other.name == check.override_check);
        assert!(known, "{}", check.name);
    }
}

//! Tests pod validation.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;
use crate::core::testing::lines;

/// Sets the defaults, so that test cases only contain the relevant fields.
pub(crate) fn defaulted(mut spec: Value) -> Value {
    spec.set_default("restartPolicy", "Always");
    spec.set_default("dnsPolicy", "ClusterFirst");
    spec.set_default("terminationGracePeriodSeconds", 30);
    spec.set_default("containers", json!([{}]));
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            container.set_default("name", "a");
            container.set_default("image", "i");
            container.set_default("terminationMessagePolicy", "File");
            container.set_default("imagePullPolicy", "Always");
            for port in container.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
                port.set_default("protocol", "TCP");
            }
            for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
                if let Some(probe) = container.get_mut(probe) {
                    probe.set_default("successThreshold", 1);
                    if let Some(get) = probe.get_mut("httpGet") {
                        get.set_default("path", "/");
                        get.set_default("scheme", "HTTP");
                    }
                }
            }
        }
    }
    spec
}

fn pod(spec: Value) -> Value {
    json!({"metadata": {"name": "p", "namespace": "n"}, "spec": defaulted(spec)})
}

#[track_caller]
fn check(spec: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    let pod = pod(spec);
    Pod.validate(&pod, &mut errors);
    Pod.validate_create(&pod, &mut errors);
    expected.assert_eq(&lines(&errors));
}

#[track_caller]
fn check_container(container: Value, expected: Expect) {
    check(json!({"containers": [container]}), expected);
}

#[test]
fn minimal_pod_is_valid() {
    check(json!({}), expect![""]);
}

#[test]
fn validates_containers() {
    check(
        json!({"containers": []}),
        expect![[r#"
        spec.containers: Required value
    "#]],
    );
    check(
        json!({"containers": [{"name": "a"}, {"name": "a"}]}),
        expect![[r#"
        spec.containers[1].name: Duplicate value: "a"
    "#]],
    );
    check_container(
        json!({"imagePullPolicy": "Maybe", "image": ""}),
        expect![[r#"
        spec.containers[0].image: Required value
        spec.containers[0].imagePullPolicy: Unsupported value: "Maybe": supported values: "Always", "IfNotPresent", "Never"
    "#]],
    );
    check_container(
        json!({"image": " i"}),
        expect![[r#"
        spec.containers[0].image: Invalid value: " i": must not have leading or trailing whitespace
    "#]],
    );
    check(
        json!({"initContainers": [{"name": "a"}, {"name": "b", "livenessProbe": {"exec": {"command": ["x"]}}},
            {"name": "c", "restartPolicy": "Always", "livenessProbe": {"exec": {"command": ["x"]}}}]}),
        expect![[r#"
            spec.initContainers[0].name: Duplicate value: "a"
            spec.initContainers[1].livenessProbe: Forbidden: may not be set for init containers without restartPolicy=Always
        "#]],
    );
    check(
        json!({"ephemeralContainers": [{"name": "e", "ports": [{"containerPort": 80}]}]}),
        expect![[r#"
        spec.ephemeralContainers[0].ports: Forbidden: cannot be set for an Ephemeral Container
        spec.ephemeralContainers: Forbidden: cannot be set on create
    "#]],
    );
    check_container(
        json!({"restartPolicyRules": [{"action": "Stop"}]}),
        expect![[r#"
        spec.containers[0].restartPolicy: Required value: must specify restartPolicy when restart rules are used
        spec.containers[0].restartPolicyRules[0].action: Unsupported value: "Stop": supported values: "Restart", "RestartAllContainers"
        spec.containers[0].restartPolicyRules[0].exitCodes: Required value: must be specified
    "#]],
    );
}

#[test]
fn validates_ports() {
    check_container(
        json!({"ports": [{"containerPort": 99999}]}),
        expect![[r#"
        spec.containers[0].ports[0].containerPort: Invalid value: 99999: must be between 1 and 65535, inclusive
    "#]],
    );
    check_container(
        json!({"ports": [{"containerPort": 80, "hostPort": 80}, {"containerPort": 81, "hostPort": 80, "name": "-x--"}]}),
        expect![[r#"
            spec.containers[0].ports[1].name: Invalid value: "-x--": must not contain consecutive hyphens
            spec.containers[0].ports[1].name: Invalid value: "-x--": must not begin or end with a hyphen
            spec.containers[0].ports[1].hostPort: Duplicate value: "TCP//80"
        "#]],
    );
    check(
        json!({"hostNetwork": true, "containers": [{"ports": [{"containerPort": 80}]}]}),
        expect![[r#"
        spec.containers[0].ports[0].hostPort: Invalid value: 0: must match `containerPort` when `hostNetwork` is true
    "#]],
    );
}

#[test]
fn validates_environment() {
    check_container(
        json!({"env": [{"name": "a=b"}, {"name": "F", "valueFrom": {}},
            {"name": "G", "value": "v", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
            {"name": "H", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.phase"}}},
            {"name": "I", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nothing"}}},
            {"name": "J", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.labels['x y']"}}},
            {"name": "K", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "2m"}}},
            {"name": "L", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a b"}}}],
            "envFrom": [{"prefix": "=", "configMapRef": {"name": ""}}, {}]}),
        expect![[r#"
            spec.containers[0].env[0].name: Invalid value: "a=b": a valid environment variable name must consist only of printable ASCII characters other than '='
            spec.containers[0].env[1].valueFrom: Invalid value: "": must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`
            spec.containers[0].env[2].valueFrom: Invalid value: "": may not be specified when `value` is not empty
            spec.containers[0].env[3].valueFrom.fieldRef.fieldPath: Unsupported value: "status.phase": supported values: "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"
            spec.containers[0].env[4].valueFrom.fieldRef.fieldPath: Invalid value: "spec.nothing": error converting fieldPath: field label not supported: spec.nothing
            spec.containers[0].env[5].valueFrom.fieldRef: Invalid value: "x y": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
            spec.containers[0].env[6].valueFrom.resourceFieldRef.divisor: Invalid value: "limits.cpu": only divisor's values 1m and 1 are supported with the cpu resource
            spec.containers[0].env[7].valueFrom.configMapKeyRef.key: Invalid value: "a b": a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')
            spec.containers[0].envFrom[0].prefix: Invalid value: "=": a valid environment variable name must consist only of printable ASCII characters other than '='
            spec.containers[0].envFrom[0].configMapRef.name: Required value
            spec.containers[0].envFrom: Invalid value: "": must specify one of: `configMapRef` or `secretRef`
        "#]],
    );
}

#[test]
fn validates_probes_and_hooks() {
    check_container(
        json!({"livenessProbe": {"successThreshold": 2, "exec": {}},
            "readinessProbe": {"httpGet": {"port": 0, "httpHeaders": [{"name": "a b"}]}, "tcpSocket": {"port": "p"}},
            "startupProbe": {}, "lifecycle": {"preStop": {"sleep": {"seconds": 31}}}}),
        expect![[r#"
            spec.containers[0].lifecycle.preStop.sleep: Invalid value: 31: must be non-negative and less than terminationGracePeriodSeconds (30)
            spec.containers[0].livenessProbe.exec.command: Required value
            spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1
            spec.containers[0].readinessProbe.httpGet.port: Invalid value: 0: must be between 1 and 65535, inclusive
            spec.containers[0].readinessProbe.httpGet.httpHeaders: Invalid value: "a b": a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')
            spec.containers[0].readinessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type
            spec.containers[0].startupProbe: Required value: must specify a handler type
        "#]],
    );
}

#[test]
fn validates_resource_requirements() {
    check_container(
        json!({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}),
        expect![[r#"
        spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1
    "#]],
    );
    check_container(
        json!({"resources": {"requests": {"memory": "-1", "example.com/gpu": "1", "hugepages-2Mi": "3Mi", "storage": "1"},
            "claims": [{"name": "c"}]}}),
        expect![[r#"
            spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources
            spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources
            spec.containers[0].resources.requests[hugepages-2Mi]: Invalid value: "3Mi": 3Mi is not positive integer multiple of hugepages-2Mi
            spec.containers[0].resources.requests[memory]: Invalid value: "-1": must be greater than or equal to 0
            spec.containers[0].resources.requests[storage]: Invalid value: "storage": must be a standard resource for containers
            spec.containers[0].resources.claims[0]: Not found: "c": must be one of the names in pod.spec.resourceClaims which is empty
        "#]],
    );
    check(
        json!({"resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi", "example.com/gpu": "1"}},
            "containers": [{"resources": {"requests": {"cpu": "800m"}, "limits": {"memory": "2Gi"}}},
                {"name": "b", "resources": {"requests": {"cpu": "300m"}}}]}),
        expect![[r#"
            spec.resources.limits[example.com/gpu]: Unsupported value: "example.com/gpu": supported values: "cpu", "hugepages-", "memory"
            spec.resources.requests[cpu]: Invalid value: "1": must be greater than or equal to aggregate container requests of 1100m
            spec.resources.containers[0][memory].limits: Invalid value: "2Gi": must be less than or equal to pod limits of 1Gi
        "#]],
    );
}

#[test]
fn validates_volumes_and_mounts() {
    check_container(
        json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}),
        expect![[r#"
        spec.containers[0].volumeMounts[0].name: Not found: "v"
    "#]],
    );
    check(
        json!({"volumes": [{"name": "a"}, {"name": "b", "emptyDir": {}, "hostPath": {"path": "/x"}},
            {"name": "c", "hostPath": {"path": "/../x", "type": "Disk"}}, {"name": "d", "emptyDir": {}},
            {"name": "d", "configMap": {"items": [{"key": "k", "path": "..x"}], "defaultMode": 512}},
            {"name": "e", "nfs": {"server": "s", "path": "p"}},
            {"name": "f", "projected": {"sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 60}},
                {"secret": {"name": "s", "items": [{"key": "k", "path": "t"}, {"key": "l", "path": "t"}]}}]}},
            {"name": "g", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["Sometimes"]}}}},
            {"name": "h", "csi": {"driver": "-"}}, {"name": "i", "downwardAPI": {"items": [{"path": "p"}]}}],
            "containers": [{"volumeMounts": [{"name": "d", "mountPath": "/d", "mountPropagation": "Bidirectional"},
                {"name": "d", "mountPath": "/d", "subPath": "/s", "recursiveReadOnly": "Enabled"}],
                "volumeDevices": [{"name": "d", "devicePath": "/d"}]}]}),
        expect![[r#"
            spec.volumes[0]: Required value: must specify a volume type
            spec.volumes[1].hostPath: Forbidden: may not specify more than 1 volume type
            spec.volumes[2].hostPath.path: Invalid value: "/../x": must not contain '..'
            spec.volumes[2].hostPath.type: Unsupported value: "Disk": supported values: "", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"
            spec.volumes[4].configMap.name: Required value
            spec.volumes[4].configMap.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive
            spec.volumes[4].configMap.items[0].path: Invalid value: "..x": must not start with '..'
            spec.volumes[4].name: Duplicate value: "d"
            spec.volumes[5].nfs.path: Invalid value: "p": must be an absolute path
            spec.volumes[6].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 60: may not specify a duration less than 10 minutes
            spec.volumes[6].projected: Invalid value: "s": conflicting duplicate paths
            spec.volumes[7].ephemeral.volumeClaimTemplate.spec.accessModes: Unsupported value: "Sometimes": supported values: "ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"
            spec.volumes[7].ephemeral.volumeClaimTemplate.spec.resources[storage]: Required value
            spec.volumes[8].csi.driver: Invalid value: "-": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')
            spec.volumes[9].downwardAPI: Required value: one of fieldRef and resourceFieldRef is required
            spec.containers[0].volumeMounts[0].name: Invalid value: "d": must not already exist in volumeDevices
            spec.containers[0].volumeMounts[0].mountPath: Invalid value: "/d": must not already exist as a path in volumeDevices
            spec.containers[0].volumeMounts.mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged containers
            spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/d": must be unique
            spec.containers[0].volumeMounts[1].name: Invalid value: "d": must not already exist in volumeDevices
            spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/d": must not already exist as a path in volumeDevices
            spec.containers[0].volumeMounts.subPath: Invalid value: "/s": must be a relative path
            spec.containers[0].volumeMounts.recursiveReadOnly: Forbidden: may only be specified when readOnly is true
            spec.containers[0].volumeDevices[0].name: Invalid value: "d": can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode
            spec.containers[0].volumeDevices[0].name: Invalid value: "d": must not already exist in volumeMounts
            spec.containers[0].volumeDevices[0].devicePath: Invalid value: "/d": must not already exist as a path in volumeMounts
            spec.volumes[6].projected.sources[0].serviceAccountToken: Forbidden: must not be specified when serviceAccountName is not set
        "#]],
    );
}

#[test]
fn validates_security_contexts() {
    check(
        json!({"securityContext": {"runAsUser": -1, "sysctls": [{"name": "Net"}, {"name": "net.a"}],
            "seccompProfile": {"type": "Localhost"}, "appArmorProfile": {}}, "hostNetwork": true,
            "containers": [{"securityContext": {"procMount": "Unmasked", "privileged": true,
                "allowPrivilegeEscalation": false}}]}),
        expect![[r#"
            spec.containers[0].securityContext.procMount: Invalid value: "Unmasked": `hostUsers` must be false to use `Unmasked`
            spec.containers[0].securityContext: Invalid value: {"Capabilities":null,"Privileged":true,"SELinuxOptions":null,"WindowsOptions":null,"RunAsUser":null,"RunAsGroup":null,"RunAsNonRoot":null,"ReadOnlyRootFilesystem":null,"AllowPrivilegeEscalation":false,"ProcMount":"Unmasked","SeccompProfile":null,"AppArmorProfile":null}: cannot set `allowPrivilegeEscalation` to false and `privileged` to true
            spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive
            spec.securityContext.sysctls[0].name: Invalid value: "Net": must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$
            spec.securityContext.sysctls[1].name: Invalid value: "net.a": may not be specified when 'hostNetwork' is true
            spec.securityContext.seccompProfile.localhostProfile: Required value: must be set when seccomp type is Localhost
            spec.securityContext.appArmorProfile.type: Required value: type is required when appArmorProfile is set
        "#]],
    );
    check(
        json!({"os": {"name": "windows"}, "hostPID": true, "securityContext": {"fsGroup": 1},
            "containers": [{"securityContext": {"runAsUser": 1, "windowsOptions": {"hostProcess": true,
                "runAsUserName": "a\\b\\c"}}}]}),
        expect![[r#"
            spec.containers[0].securityContext.windowsOptions.runAsUserName: Invalid value: "a\\b\\c": runAsUserName cannot contain more than one backslash
            spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any hostProcess containers
            spec.hostPID: Forbidden: cannot be set for a windows pod
            spec.securityContext.fsGroup: Forbidden: cannot be set for a windows pod
            spec.containers[0].securityContext.runAsUser: Forbidden: cannot be set for a windows pod
        "#]],
    );
}

#[test]
fn validates_scheduling_fields() {
    check(
        json!({"affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []},
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 0, "preference": {
                    "matchExpressions": [{"key": "k", "operator": "Gt"}], "matchFields": [{"key": "x", "operator": "In", "values": ["a"]}]}}]},
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"matchLabelKeys": ["k"]}]}},
            "topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 1},
                {"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway", "nodeTaintsPolicy": "No"}],
            "tolerations": [{"operator": "Equal"}, {"key": "k", "operator": "Exists", "value": "v", "tolerationSeconds": 1}, {"key": "k", "operator": "Lt"}],
            "schedulingGates": [{"name": "g"}, {"name": "g"}], "nodeName": "n"}),
        expect![[r#"
            spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms: Required value: must have at least one node selector term
            spec.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight: Invalid value: 0: must be in the range 1-100
            spec.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference.matchExpressions[0].values: Required value: must be specified single value when `operator` is 'Lt' or 'Gt'
            spec.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].preference.matchFields[0].key: Invalid value: "x": not a valid field selector key
            spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].matchLabelKeys: Forbidden: must not be specified when labelSelector is not set
            spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Required value: can not be empty
            spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: "": name part must be non-empty
            spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: "": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
            spec.schedulingGates[1]: Duplicate value: "g"
            spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than 0
            spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}: Duplicate value: "{z, ScheduleAnyway}"
            spec.topologySpreadConstraints[0].minDomains: Invalid value: 1: can only use minDomains if whenUnsatisfiable=DoNotSchedule, not ScheduleAnyway
            spec.topologySpreadConstraints[1].nodeTaintsPolicy: Unsupported value: "No": supported values: "Honor", "Ignore"
            spec.tolerations[0].operator: Invalid value: "Equal": operator must be Exists when `key` is empty, which means "match all values and all keys"
            spec.tolerations[1].effect: Invalid value: "": effect must be 'NoExecute' when `tolerationSeconds` is set
            spec.tolerations[1].operator: Invalid value: "v": value must be empty when `operator` is 'Exists'
            spec.tolerations[2].operator: Unsupported value: "Lt": supported values: "Equal", "Exists", "Lt", "Gt"
            spec.nodeName: Forbidden: cannot be set until all schedulingGates have been cleared
        "#]],
    );
}

#[test]
fn validates_dns_and_hostname() {
    check(
        json!({"dnsPolicy": "None", "restartPolicy": "Sometimes", "hostname": "A", "hostAliases": [{"ip": "1.2.3"}],
            "activeDeadlineSeconds": 0, "hostUsers": false, "hostIPC": true, "hostnameOverride": "x", "setHostnameAsFQDN": true}),
        expect![[r#"
            spec.restartPolicy: Unsupported value: "Sometimes": supported values: "Always", "OnFailure", "Never"
            spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None
            spec.HostIPC: Forbidden: when `hostUsers` is false
            spec.hostnameOverride: Forbidden: may not be specified when setHostnameAsFQDN is true
            spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive
            spec.hostname: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
            spec.hostAliases[0].ip: Invalid value: "1.2.3": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
        "#]],
    );
}

fn merge_json(mut base: Value, change: &Value) -> Value {
    let Some(fields) = change.as_object() else { return change.clone() };
    for (name, value) in fields {
        let before = base.get(name).cloned().unwrap_or(Value::Null);
        base[name.as_str()] = merge_json(before, value);
    }
    base
}

#[track_caller]
fn check_update(old: Value, change: Value, expected: Expect) {
    let old = pod(old);
    let new = merge_json(old.clone(), &json!({"spec": change}));
    let mut errors = ErrorList::default();
    Pod.validate_update(&new, &old, &mut errors);
    expected.assert_eq(&lines(&errors));
}

#[test]
fn validates_updates() {
    let image = json!({"containers": [{"name": "a", "image": "new", "terminationMessagePolicy": "File", "imagePullPolicy": "Always"}]});
    check_update(json!({}), image, expect![""]);
    check_update(
        json!({}),
        json!({"containers": []}),
        expect![[r#"
        spec.containers: Forbidden: pod updates may not add or remove containers
    "#]],
    );
    check_update(json!({}), json!({"hostNetwork": false, "nodeName": "", "volumes": []}), expect![""]);
    check_update(json!({}), json!({"activeDeadlineSeconds": 5}), expect![""]);
    check_update(
        json!({"activeDeadlineSeconds": 5}),
        json!({"activeDeadlineSeconds": 6}),
        expect![[r#"
        spec.activeDeadlineSeconds: Invalid value: 6: must be less than or equal to previous value
    "#]],
    );
    let one = json!({"key": "a", "operator": "Exists", "effect": "NoExecute"});
    let other = json!({"key": "b", "operator": "Exists"});
    check_update(json!({"tolerations": [one]}), json!({"tolerations": [other, one]}), expect![""]);
    check_update(
        json!({"tolerations": [one]}),
        json!({"tolerations": [other]}),
        expect![[r#"
        spec.tolerations: Forbidden: existing toleration can not be modified except its tolerationSeconds
    "#]],
    );
    check_update(
        json!({"schedulingGates": [{"name": "a"}]}),
        json!({"schedulingGates": [{"name": "b"}], "nodeSelector": {"x": "y"}}),
        expect![[r#"
            spec.schedulingGates[0].name: Forbidden: only deletion is allowed, but found new scheduling gate 'b'
        "#]],
    );
    check_update(
        json!({"schedulingGates": [{"name": "a"}], "nodeSelector": {"x": "y"}}),
        json!({"nodeSelector": {"x": "z"}}),
        expect![[r#"
            spec.nodeSelector: Invalid value: {"x":"z"}: only additions to spec.nodeSelector are allowed (no mutations or deletions)
        "#]],
    );
    check_update(
        json!({"terminationGracePeriodSeconds": -1}),
        json!({"terminationGracePeriodSeconds": 1}),
        expect![""],
    );
}

/// The stored spec of a small pod with one init container, and the end of the error message of a
/// rejected update.
#[test]
fn rejected_update_contains_diff() {
    let access = json!([{"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}}]);
    let mounts = json!([{"name": "prep", "mountPath": "/prep"},
        {"name": "kube-api-access-x", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true}]);
    let toleration = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
    let spec = |greeting: &str| {
        json!({"initContainers": [{"name": "prepare", "command": ["sh", "-c", "echo"], "volumeMounts": mounts}],
        "containers": [{"name": "main", "command": ["sh", "-c", "cat"], "volumeMounts": mounts,
            "env": [{"name": "GREETING", "value": greeting}, {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}}],
            "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}}}],
        "volumes": [{"name": "prep", "emptyDir": {}}, {"name": "kube-api-access-x", "projected": {"sources": access, "defaultMode": 420}}],
        "tolerations": [toleration("node.kubernetes.io/not-ready"), toleration("node.kubernetes.io/unreachable")]})
    };
    check_update(
        spec("hello"),
        defaulted(spec("bye")),
        expect![[r#"
            spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)
            @@ -196,7 +196,7 @@
                "Env": [
                 {
                  "Name": "GREETING",
            -     "Value": "hello",
            +     "Value": "bye",
                  "ValueFrom": null
                 },
                 {

        "#]],
    );
}

#[test]
fn validates_status_updates() {
    #[track_caller]
    fn check(spec: Value, old: Value, new: Value, expected: Expect) {
        let (mut before, mut after) = (pod(spec.clone()), pod(spec));
        before["status"] = old;
        after["status"] = new;
        Pod.prepare_for_status_update(&mut after, &before);
        let mut errors = ErrorList::default();
        Pod.validate_status_update(&after, &before, &mut errors);
        expected.assert_eq(&lines(&errors));
    }
    let ended = json!([{"name": "a", "state": {"terminated": {"exitCode": 1}}}]);
    let running = json!([{"name": "a", "state": {"running": {}}}]);
    check(json!({}), json!({"containerStatuses": ended}), json!({"containerStatuses": running}), expect![""]);
    check(
        json!({"restartPolicy": "Never"}),
        json!({"containerStatuses": ended, "qosClass": "BestEffort"}),
        json!({"containerStatuses": running}),
        expect![[r#"
            status.containerStatuses[0].state: Forbidden: may not be transitioned to non-terminated state
        "#]],
    );
    check(
        json!({"nodeName": "n"}),
        json!({"qosClass": "Burstable"}),
        json!({"qosClass": "Guaranteed", "nominatedNodeName": "m", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "10.0.0.2"}],
            "hostIP": "1.1.1.1", "hostIPs": [{"ip": "2.2.2.2"}], "conditions": [{"type": "a b", "observedGeneration": -1}]}),
        expect![[r#"
            status.conditions[0].observedGeneration: Invalid value: -1: must be a non-negative integer
            status.conditions[0].Type: Invalid value: "a b": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
            status.nominatedNodeName: Forbidden: may not be set on pods that are already bound to a node
            status.qosClass: Invalid value: "Guaranteed": field is immutable
            status.podIPs: Invalid value: [{"IP":"10.0.0.1"},{"IP":"10.0.0.2"}]: may specify no more than one IP for each IP family
            status.hostIPs[0].ip: Invalid value: "2.2.2.2": must be equal to `hostIP`
        "#]],
    );
}

#[test]
fn validates_resize() {
    #[track_caller]
    fn check(old: Value, new: Value, expected: Expect) {
        let (old, mut new) = (pod(json!({"containers": [old]})), pod(json!({"containers": [new]})));
        prepare_resize(&mut new, &old);
        let mut errors = ErrorList::default();
        validate_resize(&new, &old, &mut errors);
        expected.assert_eq(&lines(&errors));
    }
    let small = json!({"resources": {"requests": {"cpu": "1"}}});
    check(small.clone(), json!({"resources": {"requests": {"cpu": "2"}}}), expect![""]);
    check(small.clone(), json!({"image": "other", "resources": {"requests": {"cpu": "2"}}}), expect![""]);
    check(
        small.clone(),
        json!({"name": "b"}),
        expect![[r#"
        spec: Invalid value: "": Pod QOS Class may not change as a result of resizing
        spec.containers[0].name: Forbidden: containers may not be renamed or reordered on resize
    "#]],
    );
    check(
        small.clone(),
        json!({"resources": {"requests": {"memory": "1"}}}),
        expect![[r#"
        spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed
    "#]],
    );
    check(
        small,
        json!({"resources": {"requests": {"cpu": "1", "ephemeral-storage": "1"}}}),
        expect![[r#"
            spec: Forbidden: only cpu and memory resources are mutable
        "#]],
    );
}

#[test]
fn ephemeral_containers_are_append_only() {
    let with = |containers: Value| pod(json!({"ephemeralContainers": containers}));
    let mut errors = ErrorList::default();
    validate_ephemeral_containers_update(&with(json!([])), &with(json!([{"name": "e"}])), &mut errors);
    expect![[r#"
        spec.ephemeralContainers: Forbidden: existing ephemeral containers "e" may not be removed

    "#]]
    .assert_eq(&lines(&errors));
}

#[test]
fn qos_class_follows_resources() {
    #[track_caller]
    fn check(spec: Value, expected: &str) {
        assert_eq!(qos_class(&pod(spec)), expected);
    }
    let both = json!({"cpu": "1", "memory": "1Gi"});
    check(json!({}), "BestEffort");
    check(json!({"containers": [{"resources": {"requests": {"cpu": "1"}}}]}), "Burstable");
    check(json!({"containers": [{"resources": {"requests": both, "limits": both}}]}), "Guaranteed");
    check(json!({"containers": [{"resources": {"requests": both, "limits": both}}, {}]}), "Burstable");
    check(json!({"resources": {"requests": both, "limits": both}}), "Guaranteed");
    check(json!({"resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}}), "Burstable");
}

#[test]
fn grace_period_by_phase_and_node() {
    #[track_caller]
    fn check(node: &str, phase: &str, own: i64, requested: Option<i64>, expected: i64) {
        let mut pod = pod(json!({"nodeName": node, "terminationGracePeriodSeconds": own}));
        pod["status"] = json!({"phase": phase});
        assert_eq!(grace_period(&pod, requested), expected);
    }
    check("n", "Running", 30, None, 30);
    check("n", "Running", 30, Some(5), 5);
    check("n", "Running", -5, None, 1);
    check("n", "Succeeded", 30, None, 0);
    check("", "Pending", 30, Some(5), 0);
}

#[test]
fn create_sets_status_and_drops_disabled_fields() {
    let mut new = pod(json!({"schedulingGates": [{"name": "g"}],
        "topologySpreadConstraints": [{"matchLabelKeys": ["app"], "labelSelector": {}}],
        "containers": [{"lifecycle": {"stopSignal": "SIGTERM"}}]}));
    new["metadata"]["labels"] = json!({"app": "web"});
    new["metadata"]["annotations"] =
        json!({"container.apparmor.security.beta.kubernetes.io/a": "unconfined"});
    Pod.prepare_for_create(&mut new);
    assert_eq!(new["status"]["phase"], "Pending");
    assert_eq!(new["status"]["qosClass"], "BestEffort");
    assert_eq!(new["status"]["conditions"][0]["reason"], "SchedulingGated");
    let container = &new["spec"]["containers"][0];
    assert_eq!(container["lifecycle"], json!({}));
    assert_eq!(container["securityContext"]["appArmorProfile"], json!({"type": "Unconfined"}));
    let selector = &new["spec"]["topologySpreadConstraints"][0]["labelSelector"];
    assert_eq!(*selector, json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}));
}

#[test]
fn returns_warnings() {
    let new = pod(
        json!({"nodeSelector": {"beta.kubernetes.io/os": "linux"}, "terminationGracePeriodSeconds": -1,
        "volumes": [{"name": "v", "gitRepo": {}}, {"name": "w", "secret": {"secretName": "s", "items": [{"key": "a", "path": "p"}, {"key": "b", "path": "p/q"}]}}],
        "hostAliases": [{"ip": "1.1.1.1"}, {"ip": "1.1.1.1"}],
        "containers": [{"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}, {"name": "A", "value": "$(A)3"}],
            "ports": [{"containerPort": 80, "name": "x"}, {"containerPort": 80, "hostPort": 80, "name": "x"}],
            "resources": {"limits": {"memory": "100m"}}}]}),
    );
    expect![[r#"
        spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use "kubernetes.io/os" instead
        spec.volumes[0].gitRepo: deprecated in v1.11, and disabled by default in v1.33+
        volume "w" (Secret "s"): overlapping paths: "p/q" with "p"
        spec.hostAliases[1].ip: duplicate ip "1.1.1.1"
        spec.containers[0].resources.limits[memory]: fractional byte value "100m" is invalid, must be an integer
        spec.containers[0].env[1]: hides previous definition of "A", which may be dropped when using apply
        spec.containers[0].ports[1]: overlapping port definition with spec.containers[0].ports[0]
        spec.containers[0].ports[1]: duplicate port name "x" with spec.containers[0].ports[0], services and probes that select ports by name will use spec.containers[0].ports[0]
        spec.terminationGracePeriodSeconds: must be >= 0; negative values are invalid and will be treated as 1"#]]
    .assert_eq(&Pod.warnings(&new, None).join("\n"));
}

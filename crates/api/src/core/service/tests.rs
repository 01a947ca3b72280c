use expect_test::expect;
use serde_json::{Value, json};

use super::Service;
use crate::core::testing;
use crate::field::ErrorList;
use crate::strategy::RestStrategy;

/// A defaulted ClusterIP Service with these `spec` fields.
fn service(spec: Value) -> Value {
    let mut obj = json!({
        "metadata": {"name": "x"},
        "spec": {
            "type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
            "clusterIP": "10.0.0.9", "clusterIPs": ["10.0.0.9"],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}],
        }
    });
    for (field, value) in spec.as_object().unwrap() {
        if value.is_null() {
            obj["spec"].as_object_mut().unwrap().remove(field);
        } else {
            obj["spec"][field] = value.clone();
        }
    }
    obj
}

#[track_caller]
fn check(spec: Value, expected: &expect_test::Expect) {
    testing::check(&Service, &service(spec).to_string(), expected);
}

#[track_caller]
fn check_update(old: Value, new: Value, expected: &expect_test::Expect) {
    let (old, mut new) = (service(old), service(new));
    Service.prepare_for_update(&mut new, &old);
    let mut errors = ErrorList::default();
    Service.validate(&new, &mut errors);
    Service.validate_update(&new, &old, &mut errors);
    expected.assert_eq(&testing::lines(&errors));
}

#[test]
fn accepts_valid_services() {
    check(json!({}), &expect![""]);
    check(json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": null}), &expect![""]);
    check(
        json!({"type": "ExternalName", "externalName": "example.com.", "clusterIP": null, "clusterIPs": null,
               "ipFamilies": null, "ipFamilyPolicy": null, "ports": null}),
        &expect![""],
    );
    check(
        json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": true, "externalTrafficPolicy": "Local",
               "healthCheckNodePort": 30001, "loadBalancerSourceRanges": [" 10.0.0.0/8 "],
               "loadBalancerClass": "acme.io/lb", "trafficDistribution": "PreferSameNode"}),
        &expect![""],
    );
    check(
        json!({"clusterIPs": ["10.0.0.9", "fd00::9"], "ipFamilies": ["IPv4", "IPv6"],
               "ipFamilyPolicy": "PreferDualStack"}),
        &expect![""],
    );
}

#[test]
fn validates_ports() {
    check(
        json!({"ports": [{"port": 0, "protocol": "TCP", "targetPort": 0}]}),
        &expect![[r#"
            spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive
            spec.ports[0].targetPort: Invalid value: 0: must be between 1 and 65535, inclusive
        "#]],
    );
    check(
        json!({"type": "Wrong", "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80},
                                          {"port": 81, "protocol": "TCP", "targetPort": 81}]}),
        &expect![[r#"
            spec.ports[0].name: Required value
            spec.ports[1].name: Required value
            spec.type: Unsupported value: "Wrong": supported values: "ClusterIP", "ExternalName", "LoadBalancer", "NodePort"
        "#]],
    );
    check(
        json!({"ports": [{"name": "a", "port": 80, "protocol": "TCP", "targetPort": "web", "nodePort": 30000},
                         {"name": "a", "port": 80, "protocol": "TCP", "targetPort": "---", "nodePort": 30000,
                          "appProtocol": "/"},
                         {"name": "c", "port": 81, "protocol": "ICMP", "targetPort": 81}]}),
        &expect![[r#"
            spec.ports[1].name: Duplicate value: "a"
            spec.ports[1].targetPort: Invalid value: "---": must contain at least one letter (a-z)
            spec.ports[1].targetPort: Invalid value: "---": must not contain consecutive hyphens
            spec.ports[1].targetPort: Invalid value: "---": must not begin or end with a hyphen
            spec.ports[1].appProtocol: Invalid value: "/": prefix part must be non-empty
            spec.ports[1].appProtocol: Invalid value: "/": name part must be non-empty
            spec.ports[1].appProtocol: Invalid value: "/": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')
            spec.ports[2].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"
            spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'
            spec.ports[1].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'
            spec.ports[1].nodePort: Duplicate value: 30000
            spec.ports[1]: Duplicate value: {"Name":"","Protocol":"TCP","AppProtocol":null,"Port":80,"TargetPort":0,"NodePort":0}
        "#]],
    );
}

#[test]
fn validates_addresses() {
    check(
        json!({"clusterIPs": ["10.0.0.9", "10.0.0.10"], "ipFamilies": ["IPv6", "IPv6"], "ipFamilyPolicy": "Both",
               "externalIPs": ["127.0.0.1", "nope"]}),
        &expect![[r#"
            spec.ipFamilies[1]: Duplicate value: "IPv6"
            spec.ipFamilyPolicy: Unsupported value: "Both": supported values: "PreferDualStack", "RequireDualStack", "SingleStack"
            spec.clusterIPs: Invalid value: ["10.0.0.9","10.0.0.10"]: may specify no more than one IP for each IP family
            spec.clusterIPs[0]: Invalid value: "10.0.0.9": expected an IPv6 value as indicated by `ipFamilies[0]`
            spec.clusterIPs[1]: Invalid value: "10.0.0.10": expected an IPv6 value as indicated by `ipFamilies[1]`
            spec.externalIPs[0]: Invalid value: "127.0.0.1": may not be in the loopback range (127.0.0.0/8, ::1/128)
            spec.externalIPs[1]: Invalid value: "nope": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
            spec.externalTrafficPolicy: Required value
        "#]],
    );
    check(
        json!({"clusterIP": "1.2.3.4"}),
        &expect![[r#"
            spec.clusterIPs: Invalid value: ["10.0.0.9"]: first value must match `clusterIP`
        "#]],
    );
    check(
        json!({"clusterIP": "None", "clusterIPs": ["None", "10.0.0.1"], "type": "NodePort",
               "externalTrafficPolicy": "Cluster"}),
        &expect![[r#"
            spec.clusterIPs: Invalid value: ["None","10.0.0.1"]: 'None' must be the first and only value
        "#]],
    );
}

#[test]
fn rejects_fields_of_other_types() {
    check(
        json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": 30001, "sessionAffinity": "ClientIP",
               "allocateLoadBalancerNodePorts": true, "loadBalancerClass": "a",
               "loadBalancerSourceRanges": ["10.0.0.0"], "internalTrafficPolicy": "Far",
               "trafficDistribution": "Anywhere"}),
        &expect![[r#"
            spec.sessionAffinityConfig: Required value: when session affinity type is ClientIP
            spec.LoadBalancerSourceRanges: Forbidden: may only be used when `type` is 'LoadBalancer'
            spec.LoadBalancerSourceRanges[0]: Invalid value: "10.0.0.0": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)
            spec.allocateLoadBalancerNodePorts: Forbidden: may only be used when `type` is 'LoadBalancer'
            spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'
            spec.externalTrafficPolicy: Invalid value: "Local": may only be set for externally-accessible services
            spec.healthCheckNodePort: Invalid value: 30001: may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'
            spec.internalTrafficPolicy: Unsupported value: "Far": supported values: "Cluster", "Local"
            spec.trafficDistribution: Unsupported value: "Anywhere": supported values: "PreferClose", "PreferSameZone", "PreferSameNode"
        "#]],
    );
    check(
        json!({"type": "ExternalName"}),
        &expect![[r#"
            spec.clusterIPs: Forbidden: may not be set for ExternalName services
            spec.ipFamilies: Forbidden: may not be set for ExternalName services
            spec.ipFamilyPolicy: Forbidden: may not be set for ExternalName services
            spec.externalName: Required value
        "#]],
    );
    check(
        json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86401}}}),
        &expect![[r#"
            spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 86401: must be greater than 0 and less than 86400
        "#]],
    );
}

#[test]
fn validates_updates() {
    check_update(
        json!({}),
        json!({"clusterIP": "1.2.3.4", "clusterIPs": ["1.2.3.4"]}),
        &expect![[r#"
            spec.clusterIPs[0]: Invalid value: ["1.2.3.4"]: may not change once set
        "#]],
    );
    // A change of type releases allocated values that the new type does not have.
    let node_port = json!({"type": "NodePort", "externalTrafficPolicy": "Cluster",
        "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80, "nodePort": 30080}]});
    let mut back = node_port.clone();
    back["type"] = json!("ClusterIP");
    check_update(node_port, back, &expect![""]);
    check_update(json!({}), json!({"type": "ExternalName", "externalName": "a.b"}), &expect![""]);
    let balancer = |class: &str| {
        json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": true, "loadBalancerClass": class,
               "externalTrafficPolicy": "Cluster"})
    };
    check_update(
        balancer("a"),
        balancer("b"),
        &expect![[r#"
            spec.loadBalancerClass: Invalid value: "b": may not change once set
        "#]],
    );
    let dual = json!({"clusterIPs": ["10.0.0.9", "fd00::9"], "ipFamilies": ["IPv4", "IPv6"],
                      "ipFamilyPolicy": "PreferDualStack"});
    check_update(
        dual,
        json!({"ipFamilyPolicy": "PreferDualStack"}),
        &expect![[r#"
            spec.ipFamilyPolicy: Invalid value: "PreferDualStack": must be set to 'SingleStack' when releasing the secondary clusterIP
            spec.ipFamilyPolicy: Invalid value: "PreferDualStack": must be set to 'SingleStack' when releasing the secondary ipFamily
        "#]],
    );
}

#[test]
fn validates_status() {
    let mut obj = service(json!({}));
    obj["status"] =
        json!({"loadBalancer": {"ingress": [{"ip": "1.2.3"}, {"hostname": "1.2.3.4", "ipMode": "VIP"}]}});
    let mut errors = ErrorList::default();
    Service.validate_status_update(&obj, &obj, &mut errors);
    obj["spec"]["type"] = json!("LoadBalancer");
    Service.validate_status_update(&obj, &obj, &mut errors);
    expect![[r#"
        status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is 'LoadBalancer'
        status.loadBalancer.ingress[0].ip: Invalid value: "1.2.3": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)
        status.loadBalancer.ingress[0].ipMode: Required value: must be specified when `ip` is set
        status.loadBalancer.ingress[1].ipMode: Forbidden: may not be specified when `ip` is not set
        status.loadBalancer.ingress[1].hostname: Invalid value: "1.2.3.4": must be a DNS name, not an IP address
    "#]]
    .assert_eq(&testing::lines(&errors));
}

#[test]
fn returns_warnings() {
    let obj = service(json!({"clusterIP": "None", "clusterIPs": ["None"], "externalIPs": ["FD00::1"],
                             "externalName": "a", "trafficDistribution": "PreferClose"}));
    expect![[r#"
        spec.externalIPs is ignored for headless services
        spec.externalIPs[0]: IPv6 address "FD00::1" should be in RFC 5952 canonical format ("fd00::1")
        spec.externalName is ignored when spec.type is not "ExternalName"
        spec.trafficDistribution: "PreferClose" is deprecated; use "PreferSameZone""#]]
    .assert_eq(&Service.warnings(&obj, None).join("\n"));
}

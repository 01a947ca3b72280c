use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;

/// A cluster with a few objects.
struct FakeServices {
    services: Vec<Arc<Service>>,
    slices: Vec<Arc<EndpointSlice>>,
}

impl View for FakeServices {
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        let is_match = |service: &&Arc<Service>| service.namespace() == namespace && service.name() == name;
        self.services.iter().find(is_match).cloned()
    }

    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>> {
        let is_of_service = |slice: &&Arc<EndpointSlice>| {
            slice.namespace() == namespace && slice.label("kubernetes.io/service-name") == Some(service)
        };
        self.slices.iter().filter(is_of_service).cloned().collect()
    }

    fn has_namespace(&self, name: &str) -> bool {
        name == "default"
    }

    fn services_by_ip(&self, address: IpAddr) -> Vec<Arc<Service>> {
        let has_ip =
            |service: &&Arc<Service>| service.spec.iter().flat_map(cluster_ips).any(|ip| ip == address);
        self.services.iter().filter(has_ip).cloned().collect()
    }

    fn slices_by_address(&self, address: IpAddr) -> Vec<Arc<EndpointSlice>> {
        let has_address = |slice: &&Arc<EndpointSlice>| {
            slice.endpoints.iter().flatten().any(|one| one.addresses[0].parse() == Ok(address))
        };
        self.slices.iter().filter(has_address).cloned().collect()
    }

    fn serial(&self) -> u32 {
        7
    }
}

fn fake_services() -> FakeServices {
    let service = |name: &str, spec: Value| {
        let service = json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec});
        Arc::new(serde_json::from_value(service).unwrap())
    };
    let ports = json!([
        {"name": "http", "port": 80, "protocol": "TCP"}, {"name": "dns", "port": 53, "protocol": "UDP"},
    ]);
    let slice = |service: &str, family: &str, endpoints: Value, ports: Value| {
        let slice = json!({
            "metadata": {
                "name": service, "namespace": "default", "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": family, "endpoints": endpoints, "ports": ports,
        });
        Arc::new(serde_json::from_value(slice).unwrap())
    };
    let http = json!([{"name": "http", "port": 8080, "protocol": "TCP"}]);
    FakeServices {
        services: vec![
            service(
                "web",
                json!({"clusterIPs": ["10.43.0.1", "fd43::1"], "clusterIP": "10.43.0.1", "ports": ports}),
            ),
            service(
                "db",
                json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": [{"name": "http", "port": 80}]}),
            ),
            service("bare", json!({"clusterIP": "None", "clusterIPs": ["None"]})),
            service("idle", json!({"clusterIP": "None", "clusterIPs": ["None"]})),
            service("out", json!({"type": "ExternalName", "externalName": "Example.com."})),
            service(
                "alias",
                json!({"type": "ExternalName", "externalName": "web.default.svc.cluster.local"}),
            ),
            service(
                "loop",
                json!({"type": "ExternalName", "externalName": "loop.default.svc.cluster.local"}),
            ),
        ],
        slices: vec![
            slice("web", "IPv4", json!([{"addresses": ["10.42.0.9"]}]), http.clone()),
            slice(
                "db",
                "IPv4",
                json!([
                    {"addresses": ["10.42.0.5"], "hostname": "db-0", "conditions": {"ready": true}},
                    {"addresses": ["10.42.0.6"], "conditions": {"ready": true}},
                    {"addresses": ["10.42.0.7"], "hostname": "db-2", "conditions": {"ready": false}},
                ]),
                http,
            ),
            slice("db", "IPv6", json!([{"addresses": ["fd42::5"], "hostname": "db-0"}]), json!([])),
            slice("bare", "IPv4", json!([{"addresses": ["10.42.0.8"]}]), json!([])),
        ],
    }
}

fn render(answer: Option<Answer>) -> String {
    let Some(answer) = answer else { return "elsewhere\n".into() };
    let mut text = format!("{:?}\n", answer.code);
    let sections = [("", &answer.answers), ("; ", &answer.authority), ("+ ", &answer.additional)];
    for (mark, records) in sections {
        for record in records {
            text.push_str(&format!("{mark}{} {} {:?}\n", record.name, record.ttl, record.data));
        }
    }
    if let Some(name) = answer.external_name {
        text.push_str(&format!("then {name}\n"));
    }
    text
}

#[track_caller]
fn check(name: &str, record_type: u16, expected: Expect) {
    let (view, name) = (fake_services(), name.replace('~', "cluster.local"));
    let zone = Zone { domain: "cluster.local", view: &view };
    expected.assert_eq(&render(zone.answer(&name, record_type)));
}

#[test]
fn resolves_services_with_cluster_ip() {
    check(
        "web.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        web.default.svc.cluster.local 5 A(10.43.0.1)
    "#]],
    );
    check(
        "web.default.svc.~",
        record_type::AAAA,
        expect![[r#"
        Ok
        web.default.svc.cluster.local 5 Aaaa(fd43::1)
    "#]],
    );
    check(
        "web.default.svc.~",
        record_type::TXT,
        expect![[r#"
        Ok
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "web.other.svc.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "missing.default.svc.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "_http._tcp.web.default.svc.~",
        record_type::SRV,
        expect![[r#"
        Ok
        _http._tcp.web.default.svc.cluster.local 5 Srv { weight: 50, port: 80, target: "web.default.svc.cluster.local" }
        + web.default.svc.cluster.local 5 A(10.43.0.1)
        + web.default.svc.cluster.local 5 Aaaa(fd43::1)
    "#]],
    );
    check(
        "_http._udp.web.default.svc.~",
        record_type::SRV,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "_http._tcp.web.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        _http._tcp.web.default.svc.cluster.local 5 A(10.43.0.1)
    "#]],
    );
    check(
        "10-42-0-9.web.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        10-42-0-9.web.default.svc.cluster.local 5 A(10.42.0.9)
    "#]],
    );
}

#[test]
fn resolves_headless_services_to_endpoints() {
    check(
        "db.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        db.default.svc.cluster.local 5 A(10.42.0.5)
        db.default.svc.cluster.local 5 A(10.42.0.6)
    "#]],
    );
    check(
        "db.default.svc.~",
        record_type::AAAA,
        expect![[r#"
        Ok
        db.default.svc.cluster.local 5 Aaaa(fd42::5)
    "#]],
    );
    check(
        "db-0.db.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        db-0.db.default.svc.cluster.local 5 A(10.42.0.5)
    "#]],
    );
    check(
        "10-42-0-6.db.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        10-42-0-6.db.default.svc.cluster.local 5 A(10.42.0.6)
    "#]],
    );
    check(
        "db-2.db.default.svc.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "_http._tcp.db.default.svc.~",
        record_type::SRV,
        expect![[r#"
        Ok
        _http._tcp.db.default.svc.cluster.local 5 Srv { weight: 50, port: 8080, target: "db-0.db.default.svc.cluster.local" }
        _http._tcp.db.default.svc.cluster.local 5 Srv { weight: 50, port: 8080, target: "10-42-0-6.db.default.svc.cluster.local" }
        + db-0.db.default.svc.cluster.local 5 A(10.42.0.5)
        + 10-42-0-6.db.default.svc.cluster.local 5 A(10.42.0.6)
    "#]],
    );
    check(
        "bare.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        bare.default.svc.cluster.local 5 A(10.42.0.8)
    "#]],
    );
    check(
        "bare.default.svc.~",
        record_type::SRV,
        expect![[r#"
        Ok
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "idle.default.svc.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
}

#[test]
fn resolves_external_names_to_aliases() {
    check(
        "out.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        out.default.svc.cluster.local 5 Cname("example.com")
        then example.com
    "#]],
    );
    check(
        "out.default.svc.~",
        record_type::CNAME,
        expect![[r#"
        Ok
        out.default.svc.cluster.local 5 Cname("example.com")
    "#]],
    );
    check(
        "alias.default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        alias.default.svc.cluster.local 5 Cname("web.default.svc.cluster.local")
        web.default.svc.cluster.local 5 A(10.43.0.1)
    "#]],
    );
    check(
        "loop.default.svc.~",
        record_type::A,
        expect![[r#"
            Ok
            loop.default.svc.cluster.local 5 Cname("loop.default.svc.cluster.local")
        "#]],
    );
}

#[test]
fn resolves_pod_names_in_existing_namespaces() {
    check(
        "10-42-0-5.default.pod.~",
        record_type::A,
        expect![[r#"
        Ok
        10-42-0-5.default.pod.cluster.local 5 A(10.42.0.5)
    "#]],
    );
    check(
        "fd42--5.default.pod.~",
        record_type::AAAA,
        expect![[r#"
        Ok
        fd42--5.default.pod.cluster.local 5 Aaaa(fd42::5)
    "#]],
    );
    check(
        "10-42-0-5.default.pod.~",
        record_type::AAAA,
        expect![[r#"
        Ok
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "10-42-0-5.other.pod.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "web.default.pod.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
}

#[test]
fn resolves_reverse_names() {
    check(
        "1.0.43.10.in-addr.arpa",
        record_type::PTR,
        expect![[r#"
        Ok
        1.0.43.10.in-addr.arpa 5 Ptr("web.default.svc.cluster.local")
    "#]],
    );
    check(
        "5.0.42.10.in-addr.arpa",
        record_type::PTR,
        expect![[r#"
        Ok
        5.0.42.10.in-addr.arpa 5 Ptr("db-0.db.default.svc.cluster.local")
    "#]],
    );
    check(
        "6.0.42.10.in-addr.arpa",
        record_type::PTR,
        expect![[r#"
        Ok
        6.0.42.10.in-addr.arpa 5 Ptr("10-42-0-6.db.default.svc.cluster.local")
    "#]],
    );
    check(
        "1.0.0.10.in-addr.arpa",
        record_type::PTR,
        expect![[r#"
        elsewhere
    "#]],
    );
    check(
        "1.0.43.10.in-addr.arpa",
        record_type::A,
        expect![[r#"
        Ok
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    let v6 = "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.3.4.d.f.ip6.arpa";
    check(
        v6,
        record_type::PTR,
        expect![[r#"
        Ok
        1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.3.4.d.f.ip6.arpa 5 Ptr("web.default.svc.cluster.local")
    "#]],
    );
    check(
        "1.2.ip6.arpa",
        record_type::PTR,
        expect![[r#"
        elsewhere
    "#]],
    );
}

#[test]
fn resolves_zone_root_and_rejects_unknown_names() {
    check(
        "~",
        record_type::SOA,
        expect![[r#"
        Ok
        cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "~",
        record_type::NS,
        expect![[r#"
        Ok
        cluster.local 5 Ns("kube-dns.kube-system.svc.cluster.local")
    "#]],
    );
    check(
        "~",
        record_type::A,
        expect![[r#"
        Ok
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "dns-version.~",
        record_type::TXT,
        expect![[r#"
        Ok
        dns-version.cluster.local 5 Txt("1.1.0")
    "#]],
    );
    check(
        "svc.~",
        record_type::A,
        expect![[r#"
        Ok
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "default.svc.~",
        record_type::A,
        expect![[r#"
        Ok
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "other.svc.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
    check(
        "example.com",
        record_type::A,
        expect![[r#"
        elsewhere
    "#]],
    );
    check(
        "notcluster.local",
        record_type::A,
        expect![[r#"
        elsewhere
    "#]],
    );
    check(
        "a.b.c.web.default.svc.~",
        record_type::A,
        expect![[r#"
        NoSuchName
        ; cluster.local 5 Soa { server: "ns.dns.cluster.local", person: "hostmaster.cluster.local", serial: 7, minimum: 5 }
    "#]],
    );
}

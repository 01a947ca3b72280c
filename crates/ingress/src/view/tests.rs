use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;

#[derive(Default)]
struct World {
    ingresses: Vec<Arc<Ingress>>,
    classes: Vec<Arc<IngressClass>>,
    services: Vec<Arc<Service>>,
    slices: Vec<Arc<EndpointSlice>>,
    secrets: Vec<Arc<Secret>>,
}

impl View for World {
    fn ingresses(&self) -> Vec<Arc<Ingress>> {
        self.ingresses.clone()
    }

    fn classes(&self) -> Vec<Arc<IngressClass>> {
        self.classes.clone()
    }

    fn service(&self, key: &Key) -> Option<Arc<Service>> {
        self.services.iter().find(|service| service.key() == *key).cloned()
    }

    fn slices(&self, service: &Key) -> Vec<Arc<EndpointSlice>> {
        let prefix = format!("{}-", service.name);
        self.slices.iter().filter(|slice| slice.name().starts_with(&prefix)).cloned().collect()
    }

    fn secret(&self, key: &Key) -> Option<Arc<Secret>> {
        self.secrets.iter().find(|secret| secret.key() == *key).cloned()
    }
}

fn read<T: for<'de> k8s_openapi::serde::Deserialize<'de>>(object: Value) -> Arc<T> {
    Arc::new(serde_json::from_value(object).expect("it is one"))
}

fn ingress(name: &str, created: &str, spec: Value) -> Arc<Ingress> {
    let metadata = json!({"name": name, "namespace": "n", "creationTimestamp": created});
    read(json!({"metadata": metadata, "spec": spec}))
}

fn world() -> World {
    let service = json!({"metadata": {"name": "web", "namespace": "n"}, "spec": {"ports": [
        {"name": "http", "port": 80, "targetPort": 8080}, {"name": "admin", "port": 81},
    ]}});
    let slice = json!({
        "metadata": {"name": "web-1", "namespace": "n"}, "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080}, {"name": "admin", "port": 9090}],
        "endpoints": [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "serving": true, "terminating": true}},
            {"addresses": ["10.0.0.3"]},
        ],
    });
    World {
        classes: vec![
            Arc::new(crate::class()),
            read(json!({"metadata": {"name": "nginx"}, "spec": {"controller": "k8s.io/nginx"}})),
        ],
        services: vec![read(service)],
        slices: vec![read(slice)],
        secrets: vec![read(json!({"metadata": {"name": "cert", "namespace": "n"}}))],
        ..World::default()
    }
}

fn path(path: &str, port: Value) -> Value {
    json!({"path": path, "pathType": "Prefix", "backend": {"service": {"name": "web", "port": port}}})
}

#[track_caller]
fn check(world: &World, asked: &[(&str, &str)], expected: Expect) {
    let plan = plan(world);
    let mut said = String::new();
    for (host, path) in asked {
        let found = plan.table.find(host, path);
        let found =
            found.map_or("nobody".to_owned(), |found| format!("{} {:?}", found.name, found.addresses));
        said += &format!("{host}{path}: {found}\n");
    }
    for (host, secret) in &plan.certificates {
        said += &format!("{host} by {}\n", secret.name());
    }
    expected.assert_eq(&said);
}

#[test]
fn rules_lead_to_pods_that_are_ready() {
    let mut world = world();
    let paths = json!([
        path("/", json!({"number": 80})),
        path("/admin", json!({"name": "admin"})),
        path("/wrong", json!({"number": 7}))
    ]);
    let spec = json!({
        "ingressClassName": "skiff",
        "rules": [{"host": "A.io", "http": {"paths": paths}}],
        "tls": [{"hosts": ["a.io", "*.a.io"], "secretName": "cert"}, {"secretName": "absent"}],
    });
    world.ingresses.push(ingress("i", "2026-01-01T00:00:00Z", spec));
    let asked = [("a.io", "/x"), ("a.io", "/admin/x"), ("a.io", "/wrong"), ("b.io", "/")];
    check(
        &world,
        &asked,
        expect![[r#"
            a.io/x: n/web:80 [10.0.0.1:8080, 10.0.0.3:8080]
            a.io/admin/x: n/web:admin [10.0.0.1:9090, 10.0.0.3:9090]
            a.io/wrong: n/web:7 []
            b.io/: nobody
            a.io by cert
            *.a.io by cert
        "#]],
    );
    assert_eq!(plan(&world).secrets.len(), 2, "what is not there yet may come");
}

#[test]
fn only_our_classes_are_served() {
    let rules = |class: Option<&str>| json!({"ingressClassName": class, "rules": [{"http": {"paths": [path("/", json!({"number": 80}))]}}]});
    let check =
        |class: Option<&str>, annotation: Option<&str>, classes: &[Arc<IngressClass>], expected: bool| {
            let mut world = World { classes: classes.to_vec(), ..world() };
            let mut one = (*ingress("i", "2026-01-01T00:00:00Z", rules(class))).clone();
            one.metadata.annotations =
                annotation.map(|name| [(ANNOTATION.to_owned(), name.to_owned())].into());
            world.ingresses.push(Arc::new(one));
            assert_eq!(plan(&world).table.find("x", "/").is_some(), expected, "{class:?} {annotation:?}");
        };
    let classes = world().classes;
    check(Some("skiff"), None, &classes, true);
    check(Some("nginx"), None, &classes, false);
    check(Some("nobody"), None, &classes, false);
    check(None, Some("skiff"), &classes, true);
    check(None, Some("nginx"), &classes, false);
    check(None, None, &classes, true);
    check(None, None, &[], false);
    check(Some("skiff"), None, &[], false);
    let mut other = crate::class();
    other.metadata.annotations = None;
    check(None, None, &[Arc::new(other)], false);
}

#[test]
fn the_older_ingress_wins_and_defaults_catch_the_rest() {
    let mut world = world();
    let rule = |name: &str| json!([{"host": "a.io", "http": {"paths": [path("/", json!({"name": name}))]}}]);
    world.ingresses.push(ingress("new", "2026-02-01T00:00:00Z", json!({"rules": rule("admin")})));
    world.ingresses.push(ingress("old", "2026-01-01T00:00:00Z", json!({"rules": rule("http")})));
    let default = json!({"defaultBackend": {"service": {"name": "gone", "port": {"number": 1}}}});
    world.ingresses.push(ingress("default", "2026-03-01T00:00:00Z", default));
    check(
        &world,
        &[("a.io", "/"), ("b.io", "/")],
        expect![[r#"
            a.io/: n/web:http [10.0.0.1:8080, 10.0.0.3:8080]
            b.io/: n/gone:1 []
        "#]],
    );
}

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;

#[derive(Default)]
struct FakeView {
    ingresses: Vec<Arc<Ingress>>,
    classes: Vec<Arc<IngressClass>>,
    services: Vec<Arc<Service>>,
    slices: Vec<Arc<EndpointSlice>>,
    secrets: Vec<Arc<Secret>>,
}

impl View for FakeView {
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

fn parse_object<T: for<'de> k8s_openapi::serde::Deserialize<'de>>(object: Value) -> Arc<T> {
    Arc::new(serde_json::from_value(object).expect("a valid object"))
}

fn ingress(name: &str, created: &str, spec: Value) -> Arc<Ingress> {
    let metadata = json!({"name": name, "namespace": "n", "creationTimestamp": created});
    parse_object(json!({"metadata": metadata, "spec": spec}))
}

fn fake_view() -> FakeView {
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
    FakeView {
        classes: vec![
            Arc::new(crate::ingress_class()),
            parse_object(json!({"metadata": {"name": "nginx"}, "spec": {"controller": "k8s.io/nginx"}})),
        ],
        services: vec![parse_object(service)],
        slices: vec![parse_object(slice)],
        secrets: vec![parse_object(json!({"metadata": {"name": "cert", "namespace": "n"}}))],
        ..FakeView::default()
    }
}

fn path(path: &str, port: Value) -> Value {
    json!({"path": path, "pathType": "Prefix", "backend": {"service": {"name": "web", "port": port}}})
}

#[track_caller]
fn check(view: &FakeView, requests: &[(&str, &str)], expected: Expect) {
    let plan = build_plan(view);
    let mut output = String::new();
    for (host, path) in requests {
        let found = plan.table.find(host, path);
        let found = found.map_or("none".to_owned(), |found| format!("{} {:?}", found.name, found.addresses));
        output += &format!("{host}{path}: {found}\n");
    }
    for (host, secret) in &plan.certificates {
        output += &format!("{host} by {}\n", secret.name());
    }
    expected.assert_eq(&output);
}

#[test]
fn routes_to_ready_endpoints() {
    let mut view = fake_view();
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
    view.ingresses.push(ingress("i", "2026-01-01T00:00:00Z", spec));
    let requests = [("a.io", "/x"), ("a.io", "/admin/x"), ("a.io", "/wrong"), ("b.io", "/")];
    check(
        &view,
        &requests,
        expect![[r#"
            a.io/x: n/web:80 [10.0.0.1:8080, 10.0.0.3:8080]
            a.io/admin/x: n/web:admin [10.0.0.1:9090, 10.0.0.3:9090]
            a.io/wrong: n/web:7 []
            b.io/: none
            a.io by cert
            *.a.io by cert
        "#]],
    );
    assert_eq!(build_plan(&view).secrets.len(), 2, "missing secrets are referenced, too");
}

#[test]
fn ignores_ingresses_of_other_classes() {
    let rules = |class: Option<&str>| json!({"ingressClassName": class, "rules": [{"http": {"paths": [path("/", json!({"number": 80}))]}}]});
    let check = |class: Option<&str>,
                 annotation: Option<&str>,
                 classes: &[Arc<IngressClass>],
                 expected: bool| {
        let mut view = FakeView { classes: classes.to_vec(), ..fake_view() };
        let mut one = (*ingress("i", "2026-01-01T00:00:00Z", rules(class))).clone();
        one.metadata.annotations =
            annotation.map(|name| [(CLASS_ANNOTATION.to_owned(), name.to_owned())].into());
        view.ingresses.push(Arc::new(one));
        assert_eq!(build_plan(&view).table.find("x", "/").is_some(), expected, "{class:?} {annotation:?}");
    };
    let classes = fake_view().classes;
    check(Some("skiff"), None, &classes, true);
    check(Some("nginx"), None, &classes, false);
    check(Some("none"), None, &classes, false);
    check(None, Some("skiff"), &classes, true);
    check(None, Some("nginx"), &classes, false);
    check(None, None, &classes, true);
    check(None, None, &[], false);
    check(Some("skiff"), None, &[], false);
    let mut other = crate::ingress_class();
    other.metadata.annotations = None;
    check(None, None, &[Arc::new(other)], false);
}

#[test]
fn older_ingress_wins_and_default_backend_is_used_without_rule() {
    let mut view = fake_view();
    let rule = |name: &str| json!([{"host": "a.io", "http": {"paths": [path("/", json!({"name": name}))]}}]);
    view.ingresses.push(ingress("new", "2026-02-01T00:00:00Z", json!({"rules": rule("admin")})));
    view.ingresses.push(ingress("old", "2026-01-01T00:00:00Z", json!({"rules": rule("http")})));
    let default = json!({"defaultBackend": {"service": {"name": "gone", "port": {"number": 1}}}});
    view.ingresses.push(ingress("default", "2026-03-01T00:00:00Z", default));
    check(
        &view,
        &[("a.io", "/"), ("b.io", "/")],
        expect![[r#"
            a.io/: n/web:http [10.0.0.1:8080, 10.0.0.3:8080]
            b.io/: n/gone:1 []
        "#]],
    );
}

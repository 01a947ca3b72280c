use serde_json::json;

use super::*;

struct TestSources;

impl Sources for TestSources {
    fn config_map(&self, _: &str, name: &str) -> Option<Arc<ConfigMap>> {
        let data = [("color".to_owned(), "blue".to_owned()), ("size".to_owned(), "9".to_owned())].into();
        (name == "settings").then(|| Arc::new(ConfigMap { data: Some(data), ..ConfigMap::default() }))
    }

    fn secret(&self, _: &str, name: &str) -> Option<Arc<Secret>> {
        let value = json!({"data": {"password": "c2VzYW1l"}});
        (name == "login").then(|| Arc::new(serde_json::from_value(value).expect("a secret")))
    }

    fn services(&self, namespace: &str) -> Vec<Arc<Service>> {
        let service = |namespace: &str, name: &str, ip: &str| {
            let port = json!({"name": "web", "port": 80, "protocol": "TCP"});
            let spec = json!({"clusterIP": ip, "ports": [port]});
            let metadata = json!({"name": name, "namespace": namespace});
            Arc::new(serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a service"))
        };
        vec![
            service("default", "kubernetes", "10.43.0.1"),
            service(namespace, "my-db", "10.43.0.9"),
            service(namespace, "headless", "None"),
        ]
    }

    fn allocatable(&self, resource: &str) -> Option<Quantity> {
        (resource == "cpu").then(|| Quantity::parse("4").expect("a quantity"))
    }
}

fn pod(container: serde_json::Value) -> Pod {
    let metadata = json!({"name": "web", "namespace": "shop", "uid": "1234", "labels": {"app": "web"}});
    let spec = json!({"nodeName": "n1", "serviceAccountName": "robot", "containers": [container]});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
}

fn environment_map(container: serde_json::Value) -> Result<BTreeMap<String, String>, EnvError> {
    environment_list(container).map(|list| list.into_iter().collect())
}

fn environment_list(container: serde_json::Value) -> Result<Vec<(String, String)>, EnvError> {
    let pod = pod(container);
    let container = &pod.spec.as_ref().expect("a spec").containers[0];
    let host_ips = ["192.0.2.1", "2001:db8::1"].map(str::to_owned);
    let addresses = Addresses { host_ips: &host_ips, pod_ips: &["10.42.0.7".to_owned()] };
    environment(&pod, container, &TestSources, &addresses, &|_| None)
}

#[track_caller]
fn check(env: serde_json::Value, expected: Result<&str, &str>) {
    let found = environment_map(
        json!({"name": "main", "env": [env], "resources": {"limits": {"memory": "1Gi"}, "requests": {"cpu": "250m"}}}),
    );
    let found = found.map(|all| all.get("X").cloned().unwrap_or_else(|| "(none)".into()));
    assert_eq!(found.as_deref().map_err(|missing| missing.0.as_str()), expected);
}

#[test]
fn resolves_values_from_every_source() {
    let from = |source: serde_json::Value| json!({"name": "X", "valueFrom": source});
    let field = |path: &str| from(json!({"fieldRef": {"fieldPath": path}}));
    check(json!({"name": "X", "value": "plain"}), Ok("plain"));
    check(
        json!({"name": "X", "value": "at $(MY_DB_SERVICE_HOST) for $$(Y) $(Z)"}),
        Ok("at 10.43.0.9 for $(Y) $(Z)"),
    );
    check(field("metadata.name"), Ok("web"));
    check(field("metadata.labels['app']"), Ok("web"));
    check(field("status.podIP"), Ok("10.42.0.7"));
    check(field("status.hostIP"), Ok("192.0.2.1"));
    check(field("status.hostIPs"), Ok("192.0.2.1,2001:db8::1"));
    check(field("spec.serviceAccountName"), Ok("robot"));
    check(from(json!({"configMapKeyRef": {"name": "settings", "key": "color"}})), Ok("blue"));
    check(from(json!({"secretKeyRef": {"name": "login", "key": "password"}})), Ok("sesame"));
    check(from(json!({"configMapKeyRef": {"name": "none", "key": "x", "optional": true}})), Ok("(none)"));
    check(from(json!({"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}})), Ok("1024"));
    check(from(json!({"resourceFieldRef": {"resource": "requests.cpu"}})), Ok("1"));
    check(from(json!({"resourceFieldRef": {"resource": "limits.cpu"}})), Ok("4"));
}

#[test]
fn errors_for_missing_references_match_upstream() {
    let from = |source: serde_json::Value| json!({"name": "X", "valueFrom": source});
    check(
        from(json!({"configMapKeyRef": {"name": "none", "key": "x"}})),
        Err("configmap \"none\" not found"),
    );
    check(from(json!({"secretKeyRef": {"name": "none", "key": "x"}})), Err("secret \"none\" not found"));
    let wrong_key = from(json!({"configMapKeyRef": {"name": "settings", "key": "x"}}));
    check(wrong_key, Err("couldn't find key x in ConfigMap shop/settings"));
}

#[test]
fn pod_env_overrides_env_from_and_service_variables() {
    let all = environment_map(json!({
        "name": "main",
        "envFrom": [{"prefix": "S_", "configMapRef": {"name": "settings"}}],
        "env": [{"name": "S_color", "value": "red"}, {"name": "MY_DB_PORT", "value": "mine"}]
    }))
    .expect("an environment");
    let get = |name: &str| all.get(name).map(String::as_str);
    assert_eq!((get("S_color"), get("S_size")), (Some("red"), Some("9")));
    assert_eq!((get("MY_DB_PORT"), get("MY_DB_SERVICE_PORT_WEB")), (Some("mine"), Some("80")));
    assert_eq!(get("KUBERNETES_PORT_80_TCP"), Some("tcp://10.43.0.1:80"));
    assert!(!all.keys().any(|name| name.starts_with("HEADLESS")));
}

#[test]
fn variables_keep_their_order() {
    let all = environment_list(json!({
        "name": "main",
        "envFrom": [{"secretRef": {"name": "login"}}, {"configMapRef": {"name": "settings"}}],
        "env": [{"name": "Z", "value": "1"}, {"name": "A", "value": "2"}, {"name": "color", "value": "red"}]
    }))
    .expect("an environment");
    let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..5], ["password", "size", "Z", "A", "color"]);
    assert!(names[5..].iter().all(|name| name.starts_with("KUBERNETES_") || name.starts_with("MY_DB_")));
}

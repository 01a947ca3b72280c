use reconcile::Client;
use serde_json::{Value, json};

use super::*;

/// A server that only allows watches of single objects. Its objects by path; they can change.
#[derive(Default)]
struct SingleObjectServer {
    objects: watch::Sender<BTreeMap<String, (u64, Value)>>,
}

struct SingleObjectWatch {
    path: String,
    objects: watch::Receiver<BTreeMap<String, (u64, Value)>>,
}

#[async_trait]
impl Connection for SingleObjectServer {
    async fn send(&self, _: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        Ok(Response::new(Bytes::new()))
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        if collection == "/api/v1/pods" {
            return Ok(Box::new(SingleObjectWatch {
                path: String::new(),
                objects: self.objects.subscribe(),
            }));
        }
        assert!(collection.contains("/namespaces/"), "{collection}");
        let mut objects = self.objects.subscribe();
        objects.mark_changed();
        Ok(Box::new(SingleObjectWatch { path: collection.to_owned(), objects }))
    }

    fn impersonate(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

#[async_trait]
impl Watch for SingleObjectWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        if self.path.is_empty() {
            self.path.push('-');
            return Ok(WatchEvent::Replace { objects: Vec::new(), revision: 1 });
        }
        if self.objects.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let all = self.objects.borrow_and_update();
        let revision = all.values().map(|(revision, _)| *revision).max().unwrap_or(1);
        let found =
            all.get(&self.path).map(|(revision, object)| RawObject::new(object.to_string(), Some(*revision)));
        Ok(WatchEvent::Replace { objects: found.into_iter().collect(), revision })
    }
}

fn pod(spec: Value) -> Pod {
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
    serde_json::from_value(pod).expect("a pod")
}

#[test]
fn all_references_of_a_pod_are_found() {
    let pod = pod(json!({
        "imagePullSecrets": [{"name": "pull"}],
        "volumes": [
            {"name": "a", "secret": {"secretName": "vs"}}, {"name": "b", "configMap": {"name": "vc"}},
            {"name": "c", "projected": {"sources": [{"secret": {"name": "ps"}}, {"configMap": {"name": "pc"}}]}},
            {"name": "d", "emptyDir": {}},
            {"name": "e", "csi": {"driver": "x", "nodePublishSecretRef": {"name": "cs"}}},
        ],
        "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "es"}}, {"configMapRef": {"name": "ec"}}]}],
        "containers": [{"name": "c", "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "ks", "key": "k"}}},
            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "kc", "key": "k"}}},
            {"name": "C", "value": "x"},
        ]}],
    }));
    let of = |expected_kind: ObjectKind| {
        let all = references(&pod).into_iter().filter(|(kind, _)| *kind == expected_kind);
        all.map(|(_, key)| key.name.to_string()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(of(ObjectKind::Secret), "cs es ks ps pull vs");
    assert_eq!(of(ObjectKind::ConfigMap), "ec kc pc vc");
    assert!(references_object(&pod, "secrets", "pull") && references_object(&pod, "configmaps", "vc"));
    assert!(!references_object(&pod, "secrets", "vc") && !references_object(&pod, "configmaps", "other"));
}

#[tokio::test(start_paused = true)]
async fn objects_are_synced_only_while_pods_reference_one() {
    let server = Arc::new(SingleObjectServer::default());
    let path = ObjectKind::Secret.watch_path(&Key::new("n", "s"));
    let put = |revision: u64, value: Option<&str>| {
        server.objects.send_modify(|all| match value {
            Some(value) => {
                let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"}, "type": value});
                all.insert(path.clone(), (revision, object));
            }
            None => drop(all.remove(&path)),
        });
    };
    put(5, Some("first"));
    let manager = ObjectManager::new(server.clone());
    let (_stop, shutdown) = watch::channel(false);
    let caches = Caches::new(Client::new(manager.clone(), "test"), shutdown);
    let secrets = caches.secrets().clone();
    let seen = || secrets.get(&Key::new("n", "s")).and_then(|secret| secret.type_.clone());
    secrets.wait_for_sync().await;
    assert_eq!(seen(), None, "no pod references it");

    let pod = pod(json!({"containers": [], "imagePullSecrets": [{"name": "s"}, {"name": "missing"}]}));
    manager.set_pod_references("u", Some(references(&pod)));
    manager.wait_synced(&pod).await.expect("known");
    assert_eq!(seen().as_deref(), Some("first"));
    put(6, Some("second"));
    secrets.wait_until("a change", || seen().as_deref() == Some("second")).await.expect("seen");
    put(7, None);
    secrets.wait_until("a deletion", || seen().is_none()).await.expect("seen");
    put(8, Some("third"));
    secrets.wait_until("its return", || seen().as_deref() == Some("third")).await.expect("seen");
    manager.set_pod_references("u", None);
    secrets.wait_until("its end", || seen().is_none()).await.expect("no pod references it any more");
    assert!(manager.wait_synced(&pod).await.is_err(), "it is not watched any more");
}

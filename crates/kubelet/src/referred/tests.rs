use reconcile::Client;
use serde_json::{Value, json};

use super::*;

/// A server that lets nobody follow more than one object at a time. Its objects by path; what is there can change.
#[derive(Default)]
struct Strict {
    objects: watch::Sender<BTreeMap<String, (u64, Value)>>,
}

struct One {
    path: String,
    objects: watch::Receiver<BTreeMap<String, (u64, Value)>>,
}

#[async_trait]
impl Connection for Strict {
    async fn send(&self, _: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        Ok(Response::new(Bytes::new()))
    }

    async fn follow(&self, collection: &str) -> Result<Box<dyn Feed>, Error> {
        if collection == "/api/v1/pods" {
            return Ok(Box::new(One { path: String::new(), objects: self.objects.subscribe() }));
        }
        assert!(collection.contains("/namespaces/"), "{collection}");
        let mut objects = self.objects.subscribe();
        objects.mark_changed();
        Ok(Box::new(One { path: collection.to_owned(), objects }))
    }

    fn acting_as(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

#[async_trait]
impl Feed for One {
    async fn next(&mut self) -> Result<News, Error> {
        if self.path.is_empty() {
            self.path.push('-');
            return Ok(News::Everything { objects: Vec::new(), revision: 1 });
        }
        if self.objects.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let all = self.objects.borrow_and_update();
        let revision = all.values().map(|(revision, _)| *revision).max().unwrap_or(1);
        let found =
            all.get(&self.path).map(|(revision, object)| Raw::new(object.to_string(), Some(*revision)));
        Ok(News::Everything { objects: found.into_iter().collect(), revision })
    }
}

fn pod(spec: Value) -> Pod {
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
    serde_json::from_value(pod).expect("a pod")
}

#[test]
fn everything_a_pod_names_is_found() {
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
    let of = |wanted: Kind| {
        let all = references(&pod).into_iter().filter(|(kind, _)| *kind == wanted);
        all.map(|(_, key)| key.name.to_string()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(of(Kind::Secret), "cs es ks ps pull vs");
    assert_eq!(of(Kind::ConfigMap), "ec kc pc vc");
    assert!(refers(&pod, "secrets", "pull") && refers(&pod, "configmaps", "vc"));
    assert!(!refers(&pod, "secrets", "vc") && !refers(&pod, "configmaps", "other"));
}

#[tokio::test(start_paused = true)]
async fn objects_come_with_the_pods_that_name_them_and_go_with_them() {
    let strict = Arc::new(Strict::default());
    let path = Kind::Secret.followed_as(&Key::new("n", "s"));
    let put = |revision: u64, value: Option<&str>| {
        strict.objects.send_modify(|all| match value {
            Some(value) => {
                let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"}, "type": value});
                all.insert(path.clone(), (revision, object));
            }
            None => drop(all.remove(&path)),
        });
    };
    put(5, Some("first"));
    let referred = Referred::new(strict.clone());
    let (_stop, shutdown) = watch::channel(false);
    let caches = Caches::new(Client::new(referred.clone(), "test"), shutdown);
    let secrets = caches.secrets().clone();
    let seen = || secrets.get(&Key::new("n", "s")).and_then(|secret| secret.type_.clone());
    secrets.filled().await;
    assert_eq!(seen(), None, "nobody has asked for it");

    let pod = pod(json!({"containers": [], "imagePullSecrets": [{"name": "s"}, {"name": "missing"}]}));
    referred.note("u", Some(references(&pod)));
    referred.known(&pod).await.expect("known");
    assert_eq!(seen().as_deref(), Some("first"));
    put(6, Some("second"));
    secrets.until("a change", || seen().as_deref() == Some("second")).await.expect("seen");
    put(7, None);
    secrets.until("a deletion", || seen().is_none()).await.expect("seen");
    put(8, Some("third"));
    secrets.until("its return", || seen().as_deref() == Some("third")).await.expect("seen");
    referred.note("u", None);
    secrets.until("its end", || seen().is_none()).await.expect("nobody wants it");
    assert!(referred.known(&pod).await.is_err(), "nobody follows it");
}

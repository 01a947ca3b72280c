//! A test cluster: controllers and an API server in this process, with a store in a temporary directory.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use reconcile::cloud::CloudHandle;
use reconcile::{Cached, Caches, Client, Clock, Ctx, DeleteOptions, Key, Object as _, Settings, Signers};
use tokio::sync::watch;

use crate::CONTROLLERS;
use crate::service_balancer::nodes::NodeBalancer;

/// How long a test waits for a condition.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

pub struct TestCluster {
    pub ctx: Ctx,
    /// A client with administrator rights.
    pub client: Client,
    pub stop: watch::Sender<bool>,
    _server: apiserver::RunningServer,
    _directory: tempfile::TempDir,
}

impl TestCluster {
    /// Starts an API server with these controllers, and the service account controller, without which pods
    /// cannot be created.
    pub async fn start(controllers: &[&str]) -> TestCluster {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let stop = watch::Sender::new(false);
        let server =
            apiserver::start_in_directory(directory.path(), stop.subscribe()).await.expect("a server");
        let client = Client::new(server.local(), "kube-controller-manager");
        let ctx = Ctx::new(client.clone(), Clock::default(), stop.subscribe());
        let ctx = ctx.with_settings(Settings {
            root_ca: "certificate".into(),
            cluster_cidrs: vec!["10.42.0.0/16".into(), "2001:db8:42::/56".into()],
            service_cidrs: vec!["10.43.0.0/16".into()],
            signers: signers(directory.path()),
            account_tokens: pki::token::Keys::load_or_create(&directory.path().join("tls"))
                .ok()
                .map(Arc::new),
            local_storage: "/var/lib/skiff/storage".into(),
            cloud: CloudHandle(Some(Arc::new(NodeBalancer::default()))),
            node_monitor: Default::default(),
        });
        let test_cluster = TestCluster { ctx, client, stop, _server: server, _directory: directory };
        let accounts = "serviceaccount-controller";
        controllers
            .iter()
            .filter(|name| **name != accounts)
            .chain([&accounts])
            .for_each(|name| test_cluster.start_controller(name));
        let account = Key::new("default", "default");
        wait_for("a service account", || async {
            test_cluster.client.get::<ServiceAccount>(&account).await.ok()
        })
        .await;
        test_cluster
    }

    /// Starts another controller.
    pub fn start_controller(&self, controller: &str) {
        let descriptor = CONTROLLERS
            .iter()
            .find(|descriptor| descriptor.name == controller)
            .expect("a controller of this name");
        tokio::spawn((descriptor.run)(self.ctx.for_controller(descriptor.name)));
    }
}

impl TestCluster {
    /// Returns a context whose caches do not show that `owner` and its pods are deleted. Before that, the
    /// controller has created one pod and reported it in the status field `status_field`.
    pub async fn with_deleted_owner<T: Cached>(
        &self,
        controller: &str,
        owner: &T,
        status_field: &str,
        start_caches: impl FnOnce(&Caches),
    ) -> Ctx {
        let descriptor = CONTROLLERS
            .iter()
            .find(|descriptor| descriptor.name == controller)
            .expect("a controller of this name");
        let stop = watch::Sender::new(false);
        let work = Ctx { shutdown: stop.subscribe(), ..self.ctx.for_controller(descriptor.name) };
        self.client.create(owner).await.expect("an owner");
        let work = tokio::spawn((descriptor.run)(work));
        wait_for("the owner's pod", || async {
            let owner: T = self.client.get(&owner.key()).await.expect("the owner");
            let status = serde_json::to_value(&owner).expect("an object")["status"][status_field].clone();
            (status == 1).then_some(())
        })
        .await;
        stop.send_replace(true);
        work.await.expect("the controller stops on shutdown");
        for pod in self.client.list::<Pod>(owner.namespace()).await.expect("pods") {
            let now = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::uid(pod.uid()) };
            self.client.delete::<Pod>(&pod.key(), &now).await.expect("deleted");
        }
        let ctx = self.static_context(start_caches).await;
        let background = DeleteOptions { propagation: Some("Background"), ..DeleteOptions::default() };
        self.client.delete::<T>(&owner.key(), &background).await.expect("deleted");
        ctx
    }

    /// A context with synced caches that receive no further events.
    async fn static_context(&self, start_caches: impl FnOnce(&Caches)) -> Ctx {
        let stop = watch::Sender::new(false);
        let ctx = Ctx::new(self.client.clone(), Clock::default(), stop.subscribe());
        let before = stop.receiver_count();
        start_caches(&ctx.caches);
        ctx.caches.wait_for_sync().await;
        stop.send_replace(true);
        // Waits until the watches and the event recorder have stopped.
        wait_for("the watches to stop", || async { (stop.receiver_count() < before).then_some(()) }).await;
        ctx
    }

    /// Asserts that there are no pods other than terminating ones.
    pub async fn assert_no_pods(&self) {
        let pods = self.client.list::<Pod>("default").await.expect("pods");
        let names: Vec<&str> = pods.iter().filter(|pod| !pod.is_deleting()).map(|pod| pod.name()).collect();
        assert_eq!(names, [""; 0]);
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Uses one certificate authority for all signers.
fn signers(directory: &std::path::Path) -> Signers {
    let authority = pki::Authority::load_or_create(directory, "signer", jiff::Timestamp::now());
    let authority = Arc::new(authority.expect("an authority"));
    let names =
        ["kube-apiserver-client", "kube-apiserver-client-kubelet", "kubelet-serving", "legacy-unknown"];
    Signers(names.map(|name| (format!("kubernetes.io/{name}"), authority.clone())).into())
}

/// Polls until `check` returns a value, and panics after the timeout.
pub async fn wait_for<T, F: Future<Output = Option<T>>>(what: &str, check: impl Fn() -> F) -> T {
    let poll = async {
        loop {
            if let Some(found) = check().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    match tokio::time::timeout(WAIT_TIMEOUT, poll).await {
        Ok(found) => found,
        Err(_) => panic!("timed out waiting for {what}"),
    }
}

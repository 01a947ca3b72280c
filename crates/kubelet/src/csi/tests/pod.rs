//! End-to-end test of a pod with a CSI volume: containerd, a kubelet and a fake driver.
//!
//! Needs root and containerd. Skips without them.

use super::*;

/// Cleans up what a failed test leaves behind.
struct CleanupGuard(PathBuf, PathBuf);

impl Drop for CleanupGuard {
    fn drop(&mut self) {
        testkit::cleanup_node(&self.0, &self.1);
    }
}

fn config(cluster: &TestCluster) -> crate::Config {
    for dir in [&cluster.settings.pods, &cluster.settings.logs.own] {
        std::fs::create_dir_all(dir).expect("a directory");
    }
    // Thresholds are off, so that a full disk of the test machine does not matter.
    let kubelet_config = crate::KubeletConfig {
        hard_eviction: crate::EvictionThresholds::NONE,
        image_gc: crate::ImagePolicy { high_threshold_percent: 100, ..crate::ImagePolicy::default() },
        republish_interval: jiff::SignedDuration::from_millis(200),
        ..crate::KubeletConfig::default()
    };
    crate::Config {
        settings: Settings { kubelet_config, memory: 8 << 30, ..cluster.settings.clone() },
        presentation: crate::NodeRegistration { max_pods: 110, port: 10250, ..Default::default() },
        api: None,
        object_manager: None,
        host_shutdown: crate::HostShutdown::default(),
    }
}

/// Creates the objects that the pod needs.
async fn prepare(cluster: &TestCluster) {
    let metadata = |name: &str| json!({"name": name, "namespace": "default"});
    cluster.create::<ServiceAccount>(json!({"metadata": metadata("default")})).await;
    let roots = json!({"metadata": metadata("kube-root-ca.crt"), "data": {"ca.crt": "certificates"}});
    cluster.create::<ConfigMap>(roots).await;
    let spec = json!({"attachRequired": false, "fsGroupPolicy": "File", "requiresRepublish": true});
    cluster.create::<CSIDriver>(json!({"metadata": {"name": "disk.example.com"}, "spec": spec})).await;
    cluster.create::<PersistentVolume>(persistent()).await;
    let spec = json!({
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}, "volumeName": "pv-1",
    });
    cluster.create::<PersistentVolumeClaim>(json!({"metadata": metadata("data"), "spec": spec})).await;
    let status = json!({"status": {"phase": "Bound", "capacity": {"storage": "2Gi"}}});
    let key = Key::new("default", "data");
    let patch = reconcile::Patch::Merge(status);
    cluster.client.patch_status::<PersistentVolumeClaim>(&key, &patch).await.expect("bound");
}

async fn wait_for<T>(what: &str, check: impl AsyncFn() -> Option<T>) -> T {
    let checking = async {
        loop {
            if let Some(found) = check().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, checking)
        .await
        .unwrap_or_else(|_| panic!("timed out waiting until: {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_uses_csi_volume_and_leaves_no_directories() {
    let has_containerd = std::process::Command::new("containerd").arg("--version").output().is_ok();
    if !rustix::process::geteuid().is_root() || !has_containerd {
        return eprintln!("skipped: needs root and containerd");
    }
    let cluster = TestCluster::start().await;
    let containerd =
        testkit::Containerd::start(&cluster.dir.path().join("containerd")).expect("a containerd");
    let _cleanup = CleanupGuard(cluster.dir.path().to_owned(), cluster.settings.pods.clone());
    prepare(&cluster).await;
    let fake = FakeDriver::start(&cluster.root());
    let (stop, shutdown) = watch::channel(false);
    let runtime = Arc::new(runtime::Remote::new(&containerd.socket().display().to_string()));
    let ctx = Ctx::new(cluster.client.clone(), Clock::default(), shutdown);
    let node = tokio::spawn(crate::run(ctx, runtime, config(&cluster)));
    wait_for("the driver is known", async || {
        let node: CSINode = cluster.client.get(&Key::new("", "here")).await.ok()?;
        (!node.spec.drivers.is_empty()).then_some(())
    })
    .await;
    let script = "echo hello > /data/file; stat -c %g /data /data/file > /dev/termination-log; \
                  until [ -e /data/end ]; do sleep 0.1; done";
    let spec = json!({
        "nodeName": "here", "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
        "securityContext": {"fsGroup": 2000},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "containers": [{
            "name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }],
    });
    let pod: Pod =
        cluster.create(json!({"metadata": {"name": "web", "namespace": "default"}, "spec": spec})).await;
    let key = Key::new("default", "web");
    // The pod does not change, but its driver is called periodically.
    let is_publish_call = |line: &&String| line.starts_with("publish");
    wait_for("it is published repeatedly", async || {
        (fake.calls.0.lock().iter().filter(is_publish_call).count() > 2).then_some(())
    })
    .await;
    let uid = pod.metadata.uid.expect("a uid");
    let place = format!("/pods/{uid}/volumes/kubernetes.io~csi/pv-1/mount");
    let volume = format!("{}{place}", cluster.root().display());
    wait_for("it writes to the driver's volume", async || {
        std::fs::read_to_string(format!("{volume}/file")).is_ok_and(|text| text == "hello\n").then_some(())
    })
    .await;
    std::fs::write(format!("{volume}/end"), "").expect("written");
    let message = wait_for("the pod has ended", async || {
        let status = cluster.client.get::<Pod>(&key).await.ok()?.status?;
        let state = status.container_statuses?.into_iter().next()?.state?;
        state.terminated?.message
    })
    .await;
    assert_eq!(message, "2000\n2000\n");
    cluster.client.delete::<Pod>(&key, &reconcile::DeleteOptions::uid(&uid)).await.expect("deleted");
    wait_for("the pod is gone", async || cluster.client.get::<Pod>(&key).await.is_err().then_some(())).await;
    // The volume is unstaged after its last pod.
    wait_for("the volume is unstaged", async || {
        fake.calls.0.lock().iter().any(|line| line == "unstage vol-1").then_some(())
    })
    .await;
    let calls = fake
        .calls
        .0
        .lock()
        .iter()
        .filter(|line| line.contains("stage") || line.contains("publish"))
        .cloned()
        .collect::<Vec<_>>();
    let mut first_words: Vec<&str> = calls.iter().filter_map(|line| line.split(' ').next()).collect();
    first_words.dedup();
    assert_eq!(first_words, ["stage", "publish", "unpublish", "unstage"], "{calls:#?}");
    let unpublish_call = &calls[calls.len() - 2];
    assert!(calls[1].contains(&place) && unpublish_call.ends_with(&place), "{calls:#?}");
    let dirs = [cluster.settings.pods.clone(), cluster.root().join("pods")];
    wait_for("its directories are gone", async || {
        let left = dirs.iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten()).count();
        (left == 0).then_some(())
    })
    .await;
    stop.send_replace(true);
    node.await.expect("the kubelet task has not panicked");
}

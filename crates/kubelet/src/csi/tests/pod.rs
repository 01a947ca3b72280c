//! A whole pod with a driver's volume: containerd, a node at work, and the driver at its socket.
//!
//! Needs root and containerd; says so and passes where these are missing.

use super::*;

/// What a failed test has not deleted.
struct Swept(PathBuf, PathBuf);

impl Drop for Swept {
    fn drop(&mut self) {
        testkit::sweep(&self.0, &self.1);
    }
}

fn config(rig: &Rig) -> crate::Config {
    for dir in [&rig.settings.pods, &rig.settings.logs.own] {
        std::fs::create_dir_all(dir).expect("a directory");
    }
    // However full the disk of whoever tests this is.
    let keeping = crate::Keeping {
        limits: crate::Limits::NONE,
        images: crate::ImagePolicy { high: 100, ..crate::ImagePolicy::default() },
        republish: jiff::SignedDuration::from_millis(200),
        ..crate::Keeping::default()
    };
    crate::Config {
        settings: Settings { keeping, memory: 8 << 30, ..rig.settings.clone() },
        presentation: crate::Presentation { max_pods: 110, port: 10250, ..Default::default() },
        api: None,
        referred: None,
        host_shutdown: crate::HostShutdown::default(),
    }
}

/// What a pod and its volume need beside them.
async fn prepare(rig: &Rig) {
    let metadata = |name: &str| json!({"name": name, "namespace": "default"});
    rig.create::<ServiceAccount>(json!({"metadata": metadata("default")})).await;
    let roots = json!({"metadata": metadata("kube-root-ca.crt"), "data": {"ca.crt": "certificates"}});
    rig.create::<ConfigMap>(roots).await;
    let spec = json!({"attachRequired": false, "fsGroupPolicy": "File", "requiresRepublish": true});
    rig.create::<CSIDriver>(json!({"metadata": {"name": "disk.example.com"}, "spec": spec})).await;
    rig.create::<PersistentVolume>(persistent()).await;
    let spec = json!({
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}, "volumeName": "pv-1",
    });
    rig.create::<PersistentVolumeClaim>(json!({"metadata": metadata("data"), "spec": spec})).await;
    let status = json!({"status": {"phase": "Bound", "capacity": {"storage": "2Gi"}}});
    let key = Key::new("default", "data");
    let patch = reconcile::Patch::Merge(status);
    rig.client.patch_status::<PersistentVolumeClaim>(&key, &patch).await.expect("bound");
}

async fn until<T>(what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    let looking = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, looking).await.unwrap_or_else(|_| panic!("never came: {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_writes_to_its_volume_and_leaves_nothing() {
    let has_containerd = std::process::Command::new("containerd").arg("--version").output().is_ok();
    if !rustix::process::geteuid().is_root() || !has_containerd {
        return eprintln!("skipped: needs root and containerd");
    }
    let rig = Rig::start().await;
    let containerd = testkit::Containerd::start(&rig.dir.path().join("containerd")).expect("a containerd");
    let _swept = Swept(rig.dir.path().to_owned(), rig.settings.pods.clone());
    prepare(&rig).await;
    let fake = Fake::start(&rig.root());
    let (stop, shutdown) = watch::channel(false);
    let runtime = Arc::new(runtime::Remote::new(&containerd.socket().display().to_string()));
    let ctx = Ctx::new(rig.client.clone(), Clock::default(), shutdown);
    let node = tokio::spawn(crate::run(ctx, runtime, config(&rig)));
    until("the driver is known", async || {
        let node: CSINode = rig.client.get(&Key::new("", "here")).await.ok()?;
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
        rig.create(json!({"metadata": {"name": "web", "namespace": "default"}, "spec": spec})).await;
    let key = Key::new("default", "web");
    // Nothing happens to the pod, but its driver is asked again and again.
    let is_published = |line: &&String| line.starts_with("publish");
    until("it is published often", async || {
        (fake.asked.0.lock().iter().filter(is_published).count() > 2).then_some(())
    })
    .await;
    let uid = pod.metadata.uid.expect("a uid");
    let place = format!("/pods/{uid}/volumes/kubernetes.io~csi/pv-1/mount");
    let volume = format!("{}{place}", rig.root().display());
    until("it writes to the driver's volume", async || {
        std::fs::read_to_string(format!("{volume}/file")).is_ok_and(|text| text == "hello\n").then_some(())
    })
    .await;
    std::fs::write(format!("{volume}/end"), "").expect("written");
    let said = until("the pod has ended", async || {
        let status = rig.client.get::<Pod>(&key).await.ok()?.status?;
        let state = status.container_statuses?.into_iter().next()?.state?;
        state.terminated?.message
    })
    .await;
    assert_eq!(said, "2000\n2000\n");
    rig.client.delete::<Pod>(&key, &reconcile::Delete::uid(&uid)).await.expect("deleted");
    until("the pod is gone", async || rig.client.get::<Pod>(&key).await.is_err().then_some(())).await;
    // Its volume is unstaged once nobody on the node has it.
    until("the volume is let go", async || {
        fake.asked.0.lock().iter().any(|line| line == "unstage vol-1").then_some(())
    })
    .await;
    let asked = fake
        .asked
        .0
        .lock()
        .iter()
        .filter(|line| line.contains("stage") || line.contains("publish"))
        .cloned()
        .collect::<Vec<_>>();
    let mut first_words: Vec<&str> = asked.iter().filter_map(|line| line.split(' ').next()).collect();
    first_words.dedup();
    assert_eq!(first_words, ["stage", "publish", "unpublish", "unstage"], "{asked:#?}");
    let unpublished = &asked[asked.len() - 2];
    assert!(asked[1].contains(&place) && unpublished.ends_with(&place), "{asked:#?}");
    let dirs = [rig.settings.pods.clone(), rig.root().join("pods")];
    until("its directories are gone", async || {
        let left = dirs.iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten()).count();
        (left == 0).then_some(())
    })
    .await;
    stop.send_replace(true);
    node.await.expect("the node ends by itself");
}

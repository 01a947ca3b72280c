//! Tests with a fake CSI driver in this process, which keeps volumes as directories and records its
//! calls.

mod pod;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use expect_test::{Expect, expect};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::{
    ConfigMap, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret, ServiceAccount,
};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};
use parking_lot::Mutex;
use prost::Message;
use reconcile::{Client, Clock, Ctx, Key};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::watch;

use super::messages::*;
use super::volume::{CsiVolumeSpec, SetUpError};
use super::{Drivers, record, volume};
use crate::config::Settings;
use crate::env::Addresses;
use crate::plugins::{self, PluginRegistrationInfo, RegistrationStatus};
use crate::sources::CachedSources;
use crate::volumes::VolumeContext;

const DEADLINE: Duration = Duration::from_secs(60);

/// The recorded calls, one line each. Paths are relative to the node's directory.
#[derive(Clone, Default)]
struct CallLog(Arc<Mutex<Vec<String>>>);

/// Serves a fake driver at a socket in the plugin registry until it is dropped.
struct FakeDriver {
    task: tokio::task::JoinHandle<()>,
    socket: PathBuf,
    calls: CallLog,
}

impl Drop for FakeDriver {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl FakeDriver {
    fn start(root: &Path) -> FakeDriver {
        let dir = root.join("plugins_registry");
        std::fs::create_dir_all(&dir).expect("a directory");
        let socket = dir.join("disk.example.com-reg.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let calls = CallLog::default();
        let (call_log, root) = (calls.clone(), root.to_owned());
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (call_log, root) = (call_log.clone(), root.clone());
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let (call_log, root) = (call_log.clone(), root.clone());
                    async move { Ok::<_, Infallible>(serve(request, &call_log, &root).await) }
                });
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(connection);
            }
        });
        FakeDriver { task, socket, calls }
    }

    /// Compares and clears the recorded calls.
    #[track_caller]
    fn check(&self, expected: Expect) {
        let calls: Vec<String> = std::mem::take(&mut self.calls.0.lock());
        expected.assert_eq(&calls.join("\n"));
    }
}

type Body = http_body_util::combinators::BoxBody<Bytes, Infallible>;

async fn serve(request: Request<Incoming>, call_log: &CallLog, root: &Path) -> Response<Body> {
    let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let bytes = request.into_body().collect().await.expect("a whole request").to_bytes();
    let (line, answer) = answer(&call, bytes.slice(5..));
    call_log.0.lock().push(line.replace(&root.display().to_string(), ""));
    let (status, message) = match answer {
        Ok(message) => ("0", message),
        Err(()) => ("13", Vec::new()),
    };
    let mut framed = vec![0];
    framed.extend(u32::try_from(message.len()).expect("short").to_be_bytes());
    framed.extend(message);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static(status));
    trailers.insert("grpc-message", HeaderValue::from_static("it is broken"));
    let frames = [Ok(Frame::data(Bytes::from(framed))), Ok(Frame::trailers(trailers))];
    let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)).boxed());
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// The log line for a call, and its response.
fn answer(call: &str, bytes: Bytes) -> (String, Result<Vec<u8>, ()>) {
    fn read<M: Message + Default>(bytes: Bytes) -> M {
        M::decode(bytes).expect("a message")
    }
    let done = |line: String| (line, Ok(Vec::new()));
    let with = |secrets: &std::collections::BTreeMap<String, String>| match secrets.is_empty() {
        true => String::new(),
        false => format!(" with {secrets:?}"),
    };
    match call {
        "GetInfo" => {
            let info = PluginRegistrationInfo {
                kind: "CSIPlugin".into(),
                name: "disk.example.com".into(),
                // The path inside the driver's container, which mounts the node's root directory
                // there.
                endpoint: "/var/lib/kubelet/plugins_registry/disk.example.com-reg.sock".into(),
                supported_versions: vec!["1.0.0".into()],
            };
            ("get info".into(), Ok(info.encode_to_vec()))
        }
        "NotifyRegistrationStatus" => {
            let status: RegistrationStatus = read(bytes);
            done(format!("registered {}{}", status.plugin_registered, status.error))
        }
        "NodeGetInfo" => {
            let segments = [("example.com/rack".to_owned(), "r1".to_owned())].into();
            let info = NodeGetInfoResponse {
                node_id: "n-1".into(),
                max_volumes_per_node: 7,
                accessible_topology: Some(Topology { segments }),
            };
            ("info".into(), Ok(info.encode_to_vec()))
        }
        "NodeGetCapabilities" => {
            let one = |kind| NodeServiceCapability { rpc: Some(Rpc { kind }) };
            let answer = NodeGetCapabilitiesResponse { capabilities: vec![one(1), one(2), one(3)] };
            ("capabilities".into(), Ok(answer.encode_to_vec()))
        }
        "NodeStageVolume" => {
            let request: NodeStageVolumeRequest = read(bytes);
            let mode = request.volume_capability.and_then(|it| it.access_mode).map_or(0, |mode| mode.mode);
            done(format!(
                "stage {} at {} mode {mode} context {:?}{}",
                request.volume_id,
                request.staging_target_path.rsplit('/').next().unwrap_or_default(),
                request.publish_context,
                with(&request.secrets)
            ))
        }
        "NodePublishVolume" => {
            let request: NodePublishVolumeRequest = read(bytes);
            if request.volume_context.contains_key("broken") {
                return (format!("publish {}", request.volume_id), Err(()));
            }
            // Republishing calls this a second time.
            let created = std::fs::create_dir(&request.target_path);
            assert!(
                created.is_ok() || Path::new(&request.target_path).is_dir(),
                "the directory above is there"
            );
            let id = request.volume_id.get(..8).unwrap_or(&request.volume_id);
            done(format!(
                "publish {id} at {} read-only {} for {:?}{}",
                request.target_path,
                request.readonly,
                request.volume_context,
                with(&request.secrets)
            ))
        }
        "NodeUnpublishVolume" => {
            let request: VolumeTargetRequest = read(bytes);
            // Unmounting removes the content that the driver had mounted there.
            let _ = std::fs::remove_dir_all(&request.path);
            done(format!("unpublish {}", request.path))
        }
        "NodeUnstageVolume" => {
            let request: VolumeTargetRequest = read(bytes);
            done(format!("unstage {}", request.volume_id))
        }
        "NodeExpandVolume" => {
            let request: NodeExpandVolumeRequest = read(bytes);
            let size = request.capacity_range.map_or(0, |range| range.required_bytes);
            done(format!("expand {} to {size}", request.volume_id))
        }
        "NodeGetVolumeStats" => {
            let usage = VolumeUsage { available: 1, total: 3, used: 2, unit: BYTES };
            let answer = NodeGetVolumeStatsResponse { usage: vec![usage] };
            ("stats".into(), Ok(answer.encode_to_vec()))
        }
        other => (other.to_owned(), Err(())),
    }
}

/// An API server with one node and that node's CSI state.
pub struct TestCluster {
    pub client: Client,
    pub ctx: Ctx,
    pub settings: Settings,
    drivers: Arc<Drivers>,
    /// Runs the plugin watcher after `register_driver`. A second watcher would query the plugins
    /// again at any time.
    plugins: Mutex<Option<tokio::task::JoinHandle<()>>>,
    _server: apiserver::RunningServer,
    _stop: watch::Sender<bool>,
    dir: tempfile::TempDir,
}

impl TestCluster {
    pub async fn start() -> TestCluster {
        TestCluster::start_as(None).await
    }

    /// With the permissions of this user.
    async fn start_as(user: Option<&str>) -> TestCluster {
        let dir = tempfile::tempdir().expect("a directory");
        let (stop, shutdown) = watch::channel(false);
        let server = apiserver::start_in_directory(&dir.path().join("server"), shutdown.clone())
            .await
            .expect("a server");
        let client = Client::new(server.local(), "kubelet");
        let own = user.and_then(|user| reconcile::Connection::impersonate(&*server.local(), user));
        let own = own.map_or_else(|| client.clone(), |own| Client::new(own, "kubelet"));
        let ctx = Ctx::new(own, Clock::default(), shutdown);
        let root = dir.path().join("kubelet");
        let settings = Settings::for_tests(&root);
        let (drivers, plugins) = (Arc::new(Drivers::open(&root)), Mutex::default());
        TestCluster { client, ctx, settings, drivers, plugins, _server: server, _stop: stop, dir }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("kubelet")
    }

    pub async fn create<T: reconcile::Object>(&self, value: Value) -> T {
        let object: T = serde_json::from_value(value).expect("an object");
        self.client.create(&object).await.expect("created")
    }

    /// Polls until the check returns a value.
    async fn until<T>(&self, what: &str, check: impl AsyncFn() -> Option<T>) -> T {
        let checking = async {
            loop {
                if let Some(found) = check().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let found = tokio::time::timeout(DEADLINE, checking).await;
        found.unwrap_or_else(|_| panic!("timed out waiting until: {what}"))
    }

    async fn set_up(
        &self,
        pod: &Pod,
        volume_spec: &CsiVolumeSpec,
    ) -> Result<volume::PublishedVolume, SetUpError> {
        let sources = CachedSources { ctx: &self.ctx, node_name: "here" };
        volume::set_up(&self.mount_context(&sources), pod, volume_spec).await
    }

    fn mount_context<'a>(&'a self, sources: &'a CachedSources<'a>) -> VolumeContext<'a> {
        VolumeContext {
            ctx: &self.ctx,
            sources,
            settings: &self.settings,
            csi: &self.drivers,
            tmpfs_visible: false,
            addresses: Addresses { host_ips: &[], pod_ips: &[] },
            before_first_container: true,
        }
    }

    async fn register_driver(&self) -> CSINode {
        self.ctx.caches.nodes().wait_for_sync().await;
        self.create::<Node>(json!({"metadata": {"name": "here"}})).await;
        let here = Key::new("", "here");
        self.until("the node is known", async || self.ctx.caches.nodes().get(&here)).await;
        let (ctx, settings, drivers) = (self.ctx.clone(), self.settings.clone(), self.drivers.clone());
        let plugins = tokio::spawn(async move {
            let dra = crate::dra::Drivers::default();
            plugins::run(&ctx, &settings, plugins::PluginHandlers { csi: &drivers, dra: &dra }, || {}).await;
        });
        *self.plugins.lock() = Some(plugins);
        self.until("the driver is known", async || {
            let node: CSINode = self.client.get(&here).await.ok()?;
            (!node.spec.drivers.is_empty()).then_some(node)
        })
        .await
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        self.plugins.get_mut().iter().for_each(|plugins| plugins.abort());
    }
}

fn pod(uid: &str) -> Pod {
    let value = json!({
        "metadata": {"name": "web", "namespace": "default", "uid": uid},
        "spec": {"containers": [], "volumes": [
            {"name": "scratch", "csi": {"driver": "disk.example.com", "volumeAttributes": {"size": "1"}}},
            {"name": "bad", "csi": {"driver": "disk.example.com", "volumeAttributes": {"broken": "yes"}}},
        ]},
    });
    serde_json::from_value(value).expect("a pod")
}

fn persistent() -> Value {
    json!({
        "metadata": {"name": "pv-1"},
        "spec": {
            "capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteOnce"],
            "csi": {"driver": "disk.example.com", "volumeHandle": "vol-1", "fsType": "ext4"},
        },
    })
}

#[tokio::test]
async fn driver_registration_updates_node_and_csi_node() {
    let cluster = TestCluster::start().await;
    let fake = FakeDriver::start(&cluster.root());
    let node = cluster.register_driver().await;
    fake.check(expect![[r#"
        get info
        info
        capabilities
        registered true"#]]);
    let spec = serde_json::to_string(&node.spec).expect("text");
    expect![[r#"{"drivers":[{"allocatable":{"count":7},"name":"disk.example.com","nodeID":"n-1","topologyKeys":["example.com/rack"]}]}"#]].assert_eq(&spec);
    let own: Node = cluster.client.get(&Key::new("", "here")).await.expect("a node");
    let metadata = (own.metadata.labels.unwrap_or_default(), own.metadata.annotations.unwrap_or_default());
    assert_eq!(metadata.0.get("example.com/rack").map(String::as_str), Some("r1"));
    assert_eq!(
        metadata.1.get("csi.volume.kubernetes.io/nodeid").map(String::as_str),
        Some(r#"{"disk.example.com":"n-1"}"#)
    );
    drop(fake);
    cluster
        .until("the driver is gone", async || {
            let node: CSINode = cluster.client.get(&Key::new("", "here")).await.ok()?;
            node.spec.drivers.is_empty().then_some(())
        })
        .await;
}

/// `requiresRepublish` is for volumes with content that expires, such as tokens.
#[tokio::test]
async fn requires_republish_calls_driver_again() {
    let cluster = TestCluster::start().await;
    let pod = pod("u1");
    let volumes = pod.spec.clone().expect("a spec").volumes.expect("volumes");
    let volume_spec = CsiVolumeSpec::inline(&pod, &volumes[0]).expect("a driver's volume");
    let spec =
        json!({"attachRequired": false, "requiresRepublish": true, "volumeLifecycleModes": ["Ephemeral"]});
    cluster.create::<CSIDriver>(json!({"metadata": {"name": "disk.example.com"}, "spec": spec})).await;
    let driver = Key::new("", "disk.example.com");
    cluster
        .until("the CSIDriver is in the cache", async || cluster.ctx.caches.csi_drivers().get(&driver))
        .await;
    let fake = FakeDriver::start(&cluster.root());
    cluster.register_driver().await;
    let calls = || fake.calls.0.lock().iter().filter(|line| line.starts_with("publish ")).count();
    let left =
        || cluster.drivers.republish_at("u1").map(|at| at.duration_since(cluster.ctx.clock.now()).as_secs());
    assert_eq!(left(), None);
    cluster.set_up(&pod, &volume_spec).await.expect("published");
    assert!((59..=60).contains(&left().expect("a time")) && cluster.drivers.republish_at("u2").is_none());
    cluster.ctx.clock.advance(30);
    cluster.set_up(&pod, &volume_spec).await.expect("as it was");
    assert!((29..=30).contains(&left().expect("a time")) && calls() == 1);
    cluster.ctx.clock.advance(31);
    let ready = cluster.set_up(&pod, &volume_spec).await.expect("published again");
    assert!((59..=60).contains(&left().expect("a time")) && calls() == 2 && !ready.apply_fs_group);
    // A failed republish keeps the volume and is retried after a short delay.
    let mut broken = volume_spec.clone();
    broken.attributes.insert("broken".to_owned(), "yes".to_owned());
    cluster.ctx.clock.advance(61);
    cluster.set_up(&pod, &broken).await.expect_err("it is broken");
    assert!((9..=10).contains(&left().expect("a time")) && ready.path.is_dir());
    let never = json!({"spec": {"requiresRepublish": false}});
    cluster.client.patch::<CSIDriver>(&driver, &reconcile::Patch::Merge(never)).await.expect("changed");
    cluster
        .until("the CSIDriver is updated", async || {
            let object = cluster.ctx.caches.csi_drivers().get(&driver)?;
            (object.spec.requires_republish == Some(false)).then_some(())
        })
        .await;
    cluster.set_up(&pod, &volume_spec).await.expect("as it was");
    assert_eq!(left(), None);
}

#[tokio::test]
async fn inline_volume_is_published_for_its_pod() {
    let cluster = TestCluster::start().await;
    let pod = pod("u1");
    let volumes = pod.spec.clone().expect("a spec").volumes.expect("volumes");
    let volume_spec = CsiVolumeSpec::inline(&pod, &volumes[0]).expect("a driver's volume");
    let check = |result: Result<volume::PublishedVolume, SetUpError>, expected: &str| {
        let Err(SetUpError::Failed { operation, message }) = result else { panic!("{result:?}") };
        assert_eq!(format!("{operation}: {message}"), expected);
    };
    check(
        cluster.set_up(&pod, &volume_spec).await,
        "MountVolume.SetUp: kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: volume mode \
         \"Ephemeral\" not supported by driver disk.example.com (no CSIDriver object)",
    );
    let spec =
        json!({"attachRequired": false, "podInfoOnMount": true, "volumeLifecycleModes": ["Ephemeral"]});
    cluster.create::<CSIDriver>(json!({"metadata": {"name": "disk.example.com"}, "spec": spec})).await;
    cluster
        .until("the CSIDriver is in the cache", async || {
            cluster.ctx.caches.csi_drivers().get(&Key::new("", "disk.example.com"))
        })
        .await;
    check(
        cluster.set_up(&pod, &volume_spec).await,
        "MountVolume.SetUp: kubernetes.io/csi: mounter.SetUpAt failed to get CSI client: driver name \
         disk.example.com not found in the list of registered CSI drivers",
    );
    let fake = FakeDriver::start(&cluster.root());
    cluster.register_driver().await;
    fake.calls.0.lock().clear();
    let ready = cluster.set_up(&pod, &volume_spec).await.expect("published");
    assert!(ready.path.ends_with("pods/u1/volumes/kubernetes.io~csi/scratch/mount") && ready.path.is_dir());
    // Setting up twice is idempotent.
    cluster.set_up(&pod, &volume_spec).await.expect("published");
    let bad = CsiVolumeSpec::inline(&pod, &volumes[1]).expect("a driver's volume");
    check(
        cluster.set_up(&pod, &bad).await,
        "MountVolume.SetUp: rpc error: code = Internal desc = it is broken",
    );
    volume::tear_down(&cluster.drivers, &cluster.settings, "u1").await.expect("gone");
    assert!(!cluster.root().join("pods/u1").exists());
    fake.check(expect![[r#"
        publish csi-c8c1 at /pods/u1/volumes/kubernetes.io~csi/scratch/mount read-only false for {"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "web", "csi.storage.k8s.io/pod.namespace": "default", "csi.storage.k8s.io/pod.uid": "u1", "csi.storage.k8s.io/serviceAccount.name": "default", "size": "1"}
        publish csi-67c6888d7bcbbca4e6576249732f647613fffc63754541f8d9214c2f86f4a39c
        unpublish /pods/u1/volumes/kubernetes.io~csi/scratch/mount"#]]);
}

/// The node authorizer allows reading single secrets that volumes of the node's own pods reference.
#[tokio::test]
async fn node_reads_only_secrets_of_volumes_of_its_pods() {
    let cluster = TestCluster::start_as(Some("system:node:here")).await;
    let fake = FakeDriver::start(&cluster.root());
    let spec = json!({"attachRequired": false});
    cluster.create::<CSIDriver>(json!({"metadata": {"name": "disk.example.com"}, "spec": spec})).await;
    cluster.register_driver().await;
    for (namespace, name) in [("kube-system", "stage"), ("default", "publish"), ("default", "unused")] {
        let metadata = json!({"name": name, "namespace": namespace});
        cluster
            .create::<Secret>(json!({"metadata": metadata, "stringData": {"key": format!("{name}-word")}}))
            .await;
    }
    let mut volume = persistent();
    volume["spec"]["claimRef"] = json!({"namespace": "default", "name": "c"});
    let csi = &mut volume["spec"]["csi"];
    csi["nodeStageSecretRef"] = json!({"namespace": "kube-system", "name": "stage"});
    csi["nodePublishSecretRef"] = json!({"namespace": "default", "name": "publish"});
    let volume: PersistentVolume = cluster.create(volume).await;
    let volume_spec = CsiVolumeSpec::persistent("data", &volume, false).expect("a driver's volume");
    let sources = CachedSources { ctx: &cluster.ctx, node_name: "here" };
    let mount_context = cluster.mount_context(&sources);
    let read = async |namespace: &str, name: &str| {
        crate::volumes::secret_data(&mount_context, namespace, name).await.map_err(|why| {
            let expected =
                format!("secrets {name:?} is forbidden: User \"system:node:here\" cannot get resource");
            assert!(why.contains(&expected), "{why}");
        })
    };
    // No pod of this node uses the volume yet.
    assert_eq!(read("kube-system", "stage").await, Err(()));
    cluster.create::<ServiceAccount>(json!({"metadata": {"name": "default", "namespace": "default"}})).await;
    let claim = json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}});
    let pod: Pod = cluster
        .create(json!({
            "metadata": {"name": "web", "namespace": "default"},
            "spec": {
                "nodeName": "here", "volumes": [claim], "automountServiceAccountToken": false,
                "containers": [{"name": "c", "image": "i"}],
            },
        }))
        .await;
    cluster.until("the node may read them", async || read("kube-system", "stage").await.ok()).await;
    assert_eq!(read("default", "unused").await, Err(()));
    fake.calls.0.lock().clear();
    cluster.set_up(&pod, &volume_spec).await.expect("published");
    let uid = pod.metadata.uid.as_deref().expect("a uid");
    fake.calls.0.lock().iter_mut().for_each(|line| *line = line.replace(uid, "u1"));
    fake.check(expect![[r#"
        stage vol-1 at globalmount mode 1 context {} with {"key": "stage-word"}
        publish vol-1 at /pods/u1/volumes/kubernetes.io~csi/pv-1/mount read-only false for {} with {"key": "publish-word"}"#]]);
    volume::tear_down(&cluster.drivers, &cluster.settings, uid).await.expect("gone");
}

#[tokio::test]
async fn persistent_volume_is_staged_published_and_expanded() {
    let cluster = TestCluster::start().await;
    let fake = FakeDriver::start(&cluster.root());
    cluster.register_driver().await;
    fake.calls.0.lock().clear();
    let (one, two) = (pod("u1"), pod("u2"));
    let volume: PersistentVolume = cluster.create(persistent()).await;
    let volume_spec = CsiVolumeSpec::persistent("data", &volume, false).expect("a driver's volume");
    // The volume is reported in use first. Then it must be attached.
    assert!(matches!(cluster.set_up(&one, &volume_spec).await, Err(SetUpError::Waiting)));
    let name = "kubernetes.io/csi/disk.example.com^vol-1".to_owned();
    assert_eq!(cluster.drivers.in_use().join(" "), name);
    let attachment = record::attachment_name("vol-1", "disk.example.com", "here");
    let spec = json!({"attacher": "disk.example.com", "nodeName": "here", "source": {"persistentVolumeName": "pv-1"}});
    let attachment: VolumeAttachment =
        cluster.create(json!({"metadata": {"name": attachment}, "spec": spec})).await;
    let done = json!({"status": {"attached": true, "attachmentMetadata": {"device": "sdb"}}});
    let key = Key::new("", attachment.metadata.name.as_deref().expect("a name"));
    cluster
        .client
        .patch_status::<VolumeAttachment>(&key, &reconcile::Patch::Merge(done))
        .await
        .expect("sent");
    let status_patch = json!({"status": {
        "volumesInUse": [name], "volumesAttached": [{"name": name, "devicePath": ""}],
    }});
    let here = Key::new("", "here");
    cluster.client.patch_status::<Node>(&here, &reconcile::Patch::Merge(status_patch)).await.expect("sent");
    cluster
        .until("it is seen", async || {
            cluster.ctx.caches.nodes().get(&here)?.status.as_ref()?.volumes_attached.clone()
        })
        .await;
    fake.calls.0.lock().clear();
    let ready = cluster.set_up(&one, &volume_spec).await.expect("published");
    assert!(ready.apply_fs_group, "the kubelet applies fsGroup by default");
    cluster.set_up(&two, &volume_spec).await.expect("published");
    // The volume was expanded on the controller side.
    let claim = json!({
        "metadata": {"name": "c", "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "volumeName": "pv-1"},
    });
    let claim: PersistentVolumeClaim = cluster.create(claim).await;
    let small = json!({"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}});
    let key = Key::new("default", "c");
    let claim_status = cluster.client.patch_status(&key, &reconcile::Patch::Merge(small)).await;
    let claim: PersistentVolumeClaim = claim_status.unwrap_or(claim);
    let sources = CachedSources { ctx: &cluster.ctx, node_name: "here" };
    let mount_context = cluster.mount_context(&sources);
    assert!(volume::expand(&mount_context, &one, &volume_spec, &volume, &claim).await.expect("grown"));
    let claim: PersistentVolumeClaim = cluster.client.get(&key).await.expect("a claim");
    assert!(!volume::expand(&mount_context, &one, &volume_spec, &volume, &claim).await.expect("as it was"));
    let stats = volume::stats(&cluster.drivers, &cluster.settings, "u1").await;
    assert_eq!(stats["data"][0].used, 2);
    // A restarted kubelet restores the volumes in use.
    let after = Drivers::open(&cluster.root());
    assert_eq!(after.in_use(), [name]);
    // Two that remove a pod's volumes at the same time unpublish each of them once.
    let removal = || volume::tear_down(&cluster.drivers, &cluster.settings, "u1");
    let (first, second) = tokio::join!(removal(), removal());
    first.and(second).expect("gone");
    volume::tear_down(&cluster.drivers, &cluster.settings, "u2").await.expect("gone");
    assert!(cluster.drivers.in_use().is_empty());
    fake.check(expect![[r#"
        stage vol-1 at globalmount mode 1 context {"device": "sdb"}
        publish vol-1 at /pods/u1/volumes/kubernetes.io~csi/pv-1/mount read-only false for {}
        stage vol-1 at globalmount mode 1 context {"device": "sdb"}
        publish vol-1 at /pods/u2/volumes/kubernetes.io~csi/pv-1/mount read-only false for {}
        expand vol-1 to 2147483648
        stats
        unpublish /pods/u1/volumes/kubernetes.io~csi/pv-1/mount
        unpublish /pods/u2/volumes/kubernetes.io~csi/pv-1/mount
        unstage vol-1"#]]);
}

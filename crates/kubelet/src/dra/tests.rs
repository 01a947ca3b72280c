//! Tests with a fake DRA driver in this process, which records its calls.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use expect_test::{Expect, expect};
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use prost::Message;
use serde_json::{Value, json};
use tokio::net::UnixListener;

use super::messages::{
    Device, DeviceHealth, DeviceName, NodePrepareResourceResponse, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesResponse, NodeWatchResourcesResponse,
};
use super::*;
use crate::csi::tests::TestCluster;
use crate::plugins::{self, PluginHandlers, PluginRegistrationInfo, RegistrationStatus};

const DEADLINE: Duration = Duration::from_secs(60);
const DRIVER: &str = "gpu.example.com";

type Body = http_body_util::combinators::BoxBody<Bytes, Infallible>;

/// The recorded calls, one line each.
type CallLog = Arc<Mutex<Vec<String>>>;

/// A fake driver at a socket in the plugin registry until it is dropped.
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
    fn start(root: &Path, versions: &[&str]) -> FakeDriver {
        let dir = root.join("plugins_registry");
        std::fs::create_dir_all(&dir).expect("a directory");
        let socket = dir.join(format!("{DRIVER}-reg.sock"));
        let listener = UnixListener::bind(&socket).expect("a socket");
        let calls = CallLog::default();
        let call_log = calls.clone();
        let info = PluginRegistrationInfo {
            kind: "DRAPlugin".into(),
            name: DRIVER.into(),
            endpoint: String::new(),
            supported_versions: versions.iter().map(|version| (*version).to_owned()).collect(),
        };
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (call_log, info) = (call_log.clone(), info.clone());
                let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                    let (call_log, info) = (call_log.clone(), info.clone());
                    async move { Ok::<_, Infallible>(serve(request, &call_log, &info).await) }
                });
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                connections.spawn(connection);
            }
        });
        FakeDriver { task, socket, calls }
    }

    /// Compares and clears the recorded calls.
    #[track_caller]
    fn check(&self, expected: Expect) {
        let calls: Vec<String> = std::mem::take(&mut self.calls.lock());
        expected.assert_eq(&calls.join("\n"));
    }
}

async fn serve(
    request: Request<Incoming>,
    call_log: &CallLog,
    info: &PluginRegistrationInfo,
) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let bytes = request.into_body().collect().await.expect("a whole request").to_bytes().slice(5..);
    let (line, answer) = answer(&path, bytes, info);
    call_log.lock().extend(line);
    let status = if answer.is_some() { "0" } else { "12" };
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static(status));
    let mut frames = Vec::new();
    if let Some(message) = answer {
        let mut framed = vec![0];
        framed.extend(u32::try_from(message.len()).expect("short").to_be_bytes());
        framed.extend(message);
        frames.push(Ok(Frame::data(Bytes::from(framed))));
    }
    let frames = futures_util::stream::iter(frames);
    let rest = futures_util::stream::iter([Ok(Frame::trailers(trailers))]);
    let body = match path.ends_with("NodeWatchResources") {
        true => BodyExt::boxed(StreamBody::new(frames.chain(futures_util::stream::pending()))),
        false => BodyExt::boxed(StreamBody::new(frames.chain(rest))),
    };
    let mut response = Response::new(body);
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// The log line for a call, and its response.
fn answer(path: &str, bytes: Bytes, info: &PluginRegistrationInfo) -> (Option<String>, Option<Vec<u8>>) {
    let decode_claims =
        |bytes: Bytes| super::messages::NodeResourcesRequest::decode(bytes).expect("a message").claims;
    let names = |claims: &[messages::Claim]| {
        claims.iter().map(|claim| format!(" {}/{}", claim.namespace, claim.name)).collect::<String>()
    };
    let version = if path.contains(".v1.") { "v1" } else { "v1beta1" };
    match path.rsplit('/').next().unwrap_or_default() {
        "GetInfo" => (None, Some(info.encode_to_vec())),
        "NotifyRegistrationStatus" => {
            let status = RegistrationStatus::decode(bytes).expect("a message");
            (Some(format!("registered {} {}", status.plugin_registered, status.error)), Some(Vec::new()))
        }
        "NodePrepareResources" => {
            let claims = decode_claims(bytes);
            let prepared = |claim: &messages::Claim| {
                let device = Device {
                    request_names: vec!["one".into()],
                    pool_name: "here".into(),
                    device_name: format!("gpu-{}", claim.name),
                    cdi_device_ids: vec![format!("example.com/gpu={}", claim.name)],
                    share_id: None,
                };
                let error = if claim.name == "broken" { "it is broken" } else { "" };
                (
                    claim.uid.clone(),
                    NodePrepareResourceResponse { devices: vec![device], error: error.into() },
                )
            };
            let answer = NodePrepareResourcesResponse { claims: claims.iter().map(prepared).collect() };
            (Some(format!("prepare {version}{}", names(&claims))), Some(answer.encode_to_vec()))
        }
        "NodeUnprepareResources" => {
            let claims = decode_claims(bytes);
            let done =
                claims.iter().map(|claim| (claim.uid.clone(), NodeUnprepareResourceResponse::default()));
            let answer = NodeUnprepareResourcesResponse { claims: done.collect() };
            (Some(format!("unprepare {version}{}", names(&claims))), Some(answer.encode_to_vec()))
        }
        "NodeWatchResources" => {
            let device = DeviceName { pool: "here".into(), name: "gpu-mine".into() };
            let unhealthy = DeviceHealth {
                device: Some(device),
                health: 2,
                timeout_seconds: 600,
                message: "too hot".into(),
            };
            (None, Some(NodeWatchResourcesResponse { devices: vec![unhealthy] }.encode_to_vec()))
        }
        _ => (None, None),
    }
}

/// A pod with a shared claim and one from a template.
fn pod(name: &str, shared: &str) -> Pod {
    let own = format!("{name}-own");
    let value = json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {
            "resourceClaims": [
                {"name": "shared", "resourceClaimName": shared},
                {"name": "own", "resourceClaimTemplateName": "template"},
                {"name": "none", "resourceClaimTemplateName": "template"},
            ],
            "containers": [
                {"name": "a", "resources": {"claims": [{"name": "shared", "request": "one"}, {"name": "own"}]}},
                {"name": "b", "resources": {"claims": [{"name": "shared", "request": "two"}]}},
                {"name": "c"},
            ],
        },
        "status": {"resourceClaimStatuses": [{"name": "own", "resourceClaimName": own}, {"name": "none"}]},
    });
    serde_json::from_value(value).expect("a pod")
}

impl TestCluster {
    /// An allocated claim that is reserved for these pods.
    async fn claim(&self, name: &str, pods: &[&str], owner: Option<&str>) {
        let owner = owner.map(|pod| {
            json!([{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": format!("uid-{pod}"), "controller": true}])
        });
        let request = json!({"name": "one", "exactly": {"deviceClassName": "gpu"}});
        let claim: ResourceClaim = self
            .create(json!({
                "metadata": {"name": name, "namespace": "default", "ownerReferences": owner},
                "spec": {"devices": {"requests": [request]}},
            }))
            .await;
        let reserved =
            pods.iter().map(|pod| json!({"resource": "pods", "name": pod, "uid": format!("uid-{pod}")}));
        let result = json!({"request": "one", "driver": DRIVER, "pool": "here", "device": "gpu-1"});
        let status = json!({
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": reserved.collect::<Vec<Value>>(),
        });
        let status = Some(serde_json::from_value(status).expect("a status"));
        self.client.replace_status(&ResourceClaim { status, ..claim }).await.expect("given");
    }

    /// Runs the plugin watcher until the check returns a value.
    async fn with_plugins<T>(&self, dra: &Dra, what: &str, check: impl AsyncFn() -> Option<T>) -> T {
        let checking = async {
            loop {
                if let Some(found) = check().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let csi = crate::csi::Drivers::default();
        let hosts = PluginHandlers { csi: &csi, dra: &dra.drivers };
        tokio::select! {
            found = checking => found,
            () = plugins::run(&self.ctx, &self.settings, hosts, || {}) => unreachable!("runs forever"),
            () = run(&self.ctx, "here", &dra.drivers, || {}) => unreachable!("runs forever"),
            () = tokio::time::sleep(DEADLINE) => panic!("timed out waiting until: {what}"),
        }
    }

    /// The state after a start, with the driver registered.
    async fn open_with_driver(&self, fake: &FakeDriver) -> Dra {
        let dra = Dra::open(&self.settings.root);
        // The notification comes last, after the registration.
        let is_registered = || fake.calls.lock().iter().any(|line| line.starts_with("registered"));
        let is_known = async || dra.drivers.find(DRIVER).ok().filter(|_| is_registered());
        self.with_plugins(&dra, "the driver is known", is_known).await;
        dra
    }
}

fn devices(dra: &Dra, pod: &Pod) -> String {
    let containers = &pod.spec.as_ref().expect("a spec").containers;
    let of = |container: &Container| {
        let devices = dra.devices(pod, container).expect("devices");
        let names: Vec<String> = devices.into_iter().map(|device| device.name).collect();
        format!("{}: {}", container.name, names.join(" "))
    };
    containers.iter().map(of).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn claims_are_prepared_before_pod_start_and_unprepared_after_it() {
    let cluster = TestCluster::start().await;
    let fake = FakeDriver::start(&cluster.settings.root, &["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    let dra = cluster.open_with_driver(&fake).await;
    cluster.claim("mine", &["web", "db"], None).await;
    cluster.claim("web-own", &["web"], Some("web")).await;
    cluster.claim("db-own", &["db"], Some("db")).await;
    let (web, db) = (pod("web", "mine"), pod("db", "mine"));
    dra.prepare(&cluster.ctx, &web).await.expect("ready");
    // Preparing again is a no-op.
    dra.prepare(&cluster.ctx, &web).await.expect("ready");
    fake.check(expect![[r#"
        registered true 
        prepare v1 default/mine default/web-own"#]]);
    expect![[r#"
        a: example.com/gpu=mine example.com/gpu=web-own
        b: 
        c: "#]]
    .assert_eq(&devices(&dra, &web));
    dra.prepare(&cluster.ctx, &db).await.expect("ready");
    fake.check(expect!["prepare v1 default/db-own"]);
    expect![[r#"{"<any>": 3, "gpu.example.com": 3}"#]].assert_eq(&format!("{:?}", dra.in_use()));
    // Another pod still uses the shared claim.
    dra.unprepare("uid-web").await.expect("given back");
    fake.check(expect!["unprepare v1 default/web-own"]);
    assert!(!dra.has_claims("uid-web") && dra.has_claims("uid-db"));
    // A restarted kubelet restores claims and devices from the checkpoint.
    let again = Dra::open(&cluster.settings.root);
    expect![[r#"
        a: example.com/gpu=mine example.com/gpu=db-own
        b: 
        c: "#]]
    .assert_eq(&devices(&again, &db));
    let error = again.unprepare("uid-db").await.expect_err("no driver is registered");
    expect!["unprepare dynamic resources: DRA driver gpu.example.com is not registered"].assert_eq(&error);
    drop((dra, again));
    let dra = cluster.open_with_driver(&fake).await;
    fake.check(expect!["registered true "]);
    // The pod does not exist in the API.
    tokio::select! {
        () = dra.unprepare_orphaned_claims(&cluster.ctx, "here") => unreachable!("runs forever"),
        () = async { while dra.has_claims("uid-db") { tokio::task::yield_now().await } } => {}
    }
    fake.check(expect!["unprepare v1 default/db-own default/mine"]);
    assert!(ClaimInfoCache::open(&cluster.settings.root).all().next().is_none());
}

#[tokio::test]
async fn prepare_errors_match_upstream() {
    let cluster = TestCluster::start().await;
    let dra = Dra::open(&cluster.settings.root);
    let check = async |dra: &Dra, pod: &Pod, expected: Expect| {
        let error = dra.prepare(&cluster.ctx, pod).await.expect_err("something is wrong");
        expected.assert_eq(&error);
    };
    let web = pod("web", "mine");
    check(&dra, &web, expect![[r#"prepare dynamic resources: fetch ResourceClaim mine: resourceclaims.resource.k8s.io "mine" not found"#]]).await;
    cluster.claim("mine", &["web"], None).await;
    check(&dra, &web, expect!["prepare dynamic resources: DRA driver gpu.example.com is not registered"])
        .await;
    assert!(!dra.has_claims("uid-web"), "a claim that no driver was called for is not recorded");
    let mut early = web.clone();
    early.status = None;
    check(
        &dra,
        &early,
        expect![[r#"prepare dynamic resources: pod "default/web": ResourceClaim not created yet"#]],
    )
    .await;
    cluster.claim("web-own", &["web"], Some("db")).await;
    cluster.claim("broken", &["bad"], None).await;
    cluster.claim("bad-own", &["bad"], Some("bad")).await;
    let fake = FakeDriver::start(&cluster.settings.root, &["v9.DRAPlugin", "v1beta1.DRAPlugin"]);
    let dra = cluster.open_with_driver(&fake).await;
    check(&dra, &web, expect!["prepare dynamic resources: ResourceClaim default/web-own was not created for Pod default/web (Pod is not owner)"]).await;
    let bad = pod("bad", "broken");
    check(
        &dra,
        &bad,
        expect![
            "prepare dynamic resources: NodePrepareResources failed for ResourceClaim broken: it is broken"
        ],
    )
    .await;
    assert!(dra.has_claims("uid-bad"), "a claim with a failed call stays recorded");
    dra.unprepare("uid-bad").await.expect("given back");
    fake.check(expect![[r#"
        registered true 
        prepare v1beta1 default/broken default/bad-own
        unprepare v1beta1 default/bad-own default/broken"#]]);
    let db = pod("db", "mine");
    let claim: ResourceClaim = cluster.client.get(&Key::new("default", "mine")).await.expect("a claim");
    let error = dra.prepare(&cluster.ctx, &db).await.expect_err("not its own");
    let expected = format!(
        "prepare dynamic resources: pod db (uid-db) is not allowed to use ResourceClaim mine ({})",
        claim.uid()
    );
    assert_eq!(error, expected);
}

#[tokio::test]
async fn driver_with_unsupported_versions_is_rejected() {
    let cluster = TestCluster::start().await;
    let fake = FakeDriver::start(&cluster.settings.root, &["v1alpha4.Node"]);
    let dra = Dra::open(&cluster.settings.root);
    cluster
        .with_plugins(&dra, "the driver is notified", async || (!fake.calls.lock().is_empty()).then_some(()))
        .await;
    let call = fake.calls.lock().join("\n").replace(&cluster.settings.root.display().to_string(), "");
    expect![[r#"registered false invalid supported gRPC versions of DRA driver plugin gpu.example.com at endpoint /plugins_registry/gpu.example.com-reg.sock: none of services supported by the plugin (["v1alpha4.Node"]) are supported by the kubelet (["v1.DRAPlugin" "v1beta1.DRAPlugin"])"#]].assert_eq(&call);
}

#[tokio::test]
async fn resource_slices_are_deleted_without_driver() {
    let cluster = TestCluster::start().await;
    cluster.ctx.caches.nodes().wait_for_sync().await;
    cluster.create::<Node>(json!({"metadata": {"name": "here"}})).await;
    let slice = |name: &str, node: &str| {
        let pool = json!({"name": node, "generation": 1, "resourceSliceCount": 1});
        let spec = json!({"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [{"name": "gpu-1"}]});
        json!({"metadata": {"name": name}, "spec": spec})
    };
    cluster.create::<ResourceSlice>(slice("left-behind", "here")).await;
    cluster.create::<ResourceSlice>(slice("elsewhere", "there")).await;
    let slices = async || {
        let slices: Vec<ResourceSlice> = cluster.client.list("").await.expect("slices");
        slices.iter().map(|slice| slice.name().to_owned()).collect::<Vec<_>>().join(" ")
    };
    let mut dra = Dra::open(&cluster.settings.root);
    dra.drivers.slice_grace_period = Duration::from_millis(200);
    // At startup no driver is connected.
    cluster
        .with_plugins(&dra, "the old slices are deleted", async || {
            (slices().await == "elsewhere").then_some(())
        })
        .await;
    let fake = FakeDriver::start(&cluster.settings.root, &["v1.DRAPlugin"]);
    let mut fake = Some(fake);
    let step = std::cell::Cell::new(0);
    let fake = Mutex::new(&mut fake);
    cluster
        .with_plugins(&dra, "the slices of the driver are deleted", async || {
            match step.get() {
                0 if dra.drivers.find(DRIVER).is_ok() && slices().await == "elsewhere" => {
                    cluster.create::<ResourceSlice>(slice("offered", "here")).await;
                    step.set(1);
                }
                1 => {
                    fake.lock().take();
                    step.set(2);
                }
                2 if slices().await == "elsewhere" => return Some(()),
                _ => {}
            }
            None
        })
        .await;
    assert!(dra.drivers.find(DRIVER).is_err());
}

#[tokio::test]
async fn device_health_is_reported_in_pod_status() {
    let cluster = TestCluster::start().await;
    let _fake = FakeDriver::start(&cluster.settings.root, &["v1.DRAPlugin"]);
    let dra = Dra::open(&cluster.settings.root);
    cluster.claim("mine", &["web"], None).await;
    cluster.claim("web-own", &["web"], Some("web")).await;
    let web = pod("web", "mine");
    let report = || {
        let status = |name: &str| ContainerStatus { name: name.to_owned(), ..ContainerStatus::default() };
        let mut statuses = ["a", "b", "c"].map(status);
        dra.update_device_health(&web, &mut statuses, cluster.ctx.clock.now());
        statuses.map(|status| json!(status.allocated_resources_status).to_string()).join("\n")
    };
    let reports_unhealthy = async || {
        dra.prepare(&cluster.ctx, &web).await.ok()?;
        Some(report()).filter(|text| text.contains("hot"))
    };
    let output = cluster.with_plugins(&dra, "the driver reports device health", reports_unhealthy).await;
    expect![[r#"
        [{"name":"claim:shared/one","resources":[{"health":"Unhealthy","message":"too hot","resourceID":"example.com/gpu=mine"}]},{"name":"claim:own","resources":[{"health":"Unknown","resourceID":"example.com/gpu=web-own"}]}]
        null
        null"#]]
    .assert_eq(&output);
}

#[test]
fn checkpoint_format_matches_upstream() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut claim_cache = ClaimInfoCache::open(dir.path());
    let device = Device {
        request_names: vec!["one".into()],
        pool_name: "pool".into(),
        device_name: "gpu-1".into(),
        cdi_device_ids: vec!["example.com/gpu=1".into()],
        share_id: None,
    };
    let claim = record::ClaimInfo {
        uid: "1".into(),
        name: "mine".into(),
        namespace: "default".into(),
        pods: ["a".to_owned()].into(),
        drivers: [(DRIVER.to_owned(), vec![device])].into(),
        is_ready: false,
    };
    claim_cache.get_or_insert(&claim);
    claim_cache.sync_to_checkpoint().expect("written");
    let file = dir.path().join("dra_manager_state");
    let text = std::fs::read_to_string(&file).expect("text");
    expect![[r#"{"Checksum":2019359365,"Data":"{\"ClaimInfoStateList\":[{\"ClaimName\":\"mine\",\"ClaimUID\":\"1\",\"DriverState\":{\"gpu.example.com\":{\"Devices\":[{\"CDIDeviceIDs\":[\"example.com/gpu=1\"],\"DeviceName\":\"gpu-1\",\"PoolName\":\"pool\",\"RequestNames\":[\"one\"],\"ShareID\":null}]}},\"Namespace\":\"default\",\"PodUIDs\":{\"a\":{}}}],\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",\"kind\":\"DRACheckpoint\"}"}"#]].assert_eq(&text);
    assert_eq!(ClaimInfoCache::open(dir.path()).all().collect::<Vec<_>>(), [&claim]);
    std::fs::write(&file, text.replace("gpu-1", "gpu-2")).expect("written");
    assert_eq!(
        ClaimInfoCache::open(dir.path()).all().count(),
        0,
        "a checkpoint with a wrong checksum is rejected"
    );
}

//! Dynamic resource allocation as users and drivers see it: a driver on its socket, the real kubectl, a
//! real container.
//!
//! Needs root, kubectl and busybox; skipped otherwise.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use prost::Message;
use serde_json::json;
use testkit::{Network, Server};
use tokio::net::UnixListener;

const IMAGE: &str = "docker.io/library/busybox:1.36";

/// Messages of the protocols, with the fields that a driver needs.
#[derive(Clone, PartialEq, prost::Message)]
struct PluginInfo {
    #[prost(string, tag = 1)]
    kind: String,
    #[prost(string, tag = 2)]
    name: String,
    #[prost(string, repeated, tag = 4)]
    versions: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ClaimList {
    #[prost(message, repeated, tag = 1)]
    claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Claim {
    #[prost(string, tag = 2)]
    uid: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ClaimResponses {
    #[prost(btree_map = "string, message", tag = 1)]
    claims: BTreeMap<String, ClaimResponse>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ClaimResponse {
    #[prost(message, repeated, tag = 1)]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Device {
    #[prost(string, tag = 2)]
    pool: String,
    #[prost(string, tag = 3)]
    name: String,
    #[prost(string, repeated, tag = 4)]
    cdi: Vec<String>,
}

/// A driver whose devices are an environment variable and a device node that maps to `/dev/null`.
struct Driver {
    name: String,
    /// The calls so far, one word each.
    calls: Mutex<Vec<&'static str>>,
}

impl Driver {
    /// The CDI specification that describes the device to the runtime.
    fn cdi_file(&self) -> PathBuf {
        Path::new("/var/run/cdi").join(format!("{}.json", self.name))
    }

    fn calls(&self) -> String {
        self.calls.lock().join(" ")
    }

    fn prepare(&self, claim: &Claim) -> ClaimResponse {
        let container_edit = json!({
            "env": [format!("DEVICE={}", self.name)],
            "deviceNodes": [{"path": "/dev/nothing", "hostPath": "/dev/null"}],
        });
        let devices = json!([{"name": claim.uid, "containerEdits": container_edit}]);
        let kind = format!("{}/device", self.name);
        let file = json!({"cdiVersion": "0.6.0", "kind": kind, "devices": devices});
        std::fs::create_dir_all("/var/run/cdi").expect("a directory");
        std::fs::write(self.cdi_file(), file.to_string()).expect("written");
        let cdi = vec![format!("{kind}={}", claim.uid)];
        ClaimResponse { devices: vec![Device { pool: "here".into(), name: "nothing".into(), cdi }] }
    }

    /// `None` for an unknown method.
    fn handle(&self, path: &str, bytes: Bytes) -> Option<Vec<u8>> {
        let claims = |bytes| ClaimList::decode(bytes).expect("a message").claims;
        Some(match path.rsplit('/').next()? {
            "GetInfo" => {
                let versions = vec!["v1.DRAPlugin".to_owned()];
                PluginInfo { kind: "DRAPlugin".into(), name: self.name.clone(), versions }.encode_to_vec()
            }
            "NotifyRegistrationStatus" => {
                self.calls.lock().push("registered");
                Vec::new()
            }
            "NodePrepareResources" => {
                self.calls.lock().push("prepare");
                let responses =
                    claims(bytes).into_iter().map(|claim| (claim.uid.clone(), self.prepare(&claim)));
                ClaimResponses { claims: responses.collect() }.encode_to_vec()
            }
            "NodeUnprepareResources" => {
                self.calls.lock().push("unprepare");
                let _ = std::fs::remove_file(self.cdi_file());
                let responses = claims(bytes).into_iter().map(|claim| (claim.uid, ClaimResponse::default()));
                ClaimResponses { claims: responses.collect() }.encode_to_vec()
            }
            _ => return None,
        })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.cdi_file());
    }
}

/// Serves gRPC calls on a socket for the duration of the test.
async fn serve(driver: Arc<Driver>, socket: PathBuf) {
    let listener = UnixListener::bind(socket).expect("a socket");
    while let Ok((stream, _)) = listener.accept().await {
        let driver = driver.clone();
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            let driver = driver.clone();
            async move {
                let path = request.uri().path().to_owned();
                let bytes = request.into_body().collect().await.expect("a whole request").to_bytes();
                let answer = driver.handle(&path, bytes.slice(5..));
                let status = if answer.is_some() { "0" } else { "12" };
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static(status));
                let framed = answer.map(|message| {
                    let mut framed = vec![0];
                    framed.extend(u32::try_from(message.len()).expect("short").to_be_bytes());
                    framed.extend(message);
                    Frame::data(Bytes::from(framed))
                });
                let frames: Vec<Result<_, Infallible>> =
                    framed.into_iter().chain([Frame::trailers(trailers)]).map(Ok).collect();
                let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)));
                let kind = HeaderValue::from_static("application/grpc");
                response.headers_mut().insert("content-type", kind);
                Ok::<_, Infallible>(response)
            }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(connection);
    }
}

#[test]
fn device_is_prepared_and_unprepared_with_its_pod() {
    if !testkit::can_run_pods(&["busybox"]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let network = Network::new().expect("a network");
    let mut server = Server::start_with_pods(&network, &["--controllers=*", "--node-name=here"]);
    let archive = testkit::busybox_image(dir.path(), IMAGE).expect("an image").display().to_string();
    let data = server.data_dir().display().to_string();
    server.skiff(&["image", "import", "--data-dir", &data, &archive]).ok();
    server.wait_for_default_service_account();
    // Other tests on this machine use drivers of their own.
    let name = format!("d{}.example.com", std::process::id());
    let driver = Arc::new(Driver { name: name.clone(), calls: Mutex::default() });
    let sockets = server.data_dir().join("agent/kubelet/plugins_registry");
    std::fs::create_dir_all(&sockets).expect("a directory");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    // The pod is created first and waits for everything else.
    let request = json!({"name": "one", "exactly": {"deviceClassName": "device"}});
    let template = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "device"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    });
    let script = "echo $DEVICE; cat /dev/nothing && echo gone > /dev/nothing && stat -c %F /dev/nothing; exec sleep 100000";
    let main = json!({
        "name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script],
        "resources": {"claims": [{"name": "device"}]},
    });
    let other = json!({"name": "other", "image": "busybox:1.36", "command": ["sh", "-c", "echo ${DEVICE:-nothing}; exec sleep 100000"]});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "user"},
        "spec": {
            "terminationGracePeriodSeconds": 1, "containers": [main, other],
            "resourceClaims": [{"name": "device", "resourceClaimTemplateName": "device"}],
        },
    });
    server.kubectl_with(&["create", "-f", "-"], &pod.to_string()).ok();
    server.kubectl_with(&["create", "-f", "-"], &template.to_string()).ok();
    let class = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "device"},
        "spec": {"selectors": [{"cel": {"expression": format!("device.driver == '{name}'")}}]},
    });
    server.kubectl_with(&["create", "-f", "-"], &class.to_string()).ok();
    runtime.spawn(serve(driver.clone(), sockets.join("device-reg.sock")));
    server.wait_until("the driver is registered", || driver.calls() == "registered");
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "here-device"},
        "spec": {
            "driver": name, "nodeName": "here", "devices": [{"name": "nothing"}],
            "pool": {"name": "here", "generation": 1, "resourceSliceCount": 1},
        },
    });
    // Drivers publish their ResourceSlices again after the node has removed them, which it does at
    // startup.
    server.wait_until("the pod is scheduled", || {
        server.kubectl_with(&["apply", "-f", "-"], &slice.to_string());
        server.kubectl(&["get", "pod", "user", "-o", "jsonpath={.spec.nodeName}"]).ok() == "here"
    });
    server.wait_for_pod("user", "condition=Ready");
    assert_eq!(driver.calls(), "registered prepare");
    let expected = format!("{name}\ncharacter special file\n");
    server.wait_until("the container can use its device", || {
        server.kubectl(&["logs", "user", "-c", "main"]).ok() == expected
    });
    assert_eq!(server.kubectl(&["logs", "user", "-c", "other"]).ok(), "nothing\n");
    let health = "jsonpath={.status.containerStatuses[0].allocatedResourcesStatus[0].name}";
    assert_eq!(server.kubectl(&["get", "pod", "user", "-o", health]).ok(), "claim:device");
    // The restarted server unprepares the device.
    server.kill9();
    server.restart();
    server.wait_until("the driver is registered again", || driver.calls() == "registered prepare registered");
    server.kubectl(&["delete", "pod", "user", "--wait"]).ok();
    assert_eq!(driver.calls(), "registered prepare registered unprepare");
    assert!(!driver.cdi_file().exists());
    server.wait_until("the claim is gone", || {
        server.kubectl(&["get", "resourceclaims", "-o", "name"]).ok().is_empty()
    });
    let slices = ["get", "resourceslices", "-o", "name"];
    server.wait_until("the ResourceSlices are deleted", || server.kubectl(&slices).ok().is_empty());
}

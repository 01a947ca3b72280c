//! A manifest of every kind, in and out of a real server in every content type: JSON, YAML, protobuf,
//! Table and PartialObjectMetadata; as an object, a list and a watch. Writing the same object again
//! changes nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use api::resource_table::Verbs;
use api::{RESOURCES, Resource};
use schema::protobuf;
use serde_json::{Value, json};
use testkit::{Http, Reply, Server, assert_same};

const JSON: &str = "application/json";
const YAML: &str = "application/yaml";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const THREADS: usize = 4;

#[test]
fn every_kind_in_every_content_type() {
    let server = Server::start();
    let http = server.http();
    for namespace in ["harbor", "boats"] {
        let reply = http.post("/api/v1/namespaces", &json!({"metadata": {"name": namespace}})).unwrap();
        assert_eq!(reply.status, 201, "{}", reply.text());
    }
    let left = Mutex::new(RESOURCES.iter().collect::<Vec<_>>());
    let failed = Mutex::new(Vec::new());
    let work = || {
        let next = || left.lock().unwrap().pop();
        while let Some(row) = next() {
            let case = Case { http: &http, row, manifest: manifest(row) };
            // A failure of one kind does not hide others.
            if catch_unwind(AssertUnwindSafe(|| case.check())).is_err() {
                failed.lock().unwrap().push(row.kind);
            }
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|_| drop(scope.spawn(work)));
    });
    assert_eq!(failed.into_inner().unwrap(), Vec::<&str>::new());
}

struct Case<'a> {
    http: &'a Http,
    row: &'static Resource,
    manifest: Value,
}

impl Case<'_> {
    fn check(&self) {
        match self.row.verbs {
            Verbs::CreateOnly => return self.check_review(),
            Verbs::GetList => return drop(self.ok(self.http.get(&self.all()))),
            Verbs::All | Verbs::NoDeleteCollection => {}
        }
        let created = self.ok(self.send("POST", &self.all(), JSON, &bytes(&self.manifest))).json();
        let json = self.wait_for_status();
        if self.final_status_marker().is_none() {
            self.same("created and got", &created, &json);
        }
        self.check_protobuf(&json);
        self.check_other_formats(&json);
        self.check_writes_without_change(&json);
        self.delete();

        let message = protobuf::to_protobuf(schema::kubernetes(), self.ty(self.kind()), &self.typed());
        let sealed = protobuf::encode_envelope(&self.api_version(), self.kind(), &message);
        self.ok(self.send("POST", &self.all(), PROTOBUF, &sealed));
        self.same(
            "created as protobuf",
            &without_server_fields(self.wait_for_status()),
            &without_server_fields(json),
        );
        self.delete();
    }

    /// The object after the server has written its status.
    fn wait_for_status(&self) -> Value {
        if let Some(marker) = self.final_status_marker() {
            let path =
                format!("{}?watch=1&fieldSelector=metadata.name%3D{}", self.all(), name(&self.manifest));
            let mut watch = self.http.open(&path).unwrap();
            while !watch.next_line().unwrap().unwrap().contains(marker) {}
        }
        self.get(JSON).json()
    }

    /// Text in the last update that the server itself makes to a new object of this kind.
    fn final_status_marker(&self) -> Option<&'static str> {
        match self.kind() {
            "FlowSchema" => Some("\"conditions\":[{"),
            "CustomResourceDefinition" => Some("\"type\":\"Established\""),
            "APIService" => Some("\"type\":\"Available\""),
            _ => None,
        }
    }

    /// Reviews are not stored; for a Binding there is no pod.
    fn check_review(&self) {
        let reply = self.send("POST", &self.all(), JSON, &bytes(&self.manifest));
        let expected = if self.kind() == "Binding" { 404 } else { 201 };
        assert_eq!(reply.status, expected, "{}: {}", self.kind(), reply.text());
    }

    fn check_protobuf(&self, json: &Value) {
        let body = self.get(PROTOBUF).body;
        self.same("as protobuf", &self.open(&body, self.kind()), &without_type_meta(json));

        let list_kind = format!("{}List", self.kind());
        let all = self.ok(self.http.send("GET", &self.all(), &[("accept", PROTOBUF)], b""));
        let list = self.open(&all.body, &list_kind);
        let found = list["items"].as_array().unwrap().iter().find(|item| name(item) == name(json));
        self.same("listed as protobuf", found.unwrap_or(&Value::Null), &without_type_meta(json));

        let accept = format!("{PROTOBUF};stream=watch");
        let path = format!("{}?watch=1&fieldSelector=metadata.name%3D{}", self.all(), name(json));
        let mut watch = self.http.open_with(&path, &[("accept", &accept)]).unwrap();
        assert_eq!(watch.status, 200, "{}: watch", self.kind());
        let frame = watch.next_frame().unwrap().unwrap();
        let expected = protobuf::watch_frame("ADDED", &body);
        assert_eq!(frame, expected, "{}: watched as protobuf", self.kind());
    }

    fn check_other_formats(&self, json: &Value) {
        let yaml: Value = serde_saphyr::from_str(&self.get(YAML).text()).unwrap();
        self.same("as YAML", &yaml, json);
        let text = serde_saphyr::to_string(&self.manifest).unwrap();
        // A dry run, because the object exists under this name: a conflict proves that the body was
        // decoded.
        let reply = self.send("POST", &format!("{}?dryRun=All", self.all()), YAML, text.as_bytes());
        assert_eq!(reply.status, 409, "{}: YAML: {}", self.kind(), reply.text());

        let partial = self.get("application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io").json();
        self.same("its metadata", &partial["metadata"], &json["metadata"]);
        assert_eq!(partial["kind"], "PartialObjectMetadata", "{}", self.kind());
        assert_eq!(partial["spec"], Value::Null, "{}", self.kind());

        let table = self.get("application/json;as=Table;v=v1;g=meta.k8s.io").json();
        let columns = table["columnDefinitions"].as_array().map(Vec::len);
        assert_eq!(table["rows"][0]["cells"].as_array().map(Vec::len), columns, "{}: {table}", self.kind());
        assert_eq!(table["rows"][0]["object"]["metadata"]["name"], json["metadata"]["name"]);
    }

    fn check_writes_without_change(&self, json: &Value) {
        let same = self.ok(self.send("PUT", &self.one(), JSON, &bytes(json))).json();
        self.same("updated without a change", &same, json);
        let path = format!("{}?fieldManager=wire&force=true", self.one());
        let apply = || {
            let reply = self.send("PATCH", &path, "application/apply-patch+yaml", &bytes(&self.manifest));
            self.ok(reply).json()
        };
        let (first, second) = (apply(), apply());
        self.same("applied twice", &first, &second);
    }

    /// Deletes the object, removes its finalizers, and waits until it is gone.
    fn delete(&self) {
        let path = format!("{}?watch=1&fieldSelector=metadata.name%3D{}", self.all(), name(&self.manifest));
        let mut watch = self.http.open(&path).unwrap();
        let reply = self.send("DELETE", &self.one(), JSON, b"{\"gracePeriodSeconds\":0}");
        assert!(matches!(reply.status, 200 | 202), "{}: {}", self.kind(), reply.text());
        if reply.json()["metadata"]["finalizers"].is_array() {
            let none = b"{\"metadata\":{\"finalizers\":null}}";
            let reply = self.send("PATCH", &self.one(), "application/merge-patch+json", none);
            // The owner of the finalizer may have removed it already.
            assert!(matches!(reply.status, 200 | 404), "{}: {}", self.kind(), reply.text());
        }
        while !watch.next_line().unwrap().unwrap().contains("\"type\":\"DELETED\"") {}
        assert_eq!(self.http.get(&self.one()).unwrap().status, 404, "{}", self.kind());
    }

    #[track_caller]
    fn same(&self, what: &str, left: &Value, right: &Value) {
        assert_same(&format!("{}, {what}", self.kind()), left, right);
    }

    #[track_caller]
    fn get(&self, accept: &str) -> Reply {
        self.ok(self.http.send("GET", &self.one(), &[("accept", accept)], b""))
    }

    #[track_caller]
    fn send(&self, method: &str, path: &str, content_type: &str, body: &[u8]) -> Reply {
        let headers = [("content-type", content_type), ("accept", JSON)];
        self.http.send(method, path, &headers, body).unwrap()
    }

    #[track_caller]
    fn ok(&self, reply: impl Into<Answer>) -> Reply {
        let Answer(reply) = reply.into();
        assert!(matches!(reply.status, 200 | 201), "{}: {} {}", self.kind(), reply.status, reply.text());
        reply
    }

    /// The object in a protobuf body, which must be of this kind.
    #[track_caller]
    fn open(&self, body: &[u8], kind: &str) -> Value {
        let envelope = protobuf::decode_envelope(body).unwrap();
        assert_eq!((envelope.api_version, envelope.kind), (self.api_version().as_str(), kind));
        protobuf::from_protobuf(schema::kubernetes(), self.ty(kind), envelope.raw).unwrap()
    }

    fn typed(&self) -> Value {
        schema::from_json(schema::kubernetes(), self.ty(self.kind()), &bytes(&self.manifest)).unwrap().value
    }

    fn ty(&self, kind: &str) -> schema::TypeId {
        schema::kubernetes().type_by_kind(self.row.group, self.row.version, kind).unwrap()
    }

    fn kind(&self) -> &'static str {
        self.row.kind
    }

    fn api_version(&self) -> String {
        let Resource { group, version, .. } = self.row;
        if group.is_empty() { (*version).to_owned() } else { format!("{group}/{version}") }
    }

    fn all(&self) -> String {
        let prefix = if self.row.group.is_empty() { "/api" } else { "/apis" };
        let namespace = self.manifest["metadata"]["namespace"].as_str();
        let namespace = namespace.map(|name| format!("/namespaces/{name}")).unwrap_or_default();
        format!("{prefix}/{}{namespace}/{}", self.api_version(), self.row.plural)
    }

    fn one(&self) -> String {
        format!("{}/{}", self.all(), name(&self.manifest))
    }
}

/// Argument of [`Case::ok`]: a response, or the result of a request.
struct Answer(Reply);

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Answer {
        Answer(reply)
    }
}

impl<E: std::fmt::Debug> From<Result<Reply, E>> for Answer {
    fn from(reply: Result<Reply, E>) -> Answer {
        Answer(reply.unwrap())
    }
}

fn manifest(row: &Resource) -> Value {
    let group = if row.group.is_empty() { "core" } else { row.group };
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/tests/manifests");
    let path = folder.join(format!("{group}.{}.{}.json", row.version, row.kind));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    // Webhooks and policies take effect immediately: these must not match objects of the other cases.
    let text = match row.group {
        "admissionregistration.k8s.io" => text.replace("\"apps\"", "\"harbor.example.com\""),
        _ => text,
    };
    let mut manifest: Value = serde_json::from_str(&text).unwrap();
    if row.kind == "ClusterRole" {
        // With an aggregation rule, the server writes the rules.
        manifest.as_object_mut().unwrap().remove("aggregationRule");
    }
    if row.kind == "FlowSchema" {
        // The server records in the status whether the priority level exists, and another case creates
        // and deletes its own.
        manifest["spec"]["priorityLevelConfiguration"]["name"] = "global-default".into();
    }
    if row.kind == "ResourceQuota" {
        // With limits it would apply to the other cases, and the server would record their usage in it.
        manifest["spec"].as_object_mut().unwrap().remove("hard");
    }
    if row.kind == "Pod" {
        // The name of a token volume is random for each pod.
        manifest["spec"]["automountServiceAccountToken"] = false.into();
    }
    if row.kind == "Namespace" {
        // Not the namespace of the other cases.
        manifest["metadata"]["name"] = "quay".into();
    }
    if row.group == "events.k8s.io" || (row.group, row.version) == ("autoscaling", "v1") {
        // Stored under the same key as the object of the other version, so it is in a namespace of its
        // own.
        manifest["metadata"]["namespace"] = "boats".into();
        if manifest["regarding"]["namespace"].is_string() {
            manifest["regarding"]["namespace"] = "boats".into();
        }
    }
    manifest
}

fn bytes(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// The object as in protobuf: without type metadata, also in embedded objects.
fn without_type_meta(object: &Value) -> Value {
    let mut object = object.clone();
    let strip_type_meta = |object: &mut Value| {
        let fields = object.as_object_mut().unwrap();
        fields.remove("kind");
        fields.remove("apiVersion");
    };
    strip_type_meta(&mut object);
    object
        .pointer_mut("/spec/volumeClaimTemplates")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
        .for_each(strip_type_meta);
    object
}

/// Removes what differs between two objects created from one manifest.
fn without_server_fields(object: Value) -> Value {
    // A Job's selector contains its UID as well.
    let uid = object["metadata"]["uid"].as_str().unwrap();
    let mut object: Value = serde_json::from_str(&object.to_string().replace(uid, "UID")).unwrap();
    let metadata = object["metadata"].as_object_mut().unwrap();
    for field in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
        metadata.remove(field);
    }
    if let Some(spec) = object["spec"].as_object_mut() {
        spec.remove("clusterIP");
        spec.remove("clusterIPs");
    }
    if let Some(status) = object["status"].as_object_mut() {
        status.remove("lastPhaseTransitionTime");
        for condition in status.get_mut("conditions").and_then(Value::as_array_mut).into_iter().flatten() {
            condition["lastTransitionTime"] = Value::Null;
        }
    }
    object
}

//! Test clusters as text.
//!
//! One object per line: `node a cpu=4 zone=z1 taint=k=v:NoSchedule {"spec":{...}}` or `pod p on=a cpu=1
//! label=app=web {...}`; the last part is JSON merged into the object. Other kinds are given as JSON only.

use std::fmt::Write as _;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use serde_json::{Map, Value, json};

use crate::framework::{Cycle, Filters, Plugin, PreFilterResult, PreScoreResult, Status};
use crate::queue::Nominator;
use crate::state::objects::Workload;
use crate::state::selection::selector;
use crate::state::{PodInfo, State};

/// A test cluster.
#[derive(Default)]
pub struct TestCluster {
    pub state: State,
    pub nominator: Nominator,
}

/// Parses the objects, one per line.
pub fn test_cluster(text: &str) -> TestCluster {
    let mut cluster = TestCluster::default();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        cluster.add(line);
    }
    cluster.state.refresh();
    cluster
}

/// Parses a pod.
pub fn pod(line: &str) -> core::Pod {
    serde_json::from_value(object(line)).expect("a test's pod is well-formed")
}

/// Parses a node.
pub fn node(line: &str) -> core::Node {
    serde_json::from_value(object(line)).expect("a test's node is well-formed")
}

impl TestCluster {
    /// Adds an object.
    pub fn add(&mut self, line: &str) {
        let value = object(line);
        let kind = value["kind"].as_str().expect("a test's object has a kind").to_owned();
        let meta = &value["metadata"];
        let name = meta["name"].as_str().unwrap_or_default().to_owned();
        let namespace = meta["namespace"].as_str().unwrap_or("default").to_owned();
        let key = format!("{namespace}/{name}");
        fn read<T: serde::de::DeserializeOwned>(value: Value) -> Arc<T> {
            Arc::new(serde_json::from_value(value).expect("a test's object is well-formed"))
        }
        let objects = &mut self.state.objects;
        match &*kind {
            "Node" => drop(self.state.set_node(read(value))),
            "Pod" => {
                let info = Arc::new(PodInfo::new(&read::<core::Pod>(value), &mut self.state.strings));
                if info.node_name.is_some() {
                    self.state.set_pod(info);
                } else {
                    self.nominator.add(&info, None);
                }
            }
            "Namespace" => {
                let namespace: Arc<core::Namespace> = read(value);
                let labels = self.state.strings.labels(namespace.metadata.labels.as_ref());
                objects.set_namespace(&name, Some(labels));
            }
            "Service" => objects.set_service(&namespace, &name, Some(&read(value))),
            "ReplicaSet" => {
                let set: Arc<k8s_openapi::api::apps::v1::ReplicaSet> = read(value);
                let typed = set.spec.as_ref().map(|spec| &spec.selector);
                objects.set_workload(Workload::ReplicaSet, &key, selector(typed).ok());
            }
            "PersistentVolumeClaim" => drop(objects.volume_claims.insert(key, read(value))),
            "PersistentVolume" => drop(objects.volumes.insert(name, read(value))),
            "StorageClass" => drop(objects.storage_classes.insert(name, read(value))),
            "CSINode" => drop(objects.csi_nodes.insert(name, read(value))),
            "CSIDriver" => drop(objects.csi_drivers.insert(name, read(value))),
            "CSIStorageCapacity" => drop(objects.capacities.insert(key, read(value))),
            "VolumeAttachment" => drop(objects.attachments.insert(name, read(value))),
            "PodDisruptionBudget" => objects.set_budget(&key, Some(&read(value))),
            "ResourceClaim" => drop(objects.resource_claims.insert(key, read(value))),
            "DeviceClass" => drop(objects.device_classes.insert(name, read(value))),
            "ResourceSlice" => drop(objects.resource_slices.insert(name, read(value))),
            other => panic!("unsupported kind in test cluster: {other}"),
        }
    }

    /// Returns the parsed form of a pod.
    pub fn info(&mut self, line: &str) -> (Arc<PodInfo>, core::Pod) {
        let pod = pod(line);
        (Arc::new(PodInfo::new(&pod, &mut self.state.strings)), pod)
    }

    /// Formats the result of a plugin's filter, one node per line.
    pub fn filter(&mut self, plugin: &Plugin, line: &str) -> String {
        let (info, object) = self.info(line);
        let cycle = Cycle { state: &self.state, pod: &info, object: &object };
        let plugin = plugin.pre_filter.as_ref().expect("the plugin filters");
        let mut output = String::new();
        let mut filters = Filters::default();
        match plugin.pre_filter(&cycle) {
            PreFilterResult::Skip => return "skip\n".to_owned(),
            PreFilterResult::Reject(status) => return format!("reject {}\n", format_status(&status)),
            PreFilterResult::FilterNodes(names, filter) => {
                writeln!(output, "only {}", names.join(" ")).expect("strings grow");
                filters.push("", 0, filter);
            }
            PreFilterResult::Filter(filter) => filters.push("", 0, filter),
        }
        let mut nodes: Vec<_> = self.state.nodes().collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        for node in nodes {
            writeln!(output, "{}: {}", node.name, format_status(&filters.run(node))).expect("strings grow");
        }
        output
    }

    /// Formats the raw and normalized scores of a plugin, one node per line.
    pub fn score(&mut self, plugin: &Plugin, line: &str) -> String {
        let (info, object) = self.info(line);
        let cycle = Cycle { state: &self.state, pod: &info, object: &object };
        let mut nodes: Vec<_> = self.state.order().to_vec();
        nodes.sort_by_key(|id| self.state.node(*id).name.clone());
        let score = match plugin.pre_score.as_ref().expect("the plugin scores").pre_score(&cycle, &nodes) {
            PreScoreResult::Skip => return "skip\n".to_owned(),
            PreScoreResult::Error(words) => return format!("error {words}\n"),
            PreScoreResult::Score(score) => score,
        };
        let raw: Vec<i64> = nodes.iter().map(|id| score.score(self.state.node(*id))).collect();
        let mut scores = raw.clone();
        score.normalize(&nodes, &mut scores);
        let mut output = String::new();
        for ((id, raw), score) in nodes.iter().zip(raw).zip(scores) {
            writeln!(output, "{}: {raw} -> {score}", self.state.node(*id).name).expect("strings grow");
        }
        output
    }

    /// Schedules a pod; formats the selected node, or the message and the nomination.
    pub fn attempt(&mut self, profile: &crate::framework::Profile, line: &str) -> String {
        use crate::algorithm::{Algorithm, NoExtenders, ScheduleFailure};
        let (info, object) = self.info(line);
        self.state.refresh();
        let cycle = Cycle { state: &self.state, pod: &info, object: &object };
        let mut algorithm = Algorithm::new(0, 7);
        match algorithm.schedule(profile, &cycle, &self.nominator, &NoExtenders) {
            Ok(placement) => format!("on {}\n", placement.node),
            Err(ScheduleFailure::NoNodes) => "no nodes available to schedule pods\n".to_owned(),
            Err(ScheduleFailure::Error(words)) => format!("error {words}\n"),
            Err(ScheduleFailure::Unschedulable { error, nomination: rescue, .. }) => {
                let mut output = format!("{error}\n");
                if let Some((node, victims)) = rescue {
                    let names: Vec<&str> = victims.iter().map(|pod| &*pod.name).collect();
                    writeln!(output, "preempt {} on {node}", names.join(" ")).expect("strings grow");
                }
                output
            }
        }
    }
}

/// Formats a status.
pub fn format_status(status: &Status) -> String {
    let reasons = status.message();
    match status.code {
        crate::framework::Code::Success => "ok".to_owned(),
        crate::framework::Code::Unschedulable => format!("no, {reasons}"),
        crate::framework::Code::UnschedulableAndUnresolvable => format!("never, {reasons}"),
        other => format!("{other:?} {reasons}"),
    }
}

/// Returns the default profile.
pub fn default_profile() -> crate::framework::Profile {
    let config = crate::config::Config::with_defaults();
    let mut profiles = config
        .profiles(crate::framework::registry::IN_TREE_PLUGINS)
        .expect("the default configuration is valid");
    profiles.remove(0)
}

fn object(line: &str) -> Value {
    let (words, json) = match line.find('{') {
        Some(at) => (&line[..at], serde_json::from_str(&line[at..]).expect("a test's JSON is sound")),
        None => (line, json!({})),
    };
    let mut words = words.split_whitespace();
    let mut object = match words.next() {
        Some("node") => node_object(words.next().expect("a node has a name"), words),
        Some("pod") => pod_object(words.next().expect("a pod has a name"), words),
        _ => json!({}),
    };
    merge(&mut object, json);
    object
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

fn node_object<'a>(name: &str, words: impl Iterator<Item = &'a str>) -> Value {
    let mut allocatable = json!({"cpu": "4", "memory": "8Gi", "pods": "110"});
    let mut labels = json!({"kubernetes.io/hostname": name});
    let (mut taints, mut images, mut unschedulable) = (Vec::new(), Vec::new(), false);
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "zone" => labels["topology.kubernetes.io/zone"] = value.into(),
            "region" => labels["topology.kubernetes.io/region"] = value.into(),
            "label" => {
                let (key, value) = value.split_once('=').expect("a label has a value");
                labels[key] = value.into();
            }
            "taint" => {
                let (pair, effect) = value.rsplit_once(':').expect("a taint has an effect");
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                taints.push(json!({"key": key, "value": value, "effect": effect}));
            }
            "image" => {
                let (name, size) = value.rsplit_once('@').expect("an image has a size");
                images.push(json!({"names": [name], "sizeBytes": size.parse::<i64>().expect("a number")}));
            }
            "unschedulable" => unschedulable = true,
            resource => allocatable[resource] = value.into(),
        }
    }
    json!({
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints, "unschedulable": unschedulable},
        "status": {"allocatable": allocatable, "images": images},
    })
}

fn pod_object<'a>(name: &str, words: impl Iterator<Item = &'a str>) -> Value {
    let mut requests = Map::new();
    let mut labels = Map::new();
    let mut tolerations = Vec::new();
    let mut ports = Vec::new();
    let mut spec = json!({});
    let (mut namespace, mut status, mut image) = ("default", json!({}), "img");
    let mut meta = json!({});
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "on" => spec["nodeName"] = value.into(),
            "nominated" => status["nominatedNodeName"] = value.into(),
            "ns" => namespace = value,
            "priority" => spec["priority"] = value.parse::<i64>().expect("a number").into(),
            "started" => status["startTime"] = value.into(),
            "leaving" => meta["deletionTimestamp"] = "2026-01-01T00:00:00Z".into(),
            "image" => image = value,
            "label" => {
                let (key, value) = value.split_once('=').expect("a label has a value");
                labels.insert(key.to_owned(), value.into());
            }
            "port" => {
                ports.push(json!({"containerPort": 80, "hostPort": value.parse::<i64>().expect("a number")}))
            }
            "claim" => {
                let volumes = spec.as_object_mut().expect("it is one").entry("volumes").or_insert(json!([]));
                let volume = json!({"name": value, "persistentVolumeClaim": {"claimName": value}});
                volumes.as_array_mut().expect("it is one").push(volume);
            }
            "tolerates" => {
                let (key, effect) = value.split_once(':').unwrap_or((value, ""));
                tolerations.push(json!({"key": key, "operator": "Exists", "effect": effect}));
            }
            resource => drop(requests.insert(resource.to_owned(), value.into())),
        }
    }
    spec["tolerations"] = tolerations.into();
    spec["containers"] =
        json!([{"name": "c", "image": image, "ports": ports, "resources": {"requests": requests}}]);
    let mut object = json!({
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "uid": format!("uid-{name}"), "labels": labels},
        "spec": spec,
        "status": status,
    });
    merge(&mut object["metadata"], meta);
    object
}

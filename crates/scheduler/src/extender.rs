//! HTTP extenders: external programs that filter, score, bind or preempt.
//!
//! Calls block the scheduling cycle, as upstream: the result is part of the decision.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt as _, Full};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client as Http;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::algorithm::{Candidate, Diagnosis, Extenders};
use crate::config::{ConfigError, ExtenderConfig};
use crate::framework::{Cycle, MAX_SCORE, Status};
use crate::state::{NodeId, PodInfo};

/// The highest score of an extender (upstream's `MaxExtenderPriority`).
const MAX_EXTENDER_SCORE: i64 = 10;
/// Request timeout if `httpTimeout` is not set.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// All extenders, in the configured order.
pub struct HttpExtenders(Vec<Extender>);

struct Extender {
    config: ExtenderConfig,
    timeout: Duration,
    http: Http<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "PascalCase")]
struct FilterResult {
    #[serde(alias = "nodes")]
    nodes: Option<NodeList>,
    #[serde(alias = "nodeNames", alias = "nodenames")]
    node_names: Option<Vec<String>>,
    #[serde(alias = "failedNodes", alias = "failednodes")]
    failed_nodes: Option<BTreeMap<String, String>>,
    #[serde(alias = "failedAndUnresolvableNodes")]
    failed_and_unresolvable_nodes: Option<BTreeMap<String, String>>,
    #[serde(alias = "error")]
    error: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NodeList {
    items: Vec<Named>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Named {
    metadata: Meta,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Meta {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostScore {
    #[serde(alias = "host")]
    host: String,
    #[serde(alias = "score")]
    score: i64,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "PascalCase")]
struct BindResult {
    #[serde(alias = "error")]
    error: String,
}

/// Response to a preemption request: the nodes that the extender accepts, with their victims.
#[derive(Deserialize, Default)]
#[serde(default, rename_all = "PascalCase")]
struct PreemptionResult {
    #[serde(alias = "nodeNameToMetaVictims")]
    node_name_to_meta_victims: BTreeMap<String, Option<Victims>>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "PascalCase")]
struct Victims {
    #[serde(alias = "pods")]
    pods: Vec<Victim>,
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations")]
    violations: usize,
}

#[derive(Deserialize)]
struct Victim {
    #[serde(rename = "UID", alias = "uid")]
    uid: String,
}

impl HttpExtenders {
    /// Creates the HTTP clients.
    pub fn new(configs: &[ExtenderConfig]) -> Result<HttpExtenders, ConfigError> {
        configs.iter().map(Extender::new).collect::<Result<_, _>>().map(HttpExtenders)
    }

    /// Binds the pod with the first interested extender that implements bind; `None` if there is none.
    pub async fn bind(&self, pod: &PodInfo, node: &str) -> Option<Result<(), String>> {
        let binds = |one: &&Extender| !one.config.bind_verb.is_empty() && one.is_interested(pod);
        for extender in self.0.iter().filter(binds) {
            let body = json!({
                "PodName": &*pod.name,
                "PodNamespace": &*pod.namespace,
                "PodUID": &*pod.uid,
                "Node": node,
            });
            let answer: Result<BindResult, String> = extender.send(&extender.config.bind_verb, &body).await;
            let bound = match answer {
                Ok(result) if result.error.is_empty() => Ok(()),
                Ok(result) => Err(result.error),
                Err(words) => Err(words),
            };
            match bound {
                Err(words) if extender.config.ignorable => {
                    tracing::info!(
                        words,
                        extender = extender.config.url_prefix,
                        "extender failed to bind pod, ignoring it"
                    );
                }
                done => return Some(done),
            }
        }
        None
    }

    /// Runs a request synchronously. `block_in_place` lets the runtime move other tasks off this thread.
    fn wait<R>(&self, answer: impl Future<Output = R>) -> R {
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(answer))
    }
}

impl Extenders for HttpExtenders {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn is_filter(&self) -> bool {
        self.0.iter().any(|extender| !extender.config.filter_verb.is_empty())
    }

    fn is_scorer(&self) -> bool {
        self.0.iter().any(|extender| !extender.config.prioritize_verb.is_empty())
    }

    fn filter(
        &self,
        cycle: &Cycle<'_>,
        nodes: &mut Vec<NodeId>,
        diagnosis: &mut Diagnosis,
    ) -> Result<(), String> {
        for extender in self.0.iter().filter(|one| !one.config.filter_verb.is_empty()) {
            if nodes.is_empty() || !extender.is_interested(cycle.pod) {
                continue;
            }
            let body = extender.extender_args(cycle, nodes);
            let answer: Result<FilterResult, String> =
                self.wait(extender.send(&extender.config.filter_verb, &body));
            let answer =
                answer.and_then(|found| if found.error.is_empty() { Ok(found) } else { Err(found.error) });
            let found = match answer {
                Ok(found) => found,
                Err(words) if extender.config.ignorable => {
                    tracing::info!(
                        words,
                        extender = extender.config.url_prefix,
                        "extender request failed, ignoring it"
                    );
                    continue;
                }
                Err(words) => return Err(words),
            };
            let unresolvable = found.failed_and_unresolvable_nodes.unwrap_or_default();
            for (name, words) in &unresolvable {
                if let Some(node) = cycle.state.node_by_name(name) {
                    diagnosis.add(node.id, Status::unresolvable(words.clone()));
                }
            }
            for (name, words) in
                found.failed_nodes.iter().flatten().filter(|(name, _)| !unresolvable.contains_key(*name))
            {
                if let Some(node) = cycle.state.node_by_name(name) {
                    diagnosis.add(node.id, Status::unschedulable(words.clone()));
                }
            }
            let listed =
                found.nodes.map(|list| list.items.into_iter().map(|item| item.metadata.name).collect());
            let passed: Vec<String> = found.node_names.or(listed).unwrap_or_default();
            nodes.retain(|id| passed.iter().any(|name| **name == *cycle.state.node(*id).name));
        }
        Ok(())
    }

    fn score(&self, cycle: &Cycle<'_>, nodes: &[NodeId], scores: &mut [i64]) {
        for extender in self.0.iter().filter(|one| !one.config.prioritize_verb.is_empty()) {
            if !extender.is_interested(cycle.pod) {
                continue;
            }
            let body = extender.extender_args(cycle, nodes);
            let answer: Result<Vec<HostScore>, String> =
                self.wait(extender.send(&extender.config.prioritize_verb, &body));
            let given = match answer {
                Ok(given) => given,
                Err(words) => {
                    tracing::debug!(
                        words,
                        extender = extender.config.url_prefix,
                        "extender failed to score nodes, ignoring it"
                    );
                    continue;
                }
            };
            let given: HashMap<&str, i64> = given.iter().map(|one| (&*one.host, one.score)).collect();
            let weight = extender.config.weight.saturating_mul(MAX_SCORE / MAX_EXTENDER_SCORE);
            for (id, total) in nodes.iter().zip(scores.iter_mut()) {
                let score = given.get(&*cycle.state.node(*id).name).copied().unwrap_or_default();
                *total = total.saturating_add(score.saturating_mul(weight));
            }
        }
    }

    fn preempt(&self, cycle: &Cycle<'_>, candidates: &mut Vec<Candidate>) -> Result<(), String> {
        for extender in self.0.iter().filter(|one| !one.config.preempt_verb.is_empty()) {
            if candidates.is_empty() || !extender.is_interested(cycle.pod) {
                continue;
            }
            let body = extender.preemption_args(cycle, candidates);
            let answer: Result<PreemptionResult, String> =
                self.wait(extender.send(&extender.config.preempt_verb, &body));
            match answer.and_then(|answer| extender.parse_victims(cycle, answer)) {
                Ok(accepted) => *candidates = accepted,
                Err(words) if extender.config.ignorable => {
                    tracing::info!(
                        words,
                        extender = extender.config.url_prefix,
                        "extender request failed, ignoring it"
                    );
                }
                Err(words) => return Err(words),
            }
        }
        Ok(())
    }
}

impl Extender {
    fn new(config: &ExtenderConfig) -> Result<Extender, ConfigError> {
        let invalid =
            |words: String| ConfigError::Invalid(format!("extender {}: {words}", config.url_prefix));
        let timeout = match &config.http_timeout {
            None => DEFAULT_TIMEOUT,
            Some(text) => {
                let read: jiff::SignedDuration =
                    text.parse().map_err(|error: jiff::Error| invalid(error.to_string()))?;
                Duration::try_from(read).map_err(|error| invalid(error.to_string()))?
            }
        };
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls(config).map_err(invalid)?)
            .https_or_http()
            .enable_http1()
            .build();
        let http = Http::builder(TokioExecutor::new()).build(connector);
        Ok(Extender { config: config.clone(), timeout, http })
    }

    /// Whether the pod requests one of the extender's managed resources. Always true for extenders without
    /// any.
    fn is_interested(&self, pod: &PodInfo) -> bool {
        let managed = &self.config.managed_resources;
        managed.is_empty() || managed.iter().any(|one| pod.requests.exact.has_scalar(&one.name))
    }

    fn extender_args(&self, cycle: &Cycle<'_>, nodes: &[NodeId]) -> Value {
        let mut body = json!({"Pod": cycle.object, "Nodes": null, "NodeNames": null});
        let nodes = nodes.iter().map(|id| cycle.state.node(*id));
        if self.config.node_cache_capable {
            body["NodeNames"] = nodes.map(|node| &*node.name).collect();
        } else {
            let items: Vec<_> = nodes.map(|node| node.object.as_deref()).collect();
            body["Nodes"] = json!({"metadata": {}, "items": items});
        }
        body
    }

    /// The body of a preemption request. A nodeCacheCapable extender gets only the UIDs of victims, the
    /// others as much of the pods as the scheduler keeps.
    fn preemption_args(&self, cycle: &Cycle<'_>, candidates: &[Candidate]) -> Value {
        let has_node_cache = self.config.node_cache_capable;
        let pod_to_json = |pod: &Arc<PodInfo>| match has_node_cache {
            true => json!({"UID": &*pod.uid}),
            false => json!({
                "metadata": {"name": &*pod.name, "namespace": &*pod.namespace, "uid": &*pod.uid},
                "spec": {"nodeName": pod.node_name.as_deref(), "priority": pod.priority},
            }),
        };
        let nodes: serde_json::Map<String, Value> = candidates
            .iter()
            .map(|candidate| {
                let pods: Vec<Value> = candidate.victims.iter().map(pod_to_json).collect();
                let node = cycle.state.node(candidate.node).name.to_string();
                (node, json!({"Pods": pods, "NumPDBViolations": candidate.violations}))
            })
            .collect();
        let field = if has_node_cache { "NodeNameToMetaVictims" } else { "NodeNameToVictims" };
        let mut body = json!({"Pod": cycle.object, "NodeNameToVictims": null, "NodeNameToMetaVictims": null});
        body[field] = Value::Object(nodes);
        body
    }

    /// Converts the response to candidates. Fails if it names an unknown node or a pod that is not on its
    /// node.
    fn parse_victims(&self, cycle: &Cycle<'_>, answer: PreemptionResult) -> Result<Vec<Candidate>, String> {
        let mut accepted = Vec::new();
        for (name, victims) in answer.node_name_to_meta_victims {
            let Victims { pods, violations } = victims.unwrap_or_default();
            if pods.is_empty() {
                if self.config.ignorable {
                    continue;
                }
                return Err(format!("expected at least one victim pod on node {name:?}"));
            }
            let node = cycle
                .state
                .node_by_name(&name)
                .ok_or_else(|| format!("nodeinfo not found for node name {name:?}"))?;
            let find = |victim: &Victim| {
                let pod = node.pods.iter().find(|pod| *pod.uid == *victim.uid).cloned();
                pod.ok_or_else(|| {
                    let url = &self.config.url_prefix;
                    format!("extender: {url} claims to preempt pod (UID: {}) on node: {name}, but the pod is not found on that node", victim.uid)
                })
            };
            let victims = pods.iter().map(find).collect::<Result<_, String>>()?;
            accepted.push(Candidate { node: node.id, victims, violations });
        }
        Ok(accepted)
    }

    async fn send<T: DeserializeOwned>(&self, verb: &str, body: &Value) -> Result<T, String> {
        let url = format!("{}/{verb}", self.config.url_prefix.trim_end_matches('/'));
        let body = serde_json::to_vec(body).map_err(|error| error.to_string())?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(&url)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| error.to_string())?;
        let exchange = async {
            let response = self.http.request(request).await.map_err(|error| format!("{url}: {error}"))?;
            let status = response.status();
            if !status.is_success() {
                return Err(format!("failed {verb} with extender at URL {url}, code {}", status.as_u16()));
            }
            let body = response.into_body().collect().await.map_err(|error| error.to_string())?;
            serde_json::from_slice(&body.to_bytes()).map_err(|error| error.to_string())
        };
        let answer = tokio::time::timeout(self.timeout, exchange).await;
        answer.unwrap_or_else(|_| Err(format!("{url}: no response within {:?}", self.timeout)))
    }
}

fn tls(config: &ExtenderConfig) -> Result<rustls::ClientConfig, String> {
    let settings = config.tls_config.clone().unwrap_or_default();
    if settings.insecure {
        return Err("tlsConfig.insecure: must be false, skipping certificate verification is not supported"
            .to_owned());
    }
    let read = |path: &str| std::fs::read(path).map_err(|error| format!("failed to read {path}: {error}"));
    let mut roots = rustls::RootCertStore::empty();
    if !settings.ca_file.is_empty() {
        for certificate in CertificateDer::pem_slice_iter(&read(&settings.ca_file)?) {
            let certificate = certificate.map_err(|error| error.to_string())?;
            roots.add(certificate).map_err(|error| error.to_string())?;
        }
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    if settings.cert_file.is_empty() {
        return Ok(builder.with_no_client_auth());
    }
    let chain = read(&settings.cert_file)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&chain).collect();
    let key = PrivateKeyDer::from_pem_slice(&read(&settings.key_file)?).map_err(|error| error.to_string())?;
    let chain = chain.map_err(|error| error.to_string())?;
    builder.with_client_auth_cert(chain, key).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::test_cluster;

    /// The preemption request to an extender, and the candidates from its response.
    #[track_caller]
    fn check(config: &str, answer: Value, expected_request: &str, expected: Result<&str, &str>) {
        let config: ExtenderConfig = serde_json::from_str(config).expect("a test's extender is well-formed");
        let extender = Extender::new(&config).expect("a test's extender can be made");
        let mut cluster = test_cluster("node a cpu=1\nnode b cpu=1\npod x on=a\npod y on=b");
        let (pod, object) = cluster.info("pod p");
        let cycle = Cycle { state: &cluster.state, pod: &pod, object: &object };
        let candidates: Vec<Candidate> = ["a", "b"]
            .iter()
            .filter_map(|name| cluster.state.node_by_name(name))
            .map(|node| Candidate { node: node.id, victims: node.pods.clone(), violations: 1 })
            .collect();
        let body = extender.preemption_args(&cycle, &candidates);
        assert_eq!(body["NodeNameToMetaVictims"]["a"].to_string(), expected_request);
        let mut text = answer.to_string();
        for candidate in &candidates {
            text = text.replace(&format!("uid-{}", candidate.victims[0].name), &candidate.victims[0].uid);
        }
        let answer: PreemptionResult = serde_json::from_str(&text).expect("a test's answer is well-formed");
        let accepted = extender.parse_victims(&cycle, answer).map(|accepted| {
            let pod_to_json = accepted.iter().map(|one| {
                format!("{} {} {}", cluster.state.node(one.node).name, one.victims[0].name, one.violations)
            });
            pod_to_json.collect::<Vec<_>>().join(", ")
        });
        assert_eq!(accepted.as_deref().map_err(String::as_str), expected);
    }

    #[test]
    fn extender_filters_preemption_candidates() {
        let node_cache_config =
            r#"{"urlPrefix": "http://e", "preemptVerb": "preempt", "nodeCacheCapable": true}"#;
        let cluster = test_cluster("node a\npod x on=a");
        let uid = cluster.state.node_by_name("a").expect("a").pods[0].uid.clone();
        let expected_request = format!("{{\"NumPDBViolations\":1,\"Pods\":[{{\"UID\":\"{uid}\"}}]}}");
        let victims = |uid: &str| json!({"Pods": [{"UID": uid}], "NumPDBViolations": 0});
        check(
            node_cache_config,
            json!({"NodeNameToMetaVictims": {"b": victims("uid-y")}}),
            &expected_request,
            Ok("b y 0"),
        );
        check(node_cache_config, json!({"nodeNameToMetaVictims": {}}), &expected_request, Ok(""));
        check(
            node_cache_config,
            json!({"NodeNameToMetaVictims": {"b": null}}),
            &expected_request,
            Err("expected at least one victim pod on node \"b\""),
        );
        check(
            node_cache_config,
            json!({"NodeNameToMetaVictims": {"b": victims("missing")}}),
            &expected_request,
            Err(
                "extender: http://e claims to preempt pod (UID: missing) on node: b, but the pod is not found on that node",
            ),
        );
        let ignorable_config = r#"{"urlPrefix": "http://e", "preemptVerb": "preempt", "ignorable": true}"#;
        check(
            ignorable_config,
            json!({"NodeNameToMetaVictims": {"b": null, "a": victims("uid-x")}}),
            "null",
            Ok("a x 0"),
        );
    }
}

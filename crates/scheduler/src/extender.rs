//! Extenders: programs outside that filter, score, bind or preempt over HTTP.
//!
//! A call holds the scheduler up, as it does upstream: the answer is part of the choice.

use std::collections::{BTreeMap, HashMap};
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

use crate::algorithm::{Diagnosis, Extenders};
use crate::config::{ConfigError, ExtenderConfig};
use crate::framework::{Cycle, MAX_SCORE, Status};
use crate::state::{NodeId, PodInfo};

/// The highest score an extender gives.
const MAX_EXTENDER_SCORE: i64 = 10;
/// How long an answer may take unless said otherwise.
const TIMEOUT: Duration = Duration::from_secs(5);

/// All extenders, in order.
pub struct HttpExtenders(Vec<Extender>);

struct Extender {
    config: ExtenderConfig,
    timeout: Duration,
    http: Http<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "PascalCase")]
struct Filtered {
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

impl HttpExtenders {
    /// Makes the clients.
    pub fn new(configs: &[ExtenderConfig]) -> Result<HttpExtenders, ConfigError> {
        configs.iter().map(Extender::new).collect::<Result<_, _>>().map(HttpExtenders)
    }

    /// Binds the pod, if an extender binds pods of its kind.
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
                    tracing::info!(words, extender = extender.config.url_prefix, "an extender cannot bind");
                }
                done => return Some(done),
            }
        }
        None
    }

    /// Waits for an answer in the middle of a cycle.
    fn wait<R>(&self, answer: impl Future<Output = R>) -> R {
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(answer))
    }
}

impl Extenders for HttpExtenders {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn filters(&self) -> bool {
        self.0.iter().any(|extender| !extender.config.filter_verb.is_empty())
    }

    fn scores(&self) -> bool {
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
            let body = extender.arguments(cycle, nodes);
            let answer: Result<Filtered, String> =
                self.wait(extender.send(&extender.config.filter_verb, &body));
            let answer =
                answer.and_then(|found| if found.error.is_empty() { Ok(found) } else { Err(found.error) });
            let found = match answer {
                Ok(found) => found,
                Err(words) if extender.config.ignorable => {
                    tracing::info!(words, extender = extender.config.url_prefix, "an extender is left out");
                    continue;
                }
                Err(words) => return Err(words),
            };
            let never = found.failed_and_unresolvable_nodes.unwrap_or_default();
            for (name, words) in &never {
                if let Some(node) = cycle.state.node_named(name) {
                    diagnosis.add(node.id, Status::unresolvable(words.clone()));
                }
            }
            for (name, words) in
                found.failed_nodes.iter().flatten().filter(|(name, _)| !never.contains_key(*name))
            {
                if let Some(node) = cycle.state.node_named(name) {
                    diagnosis.add(node.id, Status::unschedulable(words.clone()));
                }
            }
            let listed =
                found.nodes.map(|list| list.items.into_iter().map(|item| item.metadata.name).collect());
            let kept: Vec<String> = found.node_names.or(listed).unwrap_or_default();
            nodes.retain(|id| kept.iter().any(|name| **name == *cycle.state.node(*id).name));
        }
        Ok(())
    }

    fn score(&self, cycle: &Cycle<'_>, nodes: &[NodeId], scores: &mut [i64]) {
        for extender in self.0.iter().filter(|one| !one.config.prioritize_verb.is_empty()) {
            if !extender.is_interested(cycle.pod) {
                continue;
            }
            let body = extender.arguments(cycle, nodes);
            let answer: Result<Vec<HostScore>, String> =
                self.wait(extender.send(&extender.config.prioritize_verb, &body));
            let given = match answer {
                Ok(given) => given,
                Err(words) => {
                    tracing::debug!(
                        words,
                        extender = extender.config.url_prefix,
                        "an extender gives no scores"
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
}

impl Extender {
    fn new(config: &ExtenderConfig) -> Result<Extender, ConfigError> {
        let wrong = |words: String| ConfigError::Invalid(format!("extender {}: {words}", config.url_prefix));
        let timeout = match &config.http_timeout {
            None => TIMEOUT,
            Some(text) => {
                let read: jiff::SignedDuration =
                    text.parse().map_err(|error: jiff::Error| wrong(error.to_string()))?;
                Duration::try_from(read).map_err(|error| wrong(error.to_string()))?
            }
        };
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls(config).map_err(wrong)?)
            .https_or_http()
            .enable_http1()
            .build();
        let http = Http::builder(TokioExecutor::new()).build(connector);
        Ok(Extender { config: config.clone(), timeout, http })
    }

    /// An extender that manages resources cares only for pods that ask for them.
    fn is_interested(&self, pod: &PodInfo) -> bool {
        let managed = &self.config.managed_resources;
        managed.is_empty() || managed.iter().any(|one| pod.requests.exact.has_scalar(&one.name))
    }

    fn arguments(&self, cycle: &Cycle<'_>, nodes: &[NodeId]) -> Value {
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
        answer.unwrap_or_else(|_| Err(format!("{url}: no answer after {:?}", self.timeout)))
    }
}

fn tls(config: &ExtenderConfig) -> Result<rustls::ClientConfig, String> {
    let settings = config.tls_config.clone().unwrap_or_default();
    if settings.insecure {
        return Err("tlsConfig.insecure: certificates are always checked here".to_owned());
    }
    let read = |path: &str| std::fs::read(path).map_err(|error| format!("cannot read {path}: {error}"));
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

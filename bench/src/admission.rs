//! The cost of admission for a create request: without plugins in its way, with one validating webhook
//! on this host, and with twenty ValidatingAdmissionPolicies.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use pki::{Authority, Leaf, ServingCertificate, Usage};
use serde_json::{Value, json};
use testkit::Webhook;

use crate::client::Client;
use crate::load::{self, Load, StopCondition};
use crate::objects::config_map;
use crate::report::{Report, Unit};
use crate::server::Server;
use crate::wire::{collection, connect};

const POLICY_COUNT: usize = 20;
const ADMISSION_API: &str = "/apis/admissionregistration.k8s.io/v1";
const BASELINE: &str = "admission/nothing";
/// Time limit until the server calls the webhook.
const WEBHOOK_TIMEOUT: Duration = Duration::from_secs(60);

pub async fn run(report: &mut Report, binary: &Path, dir: &Path, creates: usize) -> Result<()> {
    let server = Server::start(binary, dir).await?;
    let clients = connect(&server, 1).await?;
    let load = create(&server, &clients, "plain", creates).await?;
    record(report, BASELINE, &load);

    let scratch = tempfile::tempdir()?;
    let (hook, configuration) = webhook(scratch.path())?;
    let path = format!("{ADMISSION_API}/validatingwebhookconfigurations");
    clients[0].post(&path, &configuration).await?;
    wait_for_webhook(|| Ok(!hook.requests().is_empty()), &clients[0]).await?;
    let load = create(&server, &clients, "hook", creates).await?;
    record(report, "admission/one-webhook", &load);
    clients[0].delete(&format!("{path}/bench")).await?;

    for i in 0..POLICY_COUNT {
        clients[0].post(&format!("{ADMISSION_API}/validatingadmissionpolicies"), &policy(i)).await?;
        clients[0].post(&format!("{ADMISSION_API}/validatingadmissionpolicybindings"), &binding(i)).await?;
    }
    let load = create(&server, &clients, "policy", creates).await?;
    record(report, &format!("admission/{POLICY_COUNT}-policies"), &load);
    Ok(())
}

fn record(report: &mut Report, name: &str, load: &Load) {
    let mut add = |what: &str, unit, value| match name {
        BASELINE => report.add(format!("{name}/{what}"), unit, value),
        _ => report.add_relative(format!("{name}/{what}"), unit, value, &format!("{BASELINE}/{what}")),
    };
    add("p50", Unit::Millis, load.p50);
    add("p99", Unit::Millis, load.p99);
    add("cpu", Unit::CpuMicros, load.cpu);
}

async fn create(server: &Server, clients: &[Client], name: &str, count: usize) -> Result<Load> {
    let path = collection("configmaps");
    load::run(server, clients, (0, 1, StopCondition::Count(count)), async |client, index| {
        client.post(&path, &config_map(&format!("{name}-{index}"))).await
    })
    .await
}

/// Creates objects until the server calls the webhook.
async fn wait_for_webhook(mut done: impl FnMut() -> Result<bool>, client: &Client) -> Result<()> {
    let started = Instant::now();
    let mut attempts = 0;
    while !done()? {
        ensure!(started.elapsed() < WEBHOOK_TIMEOUT, "the webhook was not called in time");
        client.post(&collection("configmaps"), &config_map(&format!("try-{attempts}"))).await?;
        attempts += 1;
    }
    Ok(())
}

/// Starts a webhook that allows everything, and returns its configuration for the server.
fn webhook(dir: &Path) -> Result<(Webhook, Value)> {
    let now = Timestamp::now();
    let authority = Authority::load_or_create(dir, "hook", now)?;
    let leaf = Leaf {
        common_name: "hook".to_owned(),
        organizations: Vec::new(),
        dns_names: vec!["localhost".to_owned()],
        ips: vec!["127.0.0.1".parse().context("an address")?],
        usage: Usage::Server,
        lifetime: Duration::from_secs(24 * 3600),
    };
    let serving = ServingCertificate::new(&authority.issue(&leaf, now)?)?;
    let hook = Webhook::start(pki::server_config(serving, &[])?, |request| {
        let uid = &request.body["request"]["uid"];
        let response = json!({"uid": uid, "allowed": true});
        (200, json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
    })?;
    let configuration = json!({
        "metadata": {"name": "bench"},
        "webhooks": [{
            "name": "bench.example.io", "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "clientConfig": {"url": format!("{}/", hook.url()), "caBundle": STANDARD.encode(authority.pem())},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
        }],
    });
    Ok((hook, configuration))
}

/// A typical policy: it checks labels, a name and a size.
fn policy(i: usize) -> Value {
    json!({
        "metadata": {"name": format!("bench-{i}")},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"]}
            ]},
            "variables": [{"name": "labels", "expression": "has(object.metadata.labels) ? object.metadata.labels : {}"}],
            "validations": [
                {"expression": format!("!('forbidden-{i}' in variables.labels)")},
                {"expression": format!("object.metadata.name != 'name-{i}' && object.metadata.name.size() < 200")},
                {"expression": "!has(object.data) || object.data.all(key, object.data[key].size() < 100000)"},
            ],
        },
    })
}

fn binding(i: usize) -> Value {
    let name = format!("bench-{i}");
    json!({"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}})
}

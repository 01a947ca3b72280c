//! CertificateSigningRequest controllers: `run_approval` approves kubelet certificates, `run_signing`
//! issues approved certificates, and `run_cleanup` deletes old requests.
//!
//! Upstream: `pkg/controller/certificates`.

mod plan;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use http::Method;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pki::Request;
use reconcile::{Controller, Ctx, Error, Key, Object, ReconcileAction, keys};
use serde_json::{Value, json};

use plan::{
    check_request, condition, expires_at, has_certificate, lifetime, matching_approval_rules, usages,
};

const CSR_PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const CONTROLLER_ACCOUNT: &str = "certificate-controller";
const WORKERS: usize = 5;

pub async fn run_approval(ctx: Ctx) {
    run_controller(ctx, "csrapproving", |ctx, key| Box::pin(async move { sync_approval(&ctx, &key).await }))
        .await
}

pub async fn run_signing(ctx: Ctx) {
    run_controller(ctx, "csrsigning", |ctx, key| Box::pin(async move { sync_signing(&ctx, &key).await }))
        .await
}

pub async fn run_cleanup(ctx: Ctx) {
    run_controller(ctx, "csrcleaner", |ctx, key| Box::pin(async move { sync_cleanup(&ctx, &key).await }))
        .await
}

type Work = futures_util::future::BoxFuture<'static, Result<ReconcileAction, Error>>;

async fn run_controller(ctx: Ctx, queue: &'static str, work: fn(Ctx, Key) -> Work) {
    let ctx = Ctx { client: ctx.client.impersonate(CONTROLLER_ACCOUNT), ..ctx };
    let controller = Controller::new(queue, &ctx);
    controller.on(ctx.caches.signing_requests(), keys::own::<CertificateSigningRequest>);
    let own = ctx.clone();
    controller.run(&ctx, WORKERS, move |key: Key| work(own.clone(), key)).await
}

fn new_condition(
    kind: &str,
    reason: &str,
    message: &str,
    now: jiff::Timestamp,
) -> CertificateSigningRequestCondition {
    CertificateSigningRequestCondition {
        type_: kind.into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_update_time: Some(Time(now)),
        last_transition_time: None,
    }
}

async fn sync_approval(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(request) = ctx.caches.signing_requests().get(key) else { return Ok(ReconcileAction::Forget) };
    let Ok(parsed) = Request::parse(&request.spec.request.0) else { return Ok(ReconcileAction::AwaitChange) };
    let nodes = ctx.caches.nodes();
    nodes.wait_for_sync().await;
    let taken = |ip: IpAddr, name: &str| {
        let text = ip.to_string();
        nodes.all().iter().filter(|node| node.name() != name).any(|node| {
            let status = node.status.as_ref().and_then(|status| status.addresses.as_ref());
            status.into_iter().flatten().any(|known| known.address == text)
        })
    };
    for rule in matching_approval_rules(&request, &parsed, taken) {
        if !is_authorized(ctx, &request, rule.subresource).await? {
            continue;
        }
        let mut request = (*request).clone();
        let conditions = request.status.get_or_insert_default().conditions.get_or_insert_default();
        conditions.push(new_condition("Approved", "AutoApproved", rule.message, ctx.clock.now()));
        let path = format!("{CSR_PATH}/{}/approval", request.name());
        ctx.client.request(Method::PUT, &path, Some(&json!(request))).await?;
        break;
    }
    Ok(ReconcileAction::AwaitChange)
}

/// Whether the requester is authorized for the subresource of an approval rule.
async fn is_authorized(
    ctx: &Ctx,
    request: &CertificateSigningRequest,
    subresource: &str,
) -> Result<bool, Error> {
    let spec = &request.spec;
    let attributes = json!({
        "group": "certificates.k8s.io", "resource": "certificatesigningrequests", "version": "*",
        "verb": "create", "subresource": subresource,
    });
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {
            "user": spec.username, "uid": spec.uid, "groups": spec.groups, "extra": spec.extra,
            "resourceAttributes": attributes,
        },
    });
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let answer = ctx.client.request(Method::POST, path, Some(&review)).await?;
    Ok(answer.pointer("/status/allowed") == Some(&Value::Bool(true)))
}

async fn sync_signing(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(request) = ctx.caches.signing_requests().get(key) else { return Ok(ReconcileAction::Forget) };
    let approved = condition(&request, "Approved").is_some() && condition(&request, "Denied").is_none();
    let failed = condition(&request, "Failed").is_some();
    let signer = ctx.settings.signers.get(&request.spec.signer_name);
    let (Some(authority), true, false, false) = (signer, approved, failed, has_certificate(&request)) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    let now = ctx.clock.now();
    let usages = usages(&request);
    let signed = match Request::parse(&request.spec.request.0) {
        Err(error) => Err(error.to_string()),
        Ok(parsed) => check_request(&request.spec.signer_name, &parsed, &usages).and_then(|()| {
            authority
                .sign_request(&parsed, &usages, lifetime(&request), now)
                .map_err(|error| error.to_string())
        }),
    };
    let mut request = (*request).clone();
    let status = request.status.get_or_insert_default();
    match signed {
        Ok(certificate) => status.certificate = Some(ByteString(certificate.into_bytes())),
        Err(reason) => {
            let failed = new_condition("Failed", "SignerValidationFailure", &reason, now);
            status.conditions.get_or_insert_default().push(failed);
        }
    }
    ctx.replace_status(&request).await?;
    Ok(ReconcileAction::AwaitChange)
}

async fn sync_cleanup(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(request) = ctx.caches.signing_requests().get(key) else { return Ok(ReconcileAction::Forget) };
    let certificate = request.status.as_ref().and_then(|status| status.certificate.as_ref());
    let ends = certificate.and_then(|pem| pki::expiry(std::str::from_utf8(&pem.0).ok()?));
    match expires_at(&request, ends) {
        Some(until) if until <= ctx.clock.now() => {
            ctx.delete(&*request).await.map(|()| ReconcileAction::AwaitChange)
        }
        Some(until) => Ok(ReconcileAction::RequeueAt(until)),
        None => Ok(ReconcileAction::AwaitChange),
    }
}

//! Approves the requests of kubelets for their own certificates, signs what is approved, and forgets requests in
//! time.

mod plan;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use http::Method;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pki::Request;
use reconcile::{Controller, Ctx, Error, Key, Next, Object, keys};
use serde_json::{Value, json};

use plan::{check, condition, is_issued, kept_until, lifetime, recognized, usages};

const PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const ACCOUNT: &str = "certificate-controller";
const WORKERS: usize = 5;

pub async fn approve(ctx: Ctx) {
    look(ctx, "csrapproving", |ctx, key| Box::pin(async move { approve_one(&ctx, &key).await })).await
}

pub async fn sign(ctx: Ctx) {
    look(ctx, "csrsigning", |ctx, key| Box::pin(async move { sign_one(&ctx, &key).await })).await
}

pub async fn clean(ctx: Ctx) {
    look(ctx, "csrcleaner", |ctx, key| Box::pin(async move { clean_one(&ctx, &key).await })).await
}

type Work = futures_util::future::BoxFuture<'static, Result<Next, Error>>;

async fn look(ctx: Ctx, queue: &'static str, work: fn(Ctx, Key) -> Work) {
    let ctx = Ctx { client: ctx.client.acting_as(ACCOUNT), ..ctx };
    let controller = Controller::new(queue, &ctx);
    controller.on(ctx.caches.signing_requests(), keys::own::<CertificateSigningRequest>);
    let own = ctx.clone();
    controller.run(&ctx, WORKERS, move |key: Key| work(own.clone(), key)).await
}

fn decided(
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

async fn approve_one(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(request) = ctx.caches.signing_requests().get(key) else { return Ok(Next::Forget) };
    let Ok(parsed) = Request::parse(&request.spec.request.0) else { return Ok(Next::Change) };
    let nodes = ctx.caches.nodes();
    nodes.filled().await;
    let taken = |ip: IpAddr, name: &str| {
        let text = ip.to_string();
        nodes.all().iter().filter(|node| node.name() != name).any(|node| {
            let status = node.status.as_ref().and_then(|status| status.addresses.as_ref());
            status.into_iter().flatten().any(|known| known.address == text)
        })
    };
    for way in recognized(&request, &parsed, taken) {
        if !may(ctx, &request, way.subresource).await? {
            continue;
        }
        let mut request = (*request).clone();
        let conditions = request.status.get_or_insert_default().conditions.get_or_insert_default();
        conditions.push(decided("Approved", "AutoApproved", way.message, ctx.clock.now()));
        let path = format!("{PATH}/{}/approval", request.name());
        ctx.client.request(Method::PUT, &path, Some(&json!(request))).await?;
        break;
    }
    Ok(Next::Change)
}

/// Whether whoever made the request is allowed what it is recognized as.
async fn may(ctx: &Ctx, request: &CertificateSigningRequest, subresource: &str) -> Result<bool, Error> {
    let spec = &request.spec;
    let asked = json!({
        "group": "certificates.k8s.io", "resource": "certificatesigningrequests", "version": "*",
        "verb": "create", "subresource": subresource,
    });
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {
            "user": spec.username, "uid": spec.uid, "groups": spec.groups, "extra": spec.extra,
            "resourceAttributes": asked,
        },
    });
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let answer = ctx.client.request(Method::POST, path, Some(&review)).await?;
    Ok(answer.pointer("/status/allowed") == Some(&Value::Bool(true)))
}

async fn sign_one(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(request) = ctx.caches.signing_requests().get(key) else { return Ok(Next::Forget) };
    let approved = condition(&request, "Approved").is_some() && condition(&request, "Denied").is_none();
    let failed = condition(&request, "Failed").is_some();
    let signer = ctx.settings.signers.get(&request.spec.signer_name);
    let (Some(authority), true, false, false) = (signer, approved, failed, is_issued(&request)) else {
        return Ok(Next::Change);
    };
    let now = ctx.clock.now();
    let usages = usages(&request);
    let signed = match Request::parse(&request.spec.request.0) {
        Err(error) => Err(error.to_string()),
        Ok(parsed) => check(&request.spec.signer_name, &parsed, &usages).and_then(|()| {
            authority
                .sign_request(&parsed, &usages, lifetime(&request), now)
                .map_err(|error| error.to_string())
        }),
    };
    let mut request = (*request).clone();
    let status = request.status.get_or_insert_default();
    match signed {
        Ok(certificate) => status.certificate = Some(ByteString(certificate.into_bytes())),
        Err(why) => {
            let failed = decided("Failed", "SignerValidationFailure", &why, now);
            status.conditions.get_or_insert_default().push(failed);
        }
    }
    ctx.replace_status(&request).await?;
    Ok(Next::Change)
}

async fn clean_one(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(request) = ctx.caches.signing_requests().get(key) else { return Ok(Next::Forget) };
    let certificate = request.status.as_ref().and_then(|status| status.certificate.as_ref());
    let ends = certificate.and_then(|pem| pki::ends(std::str::from_utf8(&pem.0).ok()?));
    match kept_until(&request, ends) {
        Some(until) if until <= ctx.clock.now() => ctx.delete(&*request).await.map(|()| Next::Change),
        Some(until) => Ok(Next::At(until)),
        None => Ok(Next::Change),
    }
}

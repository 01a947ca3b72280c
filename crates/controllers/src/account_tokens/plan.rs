//! Decides which data a token Secret needs and when a legacy token is invalidated or deleted. Does no I/O.

use jiff::civil::Date;
use jiff::{Span, tz::TimeZone};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret, ServiceAccount};
use reconcile::Object;
use serde_json::{Value, json};

const ACCOUNT_NAME: &str = "kubernetes.io/service-account.name";
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";
pub const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";

/// The name of the service account that a Secret holds a token for.
pub fn account_name(secret: &Secret) -> Option<&str> {
    secret.annotation(ACCOUNT_NAME).filter(|name| !name.is_empty())
}

/// The change that the tokens controller makes to a Secret.
#[derive(Debug, PartialEq)]
pub enum TokenAction {
    Nothing,
    /// The service account does not exist, or has another UID.
    Delete,
    /// Update the Secret. If `claims` is set, a token with these claims is signed and added first.
    Fill {
        secret: Box<Secret>,
        claims: Option<Value>,
    },
}

pub fn plan_token(secret: &Secret, account: Option<&ServiceAccount>, root_ca: &str) -> TokenAction {
    let uid = secret.annotation(ACCOUNT_UID).unwrap_or_default();
    if secret.is_deleting() {
        return TokenAction::Nothing;
    }
    let Some(account) = account.filter(|account| uid.is_empty() || account.uid() == uid) else {
        return TokenAction::Delete;
    };
    let has =
        |name: &str| secret.data.as_ref().and_then(|data| data.get(name)).map(|value| value.0.as_slice());
    let needs_token = has("token").is_none_or(<[u8]>::is_empty);
    let needs_ca = !root_ca.is_empty() && has("ca.crt") != Some(root_ca.as_bytes());
    let needs_namespace = has("namespace").is_none_or(<[u8]>::is_empty);
    if !needs_token && !needs_ca && !needs_namespace {
        return TokenAction::Nothing;
    }
    let mut filled = secret.clone();
    if needs_ca {
        set_data(&mut filled, "ca.crt", root_ca);
    }
    if needs_namespace {
        set_data(&mut filled, "namespace", secret.namespace());
    }
    let annotations = filled.metadata.annotations.get_or_insert_default();
    annotations.insert(ACCOUNT_NAME.into(), account.name().into());
    annotations.insert(ACCOUNT_UID.into(), account.uid().into());
    let claims = needs_token.then(|| {
        json!({
            "iss": "kubernetes/serviceaccount",
            "kubernetes.io/serviceaccount/namespace": account.namespace(),
            "kubernetes.io/serviceaccount/secret.name": secret.name(),
            "kubernetes.io/serviceaccount/service-account.name": account.name(),
            "kubernetes.io/serviceaccount/service-account.uid": account.uid(),
            "sub": format!("system:serviceaccount:{}:{}", account.namespace(), account.name()),
        })
    });
    TokenAction::Fill { secret: Box::new(filled), claims }
}

pub fn set_data(secret: &mut Secret, name: &str, value: &str) {
    secret.data.get_or_insert_default().insert(name.into(), ByteString(value.as_bytes().to_vec()));
}

/// Returns the account without its reference to the Secret, or `None` if it does not reference it.
pub fn without_secret(account: &ServiceAccount, secret: &str) -> Option<ServiceAccount> {
    let references = |account: &ServiceAccount| {
        account.secrets.iter().flatten().any(|reference| reference.name.as_deref() == Some(secret))
    };
    references(account).then(|| {
        let mut account = account.clone();
        account.secrets.get_or_insert_default().retain(|reference| reference.name.as_deref() != Some(secret));
        account
    })
}

/// The change that the legacy token cleaner makes to a Secret.
#[derive(Debug, PartialEq)]
pub enum CleanupAction {
    Nothing,
    /// Set the `legacy-token-invalid-since` label. The API server rejects the token from then on.
    MarkInvalid,
    Delete,
}

/// The date 365 days before `current_date`.
fn year_before(current_date: Date) -> Date {
    current_date.checked_sub(Span::new().days(365)).unwrap_or(Date::MIN)
}

/// Whether a token Secret was auto-generated (its account lists it), is older than a year and was not used
/// within the last year. Manually created token Secrets are never cleaned.
pub fn may_be_cleaned(secret: &Secret, account: Option<&ServiceAccount>, current_date: Date) -> bool {
    let uid = secret.annotation(ACCOUNT_UID).unwrap_or_default();
    let account = account.filter(|account| uid.is_empty() || account.uid() == uid);
    let listed = account.is_some_and(|account| {
        account.secrets.iter().flatten().any(|reference| reference.name.as_deref() == Some(secret.name()))
    });
    let created =
        secret.metadata.creation_timestamp.as_ref().map(|time| time.0.to_zoned(TimeZone::UTC).date());
    let old = created.is_some_and(|created| created < year_before(current_date));
    let used = match secret.label(LAST_USED) {
        // An unparseable date counts as recent use.
        Some(text) => text.parse::<Date>().map_or(true, |used| used >= year_before(current_date)),
        None => false,
    };
    listed && old && !used && !secret.is_deleting()
}

/// Decides on a Secret that [`may_be_cleaned`]. `tracking` is the date since which token use is recorded.
pub fn plan_cleanup(
    secret: &Secret,
    tracking: Option<Date>,
    mounted: bool,
    current_date: Date,
) -> CleanupAction {
    // Usage tracking must have been active for a full year, otherwise an old use may have gone unrecorded.
    let since = tracking.and_then(|since| since.tomorrow().ok());
    if mounted || since.is_none_or(|since| since > year_before(current_date)) {
        return CleanupAction::Nothing;
    }
    let invalid_since = secret.label(INVALID_SINCE).and_then(|text| text.parse::<Date>().ok());
    match invalid_since {
        None => CleanupAction::MarkInvalid,
        Some(invalid_since) if invalid_since >= year_before(current_date) => CleanupAction::Nothing,
        Some(_) => CleanupAction::Delete,
    }
}

/// Whether a pod references a Secret in its image pull secrets, environment or volumes.
pub fn references_secret(pod: &Pod, secret: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let is_it = |name: Option<&String>| name.is_some_and(|name| name == secret);
    let pulls = spec.image_pull_secrets.iter().flatten().any(|reference| reference.name == secret);
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let environment = containers.into_iter().any(|container| {
        let from = container.env_from.iter().flatten().filter_map(|from| from.secret_ref.as_ref());
        let keys =
            container.env.iter().flatten().filter_map(|env| env.value_from.as_ref()?.secret_key_ref.as_ref());
        from.map(|from| &from.name).chain(keys.map(|key| &key.name)).any(|name| name == secret)
    });
    let volumes = spec.volumes.iter().flatten().any(|volume| {
        let projected = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        is_it(volume.secret.as_ref().and_then(|volume| volume.secret_name.as_ref()))
            || projected
                .into_iter()
                .any(|source| source.secret.as_ref().is_some_and(|source| source.name == secret))
            || is_it(
                volume
                    .csi
                    .as_ref()
                    .and_then(|csi| csi.node_publish_secret_ref.as_ref())
                    .map(|reference| &reference.name),
            )
    });
    pulls || environment || volumes
}

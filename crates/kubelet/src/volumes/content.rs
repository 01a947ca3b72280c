//! The content of ConfigMap, Secret, downward API and projected volumes.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use k8s_openapi::api::core::v1::{
    Container, DownwardAPIVolumeFile, KeyToPath, Pod, ProjectedVolumeSource, ServiceAccount, Volume,
};
use reconcile::{Ctx, Key, Object as _};
use serde_json::json;

use super::VolumeContext;
use crate::atomic_writer::{FileProjection, Payload};
use crate::env::{field_value, resource_value};

/// Far more than a token needs.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// Whether a volume is of one of these types. Only the kubelet may change their content.
pub fn is_config_volume(volume: &Volume) -> bool {
    volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.projected.is_some()
}

/// Whether the content of a volume must not be written to disk: all of these types except
/// ConfigMaps.
pub fn is_in_memory(volume: &Volume) -> bool {
    is_config_volume(volume) && volume.config_map.is_none()
}

/// The directory and the content of a volume; `None` for other types.
pub async fn volume_payload(
    pod: &Pod,
    volume: &Volume,
    volume_dir: impl Fn(&str) -> std::path::PathBuf,
    volume_context: &VolumeContext<'_>,
) -> Result<Option<(std::path::PathBuf, Payload)>, String> {
    Ok(Some(if let Some(source) = &volume.config_map {
        let mode = source.default_mode.unwrap_or(0o644);
        let found =
            config_map(pod, &source.name, source.items.as_deref(), mode, source.optional, volume_context)?;
        (volume_dir("kubernetes.io~configmap"), found)
    } else if let Some(source) = &volume.secret {
        let name = source.secret_name.as_deref().unwrap_or_default();
        let mode = source.default_mode.unwrap_or(0o644);
        let found = secret(pod, name, source.items.as_deref(), mode, source.optional, volume_context)?;
        (volume_dir("kubernetes.io~secret"), found)
    } else if let Some(source) = &volume.downward_api {
        let mode = source.default_mode.unwrap_or(0o644);
        (
            volume_dir("kubernetes.io~downward-api"),
            downward_api(pod, source.items.as_deref(), mode, volume_context)?,
        )
    } else if let Some(source) = &volume.projected {
        let dir = volume_dir("kubernetes.io~projected");
        let payload = projected(pod, source, &dir, volume_context).await?;
        (dir, payload)
    } else {
        return Ok(None);
    }))
}

fn mode_of(mode: Option<i32>, default: i32) -> u32 {
    u32::try_from(mode.unwrap_or(default)).unwrap_or(0o644)
}

/// The selected keys of a ConfigMap or Secret by path.
fn select_items(
    data: &BTreeMap<String, Vec<u8>>,
    items: Option<&[KeyToPath]>,
    mode: i32,
    optional: bool,
) -> Result<Payload, String> {
    let Some(items) = items.filter(|items| !items.is_empty()) else {
        let all = data.iter().map(|(key, bytes)| {
            (key.clone(), FileProjection { bytes: bytes.clone(), mode: mode_of(None, mode), owner: None })
        });
        return Ok(all.collect());
    };
    let mut payload = Payload::new();
    for item in items {
        match data.get(&item.key) {
            Some(bytes) => {
                let file =
                    FileProjection { bytes: bytes.clone(), mode: mode_of(item.mode, mode), owner: None };
                payload.insert(item.path.clone(), file);
            }
            None if optional => {}
            None => return Err(format!("references non-existent config key: {}", item.key)),
        }
    }
    Ok(payload)
}

fn config_map(
    pod: &Pod,
    name: &str,
    items: Option<&[KeyToPath]>,
    mode: i32,
    optional: Option<bool>,
    volume_context: &VolumeContext<'_>,
) -> Result<Payload, String> {
    let optional = optional == Some(true);
    let Some(map) = volume_context.sources.config_map(pod.namespace(), name) else {
        return if optional { Ok(Payload::new()) } else { Err(format!("configmap {name:?} not found")) };
    };
    let mut data: BTreeMap<String, Vec<u8>> =
        map.data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes())).collect();
    data.extend(map.binary_data.iter().flatten().map(|(key, bytes)| (key.clone(), bytes.0.clone())));
    select_items(&data, items, mode, optional)
}

fn secret(
    pod: &Pod,
    name: &str,
    items: Option<&[KeyToPath]>,
    mode: i32,
    optional: Option<bool>,
    volume_context: &VolumeContext<'_>,
) -> Result<Payload, String> {
    let optional = optional == Some(true);
    let Some(secret) = volume_context.sources.secret(pod.namespace(), name) else {
        return if optional { Ok(Payload::new()) } else { Err(format!("secret {name:?} not found")) };
    };
    let data = secret.data.iter().flatten().map(|(key, bytes)| (key.clone(), bytes.0.clone())).collect();
    select_items(&data, items, mode, optional)
}

fn downward_api(
    pod: &Pod,
    items: Option<&[DownwardAPIVolumeFile]>,
    mode: i32,
    volume_context: &VolumeContext<'_>,
) -> Result<Payload, String> {
    let mut payload = Payload::new();
    for item in items.into_iter().flatten() {
        let text = match (&item.field_ref, &item.resource_field_ref) {
            (Some(field), _) => field_value(pod, field, &volume_context.addresses),
            (_, Some(resource)) => {
                resource_value(pod, &Container::default(), resource, volume_context.sources)
            }
            _ => continue,
        };
        let bytes = text.map_err(|missing| missing.0)?.into_bytes();
        payload
            .insert(item.path.clone(), FileProjection { bytes, mode: mode_of(item.mode, mode), owner: None });
    }
    Ok(payload)
}

async fn projected(
    pod: &Pod,
    source: &ProjectedVolumeSource,
    dir: &Path,
    volume_context: &VolumeContext<'_>,
) -> Result<Payload, String> {
    let mode = source.default_mode.unwrap_or(0o644);
    let mut payload = Payload::new();
    for source in source.sources.iter().flatten() {
        if let Some(map) = &source.config_map {
            payload.extend(config_map(
                pod,
                &map.name,
                map.items.as_deref(),
                mode,
                map.optional,
                volume_context,
            )?);
        }
        if let Some(from) = &source.secret {
            payload.extend(secret(
                pod,
                &from.name,
                from.items.as_deref(),
                mode,
                from.optional,
                volume_context,
            )?);
        }
        if let Some(from) = &source.downward_api {
            payload.extend(downward_api(pod, from.items.as_deref(), mode, volume_context)?);
        }
        if let Some(token_source) = &source.service_account_token {
            let seconds = token_source.expiration_seconds.unwrap_or(3607);
            let token = match current_token(dir, &token_source.path, seconds) {
                Some(known) => known,
                None => {
                    request_token(pod, token_source.audience.as_deref(), seconds, volume_context.ctx).await?
                }
            };
            let (owner, mode) = (common_user(pod), mode_of(None, mode));
            // As upstream: a token is readable only by its user, if that is known, or else through
            // the pod's group, which is added later.
            let mode = if owner.is_some() || super::fs_group(pod).is_some() { 0o600 } else { mode };
            payload
                .insert(token_source.path.clone(), FileProjection { bytes: token.into_bytes(), mode, owner });
        }
    }
    Ok(payload)
}

/// The user of all containers of a pod, if the spec sets the same one for all of them.
fn common_user(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let shared = spec.security_context.as_ref().and_then(|shared| shared.run_as_user);
    let mut users = crate::pod::containers(pod).into_iter().map(|container| {
        let own = container.security_context.and_then(|own| own.run_as_user);
        own.or(shared)
    });
    let first = users.next()??;
    users.all(|user| user == Some(first)).then(|| u32::try_from(first).ok()).flatten()
}

/// The existing token, unless it has to be refreshed.
fn current_token(dir: &Path, path: &str, seconds: i64) -> Option<String> {
    let file = super::sub_path::open_file(dir, path).ok()?;
    let age = file.metadata().ok()?.modified().ok()?.elapsed().ok()?;
    let fresh = age.as_secs() < u64::try_from(refresh_after_seconds(seconds)).ok()?;
    fresh.then(|| std::io::read_to_string(file.take(MAX_TOKEN_BYTES)).ok()).flatten()
}

/// After how many seconds a token is refreshed: 80 % of its lifetime, but after a day at the
/// latest.
pub fn refresh_after_seconds(seconds: i64) -> i64 {
    (seconds * 8 / 10).min(24 * 60 * 60)
}

/// Requests a token for the pod's service account that is bound to the pod.
pub async fn request_token(
    pod: &Pod,
    audience: Option<&str>,
    seconds: i64,
    ctx: &Ctx,
) -> Result<String, String> {
    let account =
        pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).unwrap_or("default".into());
    let audiences: Vec<&str> = audience.into_iter().filter(|audience| !audience.is_empty()).collect();
    let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name(), "uid": pod.uid()});
    let body = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": {"audiences": audiences, "expirationSeconds": seconds, "boundObjectRef": bound}
    });
    let key = Key::new(pod.namespace(), &account);
    let response = ctx.client.create_at::<ServiceAccount>(&key, "token", &body).await;
    let response = response.map_err(|error| format!("failed to fetch token: {error}"))?;
    Ok(response["status"]["token"].as_str().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn token_owner_is_the_common_user() {
        let check = |shared: Value, own: [Value; 3], expected: Option<u32>| {
            let [init, main, look] =
                own.map(|user| json!({"name": "c", "securityContext": {"runAsUser": user}}));
            let spec = json!({
                "securityContext": {"runAsUser": shared},
                "initContainers": [init], "containers": [main], "ephemeralContainers": [look],
            });
            let pod = serde_json::from_value(json!({"metadata": {}, "spec": spec})).expect("a pod");
            assert_eq!(common_user(&pod), expected, "{spec}");
        };
        let unset = || Value::Null;
        check(unset(), [unset(), unset(), unset()], None);
        check(json!(7), [unset(), unset(), unset()], Some(7));
        check(json!(7), [unset(), json!(8), unset()], None);
        check(json!(7), [json!(8), json!(8), json!(8)], Some(8));
        check(unset(), [json!(8), json!(8), unset()], None);
        check(json!(0), [unset(), unset(), unset()], Some(0));
    }
}

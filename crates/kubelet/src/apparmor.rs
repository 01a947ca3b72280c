//! AppArmor: selects the profile of a container and checks that this node can enforce it.

use std::path::Path;

use k8s_openapi::api::core::v1::{AppArmorProfile, Container, Pod};
use runtime::cri::{ProfileType, SecurityProfile};

/// The annotation that preceded the field. The container name follows the slash.
const ANNOTATION_PREFIX: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Why the AppArmor profiles of a pod cannot be enforced on this node.
pub fn validate(pod: &Pod) -> Option<String> {
    if !is_required(pod) {
        return None;
    }
    let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled").unwrap_or_default();
    let is_enabled = enabled.starts_with('Y') && Path::new("/sys/kernel/security/apparmor").exists();
    validate_profiles(pod, is_enabled)
}

fn validate_profiles(pod: &Pod, is_enabled: bool) -> Option<String> {
    if !is_required(pod) {
        return None;
    }
    if !is_enabled {
        return Some("Cannot enforce AppArmor: AppArmor is not enabled on the host".to_owned());
    }
    let has_empty_name = crate::pod::containers(pod).into_iter().any(|container| {
        profile(pod, &container).is_some_and(|profile| {
            let name = profile.localhost_profile.as_deref().unwrap_or_default();
            profile.type_ == "Localhost" && name.trim().is_empty()
        })
    });
    has_empty_name
        .then(|| "Cannot enforce AppArmor: invalid empty AppArmor profile name: \"Localhost\"".to_owned())
}

fn is_required(pod: &Pod) -> bool {
    let is_enforced =
        |profile: Option<&AppArmorProfile>| profile.is_some_and(|one| one.type_ != "Unconfined");
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let annotations = pod.metadata.annotations.iter().flatten();
    is_enforced(context.and_then(|context| context.app_armor_profile.as_ref()))
        || crate::pod::containers(pod).iter().any(|container| is_enforced(container_profile(container)))
        || annotations
            .into_iter()
            .any(|(key, value)| key.starts_with(ANNOTATION_PREFIX) && value != "unconfined")
}

fn container_profile(container: &Container) -> Option<&AppArmorProfile> {
    container.security_context.as_ref()?.app_armor_profile.as_ref()
}

fn profile(pod: &Pod, container: &Container) -> Option<AppArmorProfile> {
    let annotated = || {
        let key = format!("{ANNOTATION_PREFIX}{}", container.name);
        let named = |type_: &str, name: Option<&str>| AppArmorProfile {
            type_: type_.to_owned(),
            localhost_profile: name.map(str::to_owned),
        };
        match pod.metadata.annotations.as_ref()?.get(&key)?.as_str() {
            "runtime/default" => Some(named("RuntimeDefault", None)),
            "unconfined" => Some(named("Unconfined", None)),
            text => text.strip_prefix("localhost/").map(|name| named("Localhost", Some(name))),
        }
    };
    let of_pod = || pod.spec.as_ref()?.security_context.as_ref()?.app_armor_profile.clone();
    container_profile(container).cloned().or_else(annotated).or_else(of_pod)
}

/// The AppArmor profile in CRI's terms. `None` without any setting: the runtime uses its default.
pub fn security_profile(pod: &Pod, container: &Container) -> Option<SecurityProfile> {
    let profile = profile(pod, container)?;
    let profile_type = match profile.type_.as_str() {
        "RuntimeDefault" => ProfileType::RuntimeDefault,
        "Localhost" => ProfileType::Localhost,
        _ => ProfileType::Unconfined,
    };
    Some(SecurityProfile {
        profile_type: profile_type.into(),
        localhost_ref: profile.localhost_profile.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(context: Value, own: Value, annotations: Value) -> Pod {
        let spec = json!({"containers": [{"name": "a", "securityContext": own}], "securityContext": context});
        serde_json::from_value(json!({"metadata": {"name": "p", "annotations": annotations}, "spec": spec}))
            .unwrap()
    }

    #[track_caller]
    fn check(pod: &Pod, expected: Option<(ProfileType, &str)>, without: Option<&str>) {
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let found = security_profile(pod, container);
        let found = found.as_ref().map(|one| (one.profile_type(), one.localhost_ref.as_str()));
        assert_eq!(found, expected);
        let message = validate_profiles(pod, false);
        assert_eq!(
            message.as_deref().map(|text| text.trim_start_matches("Cannot enforce AppArmor: ")),
            without
        );
    }

    #[test]
    fn container_profile_overrides_annotation_and_pod_profile() {
        let profile = |profile_type: &str| json!({"appArmorProfile": {"type": profile_type, "localhostProfile": "mine"}});
        let off = Some("AppArmor is not enabled on the host");
        let none = || json!({});
        check(&pod(none(), none(), none()), None, None);
        check(
            &pod(profile("RuntimeDefault"), none(), none()),
            Some((ProfileType::RuntimeDefault, "mine")),
            off,
        );
        check(&pod(none(), profile("Unconfined"), none()), Some((ProfileType::Unconfined, "mine")), None);
        let both = pod(profile("RuntimeDefault"), profile("Localhost"), none());
        check(&both, Some((ProfileType::Localhost, "mine")), off);
        assert_eq!(validate_profiles(&both, true), None);
        let key = format!("{ANNOTATION_PREFIX}a");
        let old = pod(none(), none(), json!({key.clone(): "localhost/old"}));
        check(&old, Some((ProfileType::Localhost, "old")), off);
        let empty_name = pod(none(), none(), json!({key: "localhost/ "}));
        let message = "Cannot enforce AppArmor: invalid empty AppArmor profile name: \"Localhost\"";
        assert_eq!(validate_profiles(&empty_name, true).as_deref(), Some(message));
    }
}

//! Enforces `runAsNonRoot`, and completes the user of a container from its image.

use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::Object as _;
use runtime::cri::{Image, ImageSpec, LinuxContainerSecurityContext};

use crate::Node;

/// Sets the image's user for a container with only `runAsGroup`: CRI requires a user with a group.
pub async fn set_image_user(
    node: &Node,
    image: &ImageSpec,
    security: &mut LinuxContainerSecurityContext,
) -> Result<(), String> {
    if security.run_as_group.is_none() || security.run_as_user.is_some() {
        return Ok(());
    }
    let image = node.runtime.image(image).await.map_err(|error| error.message())?.unwrap_or_default();
    if image.username.is_empty() {
        security.run_as_user = Some(image.uid.unwrap_or_default());
    } else {
        security.run_as_username = image.username;
    }
    Ok(())
}

/// Fails for a container with `runAsNonRoot` that would run as root.
pub async fn verify_non_root(
    node: &Node,
    pod: &Pod,
    container: &Container,
    image: &ImageSpec,
) -> Result<(), String> {
    match non_root_check(pod, container) {
        NonRootCheck::None => Ok(()),
        NonRootCheck::RunsAsRoot => Err(format!(
            "container's runAsUser breaks non-root policy ({})",
            container_description(pod, container)
        )),
        NonRootCheck::ImageUser => {
            let image = node.runtime.image(image).await.map_err(|error| error.message())?;
            verify_image_user(&image.unwrap_or_default()).map_err(|reason| {
                format!(
                    "container has runAsNonRoot and image {reason} ({})",
                    container_description(pod, container)
                )
            })
        }
    }
}

fn container_description(pod: &Pod, container: &Container) -> String {
    let pod_name = format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid());
    format!("pod: {pod_name:?}, container: {}", container.name)
}

/// The result of the security contexts alone.
#[derive(Debug, PartialEq)]
enum NonRootCheck {
    None,
    RunsAsRoot,
    ImageUser,
}

fn non_root_check(pod: &Pod, container: &Container) -> NonRootCheck {
    let shared = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let own = container.security_context.as_ref();
    let no_root =
        own.and_then(|own| own.run_as_non_root).or(shared.and_then(|shared| shared.run_as_non_root));
    let user = own.and_then(|own| own.run_as_user).or(shared.and_then(|shared| shared.run_as_user));
    match (no_root, user) {
        (Some(true), Some(0)) => NonRootCheck::RunsAsRoot,
        (Some(true), None) => NonRootCheck::ImageUser,
        _ => NonRootCheck::None,
    }
}

fn verify_image_user(image: &Image) -> Result<(), String> {
    match (&image.uid, image.username.as_str()) {
        (Some(uid), _) if uid.value != 0 => Ok(()),
        (Some(_), _) | (None, "") => Err("will run as root".to_owned()),
        (None, name) => Err(format!("has non-numeric user ({name}), cannot verify user is non-root")),
    }
}

#[cfg(test)]
mod tests {
    use runtime::cri::Int64Value;
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn verify_non_root(pod: serde_json::Value, container: serde_json::Value, expected: NonRootCheck) {
        let pod = serde_json::from_value(json!({"spec": {"containers": [], "securityContext": pod}}));
        let container = serde_json::from_value(json!({"name": "a", "securityContext": container}));
        assert_eq!(non_root_check(&pod.expect("a pod"), &container.expect("a container")), expected);
    }

    #[test]
    fn container_settings_override_pod_settings() {
        verify_non_root(json!({}), json!({}), NonRootCheck::None);
        verify_non_root(json!({"runAsNonRoot": true}), json!({}), NonRootCheck::ImageUser);
        verify_non_root(json!({"runAsNonRoot": true, "runAsUser": 5}), json!({}), NonRootCheck::None);
        verify_non_root(
            json!({"runAsNonRoot": true, "runAsUser": 5}),
            json!({"runAsUser": 0}),
            NonRootCheck::RunsAsRoot,
        );
        verify_non_root(json!({"runAsNonRoot": true}), json!({"runAsNonRoot": false}), NonRootCheck::None);
    }

    #[test]
    fn image_user_must_be_numeric_and_not_root() {
        let image = |uid: Option<i64>, name: &str| Image {
            uid: uid.map(|value| Int64Value { value }),
            username: name.to_owned(),
            ..Image::default()
        };
        assert_eq!(verify_image_user(&image(Some(5), "")), Ok(()));
        assert_eq!(verify_image_user(&image(Some(0), "")), Err("will run as root".to_owned()));
        assert_eq!(verify_image_user(&image(None, "")), Err("will run as root".to_owned()));
        let message = "has non-numeric user (web), cannot verify user is non-root";
        assert_eq!(verify_image_user(&image(None, "web")), Err(message.to_owned()));
    }
}

//! Who a container would run as, for those that must not be root.

use k8s_openapi::api::core::v1::{Container, Pod};
use reconcile::Object as _;
use runtime::cri::{Image, ImageSpec, LinuxContainerSecurityContext};

use crate::Node;

/// Names the image's user for a container that has only its group said: runtimes take no group without one.
pub async fn complete(
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

/// Refuses to run as root what must not be.
pub async fn check(node: &Node, pod: &Pod, container: &Container, image: &ImageSpec) -> Result<(), String> {
    match demand(pod, container) {
        Demand::None => Ok(()),
        Demand::Broken => {
            Err(format!("container's runAsUser breaks non-root policy ({})", named(pod, container)))
        }
        Demand::OfImage => {
            let image = node.runtime.image(image).await.map_err(|error| error.message())?;
            of_image(&image.unwrap_or_default()).map_err(|why| {
                format!("container has runAsNonRoot and image {why} ({})", named(pod, container))
            })
        }
    }
}

fn named(pod: &Pod, container: &Container) -> String {
    let whole = format!("{}_{}({})", pod.name(), pod.namespace(), pod.uid());
    format!("pod: {whole:?}, container: {}", container.name)
}

/// What has to be found out.
#[derive(Debug, PartialEq)]
enum Demand {
    None,
    Broken,
    OfImage,
}

fn demand(pod: &Pod, container: &Container) -> Demand {
    let shared = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let own = container.security_context.as_ref();
    let no_root =
        own.and_then(|own| own.run_as_non_root).or(shared.and_then(|shared| shared.run_as_non_root));
    let user = own.and_then(|own| own.run_as_user).or(shared.and_then(|shared| shared.run_as_user));
    match (no_root, user) {
        (Some(true), Some(0)) => Demand::Broken,
        (Some(true), None) => Demand::OfImage,
        _ => Demand::None,
    }
}

fn of_image(image: &Image) -> Result<(), String> {
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
    fn check(pod: serde_json::Value, container: serde_json::Value, expected: Demand) {
        let pod = serde_json::from_value(json!({"spec": {"containers": [], "securityContext": pod}}));
        let container = serde_json::from_value(json!({"name": "a", "securityContext": container}));
        assert_eq!(demand(&pod.expect("a pod"), &container.expect("a container")), expected);
    }

    #[test]
    fn what_is_demanded() {
        check(json!({}), json!({}), Demand::None);
        check(json!({"runAsNonRoot": true}), json!({}), Demand::OfImage);
        check(json!({"runAsNonRoot": true, "runAsUser": 5}), json!({}), Demand::None);
        check(json!({"runAsNonRoot": true, "runAsUser": 5}), json!({"runAsUser": 0}), Demand::Broken);
        check(json!({"runAsNonRoot": true}), json!({"runAsNonRoot": false}), Demand::None);
    }

    #[test]
    fn what_images_run_as() {
        let image = |uid: Option<i64>, name: &str| Image {
            uid: uid.map(|value| Int64Value { value }),
            username: name.to_owned(),
            ..Image::default()
        };
        assert_eq!(of_image(&image(Some(5), "")), Ok(()));
        assert_eq!(of_image(&image(Some(0), "")), Err("will run as root".to_owned()));
        assert_eq!(of_image(&image(None, "")), Err("will run as root".to_owned()));
        let why = "has non-numeric user (web), cannot verify user is non-root";
        assert_eq!(of_image(&image(None, "web")), Err(why.to_owned()));
    }
}

//! What the runtime says it can do beyond the least that is asked of one, and whether that is enough for a pod.

use k8s_openapi::api::core::v1::{NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use reconcile::{Key, Object as _};
use runtime::cri::{RuntimeHandler, StatusResponse};

use crate::{Node, volumes};

/// The name of the runtime inside this program. What it can do follows from the node's version, so that the node does
/// not tell of it: its status has the fields that upstream's has with a runtime that tells nothing.
const BUILTIN_RUNTIME: &str = "skiff";

#[derive(Clone, Debug, Default)]
pub struct RuntimeCapabilities {
    /// The handlers with which all that is mounted below a read-only mount can be read-only as well; the usual one has
    /// no name.
    recursive_read_only: Vec<String>,
    /// Containers can be without the groups that their image gives them.
    pub strict_groups: bool,
}

impl RuntimeCapabilities {
    pub fn from_status(status: &StatusResponse) -> RuntimeCapabilities {
        let has = |handler: &&RuntimeHandler| {
            handler.features.as_ref().is_some_and(|features| features.recursive_read_only_mounts)
        };
        let handlers = status.runtime_handlers.iter().filter(has);
        RuntimeCapabilities {
            recursive_read_only: handlers.map(|handler| handler.name.clone()).collect(),
            strict_groups: status
                .features
                .as_ref()
                .is_some_and(|features| features.supplemental_groups_policy),
        }
    }

    /// Whether all that is mounted below a read-only mount can be read-only as well, with this handler.
    pub fn supports_recursive_read_only(&self, handler: &str) -> bool {
        self.recursive_read_only.iter().any(|known| known == handler)
    }
}

/// What the node's status tells of a runtime.
pub fn node_status_features(
    runtime: &str,
    status: Option<&StatusResponse>,
) -> (Option<Vec<NodeRuntimeHandler>>, Option<NodeFeatures>) {
    let Some(status) = status.filter(|_| runtime != BUILTIN_RUNTIME) else { return (None, None) };
    let handlers = status.runtime_handlers.iter().map(|handler| NodeRuntimeHandler {
        name: Some(handler.name.clone()),
        features: handler.features.as_ref().map(|features| NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(features.recursive_read_only_mounts),
            user_namespaces: Some(features.user_namespaces),
        }),
    });
    let handlers: Vec<NodeRuntimeHandler> = handlers.collect();
    let strict = RuntimeCapabilities::from_status(status).strict_groups;
    let features = strict.then_some(NodeFeatures { supplemental_groups_policy: Some(true) });
    ((!handlers.is_empty()).then_some(handlers), features)
}

impl Node {
    /// What the runtime calls the class the pod wants to be run by.
    pub async fn runtime_handler(&self, pod: &Pod) -> Result<String, String> {
        let class = pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref()).unwrap_or_default();
        if class.is_empty() {
            return Ok(String::new());
        }
        match self.ctx.client.get::<RuntimeClass>(&Key::new("", class)).await {
            Ok(class) => Ok(class.handler),
            Err(error) if error.is_not_found() => Err(error.to_string()),
            Err(error) => Err(format!("failed to lookup RuntimeClass {class}: {error}")),
        }
    }

    /// Whether what is mounted below read-only mounts of the pod can be read-only as well.
    pub async fn pod_supports_recursive_read_only(&self, pod: &Pod) -> bool {
        let mounts = volumes::all_mounts(pod);
        // Nearly nobody asks for it.
        if mounts.filter_map(|mount| mount.recursive_read_only.as_deref()).all(|mode| mode == "Disabled") {
            return false;
        }
        match self.runtime_handler(pod).await {
            Ok(handler) => self.runtime_capabilities.lock().supports_recursive_read_only(&handler),
            Err(error) => {
                tracing::warn!(error, pod = %pod.key(), "no runtime handler");
                false
            }
        }
    }

    /// Whether the runtime has users of pods' own, in upstream's words where not.
    pub async fn check_user_namespaces(&self, handler: &str) -> Result<(), String> {
        let not = match handler {
            "" => "can't set `spec.hostUsers: false`, runtime does not support user namespaces".to_owned(),
            name => format!(
                "can't set `spec.hostUsers: false`, RuntimeClass handler {name:?} does not support user namespaces"
            ),
        };
        let status = self.runtime.status().await.map_err(|error| format!("{not}: {}", error.message()))?;
        let found = status.runtime_handlers.iter().find(|known| known.name == handler);
        if found.is_none() && !status.runtime_handlers.is_empty() {
            return Err(format!("{not}: the handler {handler:?} is not known"));
        }
        let has = found.and_then(|known| known.features.as_ref()).is_some_and(|has| has.user_namespaces);
        if has { Ok(()) } else { Err(not) }
    }
}

#[cfg(test)]
mod tests {
    use runtime::cri::RuntimeHandlerFeatures;

    use super::*;

    #[test]
    fn features_are_per_runtime_handler() {
        let handler = |name: &str, recursive_read_only_mounts, user_namespaces| RuntimeHandler {
            name: name.to_owned(),
            features: Some(RuntimeHandlerFeatures { recursive_read_only_mounts, user_namespaces }),
        };
        let without_features = RuntimeHandler { name: "quiet".to_owned(), features: None };
        let handlers = vec![handler("", true, true), handler("vm", false, true), without_features];
        let status = StatusResponse { runtime_handlers: handlers, ..StatusResponse::default() };
        let capabilities = RuntimeCapabilities::from_status(&status);
        let found =
            ["", "vm", "quiet", "unknown"].map(|name| capabilities.supports_recursive_read_only(name));
        assert_eq!(found, [true, false, false, false]);
        let (handlers, features) = node_status_features("containerd", Some(&status));
        expect_test::expect![[r#"[{"features":{"recursiveReadOnlyMounts":true,"userNamespaces":true},"name":""},{"features":{"recursiveReadOnlyMounts":false,"userNamespaces":true},"name":"vm"},{"name":"quiet"}]"#]]
        .assert_eq(&serde_json::to_value(handlers).expect("a list").to_string());
        assert_eq!(features, None);
        assert_eq!(node_status_features(BUILTIN_RUNTIME, Some(&status)), (None, None));
    }
}

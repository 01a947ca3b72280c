//! The optional features that a container runtime reports through CRI, and checks that they suffice
//! for a pod. Shown in `status.runtimeHandlers` and `status.features` of the Node.

use k8s_openapi::api::core::v1::{NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use reconcile::{Key, Object as _};
use runtime::cri::{RuntimeHandler, StatusResponse};

use crate::{Node, volumes};

/// The name of the built-in runtime. Its features follow from the version of the node, so the node
/// status leaves the feature fields out, as upstream's kubelet does with a runtime that reports
/// none.
const BUILTIN_RUNTIME: &str = "skiff";

/// What the runtime supports beyond the required part of CRI.
#[derive(Clone, Debug, Default)]
pub struct RuntimeCapabilities {
    /// The runtime handlers that support recursive read-only mounts. The default handler has an
    /// empty name.
    recursive_read_only: Vec<String>,
    /// The runtime supports the `Strict` policy for supplemental groups.
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

    /// Whether this runtime handler supports recursive read-only mounts.
    pub fn supports_recursive_read_only(&self, handler: &str) -> bool {
        self.recursive_read_only.iter().any(|known| known == handler)
    }
}

/// The `runtimeHandlers` and `features` of the node status.
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
    /// The runtime handler of the pod's RuntimeClass. Empty for the default handler.
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

    /// Whether the read-only mounts of the pod can be recursively read-only.
    pub async fn pod_supports_recursive_read_only(&self, pod: &Pod) -> bool {
        let mounts = volumes::all_mounts(pod);
        // Hardly any pod uses the field. Return early, because the lookup of the RuntimeClass is a
        // request.
        if mounts.filter_map(|mount| mount.recursive_read_only.as_deref()).all(|mode| mode == "Disabled") {
            return false;
        }
        match self.runtime_handler(pod).await {
            Ok(handler) => self.runtime_capabilities.lock().supports_recursive_read_only(&handler),
            Err(error) => {
                tracing::warn!(error, pod = %pod.key(), "failed to look up the runtime handler");
                false
            }
        }
    }

    /// Fails with upstream's message unless the runtime handler supports user namespaces.
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

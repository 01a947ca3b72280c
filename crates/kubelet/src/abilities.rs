//! What the runtime says it can do beyond the least that is asked of one.

use k8s_openapi::api::core::v1::{NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures};
use runtime::cri::{RuntimeHandler, StatusResponse};

/// The name of the runtime inside this program. What it can do follows from the node's version, so that the node does
/// not tell of it: its status has the fields that upstream's has with a runtime that tells nothing.
const OWN: &str = "skiff";

#[derive(Clone, Debug, Default)]
pub struct Abilities {
    /// The handlers with which all that is mounted below a read-only mount can be read-only as well; the usual one has
    /// no name.
    recursive_read_only: Vec<String>,
    /// Containers can be without the groups that their image gives them.
    pub strict_groups: bool,
}

impl Abilities {
    pub fn of(told: &StatusResponse) -> Abilities {
        let has = |handler: &&RuntimeHandler| {
            handler.features.as_ref().is_some_and(|features| features.recursive_read_only_mounts)
        };
        let handlers = told.runtime_handlers.iter().filter(has);
        Abilities {
            recursive_read_only: handlers.map(|handler| handler.name.clone()).collect(),
            strict_groups: told.features.as_ref().is_some_and(|features| features.supplemental_groups_policy),
        }
    }

    /// Whether all that is mounted below a read-only mount can be read-only as well, with this handler.
    pub fn is_recursive(&self, handler: &str) -> bool {
        self.recursive_read_only.iter().any(|known| known == handler)
    }
}

/// What the node's status tells of a runtime.
pub fn shown(
    runtime: &str,
    told: Option<&StatusResponse>,
) -> (Option<Vec<NodeRuntimeHandler>>, Option<NodeFeatures>) {
    let Some(told) = told.filter(|_| runtime != OWN) else { return (None, None) };
    let handlers = told.runtime_handlers.iter().map(|handler| NodeRuntimeHandler {
        name: Some(handler.name.clone()),
        features: handler.features.as_ref().map(|features| NodeRuntimeHandlerFeatures {
            recursive_read_only_mounts: Some(features.recursive_read_only_mounts),
            user_namespaces: Some(features.user_namespaces),
        }),
    });
    let handlers: Vec<NodeRuntimeHandler> = handlers.collect();
    let strict = Abilities::of(told).strict_groups;
    let features = strict.then_some(NodeFeatures { supplemental_groups_policy: Some(true) });
    ((!handlers.is_empty()).then_some(handlers), features)
}

#[cfg(test)]
mod tests {
    use runtime::cri::RuntimeHandlerFeatures;

    use super::*;

    #[test]
    fn handlers_are_told_apart() {
        let handler = |name: &str, recursive_read_only_mounts, user_namespaces| RuntimeHandler {
            name: name.to_owned(),
            features: Some(RuntimeHandlerFeatures { recursive_read_only_mounts, user_namespaces }),
        };
        let quiet = RuntimeHandler { name: "quiet".to_owned(), features: None };
        let handlers = vec![handler("", true, true), handler("vm", false, true), quiet];
        let told = StatusResponse { runtime_handlers: handlers, ..StatusResponse::default() };
        let abilities = Abilities::of(&told);
        let found = ["", "vm", "quiet", "unknown"].map(|name| abilities.is_recursive(name));
        assert_eq!(found, [true, false, false, false]);
        let (handlers, features) = shown("containerd", Some(&told));
        expect_test::expect![[r#"[{"features":{"recursiveReadOnlyMounts":true,"userNamespaces":true},"name":""},{"features":{"recursiveReadOnlyMounts":false,"userNamespaces":true},"name":"vm"},{"name":"quiet"}]"#]]
        .assert_eq(&serde_json::to_value(handlers).expect("a list").to_string());
        assert_eq!(features, None);
        assert_eq!(shown(OWN, Some(&told)), (None, None));
    }
}

//! What the runtime says it can do beyond the least that is asked of one.

use k8s_openapi::api::core::v1::{NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures};
use runtime::cri::StatusResponse;

/// The name of the runtime inside this program. What it can do follows from the node's version, so that the node does
/// not tell of it: its status has the fields that upstream's has with a runtime that tells nothing.
const OWN: &str = "skiff";

#[derive(Clone, Copy, Debug, Default)]
pub struct Abilities {
    /// All that is mounted below a read-only mount can be read-only as well.
    pub recursive_read_only: bool,
    /// Containers can be without the groups that their image gives them.
    pub strict_groups: bool,
}

impl Abilities {
    pub fn of(told: &StatusResponse) -> Abilities {
        let default = told.runtime_handlers.iter().find(|handler| handler.name.is_empty());
        let features = default.and_then(|handler| handler.features.as_ref());
        Abilities {
            recursive_read_only: features.is_some_and(|features| features.recursive_read_only_mounts),
            strict_groups: told.features.as_ref().is_some_and(|features| features.supplemental_groups_policy),
        }
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

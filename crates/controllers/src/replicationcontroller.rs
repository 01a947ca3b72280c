//! ReplicationController controller, based on the ReplicaSet controller.

use std::borrow::Cow;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetSpec, ReplicaSetStatus};
use k8s_openapi::api::core::v1::{
    Pod, ReplicationController, ReplicationControllerCondition, ReplicationControllerStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use reconcile::{Cache, Ctx};

use crate::replicaset::{ReplicaOwner, run_controller};

pub async fn run(ctx: Ctx) {
    // Upstream uses this name for the service account and for events, and the controller name elsewhere.
    let ctx = ctx.for_controller("replication-controller");
    run_controller::<ReplicationController>(ctx, "replicationmanager").await;
}

impl ReplicaOwner for ReplicationController {
    fn all(ctx: &Ctx) -> &Arc<Cache<ReplicationController>> {
        ctx.caches.replication_controllers()
    }

    fn as_set(&self) -> Cow<'_, ReplicaSet> {
        let spec = self.spec.as_ref().map(|spec| ReplicaSetSpec {
            replicas: spec.replicas,
            min_ready_seconds: spec.min_ready_seconds,
            selector: LabelSelector { match_labels: spec.selector.clone(), match_expressions: None },
            template: spec.template.clone(),
        });
        let status = self.status.as_ref().map(|status| ReplicaSetStatus {
            replicas: status.replicas,
            fully_labeled_replicas: status.fully_labeled_replicas,
            ready_replicas: status.ready_replicas,
            available_replicas: status.available_replicas,
            observed_generation: status.observed_generation,
            terminating_replicas: None,
            conditions: status.conditions.as_ref().map(|all| all.iter().map(as_condition).collect()),
        });
        Cow::Owned(ReplicaSet { metadata: self.metadata.clone(), spec, status })
    }

    fn with_status(&self, status: ReplicaSetStatus) -> Option<ReplicationController> {
        let conditions = status.conditions.map(|all| all.into_iter().map(from_condition).collect());
        let status = ReplicationControllerStatus {
            replicas: status.replicas,
            fully_labeled_replicas: status.fully_labeled_replicas,
            ready_replicas: status.ready_replicas,
            available_replicas: status.available_replicas,
            observed_generation: status.observed_generation,
            conditions,
        };
        let same = self.status.as_ref() == Some(&status);
        (!same).then(|| ReplicationController { status: Some(status), ..self.clone() })
    }

    /// A ReplicationController has no owner that it could share with others.
    fn related_pods(&self, _: &Ctx) -> Vec<Arc<Pod>> {
        Vec::new()
    }
}

fn as_condition(condition: &ReplicationControllerCondition) -> ReplicaSetCondition {
    ReplicaSetCondition {
        type_: condition.type_.clone(),
        status: condition.status.clone(),
        last_transition_time: condition.last_transition_time.clone(),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
    }
}

fn from_condition(condition: ReplicaSetCondition) -> ReplicationControllerCondition {
    ReplicationControllerCondition {
        type_: condition.type_,
        status: condition.status,
        last_transition_time: condition.last_transition_time,
        reason: condition.reason,
        message: condition.message,
    }
}

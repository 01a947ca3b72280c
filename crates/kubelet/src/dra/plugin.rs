//! A registered DRA plugin and its gRPC calls.

use std::sync::Arc;
use std::time::Duration;

use runtime::{GrpcClient, RefusalCode, RpcError};
use tokio::sync::watch;

use super::messages::*;
use crate::plugins::PluginRegistrationInfo;

/// Upstream's timeout for one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);
const HEALTH_CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// A version of the DRA plugin API and its methods.
#[derive(Debug)]
struct Service {
    name: &'static str,
    prepare: &'static str,
    unprepare: &'static str,
}

static SERVICES: [Service; 2] = [
    Service {
        name: "v1.DRAPlugin",
        prepare: "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
        unprepare: "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
    },
    Service {
        name: "v1beta1.DRAPlugin",
        prepare: "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
        unprepare: "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
    },
];

/// One instance of a driver on this node. During a rolling update there are two.
#[derive(Clone, Debug)]
pub struct Plugin {
    pub driver: String,
    pub endpoint: String,
    service: &'static Service,
    socket: GrpcClient,
    /// Set to true when the plugin is removed.
    pub removed: Arc<watch::Sender<bool>>,
}

impl Plugin {
    /// Selects the first supported version: plugins list their preferred version first.
    pub fn new(info: &PluginRegistrationInfo, endpoint: &str) -> Result<Plugin, String> {
        let reason = match select_service(&info.supported_versions) {
            Ok(service) => {
                return Ok(Plugin {
                    driver: info.name.clone(),
                    endpoint: endpoint.to_owned(),
                    service,
                    socket: GrpcClient::new(endpoint),
                    removed: Arc::new(watch::Sender::new(false)),
                });
            }
            Err(reason) => reason,
        };
        let name = &info.name;
        Err(format!(
            "invalid supported gRPC versions of DRA driver plugin {name} at endpoint {endpoint}: {reason}"
        ))
    }

    pub async fn prepare(&self, claims: &[Claim]) -> Result<NodePrepareResourcesResponse, RpcError> {
        self.socket
            .call(self.service.prepare, &NodeResourcesRequest { claims: claims.to_vec() }, CALL_TIMEOUT)
            .await
    }

    pub async fn unprepare(&self, claims: &[Claim]) -> Result<NodeUnprepareResourcesResponse, RpcError> {
        self.socket
            .call(self.service.unprepare, &NodeResourcesRequest { claims: claims.to_vec() }, CALL_TIMEOUT)
            .await
    }

    /// Whether the plugin can be reached. Most drivers do not implement this service, but an error
    /// response is a response, too.
    pub async fn is_reachable(&self) -> bool {
        let response: Result<Empty, RpcError> =
            self.socket.call("/grpc.health.v1.Health/Check", &Empty {}, HEALTH_CHECK_TIMEOUT).await;
        let unreachable = [RefusalCode::Unavailable, RefusalCode::DeadlineExceeded];
        response.err().is_none_or(|refusal| !unreachable.contains(&refusal.code))
    }

    /// Streams the health of the driver's devices until the stream ends.
    pub async fn watch_health(
        &self,
        mut on_report: impl FnMut(NodeWatchResourcesResponse),
    ) -> Result<(), RpcError> {
        let decode = |bytes: bytes::Bytes| match prost::Message::decode(bytes) {
            Ok(report) => on_report(report),
            Err(error) => {
                tracing::warn!(%error, driver = self.driver, "invalid device health report from a DRA driver")
            }
        };
        self.socket.listen("/v1alpha1.DRAResourceHealth/NodeWatchResources", &Empty {}, decode).await
    }
}

fn select_service(offered: &[String]) -> Result<&'static Service, String> {
    if offered.is_empty() {
        return Err("empty list of supported gRPC services (aka supported versions)".to_owned());
    }
    let found = offered.iter().find_map(|name| SERVICES.iter().find(|known| known.name == name));
    found.ok_or_else(|| {
        let quoted = |names: &mut dyn Iterator<Item = &str>| {
            names.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" ")
        };
        let offered_names = quoted(&mut offered.iter().map(String::as_str));
        let supported_names = quoted(&mut SERVICES.iter().map(|known| known.name));
        format!(
            "none of services supported by the plugin ([{offered_names}]) are supported by the kubelet ([{supported_names}])"
        )
    })
}

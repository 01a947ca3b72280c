//! A driver of devices that has introduced itself, and what can be asked of it.

use std::sync::Arc;
use std::time::Duration;

use runtime::{Refusal, RefusalCode, Socket};
use tokio::sync::watch;

use super::messages::*;
use crate::plugins::Info;

/// What upstream's kubelet allows a driver for one call.
const PATIENCE: Duration = Duration::from_secs(45);
const QUICK: Duration = Duration::from_secs(10);

/// A version of what drivers are asked, as drivers name it, and where they are asked.
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

/// One of a driver's processes on this node; there are two while it is being replaced by a newer one.
#[derive(Clone, Debug)]
pub struct Plugin {
    pub driver: String,
    pub endpoint: String,
    service: &'static Service,
    socket: Socket,
    /// It has gone.
    pub gone: Arc<watch::Sender<bool>>,
}

impl Plugin {
    /// Takes the first of its versions that is known here: drivers put the one they like best first.
    pub fn new(info: &Info, endpoint: &str) -> Result<Plugin, String> {
        let why = match choose(&info.supported_versions) {
            Ok(service) => {
                return Ok(Plugin {
                    driver: info.name.clone(),
                    endpoint: endpoint.to_owned(),
                    service,
                    socket: Socket::new(endpoint),
                    gone: Arc::new(watch::Sender::new(false)),
                });
            }
            Err(why) => why,
        };
        let name = &info.name;
        Err(format!(
            "invalid supported gRPC versions of DRA driver plugin {name} at endpoint {endpoint}: {why}"
        ))
    }

    pub async fn prepare(&self, claims: &[Claim]) -> Result<Prepared, Refusal> {
        self.socket.call(self.service.prepare, &Request { claims: claims.to_vec() }, PATIENCE).await
    }

    pub async fn unprepare(&self, claims: &[Claim]) -> Result<Unprepared, Refusal> {
        self.socket.call(self.service.unprepare, &Request { claims: claims.to_vec() }, PATIENCE).await
    }

    /// Whether anybody is there. What is asked hardly any driver knows, but even that is an answer.
    pub async fn answers(&self) -> bool {
        let asked: Result<Empty, Refusal> =
            self.socket.call("/grpc.health.v1.Health/Check", &Empty {}, QUICK).await;
        let silent = [RefusalCode::Unavailable, RefusalCode::DeadlineExceeded];
        asked.err().is_none_or(|refusal| !silent.contains(&refusal.code))
    }

    /// Hears how its devices are, for as long as it tells.
    pub async fn healths(&self, mut heard: impl FnMut(Healths)) -> Result<(), Refusal> {
        let hear = |bytes: bytes::Bytes| match prost::Message::decode(bytes) {
            Ok(healths) => heard(healths),
            Err(error) => {
                tracing::warn!(%error, driver = self.driver, "what a driver tells of its devices cannot be read")
            }
        };
        self.socket.listen("/v1alpha1.DRAResourceHealth/NodeWatchResources", &Empty {}, hear).await
    }
}

fn choose(offered: &[String]) -> Result<&'static Service, String> {
    if offered.is_empty() {
        return Err("empty list of supported gRPC services (aka supported versions)".to_owned());
    }
    let found = offered.iter().find_map(|name| SERVICES.iter().find(|known| known.name == name));
    found.ok_or_else(|| {
        let quoted = |names: &mut dyn Iterator<Item = &str>| {
            names.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" ")
        };
        let theirs = quoted(&mut offered.iter().map(String::as_str));
        let ours = quoted(&mut SERVICES.iter().map(|known| known.name));
        format!(
            "none of services supported by the plugin ([{theirs}]) are supported by the kubelet ([{ours}])"
        )
    })
}

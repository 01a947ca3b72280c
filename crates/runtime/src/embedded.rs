//! Containers with nothing else installed: images, file systems, namespaces, cgroups and networks by ourselves.
//!
//! Each pod lives in a process of its own ([`supervisor`]) that outlives this one. Here is what skiff knows of them
//! ([`pods`]) and what CRI asks for ([`calls`]); what a pod becomes in the kernel's terms is decided in [`translate`]
//! and carried out by the supervisor. Read [`Embedded::open`].

mod calls;
mod capability;
mod cdi;
mod events;
mod exec;
mod hooks;
mod images;
mod labels;
mod launch;
mod mountpoint_layer;
mod network;
mod pods;
mod protocol;
mod record;
mod seccomp;
mod serve;
mod spec;
mod streams;
mod supervisor;
mod supervisor_client;
mod translate;
mod usage;
mod view;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use jiff::Timestamp;
use parking_lot::RwLock;
use podnet::pool::Pool;
use podnet::{Cidr, HostPort};
use sys::cgroup::Cgroups;
use tokio::sync::{Notify, watch};

use crate::{Error, ErrorCode, Result};
use events::EventPublisher;
use pods::{Pod, Pods};

pub use labels::remove_default_profile;
pub use network::Cni;
pub use serve::{GrpcReply, listen, serve, serve_with};
pub use supervisor::supervise;

/// The cgroup of the supervisors of all nodes on this host, where there is one tree of cgroups.
pub const SUPERVISORS_CGROUP: &str = "/skiff/supervisors";
/// The beginning of the names of pods' links on this node.
pub const LINK_NAME_PREFIX: &str = "skp";

/// Where things are and what they are called.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where pods and images are kept.
    pub root: PathBuf,
    /// The program whose `supervise` a pod is run by; this one, unless it is a test.
    pub program: PathBuf,
    pub bridge: String,
    /// The addresses of pods until the node is told its own.
    pub ranges: Vec<Cidr>,
    pub cni: Cni,
    /// What there is to say about registries, as k3s' `registries.yaml`.
    pub registries: PathBuf,
    /// Whether registries that have mirrors there are not asked themselves.
    pub mirrors_only: bool,
    /// Where seccomp profiles are looked for.
    pub seccomp_profiles: PathBuf,
    /// The ports of this machine that pods ask for which were made over the socket. Those of a kubelet in this process
    /// are the business of who knows its pods.
    pub host_ports: watch::Sender<Vec<HostPort>>,
}

/// The runtime.
#[derive(Clone)]
pub struct Embedded {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    images: image::Store,
    pods: Pods,
    pool: Pool,
    ranges: RwLock<Vec<Cidr>>,
    cgroups: Cgroups,
    /// A mount of the program that nothing can be written through.
    program: OwnedFd,
    streams: streams::StreamServer,
    events: EventPublisher,
    /// Notified when networks of pods are to be compared with what they should be.
    networks: Arc<Notify>,
    /// Whether there may be pieces of images that are gone; also from before skiff was started.
    needs_collection: AtomicBool,
}

impl Embedded {
    /// Finds the pods that an earlier skiff left, and removes what is left of those that are gone.
    pub async fn open(config: Config) -> Result<Embedded> {
        let pods_dir = config.root.join("pods");
        std::fs::create_dir_all(&pods_dir).map_err(failed("make the directory of pods"))?;
        sys::trees::set_topdir_flag(&pods_dir);
        // Where they were once written down.
        let _ = std::fs::remove_dir_all(config.root.join("addresses"));
        let images = image::Store::open(&config.root.join("images")).map_err(failed("open the images"))?;
        images.clean();
        mountpoint_layer::create(&config.root).map_err(failed("make a layer of mount points"))?;
        let cgroups = Cgroups::of_host().map_err(failed("find cgroups"))?;
        let program =
            launch::open_program(&config.program).map_err(failed("open the supervisor's program"))?;
        let streams = streams::StreamServer::start().await.map_err(failed("serve streams"))?;
        let ranges = RwLock::new(config.ranges.clone());
        let (pods, pool, events) = (Pods::default(), Pool::default(), EventPublisher::default());
        let needs_collection = AtomicBool::new(true);
        let networks = Arc::new(Notify::new());
        let inner = Inner {
            config,
            images,
            pods,
            pool,
            ranges,
            cgroups,
            program,
            streams,
            events,
            networks: networks.clone(),
            needs_collection,
        };
        let embedded = Embedded { inner: Arc::new(inner) };
        embedded.recover_pods(&pods_dir).await;
        networks.notify_one();
        embedded.watch_networks(networks);
        Ok(embedded)
    }

    async fn recover_pods(&self, directory: &Path) {
        let (mut known, mut found) = (BTreeSet::new(), Vec::new());
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            match Pod::read(&entry.path(), &self.inner.events) {
                Ok(pod) => {
                    let pod = Arc::new(pod);
                    known.insert(pod.id.clone());
                    self.inner.pods.add(pod.clone());
                    let own = self.clone();
                    found.push(tokio::spawn(async move { own.take_over(pod).await }));
                }
                // It was not yet a pod when skiff was killed, or the power was cut while it was written down.
                Err(error) if record::is_missing(&error) => drop(sys::trees::remove(&entry.path())),
                // It may well be one that runs, and keeps its link. It is to end: another one will be made, and they
                // must not both have its volumes.
                Err(error) => {
                    tracing::warn!(%error, pod = %entry.path().display(), "cannot read a pod, ending it");
                    let _ = supervisor_client::call(&entry.path(), &protocol::SupervisorRequest::Stop).await;
                    known.insert(entry.file_name().to_string_lossy().into_owned());
                }
            }
        }
        // One that does not answer must not keep the others waiting.
        for task in found {
            let _ = task.await;
        }
        self.inner.publish_host_ports();
        self.detach_removed_by_cni(&known);
        let links: BTreeSet<String> = known.iter().map(|id| link_name(id)).collect();
        for link in
            podnet::links(LINK_NAME_PREFIX).unwrap_or_default().iter().filter(|link| !links.contains(*link))
        {
            let _ = podnet::detach(link);
        }
    }

    async fn take_over(&self, pod: Arc<Pod>) {
        if pod.record.lock().is_unfinished {
            // Skiff was killed before the pod had its network; another one will be made.
            let _ = supervisor_client::call(&pod.directory, &protocol::SupervisorRequest::Stop).await;
        }
        // One that has ended has no address any more, though it is written down; another may have it.
        if self.follow(&pod).await {
            for ip in pod.record.lock().ips.iter().filter_map(|ip| ip.parse().ok()) {
                self.inner.pool.reserve(ip, &pod.id);
            }
        }
    }

    /// Listens to a pod's supervisor; what is left when it is gone goes too. Answers whether there is one.
    async fn follow(&self, pod: &Arc<Pod>) -> bool {
        let inner = self.inner.clone();
        pod.follow(move |pod| inner.cleanup_pod(&pod)).await
    }

    /// The images of this node.
    pub fn images(&self) -> &image::Store {
        &self.inner.images
    }
}

/// How many pods run that are recorded under the runtime's directory, whether a runtime does or not.
pub fn count_running(root: &Path) -> usize {
    let pods = std::fs::read_dir(root.join("pods")).into_iter().flatten().flatten();
    pods.filter(|pod| supervisor_client::has_supervisor(&pod.path())).count()
}

/// The layers that containers stand on, by what is written down under the runtime's directory.
pub fn layers_in_use(root: &Path) -> std::io::Result<BTreeSet<String>> {
    let mut layers = BTreeSet::new();
    let events = EventPublisher::default();
    let pods = match std::fs::read_dir(root.join("pods")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(layers),
        pods => pods?,
    };
    for pod in pods {
        match Pod::read(&pod?.path(), &events) {
            Ok(pod) => {
                let containers = pod.containers.lock();
                layers.extend(containers.values().flat_map(|container| container.record.layers.clone()));
            }
            Err(error) if record::is_missing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(layers)
}

impl Inner {
    fn pods_dir(&self) -> PathBuf {
        self.config.root.join("pods")
    }

    /// Ends whatever a pod without a supervisor has left.
    fn cleanup_pod(&self, pod: &Pod) {
        let config = pod.record.lock().config.clone().unwrap_or_default();
        for id in pod.containers.lock().keys() {
            let _ = self.cgroups.kill(&translate::cgroup(&config, id));
        }
        let _ = podnet::detach(&link_name(&pod.id));
        self.publish_host_ports();
    }

    /// Says which ports of this machine are wanted now.
    fn publish_host_ports(&self) {
        let mut desired = Vec::new();
        for pod in self.pods.all() {
            let record = pod.record.lock();
            if record.opens_ports && *pod.is_ready.borrow() {
                desired.extend(translate::host_ports(&pod.id, &record));
            }
        }
        desired.sort_by(|one, other| (&one.pod, one.host_port).cmp(&(&other.pod, other.host_port)));
        self.config.host_ports.send_if_modified(|known| {
            let is_new = *known != desired;
            *known = desired;
            is_new
        });
    }

    fn pod(&self, id: &str, call: &'static str) -> Result<Arc<Pod>> {
        self.pods.get(id).ok_or_else(|| not_found(call, format!("no pod {id:?}")))
    }

    fn container(&self, id: &str, call: &'static str) -> Result<(Arc<Pod>, Arc<pods::Container>)> {
        self.pods.container(id).ok_or_else(|| not_found(call, format!("no container {id:?}")))
    }
}

/// Nanoseconds since 1970, as CRI counts them.
fn now() -> i64 {
    i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// Opens what is at a path below a root, out of which no link leads.
fn open_in_root(root: impl std::os::fd::AsFd, path: impl AsRef<Path>) -> rustix::io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, ResolveFlags};
    /// The kernel gives up on `..` while anything is mounted or renamed anywhere, which passes.
    const MAX_OPEN_ATTEMPTS: usize = 1000;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let open =
        || rustix::fs::openat2(&root, path.as_ref(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), inside);
    let mut attempts = (0..MAX_OPEN_ATTEMPTS).map(|_| open());
    attempts
        .find(|found| !matches!(found, Err(rustix::io::Errno::AGAIN)))
        .unwrap_or(Err(rustix::io::Errno::AGAIN))
}

/// The name of a pod's link on this node; the kernel allows 15 letters.
fn link_name(id: &str) -> String {
    format!("{LINK_NAME_PREFIX}{}", id.get(..12).unwrap_or(id))
}

fn not_found(call: &'static str, message: String) -> Error {
    Error::Rejected { call, code: ErrorCode::NotFound, message }
}

fn call_error(call: &'static str, message: impl Into<String>) -> Error {
    Error::Rejected { call, code: ErrorCode::Other, message: message.into() }
}

/// An error with all its causes, for a message that stands alone.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

fn failed<E: std::error::Error>(doing: &'static str) -> impl FnOnce(E) -> Error {
    move |error| call_error("start", format!("cannot {doing}: {}", error_chain(&error)))
}

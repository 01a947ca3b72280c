//! The embedded container runtime: images, filesystems, namespaces, cgroups and pod networks without
//! containerd or runc.
//!
//! Each pod runs below a supervisor process of its own ([`supervisor`]) that outlives this process.
//! [`pods`] holds the state of pods and [`calls`] implements the CRI calls. [`translate`] converts CRI
//! configuration to the supervisor's spec ([`spec`]), and the supervisor only applies it. Start reading
//! at [`Embedded::open`].

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

/// Cgroup of the supervisors of all nodes on this host, on hosts with the unified hierarchy (cgroup
/// v2).
pub const SUPERVISORS_CGROUP: &str = "/skiff/supervisors";
/// Prefix of the names of the pods' host-side links.
pub const LINK_NAME_PREFIX: &str = "skp";

/// Paths and settings of the embedded runtime.
#[derive(Clone, Debug)]
pub struct Config {
    /// Data directory of pods and images.
    pub root: PathBuf,
    /// Executable that is run as `<program> supervise`; the current executable, except in tests.
    pub program: PathBuf,
    pub bridge: String,
    /// Pod CIDRs until the node has been assigned its own.
    pub ranges: Vec<Cidr>,
    pub cni: Cni,
    /// Path of the registry configuration, in the format of k3s' `registries.yaml`.
    pub registries: PathBuf,
    /// Whether a registry with configured mirrors is never contacted itself.
    pub mirrors_only: bool,
    /// Directory of `Localhost` seccomp profiles.
    pub seccomp_profiles: PathBuf,
    /// Host ports of pods that were created over the CRI socket. Those of the in-process kubelet's pods
    /// are not included; they are derived from its pods.
    pub host_ports: watch::Sender<Vec<HostPort>>,
}

/// The embedded implementation of [`crate::Runtime`].
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
    /// A read-only mount of the supervisor executable.
    program: OwnedFd,
    streams: streams::StreamServer,
    events: EventPublisher,
    /// Requests a comparison of the pod networks with their expected state.
    networks: Arc<Notify>,
    /// Whether unreferenced image data may exist, including data of an earlier run.
    needs_collection: AtomicBool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Ends the task of `watch_networks`, which otherwise waits for the next deletion.
        self.networks.notify_one();
    }
}

impl Embedded {
    /// Opens the runtime: recovers the pods of an earlier run and removes the remains of pods that no
    /// longer exist.
    pub async fn open(config: Config) -> Result<Embedded> {
        let pods_dir = config.root.join("pods");
        std::fs::create_dir_all(&pods_dir).map_err(failed("create the pods directory"))?;
        sys::trees::set_topdir_flag(&pods_dir);
        // Older versions recorded addresses here.
        let _ = std::fs::remove_dir_all(config.root.join("addresses"));
        let images =
            image::Store::open(&config.root.join("images")).map_err(failed("open the image store"))?;
        images.clean();
        mountpoint_layer::create(&config.root).map_err(failed("create the mount point layers"))?;
        let cgroups = Cgroups::of_host().map_err(failed("detect the cgroup hierarchies"))?;
        let program =
            launch::open_program(&config.program).map_err(failed("open the supervisor executable"))?;
        let streams = streams::StreamServer::start().await.map_err(failed("start the streaming server"))?;
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
                // Skiff was killed or the power failed before the record was complete.
                Err(error) if record::is_missing(&error) => drop(sys::trees::remove(&entry.path())),
                // The pod may be running, so its link is kept. Stop it: the kubelet creates a
                // replacement, and the two must not use the same volumes at once.
                Err(error) => {
                    tracing::warn!(%error, pod = %entry.path().display(), "cannot read pod record, stopping the pod");
                    let _ = supervisor_client::call(&entry.path(), &protocol::SupervisorRequest::Stop).await;
                    known.insert(entry.file_name().to_string_lossy().into_owned());
                }
            }
        }
        // All pods are recovered in parallel, so that one unresponsive supervisor does not delay the
        // others.
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
            // Skiff was killed before the pod had its network. The pod is stopped and a new sandbox
            // replaces it.
            let _ = supervisor_client::call(&pod.directory, &protocol::SupervisorRequest::Stop).await;
        }
        // A pod without a supervisor no longer owns the addresses in its record; another pod may have
        // them.
        if self.follow(&pod).await {
            for ip in pod.record.lock().ips.iter().filter_map(|ip| ip.parse().ok()) {
                self.inner.pool.reserve(ip, &pod.id);
            }
        }
    }

    /// Follows a pod's supervisor and cleans up after it exits. Returns whether there is a supervisor.
    async fn follow(&self, pod: &Arc<Pod>) -> bool {
        let inner = self.inner.clone();
        pod.follow(move |pod| inner.cleanup_pod(&pod)).await
    }

    /// The image store.
    pub fn images(&self) -> &image::Store {
        &self.inner.images
    }
}

/// Counts the running pods recorded under the runtime's data directory. Works without a running
/// runtime.
pub fn count_running(root: &Path) -> usize {
    let pods = std::fs::read_dir(root.join("pods")).into_iter().flatten().flatten();
    pods.filter(|pod| supervisor_client::has_supervisor(&pod.path())).count()
}

/// The image layers in use by containers recorded under the runtime's data directory.
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

    /// Cleans up after a pod whose supervisor is gone: kills its cgroups, deletes its link, updates the
    /// host ports.
    fn cleanup_pod(&self, pod: &Pod) {
        let config = pod.record.lock().config.clone().unwrap_or_default();
        for id in pod.containers.lock().keys() {
            let _ = self.cgroups.kill(&translate::cgroup(&config, id));
        }
        let _ = podnet::detach(&link_name(&pod.id));
        self.publish_host_ports();
    }

    /// Publishes the host ports of the running pods if they have changed.
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

/// Nanoseconds since the Unix epoch, CRI's unit of time.
fn now() -> i64 {
    i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// Opens a path below `root`. No symlink can lead out of it.
fn open_in_root(root: impl std::os::fd::AsFd, path: impl AsRef<Path>) -> rustix::io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, ResolveFlags};
    /// `openat2` with `RESOLVE_IN_ROOT` fails with `EAGAIN` for paths with `..` when anything on the
    /// host is mounted or renamed at the same time.
    const MAX_OPEN_ATTEMPTS: usize = 1000;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let open =
        || rustix::fs::openat2(&root, path.as_ref(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), inside);
    let mut attempts = (0..MAX_OPEN_ATTEMPTS).map(|_| open());
    attempts
        .find(|found| !matches!(found, Err(rustix::io::Errno::AGAIN)))
        .unwrap_or(Err(rustix::io::Errno::AGAIN))
}

/// The name of a pod's host-side link, within the kernel's limit of 15 characters.
fn link_name(id: &str) -> String {
    format!("{LINK_NAME_PREFIX}{}", id.get(..12).unwrap_or(id))
}

fn not_found(call: &'static str, message: String) -> Error {
    Error::Rejected { call, code: ErrorCode::NotFound, message }
}

fn call_error(call: &'static str, message: impl Into<String>) -> Error {
    Error::Rejected { call, code: ErrorCode::Other, message: message.into() }
}

/// Formats an error with all its sources.
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

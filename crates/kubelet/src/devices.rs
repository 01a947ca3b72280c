//! Device manager: allocates devices of device plugins to containers. Upstream:
//! `pkg/kubelet/cm/devicemanager`.
//!
//! A plugin registers at the kubelet's socket and then streams its devices over its own
//! (`ListAndWatch`). The allocations of a pod are stored in the pod's directory and deleted with
//! it. After a restart they remain valid without calling the plugin.

mod messages;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use parking_lot::Mutex;
use prost::Message as _;
use reconcile::Object as _;
use runtime::GrpcClient;
use runtime::cri::{ContainerConfig, KeyValue, Mount};
use runtime::embedded::GrpcReply;
use schema::quantity::Quantity;
use serde_json::{Map, Value, json};
use tokio::sync::Notify;

use messages::*;

const API_VERSION: &str = "v1beta1";
const KUBELET_SOCKET: &str = "kubelet.sock";
const CHECKPOINT_FILE: &str = "devices.json";
/// Plugins may have to wait for their hardware.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// A stopped plugin may register again within this time. Until then its devices count as unhealthy.
/// Upstream's `endpointStopGracePeriod`.
const ENDPOINT_STOP_GRACE_PERIOD: Duration = Duration::from_secs(300);

/// The device plugins of this node and their devices.
pub struct Devices {
    /// The directory of the plugin sockets.
    dir: PathBuf,
    /// The directory of the pod directories.
    pods: PathBuf,
    /// By resource name.
    plugins: Mutex<BTreeMap<String, Plugin>>,
    /// Held during an allocation, so that no device is allocated twice.
    allocation_lock: tokio::sync::Mutex<()>,
    /// Notified when devices are added, removed or change health.
    pub devices_changed: Notify,
}

#[derive(Clone)]
struct Plugin {
    socket: GrpcClient,
    options: DevicePluginOptions,
    /// Device IDs and whether they are healthy.
    devices: BTreeMap<String, bool>,
    /// Counts the registrations for this resource. Updates from an older registration are ignored.
    generation: u64,
}

/// The number of devices of one resource that a container requests.
struct DeviceRequest {
    container: String,
    resource: String,
    count: usize,
}

impl Devices {
    pub fn new(root: &Path, pods: &Path) -> Arc<Devices> {
        Arc::new(Devices {
            dir: root.join("device-plugins"),
            pods: pods.to_owned(),
            plugins: Mutex::default(),
            allocation_lock: tokio::sync::Mutex::default(),
            devices_changed: Notify::new(),
        })
    }

    /// Serves the registration socket.
    pub async fn run(self: &Arc<Self>) {
        let begin = || {
            std::fs::create_dir_all(&self.dir)?;
            // Plugins watch their sockets: a removed one makes them register again.
            for entry in std::fs::read_dir(&self.dir)?.flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                    let _ = std::fs::remove_file(entry.path());
                }
            }
            runtime::embedded::listen(&self.dir.join(KUBELET_SOCKET))
        };
        let listener = match begin() {
            Ok(listener) => listener,
            Err(error) => {
                tracing::warn!(%error, dir = %self.dir.display(), "cannot listen for device plugins");
                return std::future::pending().await;
            }
        };
        let own = Arc::downgrade(self);
        let answer = move |call: &str, question: &[u8]| match (call, own.upgrade()) {
            ("/v1beta1.Registration/Register", Some(devices)) => {
                let request = RegisterRequest::decode(question).map_err(|error| error.to_string())?;
                devices.register(request)?;
                Ok(GrpcReply::One(Vec::new()))
            }
            _ => Err(format!("unknown method {call}")),
        };
        runtime::embedded::serve_with(listener, answer).await;
    }

    fn register(self: &Arc<Self>, request: RegisterRequest) -> Result<(), String> {
        let RegisterRequest { version, endpoint, resource_name: resource, options } = request;
        if version != API_VERSION {
            return Err(format!(
                "requested API version {version:?} is not supported by kubelet. Supported version is [{API_VERSION:?}]"
            ));
        }
        if !crate::registration::is_extended(&resource) || resource.contains(char::is_whitespace) {
            return Err(format!("the ResourceName {resource:?} is invalid"));
        }
        if endpoint.is_empty() || endpoint.contains('/') {
            return Err(format!("invalid endpoint {endpoint:?}: must be the file name of a socket"));
        }
        let socket = GrpcClient::new(&self.dir.join(endpoint).display().to_string());
        let options = options.unwrap_or_default();
        let generation = {
            let mut plugins = self.plugins.lock();
            let before = plugins.remove(&resource);
            let generation = before.as_ref().map_or(0, |before| before.generation) + 1;
            // Keep the devices until the new plugin has sent its list, so that the node's capacity
            // does not flap.
            let devices = before.map(|before| before.devices).unwrap_or_default();
            let plugin = Plugin { socket: socket.clone(), options, devices, generation };
            plugins.insert(resource.clone(), plugin);
            generation
        };
        tracing::info!(resource, "device plugin registered");
        tokio::spawn(self.clone().list_and_watch(resource, socket, generation));
        Ok(())
    }

    /// Receives the plugin's device lists until its stream ends.
    async fn list_and_watch(self: Arc<Self>, resource: String, socket: GrpcClient, generation: u64) {
        let on_response = |bytes: bytes::Bytes| {
            let Ok(response) = ListAndWatchResponse::decode(bytes) else { return };
            let devices =
                response.devices.into_iter().map(|device| (device.id, device.health == "Healthy")).collect();
            self.update_plugin(&resource, generation, |plugin| plugin.devices = devices);
        };
        let ended = socket.listen("/v1beta1.DevicePlugin/ListAndWatch", &Empty {}, on_response).await;
        tracing::info!(resource, ?ended, "device plugin stopped");
        self.update_plugin(&resource, generation, |plugin| {
            plugin.devices.values_mut().for_each(|healthy| *healthy = false)
        });
        tokio::time::sleep(ENDPOINT_STOP_GRACE_PERIOD).await;
        self.update_plugin(&resource, generation, |plugin| plugin.devices.clear());
    }

    /// Updates a plugin unless a newer registration for the resource has replaced it.
    fn update_plugin(&self, resource: &str, generation: u64, change: impl FnOnce(&mut Plugin)) {
        let mut plugins = self.plugins.lock();
        if let Some(plugin) = plugins.get_mut(resource).filter(|plugin| plugin.generation == generation) {
            change(plugin);
            self.devices_changed.notify_one();
        }
    }

    /// The total and the healthy number of devices by resource.
    pub fn device_counts(&self) -> BTreeMap<String, (usize, usize)> {
        let plugins = self.plugins.lock();
        let count = |plugin: &Plugin| {
            (plugin.devices.len(), plugin.devices.values().filter(|healthy| **healthy).count())
        };
        plugins.iter().map(|(resource, plugin)| (resource.clone(), count(plugin))).collect()
    }

    /// Allocates the devices that the pod's containers request and do not have yet. `is_over` says
    /// by UID whether a pod has terminated, so that its devices are free.
    pub async fn allocate(&self, pod: &Pod, is_over: impl Fn(&str) -> bool) -> Result<(), String> {
        let device_requests = self.device_requests(pod);
        if device_requests.is_empty() {
            return Ok(());
        }
        let _guard = self.allocation_lock.lock().await;
        let mut allocated = DeviceAllocations::read(&self.pods, pod.uid());
        for device_request in &device_requests {
            // Allocated before, possibly by an earlier process. The container keeps these devices.
            if allocated.of(&device_request.container, &device_request.resource).is_some() {
                continue;
            }
            let Some(plugin) = self.plugins.lock().get(&device_request.resource).cloned() else { continue };
            let mut in_use = BTreeSet::new();
            for uid in entry_names(&self.pods).filter(|uid| uid != pod.uid() && !is_over(uid)) {
                in_use.extend(
                    DeviceAllocations::read(&self.pods, &uid).ids(&device_request.resource, |_| true),
                );
            }
            // Init containers end before the other containers start. Their devices are reused.
            let is_init = |container: &str| is_init_container(pod, container);
            in_use.extend(allocated.ids(&device_request.resource, |container| !is_init(container)));
            let reusable = allocated.ids(&device_request.resource, is_init);
            let free = available_devices(&plugin.devices, &in_use, device_request)?;
            let ids = match preferred_allocation(&plugin, &free, &reusable, device_request.count).await {
                Some(ids) => ids,
                None => select_devices(&free, &reusable, device_request.count),
            };
            let request = AllocateRequest { containers: vec![DeviceIds { ids: ids.clone() }] };
            let answer: Result<AllocateResponse, _> =
                plugin.socket.call("/v1beta1.DevicePlugin/Allocate", &request, CALL_TIMEOUT).await;
            let answer = answer.map_err(|refusal| refusal.to_string())?;
            let Some(answer) = answer.containers.into_iter().next() else {
                return Err(format!(
                    "no containers return in allocation response for {}",
                    device_request.resource
                ));
            };
            allocated.insert(device_request, &ids, &answer);
            allocated.write(&self.pods, pod.uid()).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// The requests of all containers for resources of device plugins.
    fn device_requests(&self, pod: &Pod) -> Vec<DeviceRequest> {
        let plugins = self.plugins.lock();
        let of = |container: &Container| {
            let limits = container.resources.as_ref().and_then(|resources| resources.limits.clone());
            let limits =
                limits.unwrap_or_default().into_iter().filter(|(name, _)| plugins.contains_key(name));
            let device_requests = limits.filter_map(|(resource, amount)| {
                let count = usize::try_from(Quantity::parse(&amount.0).ok()?.value()).ok()?;
                (count > 0).then(|| DeviceRequest { container: container.name.clone(), resource, count })
            });
            device_requests.collect::<Vec<_>>()
        };
        let spec = pod.spec.as_ref();
        let containers =
            spec.into_iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        containers.flat_map(of).collect()
    }

    /// Adds a container's devices to its CRI configuration, and calls `PreStartContainer` if the
    /// plugin requires it.
    pub async fn configure_container(
        &self,
        pod: &str,
        container: &str,
        config: &mut ContainerConfig,
    ) -> Result<(), String> {
        for (resource, ids, allocated) in DeviceAllocations::read(&self.pods, pod).all(container) {
            let plugin = self.plugins.lock().get(&resource).cloned();
            if let Some(plugin) = plugin.filter(|plugin| plugin.options.pre_start_required) {
                let call = "/v1beta1.DevicePlugin/PreStartContainer";
                let result: Result<Empty, _> =
                    plugin.socket.call(call, &DeviceIds { ids }, CALL_TIMEOUT).await;
                result.map_err(|refusal| {
                    format!("device plugin PreStartContainer rpc failed with err: {refusal}")
                })?;
            }
            // Entries of the plugin come first, so that those of the pod override them.
            let envs = allocated.envs.into_iter().map(|(key, value)| KeyValue { key, value });
            config.envs.splice(..0, envs);
            let mounts = allocated.mounts.into_iter().map(|mount| Mount {
                container_path: mount.container_path,
                host_path: mount.host_path,
                readonly: mount.read_only,
                ..Mount::default()
            });
            config.mounts.splice(..0, mounts);
            config.devices.extend(allocated.devices);
            config.annotations.extend(allocated.annotations);
            config.cdi_devices.extend(allocated.cdi_devices);
        }
        Ok(())
    }
}

/// Whether this is an init container that ends before the regular containers start.
fn is_init_container(pod: &Pod, container: &str) -> bool {
    let first = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let found = first.iter().find(|first| first.name == container);
    found.is_some_and(|first| first.restart_policy.as_deref() != Some("Always"))
}

/// The healthy devices that are not allocated. Fails if they are not enough.
fn available_devices(
    devices: &BTreeMap<String, bool>,
    in_use: &BTreeSet<String>,
    device_request: &DeviceRequest,
) -> Result<BTreeSet<String>, String> {
    let DeviceRequest { resource, count, .. } = device_request;
    let healthy = devices.iter().filter(|(_, healthy)| **healthy).map(|(id, _)| id.clone());
    let healthy: BTreeSet<String> = healthy.collect();
    if healthy.is_empty() {
        return Err(format!("no healthy devices present; cannot allocate unhealthy devices {resource}"));
    }
    let free = &healthy - in_use;
    match free.len() < *count {
        true => Err(format!(
            "requested number of devices unavailable for {resource}. Requested: {count}, Available: {}",
            free.len()
        )),
        false => Ok(free),
    }
}

/// Selects devices, preferring those to reuse from init containers.
fn select_devices(free: &BTreeSet<String>, reusable: &BTreeSet<String>, count: usize) -> Vec<String> {
    free.intersection(reusable).chain(free.difference(reusable)).take(count).cloned().collect()
}

/// The plugin's preferred devices. `None` if it has no preference or its response is invalid.
async fn preferred_allocation(
    plugin: &Plugin,
    free: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    count: usize,
) -> Option<Vec<String>> {
    if !plugin.options.has_preferences {
        return None;
    }
    let preference_request = ContainerPreferredAllocationRequest {
        available: free.iter().cloned().collect(),
        must_include: free.intersection(reusable).take(count).cloned().collect(),
        size: i32::try_from(count).ok()?,
    };
    let call = "/v1beta1.DevicePlugin/GetPreferredAllocation";
    let request = PreferredAllocationRequest { containers: vec![preference_request] };
    let answer: Result<PreferredAllocationResponse, _> =
        plugin.socket.call(call, &request, CALL_TIMEOUT).await;
    let ids: BTreeSet<String> = answer.ok()?.containers.into_iter().next()?.ids.into_iter().collect();
    (ids.len() == count && ids.is_subset(free)).then(|| ids.into_iter().collect())
}

/// The allocations of a pod: device IDs and the plugin's response by container and resource.
struct DeviceAllocations(Value);

impl DeviceAllocations {
    fn read(pods: &Path, uid: &str) -> DeviceAllocations {
        let text = std::fs::read(pods.join(uid).join(CHECKPOINT_FILE)).unwrap_or_default();
        DeviceAllocations(serde_json::from_slice(&text).unwrap_or_else(|_| json!({})))
    }

    fn write(&self, pods: &Path, uid: &str) -> std::io::Result<()> {
        let dir = pods.join(uid);
        std::fs::create_dir_all(&dir)?;
        let temporary = dir.join("devices.new");
        std::fs::write(&temporary, self.0.to_string())?;
        std::fs::rename(temporary, dir.join(CHECKPOINT_FILE))
    }

    fn of(&self, container: &str, resource: &str) -> Option<&Value> {
        self.0.get(container)?.get(resource)
    }

    fn insert(&mut self, device_request: &DeviceRequest, ids: &[String], answer: &ContainerAllocateResponse) {
        self.0[&device_request.container][&device_request.resource] =
            json!({"ids": ids, "answer": answer.encode_to_vec()});
    }

    /// The devices of a resource that these containers have.
    fn ids(&self, resource: &str, of: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let containers = self.0.as_object().into_iter().flatten().filter(|(name, _)| of(name));
        containers.flat_map(|(_, allocated)| strings(&allocated[resource]["ids"])).collect()
    }

    /// The allocations of a container by resource.
    fn all(&self, container: &str) -> Vec<(String, Vec<String>, ContainerAllocateResponse)> {
        let none = Map::new();
        let allocated = self.0.get(container).and_then(Value::as_object).unwrap_or(&none);
        let all = allocated.iter().filter_map(|(resource, allocated)| {
            let bytes = allocated["answer"].as_array()?.iter().filter_map(Value::as_u64);
            let bytes: Vec<u8> = bytes.filter_map(|byte| u8::try_from(byte).ok()).collect();
            Some((
                resource.clone(),
                strings(&allocated["ids"]),
                ContainerAllocateResponse::decode(&*bytes).ok()?,
            ))
        });
        all.collect()
    }
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
}

fn entry_names(dir: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

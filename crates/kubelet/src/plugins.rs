//! Plugin registration, the counterpart of upstream's plugin manager. A plugin puts a socket into
//! the `plugins_registry` directory. The kubelet requests its name and type through the socket, and
//! passes it to the handler of that type: CSI drivers ([`crate::csi`]) or DRA drivers
//! ([`crate::dra`]).

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reconcile::Ctx;
use runtime::GrpcClient;

use crate::config::Settings;
use crate::csi::{self, registry};
use crate::dir_watcher::DirWatcher;
use crate::dra::{self, Plugin};

const RPC_TIMEOUT: Duration = Duration::from_secs(10);
const INITIAL_BACK_OFF: Duration = Duration::from_secs(1);
const MAX_BACK_OFF: Duration = Duration::from_secs(60);
const CSI_PLUGIN: &str = "CSIPlugin";
const DRA_PLUGIN: &str = "DRAPlugin";

#[derive(Clone, PartialEq, prost::Message)]
struct Empty {}

/// `PluginInfo` of the `pluginregistration` v1 API. Field names and numbers are those of the
/// protocol.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PluginRegistrationInfo {
    /// Such as `CSIPlugin`.
    #[prost(string, tag = 1)]
    pub kind: String,
    #[prost(string, tag = 2)]
    pub name: String,
    /// The socket of the plugin's service; the registration socket itself if empty.
    #[prost(string, tag = 3)]
    pub endpoint: String,
    #[prost(string, repeated, tag = 4)]
    pub supported_versions: Vec<String>,
}

impl PluginRegistrationInfo {
    /// The path of the plugin's service on this host.
    pub fn endpoint_on_host(&self, path: &Path, settings: &Settings) -> String {
        match self.endpoint.is_empty() {
            true => path.display().to_string(),
            false => settings.host_path(Path::new(&self.endpoint)).display().to_string(),
        }
    }
}

/// The result of a registration, which is sent to the plugin.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegistrationStatus {
    #[prost(bool, tag = 1)]
    pub plugin_registered: bool,
    #[prost(string, tag = 2)]
    pub error: String,
}

/// The handlers of the supported plugin types.
pub struct PluginHandlers<'a> {
    pub csi: &'a csi::Drivers,
    pub dra: &'a dra::Drivers,
}

/// What a registration socket belongs to.
enum RegisteredPlugin {
    Csi(String),
    Dra(Plugin),
    /// A plugin of an unsupported type.
    Unsupported,
}

impl PluginHandlers<'_> {
    async fn register(
        &self,
        info: &PluginRegistrationInfo,
        path: &Path,
        settings: &Settings,
    ) -> Result<RegisteredPlugin, String> {
        let endpoint = info.endpoint_on_host(path, settings);
        match info.kind.as_str() {
            CSI_PLUGIN => {
                let driver = registry::connect_driver(info, &endpoint).await?;
                let name = driver.name.clone();
                self.csi.register(driver);
                Ok(RegisteredPlugin::Csi(name))
            }
            DRA_PLUGIN => {
                let plugin = Plugin::new(info, &endpoint)?;
                self.dra.register(plugin.clone())?;
                Ok(RegisteredPlugin::Dra(plugin))
            }
            _ => Ok(RegisteredPlugin::Unsupported),
        }
    }

    fn deregister(&self, known: &RegisteredPlugin) {
        match known {
            RegisteredPlugin::Csi(name) => self.csi.unregister(name),
            RegisteredPlugin::Dra(plugin) => self.dra.unregister(plugin),
            RegisteredPlugin::Unsupported => {}
        }
    }
}

/// Watches the plugin directory for as long as the node runs. `on_change` is called when plugins
/// are registered or deregistered.
pub async fn run(ctx: &Ctx, settings: &Settings, hosts: PluginHandlers<'_>, on_change: impl Fn()) {
    let dir = settings.root.join("plugins_registry");
    // CSI drivers mount the first two as host paths and require that they exist.
    let directories = [settings.root.join("pods"), settings.root.join("plugins"), dir.clone()];
    let created = directories.iter().try_for_each(std::fs::create_dir_all);
    let changes = created.and_then(|()| DirWatcher::new(&dir));
    let changes = match changes {
        Ok(changes) => changes,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "cannot watch the plugin directory");
            return std::future::pending().await;
        }
    };
    let mut known: BTreeMap<PathBuf, (u64, RegisteredPlugin)> = BTreeMap::new();
    let mut csi_node_updated = false;
    let mut back_off = INITIAL_BACK_OFF;
    loop {
        let found = sockets(&dir);
        let before = hosts.csi.names();
        let mut has_changed = false;
        known.retain(|path, (number, plugin)| {
            let stays = found.get(path) == Some(number);
            if !stays {
                tracing::info!(socket = %path.display(), "plugin deregistered");
                hosts.deregister(plugin);
                has_changed = true;
            }
            stays
        });
        let mut all_registered = true;
        for (path, number) in found {
            if known.contains_key(&path) {
                continue;
            }
            match register_socket(&hosts, &path, settings).await {
                Ok(plugin) => {
                    tracing::info!(socket = %path.display(), "plugin registered");
                    has_changed = true;
                    known.insert(path, (number, plugin));
                }
                Err(error) => {
                    tracing::warn!(error, socket = %path.display(), "plugin registration failed, will retry");
                    all_registered = false;
                }
            }
        }
        // The CSINode object is updated when the set of drivers changes, and again after a failed
        // update.
        if before != hosts.csi.names() || !csi_node_updated {
            csi_node_updated = match registry::update_csi_node(ctx, settings, hosts.csi).await {
                Ok(csi_node_updated) => csi_node_updated,
                Err(error) => {
                    tracing::warn!(%error, "cannot update the CSINode object, will retry");
                    false
                }
            };
        }
        if has_changed {
            on_change();
        }
        if all_registered && csi_node_updated {
            back_off = INITIAL_BACK_OFF;
            let _ = changes.next().await;
        } else {
            let _ = tokio::time::timeout(back_off, changes.next()).await;
            back_off = (back_off * 2).min(MAX_BACK_OFF);
        }
    }
}

/// The sockets in a directory with their inode numbers. A plugin that was restarted may have a
/// socket of the same name, which has another inode.
fn sockets(dir: &Path) -> BTreeMap<PathBuf, u64> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let sockets = entries.filter_map(|entry| {
        let known = entry.metadata().ok().filter(|known| known.file_type().is_socket())?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        (!hidden).then(|| (entry.path(), known.ino()))
    });
    sockets.collect()
}

/// Requests the plugin's info from its socket, registers it, and notifies it of the result.
async fn register_socket(
    hosts: &PluginHandlers<'_>,
    path: &Path,
    settings: &Settings,
) -> Result<RegisteredPlugin, String> {
    let socket = GrpcClient::new(&path.display().to_string());
    let info: Result<PluginRegistrationInfo, _> =
        socket.call("/pluginregistration.Registration/GetInfo", &Empty {}, RPC_TIMEOUT).await;
    let info = info.map_err(|refusal| refusal.to_string())?;
    let registered = hosts.register(&info, path, settings).await;
    if matches!(registered, Ok(RegisteredPlugin::Unsupported)) {
        return registered;
    }
    let error = registered.as_ref().err().cloned().unwrap_or_default();
    let status = RegistrationStatus { plugin_registered: registered.is_ok(), error };
    let call = "/pluginregistration.Registration/NotifyRegistrationStatus";
    let _: Result<Empty, _> = socket.call(call, &status, RPC_TIMEOUT).await;
    registered
}

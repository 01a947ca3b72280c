//! Plugins introduce themselves by a socket in a directory: whoever is behind it is asked for its name and kind, and is
//! handed on to those who work with its kind: storage drivers ([`crate::csi`]) and those of devices ([`crate::dra`]).

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

/// Who is behind a socket. Names and numbers are the protocol's own (`pluginregistration`, v1).
#[derive(Clone, PartialEq, prost::Message)]
pub struct PluginRegistrationInfo {
    /// Such as `CSIPlugin`.
    #[prost(string, tag = 1)]
    pub kind: String,
    #[prost(string, tag = 2)]
    pub name: String,
    /// The socket it serves at; its own where empty.
    #[prost(string, tag = 3)]
    pub endpoint: String,
    #[prost(string, repeated, tag = 4)]
    pub supported_versions: Vec<String>,
}

impl PluginRegistrationInfo {
    /// Where it serves on this host.
    pub fn endpoint_on_host(&self, path: &Path, settings: &Settings) -> String {
        match self.endpoint.is_empty() {
            true => path.display().to_string(),
            false => settings.host_path(Path::new(&self.endpoint)).display().to_string(),
        }
    }
}

/// How that went.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegistrationStatus {
    #[prost(bool, tag = 1)]
    pub plugin_registered: bool,
    #[prost(string, tag = 2)]
    pub error: String,
}

/// Those who work with plugins.
pub struct PluginHandlers<'a> {
    pub csi: &'a csi::Drivers,
    pub dra: &'a dra::Drivers,
}

/// What was found behind a socket.
enum RegisteredPlugin {
    Csi(String),
    Dra(Plugin),
    /// A plugin of a kind nobody here works with.
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

/// Looks after the directory of plugins for as long as the node runs. `news` is called when drivers come and go.
pub async fn run(ctx: &Ctx, settings: &Settings, hosts: PluginHandlers<'_>, on_change: impl Fn()) {
    let dir = settings.root.join("plugins_registry");
    // Drivers mount these, and say that they must be there.
    let directories = [settings.root.join("pods"), settings.root.join("plugins"), dir.clone()];
    let created = directories.iter().try_for_each(std::fs::create_dir_all);
    let changes = created.and_then(|()| DirWatcher::new(&dir));
    let changes = match changes {
        Ok(changes) => changes,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "no plugins can be found");
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
                tracing::info!(socket = %path.display(), "a plugin is gone");
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
                    tracing::info!(socket = %path.display(), "a plugin is there");
                    has_changed = true;
                    known.insert(path, (number, plugin));
                }
                Err(error) => {
                    tracing::warn!(error, socket = %path.display(), "a plugin cannot be used");
                    all_registered = false;
                }
            }
        }
        if before != hosts.csi.names() || !csi_node_updated {
            csi_node_updated = match registry::update_csi_node(ctx, settings, hosts.csi).await {
                Ok(csi_node_updated) => csi_node_updated,
                Err(error) => {
                    tracing::warn!(%error, "cannot tell which storage drivers there are");
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

/// The sockets in a directory; another one of the same name has another number.
fn sockets(dir: &Path) -> BTreeMap<PathBuf, u64> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let sockets = entries.filter_map(|entry| {
        let known = entry.metadata().ok().filter(|known| known.file_type().is_socket())?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        (!hidden).then(|| (entry.path(), known.ino()))
    });
    sockets.collect()
}

/// Asks who is behind a socket, and tells it how that went.
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

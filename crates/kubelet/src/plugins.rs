//! Plugins introduce themselves by a socket in a directory: whoever is behind it is asked for its name and kind, and is
//! handed on to those who work with its kind: storage drivers ([`crate::csi`]) and those of devices ([`crate::dra`]).

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reconcile::Ctx;
use runtime::Socket;

use crate::changes::Changes;
use crate::config::Settings;
use crate::csi::{self, registry};
use crate::dra::{self, Plugin};

const QUICK: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const STORAGE: &str = "CSIPlugin";
const DEVICES: &str = "DRAPlugin";

#[derive(Clone, PartialEq, prost::Message)]
struct Empty {}

/// Who is behind a socket. Names and numbers are the protocol's own (`pluginregistration`, v1).
#[derive(Clone, PartialEq, prost::Message)]
pub struct Info {
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

impl Info {
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
pub struct Registered {
    #[prost(bool, tag = 1)]
    pub plugin_registered: bool,
    #[prost(string, tag = 2)]
    pub error: String,
}

/// Those who work with plugins.
pub struct Hosts<'a> {
    pub csi: &'a csi::Drivers,
    pub dra: &'a dra::Drivers,
}

/// What was found behind a socket.
enum Known {
    Storage(String),
    Devices(Plugin),
    /// A plugin of a kind nobody here works with.
    Other,
}

impl Hosts<'_> {
    async fn meet(&self, info: &Info, path: &Path, settings: &Settings) -> Result<Known, String> {
        let endpoint = info.endpoint_on_host(path, settings);
        match info.kind.as_str() {
            STORAGE => {
                let driver = registry::meet(info, &endpoint).await?;
                let name = driver.name.clone();
                self.csi.know(driver);
                Ok(Known::Storage(name))
            }
            DEVICES => {
                let plugin = Plugin::new(info, &endpoint)?;
                self.dra.know(plugin.clone())?;
                Ok(Known::Devices(plugin))
            }
            _ => Ok(Known::Other),
        }
    }

    fn forget(&self, known: &Known) {
        match known {
            Known::Storage(name) => self.csi.forget(name),
            Known::Devices(plugin) => self.dra.forget(plugin),
            Known::Other => {}
        }
    }
}

/// Looks after the directory of plugins for as long as the node runs. `news` is called when drivers come and go.
pub async fn run(ctx: &Ctx, settings: &Settings, hosts: Hosts<'_>, news: impl Fn()) {
    let dir = settings.root.join("plugins_registry");
    // Drivers mount these, and say that they must be there.
    let directories = [settings.root.join("pods"), settings.root.join("plugins"), dir.clone()];
    let created = directories.iter().try_for_each(std::fs::create_dir_all);
    let changes = created.and_then(|()| Changes::of(&dir));
    let changes = match changes {
        Ok(changes) => changes,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "no plugins can be found");
            return std::future::pending().await;
        }
    };
    let mut known: BTreeMap<PathBuf, (u64, Known)> = BTreeMap::new();
    let mut is_told = false;
    let mut pause = FIRST_PAUSE;
    loop {
        let found = sockets(&dir);
        let before = hosts.csi.names();
        let mut has_changed = false;
        known.retain(|path, (number, plugin)| {
            let stays = found.get(path) == Some(number);
            if !stays {
                tracing::info!(socket = %path.display(), "a plugin is gone");
                hosts.forget(plugin);
                has_changed = true;
            }
            stays
        });
        let mut all_met = true;
        for (path, number) in found {
            if known.contains_key(&path) {
                continue;
            }
            match introduce(&hosts, &path, settings).await {
                Ok(plugin) => {
                    tracing::info!(socket = %path.display(), "a plugin is there");
                    has_changed = true;
                    known.insert(path, (number, plugin));
                }
                Err(error) => {
                    tracing::warn!(error, socket = %path.display(), "a plugin cannot be used");
                    all_met = false;
                }
            }
        }
        if before != hosts.csi.names() || !is_told {
            is_told = match registry::tell(ctx, settings, hosts.csi).await {
                Ok(is_told) => is_told,
                Err(error) => {
                    tracing::warn!(%error, "cannot tell which storage drivers there are");
                    false
                }
            };
        }
        if has_changed {
            news();
        }
        if all_met && is_told {
            pause = FIRST_PAUSE;
            let _ = changes.next().await;
        } else {
            let _ = tokio::time::timeout(pause, changes.next()).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
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
async fn introduce(hosts: &Hosts<'_>, path: &Path, settings: &Settings) -> Result<Known, String> {
    let socket = Socket::new(&path.display().to_string());
    let info: Result<Info, _> =
        socket.call("/pluginregistration.Registration/GetInfo", &Empty {}, QUICK).await;
    let info = info.map_err(|refusal| refusal.to_string())?;
    let met = hosts.meet(&info, path, settings).await;
    if matches!(met, Ok(Known::Other)) {
        return met;
    }
    let error = met.as_ref().err().cloned().unwrap_or_default();
    let status = Registered { plugin_registered: met.is_ok(), error };
    let call = "/pluginregistration.Registration/NotifyRegistrationStatus";
    let _: Result<Empty, _> = socket.call(call, &status, QUICK).await;
    met
}

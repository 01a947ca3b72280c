//! Plugins introduce themselves by a socket in a directory: whoever is behind it is asked for its name, its driver is
//! met, and the cluster is told that this node has it (CSINode).

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as ApiNode;
use k8s_openapi::api::storage::v1::CSINode;
use reconcile::{Ctx, Error, Key, Patch};
use runtime::Socket;
use serde_json::json;

use super::Drivers;
use super::driver::Driver;
use super::messages::{Empty, PluginInfo, RegistrationStatus};
use super::node_object;
use crate::changes::Changes;
use crate::config::Settings;

const QUICK: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const CSI: &str = "CSIPlugin";

/// A socket that was seen; another of the same name has another number.
type Sockets = BTreeMap<PathBuf, u64>;

/// Looks after the directory of plugins for as long as the node runs. `news` is called when drivers come and go.
pub async fn run(ctx: &Ctx, settings: &Settings, drivers: &Drivers, news: impl Fn()) {
    let dir = settings.root.join("plugins_registry");
    let changes = std::fs::create_dir_all(&dir).and_then(|()| Changes::of(&dir));
    let changes = match changes {
        Ok(changes) => changes,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "no plugins can be found");
            return std::future::pending().await;
        }
    };
    // The drivers behind the sockets that are known; none for what is no driver.
    let mut known: BTreeMap<PathBuf, (u64, Option<String>)> = BTreeMap::new();
    let mut is_told = false;
    let mut pause = FIRST_PAUSE;
    loop {
        let found = sockets(&dir);
        let before = drivers.names();
        known.retain(|path, (number, name)| {
            let stays = found.get(path) == Some(number);
            if let (false, Some(name)) = (stays, &name) {
                tracing::info!(driver = name, "a storage driver is gone");
                drivers.forget(name);
            }
            stays
        });
        let mut all_met = true;
        for (path, number) in found {
            if known.contains_key(&path) {
                continue;
            }
            match introduce(&path).await {
                Ok(driver) => {
                    let name = driver.as_ref().map(|driver| driver.name.clone());
                    if let Some(driver) = driver {
                        tracing::info!(driver = driver.name, "a storage driver is there");
                        drivers.know(driver);
                    }
                    known.insert(path, (number, name));
                }
                Err(error) => {
                    tracing::warn!(error, socket = %path.display(), "a plugin does not answer");
                    all_met = false;
                }
            }
        }
        let has_changed = before != drivers.names();
        if has_changed || !is_told {
            is_told = match tell(ctx, settings, drivers).await {
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

fn sockets(dir: &Path) -> Sockets {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let sockets = entries.filter_map(|entry| {
        let known = entry.metadata().ok().filter(|known| known.file_type().is_socket())?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        (!hidden).then(|| (entry.path(), known.ino()))
    });
    sockets.collect()
}

/// Asks who is behind a socket, and tells it how that went. `None`: a plugin that is no driver.
async fn introduce(path: &Path) -> Result<Option<Driver>, String> {
    let socket = Socket::new(&path.display().to_string());
    let info: Result<PluginInfo, _> =
        socket.call("/pluginregistration.Registration/GetInfo", &Empty {}, QUICK).await;
    let info = info.map_err(|refusal| refusal.to_string())?;
    if info.kind != CSI {
        return Ok(None);
    }
    let met = meet(&info, path).await;
    let status = RegistrationStatus {
        plugin_registered: met.is_ok(),
        error: met.as_ref().err().cloned().unwrap_or_default(),
    };
    let call = "/pluginregistration.Registration/NotifyRegistrationStatus";
    let _: Result<Empty, _> = socket.call(call, &status, QUICK).await;
    met.map(Some)
}

async fn meet(info: &PluginInfo, path: &Path) -> Result<Driver, String> {
    let is_first = |version: &String| version.trim_start_matches('v').split('.').next() == Some("1");
    if !info.supported_versions.iter().any(is_first) {
        let known = info.supported_versions.join(" ");
        return Err(format!(
            "validation failed for CSI Driver {} at endpoint {}: driver only supports CSI versions [{known}]",
            info.name, info.endpoint
        ));
    }
    let endpoint = match info.endpoint.is_empty() {
        true => path.display().to_string(),
        false => info.endpoint.clone(),
    };
    Driver::meet(&info.name, &endpoint).await.map_err(|refusal| refusal.to_string())
}

/// Says in the cluster which drivers are here; `false` while this node is not known there yet.
async fn tell(ctx: &Ctx, settings: &Settings, drivers: &Drivers) -> Result<bool, Error> {
    let key = Key::new("", &settings.node_name);
    let Some(own) = ctx.caches.nodes().get(&key) else { return Ok(false) };
    let drivers = drivers.all();
    if let Some(changes) = node_object::marks(&own, &drivers) {
        ctx.client.patch::<ApiNode>(&key, &Patch::Merge(json!({"metadata": changes}))).await?;
    }
    match ctx.client.get::<CSINode>(&key).await {
        Ok(before) => {
            let now = node_object::csi_node(Some(&before), &own, &drivers);
            if now != before {
                ctx.client.replace(&now).await?;
            }
        }
        Err(error) if error.is_not_found() => {
            ctx.client.create(&node_object::csi_node(None, &own, &drivers)).await?;
        }
        Err(error) => return Err(error),
    }
    Ok(true)
}

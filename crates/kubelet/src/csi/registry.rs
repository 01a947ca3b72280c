//! Handles CSI drivers that register through the plugin watcher ([`crate::plugins`]): queries them
//! and publishes the node's drivers in the CSINode object.

use k8s_openapi::api::core::v1::Node as ApiNode;
use k8s_openapi::api::storage::v1::CSINode;
use reconcile::{Ctx, Error, Key, Patch};
use serde_json::json;

use super::Drivers;
use super::driver::Driver;
use super::node_object;
use crate::config::Settings;
use crate::plugins::PluginRegistrationInfo;

/// Checks the versions of a driver, connects to its socket and queries its node information.
pub async fn connect_driver(info: &PluginRegistrationInfo, endpoint: &str) -> Result<Driver, String> {
    let is_first = |version: &String| version.trim_start_matches('v').split('.').next() == Some("1");
    if !info.supported_versions.iter().any(is_first) {
        let known = info.supported_versions.join(" ");
        return Err(format!(
            "validation failed for CSI Driver {} at endpoint {}: driver only supports CSI versions [{known}]",
            info.name, info.endpoint
        ));
    }
    Driver::connect(&info.name, endpoint).await.map_err(|refusal| refusal.to_string())
}

/// Updates the CSINode and the Node metadata. Returns `false` while the Node is not in the cache.
pub async fn update_csi_node(ctx: &Ctx, settings: &Settings, drivers: &Drivers) -> Result<bool, Error> {
    let key = Key::new("", &settings.node_name);
    let Some(own) = ctx.caches.nodes().get(&key) else { return Ok(false) };
    let drivers = drivers.all();
    if let Some(changes) = node_object::node_metadata_patch(&own, &drivers) {
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

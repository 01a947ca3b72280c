//! The DRA drivers of this node. The ResourceSlices of a driver are deleted when it has been
//! disconnected for a while, so that the scheduler stops using its devices. At startup all slices
//! of the node are deleted, since no driver is connected yet.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use reconcile::{Ctx, DeleteOptions, Error, Key};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::health::HealthInfoCache;
use super::plugin::Plugin;

/// How long a driver may be disconnected before its slices are deleted. As upstream: long enough
/// for a rolling update.
const SLICE_GRACE_PERIOD: Duration = Duration::from_secs(30);
/// The interval between connection checks.
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_secs(5);
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(300);
/// Stands for all drivers in `delete_after`.
const ALL_DRIVERS: &str = "";

/// The DRA drivers of this node.
pub struct Drivers {
    /// How long a driver may be disconnected.
    pub slice_grace_period: Duration,
    /// The plugins of each driver in the order of registration.
    plugins: Mutex<BTreeMap<String, Vec<PluginConnection>>>,
    /// Registered plugins that `run` does not watch yet.
    added: Mutex<Vec<Plugin>>,
    /// When the ResourceSlices of a disconnected driver are deleted.
    delete_after: Mutex<BTreeMap<String, Instant>>,
    /// Notified when `added` or `delete_after` has changed.
    changed: [Notify; 2],
    pub health: HealthInfoCache,
}

struct PluginConnection {
    plugin: Plugin,
    is_connected: bool,
}

const PLUGIN_ADDED: usize = 0;
const DELETE_AFTER_CHANGED: usize = 1;

impl Default for Drivers {
    fn default() -> Drivers {
        Drivers {
            slice_grace_period: SLICE_GRACE_PERIOD,
            plugins: Mutex::default(),
            added: Mutex::default(),
            delete_after: Mutex::default(),
            changed: Default::default(),
            health: HealthInfoCache::default(),
        }
    }
}

impl Drivers {
    pub fn register(&self, plugin: Plugin) -> Result<(), String> {
        let mut plugins = self.plugins.lock();
        let of_driver = plugins.entry(plugin.driver.clone()).or_default();
        if of_driver.iter().any(|known| known.plugin.endpoint == plugin.endpoint) {
            let Plugin { driver, endpoint, .. } = &plugin;
            return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {driver}"));
        }
        of_driver.push(PluginConnection { plugin: plugin.clone(), is_connected: true });
        self.update_delete_after(&plugin.driver, of_driver);
        self.added.lock().push(plugin);
        self.changed[PLUGIN_ADDED].notify_one();
        Ok(())
    }

    pub fn unregister(&self, plugin: &Plugin) {
        plugin.removed.send_replace(true);
        let mut plugins = self.plugins.lock();
        let Some(of_driver) = plugins.get_mut(&plugin.driver) else { return };
        of_driver.retain(|known| known.plugin.endpoint != plugin.endpoint);
        self.update_delete_after(&plugin.driver, of_driver);
        if of_driver.is_empty() {
            plugins.remove(&plugin.driver);
        }
    }

    /// The newest connected plugin of a driver, or else its newest plugin.
    pub fn find(&self, driver: &str) -> Result<Plugin, String> {
        let plugins = self.plugins.lock();
        let of_driver = plugins.get(driver).map(Vec::as_slice).unwrap_or_default();
        let latest = of_driver.iter().rfind(|known| known.is_connected).or(of_driver.last());
        match latest {
            Some(known) => Ok(known.plugin.clone()),
            None if driver.is_empty() => Err("DRA driver name is empty".to_owned()),
            None => Err(format!("DRA driver {driver} is not registered")),
        }
    }

    fn set_connected(&self, plugin: &Plugin, is_connected: bool) {
        let mut plugins = self.plugins.lock();
        let Some(of_driver) = plugins.get_mut(&plugin.driver) else { return };
        let seen = of_driver.iter_mut().filter(|known| known.plugin.endpoint == plugin.endpoint);
        seen.for_each(|known| known.is_connected = is_connected);
        self.update_delete_after(&plugin.driver, of_driver);
    }

    /// Schedules the deletion of a driver's slices if none of its plugins is connected, or cancels
    /// it.
    fn update_delete_after(&self, driver: &str, plugins: &[PluginConnection]) {
        let mut delete_after = self.delete_after.lock();
        if plugins.iter().any(|known| known.is_connected) {
            delete_after.remove(driver);
        } else {
            delete_after.entry(driver.to_owned()).or_insert_with(|| Instant::now() + self.slice_grace_period);
        }
        self.changed[DELETE_AFTER_CHANGED].notify_one();
    }
}

/// Watches all drivers. `on_change` is called when the health of a device has changed.
pub async fn run(ctx: &Ctx, node: &str, drivers: &Drivers, on_change: impl Fn()) {
    drivers.delete_after.lock().insert(ALL_DRIVERS.to_owned(), Instant::now());
    let watch_plugins = async {
        let mut watchers = FuturesUnordered::new();
        loop {
            tokio::select! {
                () = drivers.changed[PLUGIN_ADDED].notified() => {
                    let added = std::mem::take(&mut *drivers.added.lock());
                    watchers.extend(added.into_iter().map(|plugin| watch_plugin(ctx, drivers, plugin, &on_change)));
                }
                Some(()) = watchers.next() => {}
            }
        }
    };
    tokio::select! {
        () = delete_expired_slices(ctx, node, drivers) => {}
        () = watch_plugins => {}
    }
}

/// Watches the connection and the device health of one plugin until it is removed.
async fn watch_plugin(ctx: &Ctx, drivers: &Drivers, plugin: Plugin, on_change: &impl Fn()) {
    let mut removed = plugin.removed.subscribe();
    let poll_plugin = async {
        loop {
            let is_connected = plugin.is_reachable().await;
            drivers.set_connected(&plugin, is_connected);
            if is_connected {
                let health_watch = plugin.watch_health(|report| {
                    if drivers.health.update(&plugin.driver, &report, ctx.clock.now()) {
                        on_change();
                    }
                });
                if let Err(error) = health_watch.await {
                    tracing::debug!(%error, driver = plugin.driver, "DRA driver does not report device health");
                }
                drivers.health.remove_driver(&plugin.driver);
            }
            tokio::time::sleep(HEALTH_CHECK_INTERVAL).await;
        }
    };
    tokio::select! {
        () = poll_plugin => {}
        _ = removed.wait_for(|removed| *removed) => {}
    }
    drivers.health.remove_driver(&plugin.driver);
}

/// Deletes the ResourceSlices of drivers that are disconnected for too long.
async fn delete_expired_slices(ctx: &Ctx, node: &str, drivers: &Drivers) {
    let mut pause = MIN_RETRY_DELAY;
    loop {
        let next = drivers
            .delete_after
            .lock()
            .iter()
            .min_by_key(|(_, at)| **at)
            .map(|(name, at)| (name.clone(), *at));
        let Some((driver, at)) = next else {
            drivers.changed[DELETE_AFTER_CHANGED].notified().await;
            continue;
        };
        tokio::select! {
            () = tokio::time::sleep_until(at) => {}
            () = drivers.changed[DELETE_AFTER_CHANGED].notified() => continue,
        }
        match delete_resource_slices(ctx, node, &driver).await {
            Ok(true) => {
                // The driver may have reconnected and disconnected again meanwhile, which sets a
                // new time.
                pause = MIN_RETRY_DELAY;
                let mut delete_after = drivers.delete_after.lock();
                if delete_after.get(&driver) == Some(&at) {
                    delete_after.remove(&driver);
                }
                continue;
            }
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, driver, "failed to delete ResourceSlices of a DRA driver, will retry")
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_RETRY_DELAY);
    }
}

/// Deletes the ResourceSlices of a driver on this node. Returns `false` while the Node is not in
/// the cache.
async fn delete_resource_slices(ctx: &Ctx, node: &str, driver: &str) -> Result<bool, Error> {
    if ctx.caches.nodes().get(&Key::new("", node)).is_none() {
        return Ok(false);
    }
    let of_driver = if driver == ALL_DRIVERS { String::new() } else { format!(",spec.driver={driver}") };
    let path =
        format!("/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName={node}{of_driver}");
    match ctx.client.delete_at(&path, &DeleteOptions::default()).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(true),
    }
}

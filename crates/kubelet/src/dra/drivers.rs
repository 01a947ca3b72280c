//! Which drivers of devices this node has. What they said they have (ResourceSlices) is taken back once one of them has
//! been away for a while, so that no more pods come here for it; and when the node starts, since nobody is here yet.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use reconcile::{Ctx, Delete, Error, Key};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::health::Health;
use super::plugin::Plugin;

/// How long a driver may be away, upstream: enough for another one in its place.
const ABSENCE: Duration = Duration::from_secs(30);
/// Between two looks whether a driver is there.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Stands for all drivers.
const ALL: &str = "";

/// The drivers of this node.
pub struct Drivers {
    /// How long one may be away.
    pub absence: Duration,
    /// In the order they came.
    plugins: Mutex<BTreeMap<String, Vec<Known>>>,
    /// Those nobody looks after yet.
    fresh: Mutex<Vec<Plugin>>,
    /// From when on nothing of a driver's is offered any more.
    ends: Mutex<BTreeMap<String, Instant>>,
    /// Told when one of these has changed.
    changed: [Notify; 2],
    pub health: Health,
}

struct Known {
    plugin: Plugin,
    is_there: bool,
}

const FRESH: usize = 0;
const ENDS: usize = 1;

impl Default for Drivers {
    fn default() -> Drivers {
        Drivers {
            absence: ABSENCE,
            plugins: Mutex::default(),
            fresh: Mutex::default(),
            ends: Mutex::default(),
            changed: Default::default(),
            health: Health::default(),
        }
    }
}

impl Drivers {
    pub fn know(&self, plugin: Plugin) -> Result<(), String> {
        let mut plugins = self.plugins.lock();
        let of_driver = plugins.entry(plugin.driver.clone()).or_default();
        if of_driver.iter().any(|known| known.plugin.endpoint == plugin.endpoint) {
            let Plugin { driver, endpoint, .. } = &plugin;
            return Err(format!("endpoint {endpoint} already registered for DRA driver plugin {driver}"));
        }
        of_driver.push(Known { plugin: plugin.clone(), is_there: true });
        self.judge(&plugin.driver, of_driver);
        self.fresh.lock().push(plugin);
        self.changed[FRESH].notify_one();
        Ok(())
    }

    pub fn forget(&self, plugin: &Plugin) {
        plugin.gone.send_replace(true);
        let mut plugins = self.plugins.lock();
        let Some(of_driver) = plugins.get_mut(&plugin.driver) else { return };
        of_driver.retain(|known| known.plugin.endpoint != plugin.endpoint);
        self.judge(&plugin.driver, of_driver);
        if of_driver.is_empty() {
            plugins.remove(&plugin.driver);
        }
    }

    /// The one to ask: the newest that is there, or the newest.
    pub fn find(&self, driver: &str) -> Result<Plugin, String> {
        let plugins = self.plugins.lock();
        let of_driver = plugins.get(driver).map(Vec::as_slice).unwrap_or_default();
        let newest = of_driver.iter().rfind(|known| known.is_there).or(of_driver.last());
        match newest {
            Some(known) => Ok(known.plugin.clone()),
            None if driver.is_empty() => Err("DRA driver name is empty".to_owned()),
            None => Err(format!("DRA driver {driver} is not registered")),
        }
    }

    fn saw(&self, plugin: &Plugin, is_there: bool) {
        let mut plugins = self.plugins.lock();
        let Some(of_driver) = plugins.get_mut(&plugin.driver) else { return };
        let seen = of_driver.iter_mut().filter(|known| known.plugin.endpoint == plugin.endpoint);
        seen.for_each(|known| known.is_there = is_there);
        self.judge(&plugin.driver, of_driver);
    }

    /// Notes when a driver has been away for too long, or that it is back.
    fn judge(&self, driver: &str, plugins: &[Known]) {
        let mut ends = self.ends.lock();
        if plugins.iter().any(|known| known.is_there) {
            ends.remove(driver);
        } else {
            ends.entry(driver.to_owned()).or_insert_with(|| Instant::now() + self.absence);
        }
        self.changed[ENDS].notify_one();
    }
}

/// Looks after drivers for as long as the node runs. `news` is called when what is known of a device has changed.
pub async fn run(ctx: &Ctx, node: &str, drivers: &Drivers, news: impl Fn()) {
    drivers.ends.lock().insert(ALL.to_owned(), Instant::now());
    let looking = async {
        let mut followed = FuturesUnordered::new();
        loop {
            tokio::select! {
                () = drivers.changed[FRESH].notified() => {
                    let fresh = std::mem::take(&mut *drivers.fresh.lock());
                    followed.extend(fresh.into_iter().map(|plugin| follow(ctx, drivers, plugin, &news)));
                }
                Some(()) = followed.next() => {}
            }
        }
    };
    tokio::select! {
        () = wipe(ctx, node, drivers) => {}
        () = looking => {}
    }
}

/// Looks after one driver until it has gone.
async fn follow(ctx: &Ctx, drivers: &Drivers, plugin: Plugin, news: &impl Fn()) {
    let mut gone = plugin.gone.subscribe();
    let looking = async {
        loop {
            let is_there = plugin.answers().await;
            drivers.saw(&plugin, is_there);
            if is_there {
                let heard = plugin.healths(|told| {
                    if drivers.health.hear(&plugin.driver, &told, ctx.clock.now()) {
                        news();
                    }
                });
                if let Err(error) = heard.await {
                    tracing::debug!(%error, driver = plugin.driver, "a driver does not tell how its devices are");
                }
                drivers.health.forget(&plugin.driver);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    tokio::select! {
        () = looking => {}
        _ = gone.wait_for(|gone| *gone) => {}
    }
    drivers.health.forget(&plugin.driver);
}

/// Takes back what drivers offered that are away for too long.
async fn wipe(ctx: &Ctx, node: &str, drivers: &Drivers) {
    let mut pause = FIRST_PAUSE;
    loop {
        let next =
            drivers.ends.lock().iter().min_by_key(|(_, at)| **at).map(|(name, at)| (name.clone(), *at));
        let Some((driver, at)) = next else {
            drivers.changed[ENDS].notified().await;
            continue;
        };
        tokio::select! {
            () = tokio::time::sleep_until(at) => {}
            () = drivers.changed[ENDS].notified() => continue,
        }
        match take_back(ctx, node, &driver).await {
            Ok(true) => {
                pause = FIRST_PAUSE;
                let mut ends = drivers.ends.lock();
                if ends.get(&driver) == Some(&at) {
                    ends.remove(&driver);
                }
                continue;
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, driver, "cannot take back what a driver offered"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// `false` while the node is not known in the cluster yet.
async fn take_back(ctx: &Ctx, node: &str, driver: &str) -> Result<bool, Error> {
    if ctx.caches.nodes().get(&Key::new("", node)).is_none() {
        return Ok(false);
    }
    let of_driver = if driver == ALL { String::new() } else { format!(",spec.driver={driver}") };
    let path =
        format!("/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName={node}{of_driver}");
    match ctx.client.delete_at(&path, &Delete::default()).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(true),
    }
}

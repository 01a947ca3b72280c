//! The embedded store alone, compared with the sync rate of the disk.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use futures_util::future::try_join_all;
use store::log::{Config, LogStore};
use store::{Expect, Store as _, Write};

use crate::objects::config_map;
use crate::report::{Report, Unit, median};

/// Baseline: overwriting a block of an existing file and syncing it to disk.
pub const SYNC_BASELINE: &str = "yardstick/sync-4KiB";
const BLOCK_BYTES: usize = 4096;

pub async fn run(
    report: &mut Report,
    dir: &Path,
    round: Duration,
    rounds: usize,
    entries: usize,
) -> Result<()> {
    report.add(SYNC_BASELINE, Unit::PerSecond, syncs_per_second(&dir.join("blocks"), round)?);
    let store = Arc::new(LogStore::open(&dir.join("store"), Config::default())?);
    let value = Bytes::from(config_map("cm-00000").to_string());
    let next = Arc::new(AtomicUsize::new(0));
    for clients in [1, 64] {
        let mut rates = Vec::new();
        for _ in 0..rounds {
            let (before, start) = (next.load(Ordering::Relaxed), Instant::now());
            let end = start + round;
            let tasks = (0..clients).map(|_| {
                let (store, value, next) = (store.clone(), value.clone(), next.clone());
                tokio::spawn(async move {
                    while Instant::now() < end {
                        create(&store, next.fetch_add(1, Ordering::Relaxed), &value).await?;
                    }
                    anyhow::Ok(())
                })
            });
            for done in try_join_all(tasks).await? {
                done?;
            }
            let written = next.load(Ordering::Relaxed) - before;
            rates.push(written as f64 / start.elapsed().as_secs_f64());
        }
        let name = format!("store/write-{clients}-clients");
        report.add_relative(name, Unit::PerSecond, median(&mut rates), SYNC_BASELINE);
    }
    let existing = next.load(Ordering::Relaxed);
    for chunk in (existing..entries).collect::<Vec<_>>().chunks(256) {
        try_join_all(chunk.iter().map(|index| create(&store, *index, &value))).await?;
    }
    measure_reads(report, &store, rounds, entries).await
}

async fn create(store: &LogStore, index: usize, value: &Bytes) -> Result<(), store::Error> {
    let write =
        Write { key: key(index), value: Some(value.clone()), expect: Expect::Absent, ttl: None, lazy: false };
    store.write(write).await.map(drop)
}

async fn measure_reads(report: &mut Report, store: &LogStore, rounds: usize, entries: usize) -> Result<()> {
    let (mut lists, mut gets) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let start = Instant::now();
        let page = store.list("/registry/configmaps/", None, entries, None).await?;
        lists.push(entries as f64 / start.elapsed().as_secs_f64());
        ensure!(page.entries.len() == entries, "listed {} of {entries}", page.entries.len());
        let start = Instant::now();
        for index in 0..entries {
            ensure!(store.get(&key(index)).await?.is_some(), "{index} is missing");
        }
        gets.push(entries as f64 / start.elapsed().as_secs_f64());
    }
    report.add("store/get", Unit::PerSecond, median(&mut gets));
    report.add_relative("store/list-entries", Unit::PerSecond, median(&mut lists), "store/get");
    Ok(())
}

fn key(index: usize) -> Arc<str> {
    format!("/registry/configmaps/default/cm-{index:07}").into()
}

/// The number of synced overwrites per second on one thread.
fn syncs_per_second(path: &Path, time: Duration) -> Result<f64> {
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all_at(&[0; 256 * BLOCK_BYTES], 0)?;
    file.sync_all()?;
    let mut samples = Vec::new();
    let start = Instant::now();
    while start.elapsed() < time {
        let write_started = Instant::now();
        file.write_all_at(&[1; BLOCK_BYTES], (samples.len() % 256 * BLOCK_BYTES) as u64)?;
        file.sync_data()?;
        samples.push(write_started.elapsed().as_secs_f64());
    }
    Ok(1.0 / median(&mut samples))
}

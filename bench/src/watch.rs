//! The latency of watch events with many watchers. Every write must reach every watcher.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::future::try_join_all;
use memchr::memmem;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;

use crate::client::{Client, WatchStream};
use crate::objects::config_map;
use crate::report::{Report, Unit, median, millis, quantile};
use crate::server::Server;
use crate::wire::{Sizes, collection, connect};

/// Prefix of the objects' names, followed by a number.
const NAME_PREFIX: &str = "watched-";
const WRITER_COUNT: usize = 4;
const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

/// One event at one watcher: the index of the write, and when the last byte was received.
type Delivery = (usize, Instant);

pub async fn run(report: &mut Report, server: &Server, clients: &[Client], sizes: Sizes) -> Result<()> {
    let watchers = connect(server, sizes.watchers).await?;
    let (sender, mut delivery_channel) = unbounded_channel();
    let path = collection("configmaps");
    let list: Value = serde_json::from_slice(&clients[0].get(&format!("{path}?limit=1")).await?.body)?;
    let version = list["metadata"]["resourceVersion"].as_str().context("the list has no resourceVersion")?;
    let watch = format!("{path}?watch=1&resourceVersion={version}");
    for watcher in &watchers {
        tokio::spawn(forward_events(watcher.watch(&watch).await?, sender.clone()));
    }
    drop(sender);

    let (sequential_writes, burst) = sizes.watch_writes;
    sequential(report, &clients[0], &mut delivery_channel, sequential_writes, sizes.watchers).await?;
    let cpu = server.cpu()?;
    let events = concurrent(
        report,
        &clients[..WRITER_COUNT],
        &mut delivery_channel,
        (sequential_writes, burst),
        sizes.watchers,
    )
    .await?;
    report.add("watch/burst/cpu-per-event", Unit::CpuMicros, (server.cpu()? - cpu) * 1e6 / events as f64);
    Ok(())
}

/// Sequential writes: each one waits until every watcher has received the previous one, so nothing
/// queues.
async fn sequential(
    report: &mut Report,
    client: &Client,
    delivery_channel: &mut UnboundedReceiver<Delivery>,
    writes: usize,
    watchers: usize,
) -> Result<()> {
    let (mut each, mut slowest) = (Vec::new(), Vec::new());
    for index in 0..writes {
        let sent = Instant::now();
        write(client, index).await?;
        let mut last = 0.0_f64;
        for _ in 0..watchers {
            let (seen, at) = next(delivery_channel).await?;
            ensure!(seen == index, "a watcher saw write {seen} instead of {index}");
            let latency = millis(at - sent);
            last = last.max(latency);
            each.push(latency);
        }
        slowest.push(last);
    }
    report.add("watch/delivery/p50", Unit::Millis, median(&mut each));
    report.add("watch/delivery/p99", Unit::Millis, quantile(&mut each, 0.99));
    report.add("watch/delivery/slowest-watcher-p50", Unit::Millis, median(&mut slowest));
    Ok(())
}

/// Concurrent writes without a pause. Returns the number of events.
async fn concurrent(
    report: &mut Report,
    clients: &[Client],
    delivery_channel: &mut UnboundedReceiver<Delivery>,
    (first, count): (usize, usize),
    watchers: usize,
) -> Result<usize> {
    let start = Instant::now();
    let write_all = try_join_all(clients.iter().enumerate().map(async |(own, client)| {
        let mut sent = Vec::new();
        for index in (first + own..first + count).step_by(clients.len()) {
            sent.push((index, Instant::now()));
            write(client, index).await?;
        }
        anyhow::Ok(sent)
    }));
    let read_all = async {
        let mut seen = Vec::with_capacity(count * watchers);
        while seen.len() < count * watchers {
            seen.push(next(delivery_channel).await?);
        }
        anyhow::Ok(seen)
    };
    let (sent, seen) = tokio::try_join!(write_all, read_all)?;
    let mut times = vec![start; first + count];
    sent.into_iter().flatten().for_each(|(index, at)| times[index] = at);
    let end = seen.iter().map(|(_, at)| *at).max().unwrap_or(start);
    report.add("watch/burst/events", Unit::PerSecond, seen.len() as f64 / (end - start).as_secs_f64());
    let mut latency_samples = Vec::with_capacity(seen.len());
    for (index, at) in &seen {
        let sent = times.get(*index).with_context(|| format!("unexpected event for write {index}"))?;
        latency_samples.push(millis(at.saturating_duration_since(*sent)));
    }
    report.add("watch/burst/p99", Unit::Millis, quantile(&mut latency_samples, 0.99));
    Ok(seen.len())
}

async fn write(client: &Client, index: usize) -> Result<()> {
    client.post(&collection("configmaps"), &config_map(&format!("{NAME_PREFIX}{index:06}"))).await.map(drop)
}

async fn next(delivery_channel: &mut UnboundedReceiver<Delivery>) -> Result<Delivery> {
    match timeout(EVENT_TIMEOUT, delivery_channel.recv()).await {
        Ok(Some(delivery)) => Ok(delivery),
        Ok(None) => bail!("all watches have ended"),
        Err(_) => bail!("no event within {EVENT_TIMEOUT:?}"),
    }
}

/// Forwards the events of one watcher until the watch or the run ends.
async fn forward_events(mut lines: WatchStream, delivery_channel: UnboundedSender<Delivery>) {
    let finder = memmem::Finder::new("\"name\":\"watched-");
    while let Ok(Some((at, line))) = lines.next().await {
        let Some(index) =
            finder.find(&line).and_then(|found| parse_index(&line[found + finder.needle().len()..]))
        else {
            continue;
        };
        if delivery_channel.send((index, at)).is_err() {
            return;
        }
    }
}

fn parse_index(text: &[u8]) -> Option<usize> {
    std::str::from_utf8(text.get(..6)?).ok()?.parse().ok()
}

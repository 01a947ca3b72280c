//! Closed-loop load: several clients that repeat an operation without a pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use futures_util::future::try_join_all;

use crate::client::{Client, Reply};
use crate::report::{median, millis, quantile};
use crate::server::Server;

/// When a round ends.
#[derive(Clone, Copy)]
pub enum StopCondition {
    Count(usize),
    Time(Duration),
}

/// The result of a load. Rates are the median of the rounds; the other values cover all rounds.
pub struct Load {
    pub per_second: f64,
    pub megabytes_per_second: f64,
    pub p50: f64,
    pub p99: f64,
    /// CPU time of the server, in microseconds per operation.
    pub cpu: f64,
}

/// Runs `op` with a number that is unique in this load, starting at `first`.
pub async fn run<F>(
    server: &Server,
    clients: &[Client],
    (first, rounds, stop_condition): (usize, usize, StopCondition),
    op: F,
) -> Result<Load>
where
    F: AsyncFn(&Client, usize) -> Result<Reply>,
{
    let next = Arc::new(AtomicUsize::new(first));
    let (mut rates, mut megabytes, mut latencies) = (Vec::new(), Vec::new(), Vec::new());
    let cpu = server.cpu()?;
    for round in 1..=rounds {
        let start = Instant::now();
        let should_continue = |index: usize| match stop_condition {
            // Each round takes its share of the count; the last one takes the remainder.
            StopCondition::Count(count) => index < first + count * round / rounds,
            StopCondition::Time(time) => start.elapsed() < time,
        };
        let run_client = async |client: &Client| {
            let mut done = Vec::new();
            loop {
                let index = next.load(Ordering::Relaxed);
                if !should_continue(index) {
                    return anyhow::Ok(done);
                }
                if next.compare_exchange(index, index + 1, Ordering::Relaxed, Ordering::Relaxed).is_err() {
                    continue;
                }
                let reply = op(client, index).await?;
                done.push((millis(reply.latency), reply.length));
            }
        };
        let done = try_join_all(clients.iter().map(run_client)).await?;
        let seconds = start.elapsed().as_secs_f64();
        let done: Vec<_> = done.into_iter().flatten().collect();
        rates.push(done.len() as f64 / seconds);
        megabytes.push(done.iter().map(|(_, length)| *length as f64 / 1e6).sum::<f64>() / seconds);
        latencies.extend(done.into_iter().map(|(latency, _)| latency));
    }
    let cpu = (server.cpu()? - cpu) * 1e6 / latencies.len().max(1) as f64;
    Ok(Load {
        per_second: median(&mut rates),
        megabytes_per_second: median(&mut megabytes),
        p50: median(&mut latencies),
        p99: quantile(&mut latencies, 0.99),
        cpu,
    })
}

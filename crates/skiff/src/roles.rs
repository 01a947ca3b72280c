//! Roles that run apart from the API server, by a kubeconfig: `skiff controller-manager`, `skiff simulate`.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use client::remote::Remote;
use client::{Client, Kubeconfig};
use reconcile::{Clock, Ctx, Election};
use tokio::sync::watch;

use crate::flags::{ControllerManagerFlags, SimulateFlags};
use crate::server::told_to_stop;

pub const CONTROLLER_MANAGER: &str = "kube-controller-manager";

pub fn controller_manager(flags: &ControllerManagerFlags) -> anyhow::Result<()> {
    let chosen = controllers::Chosen::parse(&flags.controllers)?;
    apart(&flags.kubeconfig, CONTROLLER_MANAGER, async |ctx| {
        if !flags.leader_elect {
            controllers::run(ctx, chosen).await;
            return Ok(());
        }
        let election = Election {
            client: ctx.client.clone(),
            clock: ctx.clock.clone(),
            lease: CONTROLLER_MANAGER,
            identity: format!("{}_{}", hostname(), std::process::id()),
        };
        let lost = reconcile::lead(&election, ctx.shutdown.clone(), controllers::run(ctx, chosen)).await;
        // Whoever has lost the lease must not write any more, not even by accident.
        anyhow::ensure!(!lost, "lost the lease {CONTROLLER_MANAGER}");
        Ok(())
    })
}

pub fn simulate(flags: &SimulateFlags) -> anyhow::Result<()> {
    let config = simulate::Config { nodes: flags.nodes, events: flags.events };
    apart(&flags.kubeconfig, "simulate", async |ctx| {
        simulate::run(ctx, config).await;
        Ok(())
    })
}

/// Runs one role against the API server of a kubeconfig until told to stop.
fn apart<Work: Future<Output = anyhow::Result<()>>>(
    kubeconfig: &Path,
    agent: &'static str,
    role: impl FnOnce(Ctx) -> Work,
) -> anyhow::Result<()> {
    let remote = Kubeconfig::read(kubeconfig)?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let remote = Remote::new(&remote).with_context(|| format!("cannot use {}", kubeconfig.display()))?;
        let (stop, shutdown) = watch::channel(false);
        let ctx = Ctx::new(Client::new(Arc::new(remote), agent), Clock::default(), shutdown);
        tokio::spawn(async move {
            told_to_stop().await;
            stop.send_replace(true);
        });
        role(ctx).await
    })
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

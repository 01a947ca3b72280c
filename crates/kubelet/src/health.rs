//! Probes: every running container that has any is asked, as often as it says, for as long as it runs.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use reconcile::{Object as _, Severity};

use crate::memory::Health;
use crate::observed::{Observed, State};
use crate::{Node, ask, hooks, start};

impl Node {
    /// Sees to it that each running container is asked how it is.
    pub fn watch_health(self: &Arc<Node>, pod: &Pod, seen: &Observed) {
        for container in &crate::pod::containers(pod) {
            let probes = [&container.startup_probe, &container.liveness_probe, &container.readiness_probe];
            if probes.iter().all(|probe| probe.is_none()) {
                continue;
            }
            let Some(run) = seen.latest(&container.name) else { continue };
            if !matches!(run.state, State::Running { .. }) {
                continue;
            }
            let new = self.remember(pod, |memory| {
                let new = !memory.health.contains_key(&run.id);
                // What this run was said to be before this process began holds until it is asked again.
                let said = said(pod, &container.name, &run.id);
                let started = container.startup_probe.is_none() || said.is_some_and(|(started, _)| started);
                let ready = match said {
                    Some((_, ready)) => started && ready,
                    None => started && container.readiness_probe.is_none(),
                };
                let health = Health { started, ready, dead: false };
                memory.health.entry(run.id.clone()).or_insert(health);
                new
            });
            if new {
                let watch = Watch {
                    node: self.clone(),
                    pod: pod.clone(),
                    container: container.clone(),
                    id: run.id.clone(),
                };
                tokio::spawn(watch.run());
            }
        }
    }
}

/// Whether a run was said to be started and ready.
fn said(pod: &Pod, container: &str, id: &str) -> Option<(bool, bool)> {
    let status = pod.status.as_ref()?;
    let mut all =
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    let known = all.find(|known| known.name == container)?;
    let same = known.container_id.as_ref().is_some_and(|known| known.ends_with(id));
    same.then(|| (known.started == Some(true), known.ready))
}

/// The questions to one run of a container.
struct Watch {
    node: Arc<Node>,
    pod: Pod,
    container: Container,
    id: String,
}

impl Watch {
    async fn run(self) {
        let started =
            self.node.remember(&self.pod, |memory| memory.health.get(&self.id).is_some_and(|h| h.started));
        if let Some(startup) = self.container.startup_probe.clone().filter(|_| !started) {
            // Nothing else is asked before the container has started.
            if !self.ask_until(&startup, "Startup").await {
                return;
            }
            self.change(|health| health.started = true);
            if self.container.readiness_probe.is_none() {
                self.change(|health| health.ready = true);
            }
        }
        let alive = async {
            match &self.container.liveness_probe {
                Some(probe) => self.keep_asking(probe, "Liveness", |health, well| health.dead |= !well).await,
                None => std::future::pending().await,
            }
        };
        let ready = async {
            match &self.container.readiness_probe {
                Some(probe) => self.keep_asking(probe, "Readiness", |health, well| health.ready = well).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = alive => {}
            () = ready => {}
        }
    }

    /// Asks until the answer is good; `false` when the container has failed to start or is gone.
    async fn ask_until(&self, probe: &Probe, kind: &'static str) -> bool {
        wait(probe.initial_delay_seconds.unwrap_or(0)).await;
        let mut failures = 0;
        while self.lives() {
            match self.ask(probe, kind).await {
                Ok(()) => return true,
                Err(why) => {
                    self.complain(kind, &why);
                    failures += 1;
                    if failures >= probe.failure_threshold.unwrap_or(3) {
                        self.change(|health| health.dead = true);
                        return false;
                    }
                }
            }
            wait(probe.period_seconds.unwrap_or(10)).await;
        }
        false
    }

    async fn keep_asking(&self, probe: &Probe, kind: &'static str, judge: impl Fn(&mut Health, bool)) {
        wait(probe.initial_delay_seconds.unwrap_or(0)).await;
        let (mut good, mut bad) = (0, 0);
        while self.lives() {
            match self.ask(probe, kind).await {
                Ok(()) => (good, bad) = (good + 1, 0),
                Err(why) => {
                    (good, bad) = (0, bad + 1);
                    self.complain(kind, &why);
                }
            }
            if good >= probe.success_threshold.unwrap_or(1) {
                self.change(|health| judge(health, true));
            } else if bad >= probe.failure_threshold.unwrap_or(3) {
                self.change(|health| judge(health, false));
            }
            wait(probe.period_seconds.unwrap_or(10)).await;
        }
    }

    async fn ask(&self, probe: &Probe, kind: &'static str) -> Result<(), String> {
        let answer = self.question(probe).await;
        let counted = (self.container.name.clone(), kind, answer.is_ok());
        self.node.remember(&self.pod, |memory| *memory.asked.entry(counted).or_default() += 1);
        answer
    }

    async fn question(&self, probe: &Probe) -> Result<(), String> {
        let timeout =
            Duration::from_secs(u64::try_from(probe.timeout_seconds.unwrap_or(1)).unwrap_or(1).max(1));
        let pods = self.node.ctx.caches.pods();
        let pod = pods.get_exactly(&self.pod.key(), self.pod.uid());
        let pod = pod.as_deref().unwrap_or(&self.pod);
        if let Some(exec) = &probe.exec {
            let command = exec.command.clone().unwrap_or_default();
            return match self.node.runtime.exec_sync(&self.id, &command, timeout).await {
                Ok(said) if said.exit_code == 0 => Ok(()),
                Ok(said) => Err(hooks::text(&said.stdout, &said.stderr)),
                Err(error) => Err(error.message()),
            };
        }
        let ip = hooks::ip_of(pod);
        if let Some(get) = &probe.http_get {
            return ask::http(pod, &ip, get, timeout).await;
        }
        if let Some(socket) = &probe.tcp_socket {
            let host = socket.host.clone().unwrap_or(ip);
            return ask::tcp(&host, hooks::port(pod, &socket.port)?, timeout).await;
        }
        if let Some(grpc) = &probe.grpc {
            let port = u16::try_from(grpc.port).map_err(|error| error.to_string())?;
            return ask::grpc(&ip, port, grpc.service.as_deref().unwrap_or_default(), timeout).await;
        }
        Ok(())
    }

    /// Whether this run is still the business of anybody.
    fn lives(&self) -> bool {
        self.node.remember(&self.pod, |memory| memory.health.get(&self.id).is_some_and(|health| !health.dead))
    }

    fn change(&self, f: impl FnOnce(&mut Health)) {
        let changed = self.node.remember(&self.pod, |memory| {
            let Some(health) = memory.health.get_mut(&self.id) else { return false };
            let before = *health;
            f(health);
            *health != before
        });
        if changed {
            self.node.look_at(self.pod.key());
        }
    }

    fn complain(&self, kind: &'static str, why: &str) {
        let message = format!("{kind} probe failed: {why}");
        start::note(&self.node, &self.pod, &self.container.name, Severity::Warning, "Unhealthy", message);
    }
}

async fn wait(seconds: i32) {
    tokio::time::sleep(Duration::from_secs(u64::try_from(seconds).unwrap_or(0))).await;
}

//! Probe manager: runs the startup, liveness and readiness probes of running containers. Upstream:
//! `pkg/kubelet/prober`.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use reconcile::{EventType, Object as _};
use runtime::cri::ExecSyncResponse;

use crate::observed::{ObservedPod, State};
use crate::pod::format_pod;
use crate::pod::plan::deadline;
use crate::prober::{self, HttpGetRequest};
use crate::worker_state::ContainerHealth;
use crate::{Node, hooks, start_container};

/// How often a probe is repeated if it could not be run.
const MAX_PROBE_RETRIES: usize = 3;
/// The probe that continues while the pod terminates.
const READINESS: &str = "Readiness";

impl Node {
    /// Starts a probe worker for each running container that has probes and no worker yet.
    pub fn start_probe_workers(self: &Arc<Node>, pod: &Pod, seen: &ObservedPod) {
        // Drop the state of ended runs. Their workers notice that and stop.
        let runs = |id: &String| seen.running().any(|run| run.id == *id);
        self.with_pod_state(pod, |state| state.health.retain(|id, _| runs(id)));
        for container in &crate::pod::containers(pod) {
            let probes = [&container.startup_probe, &container.liveness_probe, &container.readiness_probe];
            if probes.iter().all(|probe| probe.is_none()) {
                continue;
            }
            let Some(run) = seen.latest(&container.name) else { continue };
            let State::Running { since } = run.state else { continue };
            let new = self.with_pod_state(pod, |state| {
                let new = !state.health.contains_key(&run.id);
                // The reported status of this run holds after a restart of the kubelet, until its
                // probes have run.
                let reported = reported_health(pod, &container.name, &run.id);
                let started =
                    container.startup_probe.is_none() || reported.is_some_and(|(started, _)| started);
                let ready = match reported {
                    Some((_, ready)) => started && ready,
                    None => started && container.readiness_probe.is_none(),
                };
                let health = ContainerHealth { started, ready, dead: false };
                state.health.entry(run.id.clone()).or_insert(health);
                new
            });
            if new {
                let worker = ProbeWorker {
                    node: self.clone(),
                    pod: pod.clone(),
                    container: container.clone(),
                    id: run.id.clone(),
                    since,
                    ips: hooks::sandbox_ips(seen).to_vec(),
                };
                tokio::spawn(worker.run());
            }
        }
    }

    /// Whether a pod is deleted, is terminated by the node, or has exceeded its active deadline.
    pub fn is_terminating(&self, pod: &Pod) -> bool {
        let known = self.pod_with_uid(&pod.key(), pod.uid());
        known.is_none_or(|known| {
            let is_ended = self.with_pod_state(pod, |state| state.termination_reason.is_some());
            is_ended || is_deleted_or_expired(&known, self.ctx.clock.now())
        })
    }
}

/// Whether a pod is deleted or has exceeded its active deadline.
fn is_deleted_or_expired(pod: &Pod, now: Timestamp) -> bool {
    pod.is_deleting() || deadline(pod).is_some_and(|deadline| deadline <= now)
}

/// The reported `started` and `ready` of a run. `None` if the status is about another run.
fn reported_health(pod: &Pod, container: &str, id: &str) -> Option<(bool, bool)> {
    let status = pod.status.as_ref()?;
    let mut all =
        status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    let known = all.find(|known| known.name == container)?;
    let same = known.container_id.as_ref().is_some_and(|known| known.ends_with(id));
    same.then(|| (known.started == Some(true), known.ready))
}

/// The probes of one run of a container.
struct ProbeWorker {
    node: Arc<Node>,
    pod: Pod,
    container: Container,
    id: String,
    since: Timestamp,
    /// The IP addresses of the run's sandbox.
    ips: Vec<String>,
}

impl ProbeWorker {
    async fn run(self) {
        let started = self.with_health(|health| health.started).unwrap_or(false);
        if let Some(startup) = self.container.startup_probe.clone().filter(|_| !started) {
            // The other probes start after the startup probe has succeeded.
            if !self.probe_until_success(&startup, "Startup").await {
                return;
            }
            self.change(|health| health.started = true);
            if self.container.readiness_probe.is_none() {
                self.change(|health| health.ready = true);
            }
        }
        let alive = async {
            if let Some(probe) = &self.container.liveness_probe {
                self.probe_loop(probe, "Liveness", |health, is_healthy| health.dead |= !is_healthy).await;
            }
        };
        let ready = async {
            if let Some(probe) = &self.container.readiness_probe {
                self.probe_loop(probe, READINESS, |health, is_healthy| health.ready = is_healthy).await;
            }
        };
        tokio::join!(alive, ready);
    }

    /// Probes until the first success. Returns `false` if the container has failed to start or is
    /// gone.
    async fn probe_until_success(&self, probe: &Probe, kind: &'static str) -> bool {
        let (early, first) = (delay(probe), first_probe_delay(probe));
        wait(early).await;
        if early < first {
            // One early probe lets a container that has started already skip the rest of the delay.
            // A failure does not count.
            if self.should_probe(kind) && self.run_probe(probe).await.is_ok() {
                self.count(kind, true);
                return true;
            }
            wait(first - early).await;
        }
        let mut counter = ResultCounter::default();
        while self.should_probe(kind) {
            match counter.count(probe, &self.probe_and_record(probe, kind).await) {
                Some(true) => return true,
                Some(false) => {
                    self.change(|health| health.dead = true);
                    return false;
                }
                None => {}
            }
            wait(period(probe)).await;
        }
        false
    }

    async fn probe_loop(
        &self,
        probe: &Probe,
        kind: &'static str,
        update: impl Fn(&mut ContainerHealth, bool),
    ) {
        wait(match kind {
            READINESS => remaining_delay(delay(probe), self.node.ctx.clock.now().duration_since(self.since)),
            _ => first_probe_delay(probe),
        })
        .await;
        let mut counter = ResultCounter::default();
        while self.should_probe(kind) {
            if let Some(is_healthy) = counter.count(probe, &self.probe_and_record(probe, kind).await) {
                self.change(|health| update(health, is_healthy));
            }
            wait(period(probe)).await;
        }
    }

    async fn probe_and_record(&self, probe: &Probe, kind: &'static str) -> Result<(), ProbeError> {
        let answer = probe_with_retries(|| self.run_probe(probe)).await;
        if let Some(message) = answer.as_ref().err().map(|error| error.message(kind)) {
            let container = &self.container.name;
            start_container::record_container_event(
                &self.node,
                &self.pod,
                container,
                EventType::Warning,
                "Unhealthy",
                message,
            );
        }
        if !matches!(answer, Err(ProbeError::Unknown(_))) {
            self.count(kind, answer.is_ok());
        }
        answer
    }

    fn count(&self, kind: &'static str, is_healthy: bool) {
        let counted = (self.container.name.clone(), kind, is_healthy);
        if let Some(state) = self.node.pod_states.lock().get_mut(self.pod.uid()) {
            *state.probe_counts.entry(counted).or_default() += 1;
        }
    }

    async fn run_probe(&self, probe: &Probe) -> Result<(), ProbeError> {
        let timeout =
            Duration::from_secs(u64::try_from(probe.timeout_seconds.unwrap_or(1)).unwrap_or(1).max(1));
        let pod = self.node.pod_with_uid(&self.pod.key(), self.pod.uid());
        let pod = pod.as_deref().unwrap_or(&self.pod);
        if let Some(exec) = &probe.exec {
            let command = exec.command.clone().unwrap_or_default();
            let response = self.node.runtime.exec_sync(&self.id, &command, timeout).await;
            return exec_result(&command, timeout, response);
        }
        let ip = hooks::pod_ip(pod, &self.ips, &self.node.settings.node_ips());
        let ip = ip.unwrap_or_else(|| "127.0.0.1".to_owned());
        if let Some(get) = &probe.http_get {
            let request =
                HttpGetRequest::new(&self.container, &ip, get, "probe").map_err(ProbeError::Unknown)?;
            return request.probe(timeout).await.map_err(ProbeError::Failure);
        }
        if let Some(socket) = &probe.tcp_socket {
            let host = socket.host.clone().filter(|host| !host.is_empty()).unwrap_or(ip);
            let port = hooks::resolve_port(&self.container, &socket.port).map_err(ProbeError::Unknown)?;
            return prober::tcp(&host, port, timeout).await.map_err(ProbeError::Failure);
        }
        if let Some(grpc) = &probe.grpc {
            let port = u16::try_from(grpc.port).map_err(|error| ProbeError::Unknown(error.to_string()))?;
            let service = grpc.service.as_deref().unwrap_or_default();
            return prober::grpc(&ip, port, service, timeout).await.map_err(ProbeError::Failure);
        }
        let (pod, container) = (format_pod(pod), &self.container.name);
        Err(ProbeError::Unknown(format!("missing probe handler for {pod}:{container}")))
    }

    fn should_probe(&self, kind: &str) -> bool {
        // The state is removed when the run has ended or the pod is gone, which stops the worker.
        let Some(health) = self.with_health(|health| *health) else { return false };
        should_probe(kind, health, || self.node.is_terminating(&self.pod))
    }

    fn change(&self, f: impl FnOnce(&mut ContainerHealth)) {
        let changed = self.with_health(|health| {
            let before = *health;
            f(health);
            *health != before
        });
        if changed == Some(true) {
            self.node.health_changes.send_modify(|count| *count += 1);
            self.node.enqueue(self.pod.key());
        }
    }

    /// Accesses the state of this run. `None` once the run has ended or the pod is gone. A missing
    /// entry is never created again here.
    fn with_health<T>(&self, f: impl FnOnce(&mut ContainerHealth) -> T) -> Option<T> {
        let mut pod_states = self.node.pod_states.lock();
        pod_states.get_mut(self.pod.uid())?.health.get_mut(&self.id).map(f)
    }
}

/// Whether a probe still runs. A container that is being stopped is not restarted, so its startup
/// and liveness probes end. Readiness probes continue, because they control traffic.
fn should_probe(kind: &str, health: ContainerHealth, is_terminating: impl Fn() -> bool) -> bool {
    kind == READINESS || !health.dead && !is_terminating()
}

/// Why a probe did not succeed.
#[derive(Debug, PartialEq)]
enum ProbeError {
    /// The probe has failed.
    Failure(String),
    /// The probe could not be run. This does not count as a failure.
    Unknown(String),
}

impl ProbeError {
    /// The event message, as upstream has it.
    fn message(&self, kind: &str) -> String {
        match self {
            ProbeError::Failure(reason) => format!("{kind} probe failed: {reason}"),
            ProbeError::Unknown(reason) => {
                format!("{kind} probe errored and resulted in unknown state: {reason}")
            }
        }
    }
}

/// The result of an exec probe.
fn exec_result(
    command: &[String],
    timeout: Duration,
    response: runtime::Result<ExecSyncResponse>,
) -> Result<(), ProbeError> {
    match response {
        Ok(response) if response.exit_code == 0 => Ok(()),
        Ok(response) => Err(ProbeError::Failure(hooks::combined_output(&response.stdout, &response.stderr))),
        Err(runtime::Error::Rejected { code: runtime::ErrorCode::Timeout, .. }) => {
            let (command, time) = (command.join(" "), SignedDuration::try_from(timeout).unwrap_or_default());
            let time = api::time::format_duration(time);
            Err(ProbeError::Failure(format!("command timed out: {command:?} timed out after {time}")))
        }
        Err(error) => Err(ProbeError::Unknown(error.message())),
    }
}

/// Repeats a probe that could not be run.
async fn probe_with_retries<F>(run_probe: impl Fn() -> F) -> Result<(), ProbeError>
where
    F: Future<Output = Result<(), ProbeError>>,
{
    let mut answer = run_probe().await;
    for _ in 1..MAX_PROBE_RETRIES {
        if !matches!(answer, Err(ProbeError::Unknown(_))) {
            break;
        }
        answer = run_probe().await;
    }
    answer
}

/// Counts equal results in a row.
#[derive(Default)]
struct ResultCounter {
    good: i32,
    bad: i32,
}

impl ResultCounter {
    /// Counts a result. Returns the new state once the success or failure threshold is reached.
    fn count(&mut self, probe: &Probe, answer: &Result<(), ProbeError>) -> Option<bool> {
        match answer {
            Ok(()) => (self.good, self.bad) = (self.good + 1, 0),
            Err(ProbeError::Failure(_)) => (self.good, self.bad) = (0, self.bad + 1),
            Err(ProbeError::Unknown(_)) => return None,
        }
        let is_healthy = self.good >= probe.success_threshold.unwrap_or(1);
        let is_unhealthy = self.bad >= probe.failure_threshold.unwrap_or(3);
        (is_healthy || is_unhealthy).then_some(is_healthy)
    }
}

fn delay(probe: &Probe) -> i32 {
    probe.initial_delay_seconds.unwrap_or(0)
}

/// The rest of an initial delay that starts with the container, no matter how long its startup
/// probe takes.
fn remaining_delay(delay: i32, running: SignedDuration) -> i32 {
    let past = i32::try_from(running.as_secs()).unwrap_or(i32::MAX);
    delay.saturating_sub(past).clamp(0, delay.max(0))
}

fn period(probe: &Probe) -> i32 {
    probe.period_seconds.unwrap_or(10)
}

/// The delay before failures count. Upstream probes on a ticker that starts with the pod, so that a
/// container with a failure threshold of one is not killed while it starts. Readiness probes have
/// no such delay.
fn first_probe_delay(probe: &Probe) -> i32 {
    delay(probe).max(period(probe))
}

async fn wait(seconds: i32) {
    tokio::time::sleep(Duration::from_secs(u64::try_from(seconds).unwrap_or(0))).await;
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn failure(reason: &str) -> Result<(), ProbeError> {
        Err(ProbeError::Failure(reason.to_owned()))
    }

    fn unknown(reason: &str) -> Result<(), ProbeError> {
        Err(ProbeError::Unknown(reason.to_owned()))
    }

    #[test]
    fn exec_probe_result_is_exit_code_or_timeout() {
        let check = |response: runtime::Result<i32>, expected: Result<(), ProbeError>| {
            let response = response.map(|exit_code| ExecSyncResponse {
                stdout: b"out".to_vec(),
                stderr: b"err".to_vec(),
                exit_code,
            });
            let command = ["sleep".to_owned(), "100".to_owned()];
            assert_eq!(exec_result(&command, Duration::from_secs(90), response), expected);
        };
        let runtime_error = |code, message: &str| {
            Err(runtime::Error::Rejected { call: "ExecSync", code, message: message.to_owned() })
        };
        check(Ok(0), Ok(()));
        // Exit codes 126 and 127 of a shell count as failures of the container.
        for code in [1, 126, 127] {
            check(Ok(code), failure("outerr"));
        }
        let late = "command timed out: \"sleep 100\" timed out after 1m30s";
        check(runtime_error(runtime::ErrorCode::Timeout, "too late"), failure(late));
        check(runtime_error(runtime::ErrorCode::Other, "no such file"), unknown("no such file"));
        check(runtime_error(runtime::ErrorCode::NotFound, "no container"), unknown("no container"));
        let unreachable = runtime::Error::Unreachable { socket: "/s".into(), message: String::new() };
        let reason = "the container runtime at /s cannot be reached: is it running?";
        check(Err(unreachable), unknown(reason));
    }

    #[test]
    fn only_readiness_probes_go_on_until_the_container_ends() {
        let check = |metadata: Value, deadline: Option<i64>, dead: bool, expected: [bool; 3]| {
            let pod = json!({
                "metadata": metadata,
                "spec": {"containers": [], "activeDeadlineSeconds": deadline},
                "status": {"startTime": "2026-01-01T00:00:00Z"},
            });
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            let now = "2026-01-01T00:01:00Z".parse().expect("a time");
            let health = ContainerHealth { started: true, ready: true, dead };
            let found = ["Startup", "Liveness", "Readiness"]
                .map(|kind| should_probe(kind, health, || is_deleted_or_expired(&pod, now)));
            assert_eq!(found, expected, "{metadata} {deadline:?}");
        };
        check(json!({}), None, false, [true, true, true]);
        check(json!({}), None, true, [false, false, true]);
        check(json!({}), Some(61), false, [true, true, true]);
        check(json!({}), Some(60), false, [false, false, true]);
        check(json!({"deletionTimestamp": "2026-01-01T00:02:00Z"}), None, false, [false, false, true]);
    }

    #[test]
    fn initial_delay_counts_from_container_start() {
        let check = |delay: i32, running: i64, expected: i32| {
            assert_eq!(
                remaining_delay(delay, SignedDuration::from_secs(running)),
                expected,
                "{delay} {running}"
            );
        };
        check(0, 5, 0);
        check(10, 0, 10);
        check(10, 4, 6);
        check(10, 11, 0);
        check(10, i64::MAX, 0);
        // The clock was set back.
        check(10, -30, 10);
    }

    #[test]
    fn probe_error_messages_match_upstream() {
        let message = |error: Result<(), ProbeError>| error.expect_err("trouble").message("Liveness");
        assert_eq!(message(failure("no")), "Liveness probe failed: no");
        assert_eq!(message(unknown("no")), "Liveness probe errored and resulted in unknown state: no");
    }

    #[tokio::test]
    async fn retries_probes_with_unknown_result() {
        let check = async |results: [Result<(), ProbeError>; 4],
                           expected: Result<(), ProbeError>,
                           attempts: usize| {
            let results = std::cell::RefCell::new(Vec::from(results));
            let found = probe_with_retries(|| std::future::ready(results.borrow_mut().remove(0))).await;
            assert_eq!((found, 4 - results.borrow().len()), (expected, attempts));
        };
        check([Ok(()), unknown("b"), Ok(()), Ok(())], Ok(()), 1).await;
        check([failure("a"), Ok(()), Ok(()), Ok(())], failure("a"), 1).await;
        check([unknown("a"), unknown("b"), Ok(()), Ok(())], Ok(()), 3).await;
        check([unknown("a"), unknown("b"), unknown("c"), Ok(())], unknown("c"), 3).await;
    }

    /// `+` and `-` are success and failure, `?` is unknown. The expected value is the result after
    /// the last one.
    #[test]
    fn result_changes_at_success_and_failure_threshold() {
        let check = |results: &str, expected: Option<bool>| {
            let probe = Probe { success_threshold: Some(2), failure_threshold: Some(3), ..Probe::default() };
            let mut counter = ResultCounter::default();
            let counted = results.chars().map(|answer| {
                let answer = match answer {
                    '+' => Ok(()),
                    '-' => failure(""),
                    _ => unknown(""),
                };
                counter.count(&probe, &answer)
            });
            assert_eq!(counted.last().flatten(), expected, "{results}");
        };
        check("+", None);
        check("++", Some(true));
        check("++-", None);
        check("--", None);
        check("---", Some(false));
        check("--+-", None);
        check("??????", None);
        check("---?", None);
        check("--?-", Some(false));
        check("+?+", Some(true));
    }
}

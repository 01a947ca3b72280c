//! Probes: every running container that has any is asked, as often as it says, for as long as it runs.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use reconcile::{Object as _, Severity};
use runtime::cri::ExecSyncResponse;

use crate::ask::{self, Page};
use crate::memory::Health;
use crate::observed::{Observed, State};
use crate::pod::plan::deadline;
use crate::pod::whole_name;
use crate::{Node, hooks, start};

/// How often in a row somebody is asked who cannot be asked.
const TRIES: usize = 3;
/// The probe that goes on to the end.
const READINESS: &str = "Readiness";

impl Node {
    /// Sees to it that each running container is asked how it is.
    pub fn watch_health(self: &Arc<Node>, pod: &Pod, seen: &Observed) {
        // Whoever asks one that has ended has nobody to ask any more.
        let runs = |id: &String| seen.running().any(|run| run.id == *id);
        self.remember(pod, |memory| memory.health.retain(|id, _| runs(id)));
        for container in &crate::pod::containers(pod) {
            let probes = [&container.startup_probe, &container.liveness_probe, &container.readiness_probe];
            if probes.iter().all(|probe| probe.is_none()) {
                continue;
            }
            let Some(run) = seen.latest(&container.name) else { continue };
            let State::Running { since } = run.state else { continue };
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
                    since,
                    ips: hooks::ips(seen).to_vec(),
                };
                tokio::spawn(watch.run());
            }
        }
    }

    /// Whether a pod is deleted, ended by the node, or has been at it for too long, by what is known now.
    pub fn is_to_end(&self, pod: &Pod) -> bool {
        let known = self.pod_exactly(&pod.key(), pod.uid());
        known.is_none_or(|known| {
            let is_ended = self.remember(pod, |memory| memory.ended.is_some());
            is_ended || is_over_by(&known, self.ctx.clock.now())
        })
    }
}

/// Whether a pod says itself that it is to end by now.
fn is_over_by(pod: &Pod, now: Timestamp) -> bool {
    pod.is_deleting() || deadline(pod).is_some_and(|deadline| deadline <= now)
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
    since: Timestamp,
    /// The addresses of the sandbox it runs in.
    ips: Vec<String>,
}

impl Watch {
    async fn run(self) {
        let started = self.recall(|health| health.started).unwrap_or(false);
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
            if let Some(probe) = &self.container.liveness_probe {
                self.keep_asking(probe, "Liveness", |health, well| health.dead |= !well).await;
            }
        };
        let ready = async {
            if let Some(probe) = &self.container.readiness_probe {
                self.keep_asking(probe, READINESS, |health, well| health.ready = well).await;
            }
        };
        tokio::join!(alive, ready);
    }

    /// Asks until the answer is good; `false` when the container has failed to start or is gone.
    async fn ask_until(&self, probe: &Probe, kind: &'static str) -> bool {
        let (early, first) = (delay(probe), counts_after(probe));
        wait(early).await;
        if early < first {
            // Who has started already need not wait for the answer that counts.
            if self.is_of_interest(kind) && self.question(probe).await.is_ok() {
                self.count(kind, true);
                return true;
            }
            wait(first - early).await;
        }
        let mut tally = Tally::default();
        while self.is_of_interest(kind) {
            match tally.count(probe, &self.ask(probe, kind).await) {
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

    async fn keep_asking(&self, probe: &Probe, kind: &'static str, judge: impl Fn(&mut Health, bool)) {
        wait(match kind {
            READINESS => remaining(delay(probe), self.node.ctx.clock.now().duration_since(self.since)),
            _ => counts_after(probe),
        })
        .await;
        let mut tally = Tally::default();
        while self.is_of_interest(kind) {
            if let Some(well) = tally.count(probe, &self.ask(probe, kind).await) {
                self.change(|health| judge(health, well));
            }
            wait(period(probe)).await;
        }
    }

    async fn ask(&self, probe: &Probe, kind: &'static str) -> Result<(), Trouble> {
        let answer = patiently(|| self.question(probe)).await;
        if let Some(message) = answer.as_ref().err().map(|trouble| trouble.told(kind)) {
            let container = &self.container.name;
            start::note(&self.node, &self.pod, container, Severity::Warning, "Unhealthy", message);
        }
        if !matches!(answer, Err(Trouble::Unasked(_))) {
            self.count(kind, answer.is_ok());
        }
        answer
    }

    fn count(&self, kind: &'static str, is_well: bool) {
        let counted = (self.container.name.clone(), kind, is_well);
        if let Some(memory) = self.node.memories.lock().get_mut(self.pod.uid()) {
            *memory.asked.entry(counted).or_default() += 1;
        }
    }

    async fn question(&self, probe: &Probe) -> Result<(), Trouble> {
        let timeout =
            Duration::from_secs(u64::try_from(probe.timeout_seconds.unwrap_or(1)).unwrap_or(1).max(1));
        let pod = self.node.pod_exactly(&self.pod.key(), self.pod.uid());
        let pod = pod.as_deref().unwrap_or(&self.pod);
        if let Some(exec) = &probe.exec {
            let command = exec.command.clone().unwrap_or_default();
            let said = self.node.runtime.exec_sync(&self.id, &command, timeout).await;
            return heard(&command, timeout, said);
        }
        let ip = hooks::ip_of(pod, &self.ips, &self.node.settings.node_ips());
        let ip = ip.unwrap_or_else(|| "127.0.0.1".to_owned());
        if let Some(get) = &probe.http_get {
            let page = Page::of(&self.container, &ip, get, "probe").map_err(Trouble::Unasked)?;
            return page.probe(timeout).await.map_err(Trouble::Unwell);
        }
        if let Some(socket) = &probe.tcp_socket {
            let host = socket.host.clone().filter(|host| !host.is_empty()).unwrap_or(ip);
            let port = hooks::port(&self.container, &socket.port).map_err(Trouble::Unasked)?;
            return ask::tcp(&host, port, timeout).await.map_err(Trouble::Unwell);
        }
        if let Some(grpc) = &probe.grpc {
            let port = u16::try_from(grpc.port).map_err(|error| Trouble::Unasked(error.to_string()))?;
            let service = grpc.service.as_deref().unwrap_or_default();
            return ask::grpc(&ip, port, service, timeout).await.map_err(Trouble::Unwell);
        }
        let (pod, container) = (whole_name(pod), &self.container.name);
        Err(Trouble::Unasked(format!("missing probe handler for {pod}:{container}")))
    }

    fn is_of_interest(&self, kind: &str) -> bool {
        let Some(health) = self.recall(|health| *health) else { return false };
        is_of_interest(kind, health, || self.node.is_to_end(&self.pod))
    }

    fn change(&self, f: impl FnOnce(&mut Health)) {
        let changed = self.recall(|health| {
            let before = *health;
            f(health);
            *health != before
        });
        if changed == Some(true) {
            self.node.health_changes.send_modify(|count| *count += 1);
            self.node.look_at(self.pod.key());
        }
    }

    /// What is known of this run. Nothing, once it has ended or its pod is gone, and that is not begun anew.
    fn recall<T>(&self, f: impl FnOnce(&mut Health) -> T) -> Option<T> {
        let mut memories = self.node.memories.lock();
        memories.get_mut(self.pod.uid())?.health.get_mut(&self.id).map(f)
    }
}

/// Whether a probe goes on while its container runs. Whatever the other two find, a container that is being stopped is not
/// restarted; readiness counts until the end, since it decides about traffic.
fn is_of_interest(kind: &str, health: Health, is_to_end: impl Fn() -> bool) -> bool {
    kind == READINESS || !health.dead && !is_to_end()
}

/// Why an answer is not a good one.
#[derive(Debug, PartialEq)]
enum Trouble {
    /// The container is not well.
    Unwell(String),
    /// It could not be asked, which says nothing of how it is.
    Unasked(String),
}

impl Trouble {
    /// In upstream's words.
    fn told(&self, kind: &str) -> String {
        match self {
            Trouble::Unwell(why) => format!("{kind} probe failed: {why}"),
            Trouble::Unasked(why) => format!("{kind} probe errored and resulted in unknown state: {why}"),
        }
    }
}

/// What a command that was run in a container says of it.
fn heard(
    command: &[String],
    timeout: Duration,
    said: runtime::Result<ExecSyncResponse>,
) -> Result<(), Trouble> {
    match said {
        Ok(said) if said.exit_code == 0 => Ok(()),
        Ok(said) => Err(Trouble::Unwell(hooks::text(&said.stdout, &said.stderr))),
        Err(runtime::Error::Refused { code: runtime::Code::Timeout, .. }) => {
            let (command, time) = (command.join(" "), SignedDuration::try_from(timeout).unwrap_or_default());
            let time = api::time::duration(time);
            Err(Trouble::Unwell(format!("command timed out: {command:?} timed out after {time}")))
        }
        Err(error) => Err(Trouble::Unasked(error.message())),
    }
}

/// Asks again, a few times, where nobody could be asked.
async fn patiently<F>(question: impl Fn() -> F) -> Result<(), Trouble>
where
    F: Future<Output = Result<(), Trouble>>,
{
    let mut answer = question().await;
    for _ in 1..TRIES {
        if !matches!(answer, Err(Trouble::Unasked(_))) {
            break;
        }
        answer = question().await;
    }
    answer
}

/// How often in a row the answer was the same.
#[derive(Default)]
struct Tally {
    good: i32,
    bad: i32,
}

impl Tally {
    /// Counts an answer, and says how the container is where that is enough to know.
    fn count(&mut self, probe: &Probe, answer: &Result<(), Trouble>) -> Option<bool> {
        match answer {
            Ok(()) => (self.good, self.bad) = (self.good + 1, 0),
            Err(Trouble::Unwell(_)) => (self.good, self.bad) = (0, self.bad + 1),
            Err(Trouble::Unasked(_)) => return None,
        }
        let is_well = self.good >= probe.success_threshold.unwrap_or(1);
        let is_unwell = self.bad >= probe.failure_threshold.unwrap_or(3);
        (is_well || is_unwell).then_some(is_well)
    }
}

fn delay(probe: &Probe) -> i32 {
    probe.initial_delay_seconds.unwrap_or(0)
}

/// What is left of a delay that begins when the container starts, however long its startup probe takes.
fn remaining(delay: i32, running: SignedDuration) -> i32 {
    let past = i32::try_from(running.as_secs()).unwrap_or(i32::MAX);
    delay.saturating_sub(past).clamp(0, delay.max(0))
}

fn period(probe: &Probe) -> i32 {
    probe.period_seconds.unwrap_or(10)
}

/// For how long no answer is held against a container. Upstream asks in a rhythm that begins with the pod, so that one that
/// may fail once is not ended while it is about to begin; only whether it is ready is asked at once.
fn counts_after(probe: &Probe) -> i32 {
    delay(probe).max(period(probe))
}

async fn wait(seconds: i32) {
    tokio::time::sleep(Duration::from_secs(u64::try_from(seconds).unwrap_or(0))).await;
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn unwell(why: &str) -> Result<(), Trouble> {
        Err(Trouble::Unwell(why.to_owned()))
    }

    fn unasked(why: &str) -> Result<(), Trouble> {
        Err(Trouble::Unasked(why.to_owned()))
    }

    #[test]
    fn what_commands_say() {
        let check = |said: runtime::Result<i32>, expected: Result<(), Trouble>| {
            let said = said.map(|exit_code| ExecSyncResponse {
                stdout: b"out".to_vec(),
                stderr: b"err".to_vec(),
                exit_code,
            });
            let command = ["sleep".to_owned(), "100".to_owned()];
            assert_eq!(heard(&command, Duration::from_secs(90), said), expected);
        };
        let refused = |code, message: &str| {
            Err(runtime::Error::Refused { call: "ExecSync", code, message: message.to_owned() })
        };
        check(Ok(0), Ok(()));
        // Whatever a shell says of commands that it does not find is the container's own answer.
        for code in [1, 126, 127] {
            check(Ok(code), unwell("outerr"));
        }
        let late = "command timed out: \"sleep 100\" timed out after 1m30s";
        check(refused(runtime::Code::Timeout, "too late"), unwell(late));
        check(refused(runtime::Code::Other, "no such file"), unasked("no such file"));
        check(refused(runtime::Code::NotFound, "no container"), unasked("no container"));
        let gone = runtime::Error::Unreachable { socket: "/s".into(), message: String::new() };
        let why = "the container runtime at /s cannot be reached: is it running?";
        check(Err(gone), unasked(why));
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
            let health = Health { started: true, ready: true, dead };
            let found = ["Startup", "Liveness", "Readiness"]
                .map(|kind| is_of_interest(kind, health, || is_over_by(&pod, now)));
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
            assert_eq!(remaining(delay, SignedDuration::from_secs(running)), expected, "{delay} {running}");
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
    fn troubles_are_told_in_upstreams_words() {
        let told = |trouble: Result<(), Trouble>| trouble.expect_err("trouble").told("Liveness");
        assert_eq!(told(unwell("no")), "Liveness probe failed: no");
        assert_eq!(told(unasked("no")), "Liveness probe errored and resulted in unknown state: no");
    }

    #[tokio::test]
    async fn who_cannot_be_asked_is_asked_again() {
        let check = async |answers: [Result<(), Trouble>; 4], expected: Result<(), Trouble>, tries: usize| {
            let answers = std::cell::RefCell::new(Vec::from(answers));
            let found = patiently(|| std::future::ready(answers.borrow_mut().remove(0))).await;
            assert_eq!((found, 4 - answers.borrow().len()), (expected, tries));
        };
        check([Ok(()), unasked("b"), Ok(()), Ok(())], Ok(()), 1).await;
        check([unwell("a"), Ok(()), Ok(()), Ok(())], unwell("a"), 1).await;
        check([unasked("a"), unasked("b"), Ok(()), Ok(())], Ok(()), 3).await;
        check([unasked("a"), unasked("b"), unasked("c"), Ok(())], unasked("c"), 3).await;
    }

    /// `+` and `-` are good and bad answers, `?` is none; the last one is what is known then.
    #[test]
    fn so_many_answers_are_enough() {
        let check = |answers: &str, expected: Option<bool>| {
            let probe = Probe { success_threshold: Some(2), failure_threshold: Some(3), ..Probe::default() };
            let mut tally = Tally::default();
            let verdicts = answers.chars().map(|answer| {
                let answer = match answer {
                    '+' => Ok(()),
                    '-' => unwell(""),
                    _ => unasked(""),
                };
                tally.count(&probe, &answer)
            });
            assert_eq!(verdicts.last().flatten(), expected, "{answers}");
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

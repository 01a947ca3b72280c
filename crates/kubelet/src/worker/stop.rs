//! Ending containers: those of a pod all at once, within the time that they have together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use reconcile::{Object as _, Severity};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::Node;
use crate::memory::Memory;
use crate::pod::container as find;
use crate::pod::plan::{Stop, Why};

/// What every container has to say goodbye, however much time others have taken.
const LEAST: Duration = Duration::from_secs(2);
/// How long one that could not be stopped is left alone.
const AGAIN: Duration = Duration::from_secs(1);

/// Stops all of them; what could not be stopped is found again at the next look.
pub async fn all(node: &Arc<Node>, pod: &Pod, stops: impl Iterator<Item = &Stop>) {
    let turns = Turns::default();
    let each = stops.map(|stop| async {
        let is_gone = one(node, pod, stop, &turns).await;
        turns.tell(&stop.id, is_gone);
    });
    join_all(each).await;
}

async fn one(node: &Arc<Node>, pod: &Pod, stop: &Stop, turns: &Turns) -> bool {
    let Stop { id, container, why, after } = stop;
    let own = find(pod, container);
    let (grace, message) = node.remember(pod, |memory| {
        if *why == Why::Resized {
            memory.resized.insert(id.clone());
        }
        let started = memory.health.get(id).is_none_or(|health| health.started);
        (grace(pod, own.as_ref(), memory, started, *why), message(container, started, *why))
    });
    crate::start::note(node, pod, container, Severity::Normal, "Killing", message);
    let time = Time { begun: Instant::now(), grace };
    let hook = own.as_ref().and_then(|own| own.lifecycle.as_ref()?.pre_stop.clone());
    if let Some((own, hook)) = own.as_ref().zip(hook.filter(|_| !grace.is_zero())) {
        let run = crate::hooks::run(node, pod, own, id, &hook);
        if let Ok(Err(error)) = tokio::time::timeout(grace, run).await {
            tracing::warn!(error, pod = %pod.key(), container, "a hook has failed");
            let told = "PreStopHook failed".to_owned();
            crate::start::note(node, pod, container, Severity::Warning, "FailedPreStopHook", told);
        }
    }
    if !turns.come(after, time.left()).await {
        return false;
    }
    let stopped = node.runtime.stop_container(id, time.left().max(LEAST)).await;
    match &stopped {
        Ok(()) => drop(node.remember(pod, |memory| memory.health.remove(id))),
        Err(error) => {
            tracing::warn!(%error, pod = %pod.key(), container, "cannot stop a container");
            tokio::time::sleep(AGAIN).await;
        }
    }
    stopped.is_ok()
}

/// The time a container has from when it is told to go.
fn grace(pod: &Pod, own: Option<&Container>, memory: &Memory, started: bool, why: Why) -> Duration {
    let probe = own.and_then(|own| match started {
        true => own.liveness_probe.as_ref(),
        false => own.startup_probe.as_ref(),
    });
    let evicted = memory.ended.as_ref().is_some_and(|(reason, _)| reason == crate::EVICTED);
    let grace = match why {
        // Whoever has said it, the shorter one holds. What the node is short of is needed at once.
        Why::PodEnds => {
            let of_node = memory.end_within.or(evicted.then_some(1));
            let of_deletion = pod.metadata.deletion_grace_period_seconds;
            of_node.into_iter().chain(of_deletion).min()
        }
        Why::Unhealthy => probe.and_then(|probe: &Probe| probe.termination_grace_period_seconds),
        Why::AllBeginAnew => Some(0),
        Why::SandboxGone | Why::Changed | Why::Resized => None,
    };
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    Duration::from_secs(u64::try_from(grace.or(of_pod).unwrap_or(30)).unwrap_or(0))
}

fn message(container: &str, started: bool, why: Why) -> String {
    match why {
        Why::Unhealthy => {
            let kind = if started { "liveness" } else { "startup" };
            format!("Container {container} failed {kind} probe, will be restarted")
        }
        Why::Changed => format!("Container {container} definition changed, will be restarted"),
        Why::Resized => format!("Container {container} resize requires restart"),
        Why::AllBeginAnew => "killing".to_owned(),
        _ => format!("Stopping container {container}"),
    }
}

/// The time a container has to go.
struct Time {
    begun: Instant,
    grace: Duration,
}

impl Time {
    /// What its hook and those before it have left of it. Runtimes know only whole seconds, and one that has begun is not
    /// taken from it.
    fn left(&self) -> Duration {
        self.grace.saturating_sub(Duration::from_secs(self.begun.elapsed().as_secs()))
    }
}

/// Who has gone of those that are stopped beside each other, by the ids of the runs; `false` of who could not be stopped.
#[derive(Default)]
struct Turns(watch::Sender<BTreeMap<String, bool>>);

impl Turns {
    fn tell(&self, id: &str, is_gone: bool) {
        self.0.send_modify(|turns| {
            turns.insert(id.to_owned(), is_gone);
        });
    }

    /// Waits for all of them as long as there is time. `false` where one of them is still there and has to be stopped
    /// again first.
    async fn come(&self, after: &[String], time: Duration) -> bool {
        let is_known = |turns: &BTreeMap<String, bool>| {
            let mut those = after.iter().map(|id| turns.get(id));
            those.clone().all(|gone| gone.is_some()) || those.any(|gone| gone == Some(&false))
        };
        let mut turns = self.0.subscribe();
        let _ = tokio::time::timeout(time, turns.wait_for(is_known)).await;
        let turns = turns.borrow();
        !after.iter().any(|id| turns.get(id) == Some(&false))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Containers that are stopped beside each other: name, whom it waits for, how long it takes (`None`: it fails at
    /// once), and when it is told to end, with what is left of the ten seconds.
    type Told = (&'static str, &'static [&'static str], Option<u64>, Option<(u64, u64)>);

    #[tokio::test(start_paused = true)]
    async fn companions_have_what_is_left_of_the_time() {
        let check = async |those: &[Told]| {
            let (turns, begun) = (Turns::default(), Instant::now());
            let each = those.iter().map(|(name, after, takes, expected)| {
                let turns = &turns;
                async move {
                    let time = Time { begun, grace: Duration::from_secs(10) };
                    let after: Vec<String> = after.iter().map(|id| (*id).to_owned()).collect();
                    let may_go = turns.come(&after, time.left()).await;
                    let found = may_go.then(|| (begun.elapsed().as_secs(), time.left().max(LEAST).as_secs()));
                    assert_eq!(found, *expected, "{name} of {those:?}");
                    if may_go {
                        tokio::time::sleep(Duration::from_secs(takes.unwrap_or(0))).await;
                    }
                    turns.tell(name, may_go && takes.is_some());
                }
            });
            join_all(each).await;
        };
        let at_once = Some((0, 10));
        check(&[("a", &[], Some(10), at_once), ("b", &[], Some(10), at_once)]).await;
        check(&[
            ("d", &["e", "a", "b"], Some(1), Some((6, 4))),
            ("e", &["a", "b"], Some(2), Some((4, 6))),
            ("a", &[], Some(4), at_once),
            ("b", &[], Some(3), at_once),
        ])
        .await;
        // Whoever takes all the time leaves the least to those who wait.
        check(&[("d", &["a"], Some(1), Some((10, 2))), ("a", &[], Some(11), at_once)]).await;
        // One that could not be stopped is tried again before its companion goes.
        check(&[("d", &["a", "b"], Some(1), None), ("a", &[], None, at_once), ("b", &[], Some(3), at_once)])
            .await;
    }

    #[test]
    fn the_time_a_container_has() {
        let check = |metadata: serde_json::Value, memory: &Memory, started: bool, why: Why, expected: u64| {
            let probe = |seconds: i64| json!({"terminationGracePeriodSeconds": seconds});
            let own = json!({"name": "a", "livenessProbe": probe(5), "startupProbe": probe(6)});
            let spec = json!({"terminationGracePeriodSeconds": 20, "containers": [own]});
            let pod: Pod =
                serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod");
            let found = grace(&pod, find(&pod, "a").as_ref(), memory, started, why);
            assert_eq!(found.as_secs(), expected, "{metadata} {started} {why:?}");
        };
        let (none, deleted) = (Memory::default(), || json!({"deletionGracePeriodSeconds": 9}));
        check(json!({}), &none, true, Why::PodEnds, 20);
        check(deleted(), &none, true, Why::PodEnds, 9);
        check(json!({}), &none, true, Why::Unhealthy, 5);
        check(json!({}), &none, false, Why::Unhealthy, 6);
        check(json!({}), &none, true, Why::SandboxGone, 20);
        check(json!({}), &none, true, Why::AllBeginAnew, 0);
        let evicted = Memory { ended: Some((crate::EVICTED.into(), String::new())), ..Memory::default() };
        check(json!({}), &evicted, true, Why::PodEnds, 1);
        check(deleted(), &Memory { end_within: Some(3), ..evicted }, true, Why::PodEnds, 3);
    }
}

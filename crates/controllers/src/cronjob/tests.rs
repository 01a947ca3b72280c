use expect_test::{Expect, expect};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn cron(spec: Value, status: Value) -> CronJob {
    let mut spec = spec;
    spec["jobTemplate"] = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"template": {}}});
    let metadata = json!({"name": "tick", "namespace": "x", "uid": "cron",
        "creationTimestamp": "2026-01-01T00:00:30Z"});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).expect("a cron job")
}

/// `name [Complete|Failed MINUTE]`. The UID equals the name.
fn job(text: &str) -> Arc<Job> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let status = match words[1..] {
        [] => json!({}),
        [condition, minute] => {
            let at = format!("2026-01-01T00:{minute}:00Z");
            json!({"startTime": at, "completionTime": at, "conditions": [{"type": condition, "status": "True"}]})
        }
        _ => panic!("{text}"),
    };
    let metadata = json!({"name": words[0], "namespace": "x", "uid": words[0]});
    Arc::new(
        serde_json::from_value(json!({"metadata": metadata, "spec": {"template": {}}, "status": status}))
            .expect("a job"),
    )
}

fn active(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"name": name, "namespace": "x", "uid": name})).collect()
}

#[track_caller]
fn check(now: &str, spec: Value, status: Value, jobs: &str, expected: Expect) {
    let jobs: Vec<_> = jobs.split('|').filter(|text| !text.trim().is_empty()).map(job).collect();
    let now: Timestamp = now.parse().expect("a time");
    let plan = plan(&cron(spec, status), &jobs, now, &TimeZone::UTC);
    let mut text = String::new();
    for (_, reason, message) in &plan.events {
        text += &format!("event {reason}: {message}\n");
    }
    for job in &plan.delete {
        text += &format!("delete {}\n", job.name());
    }
    if let Some(start) = &plan.start {
        let at = start.job.annotation("batch.kubernetes.io/cronjob-scheduled-timestamp");
        let verb = if start.exists { "note" } else { "start" };
        text += &format!("{verb} {} {}\n", start.job.name(), at.unwrap_or_default());
    }
    text += &format!("status {}\n", serde_json::to_string(&plan.status).expect("a status").replace('"', ""));
    text += &plan.requeue_at.map_or(String::new(), |at| format!("again {at}\n"));
    expected.assert_eq(&text);
}

#[test]
fn starts_job_at_scheduled_time() {
    let every_five = || json!({"schedule": "*/5 * * * *"});
    check(
        "2026-01-01T00:04:59Z",
        every_five(),
        json!({}),
        "",
        expect![[r#"
        status {}
        again 2026-01-01T00:05:00Z
    "#]],
    );
    check(
        "2026-01-01T00:05:00Z",
        every_five(),
        json!({}),
        "",
        expect![[r#"
        start tick-29453765 2026-01-01T00:05:00Z
        status {}
        again 2026-01-01T00:10:00Z
    "#]],
    );
    // Several runs were missed: the last one is started.
    check(
        "2026-01-01T00:23:00Z",
        every_five(),
        json!({}),
        "",
        expect![[r#"
        start tick-29453780 2026-01-01T00:20:00Z
        status {}
        again 2026-01-01T00:25:00Z
    "#]],
    );
    check(
        "2026-01-02T00:01:00Z",
        json!({"schedule": "* * * * *"}),
        json!({}),
        "",
        expect![[r#"
        event TooManyMissedTimes: too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew
        start tick-29455201 2026-01-02T00:01:00Z
        status {}
        again 2026-01-02T00:02:00Z
    "#]],
    );
    // No run is due for days, then many were missed.
    check(
        "2026-01-20T08:00:00Z",
        json!({"schedule": "* 9 * * 1"}),
        json!({}),
        "",
        expect![[r#"
        event TooManyMissedTimes: too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew
        start tick-29480279 2026-01-19T09:59:00Z
        status {}
        again 2026-01-26T09:00:00Z
    "#]],
    );
    check(
        "2026-01-01T00:23:00Z",
        json!({"schedule": "*/5 * * * *", "startingDeadlineSeconds": 120}),
        json!({}),
        "",
        expect![[r#"
            status {}
            again 2026-01-01T00:25:00Z
        "#]],
    );
    check(
        "2026-01-01T00:12:00Z",
        json!({"schedule": "@every 90s"}),
        json!({}),
        "",
        expect![[r#"
        start tick-29453771 2026-01-01T00:11:00Z
        status {}
        again 2026-01-01T00:12:30Z
    "#]],
    );
    check(
        "2026-01-01T00:05:00Z",
        json!({"schedule": "5 1 * * *", "timeZone": "Europe/Berlin"}),
        json!({}),
        "",
        expect![[r#"
            start tick-29453765 2026-01-01T01:05:00+01:00
            status {}
            again 2026-01-02T00:05:00Z
        "#]],
    );
    check(
        "2026-01-01T00:05:00Z",
        json!({"schedule": "*/5 * * * *", "suspend": true}),
        json!({}),
        "",
        expect![[r#"
        status {}
    "#]],
    );
    check(
        "2026-01-01T00:05:00Z",
        json!({"schedule": "0 0 31 2 *"}),
        json!({}),
        "",
        expect![[r#"
        event InvalidSchedule: invalid schedule: 0 0 31 2 * : time difference between two schedules is less than 1 second
        status {}
    "#]],
    );
    check(
        "2026-01-01T00:05:00Z",
        json!({"schedule": "bad"}),
        json!({}),
        "",
        expect![[r#"
        event UnparseableSchedule: unparseable schedule: "bad" : expected exactly 5 fields, found 1: [bad]
        status {}
    "#]],
    );
    check(
        "2026-01-01T00:05:00Z",
        json!({"schedule": "* * * * *", "timeZone": "Mars/Olympus"}),
        json!({}),
        "",
        expect![[r#"
            event UnknownTimeZone: invalid timeZone: "Mars/Olympus": unknown time zone Mars/Olympus
            status {}
        "#]],
    );
}

#[test]
fn applies_concurrency_policy_and_history_limits() {
    let spec = |policy: &str| json!({"schedule": "*/5 * * * *", "concurrencyPolicy": policy});
    let status = || json!({"active": active(&["a"]), "lastScheduleTime": "2026-01-01T00:05:00Z"});
    for policy in ["Allow", "Forbid", "Replace"] {
        let expected = match policy {
            "Allow" => expect![[r#"
                start tick-29453770 2026-01-01T00:10:00Z
                status {active:[{name:a,namespace:x,uid:a}],lastScheduleTime:2026-01-01T00:05:00Z}
                again 2026-01-01T00:15:00Z
            "#]],
            "Forbid" => expect![[r#"
                event JobAlreadyActive: Not starting job because prior execution is running and concurrency policy is Forbid
                status {active:[{name:a,namespace:x,uid:a}],lastScheduleTime:2026-01-01T00:05:00Z}
                again 2026-01-01T00:15:00Z
            "#]],
            _ => expect![[r#"
                delete a
                start tick-29453770 2026-01-01T00:10:00Z
                status {active:[{name:a,namespace:x,uid:a}],lastScheduleTime:2026-01-01T00:05:00Z}
                again 2026-01-01T00:15:00Z
            "#]],
        };
        check("2026-01-01T00:10:00Z", spec(policy), status(), "a", expected);
    }
    check(
        "2026-01-01T00:07:00Z",
        spec("Forbid"),
        status(),
        "a Complete 06",
        expect![[r#"
        event SawCompletedJob: Saw completed job: a, condition: Complete
        status {lastScheduleTime:2026-01-01T00:05:00Z,lastSuccessfulTime:2026-01-01T00:06:00Z}
        again 2026-01-01T00:10:00Z
    "#]],
    );
    check(
        "2026-01-01T00:07:00Z",
        spec("Forbid"),
        status(),
        "",
        expect![[r#"
        event MissingJob: Active job went missing: a
        status {lastScheduleTime:2026-01-01T00:05:00Z}
        again 2026-01-01T00:10:00Z
    "#]],
    );
    check(
        "2026-01-01T00:07:00Z",
        spec("Forbid"),
        status(),
        "a | other",
        expect![[r#"
        event UnexpectedJob: Saw a job that the controller did not create or forgot: other
        status {active:[{name:a,namespace:x,uid:a}],lastScheduleTime:2026-01-01T00:05:00Z}
        again 2026-01-01T00:10:00Z
    "#]],
    );
    // The controller was stopped after it created the Job and before it updated the status.
    check(
        "2026-01-01T00:10:00Z",
        spec("Allow"),
        json!({}),
        "tick-29453770",
        expect![[r#"
        note tick-29453770 
        status {}
        again 2026-01-01T00:15:00Z
    "#]],
    );
    check(
        "2026-01-01T00:07:00Z",
        json!({"schedule": "*/5 * * * *", "successfulJobsHistoryLimit": 2, "failedJobsHistoryLimit": 0}),
        json!({"lastScheduleTime": "2026-01-01T00:05:00Z"}),
        "a Complete 03 | b Complete 01 | c Complete 02 | d Failed 01",
        expect![[r#"
            delete b
            delete d
            status {lastScheduleTime:2026-01-01T00:05:00Z,lastSuccessfulTime:2026-01-01T00:03:00Z}
            again 2026-01-01T00:10:00Z
        "#]],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn starts_job_on_api_server() {
    let test_cluster = TestCluster::start(&["cronjob-controller"]).await;
    let container = json!({"name": "main", "image": "i"});
    let template = json!({"spec": {"restartPolicy": "Never", "containers": [container]}});
    let spec = json!({"schedule": "@every 1s", "jobTemplate": {"spec": {"template": template}}});
    let cron: CronJob =
        serde_json::from_value(json!({"metadata": {"name": "tick", "namespace": "default"}, "spec": spec}))
            .expect("a cron job");
    test_cluster.client.create(&cron).await.expect("a cron job");
    let status = wait_for("a run", || async {
        let cron = test_cluster.client.get::<CronJob>(&cron.key()).await.expect("the cron job");
        cron.status.filter(|status| status.active.is_some())
    })
    .await;
    let jobs = test_cluster.client.list::<Job>("default").await.expect("jobs");
    let name = status.active.into_iter().flatten().next().and_then(|active| active.name);
    assert!(jobs.iter().any(|job| Some(job.name()) == name.as_deref()));
    assert!(status.last_schedule_time.is_some());
}

proptest! {
    /// For any passage of time, Job completions and stops between creating a Job and updating the status:
    /// no run is started twice, `Forbid` and `Replace` never have two active Jobs, the history stays within
    /// its limits, and planning is idempotent.
    #[test]
    fn respects_concurrency_policy_across_restarts(
        policy in 0..3usize,
        steps in prop::collection::vec((1..300i64, any::<bool>(), any::<bool>()), 1..20),
    ) {
        let policy = ["Allow", "Forbid", "Replace"][policy];
        let spec = json!({
            "schedule": "* * * * *", "concurrencyPolicy": policy,
            "successfulJobsHistoryLimit": 2, "failedJobsHistoryLimit": 1,
        });
        let mut cron = cron(spec, json!({}));
        let mut jobs: Vec<Arc<Job>> = Vec::new();
        let mut names = std::collections::BTreeSet::new();
        let mut now: Timestamp = "2026-01-01T00:00:30Z".parse().expect("a time");
        for (seconds, ends, stopped) in steps {
            now = now.checked_add(SignedDuration::from_secs(seconds)).expect("a time");
            if ends && let Some(running) = jobs.iter_mut().find(|job| plan::finished_status(job).is_none()) {
                let minute = now.strftime("%M").to_string();
                *running = job(&format!("{} Complete {minute}", running.name()));
            }
            for lost in [stopped, false] {
                let first = plan(&cron, &jobs, now, &TimeZone::UTC);
                let mut status = first.status.clone();
                jobs.retain(|job| !first.delete.iter().any(|removed| removed.uid() == job.uid()));
                first.delete.iter().for_each(|removed| plan::remove_active_job(&mut status, removed));
                if let Some(start) = first.start {
                    let started = if start.exists { Arc::new(start.job) } else { job(start.job.name()) };
                    if !start.exists {
                        prop_assert!(names.insert(started.name().to_owned()), "{} twice", started.name());
                        jobs.push(started.clone());
                    }
                    status = plan::status_after_start(status, &started, start.at);
                }
                if !lost {
                    cron.status = Some(status);
                }
            }
            let running = jobs.iter().filter(|job| plan::finished_status(job).is_none()).count();
            prop_assert!(policy == "Allow" || running <= 1, "{running} at once");
            prop_assert!(jobs.len() - running <= 2);
            let again = plan(&cron, &jobs, now, &TimeZone::UTC);
            prop_assert!(again.start.is_none() && again.delete.is_empty());
            prop_assert_eq!(Some(again.status), cron.status.clone());
        }
    }
}

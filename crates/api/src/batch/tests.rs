//! Tests validation of Jobs and CronJobs, and schedules.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::cron_job::CronJob;
use super::job::Job;
use super::schedule::Schedule;
use crate::core::pod::tests::defaulted;
use crate::core::testing::lines;
use crate::field::ErrorList;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

fn spec(mut spec: Value) -> Value {
    spec.set_default("template", json!({"spec": {"restartPolicy": "Never"}}));
    let pod = spec["template"]["spec"].take();
    spec["template"]["spec"] = defaulted(pod);
    spec
}

fn job(job: Value) -> Value {
    let mut job = json!({"metadata": {"name": "x", "uid": "u"}, "spec": spec(job)});
    Job.prepare_for_create(&mut job);
    job
}

#[track_caller]
fn check(job_spec: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    Job.validate(&job(job_spec), &mut errors);
    expected.assert_eq(&lines(&errors));
}

#[test]
fn validates_jobs() {
    check(json!({}), expect![""]);
    check(
        json!({"template": {"spec": {}}}),
        expect![[r#"
        spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"
    "#]],
    );
    check(
        json!({"selector": {"matchLabels": {"a": "b"}}, "parallelism": -1, "managedBy": "me"}),
        expect![[r#"
        spec.selector: Invalid value: {"matchLabels":{"a":"b","batch.kubernetes.io/controller-uid":"u"}}: `selector` not auto-generated
        spec.parallelism: Invalid value: -1: must be greater than or equal to 0
        spec.managedBy: Invalid value: "me": must be a domain-prefixed path (such as "acme.io/foo")
        spec.template.metadata.labels: Invalid value: {"batch.kubernetes.io/controller-uid":"u","batch.kubernetes.io/job-name":"x","controller-uid":"u","job-name":"x"}: `selector` does not match template `labels`
    "#]],
    );
    check(
        json!({"completionMode": "Indexed", "maxFailedIndexes": 1, "podReplacementPolicy": "Never"}),
        expect![[r#"
        spec.backoffLimitPerIndex: Required value: when maxFailedIndexes is specified
        spec.completions: Required value: when completion mode is Indexed
        spec.podReplacementPolicy: Unsupported value: "Never": supported values: "Failed", "TerminatingOrFailed"
    "#]],
    );
    check(
        json!({"podFailurePolicy": {"rules": [{"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [2, 0, 2], "containerName": "z"}},
            {"action": "", "onPodConditions": [{"type": "Ready", "status": ""}]}, {"action": "Ignore"}]}}),
        expect![[r#"
            spec.podFailurePolicy.rules[0].action: Invalid value: "FailIndex": requires the backoffLimitPerIndex to be set
            spec.podFailurePolicy.rules[0].onExitCodes.containerName: Invalid value: "z": must be one of the container or initContainer names in the pod template
            spec.podFailurePolicy.rules[0].onExitCodes.values[1]: Invalid value: 0: must not be 0 for the In operator
            spec.podFailurePolicy.rules[0].onExitCodes.values[2]: Duplicate value: 2
            spec.podFailurePolicy.rules[0].onExitCodes.values: Invalid value: [2,0,2]: must be ordered
            spec.podFailurePolicy.rules[1].action: Required value: valid values: ["Count" "FailIndex" "FailJob" "Ignore"]
            spec.podFailurePolicy.rules[1].onPodConditions[0].status: Required value: valid values: ["False" "True" "Unknown"]
            spec.podFailurePolicy.rules[2]: Invalid value: specifying one of OnExitCodes and OnPodConditions is required
        "#]],
    );
    check(
        json!({"completionMode": "Indexed", "completions": 5, "successPolicy": {"rules": [{}, {"succeededIndexes": "1-2,2", "succeededCount": 6}, {"succeededIndexes": "0-3", "succeededCount": 5}]}}),
        expect![[r#"
            spec.successPolicy.rules[0]: Required value: at least one of succeededCount or succeededIndexes must be specified
            spec.successPolicy.rules[1].succeededIndexes: Invalid value: "1-2,2": error parsing succeededIndexes: non-increasing order, previous: 2, current: 2
            spec.successPolicy.rules[1].succeededCount: Invalid value: 6: must be less than or equal to 5 (the number of specified completions)
            spec.successPolicy.rules[1].succeededCount: Invalid value: 6: must be less than or equal to 0 (the number of indexes in the specified succeededIndexes field)
            spec.successPolicy.rules[2].succeededCount: Invalid value: 5: must be less than or equal to 4 (the number of indexes in the specified succeededIndexes field)
        "#]],
    );
}

#[track_caller]
fn check_update(old: Value, change: impl Fn(&mut Value), expected: Expect) {
    let old = job(old);
    let mut new = old.clone();
    change(&mut new["spec"]);
    let mut errors = ErrorList::default();
    Job.validate_update(&new, &old, &mut errors);
    expected.assert_eq(&lines(&errors));
}

#[test]
fn validates_job_updates() {
    check_update(
        json!({"completions": 5}),
        |spec| spec["completions"] = json!(7),
        expect![[r#"
        spec.completions: Invalid value: 7: field is immutable
    "#]],
    );
    let indexed = json!({"completions": 5, "parallelism": 5, "completionMode": "Indexed"});
    check_update(
        indexed.clone(),
        |spec| spec["completions"] = json!(7),
        expect![[r#"
        spec.completions: Invalid value: 7: can only be modified in tandem with spec.parallelism
    "#]],
    );
    let both = |spec: &mut Value| (spec["completions"], spec["parallelism"]) = (json!(7), json!(7));
    check_update(indexed, both, expect![""]);
    let moved = |spec: &mut Value| spec["template"]["spec"]["nodeSelector"] = json!({"a": "b"});
    check_update(json!({"suspend": true}), moved, expect![""]);
    let resized = |spec: &mut Value| {
        spec["template"]["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "1"}})
    };
    check_update(json!({"suspend": true}), resized, expect![""]);
    check_update(json!({}), |spec| spec["parallelism"] = json!(3), expect![""]);
}

#[test]
fn validates_job_status() {
    #[track_caller]
    fn check(old: Value, new: Value, expected: Expect) {
        let with = |status: Value| {
            let mut job = job(json!({"completions": 3, "completionMode": "Indexed"}));
            job["status"] = status;
            job
        };
        let mut errors = ErrorList::default();
        Job.validate_status_update(&with(new), &with(old), &mut errors);
        expected.assert_eq(&lines(&errors));
    }
    let done =
        json!([{"type": "SuccessCriteriaMet", "status": "True"}, {"type": "Complete", "status": "True"}]);
    let start = "2026-01-01T00:00:00Z";
    check(
        json!({"startTime": start}),
        json!({"startTime": start, "completionTime": "2026-01-01T00:00:01Z", "conditions": done, "succeeded": 3, "completedIndexes": "0-2"}),
        expect![""],
    );
    check(
        json!({"succeeded": 2, "failed": 1}),
        json!({"conditions": [{"type": "Complete", "status": "True"}], "active": 1, "ready": 2, "completedIndexes": "0-9"}),
        expect![[r#"
            status.completionTime: Required value: completionTime is required for Complete jobs
            status.conditions: Invalid value: cannot set Complete=True condition without the SuccessCriteriaMet=true condition
            status.active: Invalid value: 1: active>0 is invalid for finished job
            status.startTime: Required value: startTime is required for finished job
            status.completedIndexes: Invalid value: "0-9": error parsing completedIndexes: too large index: "9"
            status.ready: Invalid value: 2: cannot set more ready pods than active
            status.failed: Invalid value: 0: cannot decrease the failed counter
            status.succeeded: Invalid value: 0: cannot decrease the succeeded counter
        "#]],
    );
}

#[test]
fn validates_cron_jobs() {
    #[track_caller]
    fn check(mut cron: Value, expected: Expect) {
        cron.set_default("schedule", "* * * * *");
        cron.set_default("concurrencyPolicy", "Allow");
        cron.set_default("jobTemplate", json!({"spec": spec(json!({}))}));
        let mut errors = ErrorList::default();
        let cron = json!({"metadata": {"name": "x"}, "spec": cron});
        CronJob.validate(&cron, &mut errors);
        CronJob.validate_create(&cron, &mut errors);
        expected.assert_eq(&lines(&errors));
    }
    check(json!({"timeZone": "Europe/Berlin"}), expect![""]);
    check(
        json!({"schedule": "every day", "concurrencyPolicy": "Sometimes"}),
        expect![[r#"
        spec.schedule: Invalid value: "every day": expected exactly 5 fields, found 2: [every day]
        spec.concurrencyPolicy: Unsupported value: "Sometimes": supported values: "Allow", "Forbid", "Replace"
    "#]],
    );
    check(
        json!({"timeZone": "Mars/Olympus"}),
        expect![[r#"
        spec.timeZone: Invalid value: "Mars/Olympus": unknown time zone Mars/Olympus
    "#]],
    );
    check(
        json!({"timeZone": "europe/berlin"}),
        expect![[r#"
        spec.timeZone: Invalid value: "europe/berlin": unknown time zone europe/berlin
    "#]],
    );
    check(
        json!({"schedule": "TZ=UTC * * * * *", "timeZone": ""}),
        expect![[r#"
        spec.schedule: Invalid value: "TZ=UTC * * * * *": cannot use TZ or CRON_TZ in schedule, use timeZone field instead
        spec.timeZone: Invalid value: "": timeZone must be nil or non-empty string
    "#]],
    );
}

#[test]
fn cron_schedule_parse_accepts_valid_and_rejects_invalid() {
    #[track_caller]
    fn check(text: &str, expected: &str) {
        let found = Schedule::parse(text).map_or_else(|reason| reason, |_| "fine".to_owned());
        assert_eq!(found, expected, "{text}");
    }
    for text in
        ["* * * * *", "*/5 0-6 1,15 jan-mar MON", "0 0 ? * 6", "@daily", "@every 1h30m", "30/10 * * * *"]
    {
        check(text, "fine");
    }
    check("60 * * * *", "end of range (60) above maximum (59): 60");
    check("* * 0 * *", "beginning of range (0) below minimum (1): 0");
    check("5-1 * * * *", "beginning of range (5) beyond end of range (1): 5-1");
    check("*/0 * * * *", "step of range should be a positive number: */0");
    check("1-2-3 * * * *", "too many hyphens: 1-2-3");
    check("1/2/3 * * * *", "too many slashes: 1/2/3");
    check("x * * * *", "failed to parse int from x: strconv.Atoi: parsing \"x\": invalid syntax");
    check("* * * * 7", "end of range (7) above maximum (6): 7");
    check("@sometimes", "unrecognized descriptor: @sometimes");
    check("@every 5", "failed to parse duration @every 5: time: missing unit in duration \"5\"");
}

#[test]
fn returns_next_schedule_times() {
    #[track_caller]
    fn check(schedule: &str, zone: &str, after: &str, expected: Expect) {
        let schedule = Schedule::parse(schedule).expect("a schedule");
        let zone = jiff::tz::TimeZone::get(zone).expect("a time zone");
        let mut at: jiff::Timestamp = after.parse().expect("a time");
        let mut times = Vec::new();
        for _ in 0..3 {
            let Some(next) = schedule.next(at, &zone) else { break };
            times.push(next.to_zoned(zone.clone()).strftime("%m-%d %H:%M:%S%:z").to_string());
            at = next;
        }
        expected.assert_eq(&times.join(", "));
    }
    check(
        "*/20 * * * *",
        "UTC",
        "2026-01-01T00:00:00Z",
        expect!["01-01 00:20:00+00:00, 01-01 00:40:00+00:00, 01-01 01:00:00+00:00"],
    );
    check(
        "0 0 29 2 *",
        "UTC",
        "2026-01-01T00:00:00Z",
        expect!["02-29 00:00:00+00:00, 02-29 00:00:00+00:00, 02-29 00:00:00+00:00"],
    );
    check("0 0 31 2 *", "UTC", "2026-01-01T00:00:00Z", expect![""]);
    check(
        "30 6 * * 1-5",
        "UTC",
        "2026-01-01T12:00:00Z",
        expect!["01-02 06:30:00+00:00, 01-05 06:30:00+00:00, 01-06 06:30:00+00:00"],
    );
    // With both day fields restricted, either may match.
    check(
        "0 12 13 * 5",
        "UTC",
        "2026-02-01T00:00:00Z",
        expect!["02-06 12:00:00+00:00, 02-13 12:00:00+00:00, 02-20 12:00:00+00:00"],
    );
    check(
        "0 12 */1 * 5",
        "UTC",
        "2026-02-01T00:00:00Z",
        expect!["02-06 12:00:00+00:00, 02-13 12:00:00+00:00, 02-20 12:00:00+00:00"],
    );
    check(
        "@every 90s",
        "UTC",
        "2026-01-01T00:00:00.5Z",
        expect!["01-01 00:01:30+00:00, 01-01 00:03:00+00:00, 01-01 00:04:30+00:00"],
    );
    check(
        "0 0 1 * *",
        "Asia/Kolkata",
        "2026-01-01T00:00:00Z",
        expect!["02-01 00:00:00+05:30, 03-01 00:00:00+05:30, 04-01 00:00:00+05:30"],
    );
    // Daylight saving time starts at 2:00 (skips to 3:00) and ends at 3:00 (back to 2:00).
    check(
        "30 2 * * *",
        "Europe/Berlin",
        "2026-03-28T12:00:00Z",
        expect!["03-30 02:30:00+02:00, 03-31 02:30:00+02:00, 04-01 02:30:00+02:00"],
    );
    check(
        "30 2 * * *",
        "Europe/Berlin",
        "2026-10-24T12:00:00Z",
        expect!["10-25 02:30:00+02:00, 10-25 02:30:00+01:00, 10-26 02:30:00+01:00"],
    );
    check(
        "0 * * * *",
        "Europe/Berlin",
        "2026-10-24T23:30:00Z",
        expect!["10-25 02:00:00+02:00, 10-25 02:00:00+01:00, 10-25 03:00:00+01:00"],
    );
    // In Cairo the skipped hour starts at midnight.
    check(
        "0 0 * * *",
        "Africa/Cairo",
        "2026-04-23T12:00:00Z",
        expect!["04-25 00:00:00+03:00, 04-26 00:00:00+03:00, 04-27 00:00:00+03:00"],
    );
}

#[test]
fn job_without_labels_gets_pod_labels() {
    #[track_caller]
    fn check(labels: Value, manual: bool, expected: Expect) {
        let template = json!({"metadata": {"labels": {"app": "a"}}});
        let mut job = json!({"metadata": {"name": "x", "uid": "u", "labels": labels},
            "spec": {"manualSelector": manual, "template": template}});
        Job.prepare_for_create(&mut job);
        expected.assert_eq(&job["metadata"]["labels"].to_string());
    }
    let generated = expect![[
        r#"{"app":"a","batch.kubernetes.io/controller-uid":"u","batch.kubernetes.io/job-name":"x","controller-uid":"u","job-name":"x"}"#
    ]];
    check(json!({}), false, generated);
    check(json!({}), true, expect![[r#"{"app":"a"}"#]]);
    check(json!({"my": "own"}), false, expect![[r#"{"my":"own"}"#]]);
}

use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().expect("a time")
}

fn autoscaler(spec: Value) -> HorizontalPodAutoscaler {
    let mut spec = spec;
    spec["scaleTargetRef"] = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"});
    if spec["maxReplicas"].is_null() {
        spec["maxReplicas"] = json!(100);
    }
    serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "d"}, "spec": spec})).expect("one")
}

fn cpu(percent: i32) -> Value {
    let target = json!({"type": "Utilization", "averageUtilization": percent});
    json!({"metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]})
}

/// One pod per `|`: `name word...`. Words: `use=MILLI` (without it the pod has no metrics), `pending`,
/// `failed`, `unready`, `new` (started just now).
fn pods(text: &str) -> (Vec<Arc<Pod>>, BTreeMap<String, PodMetric>) {
    let (mut pods, mut samples) = (Vec::new(), BTreeMap::new());
    for text in text.split('|').filter(|text| !text.trim().is_empty()) {
        let mut words = text.split_whitespace();
        let name = words.next().expect("a name");
        let mut value = json!({"metadata": {"name": name},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}}]},
            "status": {"phase": "Running", "startTime": "2026-01-01T10:00:00Z",
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T10:00:40Z"}]}});
        for word in words {
            match word.split_once('=') {
                Some(("use", milli)) => {
                    let value = milli.parse().expect("a number");
                    let sample = PodMetric { value, at: now(), window: SignedDuration::from_secs(30) };
                    samples.insert(name.to_owned(), sample);
                }
                None if word == "pending" => value["status"]["phase"] = json!("Pending"),
                None if word == "failed" => value["status"]["phase"] = json!("Failed"),
                None if word == "unready" => value["status"]["conditions"][0]["status"] = json!("False"),
                None if word == "new" => {
                    value["status"]["startTime"] = json!("2026-01-01T11:59:00Z");
                    value["status"]["conditions"][0]["lastTransitionTime"] = json!("2026-01-01T11:59:50Z");
                }
                _ => panic!("{word:?}"),
            }
        }
        pods.push(Arc::new(serde_json::from_value(value).expect("a pod")));
    }
    (pods, samples)
}

struct Case {
    hpa: HorizontalPodAutoscaler,
    replicas: i32,
    pods: Vec<Arc<Pod>>,
    metric_values: Vec<Result<MetricValues, String>>,
    history: History,
    at: Timestamp,
}

impl Case {
    fn new(spec: Value, replicas: i32, text: &str) -> Case {
        let (pods, samples) = pods(text);
        let metric_values = vec![Ok(MetricValues::Pods(samples))];
        Case { hpa: autoscaler(spec), replicas, pods, metric_values, history: History::default(), at: now() }
    }

    fn total(spec: Value, replicas: i32, total: i64) -> Case {
        let text: Vec<String> = (0..replicas).map(|i| format!("p{i} use=1")).collect();
        let mut case = Case::new(spec, replicas, &text.join("|"));
        case.metric_values = vec![Ok(MetricValues::Total(total))];
        case
    }

    fn step(&mut self) -> Decision {
        let target = ScaleTarget {
            replicas: self.replicas,
            running: self.replicas,
            selector: "app=web",
            pods: Ok(self.pods.clone()),
            autoscalers: vec![Key::new("d", "web")],
        };
        let mut decision =
            compute_decision(&self.hpa, &target, self.metric_values.clone(), &mut self.history, self.at);
        if let Some(rescale) = decision.rescale.clone() {
            decision.record_rescale(&self.hpa, &rescale, Ok(()), &mut self.history, self.at);
            self.replicas = rescale.to;
        }
        self.hpa.status = Some(decision.status.clone());
        decision
    }
}

#[track_caller]
fn check(case: &mut Case, expected: Expect) {
    let decision = case.step();
    let mut output = format!("desired={}\n", decision.status.desired_replicas);
    for condition in decision.status.conditions.iter().flatten() {
        let reason = condition.reason.as_deref().unwrap_or_default();
        output += &format!(
            "{}={} {reason}: {}\n",
            condition.type_,
            condition.status,
            condition.message.as_deref().unwrap_or_default()
        );
    }
    for metric in decision.status.current_metrics.iter().flatten() {
        output += &format!("metric {}\n", serde_json::to_string(metric).expect("a metric"));
    }
    for (severity, reason, message) in &decision.events {
        output += &format!("{} {reason} {message}\n", severity.as_str());
    }
    expected.assert_eq(&output);
}

/// Checks the replica count that the metrics recommend, without rate limits.
#[track_caller]
fn check_desired_replicas(spec: Value, replicas: i32, text: &str, expected: i32) {
    let mut spec = spec;
    let fast = json!({"policies": [{"type": "Percent", "value": 1000, "periodSeconds": 1}], "stabilizationWindowSeconds": 0});
    spec["behavior"] = json!({"scaleUp": fast, "scaleDown": fast});
    assert_eq!(Case::new(spec, replicas, text).step().status.desired_replicas, expected, "{text}");
}

#[test]
fn replicas_follow_utilization_of_requests() {
    let three = |milli: i32| format!("a use={milli} | b use={milli} | c use={milli}");
    check_desired_replicas(cpu(50), 3, &three(50), 3);
    check_desired_replicas(cpu(50), 3, &three(100), 6);
    check_desired_replicas(cpu(50), 3, &three(20), 2);
    // Within the tolerance.
    check_desired_replicas(cpu(50), 3, &three(54), 3);
    check_desired_replicas(cpu(50), 3, &three(46), 3);
    // A failed pod does not count. A pending pod counts as idle and dampens scaling up.
    check_desired_replicas(cpu(50), 3, "a use=100 | b use=100 | c failed use=900", 4);
    check_desired_replicas(cpu(50), 3, "a use=100 | b use=100 | c pending", 4);
    check_desired_replicas(cpu(50), 3, "a use=100 | b use=100 | c unready new use=900", 4);
    // A pod without metrics counts as idle when scaling up and as fully used when scaling down.
    check_desired_replicas(cpu(50), 3, "a use=100 | b use=100 | c", 4);
    check_desired_replicas(cpu(50), 3, "a use=10 | b use=10 | c", 3);
    check_desired_replicas(cpu(50), 4, "a use=10 | b use=10 | c use=10 | d", 3);
    // Average values instead of utilization.
    let target = json!({"type": "AverageValue", "averageValue": "40m"});
    let average = json!({"metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]});
    check_desired_replicas(average.clone(), 3, &three(80), 6);
    check_desired_replicas(average, 3, "a use=80 | b use=80 | c", 4);
}

#[test]
fn replicas_follow_object_and_external_metrics() {
    let metric = json!({"name": "queue"});
    let external = |target: Value| json!({"metrics": [{"type": "External", "external": {"metric": metric, "target": target}}]});
    let check = |spec: Value, replicas, total, expected| {
        let mut case = Case::total(spec, replicas, total);
        assert_eq!(case.step().status.desired_replicas, expected, "{replicas} {total}");
    };
    let value = external(json!({"type": "Value", "value": "10"}));
    check(value.clone(), 2, 20_000, 4);
    check(value.clone(), 2, 10_500, 2);
    let average = external(json!({"type": "AverageValue", "averageValue": "10"}));
    check(average.clone(), 2, 35_000, 4);
    check(average, 2, 21_000, 2);
    let object = json!({"apiVersion": "v1", "kind": "Service", "name": "s"});
    let object = json!({"metrics": [{"type": "Object", "object": {"metric": metric, "describedObject": object, "target": {"type": "Value", "value": "10"}}}]});
    check(object, 3, 40_000, 6);
}

#[test]
fn status_and_events_after_successful_rescale() {
    check(
        &mut Case::new(cpu(50), 2, "a use=100 | b use=100"),
        expect![[r#"
        desired=4
        AbleToScale=True SucceededRescale: the HPA controller was able to update the target scale to 4
        ScalingActive=True ValidMetricFound: the HPA was able to successfully calculate a replica count from cpu resource utilization (percentage of request)
        ScalingLimited=False DesiredWithinRange: the desired count is within the acceptable range
        metric {"resource":{"current":{"averageUtilization":100,"averageValue":"100m"},"name":"cpu"},"type":"Resource"}
        Normal SuccessfulRescale New size: 4; reason: cpu resource utilization (percentage of request) above target
    "#]],
    );
}

#[test]
fn status_and_events_after_metric_failure() {
    let mut case = Case::new(cpu(50), 1, "a");
    case.metric_values = vec![Err("unable to fetch metrics from resource metrics API: the server could not find the requested resource (get pods.metrics.k8s.io)".to_owned())];
    check(
        &mut case,
        expect![[r#"
        desired=0
        AbleToScale=True SucceededGetScale: the HPA controller was able to get the target's current scale
        ScalingActive=False FailedGetResourceMetric: the HPA was unable to compute the replica count: failed to get cpu utilization: unable to get metrics for resource cpu: unable to fetch metrics from resource metrics API: the server could not find the requested resource (get pods.metrics.k8s.io)
        metric {"type":""}
        Warning FailedGetResourceMetric failed to get cpu utilization: unable to get metrics for resource cpu: unable to fetch metrics from resource metrics API: the server could not find the requested resource (get pods.metrics.k8s.io)
        Warning FailedComputeMetricsReplicas invalid metrics (1 invalid out of 1), first error is: failed to get cpu resource metric value: failed to get cpu utilization: unable to get metrics for resource cpu: unable to fetch metrics from resource metrics API: the server could not find the requested resource (get pods.metrics.k8s.io)
    "#]],
    );
}

#[test]
fn replicas_outside_limits_are_corrected_without_metrics() {
    let mut spec = cpu(50);
    (spec["minReplicas"], spec["maxReplicas"]) = (json!(2), json!(4));
    check(
        &mut Case::new(spec.clone(), 1, "a"),
        expect![[r#"
        desired=2
        AbleToScale=True SucceededRescale: the HPA controller was able to update the target scale to 2
        Normal SuccessfulRescale New size: 2; reason: Current number of replicas below Spec.MinReplicas
    "#]],
    );
    check(
        &mut Case::new(spec.clone(), 6, "a"),
        expect![[r#"
        desired=4
        AbleToScale=True SucceededRescale: the HPA controller was able to update the target scale to 4
        Normal SuccessfulRescale New size: 4; reason: Current number of replicas above Spec.MaxReplicas
    "#]],
    );
    check(
        &mut Case::new(spec, 0, ""),
        expect![[r#"
        desired=0
        AbleToScale=True SucceededGetScale: the HPA controller was able to get the target's current scale
        ScalingActive=False ScalingDisabled: scaling is disabled since the replica count of the target is zero
    "#]],
    );
}

#[test]
fn scale_down_waits_for_stabilization_window() {
    let mut case = Case::new(cpu(50), 4, "a use=10 | b use=10 | c use=10 | d use=10");
    assert_eq!(case.step().status.desired_replicas, 4);
    case.at = now() + SignedDuration::from_secs(299);
    assert_eq!(case.step().status.desired_replicas, 4);
    case.at = now() + SignedDuration::from_secs(301);
    assert_eq!(case.step().status.desired_replicas, 1);
}

#[test]
fn scale_up_respects_policies() {
    let mut spec = cpu(50);
    spec["behavior"] = json!({"scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max",
        "policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}]}});
    let mut case = Case::new(spec, 2, "a use=500 | b use=500");
    assert_eq!(case.step().status.desired_replicas, 4);
    // The policy's limit for the period is used up.
    case.at = now() + SignedDuration::from_secs(30);
    assert_eq!(case.step().status.desired_replicas, 4);
    case.at = now() + SignedDuration::from_secs(61);
    assert_eq!(case.step().status.desired_replicas, 6);
}

#[test]
fn rejects_pods_selected_by_multiple_autoscalers() {
    let mut case = Case::new(cpu(50), 1, "a use=100");
    let target = ScaleTarget {
        replicas: 1,
        running: 1,
        selector: "app=web",
        pods: Ok(case.pods.clone()),
        autoscalers: vec![Key::new("d", "other"), Key::new("d", "web")],
    };
    let decision = compute_decision(&case.hpa, &target, case.metric_values.clone(), &mut case.history, now());
    let condition =
        decision.status.conditions.iter().flatten().find(|condition| condition.type_ == SCALING_ACTIVE);
    let message = condition.and_then(|condition| condition.message.as_deref());
    assert_eq!(message, Some("pods by selector app=web are controlled by multiple HPAs: [d/other d/web]"));
}

proptest! {
    /// For any metrics, the replica count stays within its bounds, and constant metrics converge to a
    /// constant count.
    #[test]
    fn replicas_stay_within_limits_and_stabilize(
        least in 1..5_i32, span in 0..20_i32, replicas in 0..40_i32,
        usage in prop::collection::vec(prop::option::of(0..5_000_i64), 0..12), target in 1..200_i32, with_rules: bool,
    ) {
        let mut spec = cpu(target);
        (spec["minReplicas"], spec["maxReplicas"]) = (json!(least), json!(least + span));
        if with_rules {
            spec["behavior"] = json!({"scaleUp": {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 15}]}});
        }
        let text: Vec<String> = usage.iter().enumerate().map(|(i, usage)| match usage {
            Some(milli) => format!("p{i} use={milli}"),
            None => format!("p{i}"),
        }).collect();
        let mut case = Case::new(spec, replicas, &text.join("|"));
        let mut last = replicas;
        for round in 0..60 {
            case.at = now() + SignedDuration::from_secs(15 * round);
            case.step();
            if replicas == 0 {
                prop_assert_eq!(case.replicas, 0);
            } else {
                prop_assert!((least..=least + span).contains(&case.replicas), "{} of {}", case.replicas, replicas);
            }
            if round < 59 {
                last = case.replicas;
            }
        }
        prop_assert_eq!(case.replicas, last);
    }
}

use expect_test::{Expect, expect};
use serde_json::json;

use super::*;

#[track_caller]
fn check(from: (&str, &str), to: (&str, &str), kind: &str, mut object: Value, expected: Expect) {
    let table = schema::kubernetes();
    let ty = table.type_by_kind(from.0, from.1, kind).expect("a known kind");
    schema::normalize(table, ty, &mut object).expect("a well-formed object");
    let converted = convert(from, to, kind, object.clone());
    expected.assert_eq(&serde_json::to_string_pretty(&converted).expect("JSON"));
    assert_eq!(convert(to, from, kind, converted), object, "and back");
}

#[test]
fn event_conversion_round_trips() {
    check(
        ("", "v1"),
        ("events.k8s.io", "v1"),
        "Event",
        json!({
            "apiVersion": "v1", "kind": "Event", "involvedObject": {"name": "p"}, "message": "m", "count": 2,
            "source": {"component": "c"}, "reportingComponent": "r", "reason": "why", "firstTimestamp": "2026-01-02T03:04:05Z",
        }),
        expect![[r#"
            {
              "apiVersion": "events.k8s.io/v1",
              "deprecatedCount": 2,
              "deprecatedFirstTimestamp": "2026-01-02T03:04:05Z",
              "deprecatedLastTimestamp": null,
              "deprecatedSource": {
                "component": "c"
              },
              "eventTime": null,
              "kind": "Event",
              "metadata": {},
              "note": "m",
              "reason": "why",
              "regarding": {
                "name": "p"
              },
              "reportingController": "r"
            }"#]],
    );
}

#[test]
fn autoscaler_conversion_round_trips() {
    check(
        ("autoscaling", "v1"),
        ("autoscaling", "v2"),
        "HorizontalPodAutoscaler",
        json!({
            "apiVersion": "autoscaling/v1", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "h"},
            "spec": {"maxReplicas": 3, "targetCPUUtilizationPercentage": 50},
        }),
        expect![[r#"
            {
              "apiVersion": "autoscaling/v2",
              "kind": "HorizontalPodAutoscaler",
              "metadata": {
                "name": "h"
              },
              "spec": {
                "maxReplicas": 3,
                "metrics": [
                  {
                    "resource": {
                      "name": "cpu",
                      "target": {
                        "averageUtilization": 50,
                        "type": "Utilization"
                      }
                    },
                    "type": "Resource"
                  }
                ],
                "scaleTargetRef": {
                  "kind": "",
                  "name": ""
                }
              },
              "status": {
                "currentMetrics": null,
                "desiredReplicas": 0
              }
            }"#]],
    );
    check(
        ("autoscaling", "v2"),
        ("autoscaling", "v1"),
        "HorizontalPodAutoscaler",
        json!({
            "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "h", "annotations": {"a": "b"}},
            "spec": {
                "maxReplicas": 3,
                "behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 5}]}},
                "metrics": [
                    {"type": "Pods", "pods": {"metric": {"name": "q"}, "target": {"type": "AverageValue", "averageValue": "5"}}},
                    {"type": "Object", "object": {
                        "describedObject": {"kind": "Service", "name": "s"}, "metric": {"name": "o"},
                        "target": {"type": "Value", "value": "2"},
                    }},
                    {"type": "External", "external": {
                        "metric": {"name": "e", "selector": {"matchLabels": {"a": "b"}}},
                        "target": {"type": "AverageValue", "averageValue": "3"},
                    }},
                    {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}},
                ],
            },
            "status": {
                "currentReplicas": 1,
                "conditions": [{"type": "AbleToScale", "status": "True"}],
                "currentMetrics": [{"type": "Resource", "resource": {
                    "name": "cpu", "current": {"averageUtilization": 10, "averageValue": "100m"},
                }}],
            },
        }),
        expect![[r#"
            {
              "apiVersion": "autoscaling/v1",
              "kind": "HorizontalPodAutoscaler",
              "metadata": {
                "annotations": {
                  "a": "b",
                  "autoscaling.alpha.kubernetes.io/behavior": "{\"ScaleUp\":{\"Policies\":[{\"PeriodSeconds\":5,\"Type\":\"Pods\",\"Value\":1}]}}",
                  "autoscaling.alpha.kubernetes.io/conditions": "[{\"lastTransitionTime\":null,\"status\":\"True\",\"type\":\"AbleToScale\"}]",
                  "autoscaling.alpha.kubernetes.io/current-metrics": "[{\"resource\":{\"currentAverageUtilization\":10,\"currentAverageValue\":\"100m\",\"name\":\"cpu\"},\"type\":\"Resource\"}]",
                  "autoscaling.alpha.kubernetes.io/metrics": "[{\"pods\":{\"metricName\":\"q\",\"targetAverageValue\":\"5\"},\"type\":\"Pods\"},{\"object\":{\"metricName\":\"o\",\"target\":{\"kind\":\"Service\",\"name\":\"s\"},\"targetValue\":\"2\"},\"type\":\"Object\"},{\"external\":{\"metricName\":\"e\",\"metricSelector\":{\"matchLabels\":{\"a\":\"b\"}},\"targetAverageValue\":\"3\"},\"type\":\"External\"}]"
                },
                "name": "h"
              },
              "spec": {
                "maxReplicas": 3,
                "scaleTargetRef": {
                  "kind": "",
                  "name": ""
                },
                "targetCPUUtilizationPercentage": 60
              },
              "status": {
                "currentCPUUtilizationPercentage": 10,
                "currentReplicas": 1,
                "desiredReplicas": 0
              }
            }"#]],
    );
}

#[test]
fn invalid_annotations_are_ignored() {
    let hpa = json!({
        "metadata": {"annotations": {
            "autoscaling.alpha.kubernetes.io/metrics": "[{\"type\": \"Pods\", \"pods\": {\"metricName\": 5}}]", "autoscaling.alpha.kubernetes.io/behavior": "5",
            "autoscaling.alpha.kubernetes.io/conditions": "[",
        }},
        "spec": {"maxReplicas": 1},
    });
    let converted = convert(("autoscaling", "v1"), ("autoscaling", "v2"), "HorizontalPodAutoscaler", hpa);
    assert_eq!(converted.path("spec.metrics").as_array().map(Vec::len), Some(1));
    assert!(converted.path("metadata.annotations").is_null() && converted.path("spec.behavior").is_null());
}

#[test]
fn other_kinds_change_api_version_only() {
    let object = json!({"apiVersion": "a/v1", "kind": "X", "spec": 1});
    let converted = convert(("a", "v1"), ("b", "v2"), "X", object);
    assert_eq!(converted, json!({"apiVersion": "b/v2", "kind": "X", "spec": 1}));
}

#[test]
fn scale_reads_and_sets_replicas() {
    let mut deployment = json!({
        "metadata": {"name": "d", "namespace": "n", "uid": "u", "labels": {"a": "b"}},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"a": "b"}}},
        "status": {"replicas": 2},
    });
    let scale = scale::scale_of(&deployment);
    assert_eq!(
        scale,
        json!({
            "apiVersion": "autoscaling/v1", "kind": "Scale",
            "metadata": {"name": "d", "namespace": "n", "uid": "u"},
            "spec": {"replicas": 3}, "status": {"replicas": 2, "selector": "a=b"},
        })
    );
    scale::apply_scale(&mut deployment, &json!({"spec": {}}));
    assert_eq!(deployment.path("spec.replicas"), &json!(0));
    let controller = json!({"spec": {"selector": {"b": "2", "a": "1"}}});
    assert_eq!(scale::scale_of(&controller).path("status.selector"), &json!("a=1,b=2"));
}

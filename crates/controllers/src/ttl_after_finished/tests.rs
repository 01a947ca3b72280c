use serde_json::json;

use super::*;

#[test]
fn job_expires_after_ttl() {
    let job = |ttl: Option<i32>, condition: &str, status: &str| -> Job {
        serde_json::from_value(json!({
            "metadata": {"name": "a"},
            "spec": {"ttlSecondsAfterFinished": ttl, "template": {}},
            "status": {"conditions": [
                {"type": condition, "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
        }))
        .expect("a job")
    };
    let at = |job: &Job| expires_at(job).map(|at| at.to_string());
    assert_eq!(at(&job(Some(60), "Complete", "True")).as_deref(), Some("2026-01-01T00:01:00Z"));
    assert_eq!(at(&job(Some(0), "Failed", "True")).as_deref(), Some("2026-01-01T00:00:00Z"));
    assert_eq!(at(&job(Some(60), "Complete", "False")), None);
    assert_eq!(at(&job(Some(60), "FailureTarget", "True")), None);
    assert_eq!(at(&job(None, "Complete", "True")), None);
    let mut deleting = job(Some(60), "Complete", "True");
    deleting.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-01-01T00:00:30Z")).expect("a time");
    assert_eq!(at(&deleting), None);
}

//! Selects the container whose log is sent, based on the pod's status. Pure.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

/// The container ID in the form of the status (`containerd://…`), or why there is none.
pub fn container_id_for_logs(pod: &Pod, container: &str, previous: bool) -> Result<String, String> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let what = format!("container {container:?} in pod {name:?}");
    let status = pod.status.clone().unwrap_or_default();
    let lists =
        [status.container_statuses, status.init_container_statuses, status.ephemeral_container_statuses];
    let found = lists.into_iter().flatten().flatten().find(|status| status.name == container);
    let Some(ContainerStatus { state, last_state, container_id, .. }) = found else {
        return Err(format!("{what} is not available"));
    };
    let (state, last) = (state.unwrap_or_default(), last_state.and_then(|state| state.terminated));
    let last_id = last.as_ref().and_then(|end| end.container_id.clone()).filter(|id| !id.is_empty());
    if previous {
        return last_id.ok_or_else(|| format!("previous terminated {what} not found"));
    }
    if state.running.is_some() {
        return container_id.ok_or_else(|| format!("{what} is not available"));
    }
    if let Some(end) = state.terminated {
        let id = end.container_id.filter(|id| !id.is_empty()).or(last_id);
        return id.ok_or_else(|| format!("{what} is terminated"));
    }
    if last.is_some() {
        return last_id.ok_or_else(|| format!("{what} is terminated"));
    }
    let Some(waiting) = state.waiting else {
        return Err(format!("{what} is waiting to start - no logs yet"));
    };
    Err(match waiting.reason.as_deref().unwrap_or_default() {
        "ErrImagePull" => format!("{what} is waiting to start: image can't be pulled"),
        "ImagePullBackOff" => format!("{what} is waiting to start: trying and failing to pull image"),
        reason => format!("{what} is waiting to start: {reason}"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(status: Value, previous: bool, expected: &str) {
        let mut status = status;
        status["name"] = json!("main");
        for (field, value) in [("image", json!("")), ("imageID", json!("")), ("ready", json!(false))] {
            status[field] = value;
        }
        status["restartCount"] = json!(0);
        let pod = json!({"metadata": {"name": "web"}, "status": {"containerStatuses": [status]}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let found = container_id_for_logs(&pod, "main", previous).unwrap_or_else(|error| error);
        assert_eq!(found, expected);
    }

    #[test]
    fn log_target_of_container_states() {
        let end = |id: &str| json!({"terminated": {"exitCode": 0, "containerID": id}});
        let waits = |reason: &str| json!({"waiting": {"reason": reason}});
        let running = json!({"state": {"running": {}}, "containerID": "x://2", "lastState": end("x://1")});
        check(running.clone(), false, "x://2");
        check(running, true, "x://1");
        check(json!({"state": end("x://3")}), false, "x://3");
        check(json!({"state": waits("CrashLoopBackOff"), "lastState": end("x://1")}), false, "x://1");
        let waiting = |error: &str| format!("container \"main\" in pod \"web\" is waiting to start: {error}");
        check(json!({"state": waits("ContainerCreating")}), false, &waiting("ContainerCreating"));
        check(json!({"state": waits("ErrImagePull")}), false, &waiting("image can't be pulled"));
        check(
            json!({"state": waits("ImagePullBackOff")}),
            false,
            &waiting("trying and failing to pull image"),
        );
        check(
            json!({"state": {"running": {}}, "containerID": "x://2"}),
            true,
            "previous terminated container \"main\" in pod \"web\" not found",
        );
        check(json!({}), false, "container \"main\" in pod \"web\" is waiting to start - no logs yet");
    }
}

"""The Python client, as its users write it. Fails with a traceback; prints what it did."""
import sys

from kubernetes import client, config, dynamic, watch

config.load_kube_config(sys.argv[1])
core, apps, batch = client.CoreV1Api(), client.AppsV1Api(), client.BatchV1Api()
SPACE = "default"


def refused(code, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except client.ApiException as error:
        assert error.status == code, error
        return
    raise AssertionError(f"{call.__name__} was not refused")


def config_maps():
    start = core.list_namespaced_config_map(SPACE).metadata.resource_version
    made = core.create_namespaced_config_map(SPACE, client.V1ConfigMap(
        metadata=client.V1ObjectMeta(name="a", labels={"app": "web"}), data={"k": "1"}))
    refused(409, core.create_namespaced_config_map, SPACE, client.V1ConfigMap(
        metadata=client.V1ObjectMeta(name="a")))
    core.patch_namespaced_config_map("a", SPACE, {"data": {"k": "2"}})
    core.patch_namespaced_config_map("a", SPACE, [{"op": "add", "path": "/data/l", "value": "3"}])
    assert core.read_namespaced_config_map("a", SPACE).data == {"k": "2", "l": "3"}
    refused(409, core.replace_namespaced_config_map, "a", SPACE, made)
    core.delete_namespaced_config_map("a", SPACE)
    refused(404, core.read_namespaced_config_map, "a", SPACE)
    events = []
    stream = watch.Watch()
    for event in stream.stream(core.list_namespaced_config_map, SPACE, label_selector="app=web",
                               resource_version=start, timeout_seconds=20):
        events.append(event["type"])
        if event["type"] == "DELETED":
            stream.stop()
    assert events == ["ADDED", "MODIFIED", "MODIFIED", "DELETED"], events


def pods():
    core.create_namespaced_pod(SPACE, {"metadata": {"name": "web"}, "spec": {
        "containers": [{"name": "web", "image": "web:1"}]}})
    core.patch_namespaced_pod("web", SPACE, {"spec": {"containers": [{"name": "web", "image": "web:2"}]}})
    pod = core.read_namespaced_pod("web", SPACE)
    assert pod.spec.containers[0].image == "web:2" and pod.status.phase == "Pending", pod
    names = [pod.metadata.name for pod in core.list_pod_for_all_namespaces(field_selector="spec.nodeName=").items]
    assert names == ["web"], names
    core.delete_namespaced_pod("web", SPACE, grace_period_seconds=0)
    assert core.list_namespaced_pod(SPACE).items == []


def deployments():
    container = client.V1Container(name="web", image="web:1", resources=client.V1ResourceRequirements(
        requests={"cpu": "100m", "memory": "64Mi"}))
    template = client.V1PodTemplateSpec(metadata=client.V1ObjectMeta(labels={"app": "web"}),
                                        spec=client.V1PodSpec(containers=[container]))
    apps.create_namespaced_deployment(SPACE, client.V1Deployment(
        metadata=client.V1ObjectMeta(name="web"), spec=client.V1DeploymentSpec(
            replicas=1, selector=client.V1LabelSelector(match_labels={"app": "web"}), template=template)))
    apps.patch_namespaced_deployment_scale("web", SPACE, {"spec": {"replicas": 4}})
    deployment = apps.read_namespaced_deployment("web", SPACE)
    assert deployment.spec.replicas == 4 and deployment.metadata.generation == 2, deployment
    assert deployment.spec.strategy.rolling_update.max_surge == "25%"
    apps.delete_collection_namespaced_deployment(SPACE)
    assert apps.list_namespaced_deployment(SPACE).items == []


def everything_dynamic():
    api = dynamic.DynamicClient(client.ApiClient())
    jobs = api.resources.get(api_version="batch/v1", kind="Job")
    job = {"kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": "count"}, "spec": {"template": {"spec": {
        "restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}}}
    applied = jobs.server_side_apply(body=job, namespace=SPACE, field_manager="python")
    assert applied.spec.completions == 1, applied
    jobs.delete(name="count", namespace=SPACE, body={"propagationPolicy": "Background"})
    assert client.VersionApi().get_code().major == "1"


for step in (config_maps, pods, deployments, everything_dynamic):
    step()
    print(step.__name__)

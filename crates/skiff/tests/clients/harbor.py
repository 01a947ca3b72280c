"""An operator written with kopf, as its users write one. Fails with a traceback; prints what it did."""
import asyncio
import os
import sys
import threading
import time

import kopf
from kubernetes import client, config

# kopf looks for it there.
os.environ["KUBECONFIG"] = sys.argv[1]
config.load_kube_config(sys.argv[1])
extensions, custom, core = client.ApiextensionsV1Api(), client.CustomObjectsApi(), client.CoreV1Api()
GROUP, SPACE = "harbor.example.com", "default"
BOAT = (GROUP, "v1", SPACE, "boats")
gone = []


@kopf.on.startup()
def settings(settings, **_):
    settings.posting.enabled = False
    settings.persistence.finalizer = "harbor.example.com/operator"


@kopf.on.login()
def login(**kwargs):
    return kopf.login_with_kubeconfig(**kwargs)


@kopf.on.create(GROUP, "v1", "boats")
def made(spec, name, patch, **_):
    log = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-log"}, "data": {"crew": str(spec["crew"])}}
    kopf.adopt(log)
    core.create_namespaced_config_map(SPACE, log)
    patch.status["aboard"] = spec["crew"]


@kopf.on.field(GROUP, "v1", "boats", field="spec.crew", old=kopf.PRESENT, new=kopf.PRESENT)
def changed(new, name, patch, **_):
    core.patch_namespaced_config_map(f"{name}-log", SPACE, {"data": {"crew": str(new)}})
    patch.status["aboard"] = new


@kopf.on.delete(GROUP, "v1", "boats")
def deleted(name, **_):
    core.delete_namespaced_config_map(f"{name}-log", SPACE)
    gone.append(name)


def until(what, ask):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if ask():
                return print(what, flush=True)
        except client.ApiException as error:
            if error.status != 404:
                raise
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


def established():
    conditions = extensions.read_custom_resource_definition(f"boats.{GROUP}").status.conditions or []
    return any(c.type == "Established" and c.status == "True" for c in conditions)


def boat():
    return custom.get_namespaced_custom_object(*BOAT, "tern")


schema = {"type": "object", "properties": {
    "spec": {"type": "object", "properties": {"crew": {"type": "integer", "default": 2}}},
    "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
}}
extensions.create_custom_resource_definition({
    "metadata": {"name": f"boats.{GROUP}"},
    "spec": {
        "group": GROUP, "scope": "Namespaced", "names": {"plural": "boats", "kind": "Boat"},
        "versions": [{"name": "v1", "served": True, "storage": True, "subresources": {"status": {}},
                      "schema": {"openAPIV3Schema": schema}}],
    },
})
until("established", established)

stop, ready = threading.Event(), threading.Event()
operator = threading.Thread(
    target=lambda: asyncio.run(kopf.operator(stop_flag=stop, ready_flag=ready, namespace=SPACE)))
operator.start()
try:
    assert ready.wait(60), "the operator does not start"
    custom.create_namespaced_custom_object(*BOAT, {
        "apiVersion": f"{GROUP}/v1", "kind": "Boat", "metadata": {"name": "tern"}, "spec": {}})
    until("made", lambda: boat()["status"]["aboard"] == 2 if "status" in boat() else False)
    owner = core.read_namespaced_config_map("tern-log", SPACE).metadata.owner_references[0]
    assert (owner.kind, owner.uid) == ("Boat", boat()["metadata"]["uid"]), owner
    custom.patch_namespaced_custom_object(*BOAT, "tern", {"spec": {"crew": 5}})
    until("changed", lambda: boat()["status"]["aboard"] == 5)
    custom.delete_namespaced_custom_object(*BOAT, "tern")
    until("deleted", lambda: gone == ["tern"] and not custom.list_namespaced_custom_object(*BOAT)["items"])
finally:
    stop.set()
    operator.join(30)

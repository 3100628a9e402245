"""The objects of a run, against those that a real server (1.36) took, and what its users ask for."""

import base64
import json
from pathlib import Path

import pytest

from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine.manifest import (
    Claim,
    PodsRequest,
    objects_of,
    owned_by,
)

ACCEPTED = json.loads((Path(__file__).parent / "accepted.json").read_text())
GIB = 1 << 30


def request(**given):
    given.setdefault("files", {"key": b"ABC"})
    given.setdefault("command", ("python3", "-I", "-S", "/muster/start.py"))
    return PodsRequest(
        **{"name": "run-7f3a", "num_pods": 2, "image": "example.com/team/train:1", **given}
    )


def job_of(**given):
    return objects_of(request(**given))[2]


def pod_of(**given):
    return job_of(**given)["spec"]["template"]["spec"]


def settings(value, place=""):
    """Give each setting with its place; entries of a list have the same."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from settings(entry, f"{place}/{key}")
    elif isinstance(value, list):
        for entry in value:
            yield from settings(entry, place)
    else:
        yield place, value


def test_what_decides_over_life_and_death_of_pods_is_what_the_server_took():
    job = job_of(memory_bytes=256 << 20, gpus=1)
    accepted = ACCEPTED[2]
    assert {**job["spec"], "template": None} == {**accepted["spec"], "template": None}
    ours, theirs = job["spec"]["template"]["spec"], accepted["spec"]["template"]["spec"]
    for key in (
        "restartPolicy",
        "subdomain",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "tolerations",
    ):
        assert ours[key] == theirs[key], key
    mounts = {"launcher", "/launcher"}
    known = {place for place, value in settings(accepted) if value not in mounts}
    new = {place for place, _ in settings(job)} - known
    # Labels of ours, a request beside the limit of the same resource, one for the node's disk, and Secrets in one folder.
    assert new == {
        "/metadata/labels/app.kubernetes.io/managed-by",
        "/spec/template/metadata/labels/app.kubernetes.io/managed-by",
        "/spec/template/metadata/annotations/linkerd.io/inject",
        "/spec/template/spec/containers/resources/requests/nvidia.com/gpu",
        "/spec/template/spec/containers/resources/requests/ephemeral-storage",
        "/spec/template/spec/volumes/projected/defaultMode",
        "/spec/template/spec/volumes/projected/sources/secret/name",
    }


def test_names_are_there_before_pods_are_ready():
    service = objects_of(request())[1]
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"torchmuster.dev/run": "run-7f3a"},
    }
    labels = job_of()["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_what_the_run_brings_along_is_in_its_secret_and_nowhere_else():
    secret, service, job = objects_of(request(files={"key": b"\x00secret"}))
    assert base64.b64decode(secret["data"]["key"]) == b"\x00secret"
    others = json.dumps([service, job])
    assert secret["data"]["key"] not in others
    (volume,) = (v for v in job["spec"]["template"]["spec"]["volumes"] if "projected" in v)
    sources = [{"secret": {"name": "run-7f3a"}}]
    assert volume["projected"] == {"sources": sources, "defaultMode": 0o400}


def test_devices_and_memory_are_limits_and_requests_a_cpu_is_a_request():
    devices = {"rdma/ib": 2}
    pod = pod_of(cpus=8, memory_bytes=64 * GIB, gpus=4, devices=devices)
    (container,) = pod["containers"]
    both = {"memory": str(64 * GIB), "nvidia.com/gpu": "4", "rdma/ib": "2"}
    requests = {"cpu": "8", "ephemeral-storage": str(GIB), **both}
    assert container["resources"] == {"requests": requests, "limits": both}


def test_a_disk_and_shared_memory_have_sizes_without_being_asked():
    resources = {"memory_bytes": 64 * GIB, "scratch_bytes": 5 * GIB}
    for given, shm, disk in ((resources, 32 * GIB, 5 * GIB), ({}, 64 * GIB, GIB)):
        pod = pod_of(**given)
        assert pod["containers"][0]["resources"]["requests"]["ephemeral-storage"] == str(disk)
        volumes = {one["name"]: one.get("emptyDir") for one in pod["volumes"]}
        assert volumes["shm"] == {"medium": "Memory", "sizeLimit": str(shm)}


def test_pods_fit_the_level_restricted():
    pod = pod_of(restricted=True)
    # Recorded: with these four a namespace that enforces `restricted` takes the pod.
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000


def test_a_pod_of_the_hosts_network_knows_the_clusters_names_and_has_its_host_alone():
    pod = pod_of(host_network=True)
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {"torchmuster.dev/run": "run-7f3a"}
    assert "ports" not in pod["containers"][0]  # they would be the host's


def test_claims_are_mounted_where_they_are_named():
    pod = pod_of(
        claims=(Claim(name="data", path="/data", read_only=True), Claim(name="runs", path="/runs"))
    )
    mounts = {m["name"]: m for m in pod["containers"][0]["volumeMounts"]}
    claims = {
        v["persistentVolumeClaim"]["claimName"]: mounts[v["name"]]
        for v in pod["volumes"]
        if "persistentVolumeClaim" in v
    }
    assert claims["data"] == {"name": "claim-0", "mountPath": "/data", "readOnly": True}
    assert (claims["runs"]["mountPath"], claims["runs"]["readOnly"]) == ("/runs", False)


def test_a_queue_is_a_label_of_the_job():
    assert job_of(queue="team")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue.x-k8s.io/queue-name" not in job_of()["metadata"]["labels"]


def test_the_job_owns_the_others_by_its_uid():
    metadata = {"name": "run-7f3a", "uid": "d317dfee"}
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
    (owner,) = owned_by(made)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "run-7f3a", "d317dfee")


# Recorded: 61 characters with 2 pods are taken, with 11 they are refused.
@pytest.mark.parametrize(
    ("length", "num_pods", "fits"), [(61, 2, True), (61, 11, False), (62, 2, False)]
)
def test_a_name_has_room_for_the_number_of_its_last_pod(length, num_pods, fits):
    run = request(name="a" * length, num_pods=num_pods)
    if fits:
        assert len(objects_of(run)) == 3
        return
    with pytest.raises(UsageError) as caught:
        objects_of(run)
    assert f"-{num_pods - 1}` is the host name of its last pod" in (caught.value.why or "")


@pytest.mark.parametrize("name", ["Run_Err", "7f3a", "a.b", "run-", ""])
def test_a_name_that_is_no_dns_label_is_refused(name):
    with pytest.raises(UsageError):
        objects_of(request(name=name))


# Recorded: 1048576 bytes are taken, one more is not.
def test_files_that_are_too_large_are_refused_by_name():
    assert objects_of(request(files={"key": b"x" * (1 << 20)}))
    with pytest.raises(UsageError) as caught:
        objects_of(request(files={"key": b"xy", "package.zip": b"x" * ((1 << 20) - 1)}))
    assert caught.value.where == "package.zip"

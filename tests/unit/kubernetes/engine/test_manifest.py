"""The objects of a run, against those that a real server (1.36) took, and what the keys of a site make of them."""

import base64
import difflib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kit import missing
from kit.tables import rows
from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine.manifest import (
    PodsRequest,
    claims_of,
    home_of,
    keeps_runs,
    objects_of,
    pods_of,
)
from torchmuster.launcher.model.job import NodeChunk
from unit.kubernetes.engine.site_jobs import DEFAULT, JOBS, manifest_of, site

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
    same = "restartPolicy subdomain automountServiceAccountToken enableServiceLinks tolerations"
    for key in same.split():
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


def test_what_the_run_brings_along_is_in_its_secret_and_nowhere_else():
    secret, service, job = objects_of(request(files={"key": b"\x00secret"}))
    assert base64.b64decode(secret["data"]["key"]) == b"\x00secret"
    others = json.dumps([service, job])
    assert secret["data"]["key"] not in others
    (volume,) = (v for v in job["spec"]["template"]["spec"]["volumes"] if "projected" in v)
    sources = [{"secret": {"name": "run-7f3a"}}]
    assert volume["projected"] == {"sources": sources, "defaultMode": 0o400}


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


# Keys of a site as values of the manifest: what is understood, what is refused, and in which words.


def pods(job=DEFAULT, **keys):
    return pods_of(site(job=job, **keys), {})


def error_of(**keys):
    with pytest.raises(UsageError) as caught:
        pods(**keys)
    return caught.value


def test_memory_of_the_command_line_comes_before_that_of_the_site():
    asked = replace(DEFAULT, chunks=(NodeChunk(num_nodes=2, memory_bytes=8 << 30),))
    assert pods(memory="400Gi").memory_bytes == 400 << 30
    assert pods(job=asked, memory="400Gi").memory_bytes == 8 << 30
    assert pods().memory_bytes is None


def test_a_site_names_its_own_gpus_and_devices():
    job = replace(DEFAULT, chunks=(NodeChunk(num_nodes=1, gpus=8),))
    found = pods(job=job, gpu_resource="amd.com/gpu", devices="rdma/ib=1\nexample.com/fpga=2")
    assert (found.gpus, found.gpu_resource) == (8, "amd.com/gpu")
    assert found.devices == {"rdma/ib": 1, "example.com/fpga": 2}


def test_the_job_s_own_limit_leaves_the_run_time_to_end_by_itself():
    assert pods(job=replace(DEFAULT, time_limit_s=3600.0)).time_limit_s == 3600 + 900 + 900
    assert pods().time_limit_s is None


@pytest.mark.parametrize(
    ("text", "toleration"),
    rows(
        """
        spot                {"key": "spot", "operator": "Exists"}
        spot:NoExecute      {"key": "spot", "operator": "Exists", "effect": "NoExecute"}
        team=ml             {"key": "team", "operator": "Equal", "value": "ml"}
        x.y/z=a:NoSchedule  {"key": "x.y/z", "operator": "Equal", "value": "a", "effect": "NoSchedule"}
        team=               {"key": "team", "operator": "Equal", "value": ""}
        """
    ),
)
def test_a_toleration_is_written_as_taints_are_shown(text, toleration):
    assert pods(tolerations=text).tolerations == (json.loads(toleration),)


@pytest.mark.parametrize("text", ["=ml", ":NoSchedule", "spot:Never", "spot:noschedule"])
def test_what_is_no_toleration_is_refused(text):
    error = error_of(tolerations=text)
    assert (error.what, error.where) == (f"`{text}` is not a toleration", "tolerations")


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("home:/home/team", ("home", "/home/team", False)),
        ("data:/data:ro", ("data", "/data", True)),
        ("data:/data/", ("data", "/data", False)),
        ("a.b-1:/", ("a.b-1", "/", False)),
    ],
)
def test_a_claim_is_a_name_and_a_folder(text, claim):
    (found,) = claims_of(site(claims=text))
    assert (found.name, found.path, found.read_only) == claim


@pytest.mark.parametrize("text", ["home", "home:data", "Home:/data", "home:/data:rw", ":/data"])
def test_what_is_no_claim_is_refused(text):
    assert error_of(claims=text).what == f"`{text}` names no volume"


@pytest.mark.parametrize(
    ("claims", "home", "keeps"),
    [
        ("team:/home/team", "/home/team/m", True),
        ("team:/home/team", "/home/team", True),
        ("team:/home/team", "/home/teams/m", False),
        ("team:/home/team", None, False),
        (None, "/home/team", False),
    ],
)
def test_runs_outlive_their_pods_where_their_home_is_on_a_volume(claims, home, keeps):
    keys = {key: value for key, value in (("claims", claims), ("home", home)) if value}
    job = site(**keys)
    assert keeps_runs(job) == keeps
    assert home_of(job) == (home or "/scratch/muster")


@pytest.mark.parametrize(
    ("line", "path", "value"),
    rows(
        """
        spec.template.spec.runtimeClassName=nvidia  spec template spec runtimeClassName    "nvidia"
        spec.backoffLimit=3                         spec backoffLimit                      3
        spec.suspend=true                           spec suspend                           true
        spec.ttlSecondsAfterFinished=null           spec ttlSecondsAfterFinished           null
        metadata.annotations[example.com/a.b]=x=y   metadata annotations example.com/a.b   "x=y"
        spec.template.spec.volumes.-={"name": "x"}  spec template spec volumes -           {"name": "x"}
        spec.template.spec.containers[0].tty=true   spec template spec containers 0 tty    true
        """,
        3,
    ),
)
def test_a_directive_is_a_place_and_a_value(line, path, value):
    patches = pods_of(site(lines=[line]), {}).patches
    assert patches == ((tuple(path.split()), json.loads(value)),)


@pytest.mark.parametrize("line", ["spec.x", "template.spec.x=1", "=1", "status.x=1"])
def test_what_is_no_directive_is_refused(line):
    with pytest.raises(UsageError) as caught:
        pods_of(site(lines=[line]), {})
    assert caught.value.where == "directives"


@pytest.mark.parametrize(
    ("keys", "where", "fix"),
    [
        ({"memory": "lots"}, "memory", 'memory = "64Gi"'),
        ({"shm": "0"}, "shm", 'shm = "64Gi"'),
        ({"scratch_size": "-1Gi"}, "scratch_size", 'scratch_size = "64Gi"'),
        ({"devices": "rdma/ib=all"}, "devices", 'devices = { "rdma/ib" = 1 }'),
        ({"pull_policy": "always"}, "pull_policy", "did you mean `Always`?"),
        ({"gang": "kueue"}, "gang", "one of volcano, kai, native"),
        ({"pod_security": "restrictd"}, "pod_security", "did you mean `restricted`?"),
    ],
)
def test_a_value_that_kubernetes_would_not_take_is_refused_before_it_is_asked(keys, where, fix):
    error = error_of(**keys)
    assert (error.where, error.fix) == (where, fix)


# Whole manifests: word for word, and as the published schemas of every supported version of Kubernetes take them.


VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
# Its field came with 1.37; `docs/kubernetes.md` says so.
SINCE = {"native": "1.37"}


def text_of(name):
    objects = json.loads(manifest_of(name))["items"]
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=110) for one in objects)


@pytest.mark.parametrize("name", JOBS)
def test_a_manifest_is_this_and_others_differ_from_it_in_these_lines(name, golden):
    text = text_of(name)
    if name not in ("default", "kinds"):  # a JobSet has nothing in the same place
        default = text_of("default").splitlines(keepends=True)
        changes = difflib.unified_diff(default, text.splitlines(keepends=True), n=1)
        # Places as numbers would change with every line above them.
        text = "".join("@@\n" if line.startswith("@@") else line for line in changes)
    golden("kubernetes_manifests.txt", name, text)


def schemas():
    try:
        import kubernetes_validate
    except ImportError:
        missing.stop("kubernetes-validate is not installed")
    return kubernetes_validate


def in_schemas(objects):
    """Yield what Kubernetes publishes schemas of: of a JobSet the Jobs that it makes."""
    for one in objects:
        if one["kind"] != "JobSet":
            yield one
            continue
        for kind in one["spec"]["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", **kind["template"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", JOBS)
def test_every_version_takes_the_manifest(name, version):
    validate = schemas().validate
    for one in in_schemas(json.loads(manifest_of(name))["items"]):
        if one["kind"] == "PodGroup":
            continue  # of Volcano, which publishes its own
        if one["kind"] == "Job" and version < SINCE.get(name, ""):
            with pytest.raises(schemas().ValidationError):
                validate(one, version, strict=True)
        else:
            assert validate(one, version, strict=True) == version


def test_no_published_version_is_left_out():
    published = {schemas().utils.major_minor(v) for v in schemas().utils.all_versions()}
    assert {v for v in published if v >= VERSIONS[0]} == set(VERSIONS)

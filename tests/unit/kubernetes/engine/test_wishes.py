"""Keys of a site as values of the manifest: what is understood, what is refused, and in which words."""

from dataclasses import replace

import pytest

from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine.manifest import claims_of, home_of, keeps_runs, pods_of
from torchmuster.launcher.model.job import NodeChunk
from unit.kubernetes.engine.site_jobs import DEFAULT, site


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
    [
        ("spot", {"key": "spot", "operator": "Exists"}),
        ("spot:NoExecute", {"key": "spot", "operator": "Exists", "effect": "NoExecute"}),
        ("team=ml", {"key": "team", "operator": "Equal", "value": "ml"}),
        (
            "example.com/team=ml:NoSchedule",
            {
                "key": "example.com/team",
                "operator": "Equal",
                "value": "ml",
                "effect": "NoSchedule",
            },
        ),
        ("team=", {"key": "team", "operator": "Equal", "value": ""}),
    ],
)
def test_a_toleration_is_written_as_taints_are_shown(text, toleration):
    assert pods(tolerations=text).tolerations == (toleration,)


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
    [
        (
            "spec.template.spec.runtimeClassName=nvidia",
            ("spec", "template", "spec", "runtimeClassName"),
            "nvidia",
        ),
        ("spec.backoffLimit=3", ("spec", "backoffLimit"), 3),
        ("spec.suspend=true", ("spec", "suspend"), True),
        ("spec.ttlSecondsAfterFinished=null", ("spec", "ttlSecondsAfterFinished"), None),
        (
            "metadata.annotations[example.com/a.b]=x=y",
            ("metadata", "annotations", "example.com/a.b"),
            "x=y",
        ),
        (
            'spec.template.spec.volumes.-={"name": "x"}',
            ("spec", "template", "spec", "volumes", "-"),
            {"name": "x"},
        ),
        (
            "spec.template.spec.containers[0].tty=true",
            ("spec", "template", "spec", "containers", "0", "tty"),
            True,
        ),
    ],
)
def test_a_directive_is_a_place_and_a_value(line, path, value):
    assert pods_of(site(lines=[line]), {}).patches == ((path, value),)


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


def test_pods_need_an_image():
    with pytest.raises(UsageError, match="no image is given"):
        pods_of(replace(DEFAULT, own_keys=()), {})

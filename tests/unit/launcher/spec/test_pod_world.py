"""What `muster torchrun` finds in pods of other tools: environments as these tools' sources and a real cluster set them."""

import pytest

from torchmuster.core.spec.problems import Problems
from torchmuster.launcher.spec.torchrun import parse_torchrun

POD = {"KUBERNETES_SERVICE_HOST": "10.92.0.1", "KUBERNETES_SERVICE_PORT": "443"}
# As a kubelet (1.36) wrote it for pod 1 of Job and headless Service `train` in namespace `ml`.
HOSTS = """# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
10.91.2.3\ttrain-1.train.ml.svc.cluster.local\ttrain-1
"""
INDEXED = {**POD, "HOSTNAME": "train-1", "JOB_COMPLETION_INDEX": "1"}
# kubeflow/trainer pkg/runtime/framework/plugins/torch/torch.go: a TrainJob `tj` of 3 nodes; its pods are a JobSet's.
TRAINJOB = {
    **POD,
    "HOSTNAME": "tj-node-0-2",
    "JOB_COMPLETION_INDEX": "2",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "tj-node-0-0.tj",
    "PET_MASTER_PORT": "29400",
}
# kubeflow/training-operator pkg/controller.v1/pytorch: 1 Master and 2 Workers; pod of Worker 0.
PYTORCHJOB_OLD = {
    **POD,
    "HOSTNAME": "pj-worker-0",
    "MASTER_ADDR": "pj-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "1",
    "PYTHONUNBUFFERED": "0",
}
# The same by a later version: WORLD_SIZE counts processes.
PYTORCHJOB = {
    **PYTORCHJOB_OLD,
    "WORLD_SIZE": "12",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
}
# The same with an elasticPolicy and Workers only.
PYTORCHJOB_ELASTIC = {
    **POD,
    "HOSTNAME": "pj-worker-1",
    "PET_RDZV_ENDPOINT": "pj-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:3",
    "PET_MAX_RESTARTS": "100",
}
# volcano pkg/controllers/job/plugins: env and svc; task `worker` with 2 replicas of Job `vj`.
VOLCANO = {
    **POD,
    "HOSTNAME": "vj-worker-1",
    "VK_TASK_INDEX": "1",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "vj-worker-0.vj,vj-worker-1.vj",
    "VC_WORKER_NUM": "2",
}
# With a task `master` of 1 replica, as in Volcano's own example for PyTorch.
VOLCANO_MASTER = {**VOLCANO, "VC_MASTER_HOSTS": "vj-master-0.vj", "VC_MASTER_NUM": "1"}
# A JobSet sets labels; its users put them into the environment under these names. 2 Jobs of 2 pods.
JOBSET = {
    **POD,
    "HOSTNAME": "set-workers-1-1",
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "set",
    "REPLICATED_JOB_NAME": "workers",
    "REPLICATED_JOB_REPLICAS": "2",
    "JOB_INDEX": "1",
}
JOBSET_HOSTS = "10.91.2.9\tset-workers-1-1.set.ml.svc.cluster.local\tset-workers-1-1\n"
FIRST = "train-0.train.ml.svc.cluster.local"
FIRST_OF_SET = "set-workers-0-0.set.ml.svc.cluster.local"


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def parse(words, environment, hosts=HOSTS):
    problems = Problems()
    found = parse_torchrun([*words.split(), "train.py"], environment, (), problems, hosts)
    assert problems.found == []
    return found


def world_of(words, environment, hosts=HOSTS):
    """Return the number of nodes, the node rank, and where the head is."""
    line = parse(words, environment, hosts)
    return line.max_nodes, line.node_rank, f"{line.meeting.host}:{line.meeting.port}"


@pytest.mark.parametrize(
    ("words", "environment", "hosts", "world"),
    [
        ("", TRAINJOB, HOSTS, (3, 2, "tj-node-0-0.tj:29400")),
        ("", PYTORCHJOB_OLD, "", (3, 1, "pj-master-0:23456")),
        ("", PYTORCHJOB, "", (3, 1, "pj-master-0:23456")),
        ("", PYTORCHJOB_ELASTIC, "", (3, None, "pj-worker-0:23456")),
        ("", VOLCANO, "", (2, 1, "vj-worker-0.vj:29500")),
        ("", VOLCANO_MASTER, "", (3, 2, "vj-master-0.vj:29500")),
        ("--nnodes 2", INDEXED, HOSTS, (2, 1, f"{FIRST}:29500")),
        ("--nnodes 1:2 --rdzv-backend c10d", INDEXED, HOSTS, (2, None, f"{FIRST}:29400")),
        ("--nnodes 4", JOBSET, JOBSET_HOSTS, (4, 3, f"{FIRST_OF_SET}:29500")),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_a_pod_finds_its_world(words, environment, hosts, world):
    assert world_of(words, environment, hosts) == world


def test_workers_on_a_node_come_from_kubeflow():
    assert parse("", TRAINJOB).num_workers == 2


def test_the_command_line_comes_before_pet_variables_and_these_before_the_pod():
    told = "--nnodes 5 --node-rank 4 --master-addr me --master-port 7"
    assert world_of(told, TRAINJOB) == (5, 4, "me:7")
    both = {**PYTORCHJOB_OLD, "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "p"}
    assert world_of("", both) == (2, 0, "p:29500")
    assert world_of("--nnodes 2 --master-port 77", INDEXED)[2].endswith(":77")


def test_an_endpoint_of_the_user_stays_and_the_index_gives_the_rank():
    words = "--nnodes 2 --rdzv-endpoint n0:29999"
    assert world_of(words, INDEXED) == (2, 1, "n0:29999")


def test_what_a_user_put_into_the_template_comes_before_the_pods_name():
    told = {**INDEXED, "MASTER_ADDR": "train-0.train", "MASTER_PORT": "3389"}
    assert world_of("--nnodes 2", told) == (2, 1, "train-0.train:3389")


def test_the_first_pod_of_an_old_operator_is_reached_by_its_name():
    first = {**PYTORCHJOB_OLD, "MASTER_ADDR": "localhost", "RANK": "0", "HOSTNAME": "pj-master-0"}
    assert world_of("", first) == (3, 0, "pj-master-0:23456")


@pytest.mark.parametrize(
    ("words", "environment", "world", "sources"),
    [
        (
            "",
            TRAINJOB,
            "node 2 of 3, head at tj-node-0-0.tj:29400",
            "nodes from PET_NNODES; head from PET_MASTER_ADDR; node rank from PET_NODE_RANK",
        ),
        (
            "--nnodes 2",
            INDEXED,
            f"node 1 of 2, head at {FIRST}:29500",
            "nodes from --nnodes; head from this pod's name; node rank from JOB_COMPLETION_INDEX",
        ),
        (
            "--nnodes 2 --rdzv-backend c10d",
            VOLCANO,
            "2 nodes, head at vj-worker-0.vj:29400",
            "nodes from --nnodes; head from VC_WORKER_HOSTS",
        ),
    ],
)
def test_one_line_says_where_the_world_came_from(words, environment, world, sources):
    assert parse(words, environment).notes == (f"{world} ({sources})",)


def test_a_pod_alone_is_told_how_several_train_together():
    (note,) = parse("--nproc-per-node 2", INDEXED).notes
    assert note == (
        "one node, as in torchrun: this is a pod of an Indexed Job;"
        " --nnodes N (or PET_NNODES) lets N pods train together"
    )


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ("--standalone", TRAINJOB),
        ("--nnodes 1", INDEXED),
        ("--nnodes 1", PYTORCHJOB),
        ("--nnodes 1", VOLCANO),
    ],
)
def test_one_node_is_alone_in_every_pod(words, environment):
    line = parse(words, environment)
    assert (line.max_nodes, line.meeting.alone, line.notes) == (1, True, ())


@pytest.mark.parametrize("outside", [{}, {**POD, "LOCAL_RANK": "0"}])
def test_nothing_is_taken_outside_of_pods_and_in_a_worker(outside):
    environment = {**outside, "MASTER_ADDR": "h", "WORLD_SIZE": "4", "RANK": "1"}
    line = parse("", environment)
    assert (line.max_nodes, line.meeting.alone, line.notes) == (1, True, ())


WITHOUT_REPLICAS = {k: v for k, v in JOBSET.items() if k != "REPLICATED_JOB_REPLICAS"}


@pytest.mark.parametrize(
    ("words", "environment", "hosts", "what", "why", "fix"),
    [
        (
            "--nnodes 2",
            INDEXED,
            "10.91.2.3\ttrain-1\n",
            "an Indexed Job does not say where the head is",
            "its pods have no names that can be looked up: the pod template has no `subdomain`",
            "add --master-addr HOST",
        ),
        (
            "--nnodes 2 --rdzv-backend c10d",
            {**INDEXED, "HOSTNAME": "node-a"},
            HOSTS,
            "an Indexed Job does not say where the head is",
            "the pod has the name of its node, `node-a`, as with `hostNetwork`",
            "add --rdzv-endpoint HOST:PORT",
        ),
        (
            "--nnodes 4",
            WITHOUT_REPLICAS,
            JOBSET_HOSTS,
            "a JobSet does not say which node it is itself",
            "JOB_INDEX is 1; how many Jobs share the nodes REPLICATED_JOB_REPLICAS could say",
            "add --node-rank N",
        ),
        (
            "--nnodes 2",
            {**POD, "HOSTNAME": "vj-worker-1", "VC_TASK_INDEX": "1"},
            "",
            "a Job of Volcano does not say where the head is",
            "no VC_<TASK>_HOSTS is set: its plug-in `svc` sets them",
            "add --master-addr HOST",
        ),
        (
            "--nnodes 2",
            {**VOLCANO, "VC_PS_HOSTS": "vj-ps-0.vj"},
            "",
            "a Job of Volcano does not say where the head is and which node it is itself",
            "its tasks are ps, worker: which of them train together is not said",
            "add --master-addr HOST --node-rank N",
        ),
    ],
)
def test_what_is_missing_is_one_error_with_the_flag_that_gives_it(
    words, environment, hosts, what, why, fix
):
    problems = Problems()
    parse_torchrun([*words.split(), "train.py"], environment, (), problems, hosts)
    (found,) = problems.found
    assert (found.what, found.why, found.fix) == (f"this pod of {what}", why, fix)

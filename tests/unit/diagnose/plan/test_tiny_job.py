import json
import os
import subprocess
import sys

import pytest

from kit.command import spawned
from kit.ports import reserve_port
from torchmuster.diagnose.plan import tiny_job


def start(rank, node, world_size, folder, *words):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(common_port(folder))}
    env |= {"GROUP_RANK": str(node)}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    argv, pipes = [sys.executable, tiny_job.__file__, *words], {"stderr": subprocess.PIPE}
    return spawned(argv, env=env, cwd=folder, **pipes)


def common_port(folder):
    """Return one port for all ranks of a test."""
    path = folder / "port"
    if not path.exists():
        path.write_text(str(reserve_port()))
    return int(path.read_text())


def run_all(folder, num_ranks, *words, nodes=None):
    nodes = nodes or range(num_ranks)
    children = [start(rank, node, num_ranks, folder, *words) for rank, node in enumerate(nodes)]
    try:
        said = [child.communicate(timeout=180) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * num_ranks, said
    return [out for out, _ in said]


def test_two_ranks_sum_right_and_rank_0_alone_says_how_fast(tmp_path):
    first, second = run_all(tmp_path, 2, "--seconds", "0.3", "--bytes", "65536")
    found = json.loads(first)
    assert second == ""
    assert (found["backend"], found["world_size"], found["right"]) == ("gloo", 2, True)
    assert list(found["ranks_per_host"].values()) == [2]
    assert found["nodes"] == [1, 1]
    sizes = [one["bytes"] for one in found["between"]]
    assert sizes[0] == 4
    assert sizes == sorted(sizes)
    assert sizes[-1] <= 65536
    assert all(one["seconds"] > 0 and one["repeats"] >= 3 for one in found["between"])
    assert found["inside"] is None


@pytest.mark.slow
def test_ranks_of_one_node_are_measured_apart(tmp_path):
    first, *_ = run_all(tmp_path, 4, "--seconds", "0.3", "--bytes", "4096", nodes=[0, 0, 1, 1])
    found = json.loads(first)
    assert found["nodes"] == [2, 2]
    assert len(found["inside"]) >= 2


@pytest.mark.parametrize(
    ("words", "members"), [(["a", "a"], {"a": [0, 1]}), (["a", "b", "a"], {"a": [0, 2], "b": [1]})]
)
def test_ranks_are_put_together_by_what_they_said(words, members):
    assert tiny_job.members_by(words) == members

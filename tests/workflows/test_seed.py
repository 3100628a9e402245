"""The workflow files of the tutorial that the format comes from, as they stand (`tests/seeds/README.md`).

Its `train.py` and its barrier are links there: here they are short scripts with the same options.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from kit.command import muster_env, run_muster

OSMO = Path(__file__).parents[1] / "seeds" / "osmo"
TRAIN = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--total_epochs", type=int)
parser.add_argument("--batch_size", type=int)
parser.add_argument("--snapshot_path")
options = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
os.write(1, f"sum {int(ones.item())} of {dist.get_world_size()}\\n".encode())
if os.environ["LOCAL_RANK"] == "0":
    torch.save({"sum": ones}, options.snapshot_path)
dist.barrier()
dist.destroy_process_group()
"""
# A barrier of the kind that the tutorial names: one TCP server on rank 0, nothing else.
BARRIER = """
import argparse, socket, time
parser = argparse.ArgumentParser()
parser.add_argument("--num_nodes", type=int)
parser.add_argument("--connect")
parser.add_argument("--rank", type=int)
options = parser.parse_args()
if options.rank == 0:
    with socket.create_server(("", 12344)) as server:
        others = [server.accept()[0] for _ in range(options.num_nodes - 1)]
        for other in others:
            other.sendall(b"OK")
            other.close()
else:
    while True:
        try:
            with socket.create_connection((options.connect, 12344)) as call:
                assert call.recv(2) == b"OK"
                break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""


@pytest.fixture
def blocks(tmp_path):
    """Return the three blocks; `train.py` lies beside the files that they are written to."""
    (tmp_path / "train.py").write_text(TRAIN)
    shim = tmp_path / "bin" / "muster"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchmuster "$@"\n')
    shim.chmod(0o755)
    return [(OSMO / f"{name}.yaml").read_text() for name in ("two_nodes", "any_nodes", "barrier")]


@pytest.fixture
def muster(tmp_path):
    """Return a function that runs `muster`."""

    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = muster_env(tmp_path / "home", PATH=path)
    return lambda *words: run_muster(*words, env=environment, cwd=tmp_path, limit_s=150)


def test_the_two_node_block_runs_with_fewer_workers(blocks, muster, tmp_path):
    fewer = blocks[0].replace("--nproc_per_node 8", "--nproc_per_node 2")
    assert fewer != blocks[0]
    (tmp_path / "w.yaml").write_text(fewer)
    assert muster("validate", "w.yaml").returncode == 0
    assert "{{host:master}}" in muster("render", "w.yaml").stdout

    done = muster("submit", "w.yaml", "--run-id", "r")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4 of 4") == 4
    for task in ("master", "worker"):
        assert (tmp_path / f"home/runs/r/tasks/{task}/output/models/snapshot.pth").is_file()
    assert not Path("/tmp/master.sh").exists()


@pytest.mark.parametrize(
    ("sets", "num_nodes", "world_size"),
    [
        (["n_gpus_per_node=2"], 2, 4),
        pytest.param(["n_nodes=3", "n_gpus_per_node=1"], 3, 3, marks=pytest.mark.lab),
    ],
    ids=["two nodes", "three nodes"],
)
def test_the_template_block_runs_and_keeps_the_leads_models(
    blocks, muster, tmp_path, sets, num_nodes, world_size
):
    (tmp_path / "w.yaml").write_text(blocks[1])
    assert muster("validate", "w.yaml", "--set", *sets).returncode == 0

    done = muster("submit", "w.yaml", "--set", *sets, "--run-id", "r")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum {world_size} of {world_size}") == world_size
    assert len(os.listdir(tmp_path / "home/runs/r/tasks")) == num_nodes
    info = json.loads(muster("dataset", "info", "my-trained-model", "--json").stdout)
    assert info["version"] == 1
    assert [file["path"].split("/")[-1] for file in info["files"]] == ["snapshot.pth"]
    assert not Path("/tmp/run.sh").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["muster barrier", pytest.param("a script", marks=pytest.mark.lab)])
def test_the_fragments_barrier_holds_all_for_one_that_is_late(blocks, muster, tmp_path, how):
    line = re.search(r"python3 /tmp/osmo_barrier.py .*", blocks[2])[0]
    (tmp_path / "osmo_barrier.py").write_text(BARRIER)
    files = "      - path: /tmp/osmo_barrier.py\n        localpath: osmo_barrier.py\n"
    late = "if [ {{item}} = 1 ]; then sleep 10; fi"  # time varying code
    if how == "muster barrier":
        line = line.replace("python3 /tmp/osmo_barrier.py", "muster barrier")
        files = ""
    text = blocks[1].replace(
        "          # Launch training\n",
        f"          {late}\n          date +before=%s\n          {line}\n          date +after=%s\n",
    )
    text = text.replace("    {% endfor %}", f"{files}    {{% endfor %}}")
    (tmp_path / "w.yaml").write_text(text)

    done = muster("submit", "w.yaml", "--set", "n_gpus_per_node=1", "--run-id", "r")

    assert done.returncode == 0, done.stderr
    seconds = {
        task: dict(re.findall(rf"\[{task}\] (before|after)=(\d+)", done.stdout))
        for task in ("master", "worker_1")
    }
    assert int(seconds["master"]["after"]) >= int(seconds["worker_1"]["before"])
    assert int(seconds["master"]["after"]) - int(seconds["master"]["before"]) >= 9

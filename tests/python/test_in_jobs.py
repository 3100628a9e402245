"""A function as a job of a scheduler, and inside one: the run directory is shared, and so are call and values."""

import json
import os
import sys
from pathlib import Path

import pytest

import torchmuster
from kit.command import SOURCE
from kit.waiting import wait_until

FAKES = Path(__file__).parents[1] / "fakes" / "slurm"
LIMIT_S = 150.0
CLIENT = """\
import os, sys
import torchmuster

factor = 7

def work(x):
    return x * factor, os.environ["RANK"], os.uname().nodename

run = torchmuster.launch(work, 6, nodes=2, nproc_per_node=2, on={on!r}, max_restarts=0)
print(run.results(150), flush=True)
"""


@pytest.fixture
def cluster(project, tmp_path, monkeypatch):
    """Let this process be on the login node of a pretended cluster."""
    queue = tmp_path / "queue"
    queue.mkdir()
    monkeypatch.setenv("PATH", f"{FAKES}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(queue))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    yield queue
    for path in queue.glob("*.json"):
        pid = json.loads(path.read_text())["pid"]
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the end of a job")


def test_a_function_is_a_job_and_its_values_come_back(cluster):
    factor = 7

    def work(x):
        print("rank", os.environ["RANK"])
        return x * factor + int(os.environ["RANK"])

    run = torchmuster.launch(work, 6, on="slurm", nodes=2, nproc_per_node=2)

    assert run.results(LIMIT_S) == [42, 43, 44, 45]
    assert run.logs(3) == "rank 3\n"
    assert list(cluster.glob("*.json"))


def test_a_job_is_cancelled(cluster):
    def wait():
        import signal

        signal.pause()

    run = torchmuster.launch(wait, on="slurm", nodes=1, nproc_per_node=1, grace="1s")
    wait_until(lambda: run.status().state == "running", "the job", LIMIT_S)

    run.cancel()

    assert run.status().state == "cancelled"


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize("on", ["slurm", None], ids=["as_a_job", "inside_a_job"])
def test_values_come_back_on_a_real_cluster(login, slurm_lab, on):
    (login.folder / "client.py").write_text(CLIENT.format(on=on))
    words = [sys.executable, "client.py"]
    inside = ["salloc", "--quiet", "-N2", "--exclusive"] if on is None else []

    done = slurm_lab.run([*inside, *words], env=login.env, cwd=str(login.folder), limit_s=LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert [value[:2] for value in eval(done.stdout)] == [(42, str(rank)) for rank in range(4)]
    assert len({value[2] for value in eval(done.stdout)}) == 2

"""A function as a job of a scheduler, inside one, and on hosts of ssh: call and values travel, or the run directory is shared."""

import os
import sys
from pathlib import Path

import pytest

import torchmuster
from cluster.slurm import FakeSlurm
from kit.waiting import wait_until
from ssh.conftest import hosts as _hosts

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
    made = FakeSlurm(tmp_path)
    for name in ("PATH", "FAKE_SLURM", "PYTHONPATH"):
        monkeypatch.setenv(name, made.env[name])
    yield made.queue
    made.wait_for_end()


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
def test_values_come_back_on_a_real_cluster(login, on):
    (login.folder / "client.py").write_text(CLIENT.format(on=on))
    words = [sys.executable, "client.py"]
    inside = ["salloc", "--quiet", "-N2", "--exclusive"] if on is None else []

    done = login.run([*inside, *words], limit_s=LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert [value[:2] for value in eval(done.stdout)] == [(42, str(rank)) for rank in range(4)]
    assert len({value[2] for value in eval(done.stdout)}) == 2


# On hosts that share nothing with the client: call and values travel through the sessions of ssh.
hosts = _hosts


@pytest.fixture
def on_hosts(hosts, monkeypatch):
    """Let this process be the client of two hosts."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "MUSTER", "SSH_")):
            monkeypatch.delenv(name)
    for name, value in hosts.environment(OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(hosts.code)
    homes = hosts.add_all("a", "b")
    (hosts.code / "helper.py").write_text("FACTOR = 7\n")
    monkeypatch.syspath_prepend(str(hosts.code))
    return homes


def test_a_closure_and_its_module_travel_and_every_rank_s_value_comes_back(on_hosts):
    import helper  # type: ignore[import-not-found]

    def work(x):
        import socket

        print("here", os.getcwd(), flush=True)
        return (
            x * helper.FACTOR,
            os.environ["RANK"],
            len(socket.gethostname()) > 0,
            b"y" * 3_000_000,
        )

    run = torchmuster.launch(work, 6, hosts="a:2,b", max_restarts=0)

    values = run.results(LIMIT_S)
    assert [value[:3] for value in values] == [(42, str(rank), True) for rank in range(3)]
    assert all(len(value[3]) == 3_000_000 for value in values)
    assert "/host-b/" in run.logs(2)
    for home in on_hosts:  # the call was there, and only its owner could read it
        (path,) = Path(home).glob("**/runs/*/call")
        assert oct(path.stat().st_mode & 0o777) == "0o600"

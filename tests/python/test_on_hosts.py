"""A function on hosts that share nothing with the client: call and values travel through the sessions of ssh."""

import os
from pathlib import Path

import pytest

import torchmuster
from ssh.conftest import hosts as _hosts

hosts = _hosts
LIMIT_S = 150.0


@pytest.fixture
def on_hosts(hosts, monkeypatch):
    """Let this process be the client of two hosts."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "MUSTER", "SSH_")):
            monkeypatch.delenv(name)
    for name, value in hosts.environment(OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(hosts.code)
    homes = [hosts.add("a"), hosts.add("b")]
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

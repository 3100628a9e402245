"""`muster run --on ssh` from a laptop on hosts of the lab: what works, who is named, and that nothing is left."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.command import MUSTER, SOURCE
from kit.waiting import wait_until
from lab.netlab import Host
from lab.trains import SCRIPT

pytestmark = pytest.mark.netns
GONE_LIMIT_S = 60.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "toy_regression"


@pytest.fixture(scope="module")
def wide(labs):
    """Return a lab of good hosts (n1 and n2 share a folder, alone and other don't) and of bad ones."""
    usual = Path(sys.executable).parent
    hosts = [
        Host("n1"),
        Host("n2"),
        Host("alone", shared=False, shell_noise="Welcome to alone!"),
        Host("other", shared=False, python="venv", hide=(SOURCE, usual)),
        Host("refusing", ssh="none"),
        Host("silent", ssh="silent"),
        Host("password", ssh="password"),
    ]
    with labs(hosts) as lab:
        yield lab


class Client:
    """One `muster run --on ssh`, started at the controller in a folder with a training script.

    `said` reads what it has printed; `wait` returns its exit code.
    """

    def __init__(self, lab, folder, *words, script=SCRIPT):
        self.lab, self.folder = lab, folder
        folder.mkdir(parents=True, exist_ok=True)
        if script is not None:
            (folder / "train.py").write_text(script)
        self.home = lab.home / "muster"
        self.env = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(self.home)}
        self.env["MUSTER_SSH"] = " ".join(lab.ssh)
        self.out = lab.root(lab.controller) / "said"
        argv = [*MUSTER, "run", "--on", "ssh", "--tee", "all", "--run-id", "r", *words]
        with open(self.out, "wb") as out:
            self.process = lab.start(
                lab.controller,
                argv,
                env=self.env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self):
        return self.out.read_text(errors="replace")

    @property
    def run_dir(self):
        """Return the run's folder, seen from outside."""
        return self.lab.root(self.lab.controller) / "home" / "muster" / "runs" / "r"

    def wait_for(self, text, limit_s=60.0):
        """Wait until it has printed this."""
        wait_until(lambda: text in self.said or self.process.poll() is not None, text, limit_s)
        assert text in self.said, self.said

    def wait(self, limit_s=90.0):
        """Return the exit code; None, after its end by force, when it took longer."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None


@pytest.fixture
def run(wide):
    """Return a function that starts a run in the shared folder: `run("--hosts", "n1,n2", "train.py")`."""
    clients = []

    def start(*words, folder="job", **options):
        clients.append(Client(wide, wide.shared / folder, *words, **options))
        return clients[-1]

    yield start
    for client in clients:
        client.process.kill()
        client.process.wait()
    wide.reset()
    for home in wide.folder.glob("hosts/*/home/*muster*"):
        shutil.rmtree(home)
    shutil.rmtree(wide.shared / "job", ignore_errors=True)


def gone(lab, limit_s=GONE_LIMIT_S):
    """Wait until no host runs anything but sshd."""
    wait_until(lambda: not lab.leftovers(), "an end on all hosts", limit_s)


def test_two_hosts_train_over_the_interface_on_which_they_reach_each_other(run, wide):
    client = run("--hosts", "n1,n2", "--nproc-per-node", "2", "train.py")
    assert client.wait() == 0, client.said
    assert client.said.count("sum 4") == 4
    assert client.said.count("by hsn0") == 4
    line = next(line for line in client.said.splitlines() if "network:" in line)
    assert "network: hsn0 (10.10.0.0/24), 2 nodes" in line
    assert "docker0 (same address on 2 nodes)" in line
    assert "mgmt0 (not reachable from n2)" in line
    gone(wide)


def test_three_hosts_train_where_one_shares_no_folder(run, wide):
    client = run("--hosts", "n1,n2,alone", "--nproc-per-node", "1", "train.py", "write")
    assert client.wait() == 0, client.said
    for rank, host in enumerate(("n1", "n2", "alone")):
        assert f"sum 3 rank {rank} on {host}" in client.said
        log = client.run_dir / "logs/main/train/attempt-0" / f"rank-{rank}.log"
        assert f"rank {rank} on {host}" in log.read_text()
    assert (client.run_dir / "output/alone/made-by-2").read_text() == "output\n"
    assert (client.folder / "made-by-1").read_text() == "output\n"
    assert json.loads((client.run_dir / "result.json").read_text())["state"] == "succeeded"
    gone(wide)


def test_hosts_that_refuse_hang_or_ask_are_all_named(run, wide):
    client = run("--hosts", "n1,refusing,silent,password,alone", "train.py")
    client.wait_for("silent:")  # TCP alone would wait for two minutes
    assert client.wait() not in (0, 1, None), client.said
    assert "refusing: ssh: connect to host" in client.said
    assert "password: root@" in client.said
    assert "sum" not in client.said
    gone(wide)


@pytest.mark.lab
def test_a_range_of_nodes_runs_without_the_host_that_refuses(run, wide):
    client = run("--hosts", "n1,refusing", "--nodes", "1:2", "train.py")
    assert client.wait() == 0, client.said
    assert "sum 1 rank 0 on n1" in client.said
    assert "refusing: ssh: connect to host" in client.said
    gone(wide)


@pytest.mark.lab
def test_code_in_a_folder_with_spaces_trains_on_a_host_that_lacks_it(run, wide):
    client = run("--hosts", "n1,alone", "train.py", folder="job/my first 'try'")
    assert client.wait() == 0, client.said
    assert "sum 2 rank 1 on alone" in client.said


@pytest.mark.lab
def test_a_host_with_another_python_uses_its_own(run, wide):
    client = run("--hosts", "n1,other", "train.py", "python")
    assert client.wait() == 0, client.said
    assert f"{sys.executable} on n1" in client.said
    assert f"{wide.root('other')}/venv/bin/python" in client.said
    assert "sum 2 rank 1 on other" in client.said


@pytest.mark.lab
def test_a_killed_host_is_left_behind_when_a_range_allows_it(run, wide):
    client = run("--hosts", "n1,n2", "--nodes", "1:2", "train.py", "once")
    client.wait_for("rank 1 on n2 attempt 0")
    client.wait_for("rank 0 on n1 attempt 0")
    wide.kill("n2", unplug=True)
    assert client.wait() == 0, client.said
    assert "sum 1 rank 0 on n1 attempt 1" in client.said
    gone(wide)


@pytest.mark.lab
def test_a_cut_host_ends_its_part_and_comes_back_when_it_can_be_reached(run, wide):
    client = run("--hosts", "n1,n2", "train.py", "once")
    client.wait_for("rank 1 on n2 attempt 0")
    client.wait_for("rank 0 on n1 attempt 0")
    wide.cut("n2")
    wait_until(lambda: "n2" not in wide.leftovers(), "the end of what n2 ran", GONE_LIMIT_S)
    wide.heal("n2")
    assert client.wait(60.0) == 0, client.said
    assert "sum 2 rank 1 on n2 attempt 1" in client.said
    gone(wide)


@pytest.mark.parametrize("how", ["killed", pytest.param("cut off", marks=pytest.mark.lab)])
def test_a_client_that_is_gone_leaves_nothing_on_any_host(run, wide, how):
    client = run("--hosts", "n1,n2,alone", "train.py", "wait")
    for host in ("n1", "n2", "alone"):
        client.wait_for(f"on {host} attempt 0")
    if how == "killed":
        client.process.kill()
    else:
        wide.cut(wide.controller)
    gone(wide)
    secrets = [
        path for path in wide.folder.glob("hosts/*/home/**/secret") if "laptop" not in str(path)
    ]
    assert not secrets


@pytest.mark.lab
def test_an_example_trains_on_two_hosts_that_share_nothing(run, wide):
    folder = wide.shared / "job"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    client = run("--hosts", "n1,alone", "--nproc-per-node", "1", "train.py", script=None)
    assert client.wait() == 0, client.said
    assert client.said.count("learned") == 9
    gone(wide)

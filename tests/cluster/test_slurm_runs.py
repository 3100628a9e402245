"""`muster run` and `muster submit` on a real Slurm, its nodes in network namespaces of this machine."""

import subprocess
import sys

import pytest

from cluster.slurm import SCRIPT
from kit.command import MUSTER
from kit.waiting import wait_until


@pytest.fixture(autouse=True)
def _script(login):
    login.script(SCRIPT)


ON = ("run", "--on", "slurm", "--nodes", "2", "--nproc-per-node", "2", "--run-id", "r")
SALLOC = ("salloc", "-N2", "--ntasks-per-node=1", *MUSTER)


def test_a_run_trains_on_two_nodes(login):
    done = login(*ON, "--tee", "all", "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4") == 4
    assert "on n1" in done.stdout
    assert "on n2" in done.stdout


def test_a_killed_worker_on_another_node_is_restarted(login):
    done = login(*ON, "train.py", "kill", "3")

    assert done.returncode == 0, done.stderr
    assert "SIGKILL in rank 3 on n2" in done.stderr
    assert "attempt 1" in done.stdout


def test_a_detached_run_is_cancelled(login, slurm_lab):
    assert login(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    login.wait_for("sum 4")

    assert login.state() == "running"
    assert login("cancel", "r").returncode == 0
    assert login.state() == "cancelled"
    for node in ("n1", "n2"):
        wait_until(
            lambda node=node: not _workers(slurm_lab, node), f"the end of the workers on {node}"
        )


def test_a_requeued_job_goes_on_counting_its_attempts(login, slurm_lab):
    assert login(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    login.wait_for("sum 4")

    slurm_lab.run(["scontrol", "requeue", login.job()])

    login.wait_for("attempt 1", attempt=1)
    assert login.state() == "running"
    assert login("cancel", "r").returncode == 0


def _workers(lab, node):
    return [words for words in lab.commands_on(node).values() if b"train.py" in b" ".join(words)]


def test_doctor_in_a_shell_of_salloc_looks_at_the_nodes_of_the_job(login):
    done = login.run([*SALLOC, "doctor", "--seconds", "0.3"], limit_s=120.0)
    assert "this is not a node of job" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["n1", "n2"]
    assert "failure:" not in done.stdout
    assert done.returncode < 2, done.stdout + done.stderr


def test_inside_salloc_the_nodes_of_the_job_are_used(login):
    words = ["run", "--nproc-per-node", "1", "--tee", "all", "train.py"]
    done = login.run([*SALLOC, *words], limit_s=120.0)
    # salloc runs its command on the login node, where nothing may train.
    assert done.returncode == 0, done.stderr
    assert "this is not a node of job" in done.stderr
    where = [line.partition(" attempt ")[2] for line in done.stdout.splitlines() if "sum 2" in line]
    assert sorted(where) == ["0 on n1", "0 on n2"]


def test_a_workflow_of_three_groups_needs_no_client(login):
    (login.folder / "w.yaml").write_text(
        """
workflow:
  name: three
  groups:
  - name: make
    tasks:
    - name: maker
      command: [bash, -c, "echo 7 > {{output}}/n"]
  - name: fit
    tasks:
    - name: training
      nodes: 2
      nproc_per_node: 1
      script: train.py
      inputs: [{task: maker}]
  - name: read
    tasks:
    - name: reader
      command: [bash, -c, "cat {{input:0}}/n; hostname"]
      inputs: [{task: maker}, {task: training}]
"""
    )
    done = login("submit", "w.yaml", "--on", "slurm", "--run-id", "w", "--detach")
    assert done.returncode == 0, done.stderr

    assert login("wait", "w").returncode == 0
    assert "sum 2" in login("logs", "w", "training").stdout
    assert login("logs", "w", "reader").stdout.startswith("7\nn")


@pytest.mark.parametrize("detach", [True, False])
def test_the_job_itself_tells_of_a_killed_worker_and_of_the_end_once(login, detach):
    told, who, script = (login.folder / name for name in ("told", "who", "tell.sh"))
    script.write_text(f'echo "$MUSTER_NOTICE_ID" >> {told}; (hostname; cat) >> {told}\n')
    who.write_text(f"sh {script}\n")
    who.chmod(0o600)

    words = ("--detach",) if detach else ()
    done = login(*ON, *words, "--notify", f"@{who}", "train.py", "kill", "3")

    assert done.returncode == 0, done.stderr
    assert "the job sends to sh" in done.stderr
    wait_until(lambda: told.exists() and "succeeded" in told.read_text(), "the end was told", 60.0)
    lines = told.read_text().splitlines()
    assert [line for line in lines if line.startswith("r/")] == ["r/attempt-0-failed", "r/end-2"]
    assert lines.count("n1") == 2
    assert "SIGKILL in rank 3 on n2" in told.read_text()
    wait_until(lambda: "notify   n1 to sh: 2 sent" in login("status", "r").stdout, "it is counted")


# `--ship-env`: the environment is unpacked into each node's scratch, once for each content.
SHIPPED = """\
import os, sys, here_alone
print("rank", os.environ["RANK"], here_alone.WORD, "in", sys.prefix, os.environ["VIRTUAL_ENV"] == sys.prefix, flush=True)
"""
SHIP = ("run", "--on", "slurm", "--nodes", "2", "--nproc-per-node", "1", "--tee", "all")


@pytest.fixture
def environment(login):
    """Make one with a package that no other has."""
    prefix = login.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (site,) = prefix.glob("lib/python3*/site-packages")
    (site / "here_alone.py").write_text("WORD = 'shipped'\n")
    login.script(SHIPPED)
    (login.folder / "scratch").mkdir()
    # Of a node its own, in a folder that the test sees.
    (login.folder / "muster.toml").write_text(
        f"""[engines.slurm]\nkind = "slurm"\nscratch = "{login.folder}/scratch/$SLURMD_NODENAME"\n"""
        f"""setup = ["mkdir -p {login.folder}/scratch/$SLURMD_NODENAME"]\n"""
    )
    return prefix


def places(login):
    return sorted(
        str(p.parent.relative_to(login.folder / "scratch"))
        for p in login.folder.glob("scratch/*/muster-environments-*/*/env")
    )


def test_a_job_unpacks_it_on_each_node_once_and_runs_in_it(login, environment):
    words = (*SHIP, f"--ship-env={environment}", "train.py")
    done = login(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shipped in") == 2
    assert f"{login.folder}/scratch/n" in done.stdout
    assert done.stdout.count(" True") == 2
    found = places(login)
    assert len(found) == 2
    assert len({place.split("/")[0] for place in found}) == 2
    inodes = [(login.folder / "scratch" / place).stat().st_ino for place in found]

    done = login(*words)
    assert done.returncode == 0, done.stderr
    assert places(login) == found
    assert [(login.folder / "scratch" / place).stat().st_ino for place in found] == inodes


def test_a_node_that_can_t_have_it_ends_the_run_with_the_reason(login, environment):
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "library.so").write_bytes(b"\x7fELF..GLIBC_2.999\0")
    done = login(*SHIP, f"--ship-env={environment}", "train.py")
    assert done.returncode != 0
    assert "needs a newer C library" in done.stderr
    assert "glibc 2.999" in done.stderr
    assert places(login) == []

"""`muster run` and `muster submit` on a real Slurm, its nodes in network namespaces of this machine."""

import json
import sys

import pytest

from kit.command import MUSTER
from kit.waiting import wait_until

SCRIPT = """
import os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
host = os.uname().nodename
os.write(1, f"sum {int(ones.item())} rank {dist.get_rank()} on {host} attempt {attempt}\\n".encode())
if sys.argv[1:] == ["kill"] and attempt == "0" and dist.get_rank() == 3:
    os.kill(os.getpid(), 9)
if sys.argv[1:] == ["wait"]:
    import signal
    signal.pause()
dist.barrier()
"""


@pytest.fixture(autouse=True)
def _script(login):
    login.script(SCRIPT)


ON = ("run", "--on", "slurm", "--nodes", "2", "--nproc-per-node", "2", "--run-id", "r")


def test_a_run_trains_on_two_nodes(login):
    done = login(*ON, "--tee", "all", "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4") == 4
    assert "on n1" in done.stdout
    assert "on n2" in done.stdout


def test_a_killed_worker_on_another_node_is_restarted(login):
    done = login(*ON, "train.py", "kill")

    assert done.returncode == 0, done.stderr
    assert "SIGKILL in rank 3 on n2" in done.stderr
    assert "attempt 1" in done.stdout


def test_a_detached_run_is_cancelled(login, slurm_lab):
    assert login(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    log = login.folder / "home/runs/r/logs/main/train/attempt-0/rank-0.log"
    wait_until(lambda: log.exists() and "sum 4" in log.read_text(), "the first line")

    assert json.loads(login("status", "r", "--json").stdout)["state"] == "running"
    assert login("cancel", "r").returncode == 0
    assert json.loads(login("status", "r", "--json").stdout)["state"] == "cancelled"
    for node in ("n1", "n2"):
        wait_until(
            lambda node=node: not _workers(slurm_lab, node), f"the end of the workers on {node}"
        )


def test_a_requeued_job_goes_on_counting_its_attempts(login, slurm_lab):
    assert login(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    logs = login.folder / "home/runs/r/logs/main/train"
    first, second = (logs / f"attempt-{k}" / "rank-0.log" for k in (0, 1))
    wait_until(lambda: first.exists() and "sum 4" in first.read_text(), "the first line")
    job = json.loads((login.folder / "home/runs/r/job.json").read_text())["job_id"]

    slurm_lab.run(["scontrol", "requeue", job])

    wait_until(
        lambda: second.exists() and "attempt 1" in second.read_text(), "the second life", 100.0
    )
    assert json.loads(login("status", "r", "--json").stdout)["state"] == "running"
    assert login("cancel", "r").returncode == 0


def _workers(lab, node):
    return [words for words in lab.commands_on(node).values() if b"train.py" in b" ".join(words)]


def test_doctor_in_a_shell_of_salloc_looks_at_the_nodes_of_the_job(login, slurm_lab):
    words = ["salloc", "-N2", "--ntasks-per-node=1", *MUSTER]
    words += ["doctor", "--seconds", "0.3"]
    done = slurm_lab.run(words, cwd=str(login.folder), env=login.env, limit_s=120.0)
    assert "this is not a node of job" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["n1", "n2"]
    assert "failure:" not in done.stdout
    assert done.returncode < 2, done.stdout + done.stderr


def test_inside_salloc_the_nodes_of_the_job_are_used(login, slurm_lab):
    done = slurm_lab.run(
        [
            "salloc",
            "-N2",
            "--ntasks-per-node=1",
            sys.executable,
            "-m",
            "torchmuster",
            "run",
            "--nproc-per-node",
            "1",
            "--tee",
            "all",
            "train.py",
        ],
        env=login.env,
        cwd=str(login.folder),
        limit_s=120.0,
    )
    # salloc runs its command on the login node, where nothing may train.
    assert done.returncode == 0, done.stderr
    assert "this is not a node of job" in done.stderr
    assert sorted(line[-13:] for line in done.stdout.splitlines() if "sum 2" in line) == [
        "n1 attempt 0\n".strip().rjust(13),
        "n2 attempt 0\n".strip().rjust(13),
    ]


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
def test_the_job_itself_tells_of_a_killed_worker_and_of_the_end_once(login, slurm_lab, detach):
    told, who, script = (login.folder / name for name in ("told", "who", "tell.sh"))
    script.write_text(f'echo "$MUSTER_NOTICE_ID" >> {told}; (hostname; cat) >> {told}\n')
    who.write_text(f"sh {script}\n")
    who.chmod(0o600)

    words = ("--detach",) if detach else ()
    done = login(*ON, *words, "--notify", f"@{who}", "train.py", "kill")

    assert done.returncode == 0, done.stderr
    assert "the job sends to sh" in done.stderr
    wait_until(lambda: told.exists() and "succeeded" in told.read_text(), "the end was told", 60.0)
    lines = told.read_text().splitlines()
    assert [line for line in lines if line.startswith("r/")] == ["r/attempt-0-failed", "r/end-2"]
    assert lines.count("n1") == 2
    assert "SIGKILL in rank 3 on n2" in told.read_text()
    wait_until(lambda: "notify   n1 to sh: 2 sent" in login("status", "r").stdout, "it is counted")

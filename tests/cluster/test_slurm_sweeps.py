"""`muster sweep --on slurm` on a real Slurm: one job array, whose members fail, are preempted and are cancelled."""

import os
import shutil

import pytest

from kit.waiting import wait_until
from kit.world import MACHINE_PATH

SCRIPT = """
import os, signal, sys
x, attempt = int(os.environ["MUSTER_SWEEP_X"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"x={x} attempt {attempt} loss={x * 10}", flush=True)
if x == 1 and not os.path.exists("mended"):
    raise ValueError("x is 1")
if "wait" in sys.argv and attempt == 0:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def _script(login):
    login.script(SCRIPT)


ON = ("sweep", "--on", "slurm", "--run-id", "s", "--style", "env", "--cpus-per-node", "1")


def jobs_of(login):
    return [array["job_id"] for array in login.read("arrays.json", "s")["arrays"]]


def test_a_sweep_is_one_job_array_and_failed_members_run_again(login):
    done = login(*ON, "train.py", "--grid", "x=0:4", "--metric", "loss", "--slots", "2")

    assert done.returncode == 1, done.stderr
    assert len(jobs_of(login)) == 1
    assert login.states() == ["succeeded", "failed", "succeeded", "succeeded"]
    assert [m["value"] for m in login.status("s")["members"]] == [0.0, 10.0, 20.0, 30.0]
    assert "rank 0 raised ValueError: x is 1" in done.stderr
    assert "x=1 attempt" in login("logs", "s.1").stdout

    (login.folder / "mended").write_text("")
    again = login("restart", "s")
    assert again.returncode == 0, again.stderr
    assert len(jobs_of(login)) == 2
    assert login.states() == ["succeeded"] * 4
    assert login("wait", "s").returncode == 0


@pytest.mark.lab
def test_members_that_are_requeued_or_cancelled(login, slurm_lab):
    done = login(*ON, "--detach", "train.py", "--grid", "x=2,3,4", "--", "wait")
    assert done.stdout == "s\n"
    logs = [
        login.folder / f"home/runs/s/members/s.{n}/logs/main/train/attempt-0/rank-0.log"
        for n in range(3)
    ]
    wait_until(lambda: all(log.exists() and log.read_text() for log in logs), "three members")
    assert login.states() == ["running"] * 3
    (job,) = jobs_of(login)

    slurm_lab.run(["scontrol", "requeue", f"{job}_0"])  # as a preemption does
    slurm_lab.run(["scancel", "--full", f"{job}_1"])
    wait_until(lambda: login.states()[:2] == ["succeeded", "cancelled"], "their ends", limit_s=90)
    assert login.status("s")["members"][0]["attempt"] == 1

    assert login("cancel", "s").returncode == 0
    wait_until(lambda: login.states()[2] == "cancelled", "the end of the last", limit_s=60)


@pytest.mark.lab
def test_a_member_that_a_job_of_more_priority_preempts_comes_back(login, slurm_lab):
    whole = ("--cpus-per-node", "4")
    done = login(*ON[:-2], *whole, "--detach", "train.py", "--grid", "x=2,3", "--", "wait")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: login.states() == ["running"] * 2, "two members")
    wait_until(lambda: len(lines_of(login)) == 2, "their first lines")

    node = (login.folder / "home/runs/s/members/s.0/job.log").read_text().split()[-1]
    urgent = slurm_lab.submit("true", "--partition=urgent", "--exclusive", f"--nodelist={node}")
    slurm_lab.wait_for_job(urgent, "COMPLETED", limit_s=90)
    wait_until(lambda: login.states()[0] == "succeeded", "the end of the preempted", limit_s=120)

    assert [member["attempt"] for member in login.status("s")["members"]] == [1, 0]
    assert login.states()[1] == "running"
    assert login("cancel", "s").returncode == 0
    wait_until(lambda: login.states()[1] == "cancelled", "the other's end", limit_s=60)


def lines_of(login):
    logs = (login.folder / "home/runs/s/members").glob("*/logs/main/train/attempt-0/rank-0.log")
    return [log for log in logs if log.read_text()]


def counting(login):
    """Return a PATH whose commands of Slurm note their calls, and the file of the notes."""
    folder, notes = login.folder / "counting", login.folder / "calls"
    folder.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scontrol"):
        real = shutil.which(name, path=MACHINE_PATH)
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{notes}"\nexec {real} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{MACHINE_PATH}", notes


def test_a_waiting_array_is_one_question(login):
    path, notes = counting(login)
    done = login(
        *ON, "--detach", "train.py", "--grid", "x=0:300", "--slots", "1", "--", "wait", PATH=path
    )
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["scontrol", "sbatch"]
    assert done.returncode == 0, done.stderr
    wait_until(lambda: login.states().count("running") == 1, "the first member")
    notes.write_text("")
    found = login.status("s", PATH=path)["members"]
    assert [member["state"] for member in found].count("waiting") == 299
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["squeue"]
    members = login.folder / "home/runs/s/members"  # each makes its own when its job begins
    wait_until(lambda: os.listdir(members) == ["s.0"], "the folder of the first member alone")
    assert login("cancel", "s", "--now").returncode in (0, 1)
    wait_until(lambda: set(login.states()) == {"cancelled"}, "the end of all", limit_s=60)

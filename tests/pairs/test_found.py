"""What broke where two features meet, by the commands that broke it."""

import json
import os
import re
import signal
import subprocess

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until
from pairs.conftest import SCRIPT


def test_a_replay_is_not_restarted_and_the_restarted_run_keeps_its_name(user):
    user(
        "run",
        "--name",
        "base",
        "--max-restarts",
        "0",
        SCRIPT,
        "--epochs",
        "2",
        "--die-at",
        "7",
        code=1,
    )
    user("replay", "base", "--step", "7", "--no-debugger", code=0)
    refused = user("restart", "last", code=2)
    (first,) = user.run_dirs("*-base-*")
    name = first.name.split("-", 2)[2]
    assert f"hint: muster restart {name}\n" in refused.stderr
    assert re.search(rf"^replay-.* replay of {name}, step 7 *$", user("ps").stdout, re.MULTILINE)

    again = user("restart", "base", code=1)

    assert "resuming after step 6" in again.stderr
    first, second = user.run_dirs("*-base-*")
    assert user("status", "base").stdout.split()[1] == second.name.split("-", 2)[2]


def test_a_session_is_not_restarted(user):
    user("session", "start", "--name", "S", code=0)
    user("session", "end", "S", code=0)

    refused = user("restart", "last", code=2)

    assert "is a session" in refused.stderr
    assert "hint: muster session start\n" in refused.stderr
    assert len(user.run_dirs()) == 1


WORKFLOW = """
workflow:
  name: pipe
  tasks:
  - name: train
    image: none
    script: SCRIPT
    args: ["--nan-at", "3", "--on-nan", "replay"]
    max_restarts: 0
"""


def test_the_training_of_a_task_has_names_that_commands_take(user):
    (user.folder / "w.yaml").write_text(WORKFLOW.replace("SCRIPT", SCRIPT))
    failed = user("submit", "w.yaml", code=1)
    hint = re.search(r"`muster (replay \S+ --step 4)`", failed.stderr)[1].split()
    (pipe,) = user.run_dirs()
    name = pipe.name.split("-", 2)[2]

    for words in (hint, ["replay", f"{name}/train", "--step", "4"]):
        replayed = user(*words, "--no-debugger", code=1)
        assert "the gradients of all ranks are those of the run, bit for bit" in replayed.stderr
    asked = user("replay", name, "--step", "4", code=2)
    assert f"hint: muster replay {name}/TASK --step N" in asked.stderr
    assert "state    failed" in user("status", f"{name}/train", code=0).stdout
    goes_on = re.search(
        r"continue with: muster (restart \S+)", user("status", f"{name}/train").stdout
    )
    again = user(*goes_on[1].split(), code=1)
    assert f"is a part of {name}, which goes on" in again.stderr
    assert "there is no run" not in again.stderr
    wrong = user("status", f"{name}/trian", code=4)
    assert "has no training of a task `trian`" in wrong.stderr
    assert "did you mean `train`?" in wrong.stderr


def test_a_word_that_names_two_sweeps_names_no_member_of_one(user):
    for _ in range(2):
        user("sweep", SCRIPT, "--grid", "lr=0.1", "--metric", "loss", "--name", "tw", code=0)

    refused = user("logs", "tw.0", code=4)

    assert "`tw` names 2 runs" in refused.stderr


def test_a_member_that_is_one_process_has_no_head_and_that_is_said(user):
    words = (
        "sweep",
        SCRIPT,
        "--grid",
        "lr=0.1",
        "--name",
        "k",
        "--",
        "--sleep",
        "0.5",
        "--epochs",
        "9",
    )
    with user.popen(*words, stderr=subprocess.DEVNULL) as sweep:
        (path,) = wait_until(lambda: user.run_dirs("*-k-*"), "the sweep")

        def records():
            return [one.read_text() for one in path.glob("members/*/events.jsonl")]

        wait_until(lambda: any("worker_process" in text for text in records()), "its process")
        asked = user("exec", "k.0", "--", "true")
        assert "is a single process of a sweep, which has no head" in asked.stderr
        hint = re.search(r"hint: muster (stacks \S+); muster (logs \S+)", asked.stderr)
        for command in hint.groups():
            user(*command.split(), code=0)
        sweep.terminate()


def test_a_member_goes_on_as_a_part_of_its_sweep(user):
    words = ("sweep", SCRIPT, "--grid", "lr=0.1,0.2", "--metric", "loss", "--name", "k")
    user(*words, "--", "--die-at", "4", code=1)

    again = user("restart", "k.1", code=0)

    (sweep,) = user.run_dirs()
    assert f"k-{sweep.name[-4:]}.1 is a part of k-{sweep.name[-4:]}, which goes on" in again.stderr
    assert "2 succeeded" in again.stderr


def test_a_hang_is_seen_while_another_rank_waits_in_the_save(user):
    words = ("run", "--nproc-per-node", "2", "--hang-timeout", "4s", "--max-restarts", "0")
    script = (
        "--epochs",
        "2",
        "--every",
        "2",
        "--die-at",
        "6",
        "--die-rank",
        "1",
        "--how",
        "hang",
        "--place",
        "behind",
    )

    ended = user(*words, SCRIPT, *script, limit_s=90)

    assert ended.returncode != 0
    assert "rank 1 stood still for" in ended.stderr
    assert "while 1 rank waited in" in ended.stderr, ended.stderr


RULE = """
class Second:
    def __init__(self, metric):
        pass

    def report(self, member, step, value):
        return member == 1

    def ended(self, member, succeeded):
        pass
"""
HELD = """
import pathlib, sys, time
pathlib.Path("held").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def session(user):
    user("session", "start", "--name", "S", code=0)
    yield user
    user("session", "end", "S")


def test_members_wait_for_another_run_in_their_session(session):
    (session.folder / "held.py").write_text(HELD)
    words = ("--session", "S", SCRIPT, "--grid", "lr=0.1,0.2,0.3", "--metric", "loss")
    with session.popen("run", "--session", "S", "held.py") as other:
        wait_until((session.folder / "held").exists, "the other run")
        with session.popen("sweep", *words, "--name", "sw", stderr=subprocess.PIPE) as sweep:
            said = next(line for line in sweep.stderr if "is busy" in line)
            refused = session("run", "--session", "S", "held.py", code=2)
            assert "error: the session S is busy" in refused.stderr
            assert session("status", "last").stdout.startswith("sweep ")
            assert session("ps").stdout.count("held.py") == 1
            assert "the sweep goes on when that has ended" in said
            shown = session("status", "sw").stdout
            assert "failed" not in shown
            (session.folder / "go").touch()
            rest = sweep.stderr.read()
        assert (other.wait(), sweep.returncode) == (0, 0), rest
    assert "3 succeeded" in rest
    assert "failed" not in rest


def test_the_rest_of_a_sweep_waits_when_its_session_has_ended(session):
    words = ("--session", "S", SCRIPT, "--grid", "lr=0.1,0.2,0.3", "--metric", "loss")
    script = ("--", "--sleep", "0.2", "--epochs", "2")
    with session.popen("sweep", *words, "--name", "sw", *script, stderr=subprocess.PIPE) as sweep:
        wait_until(session.trained, "a member that trains")
        (held,) = session.run_dirs("*-session-S-*")
        os.kill(json.loads((held / "owner.json").read_text())["pid"], signal.SIGTERM)
        said = sweep.stderr.read()
    assert sweep.returncode == 75, said
    assert "the session S has ended" in said
    assert "no slot of the sweep is left" in said
    table = session("status", "sw").stdout
    assert len(re.findall(r"^[12] +waiting", table, re.MULTILINE)) == 2, table

    refused = session("restart", "sw", code=4)
    assert "the session S has ended" in refused.stderr
    session("session", "start", "--name", "S", code=0)
    again = session("restart", "sw", code=0, limit_s=170)
    assert "3 succeeded" in again.stderr


def test_a_member_of_two_workers_that_a_rule_has_ended_is_stopped(user):
    (user.folder / "rules.py").write_text(RULE)
    words = ("--nproc-per-node", "2", "--grid", "lr=0.1,0.2", "--metric", "loss", "--name", "stp")
    script = ("--", "--epochs", "4", "--sleep", "0.1", "--every", "2")

    ended = user("sweep", *words, "--slots", "1", "--stop", "rules:Second", SCRIPT, *script, code=0)

    assert "1 succeeded, 1 stopped" in ended.stderr
    shown = user("status", "stp.1", code=0).stdout
    assert "state    stopped" in shown
    assert "the sweep stopped this member early" in shown
    assert "muster restart" not in shown
    assert "the system asked" not in shown


def test_live_commands_reach_what_torchrun_has_started_and_its_hint_works(user):
    script = (SCRIPT, "--epochs", "30", "--sleep", "0.3")
    with user.popen("torchrun", "--nproc-per-node", "2", *script, stderr=subprocess.PIPE) as run:
        (run_dir,) = wait_until(user.run_dirs, "the run")
        wait_until(user.trained, "its training")

        assert "rank 0 on " in (shown := user("stacks", "last", code=0).stdout)
        assert "rank 1 on " in shown
        assert user("exec", "last", "--", "echo", "hi", code=0).stdout == "hi\n"
        assert re.search(r"^ +1 ", user("top", "last", "--once", code=0).stdout, re.MULTILINE)
        for name in ("head.json", "secret"):
            assert (run_dir / name).stat().st_mode & 0o777 == 0o600
        user("cancel", "last", code=0)
        said = run.stderr.read()
    assert run.returncode == 143, said
    saved, name = re.search(
        r"saved at step (\d+); continue with: muster restart (\S+)", said
    ).groups()
    with user.popen("restart", name, stderr=subprocess.PIPE) as again:
        next(line for line in again.stderr if f"resuming after step {saved} " in line)
        again.terminate()
        again.stderr.read()


def test_an_option_that_does_nothing_is_said(user):
    (user.folder / "t.py").write_text("print('loss=1')\n")
    grid = ("t.py", "--grid", "lr=0.1")
    local = user("sweep", *grid, "--time", "1m", "--partition", "x", "--per-gpu", "2", code=0)
    assert "muster: ignored: --time, --partition: this run is not a scheduler's job" in local.stderr
    assert "muster: ignored: --per-gpu: no GPU is visible here" in local.stderr
    grown = user("run", "--grow", "--nodes", "1", "t.py", code=0)
    assert "muster: ignored: --grow: the number of nodes is fixed" in grown.stderr
    fresh = user("run", "--start", "fresh", "--preload", "nosuch", "t.py", code=0)
    assert "muster: ignored: --preload: a fresh interpreter imports" in fresh.stderr


def test_a_workflow_whose_owner_was_killed_has_lasted_as_long_as_its_training(user):
    text = WORKFLOW.replace("SCRIPT", SCRIPT)
    args = '["--epochs", "9", "--sleep", "0.2", "--every", "2"]'
    (user.folder / "w.yaml").write_text(re.sub(r"args: .*", f"args: {args}", text))
    with user.popen("submit", "w.yaml", stderr=subprocess.DEVNULL) as submit:
        (pipe,) = wait_until(user.run_dirs, "the workflow")
        records = "tasks/train/training/attempt-0/*/training.jsonl"
        wait_until(lambda: any('"step": 16' in p.read_text() for p in pipe.glob(records)), "steps")
        submit.kill()
    words = r"last heard of after (\d+\.\d) s"
    lasted = wait_until(lambda: re.search(words, user("status", "last").stdout), "the word on it")
    assert float(lasted[1]) >= 16 * 0.2


def test_a_torchrun_of_two_machines_is_continued_by_its_own_lines(user):
    endpoint = f"localhost:{reserve_port()}"
    words = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    words = ("torchrun", *words, SCRIPT, "--epochs", "30", "--sleep", "0.3")
    one, other = (user.popen(*words, stderr=subprocess.PIPE) for _ in range(2))
    with one, other:
        wait_until(user.trained, "its training")
        for command in (one, other):
            command.terminate()
        said = one.stderr.read() + other.stderr.read()
    assert "it is saved, exit code 75: start it again to continue" in said
    assert "muster restart" not in said

"""Stopping: what reaches the workers, how often, and what is left."""

import json
import os
import signal

import pytest

from kit.command import MUSTER, insist, muster_env, run_muster
from kit.screen import TerminalOf
from kit.waiting import LIMIT_S, wait_until
from torchmuster.core import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")


@pytest.mark.short
def test_ctrl_c_reaches_every_worker_once_and_ends_the_run(job):
    run = job().write(
        "import os, signal, sys, time\n"
        "import torch\n"
        "rank, folder = os.environ['RANK'], sys.argv[1]\n"
        "caught = []\n"
        "def note(signum, frame):\n"
        "    caught.append(signum)\n"
        "    open(f'{folder}/caught-{rank}-{len(caught)}', 'w').close()\n"
        "signal.signal(signal.SIGINT, note)\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGINT, lambda *_: open(f'{folder}/child-{rank}', 'w').close())\n"
        "    open(f'{folder}/ready-{rank}', 'w').close()\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "while not os.path.exists(f'{folder}/stop'):\n"
        "    time.sleep(0.01)\n"
        "os._exit(75)\n"
    )
    run.start()
    wait_until(lambda: len(list(run.folder.glob("ready-*"))) == 4, "all workers")
    os.kill(run.process.pid, signal.SIGINT)
    wait_until(lambda: len(list(run.folder.glob("caught-*-1"))) == 4, "the signal in all workers")
    assert run.finish() == 130
    assert not list(run.folder.glob("caught-*-2"))
    assert not list(run.folder.glob("child-*"))  # a loader worker does not get it
    assert run.result()["state"] == "cancelled"
    assert "continues from the last save" in run.result()["report"]["hint"]


def test_a_stop_while_workers_are_being_started_waits_for_no_grace(job):
    run = job("--grace", "3600s").write("import time, torch\ntime.sleep(3600)\n").start()
    run.wait_event("attempt_started")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.finish() == 143


def test_a_background_job_that_ignores_sigint_is_stopped_all_the_same(job):
    """A shell without job control starts `muster run ... &` with SIGINT ignored, and workers inherit that."""
    run = job("--grace", "60s")
    text = "import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(120)\n"
    run.write(text, str(run.folder / "ready"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run.start()
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until((run.folder / "ready").exists, "a worker")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.finish() == 143
    assert run.result()["report"]["because"] == ["you cancelled it"]


@pytest.mark.parametrize(
    ("command", "options"),
    [("run", ("--grace", "3600")), ("torchrun", ("--standalone",))],
    ids=["run", "torchrun"],
)
def test_a_second_ctrl_c_cuts_the_grace_short(job, command, options):
    run = job(*options, command=command).write(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: open(f'{sys.argv[1]}/caught', 'w').close())\n"
        "open(f'{sys.argv[1]}/ready', 'w').close()\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
    )
    run.start()
    wait_until((run.folder / "ready").exists, "the worker")
    os.kill(run.process.pid, signal.SIGINT)
    wait_until((run.folder / "caught").exists, "the first signal")
    insist(run.process)
    assert run.wait() == 130
    assert run.result()["state"] == "cancelled"


def test_workers_that_ignore_a_stop_are_killed_after_the_grace(job):
    run = job("--nodes", "2", "--nproc-per-node", "2", "--grace", "1").start()
    first = run.wait_up(0)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(25.0) == 128 + signal.SIGTERM  # a second; if nothing is said the grace is 30 s
    assert not any(proc.is_running(pid) for pid, _ in first.values())


def test_sigterm_and_code_75_mean_preempted(job):
    run = job()
    run.folder.mkdir()
    (run.folder / "catch").touch()
    run.start()
    run.wait_up(0)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 75
    assert run.result()["state"] == "preempted"
    assert len(list(run.folder.glob("caught-SIGTERM-*"))) == 4


def test_sigusr1_reaches_only_workers_that_catch_it(job):
    run = job().start()
    run.wait_up(0)
    os.kill(run.process.pid, signal.SIGUSR1)  # its default action would end a worker
    (run.folder / "catch").touch()
    run.order(0, "kill")
    run.wait_up(1)
    wait_until(
        lambda: all(proc.catches_signal(p, signal.SIGUSR1) for p, _ in run.up(1).values()),
        "the handlers",
    )
    os.kill(run.process.pid, signal.SIGUSR1)
    wait_until(lambda: len(list(run.folder.glob("caught-SIGUSR1-*"))) == 4, "the signal")
    assert run.finish() == 0
    assert len(run.events("attempt_failed")) == 1


def test_cancel_from_another_terminal_stops_the_run(job):
    run = job("--nodes", "2", "--nproc-per-node", "2", "--grace", "1").start()
    run.wait_up(0)
    done = muster(run, "cancel", "last")
    assert done.returncode == 0, done.stderr
    assert run.wait() == 128 + signal.SIGTERM
    assert "cancelled after" in done.stderr


def muster(run, *words):
    return run_muster(*words, env=muster_env(run.home), limit_s=60)


def begin_detached(job, *options):
    """Start a run that goes on without its client, named `away`; it is no child of that."""
    run = job("--detach", "--run-id", "away", *options).start()
    assert run.wait() == 0
    run.process = None
    return run


def test_detach_returns_at_once_and_the_run_goes_on(job):
    run = begin_detached(job, "--nodes", "2", "--nproc-per-node", "2")
    assert run.stdout.strip() == "away"
    wait_until(lambda: len(run.up(0)) == 4, "the workers")
    assert muster(run, "status", "away").stdout.count("running") == 1
    os.kill(run.up(0)[3][0], signal.SIGKILL)
    wait_until(lambda: len(run.up(1)) == 4, "the next attempt")
    run.stop_workers()
    waited = muster(run, "wait", "away")
    assert waited.returncode == 0, waited.stderr
    assert "succeeded" in waited.stderr
    logs = muster(run, "logs", "away", "--rank", "2", "--attempt", "0")
    assert logs.stdout.startswith("rank 2 is up\n")
    assert "away" in muster(run, "ps").stdout


def test_killing_a_detached_supervisor_ends_the_run(job):
    run = begin_detached(job)
    wait_until(lambda: len(run.up(0)) == 1, "the worker")
    owner = json.loads((run.run_dir / "owner.json").read_text())["pid"]
    os.kill(owner, signal.SIGKILL)
    worker = run.up(0)[0][0]
    wait_until(lambda: not proc.is_running(worker), "the end of the worker")
    wait_until(lambda: "lost" in muster(run, "ps").stdout, "the state")
    waited = muster(run, "wait", "away")
    assert waited.returncode == 1
    assert "has no result and its owner has gone" in waited.stderr


def test_breakpoint_works_on_a_terminal_and_holds_restarts(tmp_path):
    script = tmp_path / "debug.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    answer = 40\n"
        "    breakpoint()\n"
        "    print('went on with', answer, flush=True)\n"
        "else:\n"
        "    while not os.path.exists(sys.argv[1]):\n"
        "        time.sleep(0.01)\n"
        "    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os._exit(9)\n"
    )
    gate = tmp_path / "gate"
    argv = [*MUSTER, "run", "--nproc-per-node", "2", str(script), str(gate)]
    env = muster_env(tmp_path / "home", TERM="xterm")
    with TerminalOf(argv, env, columns=120, rows=60) as screen:
        screen.wait_for("(Pdb)", limit_s=LIMIT_S)
        screen.press("answer += 2\n")
        screen.wait_for("answer += 2\n(Pdb)", limit_s=LIMIT_S)
        gate.touch()  # the other rank fails while we debug
        screen.wait_for("the restart waits for it", limit_s=LIMIT_S)
        screen.press("p answer\n")
        screen.wait_for("42", limit_s=LIMIT_S)
        screen.press("c\n")
        screen.wait_for("attempt 1: 2 workers", limit_s=LIMIT_S)
        screen.press("p 1000 + answer\n")
        screen.wait_for("1040", limit_s=LIMIT_S)  # of the next attempt
        screen.press("c\n")
        screen.wait_for("succeeded", limit_s=LIMIT_S)
        assert screen.wait_for_end(limit_s=60) == 0

"""Stopping: what reaches the workers, how often, and what is left."""

import contextlib
import os
import pty
import signal
import subprocess

import pytest
from harness import LOOP

from kit.command import MUSTER, insist, muster_env, run_muster
from kit.waiting import wait_until
from torchmuster.core import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")


@pytest.mark.short
def test_ctrl_c_reaches_every_worker_once_and_ends_the_run(job, tmp_path):
    script = tmp_path / "count.py"
    script.write_text(
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
    run = job()
    run.script = (str(script), str(run.folder))
    run.start()
    wait_until(lambda: len(list(run.folder.glob("ready-*"))) == 4, "all workers")
    os.kill(run.process.pid, signal.SIGINT)
    wait_until(lambda: len(list(run.folder.glob("caught-*-1"))) == 4, "the signal in all workers")
    assert run.finish() == 130
    assert not list(run.folder.glob("caught-*-2"))
    assert not list(run.folder.glob("child-*"))  # a loader worker does not get it
    assert run.result()["state"] == "cancelled"
    assert "continues from the last save" in run.result()["report"]["hint"]


def test_a_stop_while_workers_are_being_started_waits_for_no_grace(job, tmp_path):
    script = tmp_path / "long.py"
    script.write_text("import time, torch\ntime.sleep(3600)\n")
    run = job("--grace", "3600s")
    run.script = (str(script),)
    run.start()
    run.wait_event("attempt_started")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.finish() == 143


def test_a_background_job_that_ignores_sigint_is_stopped_all_the_same(job, tmp_path):
    """A shell without job control starts `muster run ... &` with SIGINT ignored, and workers inherit that."""
    script = tmp_path / "long.py"
    script.write_text("import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(120)\n")
    run = job("--grace", "60s")
    run.script = (str(script), str(run.folder / "ready"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run.start()
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until((run.folder / "ready").exists, "a worker")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.finish() == 143
    assert run.result()["report"]["because"] == ["you cancelled it"]


def test_a_second_ctrl_c_cuts_the_grace_short(job, tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: open(f'{sys.argv[1]}/caught', 'w').close())\n"
        "open(f'{sys.argv[1]}/ready', 'w').close()\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
    )
    run = job("--grace", "3600")
    run.script = (str(script), str(run.folder))
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
    run = job()
    run.folder.mkdir()
    run.start()
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
    return run_muster(*words, env=muster_env(run.home), limit_s=60)  # fmt: skip


def test_detach_returns_at_once_and_the_run_goes_on(job, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    run = job("--detach", "--run-id", "away", "--nodes", "2", "--nproc-per-node", "2")
    run.script = (LOOP, str(folder))
    run.start()
    assert run.wait() == 0
    assert run.stdout.strip() == "away"
    run.process = None  # it is gone; the supervisor is not its child any more
    run.folder = folder
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


def test_killing_a_detached_supervisor_ends_the_run(job, tmp_path):
    import json

    folder = tmp_path / "job"
    folder.mkdir()
    run = job("--detach", "--run-id", "away")
    run.script = (LOOP, str(folder))
    run.start()
    assert run.wait() == 0
    run.process, run.folder = None, folder
    wait_until(lambda: len(run.up(0)) == 1, "the worker")
    owner = json.loads((run.run_dir / "owner.json").read_text())["pid"]
    os.kill(owner, signal.SIGKILL)
    worker = run.up(0)[0][0]
    wait_until(lambda: not proc.is_running(worker), "the end of the worker")
    wait_until(lambda: "lost" in muster(run, "ps").stdout, "the state")
    waited = muster(run, "wait", "away")
    assert waited.returncode == 1
    assert "has no result and its owner has gone" in waited.stderr


def test_breakpoint_works_on_a_terminal_and_holds_restarts(job, tmp_path):
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
    master, slave = pty.openpty()
    argv = [*MUSTER, "run", "--nproc-per-node", "2"]
    argv += [str(script), str(gate)]
    client = subprocess.Popen(
        argv, env=muster_env(tmp_path / "home"), stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=lambda: set_terminal(slave),  # noqa: PLW1509 - no threads here
    )  # fmt: skip
    os.close(slave)
    seen = Screen(master)
    try:
        seen.wait_for("(Pdb) ")
        os.write(master, b"answer += 2\n")
        seen.wait_for("(Pdb) ", times=2)
        gate.touch()  # the other rank fails while we debug
        seen.wait_for("the restart waits for it")
        os.write(master, b"p answer\n")
        seen.wait_for("42")
        os.write(master, b"c\n")
        seen.wait_for("attempt 1: 2 workers")
        seen.wait_for("(Pdb) ", times=4)
        os.write(master, b"c\n")
        seen.wait_for("succeeded")
        assert client.wait(60) == 0
    finally:
        client.kill()
        client.wait()
        os.close(master)


def set_terminal(fd):
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


class Screen:
    """What a pseudo-terminal has shown so far."""

    def __init__(self, fd):
        self.fd, self.text = fd, ""
        os.set_blocking(fd, False)

    def wait_for(self, words, times=1):
        def condition():
            with contextlib.suppress(OSError):
                self.text += os.read(self.fd, 65536).decode()
            return self.text.count(words) >= times

        try:
            wait_until(condition, f"{words!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None

"""Random kills, one after another and two at a time, in one run; MUSTER_CHAOS=100 is the long form (`make chaos`)."""

import contextlib
import os
import random
import signal
import threading

import pytest

from kit.waiting import wait_until
from torchmuster.core import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")

VICTIMS = ("worker", "worker", "worker", "agent", "spawner", "store", "head")


def throw():
    seed = int(os.environ.get("MUSTER_CHAOS_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"MUSTER_CHAOS_SEED={seed}")
    return random.Random(seed)


def test_chaos_never_ends_a_run(job):
    num_kills, dice = int(os.environ.get("MUSTER_CHAOS", "4")), throw()
    run = job("--nodes", "2", "--nproc-per-node", "2", "--max-restarts", "1000").start()
    attempt = 0
    for _ in range(num_kills):
        ranks = run.wait_up(attempt)
        # All spawners must have said that their workers are up before a pid can be looked up.
        run.wait_event("workers_started", num=attempt + 1)
        victim = dice.choice(VICTIMS)
        pid = find(run, victim, ranks, dice)
        print(f"attempt {attempt}: SIGKILL to {victim} {pid}")
        os.kill(pid, signal.SIGKILL)
        attempt += 1
        run.wait_up(attempt)
        assert not any(proc.is_running(old) for old, _ in ranks.values())
    assert run.finish() == 0
    assert run.result()["state"] == "succeeded"
    assert [e["attempt"] for e in run.events("attempt_started")] == list(range(attempt + 1))


def test_chaos_of_two_faults_within_three_seconds_never_ends_a_run(job):
    num_schedules, dice = int(os.environ.get("MUSTER_CHAOS", "2")), throw()
    run = job("--nodes", "2", "--nproc-per-node", "2", "--max-restarts", "1000").start()
    attempt, num_killed = settle(run, 0), 0
    for number in range(num_schedules):
        before = num_killed
        for pause_s in (0.0, dice.uniform(0.0, 3.0)):
            threading.Event().wait(pause_s)
            num_killed += hurt(run, attempt, number, dice)
        attempt = settle(run, attempt + (num_killed > before))
    assert run.finish() == 0
    assert run.result()["state"] == "succeeded"
    attempts = [e["attempt"] for e in run.events("attempt_started")]
    assert attempts == list(range(len(attempts)))
    # The second kill of a schedule may end an attempt that stood when `settle` looked at it.
    assert attempt < len(attempts) <= 1 + num_killed


def test_chaos_of_two_faults_in_the_first_seconds_never_ends_a_run(job):
    dice = throw()
    for number in range(int(os.environ.get("MUSTER_CHAOS", "1"))):
        run = job("--nodes", "3", "--nproc-per-node", "1", "--max-restarts", "1000").start()
        killed = []
        for pause_s in (dice.uniform(0.2, 2.0), dice.uniform(0.0, 3.0)):
            threading.Event().wait(pause_s)
            if pids := run.all_pids():  # whatever they are
                killed.append(dice.choice(sorted(pids)))
                proc.kill_quietly(killed[-1], dice.choice((signal.SIGKILL, signal.SIGSEGV)))
        print(f"{number}: {killed}, {[proc.is_running(pid) for pid in killed]}")
        settle(run, 0, num=3)
        assert run.finish() == 0
        assert run.result()["state"] == "succeeded"


def hurt(run, attempt, number, dice):
    """Kill or stop a process of the run, if it is there at this moment; say whether one was killed."""
    victim, stop_s = dice.choice(VICTIMS), dice.choice((None, None, None, dice.uniform(0.2, 3.0)))
    rest = dice.random()
    try:
        pid = find(run, victim, run.up(attempt), random.Random(rest))
    except (IndexError, ValueError, OSError):
        return False  # the first fault has taken it away
    print(
        f"{number}: attempt {attempt}: {f'SIGSTOP {stop_s:.1f} s' if stop_s else 'SIGKILL'} to {victim} {pid}"
    )
    if stop_s is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False
    proc.kill_quietly(pid, signal.SIGSTOP)
    threading.Timer(stop_s, proc.kill_quietly, (pid, signal.SIGCONT)).start()
    return False


def settle(run, least, num=4):
    """Return the newest attempt, at least `least`, once its ranks have reduced and are the only ones that live."""

    def newest():
        assert run.process.poll() is None, f"it ended: {run.process.returncode}\n{run.stderr}"
        started = [event["attempt"] for event in run.events("attempt_started")]
        if not started or started[-1] < least:
            return None
        is_known = any(e["attempt"] == started[-1] for e in run.events("workers_started"))
        alive = [pid for pid, _ in run.up(started[-1]).values() if proc.is_running(pid)]
        return (started[-1],) if is_known and len(alive) == num else None

    (attempt,) = wait_until(newest, f"an attempt from {least}\n{run.tell()}", 120.0)
    old = (pid for before in range(attempt) for pid, _ in run.up(before).values())
    assert not any(proc.is_running(pid) for pid in old)
    return attempt


def find(run, victim, ranks, dice):
    match victim:
        case "worker":
            return dice.choice(sorted(ranks.values()))[0]
        case "agent":
            return run.agent_pid("n2")
        case "head":
            return run.agent_pid("n1")
        case "spawner":
            return run.spawner_pid(dice.choice(["n1", "n2"]))
        case "store":
            return run.store_pid()
    raise ValueError(victim)

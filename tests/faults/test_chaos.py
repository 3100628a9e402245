"""Random kills, one after another, in one run; MUSTER_CHAOS=100 is the long form (`make chaos`)."""

import os
import random
import signal

import pytest

from torchmuster import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")

VICTIMS = ("worker", "worker", "worker", "agent", "spawner", "store", "head")


def test_chaos_never_ends_a_run(job):
    num_kills = int(os.environ.get("MUSTER_CHAOS", "4"))
    seed = int(os.environ.get("MUSTER_CHAOS_SEED", random.SystemRandom().randrange(1 << 30)))
    dice = random.Random(seed)
    print(f"MUSTER_CHAOS_SEED={seed}")
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

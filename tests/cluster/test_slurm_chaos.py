"""Two random faults within three seconds in a job of a real Slurm; MUSTER_CHAOS=100 is the long form."""

import os
import random
import signal
import threading

import pytest

from cluster.conftest import login_to
from cluster.test_slurm_succession import WAIT, beats, begin, end_of, pause
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = [pytest.mark.netns, pytest.mark.lab, pytest.mark.timeout(0)]


def test_two_faults_within_three_seconds_end_no_run(slurm_lab):
    seed = int(os.environ.get("MUSTER_CHAOS_SEED", random.SystemRandom().randrange(1 << 30)))
    for number in range(int(os.environ.get("MUSTER_CHAOS", "2"))):
        dice = random.Random(seed + number)
        print(f"MUSTER_CHAOS_SEED={seed + number} MUSTER_CHAOS=1", flush=True)
        survive(login_to(slurm_lab), slurm_lab, dice)
        slurm_lab.reset()


def survive(login, lab, dice):
    """Begin a run of three nodes that may shrink to one, hurt it twice, and see it train again and end."""
    (login.folder / "train.py").write_text(WAIT)
    begin(login, "--nodes", "1:3", "--max-restarts", "20", "train.py")
    wait_until(lambda: beats(login, 0), "the first attempt", 90.0)
    healing, nodes = [], list(lab.nodes)
    for pause_s in (0.0, dice.uniform(0.0, 3.0)):
        threading.Event().wait(pause_s)
        node, fault = dice.choice(nodes), dice.choice(("kill", "kill", "stop", "link", "power"))
        print(fault, node, flush=True)
        if fault == "power":
            lab.kill_node(node, unplug=True)
            nodes.remove(node)
        elif fault == "kill":
            kill_one(lab, node, dice)
        else:
            healing.append(hurt_for_a_while(lab, node, fault, dice.uniform(0.5, 8.0)))
    for timer in healing:
        timer.join()
    before = len(all_beats(login))
    wait_until(lambda: len(all_beats(login)) > before + 20, "training that goes on", 180.0)
    for attempt in range(40):
        (login.folder / f"go-{attempt}").touch()
    result = end_of(login)
    assert result["state"] == "succeeded", result


def all_beats(login):
    return [line for attempt in range(40) for line in beats(login, attempt)]


def kill_one(lab, node, dice):
    """Kill an agent, its spawner or a worker; the script of the job is Slurm's to end."""
    found = []
    for pid, (name, *more) in lab.commands_on(node).items():
        words = b" ".join([name, *more])
        if (b"torchmuster" in words or b"train.py" in words) and b"conduct" not in words:
            found += [pid] * (b"slurm" not in name and b"srun" not in words)
    if found:
        os.kill(dice.choice(sorted(found)), signal.SIGKILL)


def hurt_for_a_while(lab, node, fault, for_s):
    """Stop all processes of a node, or cut its link, and return the timer that heals it."""

    def heal():
        if fault == "stop":
            pause(lab, node, signal.SIGCONT)
        else:
            lab.set_link(node, "up")

    if fault == "stop":
        pause(lab, node, signal.SIGSTOP)
    else:
        lab.set_link(node, "down")
    timer = threading.Timer(for_s, heal)
    timer.start()
    return timer

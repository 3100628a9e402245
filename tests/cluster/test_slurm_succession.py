"""The first node of a job on a real Slurm loses its power, stands still, or is cut off: another one becomes the head."""

import contextlib
import json
import os
import random
import re
import signal
import threading
from pathlib import Path

import pytest

from cluster.conftest import LabUser, need_slurm
from cluster.slurm_lab import SlurmLab
from cluster.test_chains import CHAIN_SCRIPT
from cluster.test_slurm_ends import left_on
from kit.command import MUSTER
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns
EXACT = Path(__file__).parents[1] / "train" / "exact_script.py"
ON = ("run", "--on", "slurm", "--run-id", "r", "--detach")
APART = ("out", "--apart", "--norm", "--every", "1000")
# Each attempt says where it is, and ends when there is a file.
WAIT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
while True:
    goes = torch.tensor(float(os.path.exists(f"go-{attempt}")))
    dist.all_reduce(goes)  # all leave in the same turn: who saw the file first would wait in another collective
    if goes > 0:
        break
    if rank == 0:
        with open(f"beat-{attempt}-{os.uname().nodename}", "a") as file:
            file.write(f"{time.time()} {dist.get_world_size()}\\n")
    time.sleep(0.05)
dist.barrier()
"""
HELD = 12  # the step at which the first attempt waits


def test_a_head_that_loses_its_power_costs_no_step_and_no_disk(login, slurm_lab):
    text = EXACT.read_text()
    login.script(held(text))
    (login.folder / "quiet").mkdir()
    (login.folder / "out").mkdir()
    begin(login, "--nodes", "2", "--spares", "1", *("train.py", *APART, "--memory", "1"))
    wait_until(lambda: len(list(login.folder.glob("held-*"))) == 2, "the held step")

    slurm_lab.kill_node("n1", unplug=True)

    result = end_of(login)
    assert result["state"] == "succeeded", result
    assert (result["attempts"], result["restarts_spent"]) == (2, 1)
    said = login.log(attempt=1).read_text()
    found = re.search(r"resuming after step (\d+) \(epoch \d\) from the memory", said)
    assert int(found[1]) in (HELD - 1, HELD), said
    quiet = ["run", "--here", "--nodes", "2", "train.py", "quiet", *APART[1:]]
    assert login(*quiet, MUSTER_HOME=str(login.folder / "other")).returncode == 0
    for rank in (0, 1):
        assert weights(login.folder / "out", rank) == weights(login.folder / "quiet", rank)
        assert losses(login.folder / "out", rank) == losses(login.folder / "quiet", rank)
    (replaced,) = named(login, "head_replaced")
    assert (replaced["before"], replaced["attempt"]) == ("n1", 1)
    assert replaced["node"] in (
        "n2",
        "n3",
    )  # the lower place goes first, unless its machine is late
    assert [event["attempt"] for event in named(login, "attempt_failed")] == [0]
    assert [event["attempt"] for event in named(login, "attempt_started")] == [0, 1]
    # The job ends with the run, though its script can't.
    slurm_lab.wait_for_job(login.job(), "CANCELLED", limit_s=30.0)
    wait_until(lambda: not left_on(slurm_lab, "n2", "n3"), "the end of all processes")
    shown = login("status", "r").stdout
    assert re.search(
        r"^0 +2 +n1: 0, n2: 1 +n1: the head there does not answer", shown, re.MULTILINE
    ), shown


@pytest.mark.lab
def test_of_two_nodes_the_other_waits_for_the_word_of_slurm(login, slurm_lab):
    login.script(WAIT)
    words = [one for one in ON if one != "--detach"]
    words += ["--nproc-per-node", "1", "--nodes", "1:2", "train.py"]
    with (
        open(login.folder / "shown", "w+") as shown,
        login.popen([*MUSTER, *words], stdout=shown, stderr=shown, text=True) as client,
    ):
        wait_until(lambda: beats(login, 0), "the first attempt", 60.0)

        slurm_lab.kill_node("n1", unplug=True)

        waits = "1 of 2 nodes have lost the head on n1"
        wait_until(lambda: waits in login("status", "r").stdout, "what status says", 30.0)
        wait_until(lambda: beats(login, 1), "the second attempt", 60.0)
        assert waits not in login("status", "r").stdout
        told = login.path("logs/agents/n2.log").read_text()
        assert "1 of 2 nodes have lost the head on n1" in told
        # Slurm takes the node from the job and calls it down, and may be asked between the two.
        lost = ("its state is DOWN", "it is no longer a node of the job")
        assert any(f"slurm says that n1 is lost: {words}" in told for words in lost), told
        succeeds(login, 1)
        assert client.wait(60.0) == 0
        assert (login.folder / "shown").read_text().count(waits) == 1
    slurm_lab.wait_for_job(login.job(), "CANCELLED", limit_s=30.0)


def test_a_head_that_stood_still_finds_another_one_and_never_trains_beside_it(login, slurm_lab):
    begin_to_beat(login)

    pause(slurm_lab, "n1", signal.SIGSTOP)
    wait_until(lambda: beats(login, 1), "the second attempt", 60.0)
    pause(slurm_lab, "n1", signal.SIGCONT)

    said = "this process only waits for its end"
    wait_until(lambda: said in login.said(), "the end of the old head")
    wait_until(lambda: not workers_on(slurm_lab, "n1"), "the end of its workers")
    num = len(beats(login, 1))
    wait_until(lambda: len(beats(login, 1)) > num + 40, "training that goes on")
    assert slurm_lab.job(login.job())["JobState"] == "RUNNING"
    assert not beats(login, 2)
    assert succeeds(login, 1)["attempts"] == 2
    slurm_lab.wait_for_job(login.job(), "COMPLETED", "CANCELLED", limit_s=90.0)
    wait_until(lambda: not left_on(slurm_lab, "n1", "n2", "n3"), "the end of all processes")


@pytest.mark.lab
def test_a_head_that_is_cut_off_ends_though_its_machine_lives(login, slurm_lab):
    begin_to_beat(login)

    slurm_lab.set_link("n1", "down")

    wait_until(lambda: beats(login, 1), "the second attempt", 60.0)
    wait_until(lambda: "only waits for its end" in login.said(), "the end of the old head")
    wait_until(lambda: not workers_on(slurm_lab, "n1"), "the end of its workers")
    assert len(list(login.folder.glob("beat-1-*"))) == 1  # one head alone has started it
    succeeds(login, 1)
    slurm_lab.set_link("n1", "up")


@pytest.mark.lab
def test_the_next_head_may_die_too_and_the_one_after_it_at_its_start(login, slurm_lab):
    begin_to_beat(login)
    slurm_lab.kill_node("n1", unplug=True)
    claims = login.folder / "home/runs/r/succession"
    wait_until((claims / "term-2.json").exists, "the claim", 60.0)

    taken = json.loads((claims / "term-2.json").read_text())["node"]
    slurm_lab.kill_node(taken, unplug=True)  # in the moment in which it takes over

    wait_until(lambda: beats(login, 1) or beats(login, 2), "another attempt", 90.0)
    attempt = 2 if beats(login, 2) else 1
    left = ({"n1", "n2", "n3"} - {"n1", taken}).pop()
    assert (login.folder / f"beat-{attempt}-{left}").exists()
    succeeds(login, attempt)


@pytest.mark.lab
def test_a_job_that_slurm_takes_back_when_its_first_node_boots_goes_on_when_it_starts_again():
    need_slurm()
    # With the default of Slurm the node boots long before Slurm takes it for dead.
    with SlurmLab(3, cpus=4, gpus=2, down_after_s=300) as lab:
        login = LabUser(lab)
        begin_and_lose_n1(login, lab)

        lab.start_node("n1")

        wait_until(lambda: beats(login, 2), "the third attempt", 120.0)
        assert lab.job(login.job())["Restarts"] == "1"
        assert login.state() != "succeeded"
        result = succeeds(login, 2)
        assert (result["attempts"], result["restarts_spent"]) == (3, 1)
        lab.wait_for_job(login.job(), "COMPLETED", limit_s=30.0)


@pytest.mark.lab
def test_an_owner_that_is_killed_is_started_again_and_ends_the_job(login, slurm_lab):
    begin_and_lose_n1(login, slurm_lab)

    for _ in range(2):
        owner = wait_until(lambda: owners(slurm_lab, "n2", "n3"), "an owner")[0]
        os.kill(owner, signal.SIGKILL)
        wait_until(lambda o=owner: owners(slurm_lab, "n2", "n3") not in ([], [o]), "another owner")

    succeeds(login, 1)
    slurm_lab.wait_for_job(login.job(), "CANCELLED", limit_s=30.0)


@pytest.mark.lab
def test_the_last_node_goes_on_when_the_next_head_is_killed_on_a_machine_that_lives(
    login, slurm_lab
):
    begin_and_lose_n1(login, slurm_lab)
    head = named(login, "head_replaced")[0]["node"]

    for pid, words in slurm_lab.commands_on(head).items():
        if b"agent" in words:
            os.kill(pid, signal.SIGKILL)

    wait_until(lambda: beats(login, 2), "the third attempt", 60.0)
    succeeds(login, 2)
    slurm_lab.wait_for_job(login.job(), "CANCELLED", limit_s=30.0)


@pytest.mark.lab
def test_without_a_restart_left_the_next_head_says_so(login, slurm_lab):
    begin_to_beat(login, "--max-restarts", "0")

    slurm_lab.kill_node("n1")

    result = end_of(login)
    assert (result["state"], result["exit_code"]) == ("failed", 7)
    assert result["report"]["error"] == "the head on n1 was lost, and no restart is left"
    slurm_lab.wait_for_job(login.job(), "CANCELLED", limit_s=60.0)
    wait_until(lambda: not left_on(slurm_lab, "n2", "n3"), "the end of all processes")


@pytest.mark.lab
@pytest.mark.parametrize("way", ["requeue", "submit", "chain"])
def test_a_run_whose_head_was_lost_goes_on_in_another_job_when_its_time_is_up(
    login, slurm_lab, way
):
    text = f'[engines.lab]\nkind = "slurm"\nresubmit_with = "{way}"\n'
    (login.folder / "muster.toml").write_text(text)
    words = ("run", "--on", "lab", "--run-id", "r", "--detach", "--nproc-per-node", "1")
    words += ("--nodes", "2:3", "--time", "2m", "--warn", "70s", "--resubmit", "1")
    script = (str(CHAIN_SCRIPT), str(login.folder), "--hold", "2", "--hold-s", "4")
    ended = login(*words, *script)
    assert ended.returncode == 0, ended.stderr
    steps = login.folder / "steps-0"
    wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) >= 4, "steps", 60.0)

    slurm_lab.kill_node("n1", unplug=True)
    wait_until(lambda: named(login, "head_replaced"), "the next head", 60.0)
    slurm_lab.restore_node("n1")

    login.wait_for_links(2)
    assert login("wait", "r", limit_s=300.0).returncode == 0
    assert [link["way"] for link in login.links()] == [None, way]
    result = end_of(login)
    assert (result["state"], result["attempts"], result["restarts_spent"]) == ("succeeded", 3, 1)
    done = [tuple(map(int, line.split())) for line in steps.read_text().splitlines()]
    assert {attempt for attempt, _ in done} == {0, 1, 2}
    # What the first attempt did behind its last snapshot is done again; what the second did is kept.
    last = [step for attempt, step in done if attempt > 0]
    assert last == list(range(last[0], 25))


def begin(login, *words):
    """Submit a run with one worker on each node."""
    ended = login(*ON, "--nproc-per-node", "1", *words)
    assert ended.returncode == 0, ended.stderr


def begin_to_beat(login, *words):
    """Begin a run of three nodes that may shrink to one, whose attempts write down that they train."""
    login.script(WAIT)
    begin(login, "--nodes", "1:3", *words, "train.py")
    wait_until(lambda: beats(login, 0), "the first attempt")


def begin_and_lose_n1(login, lab):
    """Begin a run whose head is lost and replaced."""
    begin_to_beat(login)
    lab.kill_node("n1", unplug=True)
    wait_until(lambda: beats(login, 1), "the second attempt", 60.0)


def held(text):
    """Return the training with a step at which the first attempt waits until it is killed."""
    hold = f"""
            if run.steps_done == {HELD} and args.memory and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                open(f"held-{{world.rank}}", "w").close()
                signal.pause()
"""
    found = "            scheduler.step()\n"
    assert found in text
    return text.replace(found, found + hold)


def beats(login, attempt):
    """Return the lines that rank 0 of an attempt has written."""
    files = login.folder.glob(f"beat-{attempt}-*")
    return [line for file in files for line in file.read_text().splitlines()]


def end_of(login):
    """Return the result of the run, once there is one."""
    wait_until(login.path("result.json").exists, "the end of the run", 120.0)
    return login.read("result.json")


def succeeds(login, attempt):
    """Let an attempt end, and with it the run; return its result."""
    (login.folder / f"go-{attempt}").touch()
    result = end_of(login)
    assert result["state"] == "succeeded", result
    return result


def named(login, name):
    """Return the events of a name."""
    lines = login.path("events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def weights(out, rank):
    return (out / f"weights-{rank}.txt").read_text()


def losses(out, rank):
    """Return the lines of all steps, each once: a step that was done again gave the same."""
    lines = (out / f"losses-{rank}.txt").read_text().splitlines()
    return sorted({line for line in lines if line.count(" ") == 2}, key=lambda s: int(s.split()[0]))


def owners(lab, *nodes):
    """Return the processes that are the owner of a run whose head an agent has become."""
    return [pid for pid, words in lab.commands_on(*nodes).items() if b"succeed" in words]


def workers_on(lab, node):
    return [w for w in left_on(lab, node) if any(b"train.py" in x for x in w)]


def pause(lab, node, signum):
    """Stop, or let run again, all that runs on a node but Slurm's daemon, which the lab needs."""
    for pid in lab.processes_on(node):
        # One that wakes up may end the others.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if not any(b"slurm" in word or b"enter.py" in word for word in words[:2]):
                os.kill(pid, signum)


@pytest.mark.lab
@pytest.mark.timeout(0)
def test_two_faults_within_three_seconds_end_no_run(slurm_lab):
    """MUSTER_CHAOS=100 is the long form."""
    seed = int(os.environ.get("MUSTER_CHAOS_SEED", random.SystemRandom().randrange(1 << 30)))
    for number in range(int(os.environ.get("MUSTER_CHAOS", "2"))):
        dice = random.Random(seed + number)
        print(f"MUSTER_CHAOS_SEED={seed + number} MUSTER_CHAOS=1", flush=True)
        survive(LabUser(slurm_lab), slurm_lab, dice)
        slurm_lab.reset()


def survive(login, lab, dice):
    """Begin a run of three nodes that may shrink to one, hurt it twice, and see it train again and end."""
    begin_to_beat(login, "--max-restarts", "20")
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

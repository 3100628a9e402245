"""A request to stop becomes one snapshot at one step on all ranks, whatever the workers are doing.

MUSTER_PREEMPTIONS=100 interrupts a hundred runs instead of three.
"""

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from kit.command import MUSTER, muster_env, ran
from kit.trees import signal_tree
from kit.waiting import wait_until
from launching import HERE, PYTHON, events_in, muster, weights
from torchmuster.core.files.layout import short_id

SCRIPT = HERE / "preempt_script.py"
NUM_RUNS = int(os.environ.get("MUSTER_PREEMPTIONS", "3"))
PLACES = ("step", "evaluation", "data", "inner")
TIMEOUT_S = 100.0
_undisturbed = {}


class Interrupted:
    """A `muster run` of the script that is sent signals in its first attempt."""

    def __init__(self, out, world_size, *options):
        self.out, self.world_size = out, world_size
        self.home = out / "home"
        line = [*MUSTER, "run", "--nproc-per-node", world_size]
        self.process = subprocess.Popen(
            [str(word) for word in (*line, SCRIPT, out, *options)],
            env=muster_env(self.home),
            stderr=subprocess.PIPE,
            text=True,
        )

    def workers(self):
        """Return the pids of the workers, once all have come to the place."""
        marks = [self.out / f"at-{rank}" for rank in range(self.world_size)]

        def all_came():
            assert self.process.poll() is None, self.process.communicate()[1]
            return all(mark.exists() for mark in marks)

        wait_until(all_came, "the workers at the place", TIMEOUT_S)
        return [int(mark.read_text()) for mark in marks]

    def end(self):
        """Return how `muster run` ended, and what it said."""
        try:
            said = self.process.communicate(timeout=TIMEOUT_S)[1]
        finally:
            self.process.kill()
        return self.process.returncode, said

    def records(self, name, event):
        """Return the events of a name in one record of the run's folder."""
        (path,) = self.home.glob(f"runs/*/{name}.jsonl")
        return events_in(path, event)

    def ends(self):
        """Return how the workers of the first attempt have ended."""
        ended = self.records("events", "worker_ended")
        return {event["rank"]: event["what"] for event in ended if event["attempt"] == 0}

    def steps(self, rank, attempt=0):
        """Return the steps that a rank did in one attempt."""
        lines = [line.split() for line in (self.out / f"steps-{rank}").read_text().splitlines()]
        return [int(step) for number, step in lines if int(number) == attempt]


@pytest.fixture
def undisturbed(tmp_path_factory):
    """Return the final weights of a run that nobody interrupts, made once for each kind."""

    def get(world_size, *options):
        key = (world_size, *options)
        if key not in _undisturbed:
            out = tmp_path_factory.mktemp("undisturbed")
            muster(out / "home", world_size, SCRIPT, out, *options)
            _undisturbed[key] = weights(out)
        return _undisturbed[key]

    return get


def children_of(pid):
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def interrupt(pids, draw, *, everybody, signum):
    """Signal one worker or all; all of them with their loader processes, as a scheduler would."""
    chosen = [pid for worker in pids for pid in (worker, *children_of(worker))]
    chosen = chosen if everybody else [draw.choice(pids)]
    draw.shuffle(chosen)
    for pid in chosen:
        threading.Event().wait(draw.choice((0.0, 0.0, 0.02, 0.3)))
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            assert pid != chosen[0], "the run was over already"


def check_stop(run, said):
    """See that all ranks of the first attempt left with 75, saved at one step; return the step."""
    assert set(run.ends().values()) == {"exit code 75 (preempted)"}, (run.ends(), said)
    stops = [event["step"] for event in run.records("training", "preempted")]
    assert len(stops) == 1, said
    done = [max(run.steps(rank), default=0) for rank in range(run.world_size)]
    assert done == stops * run.world_size, said
    return stops[0]


def assert_stopped_in_evaluation(run):
    """See that the run stopped behind an epoch's last step and in front of its end."""
    assert run.steps(0)[-1] == 8
    assert "0 evaluation" not in (run.out / "evaluated-0").read_text().splitlines()


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_a_signal_at_any_moment_saves_one_step_and_leaves_no_trace(seed, tmp_path, undisturbed):
    draw = random.Random(seed)
    world_size, place = (2, 2, 3)[seed % 3], PLACES[seed % len(PLACES)]
    num_workers = draw.choice((0, 2)) if place == "data" else 0
    averaged = ("--averaged",) * (seed % 8 == 5)
    run = Interrupted(tmp_path, world_size, "--place", place, "--workers", num_workers, *averaged)
    pids = run.workers()
    threading.Event().wait(draw.random() * 0.3)
    signum = draw.choice((signal.SIGTERM, signal.SIGUSR1))
    interrupt(pids, draw, everybody=draw.random() < 0.5, signum=signum)
    code, said = run.end()
    stopped = check_stop(run, said)
    assert code == 0, said  # muster goes on by itself
    assert "the run continues, no restart spent" in said
    resumed = [event["step"] for event in run.records("training", "resumed")]
    assert resumed == [0, stopped], said
    if place == "evaluation" and not averaged:  # it takes seconds: all ranks were in it
        assert_stopped_in_evaluation(run)
    for rank in range(world_size):
        assert run.steps(rank) + run.steps(rank, 1) == list(range(1, 25))
        assert weights(tmp_path, rank) == undisturbed(world_size, *averaged)


@pytest.mark.short
def test_sigterm_to_muster_itself_ends_it_with_75_and_the_next_run_goes_on(tmp_path, undisturbed):
    run = Interrupted(tmp_path, 2, "--place", "evaluation")
    run.workers()
    run.process.send_signal(signal.SIGTERM)
    code, said = run.end()
    assert code == 75, said
    check_stop(run, said)
    assert_stopped_in_evaluation(run)
    muster(tmp_path / "again", 2, SCRIPT, tmp_path)
    assert run.steps(0) == list(range(1, 25))
    assert weights(tmp_path) == undisturbed(2)


@pytest.mark.parametrize("place", ["step", "data"])
def test_sigterm_to_every_process_as_schedulers_send_it_saves_too(place, tmp_path, undisturbed):
    run = Interrupted(tmp_path, 2, "--place", place)
    run.workers()
    signal_tree(run.process.pid, signal.SIGTERM)
    code, said = run.end()
    assert code == 75, said
    stopped = check_stop(run, said)
    muster(tmp_path / "again", 2, SCRIPT, tmp_path)
    assert run.steps(0)[:stopped] == list(range(1, stopped + 1))
    assert weights(tmp_path) == undisturbed(2)


def test_the_warning_to_every_process_as_schedulers_send_it_saves_too(tmp_path, undisturbed):
    run = Interrupted(tmp_path, 2, "--place", "step")
    run.workers()
    signal_tree(run.process.pid, signal.SIGUSR1)  # `#SBATCH --signal=USR1@120`
    code, said = run.end()
    check_stop(run, said)
    assert code == 0, said  # it goes on by itself
    assert weights(tmp_path) == undisturbed(2)


@pytest.mark.parametrize(
    ("signum", "why"),
    [(signal.SIGINT, "you cancelled it"), (signal.SIGHUP, "the terminal was closed")],
)
def test_ctrl_c_and_a_closed_terminal_save_and_the_last_line_says_how_to_go_on(
    signum, why, tmp_path
):
    run = Interrupted(tmp_path, 2, "--place", "step")
    run.workers()
    run.process.send_signal(signum)
    code, said = run.end()
    assert code == 128 + signum, said
    step = check_stop(run, said)
    (run_dir,) = run.home.glob("runs/*")
    assert f"  because: {why}\n" in said
    *_, last, following = said.rstrip().splitlines()
    assert following == f"next: muster restart {short_id(run_dir.name)}"
    assert last.startswith("muster: cancelled after ")
    assert last.endswith(
        f"; saved at step {step}; continue with: muster restart {short_id(run_dir.name)}"
    )
    assert "KeyboardInterrupt" not in said


@pytest.mark.parametrize("limit", ["option", "slurm"])
def test_a_time_limit_that_comes_near_stops_with_a_save(limit, tmp_path):
    """A minute is kept back for the save, of a short limit a quarter."""
    more = {"SLURM_JOB_END_TIME": str(int(time.time()) + 62)} if limit == "slurm" else {}
    options = ["--time-limit", 2] if limit == "option" else []
    environment = muster_env(tmp_path / "home", TORCHELASTIC_RESTART_COUNT="0", **more)
    line = [PYTHON, SCRIPT, tmp_path, "--place", "data", *options]
    ended = ran(line, limit_s=TIMEOUT_S, env=environment, cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr
    assert "the time limit is near on rank 0" in ended.stderr
    step = max(map(int, ((tmp_path / "steps-0").read_text().split()[1::2])), default=0)
    assert f"stopped after step {step} " in ended.stderr
    assert step < 24

"""The agreement on where to stop: any interleaving of ranks ends with all at one boundary, or at none."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from kit.waiting import Clock, wait_until
from torchmuster.train import preempt
from torchmuster.train.group import WorldError
from torchmuster.train.preempt import StopWatch, TimeLimit

FORKS = Path(__file__).with_name("forks.py")
SEEDS = range(int(os.environ.get("MUSTER_AGREEMENTS", "60")))
TIMEOUT_S = 20.0


class GoneStore:
    """A store whose server ends after the request was seen."""

    def __init__(self):
        self.gone = threading.Event()

    def compare_set(self, key, expected, value):
        pass

    def check(self, keys):
        if self.gone.is_set():
            raise RuntimeError("Connection reset by peer")
        return keys[0].endswith("request")

    def get(self, key):
        return b"SIGTERM on rank 1"

    def set(self, key, value):
        pass

    def add(self, key, amount):
        return 0


@pytest.fixture
def open_watch():
    """Return a function that makes the watch of a rank; all are closed at the end."""
    made = []

    def open_one(store, *, rank=0, world_size=1, say=lambda text: None, **more):
        settings = {"deadline": lambda: None, "timeout_s": TIMEOUT_S, "poll_s": 0.001, **more}
        made.append(StopWatch(store, rank=rank, world_size=world_size, say=say, **settings))
        return made[-1]

    yield open_one
    for watch in made:
        watch.close()


@pytest.fixture
def watches(open_watch):
    """Return a function that makes a watch a rank, listening on one store without signals."""

    def open_all(world_size, store=None, **more):
        store = store or dist.HashStore()
        made = [open_watch(store, rank=r, world_size=world_size, **more) for r in range(world_size)]
        for watch in made:
            watch.begin(0, signals=())
        return made

    return open_all


class Rank:
    """The loop of one rank: waits for data, steps that all ranks have to take together, evaluations."""

    def __init__(self, watch, seed, num_steps, together):
        self.watch = watch
        self.draw = random.Random(seed)
        self.num_steps = num_steps
        self.together = together
        self.passed = -1
        self.pause = threading.Event()

    def dawdle(self, most_s=0.003):
        if self.draw.random() < 0.5:
            self.pause.wait(self.draw.random() * most_s)

    def train(self):
        """Return the boundary that it stopped at, or None at the end."""
        try:
            for boundary in range(self.num_steps):
                if self.watch.must_stop(boundary) or self.waits_in_vain():
                    return boundary
                self.passed = boundary
                self.dawdle()
                self.together.wait(TIMEOUT_S)  # the gradients meet
                self.dawdle(0.001)
            return None
        finally:
            self.watch.close()

    def waits_in_vain(self):
        """Wait for data, or evaluate: batches of this rank's own number, then a reduction."""
        with self.watch.parked(interruptible=False):
            for _ in range(self.draw.choice((1, 1, 1, 2, 9))):
                if self.watch.decided_here:
                    return True
                self.dawdle()
        return self.watch.unpark()


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_stop_at_one_boundary_that_none_has_passed(watches, seed):
    draw = random.Random(seed)
    world_size, num_steps = draw.choice((1, 2, 3, 5)), 25
    every, together = watches(world_size), threading.Barrier(world_size)
    ranks = [Rank(w, draw.random(), num_steps, together) for w in every]
    pause = threading.Event()
    with ThreadPoolExecutor(world_size) as pool:
        ends = [pool.submit(rank.train) for rank in ranks]
        pause.wait(draw.random() * 0.06)
        for watch in draw.sample(every, draw.randint(1, world_size)):
            watch.request("SIGTERM")
        stopped = {end.result(TIMEOUT_S) for end in ends}
    assert len(stopped) == 1
    where = stopped.pop()
    last = num_steps - 1 if where is None else where - 1
    assert [rank.passed for rank in ranks] == [last] * world_size


def test_a_request_in_a_quiet_run_does_stop_it(watches):
    """Were all the requests above too late, they would show nothing."""
    (watch,) = watches(1)
    watch.request("SIGTERM")
    wait_until(lambda: watch.decided_here or watch._decision is not None, "a decision")
    assert watch.must_stop(0)
    assert watch.reason == "SIGTERM on rank 0"


def test_a_rank_that_waits_stops_where_it_stands_when_all_do(watches):
    every = watches(2)
    assert [watch.must_stop(4) for watch in every] == [False, False]
    with every[0].parked(interruptible=False), every[1].parked(interruptible=False):
        every[1].request("SIGUSR1")
        wait_until(lambda: all(w.decided_here for w in every), "a decision for boundary 4")
    assert [watch.unpark() for watch in every] == [True, True]


def test_a_rank_that_waits_goes_on_to_the_boundary_of_one_that_works(watches):
    every = watches(2)
    assert [watch.must_stop(4) for watch in every] == [False, False]
    with every[0].parked(interruptible=False):
        every[0].request("SIGTERM")
        wait_until(lambda: every[0]._decision is not None, "a decision")
        assert not every[0].decided_here
    assert not every[0].unpark()
    assert [watch.must_stop(5) for watch in every] == [True, True]


def test_a_rank_whose_run_has_ended_does_not_hold_up_the_others(watches):
    said = []
    ended, behind = watches(2, say=said.append)
    assert not ended.must_stop(7)
    ended.close()
    behind.must_stop(6)
    behind.request("SIGTERM")
    wait_until(lambda: behind._ceiling is not None, "a promise")
    assert not behind.must_stop(7)
    assert not behind.must_stop(8)
    behind.close()
    assert "not stopping: a rank's run has ended already" in said


def test_a_run_that_nobody_asked_to_stop_ends_at_once(watches):
    every = watches(3)
    for watch in every:
        watch.must_stop(3)
        watch.close()
    assert not any(watch._thread.is_alive() for watch in every)


def test_ranks_that_never_promise_are_named(open_watch):
    watch = open_watch(dist.HashStore(), rank=1, world_size=3, timeout_s=0.3)
    watch.begin(0, signals=())
    watch.request("SIGTERM")
    wait_until(lambda: watch._ceiling is not None, "a promise")
    with pytest.raises(WorldError) as raised:
        watch.must_stop(0)
    assert raised.value.why == "ranks 0,2 did not answer"


def test_a_store_that_goes_lets_a_waiting_rank_go_on_to_the_error_of_its_collective(watches):
    store = GoneStore()
    (watch,) = watches(1, store=store)
    wait_until(lambda: watch._ceiling is not None, "a promise")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(watch.must_stop, 0)
        store.gone.set()
        assert answer.result(10) is False


def test_a_deadline_asks_to_stop(open_watch):
    watch = open_watch(dist.HashStore(), deadline=lambda: 0.0)
    watch.begin(3, signals=())
    wait_until(lambda: watch._decision is not None, "a decision")
    assert watch.must_stop(3)
    assert watch.reason == "the time limit is near on rank 0"


def test_a_signal_to_a_forked_child_ends_the_child_and_is_no_request():
    ended = subprocess.run([sys.executable, FORKS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert facts["child"] == -signal.SIGTERM
    assert facts["request_after_child"] == ""
    assert facts["request_after_own"] == "SIGTERM"
    assert facts["handlers_given_back"]


def test_a_second_ctrl_c_is_not_waited_for_and_one_that_comes_twice_is_one(open_watch):
    before = signal.getsignal(signal.SIGINT)
    watch = open_watch(dist.HashStore())
    watch.begin(3, signals=(signal.SIGINT,))
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # as from the terminal and from a launcher
    wait_until(lambda: watch._decision is not None, "a decision")
    watch._interrupted_at -= 2.0
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    watch.close()
    assert watch.reason == "SIGINT on rank 0"
    signal.signal(signal.SIGINT, before)  # it is ignored on the way out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_the_caller_wants_ignored_stays_ignored(open_watch, signum):
    before = signal.signal(signum, signal.SIG_IGN)
    watch = open_watch(dist.HashStore())
    watch.begin(3, signals=(signum,))
    assert signal.getsignal(signum) is signal.SIG_IGN
    watch.close()
    signal.signal(signum, before)


# When a training stops without a signal.


@pytest.fixture
def clock(monkeypatch, tmp_path):
    made = Clock(1000.0)
    monkeypatch.setattr(preempt, "time", made)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000")
    monkeypatch.setenv("TORCHMUSTER_RUN_DIR", str(tmp_path))
    return made


def note(tmp_path, ends_at):
    with open(tmp_path / "events.jsonl", "a") as record:
        record.write('{"event":"attempt_started","attempt":0}\n')
        record.write(json.dumps({"event": "time_limit", "ends_at": ends_at}, separators=(",", ":")))
        record.write("\n{torn")


def test_it_keeps_the_time_of_a_save_before_the_end_of_the_job(clock):
    assert TimeLimit(None).deadline(0.0) == 1940.0
    assert TimeLimit(None).deadline(100.0) == 1700.0
    assert TimeLimit(None, watches_job=False).deadline(0.0) is None


def test_an_end_that_has_moved_counts(clock, tmp_path):
    limit = TimeLimit(None)
    note(tmp_path, 2000.0)
    note(tmp_path, 2500.0)
    assert limit.deadline(0.0) == 1940.0, "it is far: nothing is read"
    clock.now = 1940.0
    assert limit.deadline(0.0) == 2440.0
    clock.now = 2439.0
    assert limit.deadline(0.0) == 2440.0
    note(tmp_path, 2100.0)
    clock.now = 2441.0
    assert limit.deadline(0.0) == 2040.0, "it was lowered"


def test_without_a_word_of_the_owner_the_variable_counts(clock, monkeypatch):
    clock.now = 1941.0
    assert TimeLimit(None).deadline(0.0) == 1940.0
    monkeypatch.delenv("TORCHMUSTER_RUN_DIR")
    assert TimeLimit(None).deadline(0.0) == 1940.0

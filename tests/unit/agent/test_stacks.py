"""Stacks of real processes: those that answer, and those that can't."""

import os
import signal
import subprocess
import sys

import pytest

from torchmuster import proc
from torchmuster.agent import stacks
from torchmuster.doctor.stacks import Doing, judge
from torchmuster.model import beats

SCRIPT = """
import os, sys, threading
sys.path.insert(0, {source!r})
os.environ.update(RANK="{rank}", TORCHMUSTER_ATTEMPT="0")
from torchmuster.agent.spawner.stackfile import write_stacks_on_signal
write_stacks_on_signal({socket!r})

def read():
    {body}

print("up", flush=True)
read()
"""
SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(stacks.__file__)))


@pytest.fixture
def worker(tmp_path):
    """Return a function that starts a process like a worker and returns its (rank, pid)."""
    started = []

    def start(body="threading.Event().wait(60)", rank=0):
        path = tmp_path / f"train{rank}.py"
        socket = str(tmp_path / "agent.sock")
        path.write_text(SCRIPT.format(source=SOURCE, rank=rank, socket=socket, body=body))
        child = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE)
        started.append(child)
        assert child.stdout.readline() == b"up\n"
        return rank, child.pid

    yield start
    for child in started:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()
        child.stdout.close()


def take(tmp_path, *workers):
    return stacks.take_stacks(str(tmp_path), 0, workers)


def test_a_process_that_waits_shows_its_stack_and_goes_on(worker, tmp_path):
    one = worker()
    for _ in range(2):
        (found,) = take(tmp_path, one)
        standing = judge(found.text, state=found.state)
        assert (standing.what, standing.place) == ("read()", "train0.py:9")
        assert found.source == "threading.Event().wait(60)"
    assert proc.is_running(one[1])


def test_a_process_whose_c_code_holds_the_lock_answers(worker, tmp_path):
    one = worker(body="(1 << 40_000_000) // 3 ** 9_000_000", rank=1)
    (found,) = take(tmp_path, one)
    assert "in read" in found.text


def test_a_stopped_process_is_said_to_be_stopped_and_is_not_woken(worker, tmp_path):
    one = worker()
    os.kill(one[1], signal.SIGSTOP)
    os.waitid(os.P_PID, one[1], os.WSTOPPED | os.WNOWAIT)
    (found,) = take(tmp_path, one)
    assert (found.state, found.text) == ("T", "")
    assert judge(found.text, state=found.state).doing is Doing.STOPPED
    assert found.why_not.startswith("it is stopped")


@pytest.mark.parametrize(
    "body",
    [
        "import signal; signal.signal(47, signal.SIG_DFL); threading.Event().wait(60)",
        "os.close(700); threading.Event().wait(60)",
        "os.closerange(3, 1024); os.open('/dev/null', 0); threading.Event().wait(60)",
        "os.execv('/bin/sleep', ['sleep', '60'])",
    ],
)
def test_a_process_that_does_not_listen_is_never_sent_the_signal(worker, tmp_path, body):
    one = worker(body=body)
    deadline = stacks.time.monotonic() + 20
    while stacks._answers(one[1], beats.stacks_path(str(tmp_path), 0, 0)):
        assert stacks.time.monotonic() < deadline
    (found,) = take(tmp_path, one)
    assert found.text == ""
    assert found.why_not
    assert proc.is_running(one[1])


def test_all_ranks_are_asked_at_once_within_a_second(worker, tmp_path):
    workers = [worker(rank=rank) for rank in range(3)]
    began = stacks.time.monotonic()
    found = take(tmp_path, *workers)
    assert stacks.time.monotonic() - began < 1.5
    assert [one.rank for one in found] == [0, 1, 2]
    assert all("in read" in one.text for one in found)


def test_a_process_that_has_ended_is_no_error(tmp_path):
    child = subprocess.Popen(["true"])
    child.wait()
    (found,) = take(tmp_path, (0, child.pid))
    assert found.state == ""
    assert found.why_not == "the process has ended"


def test_pieces_fit_a_message():
    parts = stacks.pieces(tuple(range(30)))
    assert [len(part) for part, _ in parts] == [12, 12, 6]
    assert [last for _, last in parts] == [False, False, True]
    assert stacks.pieces(()) == [((), True)]

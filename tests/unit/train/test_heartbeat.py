"""A beat is written in place and never stops a step."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.waiting import Clock, wait_until
from torchmuster.core import proc
from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.node.workers import last_step
from torchmuster.launcher.node.inquiries import ProgressReader
from torchmuster.train import heartbeat as beats
from torchmuster.train.heartbeat import open_heartbeat


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(beats, "time", made)
    return made


def beats_of(folder, attempt, rank):
    """Return the beats of a rank whose agent has this folder."""
    own = {"TORCHMUSTER_SOCKET": str(folder / "agent.sock"), "TORCHMUSTER_ATTEMPT": str(attempt)}
    return open_heartbeat({**own, "RANK": str(rank)})


@pytest.fixture
def told(tmp_path, clock):
    """Return beats and a function that reads what they say."""
    made = beats_of(tmp_path, attempt=2, rank=5)
    yield made, lambda: heartbeat.unpack((tmp_path / "heartbeat-2-5").read_bytes())
    made.close()


def test_steps_and_phases_reach_the_file(told):
    made, read = told
    made.enter(RankPhase.DATA)
    made.enter(RankPhase.COMPUTE)
    made.step(41)
    with made.during(RankPhase.SAVE):
        assert read().phase is RankPhase.SAVE
    made.step(42)
    beat = read()
    assert (beat.step, beat.steps_here, beat.phase) == (42, 2, RankPhase.COMPUTE)
    assert len(beat.durations) == 1


def test_a_save_is_no_part_of_a_step(told, clock):
    made, read = told
    made.step(1)
    clock.now += 0.01
    with made.during(RankPhase.EVALUATE):
        clock.now += 5.0
    made.step(2)
    beat = read()
    assert beat.seconds[RankPhase.EVALUATE] == pytest.approx(5.0)
    assert beat.durations == pytest.approx((0.01,), rel=1e-3)


def test_without_an_agent_nothing_is_written():
    made = open_heartbeat({})
    made.enter(RankPhase.DATA)
    made.step(1)
    assert made._fd is None
    made.close()


def test_a_file_that_is_gone_or_closed_stops_no_step(told):
    made, _ = told
    os.close(made._fd)
    made.step(1)
    made.step(2)
    assert made._fd is None


def test_a_short_step_costs_two_writes_in_place_and_no_other_system_call(told, clock, monkeypatch):
    made, _ = told
    made.step(1)
    sizes = []
    system = SimpleNamespace(pwrite=lambda fd, data, offset: sizes.append(len(data)))
    with monkeypatch.context() as patch:
        patch.setattr(beats, "os", system)  # which has no other call
        for number in range(2, 5):
            for phase in (RankPhase.DATA, RankPhase.COMPUTE, RankPhase.FORWARD, RankPhase.COMPUTE):
                made.enter(phase)
                clock.now += 0.0025
            made.step(number)
    duration, record = sizes[:2]
    assert duration < record < heartbeat.PAGE_BYTES
    assert sizes == [duration, record] * 3


# Progress of real processes, by their heartbeats and by the kernel's counters.


@pytest.fixture
def process():
    """Return a function that starts Python code in a session of its own."""
    started = []

    def start(code):
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(child)
        assert child.stdout.readline() == b"up\n"
        return child.pid

    yield start
    for child in started:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


@pytest.fixture
def reader(tmp_path):
    return ProgressReader(str(tmp_path), 0)


def until(reader, pid, condition):
    for _ in range(10_000):
        (found,) = reader.read([(0, pid)])
        if condition(found):
            return found
    raise AssertionError(found)


def test_the_last_step_can_be_told_after_the_end_of_a_rank_too(tmp_path):
    page = heartbeat.pack(
        1, 3, 103, heartbeat.RankPhase.DATA, 5.0, 4.0, [0.0] * len(heartbeat.RankPhase)
    )
    path = heartbeat.heartbeat_path(str(tmp_path), 2, 0)
    with open(path, "wb") as file:
        file.write(page.ljust(heartbeat.PAGE_BYTES, b"\0"))

    assert last_step(str(tmp_path), 2, 0) == 103
    assert last_step(str(tmp_path), 2, 1) is None


def test_a_rank_without_beats_is_seen_by_its_processor_time(process, reader):
    pid = process("print('up', flush=True)\nwhile True: pass")
    (first,) = reader.read([(0, pid)])
    assert first.beat_age_s is None
    until(reader, pid, lambda found: found.active_s > first.active_s)


def test_a_child_that_works_counts_for_a_rank_that_waits_for_it(process, reader):
    pid = process(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'while True: pass'])\n"
        "print('up', flush=True)\nchild.wait()"
    )
    (first,) = reader.read([(0, pid)])
    until(reader, pid, lambda found: found.active_s > first.active_s + 0.05)


def test_beats_are_read_with_their_age(process, reader, tmp_path):
    pid = process("print('up', flush=True)\nimport signal\nsignal.pause()")
    heartbeats = beats_of(tmp_path, attempt=0, rank=0)
    heartbeats.step(11)
    heartbeats.step(12)
    (found,) = reader.read([(0, pid)])
    heartbeats.close()
    assert (found.step, found.steps_here) == (12, 2)
    assert 0 <= found.beat_age_s < 30
    assert found.median_s > 0


def test_a_process_that_is_gone_has_no_state(reader):
    child = subprocess.Popen(["true"])
    child.wait()
    (found,) = reader.read([(0, child.pid)])
    assert found.state == ""


def test_one_look_at_all_processes_serves_all_idle_ranks(process, reader, monkeypatch):
    looks = []
    monkeypatch.setattr(proc, "all_processes", lambda: looks.append(1) or [])
    workers = [
        (rank, process("import signal\nprint('up', flush=True)\nsignal.pause()"))
        for rank in range(3)
    ]
    reader.read(workers)
    for _ in range(100):
        looks.clear()
        reader.read(workers)
        if looks:
            break

    assert len(looks) == 1


def test_memory_and_data_of_what_a_rank_has_started_count_for_it(process, reader):
    pid = process(
        "import subprocess, sys\n"
        "code = 'held = bytearray(64 << 20); import sys; sys.stdout.write(\"up\\\\n\"); sys.stdout.flush();'\n"
        'code += \'open("/dev/null", "wb").write(held); sys.stdin.read()\'\n'
        "child = subprocess.Popen([sys.executable, '-S', '-c', code], stdin=subprocess.PIPE)\n"
        "child.wait()"
    )
    found = until(reader, pid, lambda found: found.rss_mib > 64)
    until(reader, pid, lambda found: found.io_bytes > 64 << 20)
    assert (found.gpu_percent, found.gpu_mib) == (None, None)


def test_a_child_that_has_ended_takes_nothing_away(process, reader, tmp_path):
    stop = tmp_path / "stop"
    burn = f"import os\nwhile not os.path.exists({str(stop)!r}): sum(range(1000))"
    pid = process(
        "import subprocess, sys, signal\n"
        "print('up', flush=True)\n"
        f"subprocess.run([sys.executable, '-S', '-c', {burn!r}])\n"
        "signal.pause()"
    )
    children = Path(f"/proc/{pid}/task/{pid}/children")
    seen = [until(reader, pid, lambda found: found.active_s > 0.1)]
    stop.touch()
    wait_until(lambda: not children.read_text(), "the child is gone")
    for _ in range(50):
        seen += reader.read([(0, pid)])
    spent = [(one.active_s, one.io_bytes) for one in seen]
    assert spent == sorted(spent)

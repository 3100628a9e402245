"""One process does the work: also in a crowd, and also when it is killed at it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.waiting import wait_until
from torchmuster.errors import UsageError
from torchmuster.train.once import OnceError, OncePlace, once

CROWD = Path(__file__).with_name("crowd.py")
NAMES = [f"piece-{i}" for i in range(10)]
DEAD = {"host": "here", "table": "of another machine", "pid": 1, "start": 1, "id": "dead"}


@pytest.fixture
def said():
    return []


@pytest.fixture
def place(tmp_path, said):
    """Return a place of this test's, with a short lease unless told otherwise."""

    def make(token="attempt-1", lease_s=0.3, timeout_s=20.0):
        return OncePlace(
            folder=str(tmp_path),
            token=token,
            say=said.append,
            lease_s=lease_s,
            timeout_s=timeout_s,
        )

    return make


@pytest.fixture
def lock(tmp_path):
    """Return the lock of the piece `unpack`."""
    return tmp_path / "unpack.lock"


def is_mine(place):
    """Return whether the piece is done here."""
    with once("unpack", place) as mine:
        return mine


def start_crowd(folder, num_processes, mode, *names):
    line = [sys.executable, str(CROWD), str(folder), str(num_processes), mode, *names]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_crowd(crowd):
    out, err = crowd.communicate(timeout=120)
    assert crowd.returncode == 0, err
    return json.loads(out), err


def work_done(folder):
    return Counter(line.split()[0] for line in (folder / "work").read_text().splitlines())


def wait_for_file(path):
    wait_until(path.exists, path.name)
    return path.read_text()


def card_of_the_dead():
    """Return the card of a process of this machine that has ended."""
    from torchmuster.train.once import _process_table

    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return {**DEAD, "table": _process_table(), "pid": ended.pid}


def test_of_many_processes_exactly_one_does_each_piece(tmp_path):
    codes, _ = end_crowd(start_crowd(tmp_path, 8, "work", *NAMES))
    assert codes == [0] * 8
    assert work_done(tmp_path) == dict.fromkeys(NAMES, 1)
    left = {path.name for path in (tmp_path / "markers").iterdir()}
    assert left == {f"{name}.done" for name in NAMES}


def test_of_many_that_find_a_dead_owner_exactly_one_takes_its_place(tmp_path):
    (tmp_path / "markers").mkdir()
    for name in NAMES:
        (tmp_path / "markers" / f"{name}.lock").write_text(json.dumps(card_of_the_dead()))
    codes, said = end_crowd(start_crowd(tmp_path, 8, "work", *NAMES))
    assert codes == [0] * 8
    assert work_done(tmp_path) == dict.fromkeys(NAMES, 1)
    assert said.count("is gone; another process takes over") == len(NAMES)


def test_when_the_owner_is_killed_another_takes_over_before_the_lease_ends(tmp_path):
    crowd = start_crowd(tmp_path, 6, "hang", "unpack")
    owner = int(wait_for_file(tmp_path / "owner"))
    os.kill(owner, signal.SIGKILL)
    codes, said = end_crowd(crowd)
    assert sorted(codes) == [0] * 5 + [128 + signal.SIGKILL]
    assert work_done(tmp_path) == {"unpack": 2}
    assert f"pid {owner} on" in said


def test_an_exception_is_passed_on_and_gives_the_lock_back(place, tmp_path):
    def work():
        with once("unpack", place()):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [path.name for path in tmp_path.iterdir()] == ["unpack.failed"]


def test_an_exception_in_the_one_is_raised_in_all(tmp_path):
    codes, said = end_crowd(start_crowd(tmp_path, 6, "raise", "unpack"))
    assert sorted(codes) == [3] + [4] * 5
    assert work_done(tmp_path) == {"unpack": 1}
    assert said.count("ValueError: no such archive") == 5


def test_a_failure_of_an_earlier_attempt_is_tried_again(place, tmp_path):
    (tmp_path / "unpack.failed").write_text(
        json.dumps({"token": "attempt-1", "error": "disk full"})
    )
    with pytest.raises(OnceError, match="failed in the process"):
        is_mine(place())
    assert is_mine(place("attempt-2"))
    assert not is_mine(place("attempt-3"))


def test_a_lock_that_is_not_renewed_is_taken_over_after_its_lease(place, lock, said):
    lock.write_text(json.dumps(DEAD))
    began = time.monotonic()
    with once("unpack", place(lease_s=0.4)) as mine:
        assert mine
        assert json.loads(lock.read_text())["id"] != "dead"
    assert time.monotonic() - began >= 0.4
    assert said == ["`unpack`: pid 1 on here is gone; another process takes over"]


def test_a_lock_that_is_renewed_is_waited_for(place, lock, tmp_path, monkeypatch):
    lock.write_text(json.dumps(DEAD))
    looks = []

    def look():
        """The time, by a clock that goes on by a third of the lease; the owner renews each time."""
        looks.append(100.0 + len(looks) / 3)
        os.utime(lock, (looks[-1], looks[-1]))
        if len(looks) == 12:
            (tmp_path / "unpack.done").write_text("{}")
        return looks[-1]

    module = sys.modules[OncePlace.__module__]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=look))
    assert not is_mine(place(lease_s=1.0))
    assert len(looks) >= 12


def test_a_live_owner_of_this_machine_keeps_its_lock_when_it_does_not_renew(place, lock):
    from torchmuster.core import proc
    from torchmuster.train.once import _process_table

    mine = proc.read_process(os.getpid())
    card = {**DEAD, "table": _process_table(), "pid": mine.pid, "start": mine.start_ticks}
    lock.write_text(json.dumps(card))
    waits = place(lease_s=0.1, timeout_s=1.0)
    with pytest.raises(OnceError, match="not finished within 1 s"):
        is_mine(waits)


def test_another_process_with_the_pid_of_the_dead_owner_does_not_keep_its_lock(place, lock):
    card = {**card_of_the_dead(), "pid": os.getpid()}
    lock.write_text(json.dumps(card))
    assert is_mine(place(lease_s=60))


@pytest.mark.parametrize("text", ["", '{"host": "he'])
def test_a_lock_that_was_half_written_is_taken_over_after_its_lease(
    text, place, lock, said, tmp_path
):
    lock.write_text(text)
    assert is_mine(place())
    assert said == ["`unpack`: another process is gone; another process takes over"]
    assert not list(tmp_path.glob("unpack.lock*"))


def test_a_process_killed_in_the_middle_of_a_takeover_is_overcome(place, lock, tmp_path):
    lock.write_text(json.dumps(DEAD))
    (tmp_path / "unpack.lock.dead").touch()
    assert is_mine(place())
    assert not list(tmp_path.glob("unpack.lock*"))


def test_an_owner_whose_lock_was_taken_leaves_the_new_one_alone(place, lock):
    with once("unpack", place()) as mine:
        assert mine
        lock.write_text(json.dumps(DEAD))
    assert json.loads(lock.read_text()) == DEAD


def test_a_wait_has_a_limit_and_names_the_owner(place, lock):
    lock.write_text(json.dumps(DEAD))
    waits = place(lease_s=60, timeout_s=0.3)
    with pytest.raises(OnceError) as raised:
        is_mine(waits)
    assert raised.value.why == "pid 1 on here is still working on it"


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a" * 101])
def test_a_name_that_is_no_file_name_is_refused(name, place):
    with pytest.raises(UsageError), once(name, place()):
        pass

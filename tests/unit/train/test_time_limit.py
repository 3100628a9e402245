"""When a training stops without a signal."""

import json
import os

import pytest

from kit.waiting import Clock
from torchmuster.train import preempt
from torchmuster.train.preempt import TimeLimit


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
    assert os.environ["SLURM_JOB_END_TIME"] == "2000"

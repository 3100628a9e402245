"""What a run inside a job finds out for its agents."""

import os

import pytest

from torchmuster.core import proc
from torchmuster.launcher.engines.allocation import OwnJob
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.facts.collect import ALLOCATION_ENDS_AT
from torchmuster.launcher.jobs import conduct
from torchmuster.launcher.model.job import Allocation


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setenv(ALLOCATION_ENDS_AT, "")


def job_of(engine):
    return OwnJob(dialect=load_dialect(engine), allocation=Allocation(job_id="7", nodes=()))


def said(text, status=0):
    return lambda argv: proc.CommandOutput(status=status, stdout=text.encode(), stderr=b"")


def test_the_end_of_an_allocation_is_left_to_the_agents(monkeypatch):
    monkeypatch.setattr(conduct.time, "time", lambda: 1000.0)
    conduct.note_the_end(job_of("slurm"), said("left|10:00\n"))
    assert os.environ[ALLOCATION_ENDS_AT] == "1600"


def test_a_scheduler_that_does_not_say_leaves_nothing():
    conduct.note_the_end(job_of("pbs"), said("qstat: cannot connect", 111))
    assert os.environ[ALLOCATION_ENDS_AT] == ""


@pytest.mark.parametrize(("mode", "is_the_end"), [("CANCEL", True), ("REQUEUE", False)])
def test_the_partition_says_whether_a_preempted_job_comes_back(monkeypatch, mode, is_the_end):
    def ask(argv):
        job = "JobId=7 Requeue=1 Partition=main"
        told = job if "job" in argv else f"PartitionName=main PreemptMode={mode} State=UP"
        return proc.CommandOutput(status=0, stdout=told.encode(), stderr=b"")

    monkeypatch.setattr(conduct, "ask_quickly", ask)
    assert conduct.is_preempted_for_good(job_of("slurm")) is is_the_end
    assert not conduct.is_preempted_for_good(job_of("pbs"))  # it is not asked

"""The nodes of the job around this shell, and a shell of `salloc` that is on none of them."""

import os

import pytest

from torchmuster.core.spec.launch import JobLimits, RunRequest
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.launcher.cli.jobs import InsideJobPlace
from torchmuster.launcher.engines.allocation import OwnJob
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.model.job import AllocatedNode, Allocation
from torchmuster.multirun.cli.places import SweepHere


def in_job(*names, gpus=None):
    """Return the place inside a job of these nodes, which have no or so many GPUs."""
    of_nodes = zip(names, gpus or [None] * len(names), strict=True)
    nodes = tuple(AllocatedNode(name=name, gpus=number) for name, number in of_nodes)
    allocation = Allocation(job_id="7", nodes=nodes)
    return InsideJobPlace(OwnJob(dialect=load_dialect("slurm"), allocation=allocation))


def start_sweep(*names, dry_run=False):
    return in_job(*names).cell("sweep").start({"dry_run": dry_run}, Problems(), None)


@pytest.fixture
def started(monkeypatch):
    """Where a sweep or a command would have been started."""
    places = []
    monkeypatch.setattr(SweepHere, "start", lambda *given: places.append("this node") or 0)
    monkeypatch.setattr(InsideJobPlace, "instead", lambda job: None if job.from_here else 5)
    return places


def test_a_sweep_says_that_the_other_nodes_of_the_job_are_left_out(started, capsys):
    assert start_sweep(os.uname().nodename, "n2") == 0
    assert capsys.readouterr().err == "muster: members run on this node alone, of 2 in job 7\n"
    assert start_sweep(os.uname().nodename) == 0
    assert capsys.readouterr().err == ""
    assert len(started) == 2


def test_members_don_t_run_beside_the_job(started):
    assert start_sweep("n1", "n2") == 5
    assert started == []
    assert start_sweep("n1", "n2", dry_run=True) == 0


def test_a_workflow_does_not_run_beside_the_job():
    with pytest.raises(UsageError, match="not a node of job 7") as told:
        in_job("n1").cell("workflow").check(None, detach=False)
    assert told.value.fix == "start it on n1, or here with --here"
    assert in_job(os.uname().nodename).cell("workflow").check(None, detach=False) is None


@pytest.mark.parametrize(
    ("asked", "gpus", "workers"),
    [(None, (1, 2), (1, 2)), (None, (None, 2), (1, 2)), (None, (2, 2), (1,)), ("1", (1, 2), (1,))],
)
def test_each_gpu_of_a_job_of_unequal_nodes_gets_a_worker(
    tmp_path, monkeypatch, asked, gpus, workers
):
    monkeypatch.setattr(OwnJob, "with_launcher", lambda job: job)  # this machine has no srun
    (tmp_path / "train.py").write_text("")
    place = in_job("n1", "n2", gpus=gpus)
    request = RunRequest(script=str(tmp_path / "train.py"), nodes="2", nproc_per_node=asked)
    plan = place.plan(request, "r", JobLimits(), Problems())
    plan, _ = place._on_nodes(plan, place.job)

    assert plan.workers_per_node == workers

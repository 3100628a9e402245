"""The job around a process: which of its nodes this is, and which of them are ours."""

import os

import pytest

from torchmuster.errors import UsageError
from torchmuster.launcher.engines.allocation import OwnJob, find_own_job, own_job
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.model.job import AllocatedNode, Allocation


def job_of(*names, own_node=None):
    nodes = tuple(AllocatedNode(name=name) for name in names)
    allocation = Allocation(job_id="7", nodes=nodes, own_node=own_node)
    return OwnJob(dialect=load_dialect("slurm"), allocation=allocation)


@pytest.mark.parametrize("own_node", ["n2", "n2.cluster"])
def test_this_node_comes_first(own_node):
    assert job_of("n1", "n2", "n3", own_node=own_node).from_here().node_names == ("n2", "n1", "n3")


def test_this_node_is_known_by_its_name_of_the_system():
    here = os.uname().nodename.partition(".")[0]
    assert job_of("n1", f"{here}.cluster").from_here().node_names[0] == f"{here}.cluster"


def test_a_login_node_is_no_node_of_the_job():
    assert job_of("n1", "n2", own_node="login").from_here() is None


def test_one_node_needs_no_way_to_others():
    job = job_of("n1")
    assert job.with_launcher() is job


def test_other_nodes_of_a_torque_job_are_refused_with_what_to_use(monkeypatch):
    monkeypatch.setenv("PBS_VERSION", "TORQUE-6.0.2")
    with pytest.raises(UsageError, match="Torque") as refused:
        job_of("n1", "n2").with_launcher()
    assert refused.value.where == "job 7"
    assert "muster run --hosts" in refused.value.fix
    assert not job_of("n1", "n2").can_start_others
    assert job_of("n1").with_launcher().node_names == ("n1",)


def test_the_job_is_found_from_the_environment(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert find_own_job("slurm").node_names == find_own_job().node_names == ("n1", "n2")


def test_who_is_in_no_job_of_a_scheduler_is_told_so():
    with pytest.raises(UsageError, match="this is not a job of slurm"):
        own_job("slurm", "/runs/r")

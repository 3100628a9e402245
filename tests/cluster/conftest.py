"""Fixtures of clusters: pretended ones, and a real Slurm in namespaces."""

import os

import pytest

from cluster.pbs import pbs
from cluster.slurm_lab import SlurmLab, why_not

__all__ = ["pbs"]
_LAB = pytest.StashKey[SlurmLab]()


@pytest.fixture(scope="session")
def slurm_lab(request):
    """Return a real Slurm of 2 nodes, each with 4 CPUs and 2 pretended GPUs."""
    if (reason := why_not()) is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with SlurmLab(2, cpus=4, gpus=2) as lab:
        request.config.stash[_LAB] = lab
        yield lab
        del request.config.stash[_LAB]


@pytest.fixture(autouse=True)
def _slurm_lab_as_found(request):
    """Leave no job and no killed node to the next test."""
    yield
    lab = request.config.stash.get(_LAB, None)
    if lab is not None and "slurm_lab" in request.fixturenames:
        lab.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Print the daemons' logs under a failed test."""
    report = yield
    lab = item.config.stash.get(_LAB, None)
    if report.failed and lab is not None and "slurm_lab" in item.fixturenames:
        report.sections.append(("daemons of the Slurm lab", lab.logs()))
    return report

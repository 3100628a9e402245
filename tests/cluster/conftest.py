"""Fixtures of clusters: pretended ones, and a real Slurm in namespaces."""

import os
import uuid

import pytest

from cluster.pbs import pbs
from cluster.slurm_lab import SlurmLab, why_not
from kit.command import MUSTER, SOURCE

__all__ = ["pbs"]
_LAB = pytest.StashKey[SlurmLab]()


def need_slurm():
    """Skip the test where no real Slurm can be started, or fail it in CI."""
    if (reason := why_not()) is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def slurm_lab(request):
    """Return a real Slurm of 3 nodes, each with 4 CPUs and 2 pretended GPUs."""
    need_slurm()
    with SlurmLab(3, cpus=4, gpus=2) as lab:
        request.config.stash[_LAB] = lab
        yield lab
        del request.config.stash[_LAB]


@pytest.fixture
def login(slurm_lab):
    """Return `login_to` the cluster of all tests."""
    return login_to(slurm_lab)


def login_to(lab):
    """Return a function that runs `muster` on the login node, in a folder of its own that all nodes see.

    Its `folder` is that folder, its `env` what a command needs to find the same runs, and `script`
    writes a training script there.
    """
    folder = lab.shared / uuid.uuid4().hex
    folder.mkdir()
    env = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}

    def muster(*words, on=None, limit_s=120.0, **more):
        argv = [*MUSTER, *words]
        return lab.run(argv, env=env | more, cwd=str(folder), on=on, limit_s=limit_s)

    muster.folder, muster.env = folder, env
    muster.script = (folder / "train.py").write_text
    return muster


@pytest.fixture(autouse=True)
def _slurm_lab_as_found(request):
    """Leave no job and no killed node to the next test."""
    yield
    lab = request.config.stash.get(_LAB, None)
    if lab is not None and "slurm_lab" in request.fixturenames:
        lab.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Print what jobs and daemons have said under a failed test."""
    report = yield
    lab = item.config.stash.get(_LAB, None)
    if report.failed and lab is not None and "slurm_lab" in item.fixturenames:
        if "login" in item.fixturenames:
            report.sections.append(("jobs of the test", _job_logs(item.funcargs["login"].folder)))
        report.sections.append(("daemons of the Slurm lab", lab.logs(num_lines=20)))
    return report


def _job_logs(folder):
    """Return the last lines of what the heads of a test's runs and their agents wrote."""
    found = []
    for path in sorted([*folder.rglob("job.log"), *folder.rglob("logs/agents/*.log")]):
        lines = path.read_text(errors="replace").splitlines()[-20:]
        found += [f"--- {path.relative_to(folder)}", *lines]
    return "\n".join(found)

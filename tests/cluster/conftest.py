"""Fixtures of clusters: pretended ones, and a real Slurm in namespaces."""

import os
import uuid

import pytest

from cluster.pbs import pbs
from cluster.slurm import cluster
from cluster.slurm_lab import SlurmLab, why_not
from cluster.user import User
from kit.command import MUSTER, SOURCE

__all__ = ["cluster", "pbs"]
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


class LabUser(User):
    """A user of a lab, in a folder of his own that all nodes see."""

    def __init__(self, lab):
        folder = lab.shared / uuid.uuid4().hex
        folder.mkdir()
        own = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        super().__init__(folder, own | {"MUSTER_HOME": str(folder / "home")})
        self.lab = lab

    def __call__(self, *words, on=None, limit_s=120.0, **more):
        return self.run([*MUSTER, *words], on=on, limit_s=limit_s, env=self.env | more)

    def run(self, words, **options):
        """Run a command to its end; see `SlurmLab.popen`."""
        return self.lab.run(words, **{"env": self.env, "cwd": str(self.folder), **options})

    def popen(self, words, **options):
        """Start a command."""
        return self.lab.popen(words, **{"env": self.env, "cwd": str(self.folder), **options})


@pytest.fixture
def login(slurm_lab):
    """Return a user of the cluster of all tests."""
    return LabUser(slurm_lab)


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

"""One cluster for all tests, and a user's folder for each; the tests are those of `make lab-kubernetes` alone."""

import os
import tempfile
from pathlib import Path

import pytest

from kit.world import remove_home
from lab.kubernetes.bench import NOTES, Bench
from lab.kubernetes.cluster import Cluster
from lab.kubernetes.user import User

collect_ignore_glob = [] if os.environ.get("MUSTER_LAB") == "kubernetes" else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster():
    """Return a cluster of three nodes: one of them may die while each pod of a run has one for itself."""
    with Cluster(3) as made:
        yield made


@pytest.fixture(scope="session")
def user(cluster):
    """Return a user who has the rights of the page's Role."""
    folder = Path(tempfile.mkdtemp(prefix="muster-lab-", dir="/var/tmp"))
    (folder / "shared").mkdir()
    made = User(cluster, folder)
    made.share("shared", folder / "shared")
    yield made
    remove_home(folder)


@pytest.fixture
def bench(cluster, user):
    """Return what a test does on the cluster; nothing of a test is there for the next."""
    made = Bench(cluster, user)
    yield made
    made.close()
    made.wait_empty()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Print what the terminal showed under a failed test."""
    report = yield
    bench = getattr(item, "funcargs", {}).get("bench")
    if report.failed and bench is not None:
        report.sections.append(("what was shown", bench.said))
    return report


def pytest_terminal_summary(terminalreporter):
    """Print what was measured."""
    width = max((len(what) for what, _ in NOTES), default=0)
    for what, seconds in NOTES:
        terminalreporter.write_line(f"measured: {what:{width}}  {seconds:5.1f} s")

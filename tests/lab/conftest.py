"""Labs for tests: one for a module or one for a test, put in order after each, logs under a failure."""

import pytest

from kit import missing
from lab.live.case import CAREFUL, Bench
from lab.netlab import Host, NetLab, why_not

_LABS = pytest.StashKey[list[NetLab]]()


@pytest.fixture(scope="session")
def allowed():
    """Skip the test where no lab may start; see `missing.stop`."""
    if (reason := why_not()) is not None:
        missing.stop(reason)


@pytest.fixture(scope="session")
def labs(request, allowed):
    """Return a function that makes a lab; it stands until it is closed, at most to the end."""
    made = request.config.stash.setdefault(_LABS, [])

    def make(*args, **options):
        made.append(NetLab(*args, **options))
        return made[-1]

    yield make
    for lab in made:
        lab.close()
    del request.config.stash[_LABS]


@pytest.fixture
def make_lab(request, labs):
    """Return a function that makes a lab for this test: `make_lab([Host("n1")], networks=...)`."""

    def make(*args, **options):
        lab = labs(*args, **options)
        request.addfinalizer(lab.close)
        return lab

    return make


@pytest.fixture(scope="module")
def trio(labs):
    """Return a lab of three hosts: n1 and n2 share a folder, n3 has nothing but its own files."""
    with labs([Host("n1"), Host("n2"), Host("n3", shared=False)]) as lab:
        yield lab


@pytest.fixture(scope="module")
def careful_pair(labs):
    """Return a lab of two hosts whose names mean what they should."""
    with labs([*CAREFUL]) as lab:
        yield lab


@pytest.fixture
def bench(careful_pair, tmp_path):
    """Return two careful hosts and the commands that a person would type."""
    yield Bench(careful_pair, tmp_path)
    careful_pair.reset()
    for path in careful_pair.shared.iterdir():
        if not path.is_dir():
            path.unlink()


@pytest.fixture(autouse=True)
def _lab_as_found(request):
    """Leave no cut link, no killed sshd and no process to the next test."""
    yield
    if "trio" in request.fixturenames:
        request.getfixturevalue("trio").reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Print the logs of sshd under a failed test."""
    report = yield
    if report.failed:
        for lab in item.config.stash.get(_LABS, []):
            if lab.folder.exists():
                report.sections.append(("sshd of the lab", lab.logs()))
    return report

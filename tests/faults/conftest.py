"""Fixtures of the fault tests; every process that a test started is gone when it ends."""

import secrets
import sys
from pathlib import Path

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))

from harness import Job


@pytest.fixture
def job(tmp_path):
    """Return a function that makes a job; it is ended after the test."""
    jobs = []

    def make(*options, **fields) -> Job:
        number = len(jobs)
        made = Job(home=tmp_path / f"home{number}", folder=tmp_path / f"job{number}", **fields)
        if options:
            made.options = options
        jobs.append(made)
        return made

    yield make
    for made in jobs:
        made.clean_up()


@pytest.fixture
def memory_cgroup():
    """Return a function that starts a job in a control group of 700 MiB; skip where that can't be."""
    folders = []

    def start(run: Job) -> None:
        name = f"muster-test-{secrets.token_hex(4)}"
        v1 = Path("/sys/fs/cgroup/memory")
        base, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v1.parent, "memory.max")
        folder = base / name
        try:
            folder.mkdir()
            folders.append(folder)
            (folder / limit).write_text(str(700 << 20))
        except OSError as error:
            pytest.skip(f"no memory control group can be made here: {error}")
        run.prefix = ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
        run.start()

    yield start
    for folder in folders:
        wait_until(lambda f=folder: not (f / "cgroup.procs").read_text().strip(), "an empty group")
        folder.rmdir()


@pytest.fixture
def port():
    """Return a port that was free a moment ago."""
    return reserve_port()

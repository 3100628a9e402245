"""Fixtures of the fault tests; every process that a test started is gone when it ends."""

import contextlib
import sys
from pathlib import Path

import pytest

from kit.memory_group import MemoryGroup
from kit.ports import reserve_port

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
    with contextlib.ExitStack() as stack:

        def start(run: Job) -> None:
            try:
                group = stack.enter_context(MemoryGroup(700 << 20))
            except OSError as error:
                pytest.skip(f"no memory control group can be made here: {error}")
            run.prefix = tuple(group.argv([]))
            run.start()

        yield start


@pytest.fixture
def port():
    """Return a port that was free a moment ago."""
    return reserve_port()

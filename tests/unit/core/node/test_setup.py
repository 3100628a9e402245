import asyncio
import os
import sys

import pytest

from kit.values import run_plan
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import NodeSetup
from torchmuster.core.node.options import AgentOptions, HeadPlace
from torchmuster.core.node.setup import NodeWork, remove_scratch
from torchmuster.errors import MusterError


class Host:
    """An agent that only notes what it is to start with."""

    def __init__(self):
        self.started = []

    def tell(self, text):
        raise AssertionError(text)

    def start_with(self, program, environment):
        self.started.append((program.target, environment["COLOUR"]))


def work_of(tmp_path, setup):
    plan = run_plan(python=(sys.executable,), cwd=str(tmp_path), node_setup=setup)
    options = AgentOptions(
        plan=plan,
        num_workers=1,
        host="n1",
        head=HeadPlace(addresses=(), secret=b"", join_timeout_s=1.0),
        environment={**os.environ, "TMPDIR": str(tmp_path), "COLOUR": "blue"},
        run_dir=RunDir(str(tmp_path / "run")).path,
        place=0,
    )
    return NodeWork(options, DiskWriter())


def test_a_plain_setup_starts_the_program_and_makes_the_scratch_folder(tmp_path):
    host, work = Host(), work_of(tmp_path, NodeSetup(environment=(("COLOUR", "blue"),)))
    asyncio.run(work.run(host.tell, host.start_with))
    try:
        assert work.is_done
        assert host.started == [("t.py", "blue")]
        assert os.listdir(work.scratch) == []
    finally:
        remove_scratch(work.scratch)


@pytest.mark.parametrize(
    "setup", [{"lines": ("true",)}, {"before": ("true",)}, {"scratch": "$HOME"}], ids=str
)
def test_what_needs_a_shell_is_refused_rather_than_left_out(tmp_path, setup):
    host, work = Host(), work_of(tmp_path, NodeSetup(**setup))
    with pytest.raises(MusterError, match="runs setup lines"):
        asyncio.run(work.run(host.tell, host.start_with))
    assert not work.is_done
    assert not host.started

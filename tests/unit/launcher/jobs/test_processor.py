"""Nodes of another processor than the login node's."""

import os
import sys
from dataclasses import replace

from torchmuster.launcher.jobs.conduct import describe_difference, elf_machine, fit_interpreter
from unit.launcher.views.test_prune import PLAN


def elf(path, number):
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + number.to_bytes(2, "little"))
    path.chmod(0o755)
    return str(path)


def with_python(*words):
    return replace(PLAN, program=replace(PLAN.program, python=words))


def test_another_processor_is_said():
    line = describe_difference("x86_64", "n1", "aarch64")
    assert line == "login node is x86_64, n1 is aarch64: the job uses Python from its own PATH"
    assert describe_difference("x86_64", "n1", "x86_64") is None
    assert describe_difference(None, "n1", "x86_64") is None


def test_a_programs_processor_is_read_from_it(tmp_path):
    assert elf_machine(os.path.realpath(sys.executable)) == os.uname().machine
    assert elf_machine(elf(tmp_path / "arm", 183)) == "aarch64"
    (tmp_path / "script").write_text("#!/bin/sh\n")
    assert elf_machine(str(tmp_path / "script")) is None
    assert elf_machine(str(tmp_path / "missing")) is None


def test_an_interpreter_of_another_processor_gives_way_to_the_nodes_own(tmp_path):
    foreign, own = elf(tmp_path / "foreign", 183), elf(tmp_path / "own", 62)
    which = {foreign: foreign, "python3": own}.get
    plan = fit_interpreter(with_python(foreign, "-u"), "x86_64", which)
    assert plan.program.python == (own, "-u")


def test_an_interpreter_that_fits_or_can_not_be_told_stays(tmp_path):
    own = elf(tmp_path / "own", 62)
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    for words in ((own,), (str(tmp_path / "uv"), "run"), ("/missing/python",)):
        plan = with_python(*words)
        assert fit_interpreter(plan, "x86_64", {own: own, "python3": "/p3"}.get) == plan

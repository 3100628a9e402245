"""Login node and compute node of different processors: said, and the interpreter replaced that can't run here."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace

from torchmuster.core.model.plan import RunPlan

# Bytes 18 and 19 of an ELF file. Source: elf(5), e_machine.
_ELF_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 243: "riscv64"}
_HEADER_BYTES = 20


def describe_difference(submitted_from: str | None, node: str, machine: str) -> str | None:
    """Return the line that says that this node has another processor than the login node; None when it has not."""
    if not submitted_from or submitted_from == machine:
        return None
    return (
        f"login node is {submitted_from}, {node} is {machine}: "
        "the job uses Python from its own PATH"
    )


def elf_machine(path: str) -> str | None:
    """Return for which processor a program is, as `uname -m` calls it; None for scripts and what can't be read."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError:
        return None
    if len(header) < _HEADER_BYTES or header[:4] != b"\x7fELF":
        return None
    order = "little" if header[5] == 1 else "big"
    number = int.from_bytes(header[18:20], order)  # type: ignore[arg-type]
    return _ELF_MACHINES.get(number, f"processor {number}")


def fit_interpreter(
    plan: RunPlan, machine: str, which: Callable[[str], str | None] = shutil.which
) -> RunPlan:
    """Return the plan with the python3 of this node's PATH where the plan's is for another processor."""
    words = plan.program.python
    path = which(words[0]) if words else None
    made_for = elf_machine(os.path.realpath(path)) if path is not None else None
    own = which("python3")
    if made_for is None or made_for == machine or own is None:
        return plan
    return replace(plan, program=replace(plan.program, python=(own, *words[1:])))

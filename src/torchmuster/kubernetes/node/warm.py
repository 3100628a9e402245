"""Imports torch in a pod as soon as it starts, next to its pod server.

This process becomes a warm server as in sessions (`multirun/server/main.py`), in the job's
interpreter. It imports torch while the pods find each other and receive the run; then agent and
spawner are forked from it. Agents start by themselves what a run needs fresh, or everything if this
process is gone. Only runs have it: a group's tasks import what their commands say, and a sweep slot
imports for all of its members.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec, contract
from torchmuster.core.model.plan import Program, RunPlan, ScriptKind, StartMethod
from torchmuster.core.node.options import share_threads
from torchmuster.kubernetes.node.order import read_own
from torchmuster.multirun.server.messages import SessionSetup
from torchmuster.multirun.server.remote import WARM_PLACE

_LOG_FILE = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmWords:
    """The command line of `pod-warm`: the order's file, and the folder where callers connect."""

    order: str
    folder: str


def main(arguments: list[str]) -> int:
    """Become the interpreter that imports torch, if the run can use it."""
    words = codec.from_arguments(WarmWords, arguments)
    proc.die_with_parent(os.getppid())
    order, plan = read_own(words.order, os.environ)
    if order.group is not None or plan is None:
        return 0
    program = _program_here(plan.program)
    folder = words.folder
    if program is None or not has_use(plan):
        return 0
    os.makedirs(folder, mode=0o700, exist_ok=True)
    warmed = replace(plan, program=program, engine="pods")  # without the PYTHONPATH of a supervisor
    atomic.write_json(RunDir(folder).plan, codec.to_plain(warmed))
    setup = SessionSetup(
        name=order.run_id,
        nodes=1,
        workers=None,
        python=program.python,
        preload=(),
        idle_s=None,
        limit_s=None,
        folder="",
        variables=tuple(os.environ),
    )
    root = os.path.dirname(proc.PACKAGE_FOLDER)
    environment = variables_of_workers(plan, {**os.environ, **order.environment}, root)
    environment[contract.SESSION_VARIABLE] = json.dumps(codec.to_plain(setup))
    return _become(program, folder, environment)


def has_use(plan: RunPlan) -> bool:
    """Say whether this run's workers may be forked from a process that has imported only torch."""
    program = plan.program
    is_fresh = program.start is StartMethod.FRESH or program.kind is ScriptKind.COMMAND
    asks_more = bool(program.preload or program.call is not None or plan.debugger)
    setup = plan.node_setup
    is_other = bool(setup.lines) or setup.shipped is not None or plan.preflight == "only"
    return program.has_torch and not (is_fresh or asks_more or is_other)


def variables_of_workers(
    plan: RunPlan, environment: Mapping[str, str], root: str
) -> dict[str, str]:
    """Return the variables that a run's workers will have: those of sessions, and what agents add.

    Args:
        plan: The plan of the run.
        environment: The environment of the pod's pod server.
        root: The folder that holds torchmuster.
    """
    found = {**environment, "PYTHONPATH": proc.importable(environment.get("PYTHONPATH"), root)}
    share_threads(found, plan.num_workers(WARM_PLACE))
    return found | dict(plan.node_setup.environment)


def _program_here(program: Program) -> Program | None:
    """Return the program with an interpreter of this pod (see `launcher/node/remote/main.py`)."""
    if shutil.which(program.python[0]) is not None:
        return program
    found = shutil.which("python3") or shutil.which("python")
    return replace(program, python=(found, *program.python[1:])) if found is not None else None


def _become(program: Program, folder: str, environment: Mapping[str, str]) -> int:
    """Replace this process by the interpreter that imports."""
    log = os.open(os.path.join(folder, _LOG_FILE), os.O_WRONLY | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, fd in enumerate((null, log, log)):
        os.dup2(fd, target)
    entry = os.path.join(proc.PACKAGE_FOLDER, "multirun", "server", "main.py")
    os.chdir(folder)
    os.execvpe(program.python[0], [*program.python, entry, folder], dict(environment))

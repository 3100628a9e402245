"""The first thing that a pod of a run does, beside its door: it imports torch before anybody has called.

It becomes a door as sessions have them (`multirun/door/main.py`), in the job's interpreter. While the pods find each other and the run is
put into them, torch is imported; then agent and spawner are forks. What a run needs fresh is left to its agents, as is everything where
this process has gone. Only a run has one: what the tasks of a group import, their commands decide, and the slot of a sweep imports for all of its members.
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
from torchmuster.core.node.environment import share_threads
from torchmuster.kubernetes.node.order import read_own
from torchmuster.launcher.files.travel import package_folder
from torchmuster.multirun.door.messages import SessionSetup
from torchmuster.multirun.door.remote import WARM_PLACE

_LOG_FILE = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmWords:
    """The command line of `pod-warm`: the file of the pod's order, and where what is warm tells who calls it."""

    order: str
    folder: str


def main(arguments: list[str]) -> int:
    """Become what imports torch, where the run has a use for it."""
    words = codec.from_words(WarmWords, arguments)
    proc.die_with_parent(os.getppid())
    order, plan = read_own(words.order, os.environ)
    if order.group is not None or plan is None:
        return 0
    program = _program_here(plan.program)
    folder = words.folder
    if program is None or not has_use(plan):
        return 0
    os.makedirs(folder, mode=0o700, exist_ok=True)
    warmed = replace(plan, program=program, engine="pods")  # no PYTHONPATH here is a supervisor's
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
    root = os.path.dirname(package_folder())
    environment = variables_of_workers(plan, {**os.environ, **order.environment}, root)
    environment[contract.SESSION_VARIABLE] = json.dumps(codec.to_plain(setup))
    return _become(program, folder, environment)


def has_use(plan: RunPlan) -> bool:
    """Say whether workers of this run may be forks of a process that has imported torch, and nothing else, before."""
    program = plan.program
    is_fresh = program.start is StartMethod.FRESH or program.kind is ScriptKind.COMMAND
    asks_more = bool(program.preload or program.call is not None or plan.debugger)
    setup = plan.node_setup
    is_other = bool(setup.lines) or setup.shipped is not None or plan.preflight == "only"
    return program.has_torch and not (is_fresh or asks_more or is_other)


def variables_of_workers(
    plan: RunPlan, environment: Mapping[str, str], root: str
) -> dict[str, str]:
    """Return the variables with which a run's workers will be asked for: those of calls to the pod, and what agents add.

    Args:
        plan: Of the run.
        environment: Of the pod's door.
        root: The folder that holds torchmuster.
    """
    found = {**environment, "PYTHONPATH": proc.importable(environment.get("PYTHONPATH"), root)}
    share_threads(found, plan.num_workers(WARM_PLACE))
    return found | dict(plan.node_setup.environment)


def _program_here(program: Program) -> Program | None:
    """Return the program with an interpreter that this pod has, as `launcher/node/remote/main.py` chooses it."""
    if shutil.which(program.python[0]) is not None:
        return program
    found = shutil.which("python3") or shutil.which("python")
    return replace(program, python=(found, *program.python[1:])) if found is not None else None


def _become(program: Program, folder: str, environment: Mapping[str, str]) -> int:
    """Become the interpreter that imports."""
    log = os.open(os.path.join(folder, _LOG_FILE), os.O_WRONLY | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, fd in enumerate((null, log, log)):
        os.dup2(fd, target)
    entry = os.path.join(package_folder(), "multirun", "door", "main.py")
    os.chdir(folder)
    os.execvpe(program.python[0], [*program.python, entry, folder], dict(environment))

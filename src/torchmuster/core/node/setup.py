"""The setup of a node, once before its workers start.

Its order: variables and lines in one login shell; the job's interpreter; the spawner, which imports
torch while the setup continues; the scratch folder; `--stage`; `--before`. Workers start when all
of it is done.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torchmuster.core import plugs, proc
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.model import codec, contract
from torchmuster.core.model.plan import Program, ShippedEnvironment, StageOrder, UnpackOrder
from torchmuster.core.node.leftovers import (
    folder_name,
    hold,
    make_scratch,
    note_owner,
    parent_folder,
)
from torchmuster.core.node.options import AgentOptions
from torchmuster.core.node.shell import NodeShell, SetupError, Transfer
from torchmuster.errors import MusterError

_MAX_TAKES = 10


class SetupHost(Protocol):
    """What the setup of a node needs of its agent."""

    def tell(self, text: str) -> None:
        """Show the user a sentence."""

    def start_with(self, program: Program, environment: Mapping[str, str]) -> None:
        """Set the job's interpreter and variables, and start the spawner unless one runs."""


class NodeWork:
    """The setup of one node, from the start of its agent to its end.

    Args:
        options: The agent's options.
        disk: Writes the setup log.
        socket_folder: The folder with the agent's record, which names what it has made.
    """

    def __init__(
        self, options: AgentOptions, disk: DiskWriter, socket_folder: str | None = None
    ) -> None:
        self.plan, self.setup = options.plan, options.plan.node_setup
        self.options = options
        self.run_dir = options.run_directory(options.plan.run_id)
        self.place = options.place or 0
        self._socket_folder = socket_folder
        self.scratch: str | None = None
        self.is_done = False
        self._disk = disk
        self._shell: NodeShell | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Return the processes of the setup that run now."""
        return frozenset(self._shell.pids) if self._shell is not None else frozenset()

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables that workers and commands get on top of the job's environment."""
        named = {
            contract.PLACE_VARIABLE: str(self.place),
            contract.NODE_VARIABLE: self.options.host,
        }
        return named | ({contract.SCRATCH_VARIABLE: self.scratch} if self.scratch else {})

    def try_at_once(self) -> None:
        """Do the setup now if it has nothing to wait for; that takes less than a millisecond."""
        setup = self.setup
        if not setup.is_empty or any(sign in (setup.scratch or "") for sign in "$`~"):
            return
        with contextlib.suppress(MusterError):  # `run` fails in the same way, and can report it
            self._make_scratch(parent_folder(self.options.environment, setup.scratch))
            self.is_done = True

    async def run(self, host: SetupHost) -> None:
        """Do the whole setup.

        Raises:
            MusterError: A part failed; the message names the node.
        """
        setup, program, environment = self.setup, self.plan.program, self.options.environment
        self._shell = shell = NodeShell(self.options.host, host.tell, self._log)
        if setup.lines:
            self._log(b"".join(f"+ {line}\n".encode() for line in setup.lines))
            own = dict(setup.environment)
            shelled = await shell.run_lines(setup.lines, environment, own, setup.origin)
            if setup.python_follows:
                program = _follow(program, environment, shelled.path_before, shelled.environment)
            environment = _with_names(environment, shelled.environment)
        if setup.shipped is not None:
            path = await self._unpack(shell, setup.shipped, environment)
            program, environment = _inside(path, program, environment)
        elif program.python != self.plan.program.python:
            host.tell(f"the interpreter is {program.python[0]}: the setup lines put it on PATH")
        host.start_with(program, environment)
        parent = parent_folder(environment, setup.scratch)
        self._make_scratch(await shell.expand(parent, environment))
        if setup.stages:
            await self._stage(shell, environment)
        for command in setup.before:
            self._log(f"+ {command}\n".encode())
            extra = {contract.RUN_DIR_VARIABLE: self.run_dir.path, **self.variables}
            await shell.run_command(command, self.plan.program.cwd, {**environment, **extra})
        self.is_done = True

    async def _unpack(
        self, shell: NodeShell, shipped: ShippedEnvironment, environment: Mapping[str, str]
    ) -> str:
        """Unpack the job's environment unless it is here; return its folder, held while we live.

        A separate process unpacks it.
        """
        parent = await shell.expand(parent_folder(environment, self.setup.scratch), environment)
        order = UnpackOrder(parent=parent, tries=self.place == 0, shipped=shipped)
        for _ in range(_MAX_TAKES):
            argv = proc.node_program("unpack", codec.to_word(order))
            unpacking = Transfer(argv, environment, shell.tell, log=self._log)

            def goes_on(unpacking: Transfer = unpacking) -> str:
                return f"unpacking the environment: {unpacking.words or 'not begun yet'}"

            async def wait(child: proc.Child, what: Callable[[], str] = goes_on) -> int:
                return await shell.wait(child, what)

            try:
                path = str((await unpacking.finish(wait))["path"])
            except MusterError as error:
                what = f"{error.what} ({self.options.host})"
                raise SetupError(what, where=error.where, why=error.why, fix=error.fix) from error
            if hold(path):
                return path  # else somebody has just removed it
        raise SetupError(f"the environment is removed again and again on {self.options.host}")

    def _make_scratch(self, parent: str) -> None:
        name = folder_name(self.plan.run_id, self.place, self.run_dir.path)
        for _ in range(_MAX_TAKES):
            self.scratch = make_scratch(parent, name)
            if hold(self.scratch):
                break  # else another process just removed it as a leftover of a killed agent
        if self._socket_folder is not None:
            note_owner(self._socket_folder, self.scratch)

    def _log(self, data: bytes) -> None:
        self._disk.append(self.run_dir.setup_log(self.options.host), data)

    async def _stage(self, shell: NodeShell, environment: Mapping[str, str]) -> None:
        """Stage in a separate process, which can hang or be killed without harm to the agent."""
        order = StageOrder(scratch=str(self.scratch), stages=self.setup.stages)
        argv = proc.node_program("stage", codec.to_word(order))
        staging = Transfer(argv, environment, shell.tell, log=self._log)
        try:
            await staging.finish(lambda child: shell.wait(child, lambda: _staging_goes_on(staging)))
        except MusterError as error:
            what = f"staging failed on {self.options.host}: {error.what}"
            raise SetupError(what, where=error.where, why=error.why, fix=error.fix) from error


def _staging_goes_on(staging: Transfer) -> str:
    if "source" not in staging.progress:
        return "staging has begun"
    return f"staging {staging.progress['source']}: {staging.words}"


def _inside(
    path: str, program: Program, environment: Mapping[str, str]
) -> tuple[Program, dict[str, str]]:
    """Return the program and the variables that use an environment unpacked at `path`."""
    prefix = os.path.join(path, "env")
    name = "CONDA_PREFIX" if os.path.isdir(os.path.join(prefix, "conda-meta")) else "VIRTUAL_ENV"
    dropped = ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
    after = {key: value for key, value in environment.items() if key not in dropped}
    paths = [os.path.join(prefix, "bin"), environment.get("PATH", "")]
    after |= {name: prefix, "PATH": os.pathsep.join(filter(None, paths))}
    python = (os.path.join(prefix, "bin", "python"), *program.python[1:])
    return replace(program, python=python), after


def _with_names(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the variables after the setup lines; a session also gets the names they changed."""
    names = before.get(contract.SITE_NAMES_VARIABLE)
    if names is None:
        return dict(after)
    changed = {n for n in {*before, *after} if before.get(n) != after.get(n)}
    return {**after, contract.SITE_NAMES_VARIABLE: " ".join(sorted({*names.split(), *changed}))}


def _with_python(program: Program, python: str, *flags: str) -> Program:
    """Return the program with another interpreter; a session's target is the interpreter itself."""
    door = plugs.entry("door")
    target = python if door and door in program.args else program.target
    return replace(program, target=target, python=(python, *flags))


def _follow(
    program: Program, before: Mapping[str, str], path_before: str, after: Mapping[str, str]
) -> Program:
    """Return the program with the interpreter that setup lines have put on PATH, if any."""
    changed = any(
        after.get(name) and after.get(name) != before.get(name)
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX")
    )
    path = after.get("PATH", "")
    if not changed and shutil.which("python3", path=path) == shutil.which(
        "python3", path=path_before
    ):
        return program
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    return _with_python(program, found, *program.python[1:]) if found else program


def other_interpreter(program: Program, environment: Mapping[str, str]) -> Program | None:
    """Return the program with PATH's python3 if its own can't be executed here, else None."""
    word = program.python[0]
    path = environment.get("PATH")
    found = shutil.which("python3", path=path)
    if found is None or found == word or not os.path.isdir(program.cwd):
        return None
    if shutil.which(word, path=path) is not None and not _of_another_processor(word):
        return None
    return _with_python(program, found)


def _of_another_processor(path: str) -> bool:
    """Return whether an ELF file is for another processor than our own Python."""
    try:
        with open(path, "rb") as theirs, open(sys.executable, "rb") as ours:
            one, other = theirs.read(20), ours.read(20)
    except OSError:
        return False
    both_elf = one[:4] == other[:4] == b"\x7fELF"
    return both_elf and (one[4:6], one[18:20]) != (other[4:6], other[18:20])


def refusal_of(error: MusterError) -> dict[str, Any]:
    """Return an error as the fields of a `SpawnerRefused`."""
    return {
        "why": error.why or error.what,
        "what": error.what,
        "where": error.where,
        "hint": error.fix,
    }

"""Set up a node before its workers start: setup lines, shipped environment, scratch folder, staging, commands.

In this order: variables and lines in one login shell; the job's interpreter; the spawner starts and imports torch
while the rest goes on; the scratch folder; `--stage`; `--before`. Workers start when all of it is done.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.model import codec, contract
from torchmuster.core.model.plan import Program, ShippedEnvironment, StageOrder, UnpackOrder
from torchmuster.core.node.leftovers import hold, parent_folder
from torchmuster.core.node.setup import NodeWork, SetupHost, with_python
from torchmuster.errors import MusterError
from torchmuster.launcher.node.shell import NodeShell, SetupError, Transfer

_MAX_TAKES = 10


class ShellWork(NodeWork):
    """The setup of a node that runs lines, unpacks an environment or stages files."""

    _shell: NodeShell | None = None

    @property
    def pids(self) -> frozenset[int]:
        """The processes that run for it now."""
        return frozenset(self._shell.pids) if self._shell is not None else frozenset()

    async def run(self, host: SetupHost) -> None:
        """Do all of it, in the order of the module's docstring."""
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
        self.make_scratch(await shell.expand(parent, environment))
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
        """Unpack the environment of the job in a process of its own, unless it is here; hold it while we live; return its folder."""
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

    def _log(self, data: bytes) -> None:
        self._disk.append(self.run_dir.setup_log(self.options.host), data)

    async def _stage(self, shell: NodeShell, environment: Mapping[str, str]) -> None:
        """Stage in a process of its own, so that it can hang or be killed without the agent."""
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
    return with_python(program, found, *program.python[1:]) if found else program

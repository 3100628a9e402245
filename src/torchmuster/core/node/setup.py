"""What a node does once before its workers start: its scratch folder, and the job's interpreter.

Setup lines, shipped environments, `--stage` and `--before` are another room's (table `node_work`).
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from torchmuster.core import plugs
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.model import contract
from torchmuster.core.model.plan import Program
from torchmuster.core.node.leftovers import (
    folder_name,
    hold,
    make_scratch,
    note_owner,
    parent_folder,
)
from torchmuster.core.node.options import AgentOptions
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

    @property
    def pids(self) -> frozenset[int]:
        """Return the processes of the setup that run now."""
        return frozenset()

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
        if not self.setup.is_empty or not self.setup.is_plain:
            return
        with contextlib.suppress(MusterError):  # `run` meets it again, where it can be told
            self.make_scratch(parent_folder(self.options.environment, self.setup.scratch))
            self.is_done = True

    async def run(self, host: SetupHost) -> None:
        """Do the whole setup.

        Raises:
            MusterError: A part failed; the message names the node.
        """
        if not self.setup.is_plain:
            raise MusterError("no part of muster that is here runs setup lines and stages files")
        host.start_with(self.plan.program, self.options.environment)
        self.make_scratch(parent_folder(self.options.environment, self.setup.scratch))
        self.is_done = True

    def make_scratch(self, parent: str) -> None:
        """Make the scratch folder in `parent`, and hold it while we live."""
        name = folder_name(self.plan.run_id, self.place, self.run_dir.path)
        for _ in range(_MAX_TAKES):
            self.scratch = make_scratch(parent, name)
            if hold(self.scratch):
                break  # else another process just removed it as a leftover of a killed agent
        if self._socket_folder is not None:
            note_owner(self._socket_folder, self.scratch)


def with_python(program: Program, python: str, *flags: str) -> Program:
    """Return the program with another interpreter; a session server is a command that begins with its own."""
    server_entry = plugs.entry("session_server")
    target = python if server_entry and server_entry in program.args else program.target
    return replace(program, target=target, python=(python, *flags))


def other_interpreter(program: Program, environment: Mapping[str, str]) -> Program | None:
    """Return the program with PATH's python3 if its own can't be executed here, else None."""
    word = program.python[0]
    path = environment.get("PATH")
    found = shutil.which("python3", path=path)
    if found is None or found == word or not os.path.isdir(program.cwd):
        return None
    if shutil.which(word, path=path) is not None and not _of_another_processor(word):
        return None
    return with_python(program, found)


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

"""Where a run lives on a host that ssh reaches: in the client's run directory, in the head's, or in one of its own."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace

from torchmuster.errors import MusterError
from torchmuster.files import atomic, code_copy
from torchmuster.files.layout import RunDir, muster_home
from torchmuster.model import codec
from torchmuster.model.plan import ScriptKind
from torchmuster.net.remote_messages import Placed, SetUpRun, SetUpTasks
from torchmuster.node.remote.files import (
    CodeOutputs,
    make_own_run_dir,
    mark_of,
    sees_run,
    write_private,
)
from torchmuster.node.shell import NodeShell


class RemotePlace:
    """The run directory of a run on this host.

    Attributes:
        is_own: It was made here, and holds a copy of the secret.
        code: The copy of the code folder; None where the host has the code.
    """

    def __init__(self, message: SetUpRun) -> None:
        self._message = message
        plan, head = message.plan, message.head_run_dir
        # An earlier session's own folder may have the same path and token as the client's, or the head's: the mark tells them apart.
        is_same = mark_of(message.run_dir) == message.mark
        sees_client = message.may_share and is_same and sees_run(message.run_dir, message.token)
        has_code = message.may_share and (
            _has_code(message) or (sees_client and _is_by_value(message))
        )
        has_code = has_code and (sees_client or not _is_own_copy(message))
        self.is_own = self._with_head = False
        if sees_client and has_code:
            self.run_dir = RunDir(message.run_dir)
        elif head and sees_run(head, message.token) and mark_of(head) == message.head_mark:
            self.run_dir, self._with_head = RunDir(head), True
        else:
            self.run_dir, self.is_own = (
                RunDir(make_own_run_dir(plan.run_id, message.token, message.secret)),
                True,
            )
        self.code = CodeOutputs(self.run_dir) if self.is_own and not has_code else None
        self._secret_inode = 0

    def answer(self) -> Placed:
        """Return what the client is told."""
        return Placed(
            run_dir=self.run_dir.path,
            mark=mark_of(self.run_dir.path),
            is_shared=not self.is_own and not self._with_head,
            with_head=self._with_head,
            wants_code=self.code is not None and not self.code.is_there,
            is_copied=self.code is not None,
        )

    def write_run(self) -> str | None:
        """Write plan and secret; return a sentence when the interpreter is another than asked for.

        Raises:
            MusterError: There is no interpreter.
        """
        plan, note = self._message.plan, None
        program = plan.program
        if self.code is not None:
            program = code_copy.moved(program, self._message.code_root, self.code.root)
        of_door = plan.session is not None and plan.node_setup.python_follows
        if not of_door and shutil.which(program.python[0]) is None:
            found = shutil.which("python3") or shutil.which("python")
            if found is None:
                what = f"there is no {program.python[0]} and no python3 for the script"
                raise MusterError(what, fix="python = [...] in the engine's section, or --python")
            note = f"{program.python[0]} does not exist: the script runs with {found}"
            program = replace(program, python=(found, *program.python[1:]))
        atomic.write_json(self.run_dir.plan, codec.to_plain(replace(plan, program=program)))
        write_private(self.run_dir.secret, self._message.secret)
        self._secret_inode = os.stat(self.run_dir.secret).st_ino
        return note

    def remove_secret(self) -> None:
        """Remove the secret, unless a later session of this run has written a new one."""
        try:
            if self.is_own and os.stat(self.run_dir.secret).st_ino == self._secret_inode:
                os.unlink(self.run_dir.secret)
        except OSError:
            return


def _is_by_value(message: SetUpRun) -> bool:
    """Say whether the program is a function without a file: only who shares the client's files has what it uses."""
    return message.script is None and message.plan.program.kind is ScriptKind.FUNCTION


def _is_own_copy(message: SetUpRun) -> bool:
    """Say whether the code would be what an earlier session has brought here: to a place of the same name as the client's own copy.

    So it is where the client is a first pod that was made again.
    """
    folder = os.path.join(muster_home(), "runs", message.plan.run_id, "code")
    program = message.plan.program
    place = message.script["path"] if message.script is not None else program.cwd
    return f"{place}/".startswith(f"{folder}/")


def _has_code(message: SetUpRun) -> bool:
    """Say whether this host has the client's script, or its folder when the program is no file."""
    program = message.plan.program
    if (
        message.script is None
    ):  # what a function uses may have been edited since the folder was copied by hand
        return program.kind is not ScriptKind.FUNCTION and os.path.isdir(program.cwd)
    return code_copy.identity(message.script["path"]) == message.script


def lacking_folders(message: SetUpTasks) -> tuple[str, ...]:
    """Return which folders of a workflow this host lacks, or can't write to."""
    run_dir = RunDir(message.run_dir)
    sees = message.may_share and sees_run(run_dir.path, message.token)
    if not sees or not os.access(run_dir.path, os.W_OK) or not os.access(run_dir.secret, os.R_OK):
        return (run_dir.path,)
    return tuple(folder for folder in message.folders if not os.path.isdir(folder))


async def do_setup_lines(message: SetUpTasks, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment after the site's variables and setup lines.

    Raises:
        MusterError: A line failed.
    """
    environment = {**environment, **message.environment}
    if not message.lines:
        return environment
    shell = NodeShell(message.host, lambda _: None, lambda _: None)
    done = await shell.run_lines(message.lines, environment, message.environment, message.origin)
    return done.environment

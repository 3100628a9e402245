"""What hosts get if they lack it: torchmuster, and the folder of the user's code."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir, muster_home
from torchmuster.core.model.plan import Program, RunPlan
from torchmuster.core.model.text import show_transfer
from torchmuster.core.net.address import read_secret
from torchmuster.core.proc import HasStatus
from torchmuster.launcher.engines.ssh_command import (
    CONNECT_LIMIT_S,
    SshHost,
    hint_for,
    marker_of,
    remote_command,
    session_argv,
)
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.files.code_copy import CodeFolder
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.remote_messages import CODE_FILE
from torchmuster.launcher.node.remote.files import mark_of

SAY_EVERY_S = 5.0


class Route(Protocol):
    """A way to a host other than ssh; its remote end is waiting already."""

    def open(self, host: str, errors: int) -> tuple[HasStatus, int, int]:
        """Return a handle of the remote end, and its input and output; errors go to `errors`.

        Raises:
            MusterError: The host can't be reached.
        """


Starts = Callable[[Sequence[str], int, int, int], HasStatus]


def start_between_pipes(
    start: Starts, argv: Sequence[str], stderr: int
) -> tuple[HasStatus, int, int]:
    """Start a session; return its handle, and our ends of its input and output."""
    theirs_in, ours_in = os.pipe2(os.O_CLOEXEC)
    ours_out, theirs_out = os.pipe2(os.O_CLOEXEC)
    try:
        return start(argv, theirs_in, theirs_out, stderr), ours_in, ours_out
    except BaseException:
        os.close(ours_in)
        os.close(ours_out)
        raise
    finally:
        os.close(theirs_in)
        os.close(theirs_out)


def start_process(argv: Sequence[str], stdin: int, stdout: int, stderr: int) -> HasStatus:
    """Start ssh itself."""
    return proc.start(argv, stdin=stdin, stdout=stdout, stderr=stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What every host is offered, and how hosts are called.

    Attributes:
        way: How hosts are reached; None for ssh.
        root: Folder of this torchmuster, for hosts that share the file system; empty for none.
        pythons: Interpreters to try first for muster's own processes.
        start: Starts a session from ssh's command line, with these descriptors.
        connect_limit_s: How long a host may take to answer; a pod's replacement has to be created
            first.
        hint_of: Returns the remedy for an unusable host, given its name and the error.
    """

    ssh: tuple[str, ...]
    sha: str
    root: str
    files: tuple[tuple[str, bytes], ...]
    pythons: tuple[str, ...] = ()
    connect_limit_s: float = CONNECT_LIMIT_S
    way: Route | None = None
    start: Starts = start_process
    hint_of: Callable[[str, str], str] = hint_for

    def loader(self) -> bytes:
        """Return the program that is sent first."""
        source = dict(self.files)["launcher/node/remote/loader.py"]
        return source + f"\nmain({self.sha!r}, {self.root!r})\n".encode()

    def argv(self, host: SshHost) -> list[str]:
        """Return the command that opens a session with a host."""
        command = remote_command(marker_of(self.sha), len(self.loader()), self.pythons)
        return session_argv(self.ssh, host, command)

    def package(self) -> bytes:
        """Return the archive for hosts without this version of the package."""
        cache = os.path.join(muster_home(), "cache")
        return code_copy.cached_archive(cache, list(self.files), self.sha)


def make_bundle(ssh: Sequence[str], pythons: Sequence[str], *, may_share: bool) -> Bundle:
    """Return the offer of the torchmuster that runs here."""
    files = code_copy.package_files(proc.PACKAGE_FOLDER)
    return Bundle(
        ssh=tuple(ssh),
        sha=code_copy.content_hash(files),
        root=os.path.dirname(proc.PACKAGE_FOLDER) if may_share else "",
        files=tuple(files),
        pythons=tuple(pythons),
    )


class CodeArchive:
    """The code folder as one file, created when the first host asks for it."""

    def __init__(self, program: Program, run_dir: RunDir, root: str | None = None) -> None:
        self.base = root or code_copy.root_of(program.cwd)  # its files are not read here
        self._program = program
        self._path = os.path.join(run_dir.path, CODE_FILE)
        self._lock = threading.Lock()
        self._folder: CodeFolder | None = None

    def path(self) -> str:
        """Return the archive's path; create it on the first call.

        Raises:
            UsageError: The code is too large, or the script is not in it.
        """
        with self._lock:
            if self._folder is None:
                folder = code_copy.find_code(self.base)
                code_copy.check_inside(self._program, folder.root)
                with open(self._path, "wb") as file:
                    code_copy.write_archive(folder.root, folder.names, file)
                self._folder = folder
        return self._path

    def describe(self, num_hosts: int) -> str | None:
        """Return a sentence on the code copied to `num_hosts` hosts; None if none was copied."""
        if self._folder is None or not num_hosts:
            return None
        hosts = f"{num_hosts} host{'s' if num_hosts != 1 else ''}"
        return f"no shared file system: copied {self._folder.describe()} to {hosts}"

    def telling(self, host: str, say: Callable[[str], None]) -> Callable[[int], None]:
        """Return a callback for the bytes sent to a host; it reports progress every few seconds."""
        began_at = said_at = time.monotonic()

        def note(done_bytes: int) -> None:
            nonlocal said_at
            now = time.monotonic()
            if now - said_at >= SAY_EVERY_S:
                said_at, total = now, os.path.getsize(self._path)
                say(f"the code goes to {host}: {show_transfer(done_bytes, total, now - began_at)}")

        return note

    def remove(self) -> None:
        """Remove the archive."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def order_to_set_up(
    plan: RunPlan,
    run_dir: RunDir,
    *,
    token: str,
    may_share: bool,
    code_root: str,
    of_head: messages.Placed | None,
) -> messages.SetUpRun:
    """Return the message that sets up a run on a host.

    Args:
        plan: Plan of the run.
        run_dir: The run directory here.
        token: Content of a file in `run_dir`, by which a host notices that it shares the directory.
        may_share: Look for a shared file system; else everything is copied.
        code_root: The folder of the code.
        of_head: The run's placement on the head's host; None for that host.
    """
    script = code_copy.script_of(plan.program)
    return messages.SetUpRun(
        plan=plan,
        run_dir=run_dir.path,
        mark=mark_of(run_dir.path),
        token=token,
        may_share=may_share,
        secret=read_secret(run_dir.secret).hex(),
        script=code_copy.identity(script) if script is not None else None,
        code_root=code_root,
        head_run_dir=of_head.run_dir if of_head is not None else None,
        head_mark=of_head.mark if of_head is not None else "",
    )

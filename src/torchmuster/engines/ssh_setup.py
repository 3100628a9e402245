"""How a host gets what a run needs there: its place, the code folder, plan and secret."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchmuster.engines.ssh_session import SshSession
from torchmuster.files import code_copy
from torchmuster.files.code_copy import CodeFolder
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.plan import Program, RunPlan
from torchmuster.net import frames
from torchmuster.net.frames import Kind
from torchmuster.net.secret import read_secret

TOKEN_FILE = "shared-token"


class CodeArchive:
    """The code folder as one file, made when the first host asks for it."""

    def __init__(self, program: Program, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._program = program
        self._path = os.path.join(run_dir.path, "code.tar.gz")
        self._say = say
        self._lock = threading.Lock()
        self._folder: CodeFolder | None = None
        self._said = False
        self._base: str | None = None

    @property
    def base(self) -> str:
        """Return the folder that would be copied, without looking at its files."""
        with self._lock:
            if self._base is None:
                self._base = code_copy.root_of(self._program.cwd)
            return self._base

    @property
    def root(self) -> str:
        """Return the folder that is copied.

        Raises:
            UsageError: It is too large, or the script is not in it.
        """
        with self._lock:
            if self._folder is None:
                self._folder = code_copy.find_code(self._program.cwd)
                code_copy.check_inside(self._program, self._folder.root)
            return self._folder.root

    def path(self) -> str:
        """Return the archive's path; it is made at the first call."""
        root = self.root
        with self._lock:
            if not os.path.exists(self._path) and self._folder is not None:
                temporary = f"{self._path}.tmp"
                with open(temporary, "wb") as file:
                    code_copy.write_archive(root, self._folder.names, file)
                os.replace(temporary, self._path)
        return self._path

    def say_once(self, sessions: Sequence[SshSession]) -> None:
        """Say what has been copied to how many hosts, and where the hosts share a file system."""
        if self._said:
            return
        self._said = True
        copied = [s for s in sessions if s.placed.get("copied")]
        if copied and self._folder is not None:
            number = f"{len(copied)} host{'s' if len(copied) != 1 else ''}"
            self._say(f"no shared file system: copied {self._folder.describe()} to {number}")

    def remove(self) -> None:
        """Remove the archive."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def prepare(
    session: SshSession,
    plan: RunPlan,
    request: dict[str, Any],
    code: CodeArchive,
    say: Callable[[str], None],
) -> None:
    """Give a host the run; once it has it, nothing is sent.

    Raises:
        HostError: It can't have it.
        UsageError: The code can't be copied.
    """
    if session.placed:
        return
    script = code_copy.script_of(plan.program)
    whole = {
        **request,
        "plan": codec.to_plain(plan),
        "secret": read_secret(os.path.join(request["run_dir"], "secret")).hex(),
        "script": code_copy.identity(script) if script is not None else None,
        "code_root": code.base,
    }
    placed = session.ask(Kind.SETUP, whole, Kind.PLACED)
    if placed["wants_code"]:
        _send_code(session, code)
    ready = session.expect(Kind.READY)
    if ready.get("note"):
        say(f"{session.host.name}: {ready['note']}")
    session.placed = placed


def _send_code(session: SshSession, code: CodeArchive) -> None:
    with open(code.path(), "rb") as file:
        while piece := file.read(frames.CHUNK_BYTES):
            if not session.send_frame(frames.pack(Kind.CODE, piece), bulk=True):
                break
    session.send(Kind.CODE)

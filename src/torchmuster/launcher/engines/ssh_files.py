"""Files that come back from hosts with their own disks: the record, and at the end outputs."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Timer
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.text import show_size
from torchmuster.core.model.verdict import Result
from torchmuster.errors import SessionBusyError
from torchmuster.launcher.engines.ssh_host import HostError, RemoteHost
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.remote_messages import OUTPUT_FILE, Collect, Collected, FilePiece
from torchmuster.launcher.net.replica import Copy
from torchmuster.launcher.node.remote.files import RUN_RECORD, ReturnedOutputs

_RECORD = (RunDir.events, RunDir.training)
# Files that decide which Jobs are asked about and removed, and how a workflow continues: the
# client's alone.
CLIENT_ONLY_FILES = frozenset(
    {
        "job.json",
        "jobs.json",
        "job.sh",
        "links.json",
        "site.json",
        "workflow.json",
        "cancelled.json",
        "losses.json",
    }
)
_FROM_HOSTS = replace(RUN_RECORD, never=RUN_RECORD.never | CLIENT_ONLY_FILES)
_AGAIN_S = 5.0


class FetchedFiles:
    """Copies hosts' files into our run directory: the head's record, and logs from any host.

    Args:
        run_dir: The client's run directory.
        say: Prints a message to the user.
    """

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._copies: dict[str, Copy] = {}
        self._came = ReturnedOutputs(run_dir)
        self._reported: set[str] = set()
        self._head: str | None = None

    def copy_of(self, host: str) -> Copy:
        """Return the copy of a host's files."""
        return self._copies.setdefault(host, Copy(self._run_dir.path, _FROM_HOSTS))

    def append_from(self, host: str) -> None:
        """Append a new head's record to ours: that host knows nothing of what came before."""
        self._head = host
        for path in (self._run_dir.events, self._run_dir.training):
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a torn line
                    size += file.write(b"\n")
                self.copy_of(host).bases[os.path.basename(path)] = size

    def take(self, piece: FilePiece, host: RemoteHost) -> None:
        """Write a piece of a host's file; if that fails, let the host send it again.

        Raises:
            FrameError: The path is not allowed here.
        """
        name, copy = host.host.name, self.copy_of(host.host.name)
        if piece.path == OUTPUT_FILE:
            self._came.take(piece, name)
            return
        if piece.path.partition("/")[0] in CLIENT_ONLY_FILES:
            return
        if piece.path in _RECORD and self._head not in (None, name):
            return  # from a former head, whose record ours continues
        was_whole = copy.is_whole
        if not copy.take(piece) and was_whole:
            why = copy.trouble.strerror if copy.trouble is not None else None
            if why is not None and why not in self._reported:
                self._reported.add(why)
                self._say(f"the record of {name} can't be written here: {why}; it is tried again")
            again = Timer(_AGAIN_S, go_back, (host, copy))
            again.daemon = True
            again.start()

    def collect(self, host: RemoteHost, output: str, *, passes_on: bool) -> None:
        """Fetch a host's outputs, or its folder `output`; report what stays there.

        Args:
            host: The host.
            output: As in `SshOptions`.
            passes_on: As in `SshOptions`.
        """
        name, say = host.host.name, self._say
        folder = os.path.join(self._run_dir.path, "output", name)
        copy = self.copy_of(name)
        try:
            if not copy.is_whole:
                go_back(host, copy)
            said = host.ask(Collect(output=output), Collected)
            count = self._came.unpack(name, folder)
            if output:
                _merge(folder, output)
        except (HostError, OSError, ValueError) as error:
            say(f"outputs of {name} did not come back: {error}")
            return
        lacks = [*said.unread, *(f"{path}: {why}" for path, why in copy.left_out.items())]
        if not copy.is_whole:
            why = copy.trouble.strerror if copy.trouble is not None else None
            lacks.append(why or "pieces are missing")
        if lacks and host.placed is not None:
            say(
                f"the record of {name} is not whole here: {', '.join(lacks[:4])};"
                f" it stays there in {host.placed.run_dir}"
            )
        if count and not passes_on:
            files = f"{count} new or changed file{'s' if count != 1 else ''}"
            say(f"{files} of {name} came back to {folder}")
        if said.num_stay:
            names = ", ".join(said.stay[:3])
            say(
                f"{said.num_stay} files stay on {name} in {said.root}, together"
                f" they are larger than {show_size(code_copy.MAX_OUTPUT_BYTES)}: {names}"
            )
        if said.snapshots and not passes_on:
            say(f"the snapshots are on {name} in {said.snapshots}")


def go_back(host: RemoteHost, copy: Copy) -> None:
    """Let a host continue from what is here."""
    for message in copy.has():
        host.send(message)


def _merge(came: str, output: str) -> None:
    """Move files into another folder, except those that it has; remove the rest."""
    for folder, _, names in os.walk(came):
        for name in names:
            path = os.path.join(folder, name)
            target = os.path.join(output, os.path.relpath(path, came))
            if not os.path.lexists(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(path, target)
    shutil.rmtree(came, ignore_errors=True)


def own_paths(value: Any, theirs: str, ours: str, code: str | None) -> Any:
    """Replace a host's paths in JSON by those of our copies; other paths stay.

    Args:
        value: Any JSON value.
        theirs: The run directory on the host.
        ours: The client's run directory.
        code: The folder of which the host has a copy; None if it has none.
    """
    if isinstance(value, dict):
        return {key: own_paths(entry, theirs, ours, code) for key, entry in value.items()}
    if isinstance(value, list):
        return [own_paths(entry, theirs, ours, code) for entry in value]
    if not isinstance(value, str) or theirs == ours:
        return value
    if code is not None:
        value = value.replace(f"{theirs}/code/", f"{code.rstrip('/')}/")
    come = r"(?=/(?:logs/|events\.jsonl|training\.jsonl|result\.json))"
    return re.sub(re.escape(theirs) + come, lambda _: ours, value)


def with_own_paths(
    result: Result, run_dir: RunDir, placed: Sequence[messages.Placed], code_root: str
) -> Result:
    """Return the result with this machine's paths; write it if hosts had others."""
    plain = before = codec.to_plain(result)
    for path, copied in {one.run_dir: one.is_copied for one in placed}.items():
        plain = own_paths(plain, path, run_dir.path, code_root if copied else None)
    if plain != before:
        atomic.write_json(run_dir.result, plain)
    return codec.from_plain(Result, plain)


def check_free(hosts: Sequence[RemoteHost], plan: RunPlan, run_dir: RunDir) -> None:
    """Refuse a session that contains another run.

    Raises:
        SessionBusyError: Another run is in the session.
    """
    recorded = (host.session.run_id for host in hosts if host.session is not None)
    others = (run_id for run_id in recorded if run_id not in ("", plan.run_id))
    runs = os.path.dirname(
        run_dir.path
    )  # of another run that has ended, the remains there end, too
    living = (one for one in others if not os.path.exists(RunDir(os.path.join(runs, one)).result))
    other = next(living, None)
    if other is not None and plan.session is not None:
        raise SessionBusyError(plan.session, other)

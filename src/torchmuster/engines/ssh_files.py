"""What comes back of hosts that don't share the file system: the record while it grows, and the outputs at the end."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from torchmuster.engines.ssh_host import HostError, RemoteHost
from torchmuster.engines.ssh_places import SshWishes
from torchmuster.files import atomic, code_copy
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.display.text import show_size
from torchmuster.model.plan import RunPlan
from torchmuster.model.verdict import Result
from torchmuster.net import remote_messages as messages
from torchmuster.net.remote_messages import OUTPUT_FILE, Collect, Collected, FilePiece, FrameError
from torchmuster.node.door.call import busy
from torchmuster.node.remote.files import OWN_FILES, write_piece

_MAX_FILE_BYTES = 64 << 30
_MAX_ARCHIVE_BYTES = 2 * code_copy.MAX_OUTPUT_BYTES


class FilesBack:
    """Writes what hosts send of their run directories into ours, each piece at its own place."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._bases: dict[tuple[str, str], int] = {}

    def append_from(self, host: str) -> None:
        """Put the record of a host behind ours: it is the head now, and knows nothing of what came before."""
        for path in (self._run_dir.events, self._run_dir.training):
            with contextlib.suppress(OSError):
                self._bases[host, os.path.basename(path)] = os.path.getsize(path)

    def take(self, piece: FilePiece, host: str) -> None:
        """Write one piece of a host's; FrameError for one that may not be written here."""
        path, limit_bytes = piece.path, _MAX_FILE_BYTES
        offset = piece.offset + self._bases.get((host, path), 0)
        if path == OUTPUT_FILE:
            path, limit_bytes = self._archive(host), _MAX_ARCHIVE_BYTES
        if path.partition("/")[0] in OWN_FILES or offset + len(piece.data) > limit_bytes:
            raise FrameError(f"the host sends {path}")
        write_piece(self._run_dir.path, path, offset, piece.data)

    def _archive(self, host: str) -> str:
        return f"output-{host}.tmp"

    def collect(self, host: RemoteHost, say: Callable[[str], None], wishes: SshWishes) -> None:
        """Take back what the run has made in the copied code folder of a host, or in the folder that is wished for, and say what stays there."""
        name, output = host.host.name, wishes.output
        folder = os.path.join(self._run_dir.path, "output", name)
        try:
            said = host.ask(Collect(output=output), Collected)
            count = self.unpack(name, folder)
            if output:
                _merge(folder, output)
        except (HostError, OSError, ValueError) as error:
            say(f"outputs of {name} did not come back: {error}")
            return
        if count and not wishes.passes_on:
            files = f"{count} new or changed file{'s' if count != 1 else ''}"
            say(f"{files} of {name} came back to {folder}")
        if said.num_stay:
            names = ", ".join(said.stay[:3])
            say(
                f"{said.num_stay} files stay on {name} in {said.root}, together"
                f" they are larger than {show_size(code_copy.MAX_OUTPUT_BYTES)}: {names}"
            )
        if said.snapshots and not wishes.passes_on:
            say(f"the snapshots are on {name} in {said.snapshots}")

    def unpack(self, host: str, folder: str) -> int:
        """Unpack the outputs that came of a host; return the number of files. ValueError when they are damaged."""
        archive = os.path.join(self._run_dir.path, self._archive(host))
        if not os.path.exists(archive):
            return 0
        try:
            os.makedirs(folder, exist_ok=True)
            with open(archive, "rb") as file:
                return code_copy.read_archive(file, folder, code_copy.MAX_OUTPUT_BYTES)
        finally:
            os.unlink(archive)


def _merge(came: str, output: str) -> None:
    """Move files into another folder, but those that it has."""
    for folder, _, names in os.walk(came):
        for name in names:
            path = os.path.join(folder, name)
            target = os.path.join(output, os.path.relpath(path, came))
            if not os.path.lexists(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(path, target)
    shutil.rmtree(came, ignore_errors=True)


def own_paths(value: Any, theirs: str, ours: str, code: str | None) -> Any:
    """Return JSON in which the texts name our copies of a host's files; what stays there keeps its path.

    Args:
        value: Anything that JSON has.
        theirs: The run directory on the host.
        ours: The client's.
        code: The folder whose copy the host has; None where it has none.
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
    """Return a result with paths of this machine, and write it, if hosts had others."""
    plain = before = codec.to_plain(result)
    for path, copied in {one.run_dir: one.is_copied for one in placed}.items():
        plain = own_paths(plain, path, run_dir.path, code_root if copied else None)
    if plain != before:
        atomic.write_json(run_dir.result, plain)
    return codec.from_plain(Result, plain)


def has_result(beside: RunDir, run_id: str) -> bool:
    """Say whether another run of this user has ended: what it still has on its nodes ends, too."""
    return os.path.exists(RunDir(os.path.join(os.path.dirname(beside.path), run_id)).result)


def check_free(hosts: Sequence[RemoteHost], plan: RunPlan, run_dir: RunDir) -> None:
    """Refuse a session in which another run is.

    Raises:
        UsageError: One is.
    """
    told = (host.session.run_id for host in hosts if host.session is not None)
    own = ("", plan.run_id)
    other = next((one for one in told if one not in own and not has_result(run_dir, one)), None)
    if other is not None and plan.session is not None:
        raise busy(plan.session, other)

"""The record of a sweep on its way from the first pod to the client: the sweep's own events, and a run directory for each member."""

import contextlib
import os
from collections.abc import Iterator, Mapping

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.net.relay import SendsMessages
from torchmuster.node.remote.files import MAX_SMALL_BYTES, send_pieces

_OUTPUT = "output"
_JOB_FILE = "pods-job"  # in the run directory: the Job that writes the record
Seen = tuple[int, int]


class SweepStream:
    """Sends what is new in the record of a sweep; of members that have ended nothing is looked at again.

    Args:
        run_dir: Of the sweep.
        session: Carries the pieces.
        known: How much the other side has of files already. Of a member it has all or nothing: its folder here may be another one.
    """

    def __init__(
        self, run_dir: RunDir, session: SendsMessages, known: Mapping[str, int] | None = None
    ) -> None:
        self._run_dir, self._session = run_dir, session
        self._sent = dict(known or {})
        self._results: dict[str, Seen] = {}  # by member, as they were at the last look
        self._done: dict[str, Seen] = {}
        for name in self._sent:
            member, _, file = name.removeprefix(f"{RunDir.members}/").partition("/")
            if file == RunDir.result and (seen := _seen(self._member(member).result)) is not None:
                self._done[member] = seen

    def send_new(self, *, small_files: bool = False) -> None:
        """Send what has been appended since; at the end the small files too."""
        for member in self._names():
            self._send_member(member, is_end=small_files)
        for path in (self._run_dir.events, *_files_below(os.path.join(self._run_dir.path, "logs"))):
            self._send(path)
        if small_files:
            self._send(self._run_dir.result, whole=True)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._run_dir.members))
        except OSError:
            return []

    def _member(self, name: str) -> RunDir:
        return RunDir(os.path.join(self._run_dir.members, name))

    def _send_member(self, name: str, *, is_end: bool) -> None:
        member = self._member(name)
        result = _seen(member.result)
        if result is not None and self._done.get(name) == result:
            return
        for path in (
            member.events,
            member.training,
            *_files_below(os.path.join(member.path, "logs")),
        ):
            self._send(path)
        # One look later its last line is there, too.
        if result is not None and (is_end or self._results.get(name) == result):
            for path in _files_below(os.path.join(member.path, _OUTPUT)):
                self._send(path, whole=True)
            self._send(member.result, whole=True)
            self._done[name] = result
        elif result is not None:
            self._results[name] = result

    def _send(self, path: str, *, whole: bool = False) -> None:
        name = os.path.relpath(path, self._run_dir.path)
        with contextlib.suppress(OSError):
            if whole and name.endswith(RunDir.result) and os.path.getsize(path) > MAX_SMALL_BYTES:
                return
            offset = 0 if whole else self._sent.get(name, 0)
            self._sent[name] = send_pieces(self._session, path, name, offset)


def _files_below(folder: str) -> Iterator[str]:
    for top, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(top, name)


def _seen(path: str) -> Seen | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def note_job(run_dir: RunDir, job: str) -> None:
    """Say which Job writes the record of a sweep from now on; on a volume there may be that of an earlier one."""
    atomic.write_json(os.path.join(run_dir.path, _JOB_FILE), {"job": job})


def noted_job(run_dir: RunDir) -> str:
    """Return the Job that writes the record of a sweep; empty while none has begun."""
    noted = atomic.read_json(os.path.join(run_dir.path, _JOB_FILE))
    return str(noted.get("job", "")) if isinstance(noted, dict) else ""

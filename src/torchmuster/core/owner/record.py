"""Read the record of a run, tolerating an incomplete last line; reopen files at every read."""

import codecs
import contextlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torchmuster.core.files import atomic
from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import RunDir, last_bytes
from torchmuster.core.model import codec
from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.events import AttemptStartedEvent, RunEndedEvent, Stamped, parse
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.verdict import Result
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import RunDirectoryError

T = TypeVar("T")
_BLOCK_BYTES = 1 << 20
_MOST_LINE_BYTES = 64 << 20  # a line of samples of 4,096 ranks has about 0.5 MB
# Errors from reading an event of another version or from a full disk: the event is skipped.
# OverflowError: an infinity as a count; RecursionError: a line of nothing but brackets.
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def unreadable(error: BaseException) -> str:
    """Return the sentence for a record that raised one of `DAMAGED`."""
    return f"this record can't be read: {type(error).__name__}: {error}"[:200]


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record in order, without torn ones; none if it is not a plain file."""
    try:
        with io.TextIOWrapper(open_plain(path), errors="replace") as file:
            for line in file:
                if (event := _event(line)) is not None:
                    yield event
    except OSError:
        return


def read_events(path: str) -> Iterator[Stamped]:
    """Yield the events of a record in order, without unreadable ones."""
    return (event for line in read_lines(path) if (event := parse(line)) is not None)


def changed_at(path: str) -> float | None:
    """Return when a file was last written, in seconds since 1970; None without a file."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def ends_of(path: str) -> list[float]:
    """Return the times of the first and last event of a record, reading only its ends."""
    first, last = next(read_lines(path), None), last_event(path)
    words = [event.get("time") for event in (first, last) if event is not None]
    return [time for word in words if (time := moment_of(word)) is not None]


def recorded_seconds(*records: str, until: float | None = None) -> float:
    """Return the seconds from the first event of these records to the last one, or to `until`."""
    times = [at for path in records for at in ends_of(path)]
    return max(*times, until or 0.0) - min(times) if times else 0.0


def read_losses(run_dir: RunDir) -> dict[str, str]:
    """Return the cluster's reasons for the pods that a run has lost, by attempt."""
    noted = atomic.read_json(run_dir.losses)
    return {str(a): str(said) for a, said in noted.items()} if isinstance(noted, dict) else {}


def last_event(path: str) -> dict[str, Any] | None:
    """Return the last event of a record; None when there is none."""
    num_bytes = 1 << 16
    while True:
        data = last_bytes(path, num_bytes)
        is_all = len(data) < num_bytes
        for line in reversed(data.splitlines()[0 if is_all else 1 :]):
            if (event := _event(line)) is not None:
                return event
        if is_all:
            return None
        num_bytes *= 16


def _event(line: bytes | str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # torn by a crash
        return None
    return event if isinstance(event, dict) else None


class RecordTail:
    """Reads the new lines of a record, each once; an unterminated line waits for its end.

    Args:
        path: Path of the record. It need not exist yet; if it gets shorter, it is read again from
            the start.
        position: How far it has been read already.

    Attributes:
        position: How far it is read, in bytes.
        num_bad: Number of lines read that are not objects: torn by a crash, or not ours.
        has_rest: An unterminated line follows.
        why_not: Why the record can't be read; empty if it can, or does not exist.
    """

    def __init__(self, path: str, position: int = 0) -> None:
        self._path = path
        self.position = position
        self.num_bad = 0
        self.has_rest = False
        self.why_not = ""

    @property
    def num_torn(self) -> int:
        """Number of lines that are not objects, including an unterminated one."""
        return self.num_bad + self.has_rest

    def read(self) -> tuple[Iterator[dict[str, Any]], bool]:
        """Return the new events, read block by block, and whether the record has started over."""
        try:
            has_restarted = os.stat(self._path).st_size < self.position
        except OSError:
            return iter(()), False
        if has_restarted:
            self.position = self.num_bad = 0
        return self._events(), has_restarted

    def _events(self) -> Iterator[dict[str, Any]]:
        size, self.has_rest, self.why_not = _BLOCK_BYTES, False, ""
        try:
            # Reopened at each read: NFS caches the content of an open file.
            with open_plain(self._path) as file:
                file.seek(self.position)
                while data := file.read(size):
                    whole = data.rfind(b"\n") + 1
                    if not whole and len(data) < size:
                        self.has_rest = True
                        return
                    if not whole and size >= _MOST_LINE_BYTES:
                        whole, data = len(data), b"\0\n"  # no writer makes such a line
                    file.seek(self.position + whole)
                    size = _BLOCK_BYTES if whole else size * 2  # the line is longer than a block
                    for line in data[:whole].decode(errors="replace").split("\n"):
                        if (event := _event(line)) is not None:
                            yield event
                        else:
                            self.num_bad += bool(line.strip())
                    self.position += whole
        except OSError as error:
            self.why_not = error.strerror or str(error)


def next_attempt(run_dir: RunDir) -> int:
    """Return the number of the next attempt.

    It considers the record, the log folders and the claims: a lost head may have left only one of
    them.
    """
    found = (one.event for one in read_events(run_dir.events))
    numbers = [one.attempt for one in found if isinstance(one, AttemptStartedEvent)]
    with contextlib.suppress(OSError):
        names = (name.removeprefix("attempt-") for name in os.listdir(run_dir.logs))
        numbers += [int(name) for name in names if name.isdigit()]
    claimed = 0
    with contextlib.suppress(OSError):
        newest = Claims(run_dir.succession).newest(fresh=False)
        claimed = newest.next_attempt if newest is not None else 0
    return max(max(numbers, default=-1) + 1, claimed)


def read_plan(run_dir: RunDir) -> RunPlan | None:
    """Return the plan of a run; None if there is no readable one."""
    plain = atomic.read_json(run_dir.plan)
    try:
        return codec.from_plain(RunPlan, plain)
    except codec.CodecError:
        return None


def plan_to_own(run_dir: RunDir) -> RunPlan:
    """Return the plan of a run for its owner.

    Raises:
        RunDirectoryError: There is no readable one.
    """
    plan = read_plan(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the run can't be read", where=run_dir.plan)
    return plan


def read_result(run_dir: RunDir) -> Result | None:
    """Return the result of a run, if any; if the file is damaged, the result in the record."""
    result = _as_result(atomic.read_json(run_dir.result))
    if result is None and os.path.lexists(run_dir.result):
        for line in RecordTail(run_dir.events).read()[0]:  # bounds a line
            one = parse(line)
            if one is not None and isinstance(one.event, RunEndedEvent):
                result = one.event.result
            elif one is not None and isinstance(one.event, AttemptStartedEvent):  # started again
                result = None
    return result


def damage_of_result(run_dir: RunDir) -> str | None:
    """Return the sentence about a result that can't be read; None if there is no such damage."""
    if not os.path.lexists(run_dir.result) or read_result(run_dir) is not None:
        return None
    return "result.json is damaged, and events.jsonl does not say how the run ended"


def _as_result(plain: Any) -> Result | None:
    try:
        result = codec.from_plain(Result, plain)
        return result if math.isfinite(result.elapsed_s + result.lost_s) else None
    except (codec.CodecError, OverflowError):
        return None


def keep_result(run_dir: RunDir, result: Result) -> str | None:
    """Write a result that its head could not write; return why this fails, too, or None."""
    if os.path.isfile(run_dir.result):
        return None
    try:
        atomic.write_json(run_dir.result, codec.to_plain(result))
    except OSError as error:
        return error.strerror or str(error)
    return None


class Follow:
    """Reads what is new in a record and its logs, each piece once; a restarted copy is read again.

    Args:
        record: Path of the events; None: follow only logs.
    """

    def __init__(self, record: str | None = None) -> None:
        self._tail = RecordTail(record) if record is not None else None
        self._positions: dict[str, int] = {}  # in the logs, in bytes

    def events(self) -> Iterator[Stamped]:
        """Return the new events that this version knows."""
        lines, has_restarted = self._tail.read() if self._tail is not None else (iter(()), False)
        if has_restarted:
            self._positions.clear()
        return filter(None, map(parse, lines))

    def texts(self, logs: Iterable[tuple[T, str]]) -> Iterator[tuple[T, str]]:
        """Yield new text of logs, in blocks.

        Args:
            logs: Each log's key, and its path.
        """
        for whose, path in logs:
            for text in self._new_of(path):
                yield whose, text

    def skip_to(self, offsets: Mapping[str, int]) -> None:
        """Skip the first bytes of logs, up to these offsets."""
        self._positions.update(offsets)

    def _new_of(self, path: str) -> Iterator[str]:
        try:
            with open_plain(path) as log:  # reopened each time: NFS caches what an open file shows
                at = self._positions.get(path, 0)
                log.seek(at if os.fstat(log.fileno()).st_size >= at else 0)
                while data := log.read(_BLOCK_BYTES):
                    text, num_bytes = codecs.utf_8_decode(data, "surrogateescape", False)
                    if not num_bytes:
                        return  # an incomplete character
                    self._positions[path] = log.seek(num_bytes - len(data), os.SEEK_CUR)
                    yield text
        except OSError:
            return

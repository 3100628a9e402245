"""What a run's record says about a step: its workers, the snapshot to replay it from, the code."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.events import AttemptNode
from torchmuster.core.model.failure import RanCode, WorkerEnd
from torchmuster.core.model.text import few_of
from torchmuster.core.owner.record import read_lines
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import NotFoundError, UsageError
from torchmuster.launcher.model.run import AttemptRecord, record_of
from torchmuster.launcher.views.run_view import RunView

_STEP = re.compile(r"step-(\d{9,})")
_MOST_BYTES = 8 << 20  # read of a file, as in `core/node/spawner/last_words.py`
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOfRun:
    """A step of a run that can be replayed.

    Attributes:
        number: Counted from 1.
        world_size: World size of the attempt that made it.
        workers: Number of workers on each of its nodes.
        rank: The rank on which it failed; 0 if no failure is known.
        folder: Folder of the snapshots.
        snapshot: The newest snapshot's step before it; None where only the workers can see the
            folder.
        gradients: Checksum of each rank's gradients, if recorded as not finite.
        failed: How the step is known to have failed, briefly; empty if it isn't.
        words: The message of the exception that ended it; None for other ends.
    """

    number: int
    world_size: int
    workers: tuple[int, ...]
    rank: int
    folder: str
    snapshot: int | None
    gradients: tuple[int, ...]
    failed: str
    words: str | None = None


@dataclass(slots=True)
class _StepAttempt:
    """What the two records say about the steps of an attempt."""

    began: int
    world_size: int
    folder: str
    time: str
    number: int | None = None
    reached: int = 0
    is_exact: bool = False  # no step after `reached` was begun
    cause: WorkerEnd | None = None
    bad: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # bad steps, by number
    stopped_by: int | None = None  # the bad step that ended it
    nodes: tuple[AttemptNode, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether the attempt failed in step `reached`."""
        return self.stopped_by is not None or self.cause is not None


def find_step(view: RunView, number: int | None) -> StepOfRun:
    """Return what is known of a step; without a number, of the last one that failed.

    Raises:
        UsageError: No steps are recorded, or the step was never made.
        NotFoundError: There is no snapshot to replay it from.
    """
    name = short_id(view.run_id)
    tries = _read_tries(view.run_dir)
    if not tries:
        raise UsageError(
            f"nothing tells of the steps of {name}",
            where=view.run_dir.training,
            why="only scripts that use tm.resume have steps that can be made again",
        )
    if number is None:
        number = _failed_step(tries, name)
    made_by = [one for one in tries if one.began < number <= one.reached]
    failed = [one for one in made_by if one.has_failed and one.reached == number]
    made = next(reversed(failed or made_by), None)
    if made is None:
        last = max(one.reached for one in tries)
        # It is unknown how far the last attempt got: the replay will show whether this step exists.
        made = next((one for one in reversed(tries) if one.began < number), None)
        if made is None or (number > last and made.is_exact):
            what = f"{name} has never made a step {number}"
            fix = f"--step {last}" if number > last else "--step 1 is the first"
            raise UsageError(what, where=f"--step {number}", why=f"its last was {last}", fix=fix)
    bad = made.bad.get(number)
    fails = made.cause is not None and number == made.reached
    error = made.cause.error if made.cause is not None and fails and bad is None else None
    return StepOfRun(
        number=number,
        world_size=made.world_size,
        workers=_layout(made.nodes, made.world_size),
        rank=_rank(bad, made.cause if fails else None),
        folder=made.folder,
        snapshot=_snapshot_before(made.folder, number, name),
        gradients=_numbers(bad.get("gradients")) if bad is not None else (),
        failed="its gradients were not finite" if bad else (error.type_name[:200] if error else ""),
        words=error.message if error is not None else None,
    )


def _read_tries(run_dir: RunDir) -> list[_StepAttempt]:
    tries: list[_StepAttempt] = []
    for event in read_lines(run_dir.training):
        step, kind = event.get("step"), event.get("event")
        if type(step) is not int:
            continue
        size, folder = event.get("world_size"), event.get("folder")
        if kind == "resumed" and type(size) is int and isinstance(folder, str):
            tries.append(_StepAttempt(step, size, folder, str(event.get("time")), reached=step))
        if tries:
            tries[-1].reached = max(tries[-1].reached, step)
            tries[-1].is_exact |= kind in ("finished", "preempted", "not_finite")
            if kind in ("not_finite", "skipped"):
                tries[-1].bad[step] = event
                tries[-1].stopped_by = step if kind == "not_finite" else None
    _add_attempts(tries, record_of(run_dir).attempts)
    return tries


def _add_attempts(tries: list[_StepAttempt], attempts: Iterable[AttemptRecord]) -> None:
    """Add what the head recorded: the nodes of each attempt, and the step in which it failed."""
    for attempt in attempts:
        made = next((one for one in tries if one.time >= attempt.time), None)
        if made is None or made.world_size != attempt.num_workers:
            continue
        made.nodes, cause = attempt.start.nodes, attempt.cause
        if cause is not None:
            step = cause.step if cause.step is not None else made.began
            made.reached = made.stopped_by or max(made.reached, step + 1)
            made.cause, made.is_exact = cause, True


def _failed_step(tries: list[_StepAttempt], name: str) -> int:
    for one in reversed(tries):
        if one.stopped_by is not None:
            return one.stopped_by
        if one.cause is not None:
            return one.reached
    raise UsageError(
        f"say which step of {name}: nothing says that one of them has failed",
        fix=f"muster replay {name} --step N",
    )


def _rank(bad: Mapping[str, Any] | None, cause: WorkerEnd | None) -> int:
    ranks = bad.get("ranks") if bad is not None else None
    if isinstance(ranks, list) and ranks and type(ranks[0]) is int:
        return ranks[0]
    return max(cause.rank, 0) if cause is not None else 0


def _numbers(value: Any) -> tuple[int, ...]:
    is_fit = isinstance(value, list) and all(type(one) is int for one in value)
    return tuple(value) if is_fit else ()


def _layout(nodes: Iterable[AttemptNode], world_size: int) -> tuple[int, ...]:
    """Return each node's number of workers; one node if the record is incomplete."""
    try:
        counts = [_count(node.ranks) for node in nodes]
    except ValueError:
        counts = []
    return tuple(counts) if sum(counts) == world_size else (world_size,)


def _count(span: str) -> int:
    total = 0
    for part in span.split(","):
        first, dash, last = part.partition("-")
        total += int(last) - int(first) + 1 if dash else 1
    return total


def _snapshot_before(folder: str, number: int, name: str) -> int | None:
    if "://" in folder:
        return None  # only the workers look there
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise NotFoundError(
            f"the snapshots of {name} can't be seen from here",
            where=folder,
            why=error.strerror,
            fix="replay it on a machine that has this folder",
        ) from error
    steps = sorted(int(found[1]) for found in map(_STEP.fullmatch, names) if found)
    older = [step for step in steps if step < number]
    if older:
        return older[-1]
    there = (
        f"there are those of steps {few_of(map(str, steps), _SHOWN)}" if steps else "it has none"
    )
    raise NotFoundError(
        f"there is no snapshot from before step {number}",
        where=folder,
        why=f"{there}; a step is made again from an older one",
        fix=f"--step {steps[0] + 1} or later; tm.resume(keep=..., every_steps=...) keeps more"
        if steps
        else None,
    )


def changed_code(view: RunView, folder: str) -> tuple[str, ...] | None:
    """Return the project's files that differ from those that ran; None without recorded checksums.

    Args:
        view: The run.
        folder: The folder where its program runs.
    """
    code = view.record.code
    if code is None:  # rank 0 has not ended, but the library may have recorded it
        for line in read_lines(view.run_dir.training):
            if line.get("event") == "code":
                with suppress(codec.CodecError):
                    code = codec.from_plain(RanCode, codec.known_of(RanCode, line))
    if code is None or not code.files:
        return None
    return tuple(
        one.path for one in code.files if _checksum(os.path.join(folder, one.path)) != one.sha256
    )


def commit_that_ran(view: RunView) -> str:
    """Return the commit of the run's code; empty if unknown."""
    origin = atomic.read_json(view.run_dir.origin)
    code = origin.get("code") if isinstance(origin, dict) else None
    return str(code.get("commit", "")) if isinstance(code, dict) else ""


def _checksum(path: str) -> str | None:
    try:
        with open_plain(path) as file:
            return hashlib.sha256(file.read(_MOST_BYTES)).hexdigest()
    except OSError:
        return None

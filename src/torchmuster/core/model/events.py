"""The events of `events.jsonl`, one class each, shared by the writer and all readers.

A record may come from another version, be cut off by a crash, or be written by hand. So `parse`
skips an event that lacks a required field, and drops fields that are unknown or of another type.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from torchmuster.core.model import codec
from torchmuster.core.model.codec import TypedMessage, event_line, moment_of, utc_now
from torchmuster.core.model.failure import LeftProcess, RanCode, ValueNote, WorkerEnd, describe
from torchmuster.core.model.network import PairRow, Unused
from torchmuster.core.model.verdict import GroupOutcome, Result

_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_EMPTY: tuple[Any, ...] = (None, "", [], {})


class RecordEvent(TypedMessage):
    """An event of a record, named after its class: `NodeLostEvent` is written as `node_lost`.

    Attributes:
        kinds: The classes by event name.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type["RecordEvent"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = _WORD.sub("_", cls.__name__.removesuffix("Event")).lower()
        cls.kinds[cls.name] = cls


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event with its time, in ISO 8601 and in seconds since 1970."""

    time: str
    at: float
    event: RecordEvent


def fields_of(event: RecordEvent) -> dict[str, Any]:
    """Return the fields of an event as written, without empty ones."""
    if isinstance(event, RunEndedEvent | SweepEndedEvent):
        result: dict[str, Any] = codec.to_plain(event.result) or {}
        return result
    plain: dict[str, Any] = codec.to_plain(event)
    return {name: value for name, value in plain.items() if value not in _EMPTY}


def event_of(name: str, plain: Mapping[str, Any]) -> RecordEvent | None:
    """Return the event with these fields; None if its name is unknown or a field is missing."""
    cls = RecordEvent.kinds.get(name)
    if cls is None:
        return None
    if issubclass(cls, RunEndedEvent | SweepEndedEvent):
        plain = {"result": codec.known_of(Result, plain)}
    for taken in (codec.known_of, codec.fitting):  # the second costs more, and is rarely needed
        with suppress(codec.CodecError):
            return codec.from_plain(cls, taken(cls, plain))
    return None


def line_of(event: RecordEvent) -> str:
    """Return an event as a line with the current time and a newline."""
    return event_line(utc_now(), event.name, fields_of(event))


def event_of_end(end: WorkerEnd) -> "WorkerEndedEvent":
    """Return the event for the end of a worker."""
    return WorkerEndedEvent(
        attempt=end.attempt,
        rank=end.rank,
        node=end.node,
        asked=end.asked,
        value=end.value,
        code=end.code,
        what=describe(end),
        elapsed_s=end.elapsed_s,
    )


def parse(line: Mapping[str, Any]) -> Stamped | None:
    """Return the event in a line; None if it can't be parsed."""
    time, name = line.get("time"), line.get("event")
    at = moment_of(time)
    if at is None or not isinstance(name, str):
        return None
    event = event_of(name, line)
    return Stamped(str(time), at, event) if event is not None else None


# A training run.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNode:
    """A node of an attempt, and its ranks as `0-7`."""

    node: str
    host: str = ""
    ranks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingNode:
    """A node that has not joined, and why, as far as known."""

    node: str
    why: str = ""


class RunStartedEvent(RecordEvent):
    """A head has started to conduct the run."""

    run_id: str = ""
    first_attempt: int = 0


class RunEndedEvent(RecordEvent):
    """The run is over; `result` is None if it can't be parsed."""

    result: Result | None = None


class AttemptStartedEvent(RecordEvent):
    """The head has ordered all nodes to start their workers.

    Attributes:
        why: The reason for the attempt.
        master: Address and port of torch's store.
        nodes: The nodes, only the first of very many.
        spares: The spare nodes; None for a run without spares.
    """

    attempt: int
    world_size: int = 0
    num_nodes: int = 0
    why: str = ""
    master: str = ""
    nodes: tuple[AttemptNode, ...] = ()
    spares: tuple[str, ...] | None = None


class WorkersStartedEvent(RecordEvent):
    """All workers of an attempt are running.

    Attributes:
        restart_s: Seconds since the preceding failure.
        pids: Process ids of the first ranks, each on its node, in the order of the ranks.
    """

    attempt: int
    restart_s: float = 0.0
    pids: tuple[int, ...] = ()


class WorkerEndedEvent(RecordEvent):
    """A worker has ended.

    Attributes:
        asked: muster had sent it a signal first.
        value: Note on its function's return value.
        code: The code it ran, as reported by rank 0.
    """

    attempt: int
    rank: int
    node: str = ""
    asked: bool = False
    value: ValueNote | None = None
    code: RanCode | None = None
    what: str = ""
    elapsed_s: float = 0.0


class WorkersEndedEvent(RecordEvent):
    """Several workers of an ended attempt have ended in the same way.

    Attributes:
        ranks: The ranks, as `0-2047,2049`.
        asked: muster had sent them a signal first.
        elapsed_s: The longest lifetime among them.
    """

    attempt: int
    ranks: str
    num: int = 0
    asked: bool = False
    what: str = ""
    elapsed_s: float = 0.0


class AttemptFailedEvent(RecordEvent):
    """A failure has ended an attempt.

    Attributes:
        cause: The end that explains all others; None if no head saw it.
        restarts_left: None: no attempt follows.
    """

    attempt: int
    what: str = ""
    cause: WorkerEnd | None = None
    restarts_left: int | None = None


class StoppingEvent(RecordEvent):
    """A user or a signal has requested a stop."""

    text: str
    who: str = ""
    signal: str = ""


class WaitingEvent(RecordEvent):
    """The run is waiting for nodes.

    Attributes:
        missing: The missing nodes, only the first of very many.
        wanted: How many nodes the run needs.
        hint: What helps.
    """

    missing: tuple[MissingNode, ...] = ()
    num_missing: int = 0
    wanted: int = 0
    left_s: float = 0.0
    hint: str = ""


class WaitingForEndEvent(RecordEvent):
    """The next attempt is waiting for old workers to end."""

    text: str


class NoticeEvent(RecordEvent):
    """A sentence for the user."""

    text: str = ""
    node: str = ""
    logs_lost_lines: int | None = None


class AgentJoinedEvent(RecordEvent):
    """A node's agent has connected."""

    node: str
    host: str = ""
    pid: int | None = None


class AgentRefusedEvent(RecordEvent):
    """A caller was refused: it is not an agent of this run."""

    host: str
    why: str = ""


class NodeLostEvent(RecordEvent):
    """A node was lost."""

    node: str
    why: str = ""


class NodeLeftOutEvent(RecordEvent):
    """A node gets no more ranks, because it computed wrong results.

    Attributes:
        machine: The machine under its host, if that has its own name.
    """

    node: str
    rank: int
    machine: str = ""


class NewcomerEvent(RecordEvent):
    """A node joined during an attempt."""

    node: str


class SpareJoinedEvent(RecordEvent):
    """A spare node joined; it gets ranks when another node is lost."""

    node: str


class SpareLostEvent(RecordEvent):
    """A spare node was lost."""

    node: str
    why: str = ""


class SpareTakenEvent(RecordEvent):
    """A spare node has taken the place of a lost one."""

    node: str
    place: int = 0
    before: str = ""


class HeadReplacedEvent(RecordEvent):
    """Another node conducts the run, from this attempt on."""

    node: str
    before: str = ""
    attempt: int = 0


class ShrunkEvent(RecordEvent):
    """An attempt uses fewer nodes than allowed."""

    num_nodes: int = 0
    wanted: int = 0


class EarlyEndEvent(RecordEvent):
    """Some ranks ended with success while others are still running."""

    ranks: str
    num_running: int = 0


class LeftRunningEvent(RecordEvent):
    """Processes of a node have outlived their workers."""

    node: str
    processes: tuple[LeftProcess, ...] = ()


class ImportsInWorkersEvent(RecordEvent):
    """The workers of a node import their modules themselves."""

    node: str = ""
    why: str = ""


class DebuggerWaitsEvent(RecordEvent):
    """A rank waits for a debugger.

    Attributes:
        folder: Folder of its socket on its node.
    """

    rank: int
    tool: str
    node: str = ""
    folder: str = ""


class HangEvent(RecordEvent):
    """A rank makes no progress.

    Attributes:
        silent_s: Seconds without progress.
        limit_s: Seconds after which this counts as a hang.
        ended: The rank is ended because of it.
        stacks: The file with the stacks of all ranks.
        sentence: Where all ranks are.
    """

    text: str
    attempt: int = 0
    rank: int | None = None
    node: str | None = None
    silent_s: float = 0.0
    limit_s: float = 0.0
    ended: bool = False
    stacks: str | None = None
    sentence: str = ""


class StartWaitEvent(RecordEvent):
    """Workers wait for each other while starting."""

    text: str
    attempt: int = 0


class StragglerEvent(RecordEvent):
    """A rank is slower than the others."""

    text: str
    rank: int
    node: str = ""
    part: str = ""


class NetworkEvent(RecordEvent):
    """The network that workers use.

    Attributes:
        pairs: Measured pairs, by index in `nodes`.
        survey_s: Duration of the measurement.
        waited_s: How long workers waited for it.
    """

    interface: str
    subnet: str = ""
    num_nodes: int = 0
    nodes: tuple[str, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    gbit_per_s: str | None = None
    latency_s: float | None = None
    unused: tuple[Unused, ...] = ()
    survey_s: float = 0.0
    waited_s: float = 0.0


class PreflightEvent(RecordEvent):
    """The nodes were checked before the start.

    Attributes:
        form: Which form of preflight.
        findings: Its findings (`diagnose.doctor`).
        software: Versions and hardware, one row for each kind of node.
        nodes: In the long form, one row for each node; `pairs` as in `NetworkEvent`.
        held_s: How long workers waited for it.
    """

    form: str = ""
    findings: tuple[dict[str, Any], ...] = ()
    num_nodes: int = 0
    took_s: float = 0.0
    held_s: float = 0.0
    software: tuple[dict[str, Any], ...] = ()
    nodes: tuple[dict[str, Any], ...] = ()
    pairs: tuple[PairRow, ...] = ()


class TimeLimitEvent(RecordEvent):
    """The time at which the job ends, in seconds since 1970."""

    ends_at: float


class WorkerProcessEvent(RecordEvent):
    """The process of a sweep member that runs without a head."""

    attempt: int
    pid: int
    folder: str = ""


# A workflow, and a group of it.


class WorkflowStartedEvent(RecordEvent):
    """An owner has started to conduct the workflow."""

    run_id: str = ""
    groups: tuple[str, ...] = ()


class WorkflowEndedEvent(RecordEvent):
    """The workflow is over."""

    state: str
    exit_code: int = 0


class GroupStartedEvent(RecordEvent):
    """A head has started to conduct a group."""

    group: str


class GroupWaitsEvent(RecordEvent):
    """A group is waiting; the text says for what."""

    group: str
    text: str = ""


class GroupStateEvent(RecordEvent):
    """A group has changed its state."""

    group: str
    state: str
    why: str | None = None


class GroupEndedEvent(RecordEvent):
    """A group is over."""

    outcome: GroupOutcome


class HeadLostEvent(RecordEvent):
    """The head of a group was lost."""

    group: str


class AgentLostEvent(RecordEvent):
    """The agent of a task was lost."""

    task: str
    why: str = ""


class TaskStartedEvent(RecordEvent):
    """The command of a task has started."""

    task: str
    attempt: int = 0
    pid: int | None = None
    host: str = ""


class TaskEndedEvent(RecordEvent):
    """The command of a task has ended."""

    task: str
    attempt: int = 0
    code: int | None = None
    elapsed_s: float = 0.0


class TaskStateEvent(RecordEvent):
    """A task has changed its state."""

    task: str
    state: str
    group: str = ""
    attempt: int = 0
    why: str | None = None
    code: int | None = None


class DatasetVersionEvent(RecordEvent):
    """A task has created a version of a dataset."""

    task: str
    version: str


# A sweep.


class SweepStartedEvent(RecordEvent):
    """An owner has started to conduct the sweep."""

    members: int = 0
    slots: int = 0


class SweepEndedEvent(RecordEvent):
    """The sweep is over; `result` is None if it can't be parsed."""

    result: Result | None = None


class MemberEvent(RecordEvent):
    """An event of one member of a sweep."""

    member: int


class MemberStartedEvent(MemberEvent):
    """An attempt of a member has started."""

    slot: int = 0
    attempt: int = 0


class MemberLostEvent(MemberEvent):
    """The node of a member was lost."""

    attempt: int = 0


class MemberMeasuredEvent(MemberEvent):
    """A new value of a member's metric, and its step."""

    value: float
    step: int | None = None


class MemberStoppedEvent(MemberEvent):
    """A rule stopped a member because others were better."""

    step: int | None = None
    rule: str | None = None


class MemberEndedEvent(MemberEvent):
    """A member has ended, with the newest value of its metric."""

    attempt: int = 0
    state: str = ""
    exit_code: int | None = None
    elapsed_s: float = 0.0
    why: str | None = None
    value: float | None = None
    step: int | None = None

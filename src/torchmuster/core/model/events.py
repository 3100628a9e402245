"""The events of `events.jsonl`, one class each, shared by the writer and all readers.

A record may come from another version, be cut off by a crash, or be written by hand. So `parse`
skips an event that lacks a required field, and drops fields that are unknown or of another type.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from torchmuster.core import plugs
from torchmuster.core.model import codec
from torchmuster.core.model.codec import TypedMessage, event_line, moment_of, utc_now
from torchmuster.core.model.failure import LeftProcess, RanCode, ValueNote, WorkerEnd, describe
from torchmuster.core.model.text import few_of, span
from torchmuster.core.model.verdict import Result

_WORD = re.compile(r"(?<!^)(?=[A-Z])")
_EMPTY: tuple[Any, ...] = (None, "", [], {})


class RecordEvent(TypedMessage):
    """An event of a record, named after its class: `NodeLostEvent` is written as `node_lost`.

    Attributes:
        kinds: The classes by event name.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type["RecordEvent"]]] = {}

    def __init_subclass__(cls, *, is_word: bool = True) -> None:
        super().__init_subclass__(is_word=is_word)
        cls.name = _WORD.sub("_", cls.__name__.removesuffix("Event")).lower()
        if is_word:
            cls.kinds[cls.name] = cls

    @classmethod
    def find_kind(cls, name: str) -> type["RecordEvent"] | None:
        """Return the class of an event; those of other rooms are imported when one is first read."""
        if name not in cls.kinds:
            list(plugs.every("events"))
        return cls.kinds.get(name)

    def narration(self) -> str | None:
        """Return what the terminal says of it; None: it is only recorded."""
        return None


class StartedEvent(RecordEvent, is_word=False):
    """An owner has started to conduct a workflow or a sweep."""


class EndedEvent(RecordEvent, is_word=False):
    """The record is over; its fields are those of the result, which is None if it can't be parsed."""

    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event with its time, in ISO 8601 and in seconds since 1970."""

    time: str
    at: float
    event: RecordEvent


def fields_of(event: RecordEvent) -> dict[str, Any]:
    """Return the fields of an event as written, without empty ones."""
    if isinstance(event, EndedEvent):
        result: dict[str, Any] = codec.to_plain(event.result) or {}
        return result
    plain: dict[str, Any] = codec.to_plain(event)
    return {name: value for name, value in plain.items() if value not in _EMPTY}


def event_of(name: str, plain: Mapping[str, Any]) -> RecordEvent | None:
    """Return the event with these fields; None if its name is unknown or a field is missing."""
    cls = RecordEvent.find_kind(name)
    if cls is None:
        return None
    if issubclass(cls, EndedEvent):
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


class RunEndedEvent(EndedEvent):
    """The run is over."""


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

    def narration(self) -> str | None:
        if not self.attempt:
            return None
        nodes = "node" if self.num_nodes == 1 else "nodes"
        workers = "worker" if self.world_size == 1 else "workers"
        where = f"{self.world_size} {workers} on {self.num_nodes} {nodes}"
        return f"attempt {self.attempt}: {where} ({self.why})"


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

    def narration(self) -> str | None:
        what = f"attempt {self.attempt} ended: {self.what}"
        left = self.restarts_left
        if left is None:
            return what  # the verdict follows
        return f"{what}; {left} restart{'s' if left != 1 else ''} left"


class StoppingEvent(RecordEvent):
    """A user or a signal has requested a stop."""

    text: str
    who: str = ""
    signal: str = ""

    def narration(self) -> str | None:
        return self.text


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

    def narration(self) -> str | None:
        return self.narration_after(0.0)

    def narration_after(self, age_s: float) -> str:
        """Return the sentence for a reader who comes so many seconds later."""
        left = span(max(0.0, self.left_s - max(0.0, age_s)), whole=True)
        if self.hint:
            names = few_of([one.node for one in self.missing], 8, self.num_missing)
            why = self.missing[0].why if self.missing else ""
            return f"waiting for {names}: {why}; {self.hint}; {left} left"
        what = few_of([f"{one.node} ({one.why})" for one in self.missing], 8, self.num_missing)
        return f"waiting for {self.num_missing} of {self.wanted} nodes: {what}; {left} left"


class WaitingForEndEvent(RecordEvent):
    """The next attempt is waiting for old workers to end."""

    text: str

    def narration(self) -> str | None:
        return self.text


class NoticeEvent(RecordEvent):
    """A sentence for the user."""

    text: str = ""
    node: str = ""
    logs_lost_lines: int | None = None

    def narration(self) -> str | None:
        return self.text or None


class AgentJoinedEvent(RecordEvent):
    """A node's agent has connected."""

    node: str
    host: str = ""
    pid: int | None = None


class AgentRefusedEvent(RecordEvent):
    """A caller was refused: it is not an agent of this run."""

    host: str
    why: str = ""

    def narration(self) -> str | None:
        return f"refused an agent from {self.host}: {self.why}; the run continues"


class NodeLostEvent(RecordEvent):
    """A node was lost."""

    node: str
    why: str = ""

    def narration(self) -> str | None:
        return f"{self.node} was lost: {self.why}"


class NodeLeftOutEvent(RecordEvent):
    """A node gets no more ranks, because it computed wrong results.

    Attributes:
        machine: The machine under its host, if that has its own name.
    """

    node: str
    rank: int
    machine: str = ""

    def narration(self) -> str | None:
        why = f"its rank {self.rank} has computed something else than the others"
        return f"{self.node} gets no ranks again: {why}"


class NewcomerEvent(RecordEvent):
    """A node joined during an attempt."""

    node: str

    def narration(self) -> str | None:
        return f"{self.node} has joined; it takes part from the next attempt on"


class SpareJoinedEvent(RecordEvent):
    """A spare node joined; it gets ranks when another node is lost."""

    node: str

    def narration(self) -> str | None:
        return f"{self.node} has joined as a spare node"


class SpareLostEvent(RecordEvent):
    """A spare node was lost."""

    node: str
    why: str = ""

    def narration(self) -> str | None:
        return f"the spare {self.node} was lost: {self.why}"


class SpareTakenEvent(RecordEvent):
    """A spare node has taken the place of a lost one."""

    node: str
    place: int = 0
    before: str = ""

    def narration(self) -> str | None:
        return f"the spare {self.node} takes the place of {self.before}"


class ShrunkEvent(RecordEvent):
    """An attempt uses fewer nodes than allowed."""

    num_nodes: int = 0
    wanted: int = 0

    def narration(self) -> str | None:
        return f"the world shrinks to {self.num_nodes} of {self.wanted} nodes"


class EarlyEndEvent(RecordEvent):
    """Some ranks ended with success while others are still running."""

    ranks: str
    num_running: int = 0

    def narration(self) -> str | None:
        who = f"rank{'' if self.ranks.isdecimal() else 's'} {self.ranks}"
        others = f"{self.num_running} other{'s run' if self.num_running > 1 else ' runs'}"
        return f"{who} ended with exit code 0 while {others}"


class LeftRunningEvent(RecordEvent):
    """Processes of a node have outlived their workers."""

    node: str
    processes: tuple[LeftProcess, ...] = ()

    def narration(self) -> str | None:
        names = few_of([f"{one.name} (pid {one.pid})" for one in self.processes], 8)
        return f"left running on {self.node}, in sessions of their own: {names}"


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

    def narration(self) -> str | None:
        return f"rank {self.rank} on {self.node} waits for {self.tool.partition(':')[0]}"


class TimeLimitEvent(RecordEvent):
    """The time at which the job ends, in seconds since 1970."""

    ends_at: float

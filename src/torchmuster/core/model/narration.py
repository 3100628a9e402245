"""What a terminal shows of a run: sentences for its events, and each traceback only once.

Two tracebacks are the same if frames and exception type are; the last line, which may differ, is
always shown. Repetitions by one rank within an attempt, e.g. logged exceptions, stay. Logs keep
everything.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core.model import events
from torchmuster.core.model.events import RecordEvent
from torchmuster.core.model.network import significant
from torchmuster.core.model.text import few_of, span
from torchmuster.core.model.verdict import Report, Result


def narrate(event: RecordEvent, shown: "ShownOutput | None" = None) -> str | None:
    """Return the sentence for an event; None for one that is only recorded.

    Args:
        event: The event.
        shown: What the terminal already shows and need not repeat.
    """
    match event:
        case events.AttemptFailedEvent():
            return _attempt_failed(event, shown)
        case events.AttemptStartedEvent(attempt=attempt):
            return _attempt_started(event) if attempt else None
        case events.WaitingEvent():
            return _waiting(event)
        case events.NoticeEvent(text=text):
            return text or None
        case (
            events.StoppingEvent(text=text)
            | events.HangEvent(text=text)
            | events.StartWaitEvent(text=text)
            | events.StragglerEvent(text=text)
            | events.WaitingForEndEvent(text=text)
        ):
            return text
        case events.AgentRefusedEvent(host=host, why=why):
            return f"refused an agent from {host}: {why}; the run continues"
        case events.NodeLostEvent(node=node, why=why):
            return f"{node} was lost: {why}"
        case events.NodeLeftOutEvent(node=node, rank=rank):
            why = f"its rank {rank} has computed something else than the others"
            return f"{node} gets no ranks again: {why}"
        case events.NewcomerEvent(node=node):
            return f"{node} has joined; it takes part from the next attempt on"
        case events.SpareJoinedEvent(node=node):
            return f"{node} has joined as a spare node"
        case events.SpareLostEvent(node=node, why=why):
            return f"the spare {node} was lost: {why}"
        case events.SpareTakenEvent(node=node, before=before):
            return f"the spare {node} takes the place of {before}"
        case events.HeadReplacedEvent(node=node, before=before, attempt=attempt):
            what = f"the head on {before} was lost"
            return f"{what}: {node} takes its place with attempt {attempt}"
        case events.ShrunkEvent(num_nodes=num_nodes, wanted=wanted):
            return f"the world shrinks to {num_nodes} of {wanted} nodes"
        case events.EarlyEndEvent(ranks=ranks, num_running=number):
            who = f"rank{'' if ranks.isdecimal() else 's'} {ranks}"
            others = f"{number} other{'s run' if number > 1 else ' runs'}"
            return f"{who} ended with exit code 0 while {others}"
        case events.LeftRunningEvent(node=node, processes=processes):
            names = few_of([f"{one.name} (pid {one.pid})" for one in processes], 8)
            return f"left running on {node}, in sessions of their own: {names}"
        case events.DebuggerWaitsEvent(node=node, rank=rank, tool=tool):
            return f"rank {rank} on {node} waits for {tool.partition(':')[0]}"
        case events.NetworkEvent():
            return _network(event)
        case events.PreflightEvent():
            return _preflight(event)
    return None


def wait_in(event: RecordEvent, age_s: float) -> str | None:
    """Return a sentence about what a run waits for, with the remaining time.

    Args:
        event: The newest event about waiting.
        age_s: Seconds since it was recorded.
    """
    if isinstance(event, events.WaitingEvent):
        return _waiting(event, max(0.0, event.left_s - max(0.0, age_s)))
    return narrate(event)


def _waiting(event: events.WaitingEvent, left_s: float | None = None) -> str:
    missing, num = event.missing, event.num_missing
    left = span(event.left_s if left_s is None else left_s, whole=True)
    if event.hint:
        names = few_of([one.node for one in missing], 8, num)
        return (
            f"waiting for {names}: {missing[0].why if missing else ''}; {event.hint}; {left} left"
        )
    what = few_of([f"{one.node} ({one.why})" for one in missing], 8, num)
    return f"waiting for {num} of {event.wanted} nodes: {what}; {left} left"


def _attempt_started(event: events.AttemptStartedEvent) -> str:
    nodes = "node" if event.num_nodes == 1 else "nodes"
    workers = "worker" if event.world_size == 1 else "workers"
    where = f"{event.world_size} {workers} on {event.num_nodes} {nodes}"
    return f"attempt {event.attempt}: {where} ({event.why})"


def _attempt_failed(event: events.AttemptFailedEvent, shown: "ShownOutput | None") -> str:
    left, cause = event.restarts_left, event.cause
    what = f"attempt {event.attempt} ended: {event.what}"
    if left is None:
        return what  # the verdict follows
    output = ""
    if cause is not None:
        traceback = cause.error.traceback if cause.error is not None else ""
        ranks = shown.ranks if shown is not None else {0}
        is_new = cause.rank not in ranks and not (shown is not None and shown.has(traceback))
        lines = cause.tail if is_new else ()
        if shown is not None and 0 < len(traceback.splitlines()) <= len(lines):
            shown.note(traceback)
        output = "".join(f"\n  [rank {cause.rank}] {line}" for line in lines)
    return f"{what}; {left} restart{'s' if left != 1 else ''} left{output}"


def _network(event: events.NetworkEvent) -> str:
    parts = [f"{event.interface} ({event.subnet})", f"{event.num_nodes} nodes"]
    if event.gbit_per_s is not None:
        parts.append(f"{event.gbit_per_s} Gbit/s")
    if event.latency_s is not None:
        parts.append(f"{significant(event.latency_s * 1000)} ms")
    unused = [f"{one.name} ({one.why})" for one in event.unused[:8]]
    if len(event.unused) > 8:
        unused.append(f"{len(event.unused) - 8} more")
    return f"network: {', '.join(parts)}" + (f"; not used: {', '.join(unused)}" if unused else "")


def _preflight(event: events.PreflightEvent) -> str | None:
    """Return the sentence for failures and warnings; `muster doctor` shows all findings itself."""
    if event.form == "long":
        return None
    lines = [_finding(finding) for finding in event.findings if finding.get("level") != "note"]
    return "\n".join(lines) or None


def _finding(finding: Mapping[str, Any]) -> str:
    reasons = finding.get("because")
    because = "; ".join(map(str, reasons[:2] if isinstance(reasons, list) else ()))
    hint = finding.get("hint")
    text = f"preflight {finding.get('level')}: {finding.get('error')}"
    text += f" ({because})" if because else ""
    return text + (f"; {hint}" if hint else "")


_HEADER = "Traceback (most recent call last):"
_FIRST = re.compile(rf'{re.escape(_HEADER)}$|  File ".*", line \d+$')  # the second: SyntaxError
_BETWEEN = (
    "",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's own hook prefixes each line
_MAX_KNOWN, _MAX_LINES = 256, 500
_LEAST_LINES, _MAX_LAST_LINES = 4, 6

_Block = tuple[str, ...]  # the frames, and the type of the exception


@dataclass(slots=True)
class _Stream:
    """The state of one stream of one rank."""

    is_within: bool = False  # in a line of which a part was passed on
    line: str = ""  # the incomplete line, while lines are examined
    block: list[str] | None = None  # the traceback so far
    held: list[str] = field(default_factory=list)  # possible repetition
    holds: bool = False


@dataclass(slots=True)
class ShownOutput:
    """Tracks the output that goes to a terminal."""

    ranks: set[int] = field(default_factory=set)
    _known: dict[_Block, set[int]] = field(default_factory=dict)  # ranks that raised it
    _streams: dict[tuple[int, int], _Stream] = field(default_factory=dict)

    def begin_attempt(self) -> None:
        """Forget which rank raised what: in a new attempt every repetition is shortened."""
        for ranks in self._known.values():
            ranks.clear()

    def filter(self, rank: int, stream: int, text: str) -> str:
        """Return the part of a text to show; a repeated traceback becomes one line."""
        self.ranks.add(rank)
        state = self._streams.setdefault((rank, stream), _Stream())
        if state.block is None and not state.holds and "\n" not in text:
            state.is_within = True
            return text
        return "".join(
            part
            for piece in text.splitlines(keepends=True)
            for part in self._take(rank, state, piece)
        )

    def rest(self) -> list[tuple[int, int, str]]:
        """Return the unfinished text held back: (rank, stream, text)."""
        held = [
            (*key, "".join([*state.held, state.line]))
            for key, state in self._streams.items()
            if state.holds
        ]
        self._streams.clear()
        return [entry for entry in held if entry[2].strip()]

    def has(self, traceback: str) -> bool:
        """Return whether the terminal has shown this traceback."""
        block = _last_block(traceback)
        return block is not None and block in self._known

    def note(self, traceback: str) -> None:
        """Record a traceback that was printed in a message."""
        block = _last_block(traceback)
        if block is not None:
            self._known.setdefault(block, set())

    def _take(self, rank: int, state: _Stream, piece: str) -> list[str]:
        ends = piece.endswith("\n")
        looks = state.holds or state.block is not None or (ends and not state.is_within)
        if not looks:
            state.is_within = not ends
            return [piece]
        now = [] if state.holds else [piece]
        state.line += piece
        if not ends:
            return now
        line, state.line = state.line, ""
        after = self._line(rank, state, line)
        return after if not now else now if after == [line] else after

    def _line(self, rank: int, state: _Stream, line: str) -> list[str]:
        """Return the text to show after this complete line."""
        bare = _bare(line)
        if state.block is None:
            return self._outside(state, line, bare)
        if bare[:1] in (" ", "\t") and len(state.block) < _MAX_LINES:
            state.block.append(bare)
            if not state.holds:
                return [line]
            state.held.append(line)
            size = len(state.block)
            if any(list(known[:size]) == state.block for known in self._known):
                return []
            return _release(state)
        block = _key(state.block, bare)
        state.block = None
        ranks = self._known.setdefault(block, {rank})
        is_new = rank in ranks or len(self._known) > _MAX_KNOWN
        ranks.add(rank)
        if not state.holds or is_new:
            return [*_release(state), line]
        state.held.clear()  # keep holding: the chain may continue
        return [f"{bare} (the same traceback as before)\n"]

    def _outside(self, state: _Stream, line: str, bare: str) -> list[str]:
        if _FIRST.match(bare):
            state.block = [] if bare == _HEADER else [bare]
            state.holds = state.holds or bool(self._known)
            if not state.holds:
                return [line]
            state.held.append(line)
            return []
        if state.holds and bare in _BETWEEN:
            state.held.append(line)
            return []
        return [*_release(state), line]


def shortened(report: Report, result: Result, shown: ShownOutput) -> Report:
    """Return the report with only the end of its traceback if the terminal already shows it."""
    error = result.cause.error if result.cause is not None else None
    lines = error.traceback.rstrip().splitlines() if error is not None else []
    start = _position(lines, report.because)
    if error is None or start is None or not shown.has(error.traceback):
        return report
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=0)
    end = lines[last:][:_MAX_LAST_LINES]
    because = list(report.because)
    because[start : start + len(lines)] = ["the traceback above, which ends:", *end]
    return replace(report, because=tuple(because))


def _position(lines: Sequence[str], within: Sequence[str]) -> int | None:
    size = len(lines)
    starts = range(len(within) - size + 1) if size > _LEAST_LINES else ()
    return next((i for i in starts if list(within[i : i + size]) == list(lines)), None)


def _release(state: _Stream) -> list[str]:
    held, state.held, state.holds = state.held, [], False
    return held


def _bare(line: str) -> str:
    return _TORCH_PREFIX.sub("", line.rstrip("\r\n"))


def _key(frames: Sequence[str], last: str) -> _Block:
    return (*frames, last.partition(":")[0])


def _last_block(traceback: str) -> _Block | None:
    """Return the last traceback of a chain; None if the text is not a traceback."""
    frames: list[str] | None = None
    found: _Block | None = None
    for line in traceback.splitlines():
        bare = _bare(line)
        if frames is not None and bare[:1] in (" ", "\t"):
            frames.append(bare)
        elif frames is not None:
            found, frames = _key(frames, bare), None
        elif _FIRST.match(bare):
            frames = [] if bare == _HEADER else [bare]
    return found

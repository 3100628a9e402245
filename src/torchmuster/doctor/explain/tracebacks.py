"""Python tracebacks in logs, also of ranks that write in between each other."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchmuster.doctor.explain.events import Event, Line, Role, Who
from torchmuster.doctor.explain.patterns import match
from torchmuster.model.failure import ECHOES

_MAX_LINES = 300
_MAX_KEPT = 60
_MAX_OPEN = 1024
_MAX_APART = 2000
# Types in which torch, Gloo and NCCL tell of other ranks, and the socket's own.
_SPEAKS_FOR_TORCH = re.compile(
    r"(?:torch\.|RuntimeError$|Dist|Rendezvous|Connection\w*Error$|BrokenPipeError$|TimeoutError$|OSError$|EOFError$"
    r"|(?:ValueError|ImportError|ModuleNotFoundError)$|socket\.|c10|SignalException|ChildFailed|KeyboardInterrupt)"
)
_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_ENDING = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_BETWEEN = re.compile(r"^(During handling of the above|The above exception was the direct cause)")
_LIBRARY = re.compile(
    r"/(?:site-packages|dist-packages|lib/python\d[\w.]*)/|^<frozen|torchmuster/agent/|/bin/(?:torchrun|accelerate|deepspeed|lightning)$"
)
# What a program says in its own words is no word of the scheduler, and no state of the launcher.
_NO_MEANING_IN_A_MESSAGE = frozenset(
    {
        *("time_limit", "preempted", "node_failed", "cancelled", "oom_proof", "evicted", "image"),
        *("task_exit", "teardown", "not_finite", "killed_line", "signal_received", "exit_code"),
        *("root_cause_table", "table_row", "launch_config", "launch_line", "variable", "world"),
        *("progress", "success", "no_command", "launch_failed", "bad_arguments", "module_load"),
        *("last_work", "nccl_using", "hosts_store", "rdzv_complete", "child_failed", "set_by_user"),
    }
)
# Nobody caught it when the outermost frame is the module itself: a caught one begins where it was caught.
_OUTERMOST = ("<module>", "_run_module_as_main", "_run_code", "_bootstrap", "_wrap")
_NOT_AN_EXCEPTION = frozenset({"File", "Traceback", "During", "The"})


@dataclass(slots=True)
class _Open:
    first: Line
    lines: list[Line] = field(default_factory=list)
    num_lines: int = 0
    outermost: str | None = None  # the function of the first frame


class TracebackReader:
    """Collects tracebacks by who writes them; an exception becomes an event."""

    def __init__(self) -> None:
        self._open: dict[Who, _Open] = {}
        self._last: dict[Who, Event] = {}  # what each writer's last traceback said
        self.superseded: list[Event] = []

    @property
    def is_open(self) -> bool:
        """Say whether lines are waited for."""
        return bool(self._open or self._last)

    def forget(self, number: int) -> None:
        """Give up what has waited for its end for 2,000 lines: its writer has gone in the middle of it."""
        self._open = {
            who: known
            for who, known in self._open.items()
            if number - known.first.number <= _MAX_APART
        }
        self._last.clear()

    def opens(self, line: Line) -> bool:
        """Begin a traceback if this line does; say whether it did. A second one of the same writer is a part of it."""
        if _START not in line.text:
            return False
        known = self._open.get(line.who)
        if known is None and len(self._open) < _MAX_OPEN:
            self._open[line.who] = _Open(first=line)
        return True

    def holds(self, line: Line) -> bool:
        """Say whether a line can only be a part of the open traceback of its writer: a frame or its code."""
        return line.who in self._open and line.text.startswith((" ", "\t"))

    def take(self, line: Line) -> Iterator[Event]:
        """Give one more line; yields the event of a traceback that it ends."""
        known = self._open.get(line.who)
        if known is None:
            self._supersede(line)
            return
        known.num_lines += 1
        text = line.text
        if (
            text.startswith((" ", "\t"))
            or not text.strip()
            or _START in text
            or _BETWEEN.match(text)
        ):
            known.lines.append(line)
            if known.outermost is None and (frame := _FRAME.match(text)) is not None:
                known.outermost = frame["function"] or "<module>"
            elif _BETWEEN.match(text):
                known.outermost = None
            del known.lines[: -_MAX_KEPT or None]
            if known.num_lines > _MAX_LINES:
                del self._open[line.who]
            return
        ending = _ENDING.match(text)
        del self._open[line.who]
        if ending is not None and ending["type"] not in _NOT_AN_EXCEPTION:
            event = _exception(known, line, ending["type"], ending["message"] or "")
            if len(self._last) < _MAX_OPEN:
                self._last[line.who] = event
            yield event

    def _supersede(self, line: Line) -> None:
        """Note that an exception was not the last of its chain."""
        if line.text.strip():
            event = self._last.pop(line.who, None)
            if event is not None and event.kind == "exception" and _BETWEEN.match(line.text):
                self.superseded.append(event)

    def close(self) -> Iterator[Event]:
        """Yield what is still open at the end of a log: it was cut there."""
        for known in self._open.values():
            if known.lines:
                yield _exception(known, known.lines[-1], "", "the log ends within a traceback")
        self._open.clear()


def _exception(known: _Open, last: Line, type_name: str, message: str) -> Event:
    """Return the event of an exception; a message that means more than its type keeps that meaning."""
    fields = {"type": type_name, "message": message[:500], **_where(known.lines)}
    if known.outermost in (None, *_OUTERMOST):
        fields["uncaught"] = "1"
    detail = tuple(line.text for line in (*known.lines[-12:], last))
    words = f"{type_name}: {message}" if message else type_name
    meaning = match(words)
    role = Role.ECHO if ECHOES.search(words) else Role.CAUSE
    kind = "exception"
    if not _SPEAKS_FOR_TORCH.match(type_name):
        role = Role.CAUSE  # a client of something else: its lost connections are its own
        if meaning is not None and meaning[0].role is Role.ECHO:
            meaning = None
    if meaning is not None and meaning[0].kind not in _NO_MEANING_IN_A_MESSAGE:
        pattern, more = meaning
        kind, role = pattern.kind, pattern.role
        fields = {**more, **fields}
    elif type_name.rpartition(".")[2] in (
        "SignalException",
        "ChildFailedError",
        "KeyboardInterrupt",
    ):
        role = Role.ECHO
    elif type_name == "":
        role = Role.CONTEXT
    return Event(kind=kind, role=role, line=last, fields=fields, detail=detail)


def _where(lines: list[Line]) -> dict[str, str]:
    """Return the innermost frame of the user's own code, else the innermost."""
    frames = [found for line in lines if (found := _FRAME.match(line.text)) is not None]
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    chosen = (own or frames)[-1] if frames else None
    if chosen is None:
        return {}
    return {
        "where": f"{chosen['file']}:{chosen['line']}",
        "function": chosen["function"] or "",
        "own": "1" if own else "",
    }

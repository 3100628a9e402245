"""Python tracebacks in logs, also interleaved ones of several ranks, and what they mean.

Of a chain of exceptions, either the earlier one or the one raised while handling it is the cause. Tested with provoked failures:
an exception that is raised *from* another mostly says that something failed, and the one beneath says what. A failed look-up (a
key, an attribute, an optional import) is a question that the program asked; what follows from the answer is the failure. What
breaks in a handler or in the clean-up after a real failure is not the failure.
"""

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchmuster.core.model.failure import ECHOES
from torchmuster.diagnose.explain.catalogue.index import MESSAGE_PREFIX
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogLine, Who
from torchmuster.diagnose.explain.reading.patterns import Meaning, file_errno, match

# Libraries that fetch: their own message says more than the socket's error beneath it.
FETCHES = re.compile(
    r"^(?:requests|urllib3|urllib|httpx|aiohttp|httpcore|huggingface_hub|botocore|boto3|google|azure|gcsfs|s3fs)\."
    r"|^(?:URLError|HTTPError|SSLError|MaxRetryError|ConnectTimeout|LocalEntryNotFoundError)(?=:|$)"
)
STANDARD_LIBRARY = "Python"
_OF_SOCKETS = re.compile(
    r"(?:Connection\w*|BrokenPipe|Timeout|OS|EOF)Error$|socket\.|TimeoutError$"
)
_DIRECT = "The above exception was the direct cause"
BETWEEN = re.compile(r"^(During handling of the above|The above exception was the direct cause)")
# Functions that fail during the clean-up after a failure: the earlier failure is the cause.
_CLEANS_UP = frozenset(
    {"__exit__", "__aexit__", "__del__", "close", "cleanup", "destroy_process_group"}
)
_LOOK_UPS = frozenset({"KeyError", "IndexError", "AttributeError", "StopIteration", "Empty"})
_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})
_NO_NUMBER = re.compile(r"invalid literal for int\(\)|could not convert string to float")
# Types whose names say what happened, whatever the message.
_SAY_ALL = frozenset({"MemoryError", "RecursionError", "KeyboardInterrupt", "SystemExit"})
# Mistakes in the code itself, as in handlers that have never run before.
_ACCIDENTS = frozenset({"AttributeError", "NameError", "UnboundLocalError", "TypeError"})
_OF_A_CHILD = re.compile(r"CalledProcessError$")
_NAMES_SOMETHING = re.compile(r"[/\\\d]|['\"`]\w|\w_\w|\w\.\w")
_FEW_WORDS = 4


def only_wraps(
    event: LogEvent, beneath: LogEvent, *, between: str, caught_in: str, code: Sequence[str]
) -> bool:
    """Return whether an exception only passes on the one beneath it, which then tells the cause.

    Args:
        event: The later exception.
        beneath: The earlier exception.
        between: The sentence that joins them.
        caught_in: The function that caught the earlier one.
        code: The lines below the last frame of the later one.
    """
    if event.kind != "exception" or FETCHES.match(event.get("type")):
        return False
    if beneath.role is LineRole.ECHO and not _is_of_torch(beneath):
        return False
    if event.get("raised_in") in _CLEANS_UP:
        return True
    is_direct = between.startswith(_DIRECT)
    if _OF_A_CHILD.search(beneath.get("type")) or _explains(event, beneath, is_direct=is_direct):
        return False
    if is_direct:
        return True
    if event.get("raised_in") == caught_in and code and code[0].strip().startswith("raise"):
        return True
    return _broke_in_the_handler(event, beneath)


def was_only_a_question(event: LogEvent, beneath: LogEvent) -> bool:
    """Return whether the earlier exception was the program's question, and so is no failure."""
    if beneath.kind == "exception" or FETCHES.match(event.get("type")):
        return True
    name = _name(beneath)
    if name == "FileNotFoundError":
        return _name(event) not in _ACCIDENTS
    return name in _LOOK_UPS or name in _IMPORTS


def _broke_in_the_handler(event: LogEvent, beneath: LogEvent) -> bool:
    """Return whether a handler of a real failure broke, or says less than what it handled."""
    if _name(beneath) in _LOOK_UPS or _NO_NUMBER.search(beneath.get("message")):
        return False
    if _name(event) in _ACCIDENTS:
        return True
    is_known = beneath.get("told").startswith(MESSAGE_PREFIX) and _name(beneath) not in _IMPORTS
    return is_known and not event.get("told")


def _explains(event: LogEvent, beneath: LogEvent, *, is_direct: bool) -> bool:
    """Return whether an exception says more than the look-up or attempt beneath it."""
    if _NO_NUMBER.search(beneath.get("message")):
        return True
    if _name(beneath) not in _LOOK_UPS:
        is_attempt = not is_direct and beneath.kind == "exception" and not beneath.get("told")
        is_attempt = is_attempt and _name(beneath) not in _SAY_ALL
        return is_attempt and not _names_something(beneath) and _names_something(event)
    word, message = beneath.get("message").strip("'\""), event.get("message")
    if word and word in message and len(message) > len(word) + 12:
        return True
    return _names_something(event)


def _names_something(event: LogEvent) -> bool:
    """Return whether a message is a sentence that names a file, a number or an identifier."""
    message = event.get("message")
    return len(message.split()) >= _FEW_WORDS and _NAMES_SOMETHING.search(message) is not None


def _name(event: LogEvent) -> str:
    return event.get("type").rpartition(".")[2]


def _is_of_torch(event: LogEvent) -> bool:
    """Return whether a lost connection is between ranks; other clients' have their own library."""
    return event.get("library") in ("", "torch", STANDARD_LIBRARY) or not _OF_SOCKETS.match(
        event.get("type")
    )


# The meaning of an exception by its type and message: its kind, its role, what it names.


# Types in which torch, Gloo and NCCL report on other ranks, and the socket's own.
_SPEAKS_FOR_TORCH = re.compile(
    r"(?:torch\.|RuntimeError$|Dist|Rendezvous|Connection\w*Error$|BrokenPipeError$|TimeoutError$|OSError$|EOFError$"
    r"|(?:ValueError|ImportError|ModuleNotFoundError)$|socket\.|c10|std::|gloo::|SignalException|ChildFailed|KeyboardInterrupt)"
)
# A program's own message is neither the scheduler's nor the state of a launcher.
_NO_MEANING_IN_A_MESSAGE = frozenset(
    {
        *("time_limit", "preempted", "node_failed", "cancelled", "oom_proof", "evicted", "image"),
        "pbs_killed",
        *("task_exit", "teardown", "not_finite", "killed_line", "signal_received", "exit_code"),
        *("root_cause_table", "table_row", "launch_config", "launch_line", "variable", "world"),
        *("progress", "success", "no_command", "launch_failed", "bad_arguments", "module_load"),
        *("last_work", "nccl_using", "hosts_store", "rdzv_complete", "child_failed", "set_by_user"),
        *("raised_line", "error_line"),
    }
)
_ENDED_BY_OTHERS = frozenset({"SignalException", "ChildFailedError", "KeyboardInterrupt"})
# The traceback of the original exception follows.
_ENDED_BY_OTHERS |= {"ProcessRaisedException", "ExceptionGroup", "BaseExceptionGroup"}
_DIED = re.compile(r"died with <Signals\.(SIG\w+)")
_ENDED = re.compile(r"terminated with (?:signal (?P<other>SIG\w+)|exit code (?P<code>\d+))")
_GOT_SIGNAL = re.compile(r"got signal: (\d+)")
_NUMBERED_TYPES = {"FileNotFoundError": errno.ENOENT, "PermissionError": errno.EACCES}
_OF_NETWORKS = (
    *(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNREFUSED),
    *(errno.ECONNRESET, errno.EPIPE),
)
_HEADING = re.compile(r":$|^$|\b\d+ (?:\w+ )?(?:errors?|problems?)\b|^Error\(s\) in ")


def meaning_of(type_name: str, message: str) -> tuple[str, LineRole, Mapping[str, str]]:
    """Return the meaning of an exception: its kind, its role and what it names."""
    if type_name.endswith("SignalException") and (got := _GOT_SIGNAL.search(message)) is not None:
        return "signal_received", LineRole.CONTEXT, {"signum": got[1]}
    if type_name.endswith("CalledProcessError") and (died := _DIED.search(message)) is not None:
        return "signal_received", LineRole.CONTEXT, {"other": died[1]}
    words = f"{type_name}: {message}" if message else type_name
    found = match(words, is_raised=True)
    role = LineRole.ECHO if ECHOES.search(words) else LineRole.CAUSE
    if not _SPEAKS_FOR_TORCH.match(type_name):
        role = LineRole.CAUSE  # another client's lost connections are its own
        if found is not None and found.role is LineRole.ECHO:
            found = None
    if found is not None and FETCHES.match(type_name) and _is_of_network(found):
        found = None  # the library that fetches says more than the socket
    if found is not None and found.kind.startswith(MESSAGE_PREFIX):
        return "exception", found.role, {**found.fields, "told": found.kind}
    if found is not None and found.kind not in _NO_MEANING_IN_A_MESSAGE:
        return found.kind, found.role, found.fields
    if type_name.endswith("ProcessExitedException") and (end := _ENDED.search(message)) is not None:
        kind = "signal_received" if end["other"] else "exit_code"
        return (
            kind,
            LineRole.CONTEXT,
            {name: word for name, word in end.groupdict().items() if word},
        )
    if type_name.rpartition(".")[2] in _ENDED_BY_OTHERS:
        return "exception", LineRole.ECHO, {}
    more = _as_errno(type_name, message)
    if more:
        return "errno", LineRole.CAUSE, more
    return "exception", role if type_name else LineRole.CONTEXT, {}


def _is_of_network(found: Meaning) -> bool:
    number = found.fields.get("errno", "0")
    return found.kind == "no_name" or (
        found.kind == "errno" and number.isdigit() and int(number) in _OF_NETWORKS
    )


def _as_errno(type_name: str, message: str) -> dict[str, str]:
    """Return the kernel's error number with which a message ends or that a type stands for."""
    number = file_errno(message)
    if not number and not message.startswith("Caught "):
        number = _NUMBERED_TYPES.get(type_name, 0)
    return {"errno": str(number)} if number else {}


def opens_a_list(message: str) -> bool:
    """Return whether the first line of a message is only a heading for the lines below."""
    return _HEADING.search(message) is not None


_MAX_LINES = 300
_MAX_KEPT = 60
_MAX_OPEN = 1024
_MAX_APART = 2000
_MAX_MESSAGE_LINES = 12
_MAX_ODD_LINES = 8  # of others, within a traceback
_START = "Traceback (most recent call last):"
# Without its comma, ` in NAME` is of a dump of stacks (faulthandler, `muster stacks`), which no exception ends.
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?!\d| in )(?:, in (?P<function>.+))?'
)
# A frame that a terminal or a mail program has broken in two: the rest begins the next line.
_BROKEN_FRAME = re.compile(r'^\s*File "[^"]*(?:"(?:,(?: l(?:i(?:n(?:e(?: \d*)?)?)?)?)?)?)?$')
_ENDING = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::(?: (?P<message>.*)|$))?$")
# Processes without labels may write into one file, piece by piece: `KeyErrorreturn table[key]`, and
# then `: 'key'`.
_BROKEN_ENDING = re.compile(r"^(?P<type>(?:\w+\.)*[A-Z]\w*?(?:Error|Exception))(?=[^\w:.]|[a-z])")
_IGNORED = ("Exception ignored ", "--- Logging error ---")
_LIBRARY = re.compile(
    r"/(?:site-packages|dist-packages|lib/python\d[\w.]*)/|^<frozen|torchmuster/(?:agent|core|head|launcher|node|programs)/|/bin/(?:torchrun|accelerate|deepspeed|lightning)$"
)
# Where our library handles what it was given, and calls nothing of the script's: what torch refuses
# there, muster has asked for.
_OURS = re.compile(r"torchmuster/train/(?:saves|snapshot|memory)[/.]")
# An exception is uncaught if the outermost frame is the module itself: a caught one begins where it
# was caught.
_OUTERMOST = ("<module>", "_run_module_as_main", "_run_code", "_bootstrap", "_wrap")
_SOUNDS_LIKE_ONE = re.compile(
    r"(?:^|\.)[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout)$"
)
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<message>\S.*)$")
# What a library prints next to the message of an exception.
_WARNS = re.compile(r"\b[Ww]arning\b|\bdeprecated\b|will be removed")
_LAUNCHERS = frozenset({"accelerate", "deepspeed", "torch", "lightning"})
_PACKAGE = re.compile(r"/(?:site|dist)-packages/(\w+)")
_NOT_AN_EXCEPTION = frozenset({"File", "Traceback", "During", "The"})


@dataclass(slots=True)
class _Open:
    first: LogLine
    has_start: bool = True
    is_ignored: bool = False  # it ends nothing: Python or logging only reports it
    lines: list[LogLine] = field(default_factory=list)
    num_lines: int = 0
    indent: int = 0  # of all its lines, if another program indented them
    num_odd: int = 0  # lines that are no part of it: others', without a label
    outermost: str | None = None  # the function of the first frame
    beneath: "_Ended | None" = (
        None  # the exception in whose handling, or from which, this one was raised
    )
    around: LogEvent | None = None  # the exception in whose message this traceback is
    width: int = 0  # of the box that it was drawn in
    broken_type: str = (
        ""  # what it raised, into whose line another process wrote before the message
    )


@dataclass(slots=True)
class _Ended:
    """A traceback that has ended: another exception may be raised from it.

    Attributes:
        caught_in: The function that caught it, if another is raised: that of the first frame.
        width: The width at which its message is wrapped; 0 if it isn't.
        last_line: The last line of its message so far.
        between: The sentence that joins it to the next.
        num_after: Lines of its writer since then: messages may have several.
        has_message: Whether it says more than its type; if not, no later line belongs to it.
        is_apart: Whether an empty line came after it.
    """

    event: LogEvent
    caught_in: str
    width: int = 0
    last_line: str = ""
    between: str = ""
    num_after: int = 0
    has_message: bool = True
    is_apart: bool = False

    def is_wrapped_before(self, text: str) -> bool:
        """Return whether the last line was wrapped: this line's first word did not fit the box."""
        room = self.width - len(self.last_line.rstrip())
        return self.width > 0 and len(text.split(maxsplit=1)[0]) >= room

    def continues_in(self, line: LogLine) -> bool:
        """Return whether a line continues the message: indented, next to it, or below a heading."""
        if not self.has_message:
            return False
        if line.text.startswith((" ", "\t")):
            return True
        is_other = line.level or (line.when is not None and self.event.line.when is None)
        if self.num_after == 1 and not self.is_apart and not _WARNS.search(line.text):
            return True
        return opens_a_list(self.event.get("message")) and not is_other


class TracebackReader:
    """Collects the tracebacks of each writer; an exception becomes an event."""

    def __init__(self) -> None:
        self._open: dict[Who, _Open] = {}
        self._last: dict[Who, _Ended] = {}  # each writer's last traceback
        self.superseded: list[LogEvent] = []
        self._ignored: LogLine | None = (
            None  # says that the next traceback of its writer ends nothing
        )

    @property
    def is_open(self) -> bool:
        """Return whether lines of a traceback may follow."""
        return bool(self._open or self._last)

    def forget(self, order: int) -> None:
        """Drop tracebacks that have been open for 2,000 lines: their writers have gone."""
        self._open = {
            who: known
            for who, known in self._open.items()
            if order - known.first.order <= _MAX_APART
        }
        self._last.clear()

    def record_announcement(self, line: LogLine) -> bool:
        """Record a line that announces a traceback which ends nothing; return whether it is one.

        Such tracebacks come from destructors and from errors in logging.
        """
        if not line.text.startswith(_IGNORED):
            return False
        self._ignored = line
        return True

    def begin_if_start(self, line: LogLine) -> bool:
        """Begin a traceback if this line does; return whether it did.

        A second traceback of the same writer is a part of the first.
        """
        is_frame = (
            _FRAME.match(line.text) is not None
        )  # of a log that begins within it, or of a SyntaxError
        if _START not in line.text and not is_frame:
            return False
        known = self._open.get(line.who)
        if known is None and len(self._open) < _MAX_OPEN:
            ended = self._last.pop(line.who, None)
            known = _Open(
                first=line, has_start=not is_frame, indent=_indent_of(line.text, is_frame=is_frame)
            )
            if is_frame:
                known.lines.append(line)
            known.beneath = ended if ended is not None and ended.between else None
            known.around = ended.event if ended is not None and _announced(ended, line) else None
            known.width = len(line.text) if line.text.endswith(" ") else 0
            known.is_ignored = self._is_ignored(line)
            if line.level == "info":
                known.outermost = (
                    "logged"  # a program has caught what it logs as less than an error
                )
            self._open[line.who] = known
        return True

    def _is_ignored(self, line: LogLine) -> bool:
        before, self._ignored = self._ignored, None
        return before is not None and before.who == line.who and line.order - before.order < 3

    def holds(self, line: LogLine) -> bool:
        """Return whether a line must be a frame, or its code, of its writer's open traceback."""
        known = self._open.get(line.who)
        return known is not None and line.text[known.indent :].startswith((" ", "\t"))

    def take(self, line: LogLine) -> Iterator[LogEvent]:
        """Handle one more line; yield the event of a traceback that it ends."""
        known = self._open.get(line.who)
        if known is None:
            self._follow(line)
            return
        known.num_lines += 1
        if known.indent and line.text[: known.indent].isspace():
            line = replace(line, text=line.text[known.indent :])
        text = line.text
        if known.lines and _BROKEN_FRAME.match(known.lines[-1].text):
            known.lines[-1] = replace(known.lines[-1], text=_rejoined(known.lines[-1].text, text))
            self._note_outermost(known, known.lines[-1].text)
            return
        if (broken := _BROKEN_ENDING.match(text.lstrip())) is not None:
            known.broken_type = broken["type"]
        if _is_part(known, text):
            known.lines.append(line)
            self._note_outermost(known, text)
            del known.lines[: -_MAX_KEPT or None]
            if known.num_lines > _MAX_LINES:
                del self._open[line.who]
            return
        if known.broken_type and text.startswith(": "):
            line = replace(line, text=f"{known.broken_type}{text}")
            text = line.text
        ending = _ENDING.match(text)
        if ending is None and known.num_odd < _MAX_ODD_LINES and not known.is_ignored:
            known.num_odd += 1
            return
        del self._open[line.who]
        if known.is_ignored:
            fields = {"since": str(known.first.order - 1)}  # the line that says so
            yield LogEvent(kind="ignored", role=LineRole.CONTEXT, line=line, fields=fields)
            return
        if ending is not None and _is_exception(ending["type"], known):
            event = self._joined(
                known, _exception(known, line, ending["type"], ending["message"] or "")
            )
            if len(self._last) < _MAX_OPEN:
                self._last[line.who] = _Ended(
                    event,
                    known.outermost or "",
                    known.width,
                    line.text,
                    has_message=":" in line.text,
                )
            yield event

    def _note_outermost(self, known: _Open, text: str) -> None:
        is_first = known.outermost is None and known.has_start
        if is_first and (frame := _FRAME.match(text)) is not None:
            known.outermost = frame["function"] or "<module>"
        elif BETWEEN.match(text):
            known.outermost = None

    def _follow(self, line: LogLine) -> None:
        """Record whether a line continues the message or the chain of the last exception."""
        ended = self._last.get(line.who)
        if ended is None or _START in line.text:
            return
        if not line.text.strip():
            ended.is_apart = True
            return
        ended.num_after += 1
        if ended.between or ended.num_after > _MAX_MESSAGE_LINES:
            del self._last[line.who]
        elif BETWEEN.match(line.text):
            ended.between = line.text
        elif isinstance(ended.event.fields, dict):  # these lines complete the message
            if ended.is_wrapped_before(line.text):
                _unwrap(ended, line.text)
            elif ended.continues_in(line):
                _add_more(ended.event.fields, line.text.strip())

    def _joined(self, known: _Open, event: LogEvent) -> LogEvent:
        """Return an exception, or the one beneath it if this one only wraps that."""
        if known.around is not None:
            self.superseded.append(known.around)
            return _as_wrapped(event, known.around)
        if known.beneath is None:
            return event
        ended, beneath = known.beneath, known.beneath.event
        frames = [n for n, line in enumerate(known.lines) if _FRAME.match(line.text)]
        code = [line.text for line in known.lines[frames[-1] + 1 :]] if frames else []
        if only_wraps(event, beneath, between=ended.between, caught_in=ended.caught_in, code=code):
            self.superseded.append(beneath)
            return _as_wrapped(beneath, event)
        if was_only_a_question(event, beneath):
            self.superseded.append(beneath)
        return event

    def read_cpp_exception(self, line: LogLine, thrown: str) -> LogEvent | None:
        """Return the exception of C++ that a line with `what():` ends; None for other lines.

        Args:
            line: Any line.
            thrown: The type that `terminate called` has named before; empty if it has not.
        """
        what = _WHAT.match(line.text)
        if what is None:
            return None
        kind, role, more = meaning_of(thrown or "std::exception", what["message"])
        fields = {
            "type": thrown or "std::exception",
            "message": what["message"][:500],
            "uncaught": "1",
        }
        event = LogEvent(kind=kind, role=role, line=line, fields={**more, **fields})
        self._last[line.who] = _Ended(event, "")
        return event

    def close(self) -> Iterator[LogEvent]:
        """Yield the tracebacks that are still open at the end of a log, which was cut there."""
        for known in self._open.values():
            if known.lines and not known.is_ignored:
                yield _cut(known)
        self._open.clear()


def _announced(ended: _Ended, line: LogLine) -> bool:
    """Return whether a traceback is part of the message before it, e.g. that of a worker."""
    if ended.between or ended.event.role is LineRole.ECHO:
        return False
    message = ended.event.get("more") or ended.event.get("message")
    is_next = ended.num_after == 0 or ended.event.get("more") != ""
    return line.text.lstrip().startswith("Original") or (is_next and message.endswith(":"))


def _indent_of(text: str, *, is_frame: bool) -> int:
    """Return how far a traceback that begins with this line is indented."""
    spaces = len(text) - len(text.lstrip(" "))
    return max(0, spaces - 2) if is_frame else spaces if text.lstrip().startswith(_START) else 0


def _unwrap(ended: _Ended, text: str) -> None:
    """Join a message that was wrapped at the width of its box, and read it again."""
    fields = ended.event.fields
    is_one_word = " " not in ended.last_line.strip()
    gap = "" if is_one_word and len(ended.last_line) == ended.width else " "
    message = f"{fields['message']}{gap}{text.strip()}"[:500]
    kind, _, more = meaning_of(fields["type"], message)
    if isinstance(fields, dict):
        fields["message"] = message
        if kind == ended.event.kind:
            fields.update(more)
    ended.last_line = text


def _add_more(fields: dict[str, str], text: str) -> None:
    """Add a line to a message, which may show only now what it means."""
    fields["more"] = f"{fields.get('more', '')}\n{text}"[:1000]
    if opens_a_list(fields["message"]) and not fields.get("told"):
        kind, _, more = meaning_of(fields["type"], f"{fields['message']} {text}")
        if kind == "exception":
            fields.update(more)


def _cut(known: _Open) -> LogEvent:
    """Return the event of a log that ends within a traceback: the exception's line is missing."""
    last = known.lines[-1]
    detail = tuple(line.text for line in known.lines[-12:])
    fields = {"type": "", "message": "the log ends within a traceback", **_where(known.lines)}
    kind = "exception" if known.has_start else "cut_traceback"
    return LogEvent(kind=kind, role=LineRole.CONTEXT, line=last, fields=fields, detail=detail)


def _is_part(known: _Open, text: str) -> bool:
    """Return whether a line belongs to an open traceback, also if a web page lost its indent."""
    if text.startswith((" ", "\t")) or not text.strip() or _START in text:
        return True
    if BETWEEN.match(text) or _FRAME.match(text):
        return True
    last = known.lines[-1].text if known.lines else ""
    is_flat = _FRAME.match(last) is not None and not last.startswith((" ", "\t"))
    ending = _ENDING.match(text)
    return is_flat and (ending is None or not _SOUNDS_LIKE_ONE.search(ending["type"]))


def _rejoined(first: str, second: str) -> str:
    """Return a frame that was broken in two; a space at the break was lost, as in `line 82`."""
    gap = " " if re.search(r"(?:,|line)$", first) and not second.startswith(" ") else ""
    return first + gap + second


def _is_exception(type_name: str, known: _Open) -> bool:
    """Return whether a word is an exception's type; if lines may be missing, only by its ending."""
    if known.has_start and not known.num_odd:
        return type_name not in _NOT_AN_EXCEPTION and (type_name[:1].isupper() or "." in type_name)
    return _SOUNDS_LIKE_ONE.search(type_name) is not None


def _exception(known: _Open, last: LogLine, type_name: str, message: str) -> LogEvent:
    """Return an exception's event; a message that means more than its type keeps that meaning."""
    fields = {"type": type_name, "message": message[:500], **_where(known.lines)}
    if known.outermost in (None, *_OUTERMOST):
        fields["uncaught"] = "1"
    detail = tuple(line.text for line in (*known.lines[-12:], last))
    kind, role, more = meaning_of(type_name, message)
    if type_name.endswith("CalledProcessError") and fields.get("library") in _LAUNCHERS:
        role = LineRole.ECHO  # a launcher's message about its child
    return LogEvent(kind=kind, role=role, line=last, fields={**more, **fields}, detail=detail)


def _as_wrapped(beneath: LogEvent, event: LogEvent) -> LogEvent:
    """Return the exception beneath, which ended its process as the outer one did."""
    around = f"{event.get('type')}: {event.get('message')}"[:300]
    fields = {**beneath.fields, "around": around, "uncaught": event.get("uncaught")}
    return replace(beneath, fields=fields)


def _of_library(path: str) -> str:
    """Return a library file's path below the folder of packages."""
    return path.rpartition("-packages/")[2]


def _where(lines: list[LogLine]) -> dict[str, str]:
    """Return the fields of the innermost frame of the user's own code, else of the innermost."""
    frames = [found for line in lines if (found := _FRAME.match(line.text)) is not None]
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    chosen = (own or frames)[-1] if frames else None
    if chosen is None:
        return {}
    package = _PACKAGE.search(frames[-1]["file"])
    asked = [frame["file"] for frame in frames if "-packages/torch/" not in frame["file"]]
    is_standard = package is None and _LIBRARY.search(frames[-1]["file"]) is not None
    library = package[1] if package is not None else STANDARD_LIBRARY if is_standard else ""
    return {
        "raised_in": frames[-1]["function"] or "",
        "through": " ".join(
            dict.fromkeys(_of_library(frame["file"]) for frame in frames if frame not in own)
        ),
        "library": library,
        "where": f"{chosen['file']}:{chosen['line']}",
        "function": chosen["function"] or "",
        "own": "1" if own else "",
        "ours": "1" if asked and _OURS.search(asked[-1]) else "",
    }

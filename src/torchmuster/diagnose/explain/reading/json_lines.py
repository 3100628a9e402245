"""Lines that are JSON objects: of Docker, of loggers such as structlog, loguru and zap.

A line means what its message means. A message of several lines becomes several objects of one line
each, so that each can be read separately; an object within an object is opened once.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchmuster.diagnose.explain.events import Who

_MESSAGES = (
    *("message", "msg", "log", "text", "event", "MESSAGE", "textPayload", "jsonPayload", "body"),
    *("short_message", "stringValue"),
)
# Fields next to a message that belong to it: tracebacks.
_TRACEBACK_KEYS = (
    *("exc_info", "exception", "exc_text", "stack_trace", "stacktrace", "traceback", "stack"),
    *("error.stack_trace", "full_message"),
)
_TIMES = ("time", "timestamp", "@timestamp", "ts", "asctime", "datetime", "date", "eventTime")
_LEVELS = ("level", "levelname", "severity", "lvl", "log_level", "log.level", "severity_text")
_RANKS = ("rank", "global_rank", "RANK")
_TASKS = ("local_rank", "LOCAL_RANK")
_HOSTS = (
    *("pod", "pod_name", "k8s.pod.name", "hostname", "host", "host.name", "node", "nodename"),
    *("node_name", "_HOSTNAME", "computer", "instance"),
)
_WITHIN = ("kubernetes", "record", "extra", "labels", "context", "attributes", "resource", "fields")
_DEPTH = 2
_FIRST_SECOND, _LAST_SECOND = 9e8, 9e9  # from 1998 on; smaller numbers have another zero
_MAX_LABEL_BYTES = 200
_MAX_LINES = 1000  # of one message
_MESSAGE = re.compile(rf'"(?:{"|".join(_MESSAGES)})" ?: ?["{{\\[]'.encode())
_NUMBERED_LEVELS = ((50, "error"), (40, "warning"), (0, "info"))  # as pino and Python number them


@dataclass(frozen=True, slots=True)
class JsonLine:
    """The content of an object.

    Attributes:
        when: As in the object: a time in words, or a number since 1970.
        level: As in the object.
    """

    message: str
    who: Who
    when: str | float | None
    level: str


def begin_of(raw: bytes) -> int:
    """Return where an object with a message begins in a line, also after a label; -1 if none."""
    if raw[:1] == b"{":
        begin = 0
    else:
        begin = raw.find(b' {"', 0, _MAX_LABEL_BYTES) + 1
        if begin == 0:
            return -1
    return begin if _MESSAGE.search(raw) is not None and raw.rstrip().endswith(b"}") else -1


def read(raw: bytes) -> JsonLine | None:
    """Return the content of an object; None if it is not an object or has no message."""
    values = _object_of(raw)
    if values is None:
        return None
    found = _content_of(values)
    for _ in range(_DEPTH - 1):
        inner = _object_of(found.message) if found is not None else None
        within = _content_of(inner) if inner is not None else None
        if found is None or within is None:
            break
        found = JsonLine(
            within.message,
            within.who.known(found.who),
            within.when if within.when is not None else found.when,
            within.level or found.level,
        )
    return found


def lines_of(raw: bytes) -> list[bytes]:
    """Return the lines of an object's message, each as a separate object; other lines unchanged."""
    begin = begin_of(raw) if b"\\n" in raw or b"rror" in raw or b"xcept" in raw else -1
    found = read(raw[begin:]) if begin >= 0 else None
    lines = found.message.rstrip().splitlines() if found is not None else []
    if found is None or len(lines) < 2:
        return [raw]
    others = {
        "time": found.when,
        "level": found.level,
        "rank": found.who.rank,
        "local_rank": found.who.task,
        "host": found.who.host,
    }
    said = {name: value for name, value in others.items() if value not in (None, "")}
    return [
        raw[:begin] + json.dumps({"message": line, **said}).encode() for line in lines[:_MAX_LINES]
    ]


def _object_of(text: bytes | str) -> Mapping[str, Any] | None:
    brace = b"{" if isinstance(text, bytes) else "{"
    if not text.startswith(brace):  # type: ignore[arg-type]
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _content_of(values: Mapping[str, Any]) -> JsonLine | None:
    message = _first(values, _MESSAGES)
    if isinstance(message, dict):
        return _content_of({**values, **_without_messages(message)})
    if not isinstance(message, str):
        return None
    more = _more_of(values)
    if more and more.strip() not in message:
        message = f"{message.rstrip()}\n{more}"
    nested = [values[name] for name in _WITHIN if isinstance(values.get(name), dict)]
    everywhere = [values, *nested]
    who = Who(
        host=_word(everywhere, _HOSTS),
        rank=_number(everywhere, _RANKS),
        task=_number(everywhere, _TASKS),
    )
    when = next((found for one in everywhere if (found := _time_of(one)) is not None), None)
    level = next((found for one in everywhere if (found := _level_of(one))), "")
    return JsonLine(message, who, when, level)


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _without_messages(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object that replaces a message; None hides the names that it lacks."""
    return {**dict.fromkeys(_MESSAGES), **message}


def _more_of(values: Mapping[str, Any]) -> str:
    """Return the traceback next to a message, as text."""
    error = values.get("error")
    if isinstance(error, dict):
        values = {**error, **values}
    more = _first(values, _TRACEBACK_KEYS)
    if isinstance(more, list):
        more = "\n".join(_traceback_of(one) for one in more if isinstance(one, dict))
    return more if isinstance(more, str) else ""


def _traceback_of(values: Mapping[str, Any]) -> str:
    """Return a traceback that structlog has taken apart, as Python prints it."""
    frames = values.get("frames")
    lines = ["Traceback (most recent call last):"]
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            place = f'  File "{frame.get("filename")}", line {frame.get("lineno")}'
            lines += [f"{place}, in {frame.get('name')}", f"    {frame.get('line') or '...'}"]
    return "\n".join([*lines, f"{values.get('exc_type')}: {values.get('exc_value')}"])


def _word(all_values: list[Mapping[str, Any]], names: tuple[str, ...]) -> str | None:
    for values in all_values:
        found = _first(values, names)
        if isinstance(found, dict):
            found = found.get("name")
        if isinstance(found, str) and 0 < len(found) < 256:
            return found
    return None


def _number(all_values: list[Mapping[str, Any]], names: tuple[str, ...]) -> int | None:
    for values in all_values:
        found = str(_first(values, names))
        if found.isdecimal() and len(found) < 7:
            return int(found)
    return None


def _time_of(values: Mapping[str, Any]) -> str | float | None:
    """Return a time as it is; a number becomes seconds since 1970, also from milliseconds etc."""
    found = _first(values, _TIMES)
    if isinstance(found, dict):
        found = found.get("repr")
    if isinstance(found, str):
        return found
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    try:
        seconds = float(found)
    except OverflowError:  # an integer of hundreds of digits
        return None
    if not math.isfinite(seconds):  # JSON of Python's may say Infinity
        return None
    while seconds > _LAST_SECOND:
        seconds /= 1000
    return seconds if seconds > _FIRST_SECOND else None


def _level_of(values: Mapping[str, Any]) -> str:
    found = _first(values, _LEVELS)
    if isinstance(found, dict):
        found = found.get("name")
    if isinstance(found, int):
        return next((level for least, level in _NUMBERED_LEVELS if found >= least), "")
    return found if isinstance(found, str) else ""

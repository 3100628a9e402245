"""The prefixes of messages: colours, labels, ranks, times. They tell who wrote a line and when."""

import re
from datetime import date
from functools import lru_cache
from typing import NamedTuple

from torchmuster.diagnose.explain.catalogue.index import TABLES
from torchmuster.diagnose.explain.events import Who

# The level that a logger gives a line, and what else it puts before a message.


INFO, WARNING, ERROR = "info", "warning", "error"
_WORDS = {
    INFO: "trace debug verbose dbug dbg info information informational notice success inf",
    WARNING: "warn warning wrn",
    ERROR: "err error critical crit fatal exception panic severe alert emerg emergency",
}
_LEVELS = {word: level for level, words in _WORDS.items() for word in words.split()}
_LEVELS |= {"i": INFO, "w": WARNING, "e": ERROR, "f": ERROR, "d": INFO, "v": INFO}
_UPPER = "|".join(
    sorted((word.upper() for word in _LEVELS if len(word) > 3), key=len, reverse=True)
)
_ANY = "|".join(sorted((word for word in _LEVELS if len(word) > 3), key=len, reverse=True))
_NAME = r"[\w.@/<>-]{1,80}+"
# A level comes first, after one name, or in a mark; in lower case only with such a mark.
_AT_THE_START = re.compile(
    rf"(?:[-|>] ?)?(?:(?:{_NAME}(?: - |: |\||:)|(?=[a-z]){_NAME} )?"
    rf"(?:(?P<upper>{_UPPER}|ERR)(?=[\s:|\]-]|$)|[\[(<](?P<marked>(?i:{_ANY}))(?:[|:][^\])>]{{1,80}})?\s*[\])>])"
    rf"|(?P<small>{_ANY})(?=: )|##\[(?P<hub>error|warning|debug)\]|::(?P<action>error|warning|notice)\b"
    rf"|\| ?(?P<loguru>{_UPPER}) *\|"
    rf"|\S+:\d+: \w*(?P<python>Warning): |kern *:(?P<kernel>\w+) *: )"
)
_LOGFMT = re.compile(r"\b(?:level|lvl)=\"?(?P<level>[a-zA-Z]+)")
# All that loggers put before a message; removed only where a part of a traceback follows.
_LOGGER = re.compile(
    rf"(?:[-|>] ?|##)?(?:{_NAME}(?: - |: |\|)|(?=[a-z]){_NAME} )?[\[(|]? ?(?:{_UPPER}|ERR|(?<=##\[)(?:error|warning|debug))(?:[|:][^\])>]{{1,80}}\])?\s*[\])|]?"
    rf"(?: ?(?:- |: ?|\| ?|>> |\[[^\]]{{1,80}}\]:? |{_NAME}:\d+(?: -|:|\]) |{_NAME}(?: - |:(?! \S)))|\d{{4}}-\d\d-\d\d[ T][\d:,.]+ )*"
    r" ?(?=Traceback \(most recent|  +\S|(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: |$))"
)
_PARTS = ("  ", "Traceback", "Error", "Exception", "Interrupt", "Exit")  # without them it can't fit


def level_of(text: str) -> str:
    """Return the level with which a message without its time begins; empty when it has none."""
    found = _AT_THE_START.match(text)
    if found is None and "l=" in text[:300]:
        found = _LOGFMT.search(text[:300])
    return level_named(found[found.lastgroup or 0]) if found is not None else ""


def level_named(word: str) -> str:
    """Return the level for a logger's word; empty when it is unknown."""
    return _LEVELS.get(word.lower(), "")


def without_logger(text: str) -> str:
    """Return a line of a traceback as Python prints it, without a logger's prefix."""
    if not any(part in text for part in _PARTS):
        return text
    found = _LOGGER.match(text)
    return text[found.end() :] if found is not None and found.end() else text


_COLOURS = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*(?:\x07|\x1b\\)|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_MAX_TEXT = 2000
_MAX_WORDS = 160  # of a text that may be labels
_HOST = r"[A-Za-z][A-Za-z0-9]*(?:[-_.][A-Za-z0-9]+)*"
_TIME = re.compile(
    r"\[?(?P<date>\d{4}-\d\d-\d\d|\d{4}/\d\d/\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?[:,]? ?(?:- ?)?"
)
# As HuggingFace and rich write it: 01/31/2025 10:11:12 or [01/31/25 10:11:12].
_MONTH_FIRST = re.compile(
    r"\[?(?P<month>\d\d)/(?P<day>\d\d)/(?:20)?(?P<year>\d\d) (?P<time>\d\d:\d\d:\d\d)\]? ?(?:- ?)?"
)
# The prefixes of `ts`, syslog and journald; the last two name host and process too. Then `dmesg
# -T`.
_MONTH = r"(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) (?P<day>[ \d]\d) (?P<time>\d\d:\d\d:\d\d)"
_SYSLOG = re.compile(_MONTH + r"(?:\.\d+)? ")
_DMESG = re.compile(r"\[?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) " + _MONTH + r" (?P<year>\d{4})\]? ?")
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
# A time without a day orders nothing, since other lines have one.
_CLOCK = re.compile(r"(?:\[\d\d:\d\d:\d\d(?:[.,]\d+)?\]|\d\d:\d\d:\d\d(?:[.,]\d+)?) (?!\|)")
# glog, as torch's C++ writes it: [E1121 10:11:12.123456789 socket.cpp:1011] or W1121
# 10:11:12.123000 77 file.py:9]
_GLOG = re.compile(
    r"\[?(?P<level>[IWEF])(?P<month>\d{1,2})(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)\.(?P<part>\d+) +(?:(?P<pid>\d+) )?"
    r"(?P<file>[^\]\s]+:\d+)\] ?"
)
# In the order in which they may follow each other; after a match, all are tried again.
_LABELS = (
    re.compile(r"(?P<task>\d{1,6}): "),  # srun --label
    re.compile(r"\[(?P<role>[A-Za-z_]+)(?P<task>\d{1,6})\]:? ?"),  # torchrun --tee, its own roles
    re.compile(r"\[rank[ :]?(?P<rank>\d{1,6})\]:? ?", re.IGNORECASE),
    re.compile(
        r"\[(?P<rank>\d{1,6})\](?:(?::| )? ?(?=[A-Z\[]|(?:\w+\.)+[A-Z]\w*:)|:? (?=  +\S))"
    ),  # Intel MPI, NCCL
    re.compile(r"\[(?P<host>" + _HOST + r")(?:[:/](?P<task>\d{1,6}))?\]:? "),
    re.compile(r"\[?pod/(?P<host>" + _HOST + r")/[^\s\]]+\]? "),
    re.compile(
        r"(?P<host>" + _HOST + r")(?: \d{1,6})?(?:: | +\| ?)(?= *\S)"
    ),  # pdsh, PALS, compose
    re.compile(r"\(?(?P<host>" + _HOST + r"):(?P<pid>\d{2,8}):(?P<tid>\d{2,8})\)? "),  # NCCL
    re.compile(r"\((?:[\w.()]+ )?pid=\d+(?:, ip=(?P<node>[\w.:]+))?\) ?"),  # Ray
    # Open MPI, PRRTE, and SageMaker's form of it
    re.compile(
        r"\[(?:[\w.-]+@)?\d+,(?:mpirank:)?(?P<task>\d{1,6})(?:,(?P<node>[\w.-]+))?\]<std(?:err|out|diag)>: ?"
    ),
    re.compile(r"std(?:err|out) [FP] "),  # containerd, after a time
    re.compile(r"\[ *\d{1,9}\.\d{6}\] "),  # dmesg
    re.compile(
        rf"(?P<node>{_HOST}) [\w./@-]+\[\d+\]: |(?P<host>{_HOST}) kernel: "
    ),  # syslog, after a time
    re.compile(r"[\w.-]+/(?P<host>" + _HOST + r")\[[\w-]+\]: "),  # kail
    # stern: a pod and a container, where what follows can't be the rest of a sentence
    re.compile(
        r"(?P<host>[a-z0-9]+(?:-[a-z0-9]+)+) [a-z][a-z0-9-]* "
        r"(?=Traceback \(|  +\S|\[|\{\"|\d{4}-\d\d-\d\d|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)"
    ),
)
_BRACKETED = (*_LABELS[1:6], _LABELS[9], _LABELS[11])
_PLAIN = _LABELS[6:8]
_NOBODY = Who()
_EPOCH_DAY = date(1970, 1, 1).toordinal()
# Words before a colon that are not a host but begin a message.
_NO_HOST = TABLES["not-a-host"].words
_MAX_LABELS = 4
# What Python draws before the tracebacks of an exception group.
_MARGIN = re.compile(r" {2,24}[|+] (?=\S|  )")


def clean(raw: bytes) -> str:
    """Return the text of a line without colours and control characters, up to 2,000 characters."""
    text = raw[: 4 * _MAX_TEXT].decode("utf-8", errors="replace")
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    return _CONTROL.sub("", text).rstrip()[:_MAX_TEXT]


class SplitLine(NamedTuple):
    """A line without its prefix.

    Attributes:
        when: Seconds since 1970.
        level: `info`, `warning`, `error`, or empty.
    """

    text: str
    who: Who
    when: float | None
    level: str = ""


def split(text: str, year: int) -> SplitLine:
    """Return the message of a line, who wrote it and when.

    Args:
        text: A clean line.
        year: For times without one.
    """
    who, when, level = _NOBODY, None, ""
    for _ in range(_MAX_LABELS):
        found = _split_label(text)
        if found is None:
            moment = _take_time(text, year)
            if moment is None:
                break
            text, at, named = moment
            when = at if when is None else when
            if named:
                level = level_named(named)
            continue
        text, more = found
        who = who.known(more)
    level = level or level_of(text)
    if text.startswith("  "):
        if (margin := _MARGIN.match(text)) is not None:
            text = text[margin.end() :]
    elif level:
        text = without_logger(text)
    return SplitLine(text, who, when, level)


def _split_label(text: str) -> tuple[str, Who] | None:
    for label in _labels_for(text):
        match = label.match(text)
        if match is None:
            continue
        groups = match.groupdict()
        host = groups.get("host")
        if host is None:
            host = groups.get("node")  # its form alone says that it is one
        elif not _is_host(host):
            continue
        if groups.get("role", "x").lower() in ("rank", "error", "warning"):
            continue
        rank, task = groups.get("rank"), groups.get("task")
        who = Who(
            host=host,
            rank=int(rank) if rank else None,
            task=int(task) if task is not None else None,
        )
        return text[match.end() :], who
    return None


def _labels_for(text: str) -> tuple[re.Pattern[str], ...]:
    """Return the labels that can begin a text, in their order; most texts need none or two."""
    first = text[:1]
    if first == "[":
        return _BRACKETED
    if first.isalpha():
        labels: tuple[re.Pattern[str], ...] = _PLAIN
        if first == "s":
            labels = (*labels, _LABELS[10])
        elif first == "p":
            labels = (_LABELS[5], *labels)
        word, _, rest = text[:_MAX_WORDS].partition(" ")
        if "]: " in rest or "kernel: " in rest or "]:" in word:
            labels = (*labels, *_LABELS[12:14])
        if "-" in word and rest[:1].islower():
            labels = (*labels, _LABELS[14])
        return labels
    if first == "(":
        return _LABELS[7:9]
    return _LABELS[:1] if first.isdecimal() else ()


def _is_host(word: str) -> bool:
    low = word.lower()
    if low in _NO_HOST or low.endswith(
        ("error", "exception", "warning", ".py", ".sh", ".cpp", ".cc")
    ):
        return False
    if low.startswith("torch."):
        return False  # a logger
    last = word.rpartition(".")[2]
    if last[:1].isupper() and any(c.islower() for c in last):
        return False  # the type of an exception
    # A plain word before a colon is a host only if it has a digit or a dash.
    return any(c.isdigit() or c == "-" for c in word)


def seconds_of(words: str, year: int) -> float | None:
    """Return the seconds since 1970 of a time by itself; None when it is not a time."""
    moment = _take_time(words, year)
    return moment[1] if moment is not None else None


def _take_time(text: str, year: int) -> tuple[str, float | None, str] | None:
    """Return the text without its time, the time, and a joined letter for the level."""
    first = text[:1]
    if first == "[" or first.isdecimal():
        if (match := _TIME.match(text)) is not None:
            day = match["date"].replace("/", "-")
            when = _seconds(day, match["time"], match["part"], match["zone"])
            return text[match.end() :], when, ""
        if (match := _CLOCK.match(text)) is not None:
            return text[match.end() :], None, ""
        if (match := _MONTH_FIRST.match(text)) is not None:
            day = f"20{match['year']}-{match['month']}-{match['day']}"
            return text[match.end() :], _seconds(day, match["time"], None, None), ""
    if first in "JFMASOND" and (match := _SYSLOG.match(text)) is not None:
        return text[match.end() :], _seconds_of_words(match, year), ""
    if first in "[MTWFS" and (match := _DMESG.match(text)) is not None:
        return text[match.end() :], _seconds_of_words(match, int(match["year"])), ""
    if first in "[IWEF" and (match := _GLOG.match(text)) is not None:
        day = f"{year}-{match['month']}-{match['day']}"
        when = _seconds(day, match["time"], match["part"], None)
        return text[: match.start()] + text[match.end() :], when, match["level"]
    return None


def _seconds_of_words(match: re.Match[str], year: int) -> float | None:
    month = _MONTHS.index(match["month"]) // 3 + 1
    return _seconds(f"{year}-{month}-{match['day'].strip()}", match["time"], None, None)


def _seconds(day: str, clock: str, part: str | None, zone: str | None) -> float | None:
    """Return seconds since 1970; None for a day or time that does not exist."""
    midnight = _midnight(day)
    hour, minute, second = int(clock[:2]), int(clock[3:5]), int(clock[6:])
    if midnight is None or hour > 23 or minute > 59 or second > 59:
        return None
    seconds = midnight + hour * 3600 + minute * 60 + second + (float(f"0.{part}") if part else 0.0)
    if zone and zone != "Z":
        sign = -1 if zone[0] == "+" else 1
        digits = zone[1:].replace(":", "")
        seconds += sign * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
    return seconds


@lru_cache(maxsize=512)
def _midnight(day: str) -> float | None:
    """Return the seconds since 1970 at which a day began; None for a day that does not exist."""
    try:
        year, month, of_month = (int(word) for word in day.split("-"))
        return (date(year, month, of_month).toordinal() - _EPOCH_DAY) * 86_400.0
    except ValueError:
        return None

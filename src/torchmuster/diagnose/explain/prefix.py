"""What stands before a message: colours, labels of srun and kubectl, ranks, times. They say who wrote it, and when."""

import re
from datetime import date
from functools import lru_cache

from torchmuster.diagnose.explain.events import Who

_COLOURS = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*(?:\x07|\x1b\\)|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_MAX_TEXT = 2000
_HOST = r"[A-Za-z][A-Za-z0-9]*(?:[-_.][A-Za-z0-9]+)*"
_TIME = re.compile(
    r"\[?(?P<date>\d{4}-\d\d-\d\d|\d{4}/\d\d/\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?[:,]? ?(?:- ?)?"
)
# What `ts`, syslog and journald put before a line; the last two name host and process too.
_SYSLOG = re.compile(
    r"(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) (?P<day>[ \d]\d) (?P<time>\d\d:\d\d:\d\d)"
    r"(?:\.\d+)? (?:(?P<host>[\w.-]+) [\w./-]+\[\d+\]: )?"
)
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
# A time without a day orders nothing, since other lines have one.
_CLOCK = re.compile(r"(?:\[\d\d:\d\d:\d\d(?:[.,]\d+)?\]|\d\d:\d\d:\d\d(?:[.,]\d+)?) (?!\|)")
# glog, as torch's C++ writes it: [E1121 10:11:12.123456789 socket.cpp:1011] or W1121 10:11:12.123000 77 file.py:9]
_GLOG = re.compile(
    r"\[?(?P<level>[IWEF])(?P<month>\d{1,2})(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)\.(?P<part>\d+) (?:(?P<pid>\d+) )?"
    r"(?P<file>[^\]\s]+:\d+)\] ?"
)
# In the order in which they may stand before each other; each is tried again after the last.
_LABELS = (
    re.compile(r"(?P<task>\d{1,6}): "),  # srun --label
    re.compile(r"\[(?P<role>[A-Za-z_]+)(?P<task>\d{1,6})\]:? ?"),  # torchrun --tee, its own roles
    re.compile(r"\[rank[ :]?(?P<rank>\d{1,6})\]:? ?", re.IGNORECASE),
    re.compile(r"\[(?P<rank>\d{1,6})\](?::| )? ?(?=[A-Z\[])"),
    re.compile(r"\[(?P<host>" + _HOST + r")(?:[:/](?P<task>\d{1,6}))?\]:? "),
    re.compile(r"\[?pod/(?P<host>" + _HOST + r")/[^\s\]]+\]? "),
    re.compile(
        r"(?P<host>" + _HOST + r")(?: \d{1,6})?(?:: | +\| ?)(?= *\S)"
    ),  # pdsh, PALS, compose
    re.compile(r"\(?(?P<host>" + _HOST + r"):(?P<pid>\d{2,8}):(?P<tid>\d{2,8})\)? "),  # NCCL
    re.compile(r"\(\w+ pid=\d+(?:, ip=(?P<node>[\w.:]+))?\) ?"),  # Ray
    re.compile(r"\[\d+,(?P<task>\d{1,6})\]<std(?:err|out|diag)>: ?"),  # Open MPI
    re.compile(r"std(?:err|out) [FP] "),  # containerd, after a time
)
_BRACKETED, _PLAIN = (*_LABELS[1:6], _LABELS[9]), _LABELS[6:8]
_NOBODY = Who()
_EPOCH_DAY = date(1970, 1, 1).toordinal()
# Words before a colon that are no host: they begin a message.
_NO_HOST = frozenset(
    [
        "error",
        "warning",
        "info",
        "note",
        "debug",
        "fatal",
        "critical",
        "traceback",
        "hint",
        "at",
        "because",
        "srun",
        "slurmstepd",
        "sbatch",
        "salloc",
        "torchrun",
        "bash",
        "sh",
        "python",
        "python3",
        "mpiexec",
        "mpirun",
        "prterun",
        "orted",
        "pbsdsh",
        "muster",
        "usage",
        "file",
        "line",
        "rank",
        "epoch",
        "step",
        "loss",
        "kernel",
        "nvrm",
        "terminate",
        "what",
        "root",
        "master",
        "worker",
        "using",
        "loading",
        "running",
        "starting",
        "time",
        "host",
        "exitcode",
        "error_file",
        "user",
        "warn",
        "exception",
        "nccl",
        "gloo",
        "wandb",
        "job",
        "queue",
        "output",
        "stderr",
        "stdout",
        "command",
        "cause",
        "test",
        "train",
        "c10d",
        "default",
        "rank0",
        "fp16",
        "bf16",
        "fp32",
        "int8",
        "a100",
        "h100",
        "top-1",
        "top-5",
        "utf-8",
    ]
)
_MAX_LABELS = 4
# What Python draws before the tracebacks of an exception group.
_MARGIN = re.compile(r" {2,24}[|+] (?=\S|  )")


def clean(raw: bytes) -> str:
    """Return the text of a line without colours and control characters, bounded."""
    text = raw[: 4 * _MAX_TEXT].decode("utf-8", errors="replace")
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    return _CONTROL.sub("", text).rstrip()[:_MAX_TEXT]


def split(text: str, year: int) -> tuple[str, Who, float | None]:
    """Return the message of a line, who wrote it and when.

    Args:
        text: A clean line.
        year: For times without one.
    """
    who, when = _NOBODY, None
    for _ in range(_MAX_LABELS):
        found = _take_label(text)
        if found is None:
            moment = _take_time(text, year)
            if moment is None:
                break
            text, at = moment
            when = at if when is None else when
            continue
        text, more = found
        who = who.known(more)
    if text.startswith("  ") and (margin := _MARGIN.match(text)) is not None:
        text = text[margin.end() :]
    return text, who, when


def _take_label(text: str) -> tuple[str, Who] | None:
    for label in _labels_for(text[:1]):
        match = label.match(text)
        if match is None:
            continue
        groups = match.groupdict()
        host = groups.get("host")
        if host is None:
            host = groups.get("node")
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


def _labels_for(first: str) -> tuple[re.Pattern[str], ...]:
    """Return the labels that can begin with a character, in their order: most lines then need none or two."""
    if first == "[":
        return _BRACKETED
    if first.isalpha():
        if first == "s":
            return (*_PLAIN, _LABELS[10])
        return _LABELS[5:8] if first == "p" else _PLAIN
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
    # A plain word before a colon is a host only if it looks like one: a digit or a dash in it.
    return any(c.isdigit() or c == "-" for c in word)


def _take_time(text: str, year: int) -> tuple[str, float | None] | None:
    first = text[:1]
    match = _TIME.match(text) if first == "[" or first.isdecimal() else None
    if match is not None:
        day = match["date"].replace("/", "-")
        return text[match.end() :], _seconds(day, match["time"], match["part"], match["zone"])
    match = _CLOCK.match(text) if first == "[" or first.isdecimal() else None
    if match is not None:
        return text[match.end() :], None
    match = _SYSLOG.match(text) if first in "JFMASOND" else None
    if match is not None:
        month = _MONTHS.index(match["month"]) // 3 + 1
        day = f"{year}-{month}-{match['day'].strip()}"
        return text[match.end() :], _seconds(day, match["time"], None, None)
    match = _GLOG.match(text) if first in "[IWEF" else None
    if match is not None:
        day = f"{year}-{match['month']}-{match['day']}"
        rest = text[: match.start()] + text[match.end() :]
        return rest, _seconds(day, match["time"], match["part"], None)
    return None


def _seconds(day: str, clock: str, part: str | None, zone: str | None) -> float:
    """Return seconds since 1970; 0 where there is no such day or time."""
    midnight = _midnight(day)
    hour, minute, second = int(clock[:2]), int(clock[3:5]), int(clock[6:])
    if midnight is None or hour > 23 or minute > 59 or second > 59:
        return 0.0
    seconds = midnight + hour * 3600 + minute * 60 + second + (float(f"0.{part}") if part else 0.0)
    if zone and zone != "Z":
        sign = -1 if zone[0] == "+" else 1
        digits = zone[1:].replace(":", "")
        seconds += sign * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
    return seconds


@lru_cache(maxsize=512)
def _midnight(day: str) -> float | None:
    """Return the seconds since 1970 at which a day began; None when there is no such day."""
    try:
        year, month, of_month = (int(word) for word in day.split("-"))
        return (date(year, month, of_month).toordinal() - _EPOCH_DAY) * 86_400.0
    except ValueError:
        return None

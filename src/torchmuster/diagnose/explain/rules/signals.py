"""Ends by signals, and by a lack of memory."""

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS, rule_rows, signs
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import HIGH, LOW, MEDIUM, found_by

_WORDS = {
    "Killed": 9,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
    "Illegal instruction": 4,
    "Floating point exception": 8,
    "Terminated": 15,
    "Hangup": 1,
    # As bash prints it in other languages.
    "Speicherzugriffsfehler": 11,
    "Erreur de segmentation": 11,
    "Violación de segmento": 11,
    "段错误": 11,
    "Getötet": 9,
    "Processus arrêté": 9,
    "已杀死": 9,
}
_OF_KERNEL = re.compile(r"Killed process|cgroup out of memory|oom-killer")
_IN_A_TABLE = re.compile(r"\btraceback\s*: Signal")
_ROWS_OF_A_RANK = 8  # lines of torchrun's table, at most
_RANK_ROW = re.compile(r"(?P<rank>\d{1,6}) \(local_rank: (?P<local>\d+)\)")
_CODES = ("code", "other", "rc", "make", "returned")  # of an event's fields
# Sent by launchers, schedulers and users who tear down: they tell what was ended, not why.
_SENT_FROM_OUTSIDE = (1, 2, 3, 15)
_IN_NATIVE_CODE = (4, 6, 7, 8, 11)
# Libraries that crash, by their name or that of a function in them; the last row fits any.
_CRASHED = signs("crashed.").values()
_ROWS = {
    signal.Signals[row.name.removeprefix("signal.").upper()].value: row
    for row in rule_rows("signal.sig")
}
_OTHER = RULE_ROWS["signal.other"]
_FROM_OUTSIDE = RULE_ROWS["signal.from-outside"]


def out_of_memory(case: Case) -> Iterator[LogFinding]:
    """Report that the kernel or the scheduler killed a process because memory ran out."""
    proof = case.first("oom_proof")
    if proof is None:
        return
    killed = _killed(case).get(9, [])
    # A scheduler's message is about this job; the kernel's may be about any process, even an
    # earlier one.
    is_of_job = killed or not _OF_KERNEL.search(proof.line.text)
    yield found_by(
        case,
        RULE_ROWS["signal.out-of-memory"],
        [proof],
        confidence=HIGH if is_of_job else MEDIUM,
        evidence=(proof.line, *(e.line for e in killed[:2])),
    )


def _killed(case: Case) -> dict[int, list[LogEvent]]:
    """Return the events about processes that a signal has ended, by its number."""
    found: dict[int, list[LogEvent]] = {}
    kinds = (
        *("child_failed", "signal_received", "killed_line", "task_exit", "loader_killed"),
        *("exit_code", "table_row", "fatal_python"),
    )
    for event in case.of(*kinds):
        number = signal_of(event)
        if number:
            found.setdefault(number, []).append(event)
    return found


def signal_of(event: LogEvent) -> int:
    """Return the number of the signal that an event reports; 0 if there is none."""
    if event.kind == "fatal_python":  # what faulthandler writes
        words = event.get("what").replace("-", " ")
        return next((number for word, number in _WORDS.items() if words.startswith(word)), 0)
    if event.kind == "table_row":
        match = (
            re.match(r"(-?\d+) ", event.get("value")) if event.get("key") == "exitcode" else None
        )
        return _of_code(int(match[1])) if match is not None else 0
    if event.kind in ("child_failed", "exit_code"):
        word = code_of(event)
        return _of_code(int(word)) if re.fullmatch(r"-?\d{1,4}", word) else 0
    if event.kind == "signal_received":
        word = event.get("signum") or event.get("number") or event.get("other") or event.get("name")
        digits = re.match(r"\d+", word)
        if digits is not None:
            return _of_code(-int(digits[0]))
        return int(signal.Signals[word]) if word in signal.Signals.__members__ else 0
    code = re.search(r"exit code (\d+)", event.line.text)
    if code is not None:
        return _of_code(int(code[1]))
    return next((number for word, number in _WORDS.items() if word in event.line.text), 0)


def code_of(event: LogEvent) -> str:
    """Return the exit code that an event names; empty where it names none."""
    return next((event.get(name) for name in _CODES if event.get(name)), "")


def _of_code(code: int) -> int:
    """Return the signal that an exit code stands for: -9 of Python, 137 of a shell."""
    number = -code if code < 0 else code - 128
    return number if 0 < number <= signal.NSIG else 0


def signals(case: Case) -> Iterator[LogFinding]:
    """Report a process that was ended by a signal without an explanation."""
    for number, found in _killed(case).items():
        if number in _SENT_FROM_OUTSIDE:
            continue
        if number == 9 and case.of("oom_proof"):
            continue
        begun = [event for event in found if number != 6 or not _had_lost_its_peer(case, event)]
        if begun:
            yield _ended(case, number, begun)


def _had_lost_its_peer(case: Case, event: LogEvent) -> bool:
    """Return whether the same writer had reported lost peers before its end.

    NCCL's watchdog, and an exception that nobody caught, abort the process: such an end is an echo.
    """
    rank = event.who.rank if event.who.rank is not None else _global_rank(case, event)
    return any(
        lost.line.path == event.line.path
        and lost.line.order < event.line.order
        and (rank is None or lost.who.rank in (None, rank))
        for lost in case.of("watchdog", "peer_lost", "watchdog_abort")
    )


def _global_rank(case: Case, event: LogEvent) -> int | None:
    """Return the rank of a local rank by the launcher's table of failures; None if missing."""
    for row in case.of("table_row"):
        match = _RANK_ROW.match(row.get("value")) if row.get("key") == "rank" else None
        same = row.line.path == event.line.path and row.who == event.who
        if match is not None and same and match["local"] == event.get("local_rank"):
            return int(match["rank"])
    return None


def _ended(case: Case, number: int, found: list[LogEvent]) -> LogFinding:
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    row = _ROWS.get(number, _OTHER)
    if number == 7 and any(e.kind == "loader_killed" for e in found):
        row = RULE_ROWS["signal.loader-hit-sigbus"]
    of_loader = any(e.kind == "loader_killed" for e in found)
    who = ended_process(case.earliest(found)) or (
        "a DataLoader worker" if of_loader else "a worker"
    )
    finding = found_by(case, row, found, {"who": who, "name": name})
    return replace(finding, **_where_it_crashed(case, number, finding, found))


def _where_it_crashed(
    case: Case, number: int, finding: LogFinding, found: list[LogEvent]
) -> dict[str, Any]:
    """Return the library, function and line that a crash report or the kernel adds to a finding."""
    reports = [e for e in found if e.get("crash_library") or e.get("crash_symbol")]
    lines = [e for e in found if e.get("where") and not e.get("type")]
    if number == signal.SIGSEGV:
        reports += [e for e in case.of("told:kernel.segfault") if e.get("library")]
    if not reports and not lines:
        return {}
    reported = reports[0] if reports else lines[0]
    library = reported.get("crash_library") or (reported.get("library") if reports else "")
    symbol, call = reported.get("crash_symbol"), reported.get("crash_call")
    inside = f"{symbol} of {library}" if symbol and library else symbol or library or call
    where = lines[0].get("where") if lines else ""
    words = (f" in {inside}" if inside else "") + (f", called at {where}" if where else "")
    changes: dict[str, Any] = {"error": finding.error + words}
    if where and lines[0].get("own"):
        changes["at"] = where
    if inside and number in _IN_NATIVE_CODE:
        changes["hint"] = hint_for(library or symbol or call).format(name=library or inside)
    if reported.line is not finding.began:
        changes["evidence"] = (*finding.evidence[:2], reported.line)
    return changes


def hint_for(name: str) -> str:
    """Return the advice for a crash in a library or a function."""
    return next(row.hint for row in _CRASHED if row.find(name))


def ended_process(event: LogEvent) -> str:
    """Return the process that an event reports as ended; empty when it names none."""
    local_rank = event.get("local_rank")
    if local_rank:
        return f"local rank {local_rank}{f' on {event.who.host}' if event.who.host else ''}"
    return str(event.who)


def ended_from_outside(case: Case) -> Iterator[LogFinding]:
    """Report SIGTERM, SIGHUP or SIGINT that reached a launcher: somebody ended the job."""
    for number, found in _killed(case).items():
        reported = [
            e for e in found if e.kind in ("signal_received", "killed_line", "loader_killed")
        ]
        # The other ranks of its table torchrun has ended itself.
        firsts = [e for e in reported if any(e in rows for rows in first_in_tables(case))]
        reported = [e for e in reported if e in firsts or not _IN_A_TABLE.search(e.line.text)]
        if number not in _SENT_FROM_OUTSIDE or not reported:
            continue
        row = RULE_ROWS["signal.hangup"] if number == signal.SIGHUP else _FROM_OUTSIDE
        whom = "a rank" if len(firsts) == len(reported) else "its launcher"
        yield found_by(case, row, reported, {"name": signal.Signals(number).name, "whom": whom})


def first_in_tables(case: Case) -> list[list[LogEvent]]:
    """Return the rows of the first failure in each of torchrun's tables."""
    rows = case.of("table_row", "exit_code", "signal_received")
    return [
        [
            row
            for row in rows
            if row.line.path == table.line.path
            and row.who == table.who
            and 0 < row.line.order - table.line.order <= _ROWS_OF_A_RANK
        ]
        for table in case.of("root_cause_table")
    ]


def meaning_of(number: int) -> str:
    """Return the cause word for an end by this signal."""
    if number in _SENT_FROM_OUTSIDE:
        return "hangup" if number == signal.SIGHUP else "cancelled"
    return _ROWS.get(number, _OTHER).cause


def interrupted(case: Case) -> Iterator[LogFinding]:
    """Report Ctrl-C that reached a script without a launcher."""
    found = [e for e in case.of("exception") if e.get("type") == "KeyboardInterrupt"]
    found = [e for e in found if e.get("uncaught")]
    # A terminal shows the key itself; a job that continued was not ended by it.
    good = case.last_good
    found += [e for e in case.of("ctrl_c") if e.line.order > good.get(e.line.path, 0)]
    if found:
        first = case.earliest(found)
        who = str(first.who) or "the script"
        if "terminated" in first.get("message"):  # a server's handler of SIGTERM raises it
            names = {"name": "SIGTERM", "whom": "its launcher"}
            yield found_by(case, _FROM_OUTSIDE, found, names, confidence=LOW)
            return
        yield found_by(case, RULE_ROWS["signal.interrupted"], found, {"who": who})
